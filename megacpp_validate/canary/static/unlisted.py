"""Files of the bridge that no module lists and that take something from an accessor all the same.

What such a file consumes breaks whoever imports it, so it counts as the first module, in dependency order, that does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from .accessors import ACCESSOR_FILE, BridgeFile, parse_file


def unlisted_files(listed: Sequence[BridgeFile], module_order: Sequence[str]) -> Iterator[BridgeFile]:
    """Files beside the listed ones that import the accessors, each under the module that reaches it first."""
    folders = {file.path.parent: file for file in listed if file.path.name == ACCESSOR_FILE}
    for folder, home in folders.items():
        every = {path.stem: BridgeFile("", path, path.name) for path in sorted(folder.glob("*.py"))}
        imports = {stem: _siblings(parse_file(file)) & every.keys() for stem, file in every.items()}
        reached = {
            module: _reach({f.path.stem for f in listed if f.module == module and f.path.parent == folder}, imports)
            for module in module_order
        }
        known = {file.path.stem for file in listed if file.path.parent == folder}
        for stem, file in every.items():
            if stem not in known and home.path.stem in imports[stem]:
                module = next((m for m in module_order if stem in reached[m]), module_order[0])
                shown = f"{home.shown.removesuffix(home.path.name)}{file.path.name}"
                yield BridgeFile(module, file.path, shown)


def _siblings(tree: ast.Module) -> set[str]:
    """Modules of the same folder that a file imports, as `from . import a` or `from .a import b`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return found


def _reach(start: set[str], imports: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(start)
    while waiting:
        stem = waiting.pop()
        if stem not in seen:
            seen.add(stem)
            waiting += imports.get(stem, ())
    return seen
