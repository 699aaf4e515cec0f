"""What features are worth, in words, for every form that tells it."""

from __future__ import annotations

from typing import Final, assert_never

from ...gate.ablation_result import AblationResult, Change, FeatureAblation, LossChange, Verdict
from ..marks import Mark
from ..summaries import count

HEADINGS: Final = ("feature", "step time", "tokens/s", "peak memory", "loss", "verdict")
_MIB: Final = 2**20


def mark_verdict(verdict: Verdict) -> Mark:
    """How a verdict looks; one without evidence is never a good one."""
    match verdict:
        case Verdict.WIN:
            return Mark("✓", "-", "win", "good")
        case Verdict.TAX:
            return Mark("▲", "!", "tax", "risk")
        case Verdict.NOISE:
            return Mark("·", ".", "noise", "quiet")
        case Verdict.NOT_JUDGED:
            return Mark("○", "?", "not judged", "bad")
        case _:
            assert_never(verdict)


def summarize_ablation(result: AblationResult) -> str:
    """The answer in a sentence."""
    seen = {verdict: [row.feature for row in result.features if row.verdict is verdict] for verdict in Verdict}
    said = [f"{mark_verdict(verdict).word}: {', '.join(names)}" for verdict, names in seen.items() if names]
    return f"{'; '.join(said) or 'No feature was looked at'}."


def say_cells(row: FeatureAblation) -> tuple[str, ...]:
    """A row of the table, below `HEADINGS`."""
    changes = (row.step_time, row.tokens_per_second, row.memory)
    return (row.feature, *map(say_change, changes), name_loss(row.loss), name_verdict(row))


def say_numbers(row: FeatureAblation) -> list[str]:
    """The numbers of both arms, each in a few words."""
    told = {
        "step time": (row.step_time, "s", 1),
        "tokens/s": (row.tokens_per_second, "1/s", 1),
        "peak memory": (row.memory, "MiB", _MIB),
    }
    said = [
        f"{name} {change.off / scale:.4g} -> {change.on / scale:.4g} {unit}"
        for name, (change, unit, scale) in told.items()
        if change is not None
    ]
    return [*said, f"loss: {say_loss(row.loss)}"] if row.loss is not None else said


def say_row(row: FeatureAblation) -> str:
    """A feature in one line."""
    if row.verdict is Verdict.NOT_JUDGED:
        return f"{row.feature}: {say_verdict(row)}"
    return f"{row.feature}: {say_verdict(row)}; step time {say_change(row.step_time)}; loss {say_loss(row.loss)}"


def say_change(change: Change | None) -> str:
    """A change with its interval: "+3.1% [+2.4%, +3.9%]"."""
    if change is None:
        return "not seen"
    return f"{say_percent(change.ratio)} [{say_percent(change.low)}, {say_percent(change.high)}]"


def say_percent(ratio: float) -> str:
    """A ratio as a change."""
    percent = 100 * (ratio - 1)
    return f"{percent:+.3g}%" if abs(percent) < 1e6 else "beyond any measure"


def say_loss(loss: LossChange | None) -> str:
    """What becomes of the loss."""
    if loss is None:
        return "not seen"
    if loss.identical:
        return f"the same in every bit ({loss.on:.4f})"
    spread = max(loss.half, loss.repeats, loss.rounding)
    said = "changes the loss" if loss.changes else "within its spread"
    return f"{said}: {loss.difference:+.2g} nats, spread {spread:.2g} ({loss.off:.4f} -> {loss.on:.4f})"


def name_loss(loss: LossChange | None) -> str:
    """What becomes of the loss, in a cell."""
    if loss is None:
        return "not seen"
    if loss.identical:
        return "the same bits"
    spread = max(loss.half, loss.repeats, loss.rounding)
    return f"{loss.difference:+.2g} nats, {'beyond' if loss.changes else 'within'} {spread:.2g}"


def name_verdict(row: FeatureAblation) -> str:
    """The verdict, in a cell."""
    return mark_verdict(row.verdict).word + _say_rest(row)


def say_verdict(row: FeatureAblation) -> str:
    """The verdict in words: that of the step time first, and what else is more than noise."""
    if row.verdict is Verdict.NOT_JUDGED:
        return f"not judged: {row.reasons[0]}"
    said = {
        Verdict.WIN: "a win: steps are shorter",
        Verdict.TAX: "a tax: steps take longer",
    }.get(row.verdict, "noise: step times do not differ by more than their spread")
    return said + _say_rest(row)


def _say_rest(row: FeatureAblation) -> str:
    """What else is more than noise."""
    said = ""
    if row.memory is not None and row.memory.verdict is not Verdict.NOISE:
        said += f"; {'saves' if row.memory.verdict is Verdict.WIN else 'takes more'} memory"
    if row.loss is not None and row.loss.changes:
        said += "; changes the loss"
    return said


def say_model(row: FeatureAblation) -> str:
    """What was trained: exact model, where, on how many ranks, how often."""
    run = row.runs[0] if row.runs else None
    changes = row.on.get("changes")
    both = changes if isinstance(changes, dict) else {}
    name = " ".join([row.size, *(f"{key}={value}" for key, value in both.items())])
    model = f"{name}, {run.pattern}, {run.parameters:,} parameters" if run and run.model else name
    how = f"{count(row.ranks, 'rank')} on {row.device}, {row.off.get('precision')}"
    runs = f"{count(row.pairs, 'pair')} of {count(row.steps, 'step')}, times from step {row.warm}, seed {row.seed}"
    return f"{model}; {how}; {runs}; both arms begin with the {row.base} forms"


def say_topology(row: FeatureAblation) -> str:
    """How a run was spread, as its ranks say; as it was asked for where none said."""
    seen = row.runs[0].topology if row.runs else {}
    plan = seen.get("plan", row.off.get("plan"))
    told = [f"{key} {value}" for key, value in plan.items()] if isinstance(plan, dict) else []
    return ", ".join([str(seen.get("device", row.device)), *told])


def say_states(row: FeatureAblation) -> list[str]:
    """What the two arms differ in: each setting, off -> on."""
    told = []
    for key in row.on:
        off, on = row.off.get(key), row.on[key]
        if isinstance(off, dict) and isinstance(on, dict):
            told += [f"{key}.{name}: {off.get(name)} -> {on[name]}" for name in on if off.get(name) != on[name]]
        elif off != on:
            told.append(f"{key}: {off} -> {on}")
    return told


def say_backends(row: FeatureAblation, arm: str) -> str:
    """What the parts of an arm were seen on, parts of one backend together."""
    run = next((run for run in row.runs if run.arm == arm), None)
    if run is None or not run.parts:
        return "nothing was seen"
    by: dict[str, list[str]] = {}
    for name, part in run.parts.items():
        asked = "" if part.requested == part.observed else f" (asked for {part.requested})"
        by.setdefault(part.observed + asked, []).append(name)
    return "; ".join(f"{backend}: {', '.join(names)}" for backend, names in by.items())


def say_versions(row: FeatureAblation) -> str:
    """What was loaded."""
    run = next((run for run in row.runs if run.versions), None)
    return ", ".join(f"{key} {value}" for key, value in run.versions.items()) if run else "nobody said"
