"""The verdict on an image in Markdown."""

from __future__ import annotations

from ...images.verify_result import ImageVerdict
from ..words.image_verify import mark_check, say_packages, summarize_image
from .text import escape


def tell_image_verdict(verdict: ImageVerdict) -> list[str]:
    """Every check in a row."""
    lines = [f"## {escape(verdict.image)}", "", f"**{escape(summarize_image(verdict))}**", ""]
    lines += ["| | check | found | next step |", "| --- | --- | --- | --- |"]
    for check in verdict.checks:
        mark = mark_check(check.outcome)
        cells = (f"{mark.symbol} {mark.word}", check.name, check.says, check.next_step)
        lines.append(f"| {' | '.join(map(escape, cells))} |")
    if said := say_packages(verdict):
        lines += ["", escape(said)]
    if verdict.unknown_licences:
        lines += ["", f"No licence said: {escape(', '.join(verdict.unknown_licences))}"]
    return lines
