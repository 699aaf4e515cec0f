"""The command line: one file a verb, found by its place in this folder.

A verb parses its options, calls one function of a room, writes the result and exits with the result's code. It imports
that room when it is called: the verb that runs on a GPU host does not need what reads sources.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Final

from . import app as _app

__all__ = ["load_verbs", "main"]

_HERE: Final = Path(__file__).parent


def load_verbs(verb: str = "") -> None:
    """Register one verb, or all of them where no file has that name."""
    name = verb.replace("-", "_")
    if name.isidentifier() and not name.startswith("_") and (_HERE / f"{name}.py").is_file():
        import_module(f".{name}", __name__)
        if any(_app.name_verb(command) == verb for command in _app.app.registered_commands):
            return
    for file in sorted(_HERE.glob("[a-z]*.py")):
        if file.stem != "result_again":
            import_module(f".{file.stem}", __name__)


def main() -> None:
    """Run the command line; only the file of the verb that is called is loaded."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if verb != "--version":
        load_verbs(verb)
    _app.main()
