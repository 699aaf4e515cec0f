"""The probe of the firewall and of the low-precision scope that everything else stands on."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch

from ..evidence.receipt import Backend
from .bench import Bench
from .fp8_linear import check_amax, check_recipe, is_judged

# A new name and the one before it: one of the two is enough.
EITHER: Final = {
    "autocast": "fp8_autocast",
    "fp8_autocast": "autocast",
    "quantized_model_init": "fp8_model_init",
    "fp8_model_init": "quantized_model_init",
}
# What an accessor gives is named as the accessor is, but for these.
OTHER_NAMES: Final = {"fp8_format": "Format", "fp8_state_manager": "FP8GlobalStateManager"}
# A question of `te_support` and the recipes that stand on it.
SUPPORT: Final = {
    "fp8": {"delayed", "current"},
    "fp8_block_scaling": {"block"},
    "mxfp8": {"mxfp8"},
    "nvfp4": {"nvfp4"},
}


# Group of layers -> whether one of it lies in the BF16 zone.
GROUPS: Final[dict[tuple[int | str, ...], bool]] = {
    (2, 3, 4): False, (3,): False, (1, 2): True, (0,): True, (4, 5): True, (3, "mtp"): True, ("lm_head",): True,
}  # fmt: skip


class _Planted(Exception):
    """Raised inside a scope, to see it put back."""


def probe(bench: Bench) -> None:
    """Look at the firewall, the accessors, what the device supports, the scope, and FP8 in one linear layer."""
    _check_availability(bench)
    _check_accessors(bench)
    _check_support(bench)
    _check_recipes_in_scope(bench)
    _check_refusals(bench)
    _check_second_entry(bench)
    _check_groups(bench)
    if bench.wants_te and is_judged(bench):
        for recipe in bench.recipes:
            check_recipe(bench, recipe, bench.low_precision(recipe))
        if "delayed" in bench.recipes:
            check_amax(bench)


# --- the firewall -----------------------------------------------------------------------------------------


def _check_availability(bench: Bench) -> None:
    te = bench.bridge()
    available, reason = te.is_te_available(), te.why_te_is_unavailable()
    off = os.environ.get(te.TE.switch, "") not in ("", "0")
    right = available if bench.wants_te else not (available and off)
    bench.check("availability.as-requested", right, reason or "Transformer Engine can be used")

    # A firewall of its own, so that nothing that this process has decided is touched.
    def fresh() -> Any:
        return type(te.TE)("vendor", module="json", switch="MEGACPP_PROBE", explain=str)

    vendor = fresh()
    with patch.dict(os.environ, {"MEGACPP_PROBE": "1"}):
        off_by_switch = not vendor.is_available() and "MEGACPP_PROBE=1" in vendor.why_unavailable()
    bench.check("availability.switch", off_by_switch and fresh().is_available(), vendor.why_unavailable())


def _check_accessors(bench: Bench) -> None:
    te = bench.bridge()
    kind = bench.bridge("vendor").Entry
    entries = {name: entry for name, entry in sorted(vars(te).items()) if isinstance(entry, kind)}
    if not te.is_te_available():
        reason = te.why_te_is_unavailable()
        given = [name for name, entry in entries.items() if entry() is not None or entry.why_missing() != reason]
        bench.check("accessors.none", bool(entries) and not given, ", ".join(given) or f"{len(entries)} give None")
        bench.refuses("accessors.require", te.VendorEntryMissing, te.linear.require)
        return
    for name, entry in entries.items():
        value = entry()
        if value is None:
            other = EITHER.get(name, "")
            excused = other in entries and entries[other]() is not None
            bench.check(
                f"accessor.{name}", excused, f"this release has {other} instead" if excused else entry.why_missing()
            )
            continue
        shown = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        wanted = OTHER_NAMES.get(name, name)
        right = _plain(shown.rpartition(".")[2]) == _plain(wanted) and entry() is value and entry.require() is value
        bench.check(f"accessor.{name}", right, shown)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


# --- what the device has ----------------------------------------------------------------------------------


def _check_support(bench: Bench) -> None:
    """The target's row and Transformer Engine agree; support that the row does not know of is a disagreement too.

    A row without recipes says that low precision is not judged there (gb10, cpu): then what there is is only written
    down.
    """
    if not bench.wants_te:
        return
    recipes = set(bench.order.target.recipes)
    for question, (supported, reason) in bench.bridge("fp8_scope").te_support().items():
        wanted = bool(SUPPORT[question] & recipes)
        surprise = supported and not wanted
        words = f"surprise: the row of {bench.order.target.id} does not have it" if surprise else reason or "supported"
        bench.check(f"support.{question}", supported is wanted or not recipes, words)


# --- the scope --------------------------------------------------------------------------------------------


def _state(bench: Bench) -> tuple[bool, str]:
    """Whether low precision is on in Transformer Engine, and the class of its recipe."""
    if not bench.bridge().is_te_available():
        return False, ""
    state = bench.bridge("fp8_scope").te_state()
    return bool(state["enabled"]), type(state["recipe"]).__name__ if state["enabled"] else ""


def _check_recipes_in_scope(bench: Bench) -> None:
    target, imported = bench.order.target, "transformer_engine" in sys.modules
    opened = _enter(bench, "production", target.production_recipe, None)
    bench.check("scope.production.recipe", (opened.recipe or "") == target.production_recipe, str(opened.recipe))
    with torch.no_grad():
        _enter(bench, "eval", target.production_recipe, None)
    for recipe in bench.recipes if bench.wants_te else ():
        _enter(bench, recipe, recipe, recipe)
        try:
            with bench.low_precision(recipe)():
                raise _Planted
        except _Planted:
            bench.check(f"scope.{recipe}.restored-after-an-exception", _is_restored(bench))
    if not imported:
        bench.check("scope.imports-nothing", "transformer_engine" not in sys.modules)


def _enter(bench: Bench, name: str, recipe: str, asked_for: str | None) -> Any:
    """What is on inside a scope, and that nothing is after it: on the native path nothing is on, and it says so."""
    with bench.low_precision(asked_for)() as opened:
        (on, kind), observed = _state(bench), opened.choice.observed
        wanted = "te" if bench.wants_te and recipe else "native"
        seen, asked = (kind if on else "native",), recipe or "none"
        reasons = tuple(refusal.reason for refusal in opened.choice.refusals)
        claimed = asked if observed == "te" or not recipe else observed
        bench.backends.append(Backend(f"scope.{name}", asked, claimed, seen, reasons))
        right = observed == wanted and bench.bridge("fp8_scope").current_scope() is opened
        if wanted == "te":
            is_asked = bench.bridge("recipes").RECIPE_NAMES.get(kind) == recipe
            right = right and on and is_asked and opened.is_low and not opened.reason
        else:
            right = right and not on and not opened.is_low and bool(opened.reason)
        said = f"wanted {wanted}, seen {', '.join(seen)}; {opened.reason or 'low precision'}"
        bench.check(f"scope.{name}.on", right, said)
    bench.check(f"scope.{name}.restored", _is_restored(bench))
    return opened


def _is_restored(bench: Bench) -> bool:
    return _state(bench) == (False, "") and bench.bridge("fp8_scope").current_scope() is None


def _check_refusals(bench: Bench) -> None:
    scope, errors = bench.bridge("fp8_scope"), bench.bridge("errors")
    low, other = bench.low_precision, "b200" if bench.order.target.id == "h200" else "h200"
    calls: dict[str, tuple[type[BaseException], Any]] = {
        "another-target": (errors.WrongTarget, low(target=other)),
        "no-group": (scope.AmaxGroupMissing, low(amax_reduction_group=[0])),
    }
    for name, (error, call) in calls.items():
        bench.refuses(f"scope.refuses.{name}", error, call)


def _check_second_entry(bench: Bench) -> None:
    words, low, twice = "nothing was raised", bench.low_precision(), bench.bridge("errors").ScopeEnteredTwice
    with low() as opened:
        try:
            second = f"{__file__}:{sys._getframe().f_lineno + 1}"
            with low():
                pass
        except twice as refusal:
            words = str(refusal)
    bench.check("scope.second-entry.refused", "Next step" in words, words)
    named = opened.entered_at in words and second in words and opened.entered_at.startswith(__file__)
    bench.check("scope.second-entry.names-both-places", named, words)


def _check_groups(bench: Bench) -> None:
    scope, low = bench.bridge("fp8_scope"), bench.low_precision()
    zones = scope.Zones(6, first=2, last=1)
    made: list[int] = []

    def factory(index: int) -> Any:
        made.append(index)
        return low()

    for layers, outside in GROUPS.items():
        made.clear()
        with scope.group_scope(layers, zones, [partial(factory, index) for index in range(len(layers))]):
            opened, on = scope.current_scope(), _state(bench)[0]
        low_wanted = bench.wants_te and not outside and bool(bench.order.target.production_recipe)
        right = made == ([] if outside else [0]) and on is low_wanted and opened.is_low is low_wanted
        right = right and ("BF16" in opened.reason) is outside
        seen = f"{'low' if on else 'high'} precision, factories called: {made}; {opened.reason}"
        bench.check(f"scope.group.{'-'.join(map(str, layers))}", right and not _state(bench)[0], seen)
