"""Walks of syntax trees: the same nodes in the same order as Python's own, and each answer worked out once."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

import pytest

from megacpp_validate.canary.static.syntax_nodes import children, statements_below, statements_in, walk

# Sources with most kinds of nodes, written by others.
SOURCES = [ast.__file__, tokenize.__file__, pytest.__file__]
EVERY_BRANCH = """
try:
    with a: one()
except* E:
    for x in y: two()
    else: three()
else:
    if z: four()
    elif w: five()
    else: six()
finally:
    while v: seven()
    else: eight()
match u:
    case 1 if t: nine()
    case {"k": [s, *_]}:
        @deco(lambda: 0)
        async def f(p: int = 1, *, q=(2, 3), **r) -> None:
            async with b as c, d: return (yield 10)
        class C(f, metaclass=g):
            eleven: int = 12
"""


@pytest.fixture(params=[*SOURCES, ""], ids=lambda path: Path(path).stem or "every-branch")
def tree(request: pytest.FixtureRequest) -> ast.Module:
    return ast.parse(Path(request.param).read_text(encoding="utf-8") if request.param else EVERY_BRANCH)


def test_a_walk_is_pythons_own_without_contexts(tree: ast.Module) -> None:
    plain = [node for node in ast.walk(tree) if not isinstance(node, ast.expr_context)]
    assert list(walk(tree)) == plain
    for node in plain:
        assert children(node) == [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.expr_context)]


def test_statements_are_all_those_of_a_tree_and_stand_in_the_order_of_the_lines(tree: ast.Module) -> None:
    every = {node for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    below = list(statements_below(tree))
    assert len(below) == len(every)
    assert set(below) == every
    for node in (tree, *below):
        places = [(inner.lineno, inner.col_offset) for inner in statements_in(node)]
        assert places == sorted(places)
