"""What a release gate decided, in the form and at the place that was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console

from ...evidence.release_gate import GateDecision
from ...report.github.release_gate import render_release_gate_annotations
from ...report.junit.release_gate import render_release_gate_junit
from ...report.markdown.release_gate import render_release_gate_markdown
from ...report.terminal.release_gate import render_release_gate
from ..app import Format
from ..output import write_told


def decision_text(decision: GateDecision) -> str:
    """As JSON: two spaces, keys sorted; the same text for the same decision."""
    data = decision.model_dump(mode="json")
    return _show_turns(json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _show_turns(text: str) -> str:
    """Escape what would turn a text around, so that it is read as it stands; of JSON only strings have it."""
    return _TURNS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


_TURNS: Final = re.compile(r"[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # what turns text around

_RENDERERS: Final[dict[Format, Callable[[GateDecision], str]]] = {
    Format.JSON: decision_text,
    Format.JUNIT: render_release_gate_junit,
    Format.GITHUB: render_release_gate_annotations,
    Format.MARKDOWN: render_release_gate_markdown,
}


def tell_release_gate(decision: GateDecision, fmt: Format, output: Path | None, *, verbose: bool) -> None:
    """Print a decision, or write it to a file."""

    def draw(console: Console) -> None:
        render_release_gate(decision, verbose=verbose, console=console)

    write_told(draw if fmt is Format.TABLE else None, lambda: _show_turns(_RENDERERS[fmt](decision)), output)
