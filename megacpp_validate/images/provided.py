"""Inside an image: whether what was installed over the base is what the lock says, and the base what it was made for.

A lock is made where the base cannot be seen. So the image itself looks: nothing that the base provides may lie over it
again, what it provides must have the version that was reckoned with, and every requirement of what was installed must
be met by what is found. The standard library and packaging only, and one file: a step of the build runs it by path.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

_PROVIDED: Final = "# provided by the base, not installed: "
_OVER: Final = "# over the base's: "
_UNKNOWN: Final = "(version not known)"
_PINNED: Final = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", re.MULTILINE)


@dataclass(frozen=True)
class Told:
    """What a lock says: name -> version; a version that is "" is not known."""

    locked: dict[str, str]
    provided: dict[str, str]
    over: dict[str, str]


@dataclass(frozen=True)
class Found:
    """What lies in an image: name -> version, and what is required by what was installed over the base.

    Attributes:
        own: in the environment of the image.
        base: in the base, below it.
        constraints: versions that the base binds its own pip to.
        requires: name of what is in the environment -> its requirements that hold here.
    """

    own: dict[str, str]
    base: dict[str, str]
    constraints: dict[str, str] = field(default_factory=dict)
    requires: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """What came of it.

    Attributes:
        refusals: what must not be; in words.
        over: name -> "base's version, ours", for everything that lies over the base's.
        learnt: name -> version of the base, where the lock did not know it.
    """

    refusals: tuple[str, ...]
    over: dict[str, str]
    learnt: dict[str, str]


def read_told(text: str) -> Told:
    """What a lock says, from its first lines and its packages."""
    heads = {head: {} for head in (_PROVIDED, _OVER)}  # type: dict[str, dict[str, str]]
    for line in text.splitlines():
        for head, rows in heads.items():
            if line.startswith(head):
                pairs = (pair.partition(" ") for pair in line.removeprefix(head).split(", "))
                rows.update({name: "" if version == _UNKNOWN else version for name, _, version in pairs})
    locked = {str(canonicalize_name(name)): version for name, version in _PINNED.findall(text)}
    return Told(locked, heads[_PROVIDED], heads[_OVER])


def look(told: Told, found: Found, built: Iterable[str] = ()) -> Look:
    """Hold an image against its lock.

    Args:
        built: distributions that the build has compiled from a commit, which no lock has.
    """
    refusals: list[str] = []
    for name, version in told.locked.items():
        seen = found.own.get(name) or (found.base.get(name) if found.base.get(name) == version else None)
        if seen != version:
            refusals.append(f"{name} {seen or 'is not there'}, and the lock has {version}")
    for name in found.own:
        if name in told.provided:
            refusals.append(f"{name} {found.own[name]} lies over the base's, which was to be left as it is")
        elif name not in told.locked and name not in set(built):
            refusals.append(f"{name} {found.own[name]} is there, and neither locked nor built from a commit")
    for name, version in told.provided.items():
        seen = found.base.get(name)
        if seen is None:
            refusals.append(f"the base has no {name}, and the lock was made for one that has")
        elif version and seen != version:
            refusals.append(f"the base has {name} {seen}, and the lock was made for {version}")
    everything = {**found.base, **found.own}
    refusals += [words for name in found.own for words in _unmet(name, found.requires.get(name, ()), everything)]
    over = {
        name: f"{found.base[name]}, ours {version}"
        + (" (against its constraints)" if found.constraints.get(name, version) != version else "")
        for name, version in found.own.items()
        if name in found.base and found.base[name] != version
    }
    learnt = {name: found.base[name] for name, version in told.provided.items() if not version and name in found.base}
    return Look(tuple(refusals), over, learnt)


def _unmet(name: str, requires: tuple[str, ...], everything: Mapping[str, str]) -> Iterable[str]:
    for text in requires:
        wanted = Requirement(text)
        seen = everything.get(canonicalize_name(wanted.name))
        if seen is None:
            yield f"{name} requires {text}, which is not there"
        elif not wanted.specifier.contains(seen, prereleases=True):
            yield f"{name} requires {text}, and there is {seen}"


def read_found(own: list[str], base: list[str], constraints: Path | None = None) -> Found:
    """What lies in site folders: those of the environment, and those of the base below it."""
    ours = list(distributions(path=own))
    return Found(
        own=_versions(ours),
        base=_versions(distributions(path=base)),
        constraints=_read_constraints(constraints),
        requires={_name(one): tuple(_hold_here(one.requires or ())) for one in ours},
    )


def _hold_here(requires: Iterable[str]) -> Iterable[str]:
    for text in requires:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            wanted.marker = None
            yield str(wanted)


def _versions(found: Iterable[Distribution]) -> dict[str, str]:
    """The first of each name counts, as it does for an import."""
    versions: dict[str, str] = {}
    for one in found:
        versions.setdefault(_name(one), one.version)
    return versions


def _name(one: Distribution) -> str:
    return str(canonicalize_name(one.metadata["Name"]))


def _read_constraints(file: Path | None) -> dict[str, str]:
    if file is None or not file.is_file():
        return {}
    found = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        bare = line.partition("#")[0].strip()
        pinned = _PINNED.match(bare)
        if pinned and SpecifierSet(f"=={pinned[2]}"):
            found[str(canonicalize_name(pinned[1]))] = pinned[2]
    return found


def main() -> int:
    """Look, say what must not be, and leave a record; 1 where there is anything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lock", type=Path, help="lock that the image was made from")
    parser.add_argument("--own", action="append", help="site folder of the environment; this interpreter's without")
    parser.add_argument("--base", action="append", help="site folder of the base; its other ones without")
    parser.add_argument("--built", default="", help="distributions that were built from a commit, with commas")
    bound = os.environ.get("PIP_CONSTRAINT", "")
    parser.add_argument("--constraints", type=Path, default=Path(bound) if bound else None, help="what binds its pip")
    parser.add_argument("--record", type=Path, help="file for what was found, in JSON")
    asked = parser.parse_args()
    own = asked.own or [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    base = asked.base or [folder for folder in sys.path if folder.endswith("-packages") and folder not in own]
    built = [str(canonicalize_name(name)) for name in asked.built.replace(",", " ").split()]
    seen = look(read_told(asked.lock.read_text(encoding="utf-8")), read_found(own, base, asked.constraints), built)
    if asked.record:
        asked.record.write_text(json.dumps(asdict(seen), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for words in seen.refusals:
        sys.stderr.write(f"provided: {words}\n")
    if seen.refusals:
        sys.stderr.write(
            "provided: the image is not what its lock says. Likely cause: the base is another one than the lock was "
            "made for, or something was installed beside the lock. Next step: mend `provides` of the base in "
            "matrix/images.toml by what is said above, then nox -s lock.\n"
        )
    return 1 if seen.refusals else 0


if __name__ == "__main__":
    sys.exit(main())
