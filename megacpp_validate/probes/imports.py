"""The probe of the firewall and of the low-precision scope that everything else stands on."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from ..evidence.receipt import Backend
from .bench import Bench
from .fp8_linear import check_amax, check_high_precision, check_recipe, check_recompute, is_judged

# A new name and the one before it: one of the two is enough.
EITHER: Final = {
    "autocast": "fp8_autocast",
    "fp8_autocast": "autocast",
    "quantized_model_init": "fp8_model_init",
    "fp8_model_init": "quantized_model_init",
}
# The release that brought an entry point which older ones need not have.
SINCE: Final = {
    "mxfp8_block_scaling": (2, 1),
    "check_mxfp8_support": (2, 1),
    "float8_current_scaling": (2, 2),
    "float8_block_scaling": (2, 3),
    "check_fp8_block_scaling_support": (2, 3),
    "nvfp4_block_scaling": (2, 8),
    "check_nvfp4_support": (2, 8),
}
# What an accessor gives is named as the accessor is, but for these.
OTHER_NAMES: Final = {"fp8_format": "Format", "fp8_state_manager": "FP8GlobalStateManager"}
RECIPE_CLASSES: Final = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
# A question of `te_support` and the recipes that stand on it.
SUPPORT: Final = {
    "fp8": {"delayed", "current"},
    "fp8_block_scaling": {"block"},
    "mxfp8": {"mxfp8"},
    "nvfp4": {"nvfp4"},
}


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
    if bench.wants_te and bench.device == "cpu" and bench.order.target.recipes:  # plain Python decides it
        _check_second_thread(bench)
        _check_recipe_objects(bench)
    if bench.wants_te and is_judged(bench):
        check_high_precision(bench, _low(bench))
        for recipe in bench.recipes:
            check_recipe(bench, recipe, partial(_low(bench), recipe=recipe))
        if "delayed" in bench.recipes:
            check_amax(bench, partial(_low(bench), recipe="delayed"))
        check_recompute(bench, {recipe: partial(_low(bench), recipe=recipe) for recipe in bench.recipes})


def _low(bench: Bench) -> Callable[..., Any]:
    scope = bench.bridge("fp8_scope")
    return partial(scope.low_precision, target=bench.order.target.id, amax_reduction_group=scope.SINGLE_OWNER)


# --- the firewall -----------------------------------------------------------------------------------------


def _check_availability(bench: Bench) -> None:
    te = bench.bridge()
    available, reason = te.is_te_available(), te.why_te_is_unavailable()
    off = os.environ.get(te.TE.switch, "") not in ("", "0")
    right = available if bench.wants_te else not (available and off)
    bench.check("availability.as-requested", right, reason or "Transformer Engine can be used")
    told = not reason if available else "Next step" in reason
    bench.check("availability.reason", told, reason or "no reason, and none is needed")
    with _environment(te.TE.switch, "" if off else "1"):
        same = te.is_te_available() is available and te.why_te_is_unavailable() == reason
    bench.check("availability.decided-once", same, "asked again under another environment")

    # A firewall of its own, so that nothing that this process has decided is touched.
    def fresh() -> Any:
        return type(te.TE)("vendor", module="json", switch="MEGACPP_PROBE", trial="MEGACPP_PROBE_TRIAL", explain=str)

    vendor = fresh()
    with _environment("MEGACPP_PROBE", "1"):
        off_by_switch = not vendor.is_available() and "MEGACPP_PROBE=1" in vendor.why_unavailable()
    bench.check("availability.switch", off_by_switch and fresh().is_available(), vendor.why_unavailable())
    vendor = fresh()
    with _environment(vendor.switch_of("one"), "1"):
        split = vendor.is_available() and not vendor.is_enabled_for("one") and vendor.is_enabled_for("another")
    bench.check("availability.switch-of-a-preset", split, vendor.why_disabled_for("one"))


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


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
    release = _release(bench)
    for name, entry in entries.items():
        value = entry()
        if value is None:
            excuse = _excuse(name, entries, release)
            bench.check(f"accessor.{name}", bool(excuse), excuse or entry.why_missing())
            continue
        shown = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        wanted = OTHER_NAMES.get(name, name)
        right = _plain(shown.rpartition(".")[2]) == _plain(wanted) and entry() is value and entry.require() is value
        bench.check(f"accessor.{name}", right, shown)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _excuse(name: str, entries: dict[str, Any], release: tuple[int, ...]) -> str:
    """Why an accessor may give nothing; empty where it may not."""
    other = EITHER.get(name, "")
    if other in entries and entries[other]() is not None:
        return f"this release has {other} instead"
    since = SINCE.get(name)
    if since and release and release < since:
        return f"new in {'.'.join(map(str, since))}"
    return ""


def _release(bench: Bench) -> tuple[int, ...]:
    version = bench.bridge("vendor").look_for_te().versions.get("transformer-engine", "")
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


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
    scope, low, target = bench.bridge("fp8_scope"), _low(bench), bench.order.target
    imported = "transformer_engine" in sys.modules
    with low() as opened:
        production = opened.recipe
        _check_scope(bench, "production", opened, target.production_recipe)
    bench.check("scope.production.restored", _state(bench) == (False, "") and scope.current_scope() is None)
    bench.check("scope.production.recipe", (production or "") == target.production_recipe, str(production))
    for recipe in bench.recipes if bench.wants_te else ():
        with low(recipe=recipe) as opened:
            _check_scope(bench, recipe, opened, recipe)
        bench.check(f"scope.{recipe}.restored", _state(bench) == (False, "") and scope.current_scope() is None)
        try:
            with low(recipe=recipe):
                raise _Planted
        except _Planted:
            restored = _state(bench) == (False, "") and scope.current_scope() is None
            bench.check(f"scope.{recipe}.restored-after-an-exception", restored)
    if not imported:
        bench.check("scope.imports-nothing", "transformer_engine" not in sys.modules)


def _check_scope(bench: Bench, name: str, opened: Any, recipe: str) -> None:
    """What is on inside a scope: on the native path nothing, and it says so."""
    scope, (on, kind) = bench.bridge("fp8_scope"), _state(bench)
    wanted = "te" if bench.wants_te and recipe else "native"
    seen = (kind,) if on else ("native",)
    reasons = tuple(refusal.reason for refusal in opened.choice.refusals)
    asked = recipe or "none"
    claimed = asked if opened.choice.observed == "te" or not recipe else opened.choice.observed
    bench.backends.append(Backend(f"scope.{name}", asked, claimed, seen, reasons))
    right = opened.choice.observed == wanted and scope.current_scope() is opened
    if wanted == "te":
        right = right and on and kind == RECIPE_CLASSES[recipe] and opened.is_low and not opened.reason
    else:
        right = right and not on and not opened.is_low and bool(opened.reason)
    bench.check(
        f"scope.{name}.on", right, f"wanted {wanted}, seen {', '.join(seen)}; {opened.reason or 'low precision'}"
    )


def _check_refusals(bench: Bench) -> None:
    scope, errors, low, target = bench.bridge("fp8_scope"), bench.bridge("errors"), _low(bench), bench.order.target
    for recipe in scope.RECIPES:
        if recipe not in target.recipes:
            bench.refuses(f"scope.refuses.{recipe}", errors.WrongTarget, partial(low, recipe=recipe))
    bench.refuses("scope.refuses.unknown-recipe", errors.UnknownName, partial(low, recipe="fp8"))
    bench.refuses("scope.refuses.unknown-target", errors.UnknownName, partial(low, target="h1000"))
    other = "h200" if target.id in ("cpu", "b200", "gb10") else "b200"
    bench.refuses("scope.refuses.another-target", errors.WrongTarget, partial(low, target=other))
    bench.refuses("scope.refuses.no-group", scope.AmaxGroupMissing, partial(low, amax_reduction_group=[0]))


def _check_second_entry(bench: Bench) -> None:
    scope, errors, low = bench.bridge("fp8_scope"), bench.bridge("errors"), _low(bench)
    words, first, second = "", "", ""
    with low() as opened:
        first = opened.entered_at
        try:
            second = f"{__file__}:{sys._getframe().f_lineno + 1}"
            with low():
                words = "nothing was raised"
        except errors.ScopeEnteredTwice as refusal:
            words = str(refusal)
        still = scope.current_scope() is opened and _state(bench)[0] is opened.is_low
    named = first in words and second in words and first.startswith(__file__)
    bench.check("scope.second-entry.refused", "Next step" in words, words)
    bench.check("scope.second-entry.names-both-places", named, words)
    bench.check("scope.second-entry.leaves-the-first-on", still)


def _check_second_thread(bench: Bench) -> None:
    """Transformer Engine has one state a process: while one thread holds a scope, another gets none."""
    scope, errors, low = bench.bridge("fp8_scope"), bench.bridge("errors"), _low(bench)
    ways = {"low": low, "high": partial(scope.high_precision, "a projection that stays")}
    for name, enter in ways.items():
        raised: list[BaseException] = []
        with low() as opened:
            thread = threading.Thread(target=_enter_and_leave, args=(enter, raised))
            thread.start()
            thread.join()
            still = scope.current_scope() is opened and _state(bench)[0] is opened.is_low
        refused = len(raised) == 1 and isinstance(raised[0], errors.ScopeEnteredTwice)
        said = f"{type(raised[0]).__name__}: {raised[0]}" if raised else "nothing was raised"
        bench.check(f"scope.second-thread.{name}", refused and "Next step" in said, said)
        bench.check(f"scope.second-thread.{name}.leaves-the-first-on", still)
        bench.check(f"scope.second-thread.{name}.restored", _state(bench) == (False, ""))
    entered: list[BaseException] = []
    thread = threading.Thread(target=_enter_and_leave, args=(low, entered))
    thread.start()
    thread.join()
    bench.check("scope.second-thread.afterwards", not entered, "the first one has left: another thread may enter")


def _enter_and_leave(enter: Callable[[], Any], raised: list[BaseException]) -> None:
    try:
        with enter():
            pass
    except BaseException as fault:  # a thread's own would only be printed
        raised.append(fault)


def _check_recipe_objects(bench: Bench) -> None:
    """Amax values are reduced over the ranks that the owner of the shard names, and not where it is alone."""
    scope = bench.bridge("fp8_scope")
    if "delayed" not in bench.order.target.recipes:
        return
    for name, owner, reduced in (("single-owner", scope.SINGLE_OWNER, False), ("one-rank", None, True)):
        with scope.low_precision(target=bench.order.target.id, amax_reduction_group=owner, recipe="delayed"):
            recipe = scope.te_state()["recipe"]
        seen = tuple(getattr(recipe, field, None) for field in ("reduce_amax", "amax_history_len", "margin"))
        bench.check(f"scope.delayed.{name}", seen == (reduced, 16, 0), f"reduce, history, margin: {seen}")


def _check_groups(bench: Bench) -> None:
    scope, low = bench.bridge("fp8_scope"), _low(bench)
    zones = scope.Zones(6, first=2, last=1)
    # group -> whether one of it lies in the BF16 zone
    groups: dict[tuple[int | str, ...], bool] = {
        (2, 3, 4): False, (3,): False, (1, 2): True, (0,): True, (4, 5): True, (3, "mtp"): True, ("lm_head",): True,
    }  # fmt: skip
    for layers, outside in groups.items():
        made: list[int] = []
        with scope.group_scope(layers, zones, [partial(_factory, low, made, index) for index in range(len(layers))]):
            opened, on = scope.current_scope(), _state(bench)[0]
        low_wanted = bench.wants_te and not outside and bool(bench.order.target.production_recipe)
        right = made == ([] if outside else [0]) and on is low_wanted and opened.is_low is low_wanted
        right = right and ("BF16" in opened.reason) is outside
        seen = f"{'low' if on else 'high'} precision, factories asked: {made}; {opened.reason}"
        bench.check(f"scope.group.{'-'.join(map(str, layers))}", right and not _state(bench)[0], seen)


def _factory(low: Callable[..., Any], made: list[int], index: int) -> Any:
    made.append(index)
    return low()
