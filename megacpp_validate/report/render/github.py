"""A document as GitHub workflow commands: an error or a warning for each thing that is not good, then the answer."""

from __future__ import annotations

from typing import Final

from megacpp_validate.text import clean, clean_line

from ..document import Diagnostic, Document, Inline, Link
from ..marks import Mark, Tone

LEVELS: Final = {Tone.BAD: "error", Tone.RISK: "warning", Tone.MISSING: "warning"}


def render_github(document: Document) -> str:
    """One command a finding at its line; what is good is silent, for a run shows ten annotations of a level."""
    cases = document.judged()
    lines = [_annotate(case, document) for case in cases if case.mark.tone in LEVELS]
    level = LEVELS.get(document.mark.tone, "notice")
    if any(case.mark.tone is document.mark.tone for case in cases):
        level = "notice"  # the cases say what is wrong
    lines.append(_write_command(level, document.summary, title=document.title))
    return "".join(f"{line}\n" for line in lines)


def _annotate(case: Diagnostic, document: Document) -> str:
    at = {"file": case.place.file, "line": str(max(case.place.line, 1))} if case.place is not None else {}
    title = f"{case.name}: {case.mark.word} ({document.title})"
    return _write_command(LEVELS[case.mark.tone], "\n".join(list_lines(case)), **at, title=title)


def list_lines(case: Diagnostic) -> list[str]:
    """A diagnostic as lines of text, without its place and its output."""
    fields = (f"{label}: {', '.join(map(_show, content))}" for label, content in case.list_fields() if label != "at")
    return [*filter(None, [case.message]), *fields, *([f"Next step: {case.help}"] if case.help else [])]


def _show(one: Inline) -> str:
    if isinstance(one, Mark):
        return one.word
    return one.text if isinstance(one, Link) else str(one)


def _write_command(level: str, message: str, **properties: str) -> str:
    """One workflow command, escaped."""
    listed = ",".join(
        f"{name}={_escape(clean_line(value)).replace(':', '%3A').replace(',', '%2C')}"
        for name, value in properties.items()
    )
    return f"::{level} {listed}::{_escape(clean(message))}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
