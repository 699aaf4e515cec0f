"""Attributes that no statement of a class's body binds: named as texts (f-strings, too), or set from outside."""

from __future__ import annotations

import ast
import re

from .syntax_nodes import walk


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
    ways: set[str] = set()
    wanted = name.split("{}")
    for found in walk(node) if node is not None else ():
        if isinstance(found, ast.Constant) and isinstance(found.value, str) and "\n" not in found.value:
            if found.value == name:
                ways.add(name)
        elif isinstance(found, ast.JoinedStr):
            parts = [str(v.value) if isinstance(v, ast.Constant) else "{}" for v in found.values]
            if len(wanted) > 1 and "".join(parts) == name:
                ways.add(name)
            pattern = "".join(".+" if part == "{}" else re.escape(part) for part in parts)
            letters = sum(c.isalpha() for part in parts for c in part)
            if len(wanted) == 1 and letters > 3 and re.fullmatch(pattern, name):  # f"{a}_{b}" names everything
                ways.add("".join(parts))
    return ways


def set_later(tree: ast.Module, cls: str, name: str) -> ast.expr | None:
    """What a module sets an attribute of one of its classes to, behind the class: `State.reset = staticmethod(f)`."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=owner), attr=attr)], value=value):
                if (owner, attr) == (cls, name):
                    return value
    return None
