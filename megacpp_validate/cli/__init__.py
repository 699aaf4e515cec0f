"""The command line: one file a verb, found by its place in this folder.

A verb parses its options, calls one function of a room, writes the result and exits with the result's code. It imports
that room when it is called: the verb that runs on a GPU host does not need what reads sources.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from .app import main

__all__ = ["main"]

_HERE = Path(__file__).parent
for _file in sorted([*_HERE.glob("[a-z]*.py"), *_HERE.glob("*/*_verbs.py")]):
    import_module("." + ".".join(_file.relative_to(_HERE).with_suffix("").parts), __name__)
