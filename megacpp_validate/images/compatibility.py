"""Whether a stack fits, from rows alone: a pure function of versions that takes no second, before a build of an hour.

What is not known is told as unknown. A base brings parts in versions that nobody has published; whoever builds on it
must be told that the check says nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ..catalog_images import Base, Image, Images, Range
from ..catalog_needs import Need, Needs
from ..evidence.stack_fit import Fit, FitVerdict, Part, StackFit
from .locks import ImageLock
from .refusals import ImageRefused

LIBRARIES: Final = {"libcudart": "cuda", "libcublasLt": "cublas", "libcudnn": "cudnn", "libnccl": "nccl"}

_ASKED: Final = "asked for"
_BY_FILE: Final = {canonicalize_name(file): name for file, name in LIBRARIES.items()}
_CORE: Final = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu13", "transformer-engine-cu12")


@dataclass(frozen=True)
class Stack:
    """What is there, by name: parts of CUDA, "driver", "python", and distributions.

    Attributes:
        te: release of Transformer Engine.
        whole: whether everything that is there is known by name, so that what is not named is not there.
    """

    name: str
    te: str
    parts: Mapping[str, Part]
    whole: bool


def stack_of_image(images: Images, image: Image, lock: ImageLock, own_base: str = "") -> Stack:
    """The stack that an image would have: what its base provides, and what its lock lays over it.

    Args:
        own_base: a base that the caller named: nothing is known of what is in it.
    """
    base = images.find_base(image.base)
    found = {} if own_base else {part.name: part for part in _parts_of_base(base)}
    for row in image.removes:
        found.pop(row.name, None)
    for name, package in lock.packages.items():
        found[name] = Part(name=name, version=package.version, brought_by=f"lock {image.lock}")
    whole = not own_base and not base.distributions  # of a base with a stack nobody has listed every distribution
    return Stack(image.target, image.te, found, whole)


def stack_of_words(te: str, words: Iterable[str]) -> Stack:
    """A stack that is given as "component=version"; "component=" is there in a version that is not known.

    Raises:
        ImageRefused: a word is none of that kind, a version is none, or a component is given twice.
    """
    found: dict[str, Part] = {}
    said: dict[str, str] = {}
    for word in words:
        name, sign, version = word.partition("=")
        name, version = canonicalize_name(name), version.lstrip("=")
        name = _BY_FILE.get(name, name)
        if not sign or not name or (version and _read(version) is None):
            raise ImageRefused(
                f"{word!r} is no component and version. Next step: say for instance cublas=13.1.0.3 cudnn=9.19 "
                "torch=2.11.0, or cublas= for one whose version you do not know."
            )
        if name in said:
            raise ImageRefused(
                f"{said[name]!r} and {word!r} are both {name}, and one of them would be held against nothing. Next "
                "step: say the one that is loaded."
            )
        said[name] = word
        found[name] = Part(name=name, version=version, brought_by=_ASKED)
    if _read(te) is None:
        raise ImageRefused(f"{te!r} is no release of Transformer Engine. Next step: say one as in 2.20.2.")
    return Stack("asked", te, found, whole=False)


def judge_stack(stack: Stack, needs: Needs, ranges: Iterable[Range], looked_at: Iterable[str]) -> StackFit:
    """Every need that the release has of the stack, worst first; and what was asked for that no row knows.

    Args:
        looked_at: releases that the rows were made from: of a later one they do not know what is new in it.
    """
    te = _read(stack.te)
    ranges = tuple(ranges)
    fits = list(_name_unknown(stack, needs, ranges))
    if te is not None:
        fits += _judge_release(te, [Version(release) for release in looked_at])
        fits += [fit for row in needs.need if row.holds_for(te) for fit in _judge_need(row, stack)]
        fits += [fit for row in ranges if not row.te or row.holds_for(te) for fit in _judge_range(row, stack)]
        fits += _judge_core(stack, te)
    fits += _judge_builds(needs, stack)
    parts = tuple(sorted(stack.parts.values(), key=lambda part: part.name))
    ordered = tuple(sorted(fits, key=lambda fit: (fit.verdict.rank, fit.component)))
    return StackFit(name=stack.name, te=stack.te, parts=parts, fits=ordered)


def refuse_misfits(stacks: Iterable[StackFit]) -> None:
    """Refuse what does not work, all of it named at once.

    Raises:
        ImageRefused: with the reason, the source and the next step of each.
    """
    lines = [
        f"  {stack.name}: Transformer Engine {stack.te} on {fit.component} {fit.seen}: it wants {fit.wanted}, because "
        f"{fit.says} ({fit.source}). Next step: {fit.next_step}."
        for stack in stacks
        for fit in stack.of(FitVerdict.REFUSED)
    ]
    if lines:
        raise ImageRefused("these do not fit together, and nothing was built:\n" + "\n".join(lines))


def _parts_of_base(base: Base) -> Iterator[Part]:
    by = f"base {base.id}"
    yield Part(name="python", version=base.python, brought_by=by)
    if base.driver_least:
        yield Part(name="driver", version=base.driver_least, brought_by=f"{by}, the least that runs it")
    for name, version in base.provided.items():
        yield Part(name=name, version=version, brought_by=by)


def _name_unknown(stack: Stack, needs: Needs, ranges: Iterable[Range]) -> Iterator[Fit]:
    """What was asked for by a name that is in no row, of any release: nothing was held against it."""
    known = {"torch", *_CORE, *LIBRARIES.values(), *(row.of for row in needs.build)}
    known |= {row.of for row in needs.need} | {row.with_ for row in needs.need}
    known |= {row.component for row in ranges} | {Requirement(row.with_).name for row in ranges if row.with_}
    names = {canonicalize_name(name) for name in known if name}
    for name, part in stack.parts.items():
        if part.brought_by == _ASKED and name not in names:
            near = get_close_matches(name, sorted(names), n=1)
            yield Fit(
                need="no-row",
                component=name,
                seen=part.version or "(version not known)",
                wanted="a name that a row knows",
                verdict=FitVerdict.UNKNOWN,
                says="it is not known to any row, and nothing was held against it",
                next_step=f"say {near[0]}, if it is that" if near else "leave it out, or add a row for it",
                source="matrix/needs.toml, matrix/images.toml",
            )


def _judge_release(te: Version, looked_at: list[Version]) -> Iterator[Fit]:
    first, last = min(looked_at), max(looked_at)
    if not first <= Version(te.public) <= last:
        yield Fit(
            need="release",
            component="transformer-engine",
            seen=str(te),
            wanted=f">={first},<={last}",
            verdict=FitVerdict.UNKNOWN,
            says="the rows were made from those releases, and do not know what another one needs",
            next_step=f"`nox -s te_canary -- {last} {te.public}`, then a row in matrix/needs.toml for what it needs",
            source="matrix/stacks.toml",
        )


def _judge_need(need: Need, stack: Stack) -> Iterator[Fit]:
    if need.kind not in ("library", "distribution") or (need.with_ and need.with_ not in stack.parts):
        return  # of files on a path and of symbols the doctor knows more, once they lie there
    component = LIBRARIES.get(need.of, need.of)
    verdict, seen = _hold(stack, component, need.version, FitVerdict.REFUSED)
    yield Fit(
        need=need.id,
        component=component,
        seen=seen,
        wanted=need.version or "any version",
        verdict=verdict,
        says=need.says,
        breaks=tuple(need.breaks),
        next_step=need.next,
        source=need.source,
    )


def _judge_range(row: Range, stack: Stack) -> Iterator[Fit]:
    if row.with_:
        there = _holds(stack, Requirement(row.with_))
        if there is False:
            return
    if row.component not in stack.parts and (stack.whole or row.with_ == row.component or row.needs == "<0"):
        return  # what must not be there is not there
    outside = FitVerdict.REFUSED if row.outside == "refused" else FitVerdict.WARNED
    verdict, seen = _hold(stack, row.component, row.needs, outside)
    yield Fit(
        need=row.id,
        component=row.component,
        seen=seen,
        wanted="not beside it" if row.needs == "<0" else row.needs,
        verdict=verdict,
        says=row.says,
        next_step=row.next,
        source=row.source,
    )


def _judge_core(stack: Stack, te: Version) -> Iterator[Fit]:
    """The halves of Transformer Engine refuse each other in different releases."""
    for name in _CORE:
        part = stack.parts.get(name)
        version = _read(part.version) if part else None
        if version is not None and version.public != te.public:
            yield Fit(
                need="one-release",
                component=name,
                seen=str(version),
                wanted=f"=={te.public}",
                verdict=FitVerdict.REFUSED,
                says="its other half is of another release, which it refuses at import",
                next_step=f"ask for {name}=={te.public} in the image's requirements",
                source="Requires-Dist of transformer_engine and transformer_engine_torch",
            )


def _judge_builds(needs: Needs, stack: Stack) -> Iterator[Fit]:
    """Wheels that are built for one torch, and do not say so."""
    for row in needs.build:
        part = stack.parts.get(row.of)
        version = _read(part.version) if part else None
        if version is None or not SpecifierSet(row.version).contains(version.public, prereleases=True):
            continue
        verdict, seen = _hold(stack, "torch", row.torch, FitVerdict.REFUSED)
        yield Fit(
            need=f"build of {row.of}",
            component="torch",
            seen=seen,
            wanted=row.torch,
            verdict=verdict,
            says=f"{row.of} {version} is built for that torch",
            next_step=f"take a {row.of} that is built for it, or build it from source",
            source=row.source,
        )


def _hold(stack: Stack, name: str, wanted: str, outside: FitVerdict) -> tuple[FitVerdict, str]:
    part = stack.parts.get(name)
    if part is None:
        return (FitVerdict.REFUSED, "is not there") if stack.whole else (FitVerdict.UNKNOWN, "(nobody has told of it)")
    version = _read(part.version)
    if wanted == "<0":
        return outside, part.version or "(version not known)"
    if version is None:
        return (FitVerdict.FITS if not wanted else FitVerdict.UNKNOWN), f"(version not known; from {part.brought_by})"
    # A build of a release counts as it: "2.13.0a0+9186a08b2c" is what NVIDIA calls its 2.13.
    inside = SpecifierSet(wanted).contains(_as_release(name, version), prereleases=True)
    return (FitVerdict.FITS if inside else outside), str(version)


def _holds(stack: Stack, requirement: Requirement) -> bool | None:
    """Whether something is there in a range; None where its version is not known."""
    part = stack.parts.get(canonicalize_name(requirement.name))
    if part is None:
        return False
    version = _read(part.version)
    if version is None:
        return None if requirement.specifier else True
    return requirement.specifier.contains(version.public, prereleases=True)


def _as_release(name: str, version: Version) -> str:
    return version.base_version if name == "torch" else version.public


def _read(text: str) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None
