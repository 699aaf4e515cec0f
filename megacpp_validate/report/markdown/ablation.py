"""What features are worth, as a page in Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from ...gate.ablation_result import AblationResult, FeatureAblation
from ..words.ablation import (
    HEADINGS,
    say_backends,
    say_cells,
    say_model,
    say_numbers,
    say_states,
    say_topology,
    say_verdict,
    say_versions,
    summarize_ablation,
)
from .text import escape


def render_ablation_page(result: AblationResult) -> str:
    """The page: the answer, a table of every feature, and how each was looked at."""
    return "\n".join([*_tell(result), ""])


def _tell(result: AblationResult) -> Iterator[str]:
    yield from ("# What each feature changes", "", escape(summarize_ablation(result)), "")
    yield (
        "Runs without a feature and with it take turns (off, on, off, on), with the same seed and data. In brackets: "
        "the interval of 95%, from runs of one arm and from blocks of steps, whichever is wider. A change that its "
        "interval does not set apart from nothing, or that is no larger than between two runs of one arm, is noise."
    )
    yield from ("", f"| {' | '.join(HEADINGS)} |", f"|{' --- |' * len(HEADINGS)}")
    for row in result.features:
        yield f"| {' | '.join(map(escape, say_cells(row)))} |"
    for row in result.features:
        yield from _tell_feature(row)


def _tell_feature(row: FeatureAblation) -> Iterator[str]:
    yield from ("", f"## {escape(row.feature)}", "", escape(f"{row.title}. Without it: {row.plain}."), "")
    told = {
        "Verdict": say_verdict(row),
        "Numbers": "; ".join(say_numbers(row)) or "none",
        "Model": say_model(row),
        "Topology": say_topology(row),
        "Arms, off -> on": "; ".join(say_states(row)),
        "Backends, off": say_backends(row, "off"),
        "Backends, on": say_backends(row, "on"),
        "Versions": say_versions(row),
        "Defined in": row.source,
    }
    if row.reasons:
        told["Not judged"] = "; ".join(row.reasons)
    for label, words in told.items():
        yield f"- {label}: {escape(words)}"
