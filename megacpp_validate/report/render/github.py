"""A document as GitHub workflow commands: an error or a warning for each thing that is not good, then the answer."""

from __future__ import annotations

import re
from typing import Final

from megacpp_validate.text import clean, clean_line

from ..document import Diagnostic, Document, Inline, Link
from ..marks import Mark, Tone

_LEVELS: Final = {Tone.BAD: "error", Tone.RISK: "warning", Tone.MISSING: "warning"}


def render_github(document: Document) -> str:
    """One command a finding at its line; what is good is silent, for a run shows ten annotations of a level."""
    cases = document.judged()
    lines = [_annotate(case, document) for case in cases if case.mark.tone in _LEVELS]
    level = _LEVELS.get(document.mark.tone, "notice")
    if any(case.mark.tone is document.mark.tone for case in cases):
        level = "notice"  # the cases say what is wrong
    lines.append(write_command(level, document.summary, document.title))
    return "".join(f"{line}\n" for line in lines)


def _annotate(case: Diagnostic, document: Document) -> str:
    parts = [case.message.rstrip("."), *list_plain_fields(case)]
    if case.help:
        parts.append(f"Next: {case.help}")
    file, line = (case.place.file, case.place.line) if case.place is not None else ("", 0)
    title = f"{case.name}: {case.mark.word} ({document.title})"
    return write_command(_LEVELS[case.mark.tone], ". ".join(filter(None, parts)), title, file, line)


def list_plain_fields(case: Diagnostic) -> list[str]:
    """The fields of a diagnostic as text."""
    return [f"{label}: {', '.join(map(_show, content))}" for label, content in case.list_fields() if label != "at"]


def _show(one: Inline) -> str:
    if isinstance(one, Mark):
        return one.word
    return one.text if isinstance(one, Link) else str(one)


def write_command(level: str, message: str, title: str = "", file: str = "", line: int = 0) -> str:
    """One workflow command, escaped."""
    properties = {"file": file, "line": str(max(line, 1))} if file else {}
    if title:
        properties["title"] = title
    listed = ",".join(f"{name}={_escape_property(value)}" for name, value in properties.items())
    return f"::{level}{' ' + listed if listed else ''}::{_escape(clean(message))}"


def _escape(text: str) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return re.sub(r"#(?=#\[)", "# ", text)  # the runner still reads `##[error]`, anywhere in a line


def _escape_property(text: str) -> str:
    return _escape(clean_line(text)).replace(":", "%3A").replace(",", "%2C")
