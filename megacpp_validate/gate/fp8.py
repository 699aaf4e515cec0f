"""Low precision: what the policy says of presets, and a session of FP8 with the loss gate's verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Final, Literal, get_args

from ..catalog.bridge import Catalog, ProbeCell, Recipe
from ..catalog.policies import Fp8Policy, PolicyRule, Preset, read_fp8_policy
from ..environments.fleet import Progress
from ..environments.host_session import SessionResult, run_session
from ..environments.plan import RunOptions, choose_rows, find_target
from ..errors import WrongArguments
from ..evidence.receipt import Outcome
from ..evidence.values import Frozen, Result
from .loss import LossOutcome, LossVerdict, judge_folder

_TRAINING: Final = "fp8.loss"  # code of the cells that leave curves


class PresetOutcome(StrEnum):
    """How the policy decides on a preset."""

    ALLOWED = "allowed"  # no rule refuses anything of it
    ROLLED_BACK = "rolled-back"  # refused by the rules that must refuse it
    REFUSED = "refused"  # refused, and it is meant to run
    NOT_REFUSED = "not-refused"  # a rule that must refuse it does not


AGREED: Final = (PresetOutcome.ALLOWED, PresetOutcome.ROLLED_BACK)  # the policy and the preset agree


class PresetRefusal(Frozen):
    """A rule that refuses a preset, and what the preset has of it."""

    rule: PolicyRule
    found: str


class PresetDecision(Frozen):
    """What the policy says of a preset.

    Attributes:
        not_refused_by: rules that must refuse the preset, and refuse nothing of it.
    """

    preset: Preset
    outcome: PresetOutcome
    refusals: tuple[PresetRefusal, ...]
    not_refused_by: tuple[str, ...] = ()


class PolicyResult(Result):
    """What the policy says of presets; `rules` is how many there are."""

    schema_id: Literal["megacpp-validate/fp8-policy/2"] = "megacpp-validate/fp8-policy/2"
    rules: int
    presets: tuple[PresetDecision, ...]

    @property
    def breaks(self) -> bool:
        """Whether policy and presets disagree in any of them."""
        return any(decision.outcome not in AGREED for decision in self.presets)


def decide_policy(catalog: Catalog, presets: Sequence[str] = ()) -> PolicyResult:
    """What the policy allows.

    Args:
        presets: ids of presets; all without one.

    Raises:
        WrongArguments: there is no such preset.
    """
    policy = read_fp8_policy(catalog)
    chosen = choose_rows("preset", policy.presets, presets)
    decisions = tuple(decide_preset(preset, policy) for preset in chosen)
    return PolicyResult(rules=len(policy.rules), presets=decisions)


def decide_preset(preset: Preset, policy: Fp8Policy) -> PresetDecision:
    """What the rules refuse of a preset, and how the policy decides on it."""
    refusals = tuple(
        PresetRefusal(rule=rule, found=found) for rule in policy.rules for found in _find(rule, preset, policy)
    )
    missed = tuple(rule for rule in preset.refused_by if rule not in {refusal.rule.id for refusal in refusals})
    if missed:  # reported even where another rule refuses the preset
        outcome = PresetOutcome.NOT_REFUSED
    elif not refusals:
        outcome = PresetOutcome.ALLOWED
    else:
        outcome = PresetOutcome.ROLLED_BACK if preset.refused_by else PresetOutcome.REFUSED
    return PresetDecision(preset=preset, outcome=outcome, refusals=refusals, not_refused_by=missed)


def _find(rule: PolicyRule, preset: Preset, policy: Fp8Policy) -> Iterator[str]:
    """What a preset has of what a rule refuses."""
    first, last, low = preset.bf16_first, preset.bf16_last, preset.low
    missing = [owner for owner in rule.owners if not preset.owners.get(owner, "").strip()]
    match rule.kind:
        case "zones" if low and (first < rule.first or last < rule.last):
            layers = f"of {len(preset.pattern)} layers the first {first} and the last {last} stay in BF16"
            yield f"{layers}; at least {rule.first} and {rule.last} are required"
        case "parts":
            yield from (f"{part} runs in {one.recipe}" for one in low for part in one.parts if part in rule.parts)
        case "together" if low and preset.graphs and preset.recompute == "selective" and missing:
            yield f"low precision, graphs and selective recompute, and no owner is named for {', '.join(missing)}"
        case "history" if preset.amax_history < rule.least and any(one.recipe == "delayed" for one in low):
            yield f"amax_history is {preset.amax_history}; at least {rule.least} is required"
        case "target-recipe":
            for target, one in product(preset.targets, low):
                have = policy.recipes.get(target, ())
                if one.recipe not in have:
                    others = ", ".join(name for name, recipes in policy.recipes.items() if one.recipe in recipes)
                    lacks = f"{target} has no {one.recipe} (it has {', '.join(have) or 'none'})"
                    yield f"{', '.join(one.parts)}: {lacks}; targets that have it: {others or 'none'}"
        case "multiples":
            for one, row in product(low, policy.multiples):
                sizes = [("width", width, row.widths) for width in one.widths]
                for what, size, step in (*sizes, ("tokens", preset.tokens, row.tokens)):
                    if one.recipe == row.recipe and size % step:
                        odd = f"{what} {size}; {one.recipe} takes multiples of {step} ({row.source})"
                        yield f"{', '.join(one.parts)}: {odd}"


# --- What binds. ---


def find_refused_run(policy: Fp8Policy, preset: str, precision: str, changes: str) -> str:
    """Why a training run may not start, or its receipt does not count; empty where the policy allows the run.

    Args:
        preset: that the run names; one without a row is the bridge's to refuse.
        precision: recipes of the run; a run in BF16 or above meets every rule.
        changes: "name=value ...", as the run changed its size: its BF16 zones are judged in place of the preset's.
    """
    row = next((row for row in policy.presets if row.id == preset), None)
    if row is None or not {*precision.split()} & {*get_args(Recipe), "deep_gemm"}:
        return ""
    zones = {name: int(layers) for name, layers in re.findall(r"\b(bf16_first|bf16_last)=(\d+)", changes)}
    decision = decide_preset(row.model_copy(update=zones), policy)
    broken = [refusal.rule for refusal in decision.refusals]
    broken += [rule for rule in policy.rules if rule.id in decision.not_refused_by]
    if not broken:
        return ""
    rule, found = broken[0], "; ".join(refusal.found for refusal in decision.refusals)
    return (
        f"the FP8 preset {preset} {'was rolled back' if row.refused_by else 'is refused'} by the rule {rule.id} "
        f"({found or row.says}). Reason: {rule.reason}. Measured: {row.measured or rule.source}. "
        f"Next step: {rule.next}. `megacpp-validate fp8-policy` lists the presets that may run."
    )


def refuse_cells(rows: Iterable[ProbeCell], policy: Fp8Policy) -> None:
    """Refuse cells that would train in a preset that the policy refuses, before anything is started.

    Raises:
        WrongArguments: the first of them, with reason, measurement and next step.
    """
    for row in rows:
        precision = row.settings.get("recipes" if row.code == _TRAINING else "precision", "")
        preset, changes = row.settings.get("features", "production"), row.settings.get("changes", "")
        if reason := find_refused_run(policy, preset, precision, changes):
            raise WrongArguments(f"{row.id} does not start: {reason}")


# --- A session. ---


class Fp8Result(SessionResult):
    """One session.

    Attributes:
        loss: the loss gate's verdict on each recipe that was trained.
        loss_missing: recipes whose training passed and left no curve.
        policy: what the policy of low precision says of the presets.
    """

    schema_id: Literal["megacpp-validate/fp8/1"] = "megacpp-validate/fp8/1"
    loss: tuple[LossVerdict, ...] = ()
    loss_missing: tuple[str, ...] = ()
    policy: PolicyResult | None = None

    @property
    def lacks(self) -> bool:
        """Whether a selected cell is not good, or a verdict on what was trained is missing or not good."""
        verdicts = any(verdict.outcome is not LossOutcome.PASS for verdict in self.loss)
        return super().lacks or verdicts or bool(self.loss_missing)

    @property
    def breaks(self) -> bool:
        """Whether anything ran and is not good; curves that cannot be compared are lost evidence."""
        policy = self.policy is not None and self.policy.breaks
        return super().breaks or policy or any(verdict.outcome is LossOutcome.FAIL for verdict in self.loss)


def run_fp8(catalog: Catalog, options: RunOptions, progress: Progress) -> Fp8Result:
    """Run the cells, and judge the curves that training left beside their receipts.

    Raises as `refuse_cells` and `run_session`.
    """
    target = find_target(catalog, options.target)
    rows = choose_rows("cell of FP8", catalog.fp8_cells, options.probes, "fp8_")
    refuse_cells(rows, read_fp8_policy(catalog))
    policy = decide_policy(catalog)  # first: a file of the matrix that is wrong must not cost a session
    session = run_session(target, options, rows, progress)
    training = {row.id: row.settings.get("recipes", "").split() for row in rows if row.code == _TRAINING}
    trained = {one.cell: one for one in session.receipts if one.probe in training}
    verdicts = tuple(one for one in judge_folder(Path(session.folder)).verdicts if one.of in trained) if trained else ()
    passed = [one for one in trained.values() if one.outcome is Outcome.PASS]
    wanted = {(one.cell, recipe) for one in passed for recipe in training[one.probe]}
    missing = sorted(" ".join(one) for one in wanted - {(one.of, one.recipe) for one in verdicts})
    return Fp8Result(**dict(session), loss=verdicts, loss_missing=tuple(missing), policy=policy)
