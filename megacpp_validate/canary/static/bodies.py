"""What a function's body says beyond its signature: read from the syntax tree, nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Final, NamedTuple

from .syntax_nodes import children, once_per_node, parameters_of, walk


def keywords_taken(node: ast.AST | None) -> tuple[dict[str, str | None], str]:
    """Keys read from `**kwargs` with their defaults, and where the rest goes: "super", "elsewhere" or ""."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.args.kwarg is None:
        return {}, "elsewhere"
    name = node.args.kwarg.arg
    taken: dict[str, str | None] = {}
    refused = refused_keys(node)
    away: set[str] = set()  # keys that are no longer in it when it is handed on
    handed_on = ""
    for found in walk(node):
        match found:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=owner), attr="pop" | "get" as way),
                args=[ast.Constant(value=str(key)), *rest],
            ) if owner == name:
                taken[key] = ast.unparse(rest[0]) if rest else "None" if way == "get" else None
                away |= {key} if way == "pop" else set()
            case ast.Subscript(value=ast.Name(id=owner), slice=ast.Constant(value=str(key))) if owner == name:
                taken.setdefault(key, "...")  # read under a condition as a rule
                away |= {key} if isinstance(found.ctx, ast.Del) else set()
            case ast.Compare(left=ast.Constant(value=str(key)), ops=[ast.In()], comparators=[ast.Name(id=owner)]) if (
                owner == name
            ):
                taken.setdefault(key, "...")
            case ast.Call(func=func, keywords=keywords):
                if any(k.arg is None and isinstance(k.value, ast.Name) and k.value.id == name for k in keywords):
                    is_above = ast.unparse(func).startswith("super()") and handed_on != "elsewhere"
                    handed_on = "super" if is_above else "elsewhere"
    taken = {key: default for key, default in taken.items() if key not in refused}
    if handed_on == "super":  # what is only looked at is for the base to take
        taken = {key: default for key, default in taken.items() if key in away}
    return taken, handed_on


def hands_all_on(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> bool:
    """Whether a constructor names no parameter, reads no key, and gives everything to the class above."""
    return len(parameters_of(node.args)) == 1 and keywords_taken(node) == ({}, "super")


def handed_on_to(node: ast.FunctionDef) -> ast.expr | None:
    """What a function calls in the end with all that it is given: `def f(x, **kwargs): return g(x, **kwargs)`."""
    own, last = node.args, getattr(node.body[-1], "value", None)
    stars = [f"{star}{one.arg}" for star, one in (("*", own.vararg), ("**", own.kwarg)) if one]
    given = ", ".join([*(one.arg for one, _ in parameters_of(own) if one.arg != "self"), *stars])
    named = [one.id for one in walk(node) if isinstance(one, ast.Name)]
    is_kept = bool(stars) and not own.defaults and all(named.count(star.strip("*")) == 1 for star in stars)
    is_straight = all(isinstance(one, ast.Expr | ast.Assign | ast.AugAssign | ast.Return) for one in node.body)
    is_whole = last is not None and ast.unparse(last).endswith(f"({given})")
    return last.func if isinstance(last, ast.Call) and is_whole and is_kept and is_straight else None


def refused_keys(node: ast.AST | None) -> frozenset[str]:
    """Keys of `**kwargs` for which a function raises, whatever else it is given: `if key in kwargs: raise`."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.args.kwarg is None:
        return frozenset()
    name, found = node.args.kwarg.arg, set()
    for one in node.body:
        match one:
            case ast.If(
                test=ast.Compare(left=ast.Constant(value=str(key)), ops=[ast.In()], comparators=[ast.Name(id=owner)]),
                body=[*_, ast.Raise()],
            ) if owner == name:
                found.add(key)
    return frozenset(found)


def given_to_super(node: ast.AST | None, positionals: list[str]) -> set[str]:
    """Parameters of the base that a `super().__init__(...)` call fills itself, beside what it hands on."""
    given: set[str] = set()
    for found in walk(node) if node is not None else ():
        if isinstance(found, ast.Call) and ast.unparse(found.func).startswith("super()."):
            plain = [a for a in found.args if not isinstance(a, ast.Starred)]
            plain = plain[1:] if ast.unparse(found.func) == "super().__new__" else plain  # the class itself
            given |= set(positionals[: len(plain)])
            given |= {keyword.arg for keyword in found.keywords if keyword.arg}
    return given


def deprecations(node: ast.AST | None) -> list[Guard]:
    """Deprecation notices of a function or a class. Decorators count as warnings without a test."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return []
    notices = [Guard("warn", d, ()) for d in node.decorator_list if "deprecat" in ast.unparse(d).lower()]
    own = [] if isinstance(node, ast.ClassDef) else guards(node)
    return [*notices, *(guard for guard in own if guard.kind == "warn" and guard.is_deprecation)]


_OPPOSITES: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.NotEq: ast.Eq, ast.NotIn: ast.In, ast.IsNot: ast.Is, ast.Lt: ast.GtE, ast.LtE: ast.Gt,
}  # fmt: skip


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_LEAVES = "_may_have_left_"  # the name of a test whose outcome nothing tells


