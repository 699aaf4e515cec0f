"""Recomputation of FP8 blocks: by Transformer Engine's checkpoint it changes nothing, and nobody else's is let in.

The same steps are taken with a checkpoint and without one: several micro-batches a step, weights that move. Outputs and
gradients then have the same bits (`probes.recompute` says why), and each amax is taken in once. torch's checkpoint does
not keep scales; what it really makes of an FP8 block is looked at, and that the bridge refuses it in the forward pass,
before anything is trained with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Literal

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..bench import Bench
from ..fp8_linear import WAYS, check_recompute
from ..memory import Enter
from .stacks import Block, Kind, Seen, delayed_states, different, new_stack, same, scope_of, shape_of, train_step

FACTORS: Final = ((1.0, 3.0), (2.0, 0.5))  # of the micro-batches of each step: another amax each
DEPTH: Final = 2
COLUMNS: Final = {"forward": {"input": 0, "weight": 1}, "backward": {"gradient": 0}}
Order = Literal["in turn", "late"]  # each backward pass after its forward pass, or after all of them, as in a pipeline


def probe(bench: Bench) -> None:
    """Single layers, whole blocks, who owns the recomputation, and high precision inside of it."""
    alone = bench.bridge("fp8_scope").SINGLE_OWNER
    recipes = {recipe: scope_of(bench, recipe, alone) for recipe in bench.require_recipes()}
    check_recompute(bench, recipes)
    for name, enter in {"bf16": nullcontext, **recipes}.items():
        for order in ("in turn", "late") if name == "delayed" else ("in turn",):  # the others keep nothing of a pass
            with bench.scope(f"blocks.{name}.{order.replace(' ', '-')}"):
                _check_blocks(bench, enter, delayed=name == "delayed", order=order)
        with bench.scope(f"blocks.{name}.attention"):
            _check_blocks(bench, enter, delayed=name == "delayed", order="in turn", kind="attention")
    for recipe, enter in recipes.items():
        with bench.scope(f"owner.{recipe}"):
            _check_owner(bench, enter, delayed=recipe == "delayed")
        with bench.scope(f"high-precision.{recipe}"):
            _check_high_precision(bench, enter)
        if recipe == "delayed":
            with bench.scope("order"):
                _check_order(bench, enter)


# --- blocks -----------------------------------------------------------------------------------------------


def _check_blocks(bench: Bench, enter: Enter, *, delayed: bool, order: Order, kind: Kind = "plain") -> None:
    like = new_stack(bench, DEPTH, kind=kind)
    # A library's attention may sum in another order each time. That is not judged; moved weights would spread it.
    batches = [_batch(bench, factors) for factors in (FACTORS if kind == "plain" else FACTORS[:1])]
    passes = sum(map(len, batches))

    def run(around: Callable[[Any, Any], Any]) -> list[Seen]:
        stack = new_stack(bench, DEPTH, like=like, kind=kind)
        torch.manual_seed(bench.order.seed)
        bench.bridge("layer_watch").watch_layers(stack)
        kept = []
        for given in batches:
            seen = train_step(stack, enter, given, around=around, late=order == "late")
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
        outs = [f"step {step}" for step, (one, two) in enumerate(zip(plain, seen, strict=True))
                if not all(map(same, one.outs, two.outs))]  # fmt: skip
        bench.check(f"{way}.forward", not outs, _said(outs))
        wrong = [f"{name} in step {step}" for step, (one, two) in enumerate(zip(plain, seen, strict=True))
                 for name in different(one.grads, two.grads) if name not in unsteady]  # fmt: skip
        left_out = f"; not steady by themselves: {', '.join(sorted(unsteady))}" if unsteady else ""
        bench.check(f"{way}.grad", not wrong and not unsteady >= plain[0].grads.keys(), _said(wrong) + left_out)
        wanted = 2 * DEPTH * passes
        bench.check(f"{way}.run-again", len(calls) == wanted, f"blocks ran {len(calls)} times, wanted {wanted}")
        if delayed:
            _check_history(bench, way, plain[-1].states, seen[-1].states, passes)


def _check_history(bench: Bench, way: str, plain: dict[str, Any], seen: dict[str, Any], calls: int) -> None:
    """Each call's amax once, in its order; rows in which there was none do not count (see `probes.recompute`)."""
    wrong = []
    for name, wanted in plain.items():
        if name.endswith("history"):
            for tensor, column in COLUMNS[name.split(".")[-2]].items():
                amaxes, kept = ([value for value in one[:, column].tolist() if value] for one in (seen[name], wanted))
                if amaxes != kept or len(amaxes) != calls:
                    wrong.append(f"{tensor} of {name}: {len(amaxes)} amaxes of {calls} calls, {len(kept)} without")
        elif not same(seen[name], wanted):
            wrong.append(f"{name}: another scale")
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
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"other bits: {', '.join(names[:3])}{more}" if names else "the same bits"


def _batch(bench: Bench, factors: tuple[float, ...]) -> list[tuple[Any, Any]]:
    shape = shape_of(bench)

    def one(factor: float) -> Any:
        return bench.randn(shape.rows, shape.hidden, dtype=torch.bfloat16) * factor

    return [(one(factor), one(factor)) for factor in factors]


# --- the owner --------------------------------------------------------------------------------------------


