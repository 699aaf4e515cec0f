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

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch

from ..bench import Bench
from ..memory import Enter
from ..observe import graph_nodes
from .stacks import Seen, delayed_states, different, evaluate, new_stack, same, scope_of, shape_of, train_step

STEPS: Final = 24
EVALUATED_LARGER: Final = 50.0
CACHED_STEPS: Final = 12
DEPTH: Final = 2
MICRO_BATCHES: Final = 3
EVALUATED: Final = {3: "fp8", 4: "bf16", 9: "bf16", 10: "fp8", 15: "fp8"}  # after which steps, and in what


def probe(bench: Bench) -> None:
    """Each recipe, with weights cast at each call, and once a step under gradient accumulation; then misuse."""
    for recipe in bench.require_recipes():
        enter = scope_of(bench, recipe)
        for name, cached in (("", False), (".cached", True)):
            with bench.scope(f"graphs.{recipe}{name}"):
                _check_twins(bench, enter, delayed=recipe == "delayed", cached=cached)
    if "delayed" in bench.recipes:
        _check_no_trace(bench, scope_of(bench, "delayed"))
    with bench.scope("graphs.misuse"):
        _check_misuse(bench)


def _check_twins(bench: Bench, enter: Enter, *, delayed: bool, cached: bool) -> None:
    plain = new_stack(bench, DEPTH)
    graphed = new_stack(bench, DEPTH, like=plain)
    steps = CACHED_STEPS if cached else STEPS
    steps = min(steps, 6) if bench.quick else steps
    batches = [[_batch(bench, step) for _ in range(MICRO_BATCHES if cached else 1)] for step in range(steps)]
    eager = _train(bench, plain, enter, batches, delayed=delayed, cached=cached)
    choice = _capture(bench, graphed, enter(), cached=cached)
    replayed = _train(bench, graphed, enter, batches, delayed=delayed, cached=cached)
    _compare(bench, eager, replayed, delayed=delayed)
    if delayed:
        pairs = list(itertools.pairwise(eager))
        still = [
            name for name in eager[0].states if all(same(one.states[name], two.states[name]) for one, two in pairs)
        ]
        bench.check("amax-moves", not still, f"never moved: {', '.join(still)}" if still else "histories and scales do")
    nodes = _nodes_of_a_pass(bench, graphed, enter, cached=cached)
    seen = any(name.startswith("transformer_engine.") and name.endswith("Graphed") for name in nodes)
    said = f"claimed {choice.observed}, in the graph of the output: {', '.join(nodes[:6]) or 'nothing'}"
    bench.check("replayed", choice.observed == "te" and seen, said)


