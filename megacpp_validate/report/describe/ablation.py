"""What features are worth, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pydantic import JsonValue

from megacpp_validate.text import count

from ...gate.ablation import AblationResult, Change, FeatureAblation, LossChange, Verdict
from ..document import Bullets, Details, Diagnostic, Document, Paragraph, Table
from ..marks import good, missing, quiet
from ..marks import risk as risk_mark

MARKS: Final = {
    Verdict.WIN: good("win"),
    Verdict.TAX: risk_mark("tax"),
    Verdict.NOISE: quiet("noise"),
    Verdict.NOT_JUDGED: missing("not judged"),
}
_METHOD: Final = (
    "Runs without a feature and with it take turns (off, on, off, on), with the same seed and data. In brackets: the "
    "95% interval, by Student's t over runs of one arm. A change is noise where its interval includes no change, or "
    "where two runs of one arm lie as far apart."
)


def describe_ablation(result: AblationResult) -> Document:
    """A table of every feature, and below it how each was looked at."""
    found = {verdict: [row.feature for row in result.features if row.verdict is verdict] for verdict in Verdict}
    words = [f"{MARKS[verdict].word}: {', '.join(names)}" for verdict, names in found.items() if names]
    rows = tuple(
        (row.feature, MARKS[row.verdict], _say_change(row.step_time), _say_change(row.tokens_per_second),
         _say_change(row.memory), _say_loss(row.loss))
        for row in result.features
    )  # fmt: skip
    table = Table(("feature", "verdict", "step time", "tokens/s", "peak memory", "loss"), rows)
    cases = tuple(_describe_feature(row) for row in result.features)
    settings = tuple(
        Details(f"How `{row.feature}` was run", (Bullets(_list_settings(row)),)) for row in result.features
    )
    mark = good("judged") if result.holds else missing("not judged")
    return Document(
        "What each feature changes", f"{'; '.join(words) or 'No feature was selected'}.", mark,
        (table, Paragraph(_METHOD), *cases, *settings), cases,
    )  # fmt: skip


def _describe_feature(row: FeatureAblation) -> Diagnostic:
    run = row.runs[0] if row.runs else None
    model = f"{row.size}, {run.pattern}, {run.parameters:,} parameters" if run and run.model else row.size
    how = f"{count(row.ranks, 'rank')} on {row.device}, {row.off.get('precision')}, seed {row.seed}"
    runs = f"{count(row.pairs, 'pair')} of {count(row.steps, 'step')}, times from step {row.warm}"
    fields = (
        ("off -> on", "; ".join(_list_differences(row))),
        ("numbers", "; ".join(_list_numbers(row))),
        ("model", f"{model}; {how}; {runs}; both arms begin with the {row.base} forms"),
        *(("not judged", reason) for reason in row.reasons),
    )
    return Diagnostic(
        row.feature, MARKS[row.verdict], group="ablation", message=f"{row.title}. Off: {row.plain}", fields=fields
    )


def _list_settings(row: FeatureAblation) -> tuple[str, ...]:
    """What ran: settings of both arms, backends, topology, versions, and where the feature is defined."""
    listed = [f"defined in: {row.source}"]
    for run in {run.arm: run for run in reversed(row.runs)}.values():
        backends = ", ".join(f"{name} {part.observed}" for name, part in run.parts.items())
        listed += [f"backends, {run.arm}: {backends}"]
    if row.runs:
        listed.append("topology: " + ", ".join(f"{key} {value}" for key, value in row.runs[0].topology.items()))
        listed.append("versions: " + ", ".join(f"{key} {value}" for key, value in row.runs[0].versions.items()))
    return tuple(listed)


def _list_differences(row: FeatureAblation) -> list[str]:
    """What the two arms differ in: each setting, off -> on."""
    off, on = (
        {f"{key}.{name}" if name else key: value for key, one in arm.items() for name, value in _split(one)}
        for arm in (row.off, row.on)
    )
    return [f"{key}: {off.get(key)} -> {value}" for key, value in on.items() if off.get(key) != value]


def _split(value: JsonValue) -> Iterable[tuple[str, JsonValue]]:
    return value.items() if isinstance(value, dict) else [("", value)]


def _list_numbers(row: FeatureAblation) -> list[str]:
    rows = (
        ("step time, s", row.step_time, 1),
        ("tokens/s", row.tokens_per_second, 1),
        ("peak memory, MiB", row.memory, 2**20),
    )
    found = [
        f"{name} {change.off / unit:.4g} -> {change.on / unit:.4g}" for name, change, unit in rows if change is not None
    ]
    return [*found, f"loss {row.loss.off:.4f} -> {row.loss.on:.4f}"] if row.loss is not None else found


def _say_change(change: Change | None) -> str:
    """A change with its interval: "+3.1% [+2.4%, +3.9%]"."""
    if change is None:
        return "not measured"
    return f"{_percent(change.ratio)} [{_percent(change.low)}, {_percent(change.high)}]"


def _percent(ratio: float) -> str:
    percent = 100 * (ratio - 1)
    return f"{percent:+.3g}%" if abs(percent) < 1e6 else "unbounded"


def _say_loss(loss: LossChange | None) -> str:
    if loss is None:
        return "not measured"
    if loss.identical:
        return "bitwise equal"
    spread = max(loss.half, loss.repeats, loss.rounding)
    return f"{loss.difference:+.2g} nats, {'beyond' if loss.changes else 'within'} {spread:.2g}"
