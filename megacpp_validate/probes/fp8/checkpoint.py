"""Recomputation of FP8 blocks: by Transformer Engine's checkpoint it changes nothing, and nobody else's is let in.

The same steps are taken with a checkpoint and without one: several micro-batches a step, weights that move. Outputs and
gradients then have the same bits, and each amax is taken in once: under delayed scaling the second forward pass takes
the scales of the first ("to ensure both forward steps are numerically same", `pytorch/quantization.py`, 2.12 to 2.20).
torch's checkpoint does not keep scales; what it really makes of an FP8 block is looked at, and that the bridge refuses
it in the forward pass, before anything is trained with it. A scope inside a checkpoint is refused too: tests/bridge
holds that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..bench import Bench, different
from ..observe import Enter
from ..trial import run_pass
from .stacks import Batch, Block, Kind, Seen, new_batch, new_stack, same, shape_of, train_step

WAYS: Final = {"reentrant": True, "not-reentrant": False}
FACTORS: Final = ((1.0, 3.0), (2.0, 0.5))  # of the micro-batches of each step: another amax each
DEPTH: Final = 2
COLUMNS: Final = {"forward": {"input": 0, "weight": 1}, "backward": {"gradient": 0}}


def probe(bench: Bench) -> None:
    """Whole blocks, who owns the recomputation, and high precision inside of it."""
    recipes = {recipe: bench.low_precision(recipe) for recipe in bench.require_recipes()}
    for name, enter in {"bf16": nullcontext, **recipes}.items():
        delayed = name == "delayed"
        with bench.scope(f"blocks.{name}.in-turn"):
            _check_blocks(bench, enter, delayed=delayed)
        if delayed:  # the others keep nothing of a pass: backward passes after all forward ones, as in a pipeline
            with bench.scope(f"blocks.{name}.late"):
                _check_blocks(bench, enter, delayed=True, late=True)
        with bench.scope(f"blocks.{name}.attention"):
            _check_blocks(bench, enter, delayed=delayed, kind="attention")
    for recipe, enter in recipes.items():
        with bench.scope(f"owner.{recipe}"):
            _check_owner(bench, enter, delayed=recipe == "delayed")
        with bench.scope(f"high-precision.{recipe}"):
            _check_high_precision(bench, enter)
        if recipe == "delayed":
            with bench.scope("order"):
                _check_order(bench, enter)


# --- blocks -----------------------------------------------------------------------------------------------


def _check_blocks(bench: Bench, enter: Enter, *, delayed: bool, late: bool = False, kind: Kind = "plain") -> None:
    like = new_stack(bench, DEPTH, kind=kind)
    # A library's attention may sum in another order each time. That is not judged; moved weights would spread it.
    steps = FACTORS if kind == "plain" else FACTORS[:1]
    batches = [[new_batch(bench, factor) for factor in factors] for factors in steps]
    passes = sum(map(len, batches))

    def run(around: Callable[[Any, Any], Any]) -> list[Seen]:
        stack = new_stack(bench, DEPTH, like=like, kind=kind)
        torch.manual_seed(bench.order.seed)
        bench.bridge("layer_watch").watch_layers(stack)
        return [train_step(bench, stack, enter, given, around=around, late=late, delayed=delayed) for given in batches]

    plain, again = run(_with_dropout), run(_with_dropout)
    unsteady = {name for one, two in zip(plain, again, strict=True) for name in different(one.grads, two.grads)}
    if kind == "plain":
        bench.check("steady", not unsteady, f"without a checkpoint, twice: {_said(sorted(unsteady))}")
    for way, reentrant in WAYS.items():
        calls: list[Any] = []
        try:
            seen = run(partial(_recomputed, bench, reentrant, calls))
        except Exception as fault:  # of the vendor's second pass: the other way is looked at all the same
            bench.check(f"{way}.grad", False, f"{type(fault).__name__}: {fault}"[:600])
            continue
        pairs = list(enumerate(zip(plain, seen, strict=True)))
        outs = [f"step {step}" for step, (one, two) in pairs if not all(map(same, one.outs, two.outs))]
        bench.check(f"{way}.forward", not outs, _said(outs))
        found = [(name, step) for step, (one, two) in pairs for name in different(one.grads, two.grads)]
        wrong = [f"{name} in step {step}" for name, step in found if name not in unsteady]
        left_out = f"; not steady by themselves: {', '.join(sorted(unsteady)) or 'none'}"
        bench.check(f"{way}.grad", not wrong and not unsteady >= plain[0].grads.keys(), _said(wrong) + left_out)
        wanted = 2 * DEPTH * passes
        bench.check(f"{way}.run-again", len(calls) == wanted, f"blocks ran {len(calls)} times, wanted {wanted}")
        if delayed:
            _check_history(bench, way, plain[-1].states, seen[-1].states, passes)


def _check_history(bench: Bench, way: str, plain: dict[str, Any], seen: dict[str, Any], calls: int) -> None:
    """Each call's amax once, in its order.

    Transformer Engine lets histories move on once more at the end of a second forward pass, with nothing new in them.
    Such rows do not count: they drop no amax here, and leave the scales as they are.
    """
    wrong = [f"{name}: another scale" for name in different(plain, seen) if name.endswith("scale")]
    for name in (name for name in plain if name.endswith("history")):
        for tensor, column in COLUMNS[name.split(".")[-2]].items():
            amaxes, kept = ([value for value in one[name][:, column].tolist() if value] for one in (seen, plain))
            if amaxes != kept or len(amaxes) != calls:
                wrong.append(f"{tensor} of {name}: {len(amaxes)} amaxes of {calls} calls, {len(kept)} without")
    bench.check(f"{way}.amax-once", not wrong, "; ".join(wrong[:3]) or f"{calls} amaxes of {calls} calls everywhere")


def _with_dropout(block: Any, rows: Any) -> Any:
    """The second pass must draw what the first one drew."""
    return torch.nn.functional.dropout(block(rows), 0.1)


def _recomputed(bench: Bench, reentrant: bool, calls: list[Any], block: Any, rows: Any) -> Any:
    def counted(given: Any) -> Any:
        calls.append(block)
        return _with_dropout(block, given)

    return bench.bridge("layer_watch").recompute(counted, rows, use_reentrant=reentrant)


def _said(names: list[str]) -> str:
    return f"{len(names)} with other bits: {', '.join(names[:3])}" if names else "the same bits"


# --- the owner, and the order ---------------------------------------------------------------------------------


def _check_owner(bench: Bench, enter: Enter, *, delayed: bool) -> None:
    """A watched layer refuses torch's checkpoint; without the watch, torch's checkpoint gives something else."""
    for way, reentrant in WAYS.items():
        theirs = partial(torch_checkpoint, use_reentrant=reentrant)
        refused = bench.bridge("fp8_scope").WrongRecomputeOwner
        bench.refuses(f"torch.{way}", refused, partial(_step, bench, enter, theirs, watched=True))
        plain = _step(bench, enter, None, delayed=delayed)
        try:
            seen = _step(bench, enter, theirs, delayed=delayed)
        except Exception as fault:
            bench.check(f"torch.{way}.reason", True, f"{type(fault).__name__}: {fault}"[:300])
            continue
        wrong = different({**plain.grads, **plain.states}, {**seen.grads, **seen.states})
        said = f"no error, other gradients or state: {', '.join(wrong[:3])}" if wrong else "nothing is left to refuse"
        bench.check(f"torch.{way}.reason", bool(wrong), said)


def _step(
    bench: Bench, enter: Enter, call: Callable[..., Any] | None, *, watched: bool = False, delayed: bool = False
) -> Seen:
    """One step of a fresh block with weights that are always the same, and a checkpoint around it."""
    block, batch = _fixed(bench)
    stack = torch.nn.ModuleList([block])
    if watched:
        bench.bridge("layer_watch").watch_layers(stack)
    return train_step(bench, stack, enter, [batch], around=call, delayed=delayed)


def _fixed(bench: Bench) -> tuple[Any, Batch]:
    """A fresh block and its batch, with the same values each time."""
    block, shape = Block(bench, shape_of(bench)), shape_of(bench)
    made = torch.Generator(bench.device).manual_seed(bench.order.seed)

    def draw(*size: int) -> Any:
        return torch.randn(*size, generator=made, device=bench.device)

    with torch.no_grad():
        for weight in (one for one in block.parameters() if one.dim() > 1):
            weight.copy_(draw(*weight.shape) * weight.shape[1] ** -0.5)
    rows, gradient = draw(2, shape.rows, shape.hidden).to(torch.bfloat16)
    return block, (rows.clone(), gradient.clone())


def _check_order(bench: Bench, enter: Enter) -> None:
    """Second passes in another order than the first ones take each other's scales: refused, and seen to be wrong."""
    error, run = bench.bridge("layer_watch").RecomputeOutOfOrder, partial(_two_passes, bench, enter)
    plain = run(lambda block, rows: block(rows))
    for way, reentrant in WAYS.items():
        ours = partial(bench.bridge("layer_watch").recompute, use_reentrant=reentrant)
        theirs = partial(bench.bridge("fp8_scope").te_recompute, use_reentrant=reentrant)
        bench.refuses(f"{way}.one-backward-for-two", error, partial(run, ours))
        bench.refuses(f"{way}.never-run-again", error, partial(run, ours, drops_the_first=True))
        wrong = different(plain, run(theirs))
        bench.check(f"{way}.reason", bool(wrong), f"one backward pass for two, unguarded: {_said(wrong)}")


