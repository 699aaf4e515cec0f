"""The verbs of the JIT caches, run in this process."""

from __future__ import annotations

import errno

from typer.testing import CliRunner

from megacpp_validate.cli.app import app
from megacpp_validate.errors import Exit, ToolError


def ask(*arguments: object) -> tuple[int, str]:
    """Exit code, and what the verb wrote or raised, on one line."""
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    fault = done.exception
    if isinstance(fault, ToolError):
        return fault.exit, str(fault)
    if isinstance(fault, OSError) and fault.errno == errno.ENOSPC:  # `cli.app.main` ends so
        return Exit.INFRASTRUCTURE, str(fault)
    assert fault is None or isinstance(fault, SystemExit), fault
    return done.exit_code, done.output
