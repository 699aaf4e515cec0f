"""Names that a module makes only when they are imported (PEP 562), read from its source."""

from __future__ import annotations

import ast
from importlib.util import resolve_name


def lazy_target(tree: ast.Module, module: str, name: str) -> str | None:
    """Where a module's lazy `name` comes from.

    Read are a `__getattr__` that imports under `if name == "X"`, tables from name to module (a dict of strings or
    pairs) and from module to names (a dict of lists, as lazy_loader takes); `importlib.import_module` under that test.

    Returns:
        The dotted path of the target; "" if the module's lazy names are all known and `name` is not among them;
        None if the way it makes names cannot be read.
    """
    is_readable = False
    if branch := lazy_branch(tree, name):
        if isinstance(branch.body[-1], ast.Raise):
            return ""
        for found in ast.walk(branch):
            match found:
                case ast.ImportFrom(module=owner, names=names, level=level):
                    for alias in names:
                        if name in (alias.asname, alias.name):
                            return f"{resolve_name('.' * level + (owner or ''), module)}.{alias.name}"
                case ast.Call(args=[ast.Constant(value=str(where)), *_]) if "import_module" in ast.unparse(found):
                    return f"{resolve_name(where, module)}.{name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            if found_in := _from_table(node, module, name):
                return found_in
            is_readable |= any(
                isinstance(v, ast.List | ast.Tuple) or isinstance(getattr(v, "value", None), str) for v in node.values
            )
        elif isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            is_readable |= any(isinstance(n, ast.If) and isinstance(n.test, ast.Compare) for n in node.body)
    return "" if is_readable else None


def lazy_branch(tree: ast.Module, name: str) -> ast.If | None:
    """The branch of a module's `__getattr__` that is taken for a name: `if name == "X"`, `if name in TABLE`."""
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.name != "__getattr__":
            continue
        for node in ast.walk(function):
            match node:
                case ast.If(test=ast.Compare(left=ast.Name(), ops=[ast.Eq() | ast.In()], comparators=[group])):
                    if name in _texts_of(tree, group):
                        return node
    return None


def _texts_of(tree: ast.Module, group: ast.expr) -> set[object]:
    """The texts in a group that is written there, or under a name anywhere in the module; keys of a dict."""
    for node in ast.walk(tree) if isinstance(group, ast.Name) else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == ast.unparse(group):
            group = node.value
    elements = group.keys if isinstance(group, ast.Dict) else getattr(group, "elts", [group])
    return {element.value for element in elements if isinstance(element, ast.Constant)}


def _from_table(node: ast.Dict, module: str, name: str) -> str:
    for key, value in zip(node.keys, node.values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            continue
        match value:
            case ast.Constant(value=str(where)) if key.value == name:
                return f"{resolve_name(where, module)}.{name}"
            case ast.Tuple(elts=[ast.Constant(value=str(where)), ast.Constant(value=str(other))]) if key.value == name:
                return f"{resolve_name(where, module)}.{other}"
            case ast.List() | ast.Tuple():
                if any(isinstance(element, ast.Constant) and element.value == name for element in value.elts):
                    return f"{module}.{key.value.lstrip('.')}.{name}"
    return ""
