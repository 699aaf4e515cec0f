"""Recomputation of FP8 blocks: by Transformer Engine's checkpoint it changes nothing, and nobody else's is let in.

The same steps are taken with a checkpoint and without one: several micro-batches a step, weights that move. Outputs and
gradients then have the same bits (`probes.fp8_linear` says why), and each amax is taken in once. torch's checkpoint
does not keep scales; what it really makes of an FP8 block is looked at, and that the bridge refuses it in the forward
pass, before anything is trained with it.
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
from ..fp8_linear import WAYS, check_recompute
from ..observe import Enter
from .stacks import Batch, Block, Kind, Seen, delayed_states, new_batch, new_stack, same, shape_of, train_step

FACTORS: Final = ((1.0, 3.0), (2.0, 0.5))  # of the micro-batches of each step: another amax each
DEPTH: Final = 2
COLUMNS: Final = {"forward": {"input": 0, "weight": 1}, "backward": {"gradient": 0}}


def probe(bench: Bench) -> None:
    """Single layers, whole blocks, who owns the recomputation, and high precision inside of it."""
    recipes = {recipe: bench.low_precision(recipe) for recipe in bench.require_recipes()}
    check_recompute(bench)
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
    batches = [_batches(bench, factors) for factors in (FACTORS if kind == "plain" else FACTORS[:1])]
    passes = sum(map(len, batches))

    def run(around: Callable[[Any, Any], Any]) -> list[Seen]:
        stack = new_stack(bench, DEPTH, like=like, kind=kind)
        torch.manual_seed(bench.order.seed)
        bench.bridge("layer_watch").watch_layers(stack)
        kept = []
        for given in batches:
            seen = train_step(stack, enter, given, around=around, late=late)
            seen.states = delayed_states(bench, stack) if delayed else {}
            kept.append(seen)
        return kept

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
    """Each call's amax once, in its order; rows in which there was none do not count (see `probes.fp8_linear`)."""
    wrong = []
    for name, wanted in plain.items():
        if not name.endswith("history"):
            wrong += [] if same(seen[name], wanted) else [f"{name}: another scale"]
            continue
        for tensor, column in COLUMNS[name.split(".")[-2]].items():
            amaxes, kept = ([value for value in one[:, column].tolist() if value] for one in (seen[name], wanted))
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


def _batches(bench: Bench, factors: tuple[float, ...]) -> list[Batch]:
    return [new_batch(bench, factor) for factor in factors]


# --- the owner --------------------------------------------------------------------------------------------


def _check_owner(bench: Bench, enter: Enter, *, delayed: bool) -> None:
    """torch's checkpoint is refused, for a reason; a scope inside a checkpoint is refused as well."""
    error = bench.bridge("fp8_scope").WrongRecomputeOwner
    for way, reentrant in WAYS.items():
        theirs = partial(torch_checkpoint, use_reentrant=reentrant)
        ours = partial(bench.bridge("fp8_scope").te_recompute, use_reentrant=reentrant)
        bench.refuses(f"torch.{way}", error, partial(_step, bench, enter, theirs, watched=True))
        bench.refuses(f"torch.{way}.scope-inside", error, partial(_step_with_scope_inside, bench, enter, theirs))
        bench.refuses(f"te.{way}.scope-inside", error, partial(_step_with_scope_inside, bench, enter, ours))
        wrong = _what_torch_makes_of_it(bench, enter, theirs, delayed=delayed)
        bench.check(f"torch.{way}.reason", bool(wrong), wrong or "right, bits and amaxes: nothing is left to refuse")


def _step(
    bench: Bench, enter: Enter, call: Callable[..., Any] | None, *, watched: bool = False, delayed: bool = False
) -> Seen:
    """One step of a fresh block with weights that are always the same, and a checkpoint around it."""
    stack = torch.nn.ModuleList([_fixed_block(bench)])
    if watched:
        bench.bridge("layer_watch").watch_layers(stack)
    seen = train_step(stack, enter, [_fixed_batch(bench)], around=call)
    seen.states = delayed_states(bench, stack) if delayed else {}
    return seen


def _step_with_scope_inside(bench: Bench, enter: Enter, call: Callable[..., Any]) -> None:
    block, (rows, gradient) = _fixed_block(bench), _fixed_batch(bench)

    def scoped(given: Any) -> Any:
        with enter():
            return block(given)

    with _flags_kept():
        call(scoped, rows.requires_grad_()).backward(gradient)


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


def _what_torch_makes_of_it(bench: Bench, enter: Enter, call: Callable[..., Any], *, delayed: bool) -> str:
    """What is wrong of a step with torch's checkpoint, the bridge's look taken away; empty where nothing is."""
    plain = _step(bench, enter, None, delayed=delayed)
    try:
        seen = _step(bench, enter, call, delayed=delayed)
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"[:300]
    wrong = different({**plain.grads, **plain.states}, {**seen.grads, **seen.states})
    return f"no error, other gradients or state: {', '.join(wrong[:3])}" if wrong else ""


def _fixed_block(bench: Bench) -> Any:
    block = Block(bench, shape_of(bench))
    made = torch.Generator(bench.device).manual_seed(bench.order.seed)
    with torch.no_grad():
        for weight in (one for one in block.parameters() if one.dim() > 1):
            drawn = torch.randn(weight.shape, generator=made, device=bench.device)
            weight.copy_(drawn * weight.shape[1] ** -0.5)
    return block


def _fixed_batch(bench: Bench) -> Batch:
    shape = shape_of(bench)
    made = torch.Generator(bench.device).manual_seed(bench.order.seed + 1)
    drawn = torch.randn(2, shape.rows, shape.hidden, generator=made, device=bench.device).to(torch.bfloat16)
    return drawn[0].clone(), drawn[1].clone()


# --- the order --------------------------------------------------------------------------------------------


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
    block, (rows, gradient) = _fixed_block(bench), _fixed_batch(bench)
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


# --- high precision inside of it --------------------------------------------------------------------------


def _check_high_precision(bench: Bench, enter: Enter) -> None:
    """A layer that stays in high precision inside a recomputed block, its backward pass begun inside the low scope.

    The second pass then runs in a thread of autograd's, beside the scope that the first thread holds.
    """
    scope = bench.bridge("fp8_scope")

    def run(reentrant: bool | None) -> dict[str, Any]:
        block, (rows, gradient) = _fixed_block(bench), _fixed_batch(bench)
        leaf = rows.requires_grad_()

        def mixed(given: Any) -> Any:
            between = block.up(given)
            with scope.high_precision("a projection that stays"):
                between = block.down(between)
            return block.mlp(between)

        with enter():
            out = mixed(leaf) if reentrant is None else scope.te_recompute(mixed, leaf, use_reentrant=reentrant)
            out.backward(gradient)
        return {"out": out.detach(), "rows": leaf.grad, **{name: one.grad for name, one in block.named_parameters()}}

    plain = run(None)
    for way, reentrant in WAYS.items():
        try:
            wrong = different(plain, run(reentrant))
        except Exception as fault:
            bench.check(way, False, f"{type(fault).__name__}: {fault}"[:600])
        else:
            bench.check(way, not wrong, _said(wrong))
