"""The score of the smoke run's checks in words, for every form that tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...canary.dynamic.smoke_fault_score import (
    CleanResult,
    SmokeFaultResult,
    SmokeFaultScore,
    SmokeFaultVerdict,
    SmokeFinding,
)

HEADINGS: Final = ("fault", "what goes wrong", "verdict", "must be caught by", "named")
PLACE_HEADINGS: Final = ("fault", "planted in", "other checks")
CLEAN_HEADINGS: Final = ("without a fault", "run", "came of it")
_WORDS: Final[dict[SmokeFaultVerdict, str]] = {
    SmokeFaultVerdict.CAUGHT: "caught",
    SmokeFaultVerdict.BY_ANOTHER: "caught by another check",
    SmokeFaultVerdict.MISSED: "missed",
    SmokeFaultVerdict.NOT_RUN: "not run",
}
_CHECKS: Final = {
    "conservation": "conservation of tokens",
    "replicas": "bits of replicas",
    "gradients": "gradients of experts",
    "reproduce": "comparison with one rank",
    "resume": "bits of the run without a break",
    "validate": "bits of the run without evaluation",
    "watch": "watch for values that are no number",
    "launcher": "launcher",
}
_WAYS: Final = {
    "train": "training",
    "evaluate": "training with evaluations",
    "save": "saved, and resumed from it",
    "resume": "resumed",
}
_FIRST: Final = ("step", "ranks", "module", "tensor")  # of what is named


def say_caught(score: SmokeFaultScore) -> str:
    """The score in a sentence."""
    judged = score.judged
    if not judged:
        return f"No fault was judged: {score.environment.rstrip('.')}."
    held = [row for row in judged if row.held_out]
    good = sum(row.is_good for row in held)
    said = f" {good} of {len(held)} of those that were held out." if held else ""
    return (
        f"Smoke run: {score.named} of {len(judged)} planted faults are caught by the check that must see them, which "
        f"names the place ({score.named / len(judged):.1%}; 95% Wilson lower bound {score.named_bound:.1%}); "
        f"{score.caught} are caught by it, rightly named or not.{said}"
    )


def say_alarms(score: SmokeFaultScore) -> str:
    """What runs without a fault gave, in a sentence."""
    if not score.clean:
        return "No run without a fault ended."
    return f"Runs without a fault: {len(score.alarms)} of {len(score.clean)} gave a false alarm."


def say_lacking(score: SmokeFaultScore) -> str:
    """What was not judged, in a sentence; empty where all was."""
    lacking = [row for row in score.faults if not row.was_judged]
    if not lacking or not score.judged:
        return ""
    return f"Not judged: {len(lacking)} of {len(score.faults)} faults ({', '.join(row.fault for row in lacking)})."


def find_unsettled(score: SmokeFaultScore) -> tuple[SmokeFaultResult, ...]:
    """Every fault that is not caught and named."""
    return tuple(row for row in score.faults if not row.is_good)


def name_verdict(row: SmokeFaultResult) -> str:
    """What became of a fault, in a word or two."""
    said = _WORDS[row.verdict]
    if row.verdict is SmokeFaultVerdict.CAUGHT:
        said += ", named rightly" if row.named else ", named wrongly"
    return f"{said} (held out)" if row.held_out else said


def name_check(check: str) -> str:
    """A check, in words."""
    return _CHECKS.get(check, check)


def say_place(row: SmokeFaultResult) -> str:
    """Where it is planted."""
    return f"{row.title}; {_WAYS.get(row.way, row.way)}"


def say_way(way: str) -> str:
    """A run of a cell."""
    return _WAYS.get(way, way)


def say_clean(run: CleanResult) -> str:
    """What came of a run without a fault."""
    return "; ".join(map(say_finding, run.findings)) or ("green" if run.ending == "done" else run.ending)


def say_named(row: SmokeFaultResult) -> str:
    """What its check named; what it must have named, where it did not."""
    right = [finding for finding in row.findings if finding.check == row.caught_by]
    if not right:
        return f"must be {say_words(row.wants)}"
    named = say_words(right[0].named)
    return named if row.named else f"{named}; must be {say_words(row.wants)}"


def say_others(row: SmokeFaultResult) -> str:
    """What other checks said of it."""
    return "; ".join(say_finding(finding) for finding in row.findings if finding.check != row.caught_by)


def say_finding(finding: SmokeFinding) -> str:
    """One finding."""
    named = say_words(finding.named)
    return f"{name_check(finding.check)}: {named or finding.words}"


def say_words(named: Mapping[str, Any]) -> str:
    """Step 2, ranks 1, module layers.3: in one order, whatever wrote them."""
    order = sorted(named, key=lambda key: (_FIRST.index(key) if key in _FIRST else len(_FIRST), key))
    return ", ".join(f"{key} {_say(named[key])}" for key in order if named[key] not in ("", []))


def _say(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
