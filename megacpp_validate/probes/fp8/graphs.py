"""CUDA graphs of FP8 blocks: their replays train as the same blocks do without, evaluation in between, to the bit.

Two stacks with the same weights take the same steps, one eager, one by graphs captured through the bridge. Both run
the same kernels on the same numbers, so outputs, gradients, weights, amax histories and scales have the same bits after
each step (Transformer Engine holds its graphs to that: `assert_all_equal` in `tests/pytorch/test_cuda_graphs.py`).
There is no attention in them: it is told of the capture (`cuda_graph=` in `cpp_extensions/fused_attn.py`), and has
other bits from the first step on (seen with 2.20.2).

Inputs and weights change from step to step: what is stale in a graph shows. In between the stacks are evaluated, on
fewer rows, in the recipe and in BF16: a first replay after that is known to crash in the field.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final

import torch

from ..bench import Bench
from ..observe import Enter, graph_nodes
from .stacks import Batch, Seen, check_same_bits, evaluate, new_batch, new_stack, shape_of, train_step

STEPS: Final = 24
EVALUATED_LARGER: Final = 50.0
CACHED_STEPS: Final = 12
DEPTH: Final = 2
MICRO_BATCHES: Final = 3
WHAT: Final = ("forward", "grad", "eval-fp8", "eval-bf16")
DELAYED: Final = ("history", "scale")
EVALUATED: Final = {3: "fp8", 4: "bf16", 9: "bf16", 10: "fp8", 15: "fp8"}  # after which steps, and in what


def probe(bench: Bench) -> None:
    """Each recipe, with weights cast at each call, and once a step under gradient accumulation."""
    for recipe in bench.require_recipes():
        enter = scope_of(bench, recipe)
        for name, cached in (("", False), (".cached", True)):
            with bench.scope(f"graphs.{recipe}{name}"):
                _check_twins(bench, enter, delayed=recipe == "delayed", cached=cached)
    if "delayed" in bench.recipes:
        _check_no_trace(bench, scope_of(bench, "delayed"))


def scope_of(bench: Bench, recipe: str) -> Enter:
    """The scope of a recipe, with the group of all ranks, as capturing takes it."""
    return bench.low_precision(recipe, amax_reduction_group=None)


def _check_twins(bench: Bench, enter: Enter, *, delayed: bool, cached: bool) -> None:
    plain = new_stack(bench, DEPTH)
    graphed = new_stack(bench, DEPTH, like=plain)
    steps = CACHED_STEPS if cached else STEPS
    steps = min(steps, 6) if bench.quick else steps
    batches = [[_batch(bench, step) for _ in range(MICRO_BATCHES if cached else 1)] for step in range(steps)]
    eager = _train(bench, plain, enter, batches, delayed=delayed, cached=cached)
    shape, made = shape_of(bench), {"dtype": torch.bfloat16, "device": bench.device}
    samples = [(torch.ones(shape.rows, shape.hidden, **made, requires_grad=True),) for _ in graphed]
    capture = bench.bridge("graph_capture").capture_graphs
    choice = capture(list(graphed), samples, enter(), warmup=3, cache_weights=cached)
    replayed = _train(bench, graphed, enter, batches, delayed=delayed, cached=cached)
    for what in (*WHAT, *(DELAYED if delayed else ())):
        check_same_bits(bench, what, eager, replayed, what)
    nodes = _nodes_of_a_pass(bench, graphed, enter, cached=cached)
    seen = any(name.startswith("transformer_engine.") and name.endswith("Graphed") for name in nodes)
    said = f"claimed {choice.observed}, in the graph of the output: {', '.join(nodes[:6]) or 'nothing'}"
    bench.check("replayed", choice.observed == "te" and seen, said)


def _train(
    bench: Bench, stack: Any, enter: Enter, batches: list[list[Batch]], *, delayed: bool, cached: bool
) -> list[Seen]:
    """Every step of one stack, with its evaluations; then the other's: the state of both is one process's."""
    kept = []
    for step, given in enumerate(batches):
        seen = train_step(bench, stack, enter, given, cached=cached, delayed=delayed)
        if kind := EVALUATED.get(step):
            rows = given[0][0][: len(given[0][0]) // 2]
            seen[f"eval-{kind}"] = {kind: evaluate(stack, enter if kind == "fp8" else nullcontext, rows)}
        for kind in DELAYED:
            seen[kind] = {name: value for name, value in seen["state"].items() if name.endswith(kind)}
        kept.append(seen)
    return kept


def _check_no_trace(bench: Bench, enter: Enter) -> None:
    """Evaluations on data that is much larger, between the steps: training goes as it does without them."""
    like, kept = new_stack(bench, DEPTH), list[list[Seen]]()
    batches = [[_batch(bench, step)] for step in range(4)]
    for evaluates in (False, True):
        stack, steps = new_stack(bench, DEPTH, like=like), []
        for given in batches:
            if evaluates:
                evaluate(stack, enter, given[0][0] * EVALUATED_LARGER)
            steps.append(train_step(bench, stack, enter, given, delayed=True))
        kept.append(steps)
    check_same_bits(bench, "graphs.delayed.evaluation-leaves-no-trace", kept[0], kept[1], "forward", "grad", "state")


def _batch(bench: Bench, step: int) -> Batch:
    """With another amax each step, the least in the first: so every scale moves."""
    return new_batch(bench, 2.0 ** (step * 2 % 5 - 2))


def _nodes_of_a_pass(bench: Bench, stack: Any, enter: Enter, *, cached: bool) -> tuple[str, ...]:
    """The autograd graph of one training pass: each block must be there by its replay."""
    out = _batch(bench, 0)[0].requires_grad_()
    with enter():
        for block in stack:
            out = block(out, **({"is_first_microbatch": True} if cached else {}))
    return graph_nodes(out)