def _two_passes(
    bench: Bench, enter: Enter, call: Callable[..., Any], *, drops_the_first: bool = False
) -> dict[str, Any]:
    """Gradients of one backward pass for two passes of a block, whose scales differ; or for the second one alone."""
    block, (rows, gradient) = _fixed(bench)
    with enter():
        out = block(rows)
    out.backward(gradient)
    block.zero_grad(set_to_none=True)
    # Rows whose amax behind a norm is another, where a factor on all of them is divided out again. The factor is no
    # power of two: scales that are one apart round alike.
    loud, outs = rows.clone(), []
    loud[:, 0] *= 11.0
    with _flags_kept():
        for given in (loud, rows):
            with enter():
                outs.append(call(block, given.requires_grad_()))
        kept = outs[1:] if drops_the_first else outs
        torch.autograd.backward(kept, [gradient] * len(kept))
    return {name: weight.grad for name, weight in block.named_parameters()}


@contextmanager
def _flags_kept() -> Iterator[None]:
    """Transformer Engine notes in each first pass what the second one takes: a refused one leaves its note behind.

    The notes are one list for the whole process, taken in turn: every later second pass would take the one before its
    own (`activation_recompute_forward` in `pytorch/distributed.py`, 2.12 to 2.20).
    """
    module = sys.modules.get("transformer_engine.pytorch.distributed")
    notes = getattr(getattr(module, "activation_recompute_forward", None), "_is_first_fp8_module", [])
    kept = list(notes)
    try:
        yield
    finally:
        notes[:] = kept


# --- high precision inside of it --------------------------------------------------------------------------


def _check_high_precision(bench: Bench, enter: Enter) -> None:
    """A layer that stays in high precision inside a recomputed block, its backward pass begun inside the low scope.

    The second pass then runs in a thread of autograd's, beside the scope that the first thread holds.
    """
    scope = bench.bridge("fp8_scope")

    def run(recompute: Callable[..., Any]) -> dict[str, Any]:
        block, (rows, gradient) = _fixed(bench)

        def mixed(given: Any) -> Any:
            between = block.up(given)
            with scope.high_precision("a projection that stays"):
                between = block.down(between)
            return block.mlp(between)

        leaves = {"rows": rows.requires_grad_(), **dict(block.named_parameters())}
        with enter():
            return run_pass(lambda: recompute(mixed, rows), leaves, gradient)

    plain = run(lambda call, rows: call(rows))
    for way, reentrant in WAYS.items():
        try:
            wrong = different(plain, run(partial(scope.te_recompute, use_reentrant=reentrant)))
        except Exception as fault:
            bench.check(way, False, f"{type(fault).__name__}: {fault}"[:600])
        else:
            bench.check(way, not wrong, _said(wrong))
