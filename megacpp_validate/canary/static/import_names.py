"""Which names a piece of a module's top level reads when it is run, and which it may bind behind one's back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from .syntax_nodes import children, walk

_COVERING = frozenset({"Exception", "BaseException"})
_GLOBAL = re.compile(r"^\s+global\s+([\w, ]+)", re.MULTILINE)
_DYNAMIC = re.compile(r"(?<![.\w])(globals|exec|eval|vars|locals)\(|\bsys\.modules\b")
_HINTS = ("globals(", "exec(", "eval(", "vars(", "locals(", "sys.modules")  # the pattern alone is slow


def is_for_type_checkers(test: ast.expr) -> bool:
    """Whether a condition holds for type checkers alone."""
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def covers(handler: ast.ExceptHandler, kinds: frozenset[str]) -> bool:
    """Whether an `except` catches one of these exceptions."""
    if handler.type is None:
        return True
    named = {node.id for node in walk(handler.type) if isinstance(node, ast.Name)}
    return bool(named & (kinds | _COVERING))


def bound_by(text: str) -> tuple[set[str], bool]:
    """Names that functions of a module bind in it (`global`), and whether it may bind any name at all."""
    late = {name.strip() for names in _GLOBAL.findall(text) for name in names.split(",")}
    return late, any(hint in text for hint in _HINTS) and _DYNAMIC.search(text) is not None


def exported_by(tree: ast.Module) -> set[str] | None:
    """What stands in a module's `__all__`; None where it has none, or where it is not written out at once."""
    mentioned = sum(isinstance(n, ast.Name) and n.id == "__all__" for n in walk(tree))
    written: list[ast.expr | None] = []
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.AnnAssign(target=ast.Name(id="__all__")):
                written.append(node.value)
    if not written or len(written) != mentioned or not isinstance(written[-1], ast.List | ast.Tuple):
        return None
    names = [e.value for e in written[-1].elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
    return set(names) if len(names) == len(written[-1].elts) else None


def read_at_once(node: ast.AST, *, annotations: bool) -> Iterator[ast.Name]:
    """Names that are read when a statement is run, in its order; bodies of functions are run later.

    Args:
        node: the statement.
        annotations: whether annotations are evaluated, too.
    """
    simple = not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    named = {n.target.id for n in walk(node) if isinstance(n, ast.NamedExpr)} if simple else ()
    yield from _reads(node, frozenset(named), annotations)


def _reads(node: ast.AST, local: frozenset[str], annotations: bool) -> Iterator[ast.Name]:
    parts: Iterable[ast.AST] = ()
    match node:
        case ast.Name(id=name):
            if name not in local and isinstance(node.ctx, ast.Load):
                yield node
        case ast.ClassDef():
            yield from _of_class(node, local, annotations)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            parts = _of_function(node, annotations)
        case ast.Lambda(args=args):
            parts = (*args.defaults, *(d for d in args.kw_defaults if d is not None))
        case ast.AnnAssign(annotation=annotation, value=value):
            parts = [part for part in (annotation if annotations else None, value) if part is not None]
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            local |= {n.id for g in node.generators for n in walk(g.target) if isinstance(n, ast.Name)}
            parts = children(node)
        case _:
            parts = children(node)
    for part in parts:
        yield from _reads(part, local, annotations)


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, annotations: bool) -> Iterator[ast.AST]:
    yield from node.decorator_list
    yield from node.args.defaults
    yield from (d for d in node.args.kw_defaults if d is not None)
    if annotations:
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        yield from (a.annotation for a in every if a is not None and a.annotation is not None)
        if node.returns is not None:
            yield node.returns


def _of_class(node: ast.ClassDef, local: frozenset[str], annotations: bool) -> Iterator[ast.Name]:
    for part in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
        yield from _reads(part, local, annotations)
    own: set[str] = set()
    for statement in node.body:
        simple = isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr)
        if not simple:  # what stands in the branches of a statement is not put in order
            own |= stored_by(statement)
        yield from _reads(statement, local | own, annotations)
        own |= stored_by(statement)


def stored_by(node: ast.AST) -> set[str]:
    """Names that a statement binds in the namespace that it stands in."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name.partition(".")[0] for alias in names}
        case ast.Name(id=name, ctx=ast.Store()):
            return {name}
        case ast.Lambda():
            return set()
        case ast.ExceptHandler(name=str(name)):
            return {name}.union(*map(stored_by, node.body))
    return set().union(*map(stored_by, children(node)))
