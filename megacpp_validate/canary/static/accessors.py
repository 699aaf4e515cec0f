"""The accessors of the bridge's `imports.py`, read from its code: which symbols each one tries, in which order."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...errors import WrongArguments
from ...evidence.values import SourceLine
from .surface import Accessor, Symbol

ACCESSOR_FILE = "imports.py"
VENDOR = "transformer_engine"


class BridgeUnreadable(WrongArguments):
    """The bridge's code cannot be read as the canary needs it; the text says where and why."""


@dataclass(frozen=True)
class BridgeFile:
    """One file of the bridge: which module it belongs to, its path, and its name in reports."""

    module: str
    path: Path
    shown: str


def parse_file(file: BridgeFile) -> ast.Module:
    """The syntax tree of a file; raises `BridgeUnreadable` where there is none."""
    try:
        return ast.parse(file.path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as fault:
        raise BridgeUnreadable(
            f"{file.shown} cannot be read as Python: {fault}. Next step: mend it, or the path in matrix/bridge.toml."
        ) from fault


def read_accessors(file: BridgeFile, tree: ast.Module) -> Iterable[Accessor]:
    """Functions of the file that import from the vendor."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        symbols: list[Symbol] = []
        sites: list[SourceLine] = []
        for found in ast.walk(node):
            if isinstance(found, ast.ImportFrom) and (found.module or "").partition(".")[0] == VENDOR:
                symbols += [Symbol(found.module or "", alias.name) for alias in found.names]
                sites += [SourceLine(file=file.shown, line=found.lineno)] * len(found.names)
        if symbols:
            yield Accessor(node.name, tuple(symbols), tuple(sites))
