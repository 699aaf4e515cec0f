"""Attributes that no statement of a class's body binds: named as texts (f-strings, too), or set from outside."""

from __future__ import annotations

import ast
import re

from .syntax_nodes import once_per_node, walk


def surely_names(node: ast.AST | None, name: str) -> bool:
    """Whether a class registers an attribute under this very name: `register_parameter("weight", ...)`."""
    for found in walk(node) if node is not None else ():
        match found:
            case ast.Call(func=ast.Attribute(attr="register_parameter" | "register_buffer"), args=[first, *_]):
                if isinstance(first, ast.Constant) and first.value == name:
                    return True
    return False


def ways_to_name(node: ast.AST | None, name: str) -> set[str]:
    """Texts in a class's code that mention an attribute, as `register_parameter("weight")` and f-strings do."""
    texts, patterns = _texts_in(node) if node is not None else (frozenset(), {})
    if "{}" in name:
        return {name} if name in texts or name in patterns else set()
    return {way for way, pattern in patterns.items() if pattern and pattern.fullmatch(name)} | ({name} & texts)


@once_per_node
def _texts_in(node: ast.AST) -> tuple[frozenset[str], dict[str, re.Pattern[str] | None]]:
    """Texts of one line in a class's code; its f-strings with "{}" for what they put in, and what names they make."""
    texts: set[str] = set()
    patterns: dict[str, re.Pattern[str] | None] = {}
    for found in walk(node):
        if isinstance(found, ast.Constant) and isinstance(found.value, str) and "\n" not in found.value:
            texts.add(found.value)
        elif isinstance(found, ast.JoinedStr):
            parts = [str(v.value) if isinstance(v, ast.Constant) else "{}" for v in found.values]
            pattern = "".join(".+" if part == "{}" else re.escape(part) for part in parts)
            names_few = sum(c.isalpha() for part in parts for c in part) > 3  # f"{a}_{b}" names everything
            patterns["".join(parts)] = re.compile(pattern) if names_few else None
    return frozenset(texts), patterns


def set_later(tree: ast.Module, cls: str, name: str) -> ast.expr | None:
    """What a module sets an attribute of one of its classes to, behind the class: `State.reset = staticmethod(f)`."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=owner), attr=attr)], value=value):
                if (owner, attr) == (cls, name):
                    return value
    return None