def _check_owner(bench: Bench, enter: Enter, *, delayed: bool) -> None:
    """torch's checkpoint is refused, for a reason; a scope inside a checkpoint is refused as well."""
    error = bench.bridge("fp8_scope").WrongRecomputeOwner
    for way, reentrant in WAYS.items():
        inside = partial(torch_checkpoint, use_reentrant=reentrant)
        bench.refuses(f"torch.{way}", error, lambda call=inside: _step(bench, enter, call, watched=True))  # type: ignore[misc]
        bench.refuses(
            f"torch.{way}.scope-inside", error, lambda call=inside: _step_with_scope_inside(bench, enter, call)  # type: ignore[misc]
        )  # fmt: skip
        ours = partial(bench.bridge("fp8_scope").te_recompute, use_reentrant=reentrant)
        bench.refuses(
            f"te.{way}.scope-inside", error, lambda call=ours: _step_with_scope_inside(bench, enter, call)  # type: ignore[misc]
        )  # fmt: skip
        wrong = _what_torch_makes_of_it(bench, enter, inside, delayed=delayed)
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
    block = _fixed_block(bench)
    rows, gradient = _fixed_batch(bench)

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
        return f"{type(fault).__name__}: {str(fault).splitlines()[0] if str(fault) else ''}"[:300]
    wrong = [f"other gradients: {', '.join(names[:3])}" for names in [different(plain.grads, seen.grads)] if names]
    wrong += [f"other state: {', '.join(names[:3])}" for names in [different(plain.states, seen.states)] if names]
    return "no error, " + "; ".join(wrong) if wrong else ""


def _fixed_block(bench: Bench) -> Any:
    block = Block(bench, shape_of(bench))
    made = torch.Generator(bench.device).manual_seed(bench.order.seed)
    with torch.no_grad():
        for weight in block.parameters():
            if weight.dim() > 1:
                drawn = torch.randn(weight.shape, generator=made, device=bench.device)
                weight.copy_(drawn * weight.shape[1] ** -0.5)
    return block


def _fixed_batch(bench: Bench) -> tuple[Any, Any]:
    shape = shape_of(bench)
    made = torch.Generator(bench.device).manual_seed(bench.order.seed + 1)
    drawn = torch.randn(2, shape.rows, shape.hidden, generator=made, device=bench.device).to(torch.bfloat16)
    return drawn[0].clone(), drawn[1].clone()


# --- the order --------------------------------------------------------------------------------------------


def _check_order(bench: Bench, enter: Enter) -> None:
    """Second passes in another order than the first ones take each other's scales: refused, and seen to be wrong."""
    error = bench.bridge("layer_watch").RecomputeOutOfOrder
    plain = _two_passes(bench, enter, lambda block, rows: block(rows))
    for way, reentrant in WAYS.items():
        ours = partial(bench.bridge("layer_watch").recompute, use_reentrant=reentrant)
        theirs = partial(bench.bridge("fp8_scope").te_recompute, use_reentrant=reentrant)
        bench.refuses(f"{way}.one-backward-for-two", error, partial(_two_passes, bench, enter, ours))
        bench.refuses(f"{way}.never-run-again", error, partial(_two_passes, bench, enter, ours, drops_the_first=True))
        wrong = different(plain, _two_passes(bench, enter, theirs))
        said = f"one backward pass for two, unguarded: {_said(wrong)}"
        bench.check(f"{way}.reason", bool(wrong), said if wrong else f"{said}: nothing is left to refuse")


def _two_passes(
    bench: Bench, enter: Enter, call: Callable[..., Any], *, drops_the_first: bool = False
) -> dict[str, Any]:
    """Gradients of one backward pass for two passes of a block, whose scales differ; or for the second one alone."""
    block, (rows, gradient) = _fixed_block(bench), _fixed_batch(bench)
    with enter():
        out = block(rows)
    out.backward(gradient)
    block.zero_grad(set_to_none=True)
    outs = []
    with _flags_kept():
        for given in (_with_a_loud_column(rows), rows):
            with enter():
                outs.append(call(block, given.requires_grad_()))
        kept = outs[1:] if drops_the_first else outs
        torch.autograd.backward(kept, [gradient] * len(kept))
    return {name: weight.grad for name, weight in block.named_parameters()}


def _with_a_loud_column(rows: Any) -> Any:
    """Rows whose amax behind a norm is another, where a factor on all of them is divided out again.

    The factor is no power of two: scales that are one apart round alike.
    """
    made = rows.clone()
    made[:, 0] *= 11.0
    return made


# --- high precision inside of it --------------------------------------------------------------------------


def _check_high_precision(bench: Bench, enter: Enter) -> None:
    """A layer that stays in high precision inside a recomputed block, its backward pass begun inside the low scope.

    The second pass then runs in a thread of autograd's, beside the scope that the first thread holds.
    """
    scope = bench.bridge("fp8_scope")

    def run(reentrant: bool | None) -> Seen:
        block = _fixed_block(bench)
        rows, gradient = _fixed_batch(bench)
        leaf = rows.requires_grad_()

        def mixed(given: Any) -> Any:
            between = block.up(given)
            with scope.high_precision("a projection that stays"):
                between = block.down(between)
            return block.mlp(between)

        with enter():
            out = mixed(leaf) if reentrant is None else scope.te_recompute(mixed, leaf, use_reentrant=reentrant)
            out.backward(gradient)
        grads = {name: weight.grad for name, weight in block.named_parameters()}
        return Seen([out.detach()], {"rows": leaf.grad, **grads})

    plain = run(None)
    for way, reentrant in WAYS.items():
        try:
            seen = run(reentrant)
        except Exception as fault:
            bench.check(way, False, f"{type(fault).__name__}: {fault}"[:600])
            continue
        wrong = different(plain.grads, seen.grads) + ([] if same(plain.outs[0], seen.outs[0]) else ["output"])
        bench.check(way, not wrong, _said(wrong))
