"""Annotations for a continuous integration that reads workflow commands.

Escaping follows https://docs.github.com/actions/reference/workflow-commands-for-github-actions
and `command.ts` of actions/toolkit: in a message %, CR and LF; in a property `:` and `,` too.
"""

from __future__ import annotations

import re

from ...evidence.values import SourceLine
from ..markdown.static_tier import render_step_summary

__all__ = ["render_step_summary", "write_command"]


def write_command(level: str, message: str, title: str = "", site: SourceLine | None = None) -> str:
    """One workflow command, escaped."""
    properties = {}
    if site is not None:
        properties = {"file": site.file, "line": str(max(site.line, 1))}
    if title:
        properties["title"] = title
    listed = ",".join(f"{name}={_escape_property(value)}" for name, value in properties.items())
    return f"::{level}{' ' + listed if listed else ''}::{_escape_message(message)}"


def _escape_message(text: str) -> str:
    text = re.sub(r"[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029]", " ", text)
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_message(text).replace(":", "%3A").replace(",", "%2C")
