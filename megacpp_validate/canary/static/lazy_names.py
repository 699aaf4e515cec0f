"""Names that a module makes only when they are asked for (PEP 562), read from its source."""

from __future__ import annotations

import ast
from typing import TypeGuard


def lazy_target(tree: ast.Module, module: str, name: str) -> str | None:
    """Where a module's lazy `name` comes from.

    Understood are a `__getattr__` that imports under `if name == "X"`, tables from name to module (a dict of
    strings or pairs) and from module to names (a dict of lists, as lazy_loader takes).

    Returns:
        The dotted path of the target; "" if the module's lazy names are all known and `name` is not among them;
        None if the way it makes names cannot be read.
    """
    asked = _tables_asked(tree)
    understood = False
    if branch := lazy_branch(tree, name):
        if isinstance(branch.body[-1], ast.Raise) and not any(isinstance(n, ast.Return) for n in ast.walk(branch)):
            return ""
        if found := _got(tree, branch, module, name):
            return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            found = _from_table(node, module, name)
            if found:
                return found
            understood = understood or (node in asked and _is_table(node))
        elif isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            found, readable = _from_branches(node, module, name)
            if found:
                return found
            understood = understood or readable
        elif _is_attach(node) and name in _submodules(node):
            return f"{module}.{name}"
    return "" if understood else None


def lazy_branch(tree: ast.Module, name: str) -> ast.If | None:
    """The branch of a module's `__getattr__` that is taken for a name: `if name == "X"`, `if name in TABLE`."""
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.name != "__getattr__" or not function.args.args:
            continue
        asked = function.args.args[0].arg
        for node in ast.walk(function):
            match node:
                case ast.If(test=ast.Compare(left=ast.Name(id=left), ops=[ast.Eq() | ast.In()], comparators=[group])):
                    if left == asked and name in _texts_of(tree.body, group):
                        return node
    return None


def _texts_of(above: list[ast.stmt], group: ast.expr) -> set[object]:
    """The texts in a group that is written there, or under a name at the top level above it; keys of a dict."""
    if isinstance(group, ast.Name):
        for place in reversed(range(len(above))):
            match above[place]:
                case (
                    ast.Assign(targets=[ast.Name(id=kept)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=kept), value=ast.expr() as value)
                ) if kept == group.id:
                    return _texts_of(above[:place], value)
        return set()
    if isinstance(group, ast.Call) and len(group.args) == 1:  # frozenset({...})
        return _texts_of(above, group.args[0])
    elements = group.keys if isinstance(group, ast.Dict) else getattr(group, "elts", [group])
    return {element.value for element in elements if isinstance(element, ast.Constant)}


def _got(tree: ast.Module, branch: ast.If, module: str, name: str) -> str:
    """Where `return getattr(place, name)` takes a name from, `place` being imported in the branch or in the module."""
    for node in ast.walk(branch):
        match node:
            case ast.Return(value=ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=place), ast.Name()])):
                imports = (found for found in (*ast.walk(branch), *tree.body) if isinstance(found, ast.ImportFrom))
                for found in imports:
                    for alias in found.names:
                        if (alias.asname or alias.name) == place:
                            base = _absolute("." * found.level + (found.module or ""), module)
                            return f"{base}.{alias.name}.{name}"
    return ""


def _tables_asked(tree: ast.Module) -> list[ast.AST]:
    """Dicts in which `__getattr__` or `attach` look, written there or assigned to a name that stands there."""
    places = [
        n for n in ast.walk(tree) if _is_attach(n) or (isinstance(n, ast.FunctionDef) and n.name == "__getattr__")
    ]
    inside = [node for place in places for node in ast.walk(place)]
    names = {node.id for node in inside if isinstance(node, ast.Name)}
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if name in names:
                inside.append(value)
    return [node for node in inside if isinstance(node, ast.Dict)]


def _is_attach(node: ast.AST) -> TypeGuard[ast.Call]:
    match node:
        case ast.Call(func=ast.Name(id="attach") | ast.Attribute(attr="attach")):
            return True
    return False


def _submodules(call: ast.Call) -> set[object]:
    """The names of submodules that are handed to `attach(package, submodules, submod_attrs)`."""
    given = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "submodules")]
    groups = [value for value in given if isinstance(value, ast.Set | ast.List | ast.Tuple)]
    return {element.value for group in groups for element in group.elts if isinstance(element, ast.Constant)}


def _is_table(node: ast.Dict) -> bool:
    keys = [key for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return bool(keys) and len(keys) == len(node.keys)


def _from_table(node: ast.Dict, module: str, name: str) -> str:
    for key, value in zip(node.keys, node.values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            continue
        match value:
            case ast.Constant(value=str(where)) if key.value == name:
                target = _absolute(where, module)
                return target if target.endswith(f".{name}") else f"{target}.{name}"
            case ast.Tuple(elts=[ast.Constant(value=str(where)), ast.Constant(value=str(other))]) if key.value == name:
                return f"{_absolute(where, module)}.{other}"
            case ast.List() | ast.Tuple() | ast.Set():
                names = {element.value for element in value.elts if isinstance(element, ast.Constant)}
                if name in names:
                    return f"{module}.{key.value.lstrip('.')}.{name}"
    return ""


def _from_branches(function: ast.FunctionDef, module: str, name: str) -> tuple[str, bool]:
    readable = False
    asked = function.args.args[0].arg if function.args.args else ""
    for node in ast.walk(function):
        if not isinstance(node, ast.If):
            continue
        match node.test:
            case ast.Compare(left=ast.Name(id=left), ops=[ast.Eq()], comparators=[ast.Constant(value=value)]):
                names = {value}
            case ast.Compare(
                left=ast.Name(id=left),
                ops=[ast.In()],
                comparators=[ast.Tuple() | ast.Set() | ast.List() as group],
            ):
                names = {element.value for element in group.elts if isinstance(element, ast.Constant)}
            case _:
                continue
        readable = readable or left == asked
        if left != asked or name not in names:
            continue
        for found in ast.walk(node):
            if isinstance(found, ast.ImportFrom):
                base = _absolute("." * found.level + (found.module or ""), module)
                original = next((a.name for a in found.names if (a.asname or a.name) == name), name)
                return f"{base}.{original}", True
    return "", readable


def _absolute(where: str, module: str) -> str:
    """A module path as it stands in a package's `__init__`, made absolute."""
    if not where.startswith("."):
        return where
    level = len(where) - len(where.lstrip("."))
    base = module.split(".")
    base = base[: len(base) - (level - 1)]
    return ".".join([*base, where.lstrip(".")]).rstrip(".")
