"""Finds where a name or a parameter went: the same name elsewhere, or a similar name in the same place."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from operator import itemgetter

import griffe

from .release import Found, Release
from .shapes import Parameter, Signature
from .surface import Symbol

_LIKELY = 0.6


def moved_to(release: Release, symbol: Symbol) -> str:
    """Dotted path under which a release has the name that `symbol` no longer gives; empty if none.

    The module is the one to import from: it defines the name, or is a package that offers it.
    """
    places: list[str] = []
    for name in dict.fromkeys((symbol.name, symbol.name.lstrip("_"))):  # a private name may have become a public one
        for module in (one for one in release.modules() if name in one.members and one.path != symbol.module):
            is_home = module.is_init_module or not module.members[name].is_alias
            if is_home and isinstance(release.lookup(module.path, name), Found):
                places.append(f"{module.path}.{name}")
        if places:
            break
    shared = ".".join([*symbol.module.split(".")[:2], ""])
    near = [place for place in places if place.startswith(shared)] or places
    public = [place for place in near if "._" not in place.rpartition(".")[0]] or near
    return min(public, key=lambda place: (place.count("."), place), default="")


def renamed_to(old: Release, new: Release, symbol: Symbol) -> str:
    """Dotted path of the name that most likely took the place of `symbol` in the new release; empty if none."""
    holder, before = new.module(symbol.module), old.module(symbol.module)
    was = old.lookup(symbol.module, symbol.name)
    known = set(before.members) if before is not None else set()
    match before.members.get(symbol.name) if before is not None else None:
        case griffe.Attribute(value=griffe.ExprName(name=name)) if holder is not None and name in holder.members:
            return f"{symbol.module}.{name}"  # an alias of what is still there
    # Where its module is gone: what is like it in modules that are new.
    places = [holder] if holder is not None else [one for one in new.modules() if old.module(one.path) is None]
    scores = []
    for place in places:
        for name in (one for one in place.members if one not in known and not one.startswith("_")):
            found = new.lookup(place.path, name)
            if not isinstance(found, Found) or isinstance(found.obj, griffe.Module | griffe.Attribute):
                continue
            if holder is not None or (isinstance(was, Found) and _are_alike(was.obj, found.obj)):
                path = f"{place.path}.{name}" if holder is not None else found.obj.path
                scores.append((name_likeness(symbol.name, name), path))
    return _likeliest(scores)


def _are_alike(one: griffe.Object, other: griffe.Object) -> bool:
    """Whether two classes share half of the members of the first, or two functions half of the parameters."""
    parts = [o.parameters if isinstance(o, griffe.Function) else o.members for o in (one, other)]
    mine, theirs = ({part if isinstance(part, str) else part.name for part in own} for own in parts)
    return one.kind is other.kind and 2 * len(mine & theirs) >= len(mine) > 0


def likely_member(obj: griffe.Object | None, name: str, before: griffe.Object | None) -> str:
    """The member of `obj` that most likely took the place of `name`; empty if none is likely."""
    known = set(before.parent.members) if before is not None and before.parent is not None else set()
    names = [n for n in (obj.members if obj is not None else {}) if n not in known and not n.startswith("__")]
    return _likeliest((name_likeness(name, one), one) for one in names)


def likely_rename(gone: Parameter, old: Signature, new: Signature) -> str:
    """The parameter of `new` that `gone` of `old` most likely became; empty if none is likely."""
    before = {p.name for p in old.parameters}
    scores = []
    for candidate in new.parameters:
        if candidate.name in before or new.named(candidate.name) is None:
            continue
        score = name_likeness(gone.name, candidate.name)
        score += 0.25 * (bool(gone.annotation) and candidate.annotation == gone.annotation)
        score += 0.25 * (_index(new, candidate.name) == _index(old, gone.name))
        score += 0.1 * (candidate.default == gone.default)
        scores.append((score, candidate.name))
    return _likeliest(scores)


def _likeliest(scores: Iterable[tuple[float, str]]) -> str:
    """The first name with the highest score; empty where none is likely."""
    score, name = max(scores, key=itemgetter(0), default=(0.0, ""))
    return name if score >= _LIKELY else ""


def name_likeness(one: str, other: str) -> float:
    """0 for names that have nothing in common, 1 for the same: letters in order, or words shared."""
    if one == other:
        return 1.0
    letters = SequenceMatcher(None, one.lower(), other.lower()).ratio()
    words, others = set(one.lower().split("_")), set(other.lower().split("_"))
    shared = len(words & others) / max(len(words | others), 1)
    return max(letters if letters >= 0.6 else 0.0, shared)


def _index(signature: Signature, name: str) -> int:
    return next((i for i, p in enumerate(signature.parameters) if p.name == name), -1)
