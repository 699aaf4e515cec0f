"""What features are worth, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pydantic import JsonValue

from ...gate.ablation import AblationResult, Change, FeatureAblation, LossChange
from ..document import Bullets, Details, Diagnostic, Document, Paragraph, Table
from ..marks import good, mark_of, missing
from .words import join_same

_METHOD: Final = (
    "Runs without a feature and with it take turns (off, on, off, on), with the same seed and data. In brackets: the "
    "95% interval, by Student's t over runs of one arm. A change is noise where its interval includes no change."
)


def describe_ablation(result: AblationResult) -> Document:
    """A table of every feature, and below it how each was run."""
    rows = tuple(
        (
            row.feature,
            mark_of(row.verdict),
            _show_change(row.step_time),
            _show_change(row.tokens_per_second),
            _show_change(row.memory),
            _show_loss(row.loss),
        )
        for row in result.features
    )
    table = Table(("feature", "verdict", "step time", "tokens/s", "peak memory", "loss"), rows)
    cases = tuple(map(_describe_feature, result.features))
    settings = (
        Details(f"How `{row.feature}` was run", (Bullets(tuple(_list_settings(row))),)) for row in result.features
    )
    words = [f"{word}: {names}" for names, word in join_same((one.name, one.mark.word) for one in cases)]
    mark = good("judged") if result.holds else missing("not judged")
    summary = f"{'; '.join(words) or 'No feature was selected'}."
    return Document("What each feature changes", summary, mark, (table, Paragraph(_METHOD), *cases, *settings), cases)


def _describe_feature(row: FeatureAblation) -> Diagnostic:
    units = (
        ("step time, s", row.step_time, 1),
        ("tokens/s", row.tokens_per_second, 1),
        ("memory, MiB", row.memory, 2**20),
    )
    numbers = [f"{name} {one.off / unit:.4g} -> {one.on / unit:.4g}" for name, one, unit in units if one]
    numbers += [f"loss {row.loss.off:.4f} -> {row.loss.on:.4f}"] if row.loss else []
    off, on = _flatten(row.off), _flatten(row.on)
    fields = (
        ("off -> on", tuple(f"{key}: {off.get(key)} -> {value}" for key, value in on.items() if off.get(key) != value)),
        ("numbers", tuple(numbers)),
        ("not judged", row.reasons),
    )
    return Diagnostic(row.feature, mark_of(row.verdict), "ablation", f"{row.title}. Off: {row.plain}", fields)


def _list_settings(row: FeatureAblation) -> Iterable[str]:
    """What ran: model, device, backends, topology, versions, and where the feature is defined."""
    yield f"defined in: {row.source}"
    yield f"size {row.size}, ranks {row.ranks} on {row.device}, {row.off.get('precision')}, seed {row.seed}"
    yield f"pairs {row.pairs} of {row.steps} steps, times from step {row.warm}; both arms begin with {row.base} forms"
    for run in {run.arm: run for run in reversed(row.runs)}.values():
        yield f"backends, {run.arm}: {', '.join(f'{name} {part.observed}' for name, part in run.parts.items())}"
    for run in row.runs[:1]:
        yield f"model: {run.pattern}, {run.parameters:,} parameters"
        yield f"topology: {', '.join(f'{key} {value}' for key, value in run.topology.items())}"
        yield f"versions: {', '.join(f'{key} {value}' for key, value in run.versions.items())}"


def _flatten(arm: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Settings of an arm; what stands in a table by TABLE.NAME."""
    flat: dict[str, JsonValue] = {}
    for key, value in arm.items():
        flat |= {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _show_change(change: Change | None) -> str:
    """A change with its interval: "+3.1% [+2.4%, +3.9%]"."""
    if change is None:
        return "not measured"
    ratio, low, high = (f"{100 * (one - 1):+.3g}%" for one in (change.ratio, change.low, change.high))
    return f"{ratio} [{low}, {high}]"


def _show_loss(loss: LossChange | None) -> str:
    if loss is None:
        return "not measured"
    if loss.identical:
        return "bitwise equal"
    spread = max(loss.half, loss.rounding)
    return f"{loss.difference:+.2g} nats, {'beyond' if loss.changes else 'within'} {spread:.2g}"