class Test(NamedTuple):
    """A test on the way to a statement.

    Attributes:
        expression: the test.
        wanted: the outcome that leads to the statement.
        passed_by: it stands before the statement and leaves when it holds; it does not enclose it.
        source: the test and its outcome as the source has them, where that is not this form.
    """

    expression: ast.expr
    wanted: bool
    passed_by: bool = False
    source: tuple[ast.expr, bool] | None = None


def _test(expression: ast.expr, wanted: bool, *, passed_by: bool = False) -> Test:
    """One form for each meaning, so that `assert a == b` and `if a != b: raise` agree."""
    source = expression, wanted
    while isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        expression, wanted = expression.operand, not wanted
    if isinstance(expression, ast.Compare) and len(expression.ops) == 1 and type(expression.ops[0]) in _OPPOSITES:
        opposite = _OPPOSITES[type(expression.ops[0])]()
        turned = ast.Compare(expression.left, [opposite], expression.comparators)
        expression, wanted = ast.copy_location(turned, expression), not wanted
    return Test(expression, wanted, passed_by, source)


def _conjunction(tests: list[tuple[ast.expr, bool]]) -> str:
    """Tests with their outcomes as one condition."""
    texts = []
    for expression, wanted in tests:
        text = ast.unparse(expression)
        is_loose = isinstance(expression, ast.IfExp) or (
            isinstance(expression, ast.BoolOp) and isinstance(expression.op, ast.Or)
        )
        texts.append(f"not ({text})" if not wanted else f"({text})" if is_loose and len(tests) > 1 else text)
    return " and ".join(texts)


class Guard:
    """A `raise`, `assert` or warning, with the tests under which it is reached."""

    def __init__(self, kind: str, node: ast.stmt | ast.expr, tests: tuple[Test, ...]) -> None:
        self.kind = kind
        self.node = node
        self.tests = tests
        self.line = node.lineno

    @cached_property
    def enclosing(self) -> tuple[Test, ...]:
        """The tests that enclose it: what it is about."""
        return tuple(test for test in self.tests if not test.passed_by)

    @cached_property
    def condition(self) -> str:
        """The enclosing tests as one normalised text."""
        return _conjunction([(test.expression, test.wanted) for test in self.enclosing])

    @cached_property
    def said(self) -> str:
        """The enclosing tests as the source says them."""
        return _conjunction([test.source or (test.expression, test.wanted) for test in self.enclosing])

    @cached_property
    def innermost(self) -> str:
        """The test that stands next to it."""
        return ast.unparse(self.enclosing[-1].expression) if self.enclosing else ""

    @cached_property
    def message(self) -> str:
        """Its text, literals only."""
        return text_of(self.node)

    @cached_property
    def exception(self) -> str:
        """Class of what is raised, as written."""
        if isinstance(self.node, ast.Raise) and self.node.exc is not None:
            exc = self.node.exc
            return ast.unparse(exc.func if isinstance(exc, ast.Call) else exc)
        return "AssertionError" if self.kind == "assert" else ""

    @cached_property
    def is_deprecation(self) -> bool:
        """Whether it announces that something will go."""
        text = ast.unparse(self.node)
        return any(word in text for word in ("DeprecationWarning", "FutureWarning")) or "deprecat" in text.lower()

    @cached_property
    def names(self) -> set[str]:
        """Names that its enclosing tests read."""
        return {n.id for test in self.enclosing for n in walk(test.expression) if isinstance(n, ast.Name)}


