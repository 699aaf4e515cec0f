"""Which layers of a tree a whitelist names: asked over every way to a layer, without going each of them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

from .walk_graph import Node

Entry = str | type


class Whitelist:
    """A whitelist and the tree that it is held to.

    A pattern of n segments is held to the last n of a name, each as a shell pattern: `fc?`, `attention.*`. A class
    names every layer below a module of it, or of it.

    Args:
        entries: patterns and classes.
        nodes: of the tree, holders before what they hold.
    """

    def __init__(self, entries: Sequence[Entry], nodes: Sequence[Node]) -> None:
        self.entries: Final = tuple(entries)
        self._patterns: Final = [entry.split(".") for entry in self.entries if isinstance(entry, str)]
        self._classes: Final = tuple(entry for entry in self.entries if isinstance(entry, type))
        self._longest: Final = max(map(len, self._patterns), default=0)
        self._free = self._read_free(nodes)

    def find_unnamed(self, node: Node) -> str | None:
        """A name of this layer that no entry covers; None where each is covered."""
        if isinstance(node.module, self._classes):
            return None
        ways: list[tuple[Node, tuple[str, ...]]] = [(node, ())]
        while ways:
            top, tail = ways.pop()
            if any(len(tail) == len(pattern) and all(map(fnmatchcase, tail, pattern)) for pattern in self._patterns):
                continue
            if not top.above:
                return ".".join(tail)
            if len(tail) < self._longest:
                ways += [(holder, (name, *tail)) for holder, name in reversed(top.above) if not self._is_named(holder)]
            elif id(top) in self._free:
                return ".".join((*self._way_to(top), *tail))
        return None

    def names_somewhere(self, node: Node) -> bool:
        """Whether any entry covers any name of this layer."""
        return any(self.covers(entry, node) for entry in self.entries)

    def covers(self, entry: Entry, node: Node) -> bool:
        """Whether one entry covers any name of this layer."""
        ways: list[tuple[Node, int]] = [(node, 0)]
        seen = set()
        segments = entry.split(".") if isinstance(entry, str) else []
        while ways:
            at, depth = ways.pop()
            if isinstance(entry, type):
                if isinstance(at.module, entry):
                    return True
                ways += [(holder, 0) for holder, _ in at.above if id(holder) not in seen]
                seen |= {id(holder) for holder, _ in at.above}
            elif depth == len(segments):
                return True
            else:
                wanted = segments[-1 - depth]
                ways += [(holder, depth + 1) for holder, name in at.above if fnmatchcase(name, wanted)]
        return False

    def _is_named(self, holder: Node) -> bool:
        return isinstance(holder.module, self._classes)

    def _read_free(self, nodes: Sequence[Node]) -> set[int]:
        """The modules to which a way leads past no class of the whitelist, by id."""
        free: set[int] = set()
        for node in nodes:
            if not node.above or any(id(holder) in free and not self._is_named(holder) for holder, _ in node.above):
                free.add(id(node))
        return free

    def _way_to(self, node: Node) -> list[str]:
        """The segments of one such way."""
        segments: list[str] = []
        while node.above:
            node, name = next(
                (holder, name) for holder, name in node.above if id(holder) in self._free and not self._is_named(holder)
            )
            segments.append(name)
        return segments[::-1]
