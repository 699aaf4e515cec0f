"""Compares two releases as a source tree uses them: every use, then findings gathered, then blame.

Each use is judged where the code reaches it under OLD, under NEW, or both. What fits the old release and does not fit
the new one is this upgrade's doing; what fails in both alike is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import griffe

from ...evidence.values import Cause, SourceLine
from .body_changes import compare_bodies, compare_deprecations
from .call_changes import bind, call_faults, compare_calls
from .findings import Change, ChangeKind, Doubt, Finding, Impact
from .gathering import Met, gather
from .guard_changes import Passed, kept_fields
from .import_time import compare_import_time, deprecated_modules
from .interpret import Interpreter
from .project import Source, SourceUnused
from .release import Absent, Found, Opaque, Release
from .relocation import likely_member, moved_to, renamed_to
from .shapes import Shape, callee_of, is_context_manager, is_decorator, is_undecorated, made_by, shape_of, signature_of
from .surface import BELOW, ELEMENT, RESULT, Argument, Surface, Symbol, Use, UseKind, is_caught


@dataclass(frozen=True)
class Pair:
    """One place that uses Transformer Engine, as the code reaches it under each release; None where it does not.

    Attributes:
        was, now: what its symbol is in each release; None where the release lacks it or the code does not reach it.
    """

    before: Use | None
    after: Use | None
    was: Found | Opaque | None = None
    now: Found | Opaque | None = None

    @property
    def use(self) -> Use:
        """Under the new release, or else under the old one."""
        use = self.after or self.before
        assert use is not None
        return use

    @property
    def symbol(self) -> Symbol:
        """Under the old release, or else under the new one."""
        is_old = self.was is not None or self.now is None
        return _symbol_of((self.before if is_old else self.after) or self.use)


def compare_releases(old: Release, new: Release, source: Source) -> tuple[list[Finding], list[Finding], Surface]:
    """Findings of the step from `old` to `new`, faults that `old` has in the same way, and what the source uses.

    Raises:
        SourceUnused: nothing of the source uses Transformer Engine.
    """
    pairs, rows, entries = read_pairs(old, new, source)
    pairs = [replace(one, was=_resolve(old, one.before), now=_resolve(new, one.after)) for one in pairs]
    sides = (use for pair in pairs for use in (pair.before, pair.after) if use is not None)
    surface = Surface(frozenset(map(_symbol_of, sides)), tuple(pair.use for pair in pairs), rows, entries)
    # Where NEW takes a way that OLD did not, what is lost on the other way is replaced.
    new_ways = (pair.use for pair in pairs if pair.before is None and pair.use.kind is not UseKind.MODULE)
    renewed = frozenset((use.module, use.function) for use in new_ways if use.function)
    # Where OLD has no such symbol and the code insists on it, OLD fails there, too; at import, the file does.
    failing: set[SourceLine | str] = set()
    for pair in pairs:
        is_insisted = pair.before is not None and not (pair.before.optional or pair.before.is_guarded)
        if pair.use.kind is UseKind.NAME and is_insisted and pair.was is None:
            failing |= {pair.use.site} if pair.use.function else {pair.use.site, pair.use.site.file}
    comparison = _Comparison(old, new, surface, renewed, failing)
    changes = [met for pair in pairs for met in comparison.changes(pair)]
    faults = [met for pair in pairs for met in comparison.standing_faults(pair)]
    return gather([*changes, *comparison.import_time()], surface), gather(faults, surface), surface


def read_pairs(
    old: Release, new: Release, source: Source
) -> tuple[list[Pair], tuple[str, ...], dict[str, SourceLine]]:  # fmt: skip
    """Every use under either release, the rows of the verdict in dependency order, and the first import of each row."""
    readers = [Interpreter(source, release, (old.version, new.version)) for release in (old, new)]
    one, other = (reader.read() for reader in readers)
    unnamed = readers[0].named - readers[1].named  # what the code names under the old release alone is not reached
    pairs: list[Pair] = []
    for key in sorted(one.keys() | other.keys()):
        before, after = list(one.get(key, ())), [use for use in other.get(key, ()) if not _stands_in(use, unnamed)]
        for use in tuple(before):
            same = next((o for o in after if (o.accessor, o.path) == (use.accessor, use.path)), None)
            if same is not None:
                before.remove(use)
                after.remove(same)
                pairs.append(Pair(use, same))
        pairs += itertools.starmap(Pair, itertools.zip_longest(before, after))
    if not pairs:
        known = source.project
        unread = f" Not judged: {', '.join(known.unreadable)}." if known.unreadable else ""
        raise SourceUnused(
            f"None of {len(known.files)} Python files that could be read uses {old.library.title}.{unread} "
            f"Next step: nothing, or give the folder that holds `import {old.library.package}` as --source."
        )
    used = {pair.use.module for pair in pairs}
    order = source.order or tuple(row for row in (readers[1].order | readers[0].order) if row in used)
    return pairs, order, readers[1].entries


def _stands_in(use: Use, named: Collection[tuple[str, str]]) -> bool:
    titles = itertools.accumulate(use.function.split("."), "{}.{}".format)
    return any((use.module, title) in named for title in titles)


class _Comparison:
    def __init__(
        self, old: Release, new: Release, surface: Surface, renewed: Collection[tuple[str, str]],
        failing: Collection[SourceLine | str],
    ) -> None:  # fmt: skip
        self.old, self.new, self.surface, self.renewed, self.failing = old, new, surface, renewed, failing

    def changes(self, pair: Pair) -> Iterator[Met]:
        """Every change that one use meets in the step from old to new."""
        use = pair.use
        for change in self._changes_of_pair(use, pair):
            # A file that OLD cannot import has no behaviour to lose; what NEW refuses in it stays a breakage.
            is_new = use.site not in self.failing and change.impact is Impact.BREAKING
            if is_new or change.follows or use.site.file not in self.failing:
                yield self._met(change, pair)

    def standing_faults(self, pair: Pair) -> Iterator[Met]:
        """Why a call fails in both releases alike."""
        use, known = pair.use, self._faults_before(pair)
        is_reached = pair.before is not None and pair.after is not None
        if is_reached and use.kind is UseKind.NAME and pair.was is None and pair.now is None and not use.optional:
            yield self._met(Change(ChangeKind.REMOVED, Impact.BREAKING, old=pair.symbol.path), pair)
        is_read = pair.after is not None and not use.open_keywords  # else branches may pass keywords of other callees
        for change in self._faults(self.new, use, pair.now) if is_read else ():
            if (pair.before is None and use.site in self.failing) or (change.kind, change.parameter) in known:
                yield self._met(change, pair)

    def _changes_of_pair(self, use: Use, pair: Pair) -> Iterator[Change]:
        """What is reached under the new release alone has to fit it; what is not reached there is not reported."""
        if pair.after is None:
            return
        if pair.before is None:
            if use.kind is UseKind.REFUSAL:
                yield Change(ChangeKind.REFUSED, Impact.BREAKING)
            if use.kind is UseKind.MODULE:
                impact = Impact.RISK if use.optional else Impact.BREAKING  # another file of the code may load it
                yield Change(ChangeKind.NOT_LOADED, impact, old=pair.symbol.path, raises="AttributeError")
            if use.kind is UseKind.NAME and pair.now is None:
                lost = Change(ChangeKind.REMOVED, Impact.BREAKING, old=pair.symbol.path)
                yield replace(lost, impact=Impact.RISK, doubt=Doubt.CAUGHT) if use.optional else lost
            if use.site not in self.failing:
                yield from self._faults(self.new, use, pair.now)
            return
        before = replace(pair.before, accessor=use.accessor)
        read = use if before == use else replace(before, path=use.path, optional=use.optional)
        changes = self._changes_of(read, pair)
        guarded = before.keywords.keys() ^ use.keywords.keys()  # given under one release alone: judged as NEW is called
        yield from (change for change in changes if change.parameter not in guarded)
        if before != use:
            known = self._faults_before(pair)
            yield from (c for c in self._faults(self.new, use, pair.now) if (c.kind, c.parameter) not in known)

    def _faults_before(self, pair: Pair) -> set[tuple[ChangeKind, str]]:
        faults = self._faults(self.old, pair.before, pair.was) if pair.before is not None else ()
        return {(c.kind, c.parameter) for c in faults}

    # --- one use ------------------------------------------------------------------------------------------

    def _changes_of(self, use: Use, pair: Pair) -> Iterator[Change]:
        if use.kind is UseKind.NAME:
            yield from self._name(use, pair)
            return
        before, after = self._shape(self.old, use, pair.was), self._shape(self.new, use, pair.now)
        if before.what in {"unknown", "missing"}:
            return
        if after.what == "missing":
            yield self._gone(use, before, after)
            return
        if after.what != "unknown":
            yield from self._by_kind(use, before, after)

    def _by_kind(self, use: Use, before: Shape, after: Shape) -> Iterator[Change]:
        match use.kind:
            case UseKind.CALL:
                yield from self._call(use, before, after)
            case UseKind.ATTRIBUTE if before.what == "value" and is_undecorated(after.obj):
                change = Change(ChangeKind.RETURN_CHANGED, Impact.BREAKING, old="a value", new="a method")
                yield self._at(change, before, after)
            case UseKind.CLASS if before.what == "class" and after.what == "function":
                yield self._at(Change(ChangeKind.CLASS_BECAME_FUNCTION, Impact.BREAKING), before, after)
            case UseKind.CONTEXT | UseKind.DECORATOR:
                is_context = use.kind is UseKind.CONTEXT
                serves = is_context_manager if is_context else is_decorator
                if serves(self.old, before) and serves(self.new, after) is False:
                    lost = ChangeKind.CONTEXT_MANAGER_LOST if is_context else ChangeKind.DECORATOR_LOST
                    yield self._at(Change(lost, Impact.BREAKING), before, after)

    def _name(self, use: Use, pair: Pair) -> Iterator[Change]:
        before, after = pair.was, pair.now
        one, other = (found.obj if isinstance(found, Found) else None for found in (before, after))
        first, second = _symbol_of(pair.before or use), _symbol_of(pair.after or use)
        if before is None:
            if after is not None and not use.optional:
                added = Change(ChangeKind.ADDED, Impact.HARMLESS, new=second.path, follows=True)
                yield self._at_objects(added, None, other)
            return
        if after is not None and other is None and one is not None and self._left_binary(first):
            after = None
        had = _resolve(self.old, pair.after) if first != second else None
        is_other = had is not None and (one is None or had != before)  # not an alias of the one that is lost
        is_fallback = after is not None and is_other and _resolve(self.new, pair.before) is None
        if after is None or is_fallback:
            if use.optional and (use.module, use.function) in self.renewed:
                return
            lost = self._lost_symbol(first, one)
            caught = replace(lost, impact=Impact.RISK, cause=Cause.SILENT_FALLBACK, doubt=Doubt.CAUGHT)
            yield caught if use.optional or is_fallback else lost
            return
        if first != second and one is not None and other is not None:
            moved = Change(ChangeKind.MOVED, Impact.HARMLESS, old=first.path, new=second.path, follows=True)
            yield self._at_objects(replace(moved, suggestion=second.path), one, other)  # the code looks there first
        elif first == second:
            notice = deprecated_modules(self.new, second)
            if notice and not deprecated_modules(self.old, first):
                place = moved_to(self.new, first)
                yield Change(ChangeKind.DEPRECATED, Impact.RISK, old=first.path, new=notice, suggestion=place)
            if one is not None and isinstance(other, griffe.Class):
                for change in compare_deprecations(self.old, self.new, one, other, {}):
                    yield self._at_objects(change, one, other)

    def _left_binary(self, symbol: Symbol) -> bool:
        """Whether a name that the package defined itself is now at best one of its binary, which it does not use."""
        holder = self.new.module(symbol.module)
        is_binary = holder is not None and self.new.takes_binary_names(holder)
        return is_binary and symbol.name not in self.new.names_of_binary

    def _lost_symbol(self, symbol: Symbol, was: griffe.Object | None) -> Change:
        place = moved_to(self.new, symbol) or renamed_to(self.old, self.new, symbol)
        module, _, name = place.rpartition(".")
        kind = ChangeKind.RENAMED if module == symbol.module else ChangeKind.MOVED if place else ChangeKind.REMOVED
        found = self.new.lookup(module, name) if place else None
        after = self.new.where(found.obj) if isinstance(found, Found) else None
        where = self.old.where(was) if was is not None else None
        return Change(kind, Impact.BREAKING, before=where, after=after, old=symbol.path, new=place, suggestion=place)

    def _call(self, use: Use, before: Shape, after: Shape) -> Iterator[Change]:
        one, other = signature_of(self.old, before), signature_of(self.new, after)
        if one is not None and not bind(one, use).fits:  # a call that the old release refuses is no regression
            return
        # `scope(...)(function)`: what a generator context manager gives is a decorator, too
        is_lost = is_decorator(self.old, before) is True and is_decorator(self.new, after) is False
        is_uncallable = other is None and after.what in {"value", "instance", "module"} and not after.maybe
        if is_lost if one is None else is_uncallable:
            yield self._at(Change(ChangeKind.NOT_CALLABLE, Impact.BREAKING), before, after)
            return
        if one is None or other is None:
            return
        made = made_by(self.new, after)
        if made is not None and made != made_by(self.old, before):  # a `__new__` beside the constructor
            for change in call_faults(made, use):
                yield self._at(change, before, after)
        for change in compare_calls(one, other, use):
            yield self._at(change, before, after)
        passed = Passed(bind(one, use).given, bind(other, use).given, self._fields(use))
        first, second = (self._runs(callee_of(*one)[0]) for one in ((self.old, before), (self.new, after)))
        if first is None or second is None:
            return
        for change in compare_bodies(self.old, self.new, first, second, passed, use):
            yield self._at(change, before, after)
        for change in compare_deprecations(self.old, self.new, first, second, passed.after):
            yield self._at(change, before, after)

    def _fields(self, use: Use) -> dict[str, Argument]:
        """Fields of the object whose method is called: those that its constructor sets to what nobody passes."""
        if RESULT not in use.path:
            return {}
        path = use.path[: len(use.path) - 1 - use.path[::-1].index(RESULT)]
        shape = self._shape(self.new, replace(use, path=path), _resolve(self.new, use))
        constructor, signature = callee_of(self.new, shape)[0], signature_of(self.new, shape)
        made = [o for o in self.surface.uses if (o.kind, o.accessor, o.path) == (UseKind.CALL, use.accessor, path)]
        is_open = any(one.open_positionals or one.open_keywords or one.partial for one in made)
        if is_open or shape.what != "class" or constructor is None or signature is None:
            return {}
        return kept_fields(self.new, constructor, {name for one in made for name in bind(signature, one).given})

    @staticmethod
    def _runs(function: griffe.Function | None) -> griffe.Function | None:
        """What runs in a constructor that was made up: a dataclass's own code is its `__post_init__`."""
        if function is not None and function.name == "__init__" and isinstance(function.parent, griffe.Class):
            own = function.parent.members.get("__post_init__")
            return own if isinstance(own, griffe.Function) else function
        return function

    def _gone(self, use: Use, before: Shape, after: Shape) -> Change:
        certain = not before.maybe and not use.optional
        change = Change(
            ChangeKind.ATTRIBUTE_REMOVED,
            Impact.BREAKING if certain else Impact.RISK,
            parameter=use.path[-1],
            raises="AttributeError",
            suggestion=likely_member(after.obj, use.path[-1], before.obj),
        )
        return self._at(change, before, after)

    # --- uses together ------------------------------------------------------------------------------------

    def _faults(self, release: Release, use: Use, found: Found | Opaque | None) -> Iterator[Change]:
        if use.kind is not UseKind.CALL:
            return
        shape = self._shape(release, use, found)
        signature = signature_of(release, shape) if shape.what not in {"missing", "unknown"} else None
        if signature is not None:
            where = release.where(shape.obj) if shape.obj is not None else None
            for change in call_faults(signature, use):
                yield replace(change, after=where)

    def import_time(self) -> Iterator[Met]:
        """What importing Transformer Engine itself meets."""
        first, use = self.surface.module_order[0], self.surface.uses[0]
        use = replace(use, module=first, site=self.surface.entries.get(first, use.site))
        anchor = Symbol(self.old.library.roots[0], "")
        for change in compare_import_time(self.old, self.new):
            ends = change.impact is Impact.BREAKING  # nothing of the bridge has Transformer Engine then
            for module in self.surface.module_order if ends else (use.module,):
                yield Met(change, replace(use, module=module), anchor)

    @staticmethod
    def _shape(release: Release, use: Use, found: Found | Opaque | None) -> Shape:
        return shape_of(release, found, use.path) if isinstance(found, Found) else Shape("unknown")

    def _at(self, change: Change, before: Shape, after: Shape) -> Change:
        return self._at_objects(change, before.obj, after.obj if after.what != "missing" else None)

    def _at_objects(self, change: Change, before: griffe.Object | None, after: griffe.Object | None) -> Change:
        one = change.before or (self.old.where(before) if before is not None else None)
        other = change.after or (self.new.where(after) if after is not None else None)
        return replace(change, before=one, after=other)

    @staticmethod
    def _met(change: Change, pair: Pair) -> Met:
        use = pair.use
        member = ".".join(step for step in use.path if step not in {RESULT, BELOW, ELEMENT})
        if use.path and use.path[-1] == RESULT and use.kind is UseKind.CALL:
            member = f"{member}.forward".lstrip(".")
        if change.kind is ChangeKind.ATTRIBUTE_REMOVED:
            member = member.rpartition(".")[0]
        if use.kind is not UseKind.NAME and change.impact is Impact.BREAKING and is_caught(change.raises, use.caught):
            change = replace(change, impact=Impact.RISK, doubt=Doubt.CAUGHT)
        if (use.is_guarded or change.parameter in use.guarded) and change.impact is Impact.BREAKING:
            change = replace(change, impact=Impact.RISK, doubt=Doubt.GUARDED)
        return Met(replace(change, member=change.member or member), use, pair.symbol)


def _symbol_of(use: Use) -> Symbol:
    return Symbol(*use.accessor.rpartition(".")[::2])


def _resolve(release: Release, use: Use | None) -> Found | Opaque | None:
    """What the symbol of a use is in a release; None where an import of it fails."""
    found = release.lookup(*use.accessor.rpartition(".")[::2]) if use is not None else Absent()
    return None if isinstance(found, Absent) else found