@once_per_node
def guards(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Guard]:
    """Every guard in a function's own body, nested functions left out."""
    return [guard for part, tests in _reached_in(node.body, ()) if (guard := guard_of(part, tests)) is not None]


def guard_of(part: ast.AST, tests: tuple[Test, ...]) -> Guard | None:
    """What a statement is as a guard, behind some tests; None for any other."""
    match part:
        case ast.Raise():
            return Guard("raise", part, tests)
        case ast.Assert(test=test):
            return Guard("assert", part, (*tests, _test(test, False)))
        case ast.Expr(value=ast.Call(func=func)) if re.search(r"\bwarn(ings\.warn|ing|_once)?$", ast.unparse(func)):
            return Guard("warn", part, tests)
    return None


def returns_reached(node: ast.FunctionDef) -> list[tuple[ast.Return, tuple[Test, ...]]]:
    """A function's own `return` statements, each with the tests that lead to it."""
    return [(part, tests) for part, tests in _reached_in(node.body, ()) if isinstance(part, ast.Return)]


@once_per_node
def tests_before_calls(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[int, tuple[Test, ...]]:
    """`id` of each call in a function's own body -> the tests that lead to the statement it stands in."""
    parts = _reached_in(node.body, ())
    return {id(call): tests for part, tests in parts for call in walk(part) if isinstance(call, ast.Call)}


def _reached_in(body: list[ast.stmt], tests: tuple[Test, ...]) -> Iterator[tuple[ast.AST, tuple[Test, ...]]]:
    """Statements without a body of their own and heads of the others, each with the tests that lead to it."""
    for statement in body:
        match statement:
            case ast.If(test=test, body=then, orelse=orelse):
                yield test, tests
                yield from _reached_in(then, (*tests, _test(test, True)))
                yield from _reached_in(orelse, (*tests, _test(test, False)))
                tests = (*tests, *_passed(statement))
            case ast.With(body=inner, items=items) | ast.AsyncWith(body=inner, items=items):
                yield from ((item.context_expr, tests) for item in items)
                yield from _reached_in(inner, tests)
            case ast.For(body=inner, iter=head) | ast.While(body=inner, test=head):
                yield head, tests
                yield from _reached_in(inner, tests)
            case ast.Try(body=inner, orelse=orelse, finalbody=final):
                yield from _reached_in([*inner, *orelse, *final], tests)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Match():
                pass  # run later, if at all; or on a way that no single test tells
            case _:
                yield statement, tests
        if not isinstance(statement, ast.If) and _may_leave(statement):
            tests = (*tests, Test(ast.Name(_LEAVES, ast.Load(), lineno=statement.lineno), True, passed_by=True))


def _passed(statement: ast.If) -> list[Test]:
    """What is known behind an `if`: that a branch which leaves was not taken."""
    then, orelse = statement.body, statement.orelse
    if then and isinstance(then[-1], ast.Raise) and not orelse:
        return []  # a call that did not get past has failed already: what stands behind keeps out all the others
    if then and isinstance(then[-1], _LEAVING):
        behind = [_test(statement.test, False, passed_by=True)]
        return behind + (_passed(orelse[0]) if len(orelse) == 1 and isinstance(orelse[0], ast.If) else [])
    if orelse and isinstance(orelse[-1], _LEAVING):
        return [_test(statement.test, True, passed_by=True)]
    if any(_may_leave(inner) for inner in (*then, *orelse)):
        return [Test(ast.Name(_LEAVES, ast.Load(), lineno=statement.lineno), True, passed_by=True)]
    return []


def _may_leave(statement: ast.stmt) -> bool:
    """Whether a statement may return from the function in a way that no single test tells."""
    return isinstance(statement, ast.Return) or any(isinstance(s, ast.Return) for s in _own_nodes(statement))


def default_meanings(node: ast.AST | None) -> dict[str, str]:
    """What a body puts in the place of a parameter that was not given: parameter -> expressions as text."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {}
    meanings: dict[str, list[str]] = {}
    for found in walk(node):
        name, value = _replacement(found)
        if name and value is not None:
            meanings.setdefault(name, []).append(ast.unparse(value))
    return {name: "; ".join(dict.fromkeys(texts)) for name, texts in meanings.items()}


def _replacement(node: ast.AST) -> tuple[str, ast.expr | None]:
    """The name that a piece of code replaces where it is None or empty, and what by."""
    match node:
        case ast.If(test=test, body=[ast.Assign(targets=[target], value=value)]):
            name = ast.unparse(target).removeprefix("self.")
            return (name, value) if tested(test) == (name, True) else ("", None)
        case ast.IfExp(test=test, body=value, orelse=ast.Name(id=other)) if tested(test) == (other, True):
            return other, value
        case ast.IfExp(test=test, body=ast.Name(id=other), orelse=value) if tested(test) == (other, False):
            return other, value
        case ast.BoolOp(op=ast.Or(), values=[ast.Name(id=name), value]) if not isinstance(
            value, ast.Name | ast.Compare
        ):
            return name, value
    return "", None


def tested(test: ast.expr) -> tuple[str, bool]:
    """The name that a test is about, and whether the test holds where that is None or empty."""
    match test:
        case ast.Compare(
            left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]
        ):
            return name, isinstance(op, ast.Is)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=name)):
            return name, True
        case ast.Name(id=name):
            return name, False
    return "", False


def returned_values(node: ast.AST | None) -> list[ast.expr | None]:
    """What a function's own `return` statements give."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    return [found.value for found in _own_nodes(node) if isinstance(found, ast.Return)]


@once_per_node
def yields(function: ast.AST) -> bool:
    """Whether a function's own body yields, those of functions within it left out."""
    found = _own_nodes(function) if isinstance(function, ast.FunctionDef) else ()
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in found)


def returns_literals(function: ast.AST | None) -> bool:
    """Whether all that a function returns is nothing, or what is written out: a tuple, a constant."""
    if not isinstance(function, ast.FunctionDef) or not function.body:
        return False
    returned = returned_values(function)
    literal = ast.Tuple | ast.List | ast.Dict | ast.Set | ast.Constant | ast.JoinedStr | ast.Compare
    says_nothing = not returned and isinstance(function.body[-1], ast.Raise | ast.Expr)
    return all(value is None or isinstance(value, literal) for value in returned) and not says_nothing


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in children(node):
        if isinstance(child, (*_DEFINITIONS, ast.Lambda)):
            continue
        yield child
        yield from _own_nodes(child)


def texts_in(node: ast.AST | None) -> frozenset[str]:
    """Every text in a function's code but its documentation."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return frozenset()
    texts = (n.value for s in node.body for n in walk(s) if isinstance(n, ast.Constant))
    return frozenset(text for text in texts if isinstance(text, str) and text.isidentifier())


def text_of(node: ast.AST) -> str:
    """The text that a statement or an expression holds, literals only."""
    texts = [n.value for n in walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return " ".join(" ".join(texts).split())
