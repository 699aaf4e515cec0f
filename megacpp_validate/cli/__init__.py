"""The command line: one file a verb, found by its place in this folder.

A verb parses its options, calls one function of a room and returns the result. It imports that room when it is called:
the verb that runs on a GPU host does not need what reads sources.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from .. import TOOL
from . import app as _app

__all__ = ["load_verbs", "main"]


def load_verbs(verb: str = "") -> None:
    """Register one verb, or all of them where no file has that name."""
    files = {file.stem.replace("_", "-"): file.stem for file in sorted(Path(__file__).parent.glob("[a-z]*.py"))}
    for name in [files[verb]] if verb in files else files.values():
        import_module(f".{name}", __name__)


def main() -> None:
    """Run the command line; only the file of the verb that is called is loaded."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if verb == "te-canary":  # its earlier name
        verb = sys.argv[1] = "canary"
    if verb == "--version":
        print(TOOL)  # noqa: T201 - what was requested
        return
    load_verbs(verb)
    _app.main()
