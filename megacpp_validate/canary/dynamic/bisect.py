"""`te_bisect`: the first bad point on the way from a good stack to a bad one.

Each component that changes is an axis: Transformer Engine, and libraries that the user names. The way moves one axis
after another from its good value to its bad one, so that all points lie on one line, and the search halves that line.
A fault is assumed to stay once it has appeared. A point that gives no answer is left out, and widens the range. Sources
of releases judge a point, or probes on a GPU host.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

from packaging.version import InvalidVersion, Version
from pydantic import Field

from ...catalog.bridge import Catalog
from ...diagnosis.blame import read_order
from ...diagnosis.diagnose import diagnose, find_host_fault
from ...diagnosis.rows import OF_THE_HOST
from ...environments import stacks as host_stacks
from ...environments.cell import own_folder
from ...environments.fleet import Room, plan_jobs
from ...environments.interpreter import InterpreterEnvironment, host_interpreter, put_over, read_facts, require_torch
from ...environments.plan import RunOptions, choose_names, choose_target, find_target, why_not_here
from ...errors import EvidenceMissing, Exit, NoEnvironment, WrongArguments
from ...evidence.receipt import Outcome, Receipt
from ...evidence.values import Frozen, Result
from ...process import Processes
from ..upgrade import open_sources, require_listed

TE: Final = "te"  # the axis that every search has
Point = dict[str, str]
"""A version of each axis: {"te": "2.17.1", "cudnn": "9.14.0"}."""


class Verdict(StrEnum):
    """What one point of the search is. Only the first two say anything about the module."""

    GOOD = "good"
    BAD = "bad"
    CANNOT_BUILD = "cannot-build"  # there is no such environment, or it could not be made
    CANNOT_TELL = "cannot-tell"  # something else than the module failed


class Answer(Frozen):
    """The result of one run at one point; `reason` is what failed, what blocks the module, or why nothing was built."""

    verdict: Verdict
    reason: str = ""


class PointResult(Answer):
    """One point, judged."""

    point: Point


class SearchEnd(StrEnum):
    """How a search ended."""

    FOUND = "found"
    NARROWED = "narrowed"  # to a range: the points inside gave no answer
    GOOD_IS_BAD = "good-is-bad"
    BAD_IS_GOOD = "bad-is-good"
    END_UNTOLD = "end-untold"  # one of the end points gave no answer
    END_UNBUILT = "end-unbuilt"  # one of the end points cannot be built


_EXITS: Final = {
    SearchEnd.FOUND: Exit.CLOSED,
    SearchEnd.GOOD_IS_BAD: Exit.WRONG_ARGUMENTS,
    SearchEnd.BAD_IS_GOOD: Exit.WRONG_ARGUMENTS,
    SearchEnd.END_UNBUILT: Exit.NO_ENVIRONMENT,
}


class BisectResult(Result):
    """The answer of a search.

    Attributes:
        module: is good at one end and bad at the other.
        tier: "static" or "gpu": what judged each point.
        axes: versions of each component, from the good end to the bad one.
        last_good: empty where an end is not as it was given.
        first_bad: the first bad point; several where those before the last gave no answer: it is one of them.
        points: in the order in which they were tried.
    """

    schema_id: Literal["megacpp-validate/bisect/6"] = "megacpp-validate/bisect/6"
    module: str
    tier: str
    axes: dict[str, tuple[str, ...]]
    end: SearchEnd
    last_good: Point = Field(default_factory=dict)
    first_bad: tuple[Point, ...] = ()
    points: tuple[PointResult, ...] = ()
    seconds: float = 0.0

    @property
    def exit(self) -> Exit:
        """Closed where the first bad point is known; evidence is missing where only a range is."""
        return _EXITS.get(self.end, Exit.EVIDENCE_MISSING)

    @property
    def culprits(self) -> dict[str, tuple[str, ...]]:
        """Of each axis that moves between the last good and the first bad point, the versions that it moves to."""
        moved = {
            axis: tuple(dict.fromkeys(one[axis] for one in self.first_bad if one[axis] != self.last_good[axis]))
            for axis in self.axes
        }
        return {axis: versions for axis, versions in moved.items() if versions}


# How a search ends by an end point that has another verdict than it should have.
_WRONG_END: Final = {
    Verdict.GOOD: SearchEnd.BAD_IS_GOOD, Verdict.BAD: SearchEnd.GOOD_IS_BAD,
    Verdict.CANNOT_BUILD: SearchEnd.END_UNBUILT, Verdict.CANNOT_TELL: SearchEnd.END_UNTOLD,
}  # fmt: skip
Probe = Callable[[Point], Answer]
"""Judges a point; raises `NoEnvironment` where nothing can be built there."""
Progress = Callable[[PointResult], None]
"""Called with each point."""


_AXIS: Final = re.compile(r"[a-z][a-z0-9-]*=[^:,=]+:[^:,]*(,[^:,=]+:[^:,]*)+")
_OF_MACHINE: Final = OF_THE_HOST | {"GPU memory"}  # what fails whichever release is there


@dataclass(frozen=True)
class BisectOptions(RunOptions):
    """What is searched.

    Attributes:
        good, bad: releases of Transformer Engine.
        static: judge by sources; else by probes on `target`.
        axes: NAME=VERSION:DIR,VERSION:DIR each.
    """

    good: str
    bad: str
    module: str
    static: bool
    axes: tuple[str, ...] = ()


def run_bisect(catalog: Catalog, options: BisectOptions, progress: Progress = lambda _: None) -> BisectResult:
    """Search for the first bad point.

    Raises:
        WrongArguments: no such module, target, release or axis; or nothing changes between the ends.
        NoEnvironment: there is no interpreter, or sources cannot be read.
        EvidenceMissing: this machine is none of the target.
    """
    choose_names("bridge module", [row.id for row in catalog.modules], [options.module])
    if options.static:
        if options.target or options.axes:
            raise WrongArguments("--axis and --target belong to the gpu tier. Next step: add --tier gpu.")
        return search(*_open_sources(catalog, options), options, progress)
    processes, receipts = Processes(), options.receipts.absolute() / "receipts"
    axes, probe = _open_stacks(catalog, options, receipts, processes)
    try:
        with own_folder(receipts):
            return search(axes, probe, options, progress)
    except BaseException:  # an interrupt too: nothing may keep running behind it
        processes.stop()
        raise


# --- the search -----------------------------------------------------------------------------------------------------


def search(
    axes: Mapping[str, tuple[str, ...]], probe: Probe, options: BisectOptions, progress: Progress = lambda _: None
) -> BisectResult:
    """Search from the first versions of all axes, which are good, to the last, which are bad.

    Args:
        axes: in the order in which they are moved.
        probe: judges a point.

    Raises:
        WrongArguments: no axis changes.
    """
    started = time.monotonic()
    seen: list[PointResult] = []

    def judge(point: Point) -> Verdict:
        try:
            answer = probe(point)
        except NoEnvironment as fault:
            answer = Answer(verdict=Verdict.CANNOT_BUILD, reason=str(fault))
        seen.append(PointResult(point=point, **answer.model_dump()))
        progress(seen[-1])
        return answer.verdict

    points = [{axis: versions[0] for axis, versions in axes.items()}]
    for axis, versions in axes.items():
        points += [points[-1] | {axis: version} for version in versions[1:]]
    if len(points) < 2:
        raise WrongArguments(
            f"GOOD and BAD are both {options.good}, and no --axis changes: there is nothing to search. Next step: give "
            "two releases."
        )
    fields: dict[str, Any] = {}
    if (verdict := judge(points[0])) is not Verdict.GOOD or (verdict := judge(points[-1])) is not Verdict.BAD:
        fields["end"] = _WRONG_END[verdict]
    else:
        good, bad = _halve(points, judge)
        fields["end"] = SearchEnd.FOUND if bad == good + 1 else SearchEnd.NARROWED
        fields |= {"last_good": points[good], "first_bad": tuple(points[good + 1 : bad + 1])}
    return BisectResult(
        module=options.module, tier="static" if options.static else "gpu", axes=dict(axes), points=tuple(seen),
        seconds=round(time.monotonic() - started, 1), **fields,
    )  # fmt: skip


def _halve(points: Sequence[Point], judge: Callable[[Point], Verdict]) -> tuple[int, int]:
    """Indices of the last good and of the first bad point; those between them gave no answer."""
    good, bad = 0, len(points) - 1
    skipped: set[int] = set()
    while left := [at for at in range(good + 1, bad) if at not in skipped]:
        middle = min(left, key=lambda at: abs(2 * at - good - bad))
        match judge(points[middle]):
            case Verdict.GOOD:
                good = middle
            case Verdict.BAD:
                bad = middle
            case _:
                skipped.add(middle)
    return good, bad


# --- by sources -----------------------------------------------------------------------------------------------------


def _open_sources(catalog: Catalog, options: BisectOptions) -> tuple[dict[str, tuple[str, ...]], Probe]:
    """The releases on the index as the one axis, and a probe that compares each with the good end."""
    sources = open_sources("static")
    from ..static.compare import compare_releases
    from ..static.findings import Impact
    from ..static.release import without_garbage_collection
    from ..static.sweep import read_bridge

    versions = sources.versions()
    require_listed((options.good, options.bad), versions)
    source = read_bridge(catalog)

    def probe(point: Point) -> Answer:
        """Bad where a breaking finding touches the module, also one that the good end has already."""
        good, release = sources.release(options.good), sources.release(point[TE])
        with without_garbage_collection():
            found, unchanged, _surface = compare_releases(good, release, source)
        red = [one for one in (*found, *unchanged) if one.impact is Impact.BREAKING and options.module in one.modules]
        if not red:
            return Answer(verdict=Verdict.GOOD, reason="no call of the module fails with its sources")
        name = ".".join(filter(None, (red[0].symbol, red[0].member)))
        parameter = f" ({red[0].parameter})" if red[0].parameter else ""
        return Answer(verdict=Verdict.BAD, reason=f"`{name}`: {red[0].kind.value.replace('-', ' ')}{parameter}")

    return {TE: order_releases(versions, options.good, options.bad)}, probe


# --- by probes ------------------------------------------------------------------------------------------------------


def _open_stacks(
    catalog: Catalog, options: BisectOptions, receipts: Path, processes: Processes
) -> tuple[dict[str, tuple[str, ...]], Probe]:
    """Releases and libraries as axes, and a probe that runs the module and its dependencies in each environment."""
    folders = read_axes(options.axes)
    if options.target:
        target = find_target(catalog, options.target)
    else:
        target = choose_target(catalog, [read_facts(host_interpreter(os.environ, options.python), processes)])
    found = host_stacks.find_environments(options.overlays, os.environ, options.python)
    known = [one.release for one in found if one.environment is not None]
    with suppress(NoEnvironment):  # a GPU host need not have griffe, nor an index
        known += open_sources("static").versions()
    below = read_order(catalog.modules).below[options.module]
    dependencies = [row.id for row in catalog.modules if row.id in below]

    def probe(point: Point) -> Answer:
        environment = host_stacks.resolve_environment(point[TE], found)
        environment = _put_libraries(environment, {axis: folders[axis][point[axis]] for axis in folders})
        facts = read_facts(environment, processes)
        if reason := why_not_here(target, facts):
            raise EvidenceMissing(reason)
        require_torch(facts)
        stack = host_stacks.Stack("-".join(map("".join, point.items())), environment, facts)
        folder = receipts / f"seed-{options.seed}-within-{options.limit_s:g}s"  # a longer limit runs anew
        running = host_stacks.StackOptions(
            times=False, room=Room(plan_jobs(gpu=bool(target.arch))), probes=(*dependencies, options.module),
            seed=options.seed, receipts=folder, limit_s=options.limit_s,
        )  # fmt: skip
        (ran,) = host_stacks.run_stacks(catalog, target, (stack,), running, processes)
        return judge_receipts(options.module, dependencies, tuple(ran.receipts.values()), point)

    axes = {axis: tuple(by_version) for axis, by_version in folders.items()}
    return {TE: order_releases(known, options.good, options.bad), **axes}, probe


def judge_receipts(module: str, below: Sequence[str], receipts: Sequence[Receipt], point: Point) -> Answer:
    """What one run says about a module, and not about its dependencies.

    Nothing is known about a module that another module's failure keeps from running, or that ran with another version
    than the point has. A module that ran and is red is bad, whoever is to blame.
    """
    by_probe = {receipt.probe: receipt for receipt in receipts}
    red = [name for name in below if name in by_probe and not by_probe[name].outcome.is_good]
    own = by_probe.get(module)
    if own is None or own.outcome is Outcome.NOT_RUN:
        return _unknown(f"{module} did not run: {own.reason if own else 'there is no receipt'}")
    if own.requested != "te":
        return _unknown(f"{module} ran without Transformer Engine: {own.requested_because or own.requested}")
    for axis, wanted in point.items():
        if other := _find_other(own, axis, wanted):
            return _unknown(f"{axis} {wanted} was to be loaded, and {other} was: the process took another folder")
    if trouble := find_machine_trouble(own):
        return _unknown(f"the machine failed ({trouble}): {own.reason}")
    if own.outcome is Outcome.BLOCKED or (own.outcome is Outcome.IMPORT_ERROR and red):
        blocker = next((r for r in receipts if r.cell == own.blocked_by), by_probe[red[0]] if red else own)
        return _unknown(f"blocked by {blocker.probe}, which is {blocker.outcome.value}: {blocker.reason}")
    if own.outcome.is_good:
        return Answer(verdict=Verdict.GOOD, reason=own.outcome.value)
    also = f"; {', '.join(red)}, on which the module depends, red too" if red else ""
    return Answer(verdict=Verdict.BAD, reason=f"{own.outcome.value}{also}: {own.reason}")


def _unknown(reason: str) -> Answer:
    return Answer(verdict=Verdict.CANNOT_TELL, reason=reason)


def find_machine_trouble(receipt: Receipt) -> str:
    """The fault of the machine that ended a probe; empty where none did."""
    if fault := find_host_fault(receipt):
        return fault
    component = diagnose(receipt).component if receipt.outcome is Outcome.ERROR else ""
    return component if component in _OF_MACHINE else ""


def _find_other(receipt: Receipt, axis: str, wanted: str) -> str:
    """The versions that were loaded where one is not the wanted one; empty where all are, or none is known.

    Of two copies of a library nobody knows which one computes.
    """
    names = {"transformer_engine" if axis == TE else axis.replace("-", "_"), f"lib{axis}"}
    loaded = ", ".join(
        [one.version for one in receipt.libraries if one.name in names]
        + [one.version for one in receipt.packages if one.name in names]
    )
    versions = sorted(set(re.findall(r"[^\s,]+", loaded)))
    return "" if all(_is_same(version, wanted) for version in versions) else " and ".join(versions)


def _is_same(one: str, other: str) -> bool:
    """Whether one version is the other, or its beginning: 9.14.0 and 9.14.0.64 are one cuDNN."""
    pairs = zip(*(re.split(r"[.\-_]", version.partition("+")[0]) for version in (one, other)), strict=False)
    return all(left == right for left, right in pairs)


# --- axes -----------------------------------------------------------------------------------------------------------


def order_releases(known: Sequence[str], good: str, bad: str) -> tuple[str, ...]:
    """Every known release from GOOD to BAD, which are in either order of age.

    Raises:
        WrongArguments: GOOD or BAD is no version.
    """
    try:
        by_version = {Version(name): name for name in (*known, good, bad)}  # 2.9 and 2.9.0 are one
    except InvalidVersion as fault:
        raise WrongArguments(f"{fault}. Next step: give versions such as 2.17.1.") from fault
    ends = Version(good), Version(bad)
    between = sorted((one for one in by_version if min(ends) <= one <= max(ends)), reverse=ends[0] > ends[1])
    return tuple(by_version[version] for version in between)


def read_axes(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """By axis, the site folder of each of its versions, from the good end to the bad one; empty for the host's own.

    Raises:
        WrongArguments: one has another form, is given twice, or names a folder that does not exist.
    """
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        axis, _, rest = text.partition("=")
        folders = {version: folder for version, _, folder in (part.partition(":") for part in rest.split(","))}
        lacking = [folder for folder in folders.values() if not Path(folder).is_dir()]
        if not _AXIS.fullmatch(text) or axis in (TE, *found) or lacking:
            raise WrongArguments(
                f"The axis {text!r} is invalid, given twice, or names a folder that does not exist. Next step: write "
                "NAME=VERSION:DIR,VERSION:DIR, from the good end to the bad one; VERSION: alone is what the host has."
            )
        found[axis] = folders
    return found


def _put_libraries(environment: InterpreterEnvironment, folders: Mapping[str, str]) -> InterpreterEnvironment:
    """An environment with the folder of each axis before its own; shared libraries are preloaded."""
    given = {axis: Path(folder) for axis, folder in folders.items() if folder}
    if not given:
        return environment
    over = put_over(environment, [*given.values(), *environment.folders])
    # torch's own RPATH comes before LD_LIBRARY_PATH: another cuDNN or cuBLAS is taken only where it is loaded first.
    libraries = [
        str(file.absolute())
        for axis, folder in given.items()
        for file in sorted(folder.rglob(f"lib{axis}*.so.*"))
        if re.fullmatch(r"\w+\.so\.\d+", file.name)
    ]
    preload = ":".join([*libraries, *over.variables.get("LD_PRELOAD", "").split()])
    return replace(over, variables={**over.variables, "LD_PRELOAD": preload}) if libraries else over
