"""The command line: one file for the verbs of a room.

A verb parses its options, calls one function of a room and returns the result. It imports that room when it is called:
the verb that runs on a GPU host does not need what reads sources.
"""

from __future__ import annotations

import sys

from .. import TOOL
from . import app as _app
from . import canary, gate, images, jit, report, scores, sessions

__all__ = ["canary", "gate", "images", "jit", "main", "report", "scores", "sessions"]


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["--version"]:
        print(TOOL)  # noqa: T201 - what was requested
        return
    _app.main()
