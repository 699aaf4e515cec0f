"""A module tree as a graph: each module once, whatever number of names it has, and what holds for any way to it.

A block that stands in two places, in a block that stands in two, has names without end; modules and the edges between
them stay few. What keeps a layer is asked of the graph, over every way; names are read out of it, not all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from .walk_rules import Exclusion, class_exclusions, holder_exclusions, is_wrapper, segment_exclusions, wraps_child

# Names that the children of one module are given through it; a model that runs one block 64 times is named in full.
MOST_NAMES: Final = 64


@dataclass(eq=False)
class Node:
    """One module.

    Attributes:
        module: it.
        above: who holds it, and under which name.
        below: what it holds: name and module.
        excluded: the pinned exclusions that hold back a layer here, on any way.
        inherited: those of them that hold for what is below it, too.
        wrapped: whether on any way something above stands for a linear layer itself.
        below_wrapper: the same, where it holds for what is below it, too.
    """

    module: Any
    above: list[tuple[Node, str]] = field(default_factory=list)
    below: list[tuple[str, Node]] = field(default_factory=list)
    excluded: frozenset[Exclusion] = frozenset()
    inherited: frozenset[Exclusion] = frozenset()
    wrapped: bool = False
    below_wrapper: bool = False


class Place(NamedTuple):
    """One name of a module.

    Attributes:
        name: qualified, as in `named_modules`.
        node: the module.
        wrapper: name of the module on this way that stands for a linear layer itself; None where none does.
    """

    name: str
    node: Node
    wrapper: str | None


def read_graph(tree: Any) -> list[Node]:
    """Every module of a tree, holders before what they hold; a way back to a holder is left out.

    No recursion: a tree may be deeper than Python's stack.
    """
    known = {id(tree): Node(tree)}
    done: list[Node] = []
    open_ids = {id(tree)}
    stack = [(known[id(tree)], iter(tree._modules.items()))]
    while stack:
        node, children = stack[-1]
        for name, child in children:
            if child is None or id(child) in open_ids:
                continue
            is_new = id(child) not in known
            below = known.setdefault(id(child), Node(child))
            below.above.append((node, name))
            node.below.append((name, below))
            if is_new:
                open_ids.add(id(child))
                stack.append((below, iter(child._modules.items())))
                break
        else:
            stack.pop()
            open_ids.discard(id(node.module))
            done.append(node)
    done.reverse()
    for node in done:
        _inherit(node)
    return done


def _inherit(node: Node) -> None:
    """What holds back layers at this node, from those above it, which have theirs."""
    for holder, name in node.above:
        kind = type(holder.module).__name__
        node.inherited |= holder.inherited | segment_exclusions(name) | class_exclusions(kind)
        node.excluded |= holder_exclusions(kind)
        node.below_wrapper |= holder.below_wrapper or is_wrapper(holder.module)
        node.wrapped |= node.below_wrapper or wraps_child(holder.module, name)
    node.excluded |= node.inherited


def read_places(root: Node) -> Iterator[Place]:
    """Every module by name, in the order of the tree, the tree first.

    A module with more than `MOST_NAMES` names is gone into that many times: what is below it gets no more names, and
    at least one for each place in each holder.
    """
    times: Counter[int] = Counter()
    stack: list[tuple[Place, str | None]] = [(Place("", root, None), None)]  # and the wrapper of all that is below
    while stack:
        place, wrapper = stack.pop()
        yield place
        name, node = place.name, place.node
        times[id(node)] += 1
        if times[id(node)] > MOST_NAMES:
            continue
        if wrapper is None and is_wrapper(node.module):
            wrapper = name
        for child, below in reversed(node.below):
            own = name if wrapper is None and wraps_child(node.module, child) else wrapper
            stack.append((Place(f"{name}.{child}" if name else child, below, own), wrapper))
