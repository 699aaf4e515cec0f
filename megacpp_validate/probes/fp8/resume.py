"""The FP8 state of checkpoints: saved and loaded by one release of Transformer Engine, and by another.

What continues from a loaded state has, bit by bit, the values of what was never interrupted. The last load takes place
in the environment as it is: Transformer Engine 2.16.1, and 2.17.1 and later, refuse the state of delayed scaling that
they wrote themselves unless NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 (seen on one H200, 2026-11-23).

With MEGACPP_STATES=FOLDER the cell also leaves its states there as STACK.pt, and loads those of every other stack that
it finds. For both directions run it under A, under B, and under A again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from ..bench import Bench
from ..observe import Enter
from .stacks import Seen, check_same_bits, delayed_states
from .state import ScopeLayer, new_layers

UNPICKLING: Final = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
STATES: Final = "MEGACPP_STATES"
WIDTH: Final = 256  # in blocks of 128, which every recipe takes
OUT: Final = 512
HEADS: Final = 4
BEFORE: Final = (1.0, 16.0, 0.5)  # a spike in the history: its scales are not those of the next step
ELSEWHERE: Final = (0.25,)  # what the layers that are loaded into went through
AFTER: Final = (2.0, 0.125)
WHOLE: Final = "layer"  # its backward pass through attention may sum in any order: only what is loaded is compared


def probe(bench: Bench) -> None:
    """Save and load under every recipe of the target; delayed scaling comes last, because a refusal ends the probe."""
    if not bench.wants_te:
        source, target = (torch.nn.ModuleDict({"linear": torch.nn.Linear(WIDTH, OUT)}) for _ in range(2))
        bench.bridge("extra_state").load_fp8_state_dict(target, source.state_dict(), recipe=None)
        _check_same(bench, "native.loaded", *(_values(bench, one, "") for one in (source, target)))
        bench.unsupported = "plain PyTorch layers have no FP8 state"
        return
    saved: dict[str, dict[str, Any]] = {}
    with patch.dict(os.environ, {UNPICKLING: "1"}):
        for recipe in bench.require_recipes():
            saved[recipe] = check_resumed(bench, bench.low_precision(recipe), recipe)
        if folder := os.environ.get(STATES):
            check_others(bench, saved, Path(folder))
    if "delayed" in saved:
        loaded = _load(bench, _new_layers(bench), saved["delayed"]["state"], "delayed")
        _check_same(bench, "delayed.as-it-is.loaded", saved["delayed"]["values"], _values(bench, loaded, "delayed"))


def check_resumed(bench: Bench, enter: Enter, recipe: str) -> dict[str, Any]:
    """Go on with layers of every kind, and with those that took over what they saved.

    The checks are `RECIPE.HOW.loaded`, weights and state right after loading, `.step`, output and all gradients of the
    steps after it, and `.state`, weights and state after them. HOW: "fresh" layers have never run, "used" ones have a
    state of their own, all of which is to be replaced.

    Returns:
        "state", the state_dict that was loaded, and "values", its tensors as they were read from the layers.
    """
    kept: dict[str, Any] = {}
    for how, elsewhere in (("fresh", ()), ("used", ELSEWHERE)):
        pair = layers, others = _new_layers(bench), _new_layers(bench)
        for rows, factors in ((layers, BEFORE), (others, elsewhere)):
            for factor in factors:
                _step(bench, enter, [rows], factor)
        source = _model(layers)
        state = {key: value.clone() if hasattr(value, "clone") else value for key, value in source.state_dict().items()}
        kept = {"state": state, "values": _values(bench, source, recipe)}
        target = _load(bench, others, state, recipe)
        _check_same(bench, f"{recipe}.{how}.loaded", kept["values"], _values(bench, target, recipe))
        # Both in one scope: where it ends, every layer of the process is brought up to date.
        steps = [_step(bench, enter, pair, factor) for factor in AFTER]
        wanted, seen = ([step[row] for step in steps] for row in (0, 1))
        check_same_bits(bench, f"{recipe}.{how}.step", wanted, seen, *(one.name for one in layers if one.name != WHOLE))
        _check_same(
            bench, f"{recipe}.{how}.state", *(_values(bench, one, recipe, whole=False) for one in (source, target))
        )
    return kept


def check_others(bench: Bench, saved: dict[str, dict[str, Any]], folder: Path) -> None:
    """Load what other stacks left, a check `from.STACK.RECIPE` each, and leave the states of this one.

    Args:
        saved: recipe -> what `check_resumed` gives.
        folder: of the states of all stacks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"{bench.order.stack}.pt"
    for file in sorted(set(folder.glob("*.pt")) - {mine}):
        for recipe, found in torch.load(file, map_location=bench.device, weights_only=True).items():
            if recipe in saved:
                loaded = _load(bench, _new_layers(bench), found["state"], recipe)
                _check_same(bench, f"from.{file.stem}.{recipe}", found["values"], _values(bench, loaded, recipe))
    torch.save(saved, mine)


class _Rows(torch.nn.Module):
    """A whole layer on rows: [R, WIDTH] -> [R, WIDTH], of two sequences."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, rows: Any) -> Any:
        return self.layer(rows.view(-1, 2, WIDTH)).view(-1, WIDTH)


def _new_layers(bench: Bench) -> Sequence[ScopeLayer]:
    whole = bench.te_layer(
        "transformer_layer", WIDTH, OUT, HEADS, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm",
        self_attn_mask_type="causal",
    )  # fmt: skip
    layer = ScopeLayer(WHOLE, _Rows(bench.filled(whole, torch.bfloat16)), 4, WIDTH, WIDTH)
    return (*new_layers(bench, WIDTH, OUT), layer)


def _model(layers: Sequence[ScopeLayer]) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({one.name: one.module for one in layers})


def _load(bench: Bench, layers: Sequence[ScopeLayer], state: Mapping[str, Any], recipe: str) -> torch.nn.ModuleDict:
    target = _model(layers)
    bench.bridge("extra_state").load_fp8_state_dict(target, state, recipe=recipe)
    return target


def _values(bench: Bench, model: Any, recipe: str, *, whole: bool = True) -> dict[str, Any]:
    """Copies of weights, and under delayed scaling of amax histories and scales, by name."""
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    found = weights | (delayed_states(bench, model) if recipe == "delayed" else {})
    return {name: value for name, value in found.items() if whole or not name.startswith(f"{WHOLE}.")}


def _check_same(bench: Bench, name: str, wanted: dict[str, Any], seen: dict[str, Any]) -> None:
    check_same_bits(bench, name, [{"state": wanted}], [{"state": seen}], "state")


def _step(bench: Bench, enter: Enter, rows: Sequence[Sequence[ScopeLayer]], factor: float) -> list[Seen]:
    """The same step of each row of layers, in one scope: layer -> output and gradients, row by row."""
    drawn = [(one.rows(bench, factor), one.gradient(bench, factor)) for one in rows[0]]
    layers = [one for row in rows for one in row]
    leaves = [given.detach().clone().requires_grad_() for _ in rows for given, _ in drawn]
    with enter():
        outs = [one(leaf) for one, leaf in zip(layers, leaves, strict=True)]
    torch.autograd.backward(outs, [gradient for _ in rows for _, gradient in drawn])
    found: list[Seen] = [{} for _ in rows]
    for number, (one, leaf, out) in enumerate(zip(layers, leaves, outs, strict=True)):
        gradients = {name: weight.grad for name, weight in one.module.named_parameters()}
        found[number // len(drawn)][one.name] = {"out": out.detach(), "rows": leaf.grad, **gradients}
        one.module.zero_grad(set_to_none=True)
    return found