def _train(
    bench: Bench, stack: Any, enter: Enter, batches: list[list[tuple[Any, Any]]], *, delayed: bool, cached: bool
) -> list[Seen]:
    """Every step of one stack, with its evaluations; then the other's: the state of both is one process's."""
    kept = []
    for step, given in enumerate(batches):
        seen = train_step(stack, enter, given, told=cached)
        seen.states = delayed_states(bench, stack) if delayed else {}
        if step in EVALUATED:
            around = enter if EVALUATED[step] == "fp8" else nullcontext
            seen.evaluated = {EVALUATED[step]: evaluate(stack, around, given[0][0][: len(given[0][0]) // 2])}
        kept.append(seen)
    return kept


def _compare(bench: Bench, eager: list[Seen], replayed: list[Seen], *, delayed: bool) -> None:
    first: dict[str, str] = {}
    for step, (some, other) in enumerate(zip(eager, replayed, strict=True)):
        for what, pair in {
            "forward": [{f"micro-batch {index}": out for index, out in enumerate(seen.outs)} for seen in (some, other)],
            "grad": [some.grads, other.grads],
            "history": [_only(some.states, "history"), _only(other.states, "history")],
            "scale": [_only(some.states, "scale"), _only(other.states, "scale")],
            "eval-fp8": [_only(some.evaluated, "fp8"), _only(other.evaluated, "fp8")],
            "eval-bf16": [_only(some.evaluated, "bf16"), _only(other.evaluated, "bf16")],
        }.items():
            if names := different(*pair):
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                said = f"other bits than without a graph, first in step {step}: {', '.join(names[:3])}{more}"
                first.setdefault(what, said)
    for what in ("forward", "grad", *(("history", "scale") if delayed else ()), "eval-fp8", "eval-bf16"):
        bench.check(what, what not in first, first.get(what, f"the same bits in each of {len(eager)} steps"))
    stuck = [step for step, (one, two) in enumerate(itertools.pairwise(replayed)) if same(one.outs[0], two.outs[0])]
    bench.check("outputs-move", not stuck, f"steps with the output of the step before: {len(stuck)}")


def _check_no_trace(bench: Bench, enter: Enter) -> None:
    """Evaluations on data that is much larger, between the steps: training goes as it does without them."""
    like, kept = new_stack(bench, DEPTH), []
    batches = [[_batch(bench, step)] for step in range(4)]
    for evaluates in (False, True):
        stack, steps = new_stack(bench, DEPTH, like=like), []
        for given in batches:
            if evaluates:
                evaluate(stack, enter, given[0][0] * EVALUATED_LARGER)
            seen = train_step(stack, enter, given)
            steps.append({"output": seen.outs[0], **seen.grads, **delayed_states(bench, stack)})
            if evaluates:
                evaluate(stack, enter, given[0][0] * EVALUATED_LARGER)
        kept.append(steps)
    wrong = [f"step {step}: {name}" for step, pair in enumerate(zip(*kept, strict=True)) for name in different(*pair)]
    said = f"training is another than without evaluations: {', '.join(wrong[:3])}" if wrong else "no trace of them"
    bench.check("graphs.delayed.evaluation-leaves-no-trace", not wrong, said)


def _only(named: dict[str, Any], end: str) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name.endswith(end)}


def _batch(bench: Bench, step: int) -> tuple[Any, Any]:
    """Rows and gradient with another amax each step, the least in the first: so every scale moves."""
    shape = shape_of(bench)
    factor = 2.0 ** (step * 2 % 5 - 2)
    rows, gradient = (bench.randn(shape.rows, shape.hidden, dtype=torch.bfloat16) for _ in range(2))
    return rows * factor, gradient * factor


def _capture(bench: Bench, stack: Any, scope: Any, *, cached: bool = False, warmup: int = 3) -> Any:
    shape = shape_of(bench)
    samples = [
        (torch.ones(shape.rows, shape.hidden, dtype=torch.bfloat16, device=bench.device, requires_grad=True),)
        for _ in stack
    ]
    return bench.bridge("graph_capture").capture_graphs(
        list(stack), samples, scope, warmup=warmup, cache_weights=cached
    )


def _nodes_of_a_pass(bench: Bench, stack: Any, enter: Enter, *, cached: bool) -> tuple[str, ...]:
    """The autograd graph of one training pass: each block must be there by its replay."""
    out = _batch(bench, 0)[0].requires_grad_()
    with enter():
        for block in stack:
            out = block(out, **({"is_first_microbatch": True} if cached else {}))
    return graph_nodes(out)


def _check_misuse(bench: Bench) -> None:
    """What Transformer Engine replays without a word, and the bridge refuses."""
    recipes = bench.recipes
    if not recipes:
        return
    enter = scope_of(bench, recipes[0])
    bridge = bench.bridge("graph_capture")
    rows = _batch(bench, 0)[0]

    def one(name: str, error: Any, call: Callable[[Any], Any]) -> None:
        stack = new_stack(bench, 1)
        _capture(bench, stack, enter(), warmup=1)
        bench.refuses(name, error, lambda: call(stack))

    def in_the_scope(stack: Any, given: Any, around: Enter = enter) -> None:
        with around():
            stack[0](given)

    def with_other_weights(stack: Any) -> None:
        old = stack[0].down.weight
        stack[0].down.weight = torch.nn.Parameter(old.detach().clone())
        in_the_scope(stack, rows)

    one("outside-of-the-scope", bridge.GraphMisused, lambda stack: stack[0](rows))
    one("other-shape", bench.bridge("errors").WrongShape, lambda stack: in_the_scope(stack, rows[:1]))
    one("other-weights", bridge.GraphMisused, with_other_weights)
    one("captured-twice", bridge.GraphMisused, lambda stack: _capture(bench, stack, enter()))
    if len(recipes) > 1:
        other = scope_of(bench, recipes[1])
        one("other-recipe", bridge.GraphMisused, lambda stack: in_the_scope(stack, rows, other))
        one("evaluated-in-another-recipe", bridge.GraphMisused, lambda stack: evaluate(stack, other, rows))
        stack = new_stack(bench, 1)
        _capture(bench, stack, enter(), warmup=1)
        state = stack[0].up.fp8_meta.get("scaling_fwd")
        with torch.no_grad(), other():  # a layer of the block by itself
            stack[0].up(rows)
        if stack[0].up.fp8_meta.get("scaling_fwd") is not state:
            bench.refuses("state-made-anew", bridge.GraphMisused, lambda: in_the_scope(stack, rows))
        else:
            bench.check("state-made-anew", True, "another recipe left the scales of this one where they were")
