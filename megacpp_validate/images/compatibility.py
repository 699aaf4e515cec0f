"""Whether a stack fits, from rows alone: a pure function of versions that takes no second, before a build of an hour.

What is not known is told as unknown. A base brings parts in versions that nobody has published; whoever builds on it
must be told that the check says nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from ..catalog.images import Range
from ..catalog.needs import Build, Need, Needs
from .fit_result import Fit, FitVerdict, StackFit
from .stack import ASKED, LIBRARIES, Stack, name_distributions, read_version

_CORE: Final = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu13", "transformer-engine-cu12")


def judge_stack(stack: Stack, needs: Needs, ranges: Iterable[Range], looked_at: Iterable[str]) -> StackFit:
    """Every need that the release has of the stack, worst first; and what was asked for that no row knows.

    Args:
        looked_at: releases that the rows were made from: of a later one they do not know what is new in it.
    """
    te = read_version(stack.te)
    stack = _name_parts(stack, needs)
    ranges = tuple(row for row in ranges if not row.targets or not stack.target or stack.target in row.targets)
    fits = list(_name_unknown(stack, needs, ranges))
    if te is not None:
        fits += _judge_release(te, [Version(release) for release in looked_at])
        held = [row for row in needs.need if row.holds_for(te) and row.holds_for_core(stack.core_cuda)]
        fits += [fit for row in held for fit in _judge_need(row, stack)]
        fits += [fit for row in ranges if not row.te or row.holds_for(te) for fit in _judge_range(row, stack)]
        fits += _judge_core(stack, te)
        fits += _judge_torch(stack)
    fits += _judge_builds(needs, stack)
    parts = tuple(sorted(stack.parts.values(), key=lambda part: part.name))
    ordered = tuple(sorted(fits, key=lambda fit: (fit.verdict.rank, fit.component)))
    return StackFit(name=stack.name, te=stack.te, parts=parts, fits=ordered)


def _name_parts(stack: Stack, needs: Needs) -> Stack:
    """The stack with libraries of CUDA by their own names, where distributions bring them ("nvidia-cublas")."""
    brought = {
        part: stack.parts[name].model_copy(update={"name": part})
        for name, part in name_distributions(needs).items()
        if name in stack.parts
    }
    return replace(stack, parts={**brought, **stack.parts})


def _name_unknown(stack: Stack, needs: Needs, ranges: Iterable[Range]) -> Iterator[Fit]:
    """What was asked for by a name that is in no row, of any release: nothing was held against it."""
    known = {"torch", *_CORE, *LIBRARIES.values(), *(row.of for row in needs.build)}
    known |= {row.of for row in needs.need} | {row.beside for row in needs.need} | set(name_distributions(needs))
    known |= {row.component for row in ranges} | {Requirement(row.with_).name for row in ranges if row.with_}
    names = {canonicalize_name(name) for name in known if name}
    for name, part in stack.parts.items():
        if part.brought_by == ASKED and name not in names:
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
    if need.kind not in ("library", "distribution"):
        return  # of files on a path and of symbols the doctor knows more, once they lie there
    if need.with_ and (need.beside not in stack.parts or not need.holds_beside(stack.version(need.beside))):
        return
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
        version = stack.version(name)
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


def _judge_torch(stack: Stack) -> Iterator[Fit]:
    """The torch extension is compiled against torch: a wheel of PyTorch's index names the CUDA of both."""
    own, core = stack.torch_cuda, stack.core_cuda
    if own is None:
        return
    without = isinstance(own, str)
    verdict = FitVerdict.UNKNOWN if core is None and not without else FitVerdict.FITS
    yield Fit(
        need="torch-of-one-cuda",
        component="torch",
        seen=stack.parts["torch"].version,
        wanted=f"a build for CUDA {core or 'of the core library'}",
        verdict=FitVerdict.REFUSED if without or (core is not None and own != core) else verdict,
        says="it is built without CUDA" if without else "its extension is compiled with the CUDA of the core library",
        next_step=f"take a torch that is built for CUDA {core or '12 or 13'}, or the core library for that of torch",
        source="torch 2.13: utils/cpp_extension.py _check_cuda_version raises where the major releases differ",
    )


def _judge_builds(needs: Needs, stack: Stack) -> Iterator[Fit]:
    """Wheels that are built for one torch, and do not say so."""
    for name in dict.fromkeys(row.of for row in needs.build):
        version = stack.version(name)
        rows = [row for row in needs.build if row.of == name]
        held = [row for row in rows if version is not None and row.is_of(version)]
        yield from (_judge_build(row, stack, str(version)) for row in held)
        if name in stack.parts and not held:
            yield Fit(
                need=f"build of {name}",
                component=name,
                seen=str(version or "(version not known)"),
                wanted=" or ".join(row.version for row in rows),
                verdict=FitVerdict.UNKNOWN,
                says="it is built for one torch without saying which, and nobody has looked at this one",
                next_step="nox -s doctor says it where it is installed; then a [[build]] row in matrix/needs.toml",
                source="matrix/needs.toml",
            )


def _judge_build(row: Build, stack: Stack, version: str) -> Fit:
    verdict, seen = _hold(stack, "torch", row.torch, FitVerdict.REFUSED)
    return Fit(
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
    version = read_version(part.version)
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
    version = read_version(part.version)
    if version is None:
        return None if requirement.specifier else True
    return requirement.specifier.contains(version.public, prereleases=True)


def _as_release(name: str, version: Version) -> str:
    return version.base_version if name == "torch" else version.public
