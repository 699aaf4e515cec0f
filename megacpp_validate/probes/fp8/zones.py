"""BF16 zones, heads and groups, as they ran: the numbers of each layer, not what was configured.

A stack of blocks with two heads runs as a model does: neighbouring layers of one precision in one scope of the group
helper. Then each layer of Transformer Engine runs alone and outside of every scope, on the very tensors of the run: a
layer of a zone gives the same bits, and each product of a layer between the zones differs by what FP8 rounds.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import groupby
from typing import Any, Final

import torch

from ..bench import Bench, different
from ..low_precision import Watched, check_layers_in_low_precision, run_alone, watching_layers
from ..observe import Enter
from ..trial import run_pass
from .graphs import scope_of
from .stacks import Seen, check_same_bits, new_batch, new_stack, shape_of, te_layers

LAYERS: Final = 5
FIRST: Final = 1
LAST: Final = 1
HEADS: Final = ("lm_head", "mtp")


def probe(bench: Bench) -> None:
    """Each recipe: where low precision ran and where not; then groups, and a backward pass inside a scope."""
    for recipe in bench.require_recipes():
        model = _Model(bench)
        enter = scope_of(bench, recipe)
        with bench.scope(f"zones.{recipe}"):
            _check_places(bench, model, enter, recipe)
        with bench.scope(f"groups.{recipe}"):
            _check_zone_in_a_group(bench, enter)
        with bench.scope(f"scope.{recipe}"):
            _check_scope(bench, enter)


class _Model(torch.nn.Module):
    """Blocks and two heads on the same rows."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.blocks = new_stack(bench, LAYERS)
        width = shape_of(bench).hidden
        self.heads = torch.nn.ModuleDict({name: bench.filled(bench.te_layer("linear", width, width)) for name in HEADS})

    def run(self, bench: Bench, rows: Any, enter: Enter) -> tuple[Any, ...]:
        """Output of each head: groups of neighbouring layers of one precision, then the heads, each by itself."""
        scope = bench.bridge("fp8_scope")
        zones = scope.Zones(LAYERS, first=FIRST, last=LAST)
        for _, group in groupby(range(LAYERS), zones.is_bf16):
            places = list(group)
            with scope.group_scope(places, zones, [enter] * len(places)):
                for place in places:
                    rows = self.blocks[place](rows)
        outs = []
        for name, head in self.heads.items():
            with scope.group_scope((name,), zones, (enter,)):
                outs.append(head(rows))
        return tuple(outs)

    def places(self) -> dict[str, dict[str, Any]]:
        """Place -> its layers of Transformer Engine by name."""
        found: dict[str, dict[str, Any]] = {}
        for name, layer in te_layers(self).items():
            kind, place, *_ = name.split(".")
            found.setdefault(place if kind == "heads" else f"layer{place}", {})[name] = layer
        return found


# --- where low precision ran ------------------------------------------------------------------------------


def _check_places(bench: Bench, model: _Model, enter: Enter, recipe: str) -> None:
    layers, shape = te_layers(model), shape_of(bench)
    for _ in range(2):  # delayed scaling has scales of its own from the second step on
        model.zero_grad(set_to_none=True)
        rows, *gradients = (bench.randn(shape.rows, shape.hidden, dtype=torch.bfloat16) for _ in ("", *HEADS))
        with watching_layers(layers) as watched:
            outs = model.run(bench, rows.requires_grad_(), enter)
            torch.autograd.backward(outs, gradients)
    for place, held in model.places().items():
        # The zones of this model, derived anew: the bridge's own answer is what is looked at.
        if place in HEADS or int(place.removeprefix("layer")) in (*range(FIRST), *range(LAYERS - LAST, LAYERS)):
            changed = [f"{name}: {part}" for name in held for part in _changed_outside(watched[name])]
            bench.check(f"{place}.in-bf16", not changed, f"other bits outside of every scope: {changed[:1] or 'none'}")
        else:
            check_layers_in_low_precision(bench, place, recipe, {name: watched[name] for name in held})  # type: ignore[arg-type]


def _changed_outside(watched: Watched) -> list[str]:
    """What differs when the layer runs alone, outside of every scope, on the same: output and gradients."""
    if watched.out is None or watched.to_out is None:
        return ["it did not run"]
    return different(*run_alone(watched, weights_alone=False))


# --- groups -----------------------------------------------------------------------------------------------


def _check_zone_in_a_group(bench: Bench, enter: Enter) -> None:
    scope = bench.bridge("fp8_scope")
    group = partial(scope.group_scope, zones=scope.Zones(LAYERS, first=FIRST, last=LAST))
    with group((1, 2), factories=[enter, enter]), group((4,), factories=[enter]):
        off = not scope.te_state()["enabled"]
    bench.check("zone-in-a-group", off, f"low precision is {'off' if off else 'on'} for a layer of a zone")


# --- a backward pass inside of it -------------------------------------------------------------------------


def _check_scope(bench: Bench, enter: Enter) -> None:
    """A backward pass inside the scope gives the bits of one after it."""
    like, (rows, gradient) = new_stack(bench, 1), new_batch(bench)

    def run(around: Enter, forward: Enter) -> Seen:
        block, leaf = new_stack(bench, 1, like=like)[0], rows.detach().clone().requires_grad_()
        with around():
            leaves = {"rows": leaf, **dict(block.named_parameters())}
            return {"pass": run_pass(partial(block, leaf), leaves, gradient, forward)}

    check_same_bits(bench, "backward-inside", [run(nullcontext, enter)], [run(enter, nullcontext)], "pass")
