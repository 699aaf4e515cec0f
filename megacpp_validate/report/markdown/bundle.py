"""A bundle in Markdown."""

from __future__ import annotations

from ...images.bundle.result import BundleResult
from ..words.bundle import name_kind, say_absent, say_kind, say_size, summarize_bundle
from .text import escape


def tell_bundle(result: BundleResult) -> list[str]:
    """What is in it, what is not, and its id."""
    lines = [f"## Bundle of {escape(result.target)}", "", f"**{escape(summarize_bundle(result))}**", ""]
    lines += ["| what | files | size |", "| --- | --- | ---: |"]
    lines += [f"| {escape(name_kind(row))} | {escape(say_kind(row))} | {say_size(row.bytes)} |" for row in result.kinds]
    if absent := say_absent(result):
        lines += ["", *(f"- {escape(line)}" for line in absent)]
    return lines
