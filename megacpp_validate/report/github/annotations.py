"""Annotations for a continuous integration that reads workflow commands.

Escaping follows https://docs.github.com/actions/reference/workflow-commands-for-github-actions
and `command.ts` of actions/toolkit: in a message %, CR and LF; in a property `:` and `,` too.
"""

from __future__ import annotations

import re

from megacpp_validate.evidence.receipt import Outcome

from ...environments.session_result import SessionResult
from ...evidence.values import SourceLine
from ...gate.loss_result import LossOutcome
from ..markdown.static_tier import render_step_summary
from ..marks import mark_cell
from ..words.loss import find_losses, say_loss, say_loss_missing
from ..words.parity import (
    find_failed,
    find_fallbacks,
    say_cause,
    say_fallback,
    say_next_step,
    say_red_policy,
    say_subject,
    summarize_session,
)

__all__ = [
    "render_session_annotations",
    "render_step_summary",
]


def render_session_annotations(result: SessionResult) -> str:
    """One command a probe that is not good: an error where it ran, a warning where it did not; then the answer."""
    where = f"{result.stack} on {result.target}"
    lines = []
    for receipt in result.receipts:
        if receipt.outcome.is_good:
            lines.append(write_command("debug", f"{receipt.cell}: {mark_cell(receipt.outcome).word}"))
            continue
        said = [say_cause(receipt), *map(say_fallback, find_fallbacks(receipt))]
        if failed := find_failed(receipt):
            said.append(f"Out of bounds: {', '.join(check.name for check in failed)}")
        message = f"{'. '.join(part.rstrip('.') for part in said)}. Next: {say_next_step(receipt)}"
        level = "warning" if receipt.outcome is Outcome.NOT_RUN else "error"
        lines.append(write_command(level, message, f"{receipt.probe}: {mark_cell(receipt.outcome).word} ({where})"))
    for verdict in find_losses(result):
        if verdict.outcome is LossOutcome.PASS:
            lines.append(write_command("debug", say_loss(verdict)))
        else:
            level = "error" if verdict.outcome is LossOutcome.FAIL else "warning"
            lines.append(
                write_command(level, say_loss(verdict), f"loss gate: {verdict.recipe or 'no recipe'} ({where})")
            )
    if missing := say_loss_missing(result):
        lines.append(write_command("warning", f"no verdict on the loss: {missing}", f"loss gate ({where})"))
    if refused := say_red_policy(result):
        lines.append(write_command("error", refused, f"policy of low precision ({where})"))
    lines.append(write_command("notice", summarize_session(result), f"{say_subject(result)} of {where}"))
    return "".join(f"{line}\n" for line in lines)


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
