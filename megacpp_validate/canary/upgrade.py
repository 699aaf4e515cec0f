"""Which bridge module does an upgrade break: the options of the canary, and one result over the tiers.

A pair of releases is compared by its sources (static tier), damaged installs are tried (firewall tier), and every
module runs in every release on the device that is here (gpu tier).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field

from .. import TOOL
from ..catalog.bridge import Catalog
from ..catalog.images import read_needs
from ..environments import stacks as host_stacks
from ..environments.fleet import Event, Room, plan_jobs, share_cores
from ..environments.host_session import SupportGrid, build_support
from ..environments.interpreter import host_interpreter, own_interpreter, read_facts
from ..environments.plan import RunOptions, choose_canary_probes, choose_names, choose_target, find_target, why_not_here
from ..errors import EvidenceMissing, Exit, NoEnvironment, NothingSelected, WrongArguments, exit_for
from ..evidence.receipt import Receipt
from ..evidence.store import cell_of, read_receipts
from ..evidence.values import Result
from ..process import Processes
from .dynamic.slowdown import compare_timings, measure_noise
from .dynamic.step import StackReceipts, StepResult, compare_stacks
from .firewall.run import FirewallCase, FirewallResult, run_firewall
from .package_index import UnknownRelease, nearest
from .static.findings import StaticResult, Sweep
from .static.library import LIBRARIES, TE

if TYPE_CHECKING:
    from .static.sources import Sources

TIERS: Final = ("static", "firewall", "gpu")


@dataclass(frozen=True)
class CanaryOptions(RunOptions):
    """What a person asks of the canary.

    Attributes:
        releases: in the order of the steps.
        library: whose releases; those of another library than Transformer Engine have the static tier alone.
        source: folders of the source tree that the static tier judges; without any the current project if it uses
            Transformer Engine, else this project's bridge.
        environment: what the requirements of NEW are compared with, as --env takes it.
        every_pair, listing: the static tier alone, over all releases.
        tiers: names with commas; None for what suits the rest.
        every_installed: all releases that the host has, oldest first.
        environments: "NAME=WAY:VALUE", each a stack of that name.
        times: whether modules are timed; only a GPU is.
        verbose: list API changes that the bridge does not use, too.
    """

    releases: tuple[str, ...] = ()
    source: tuple[Path, ...] = ()
    environment: tuple[str, ...] = ()
    library: str = "transformer-engine"
    every_pair: bool = False
    listing: bool = False
    tiers: str | None = None
    every_installed: bool = False
    environments: tuple[str, ...] = ()
    times: bool = True
    verbose: bool = False


class UpgradeResult(Result):
    """The answer on two releases or more, over the selected tiers.

    Attributes:
        tiers: "static", "firewall", "gpu", in that order.
        static, firewall: None where the tier was not selected.
        grid: stacks x modules; None without the dynamic tier.
        stacks: those of the dynamic tier, oldest first.
        steps: between adjacent stacks of the dynamic tier.
        seconds: wall-clock time of each tier.
        unmade: not one of the environments of the dynamic tier could be made.
    """

    schema_id: Literal["megacpp-validate/upgrade/1"] = "megacpp-validate/upgrade/1"
    target: str
    tiers: tuple[str, ...]
    static: tuple[StaticResult, ...] = ()
    firewall: FirewallResult | None = None
    grid: SupportGrid | None = None
    stacks: tuple[host_stacks.StackRun, ...] = ()
    steps: tuple[StepResult, ...] = ()
    seconds: dict[str, float] = Field(default_factory=dict)
    unmade: bool = False

    @property
    def breaks(self) -> bool:
        """Whether any tier found somebody to blame."""
        parts = (*self.static, *self.steps, *([self.firewall] if self.firewall else ()))
        return any(part.breaks for part in parts)

    @property
    def lacks(self) -> bool:
        """Whether evidence that was asked for is missing."""
        lost = any(stack.problem for stack in self.stacks) or any(step.lost for step in self.steps)
        unreadable = self.grid is not None and bool(self.grid.unreadable)
        static = any(result.lacks for result in self.static)
        return static or lost or unreadable or (self.firewall is not None and self.firewall.lacks)

    @property
    def exit(self) -> Exit:
        """A breakage before evidence that is missing, and that before an environment that could not be made."""
        if self.unmade and not self.breaks and (self.firewall is None or not self.firewall.lacks):
            return Exit.NO_ENVIRONMENT
        return exit_for(breaks=self.breaks, lacks=self.lacks)


@dataclass(frozen=True)
class CanaryPlan:
    """What the options select.

    Attributes:
        single: one pair by its sources alone.
        tiers: of `TIERS`, in that order.
        releases: of every step; fewer than two are completed by the pin and the index.
    """

    tiers: tuple[str, ...] = ("static",)
    releases: tuple[str, ...] = ()
    single: bool = False


@dataclass(frozen=True)
class Progress:
    """Functions that are called as a run goes on, all of them from one thread at a time."""

    pair: Callable[[str, int, int], None] = lambda *_: None
    case: Callable[[FirewallCase], None] = lambda _: None
    cell: Callable[[Event], None] = lambda _: None
    note: Callable[[str], None] = lambda _: None


def plan_canary(catalog: Catalog, options: CanaryOptions) -> CanaryPlan:
    """Read what the options select; nothing has run when they contradict each other.

    Raises:
        WrongArguments: they do, a release is given twice, or there is no such probe.
        NothingSelected: no tier, or no two releases.
    """
    choose_canary_probes(catalog, options.probes)
    choose_names("library", list(LIBRARIES), [options.library])
    stacks = options.every_installed or bool(options.environments)
    alone = options.every_pair or options.listing
    tiers = (options.tiers if options.tiers is not None else "gpu" if stacks else "static").replace(",", " ").split()
    if alone and (options.tiers or stacks or options.releases[2:]):
        raise WrongArguments(
            "--all and --list belong to the static tier alone, between two releases at most. Next step: leave out "
            "--all and --list, or --tiers, --all-installed, --environment and further releases."
        )
    is_te = LIBRARIES[options.library] is TE
    if (options.environment and (alone or not is_te or "static" not in tiers)) or not (is_te or tiers == ["static"]):
        raise WrongArguments(
            "--env belongs to the static tier of one step of Transformer Engine, --library to the static tier. Next "
            "step: leave out --env and --library, or --all, --list and other tiers."
        )
    if alone:
        return CanaryPlan(releases=options.releases)
    choose_names("tier", TIERS, tiers)
    if not tiers:
        raise NothingSelected(f"No tier is selected. Next step: choose from {','.join(TIERS)}.")
    named = tuple(text.partition("=")[0] for text in options.environments)
    releases = options.releases or named
    _require_different(named)
    if options.every_installed:
        places = host_stacks.find_environments(options.overlays, os.environ, options.python)
        releases = tuple(place.release for place in places if place.environment is not None)
        releases += tuple(name for name in named if not any(_is_same(name, one) for one in releases))
        _require_step(releases)  # fewer would be judged against the index
    _require_different(releases)
    single = options.tiers is None and not stacks and not releases[2:]
    return CanaryPlan(tuple(tier for tier in TIERS if tier in tiers), releases, single)


def _is_same(one: str, other: str) -> bool:
    """Whether two names are one release, spelled alike or not: 2.9 and te2.9.0."""
    return one == other or host_stacks.is_same_release(one.removeprefix("te"), other.removeprefix("te"))


def _require_different(names: Sequence[str]) -> None:
    for one, other in combinations(names, 2):
        if _is_same(one, other):
            raise WrongArguments(f"{other} is given twice. Next step: leave out one of the two.")


def _require_step(names: Sequence[str]) -> None:
    if len(names) < 2:
        raise NothingSelected(
            f"{names[0] + ' alone' if names else 'No release'} is selected: there is no step to judge. Next step: name "
            "two releases, put more of them where --overlays finds them, or give --environment NAME=WAY:VALUE twice."
        )


def compare_pairs(catalog: Catalog, releases: Sequence[str], options: CanaryOptions) -> tuple[StaticResult, ...]:
    """The static tier for each release and the next; fewer than two are completed by the pin and the index.

    Raises:
        WrongArguments: an unknown release or component, or a tree that uses nothing of Transformer Engine.
        NothingSelected: there is no newer release than the pin.
        NoEnvironment: the sources of a release cannot be had.
        EvidenceMissing: no file uses Transformer Engine, and one cannot be read.
    """
    sources = open_sources("static", options.library)
    from .requirements import Requirements
    from .static.named_rows import choose_roots
    from .static.sweep import read_chosen, read_pair, run_pair

    library = sources.library
    needs = Requirements(catalog, options.environment, options.target) if library is TE else None
    if len(releases) < 2:
        listed = sources.versions()
        releases = (*(releases or (catalog.pinned.te if library is TE else listed[-2:][0],)), listed[-1])
        if host_stacks.is_same_release(*releases):
            raise NothingSelected(f"{releases[0]} is the newest release on the index. Next step: give two releases.")
    source = read_chosen(choose_roots(options.source, Path.cwd(), library), catalog, library)
    if not any(map(source.project.uses, source.project.using)) and (unread := source.project.unreadable):
        why = "".join(f"\n  {file}: {fault}" for file, fault in unread.items())
        raise EvidenceMissing(f"No readable file uses {library.title}. Unreadable:{why}\nNext step: mend these files.")
    return tuple(
        run_pair(*read_pair(sources, old, new), source, tool=TOOL, verbose=options.verbose, requirements=needs)
        for old, new in pairwise(releases)
    )


def compare_every_pair(catalog: Catalog, ends: Sequence[str], options: CanaryOptions, progress: Progress) -> Sweep:
    """The static tier for every adjacent pair of releases on the index, between two ends where they are given.

    Raises:
        WrongArguments: an end is no release on the index.
        NothingSelected: no two releases can be read.
    """
    sources = open_sources("static", options.library)
    from .static.named_rows import choose_roots
    from .static.sweep import OLDEST, run_sweep

    roots = choose_roots(options.source, Path.cwd(), sources.library)
    versions = sources.versions()
    readable = versions[versions.index(OLDEST) :] if OLDEST in versions else versions  # a mirror may start later
    first, last = (*ends, *(readable[0], readable[-1])[len(ends) :])
    require_listed((first, last), versions)
    one, other = sorted((versions.index(first), versions.index(last)))
    sweep = run_sweep(versions[one : other + 1], sources, catalog, tool=TOOL, roots=roots, progress=progress.pair)
    if not sweep.steps:
        raise NothingSelected("No two releases could be read: there is nothing to compare. Next step: see --list.")
    return sweep


def run_upgrade(catalog: Catalog, plan: CanaryPlan, options: CanaryOptions, progress: Progress) -> UpgradeResult:
    """Run the tiers of a plan; the one that needs nothing comes first.

    Raises:
        ToolError: an argument is wrong, or a tier cannot be run at all.
    """
    seconds: dict[str, float] = {}
    parts: dict[str, Any] = {"target": ""}
    releases = plan.releases
    for tier in plan.tiers:
        started = time.monotonic()
        if tier == "static":
            named = [release.removeprefix("te") for release in releases]
            parts["static"] = compare_pairs(catalog, named, options)
            if len(releases) < 2:  # as the pin and the index completed them
                releases = (parts["static"][0].old.version, parts["static"][0].new.version)
        elif tier == "firewall":
            parts["firewall"] = run_firewall(catalog, open_sources(tier).wheel, progress=progress.case)
        else:
            parts |= _run_on_device(catalog, options, releases, progress)
        seconds[tier] = round(time.monotonic() - started, 2)
    return UpgradeResult(tiers=plan.tiers, seconds=seconds, **parts)


def compare_receipts(catalog: Catalog, folders: Sequence[Path]) -> UpgradeResult:
    """Judge the step from each folder of receipts to the next; runs nothing.

    Raises:
        WrongArguments: a folder is given twice in a row, or holds receipts of several stacks or targets.
        NothingSelected: a folder holds no receipt.
    """
    started = time.monotonic()
    for one, other in pairwise(folders):
        _require_different((str(one.resolve()), str(other.resolve())))
    sides, runs = [], []
    lost: dict[str, str] = {}
    again: dict[str, Receipt] = {}
    for folder in folders:
        found = read_receipts(folder)
        second = read_receipts(folder / host_stacks.AGAIN).found if (folder / host_stacks.AGAIN).is_dir() else {}
        if not found.found and not found.unreadable:
            raise NothingSelected(
                f"There is no receipt in {folder}. Likely cause: a typing error, or its run never began. Next step: "
                "give the folder of one stack, as `te_canary` names it in its last lines."
            )
        receipts = tuple(found.found.values())
        stack = _read_one(f"stack in {folder}", [receipt.stack for receipt in receipts]) or folder.name
        sides.append(StackReceipts(stack, receipts, {cell_of(one.file.name): one.reason for one in found.unreadable}))
        cells = tuple(receipt.cell for receipt in receipts)
        runs.append(host_stacks.StackRun(stack=stack, environment="", folder=str(folder), reused=cells))
        lost |= {str(one.file): one.reason for one in found.unreadable}
        again = again or {receipt.probe: receipt for receipt in second.values()}
    every = [receipt for side in sides for receipt in side.receipts]
    target = _read_one("target", [receipt.target for receipt in every])
    probes = {receipt.probe for receipt in every} | {module.id for module in catalog.modules if lost}
    judged = _judge(catalog, target, sides, again, probes, lost)
    seconds = {"gpu": round(time.monotonic() - started, 2)}
    return UpgradeResult(target=target, tiers=("gpu",), stacks=tuple(runs), seconds=seconds, **judged)


def _judge(
    catalog: Catalog, target: str, sides: Sequence[StackReceipts], again: Mapping[str, Receipt],
    probes: Collection[str], lost: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    """Grid and steps of stacks: modules in dependency order, then compositions.

    Args:
        again: a second run of one of the stacks, by probe.
        probes: what is judged.
        lost: files of receipts that cannot be read, each with why.
    """
    modules = [module for module in catalog.modules if module.id in probes]
    columns = [*(module.id for module in modules), *(row.id for row in catalog.compositions if row.id in probes)]
    needs = read_needs(catalog)
    by_probe = [{receipt.probe: receipt for receipt in side.receipts} for side in sides]
    twice = {receipt.stack for receipt in again.values()}
    first = next((known for side, known in zip(sides, by_probe, strict=True) if side.stack in twice), {})
    noise = measure_noise(first, again)
    steps = [
        compare_stacks(one, other, modules, compare_timings(before, after, noise), target=target, needs=needs)
        for (one, before), (other, after) in pairwise(zip(sides, by_probe, strict=True))
    ]
    receipts = [receipt for side in sides for receipt in side.receipts]
    return {"grid": build_support(receipts, columns, lost), "steps": tuple(steps)}


# --- arguments ------------------------------------------------------------------------------------------------------


def open_sources(tier: str, library: str = "transformer-engine") -> Sources:
    """The sources of releases of a library.

    Raises:
        NoEnvironment: this interpreter has no griffe, which reads sources; a GPU host need not have it.
    """
    try:
        from .static.sources import Sources
    except ImportError as fault:
        raise NoEnvironment(
            f"The {tier} tier cannot read sources here: {fault}. Likely cause: nox runs in the interpreter of a GPU "
            "host, which has no griffe. Next step: run that tier on a laptop, and --tiers gpu here."
        ) from fault
    return Sources(library=LIBRARIES[library])


def require_listed(names: Sequence[str], versions: Sequence[str]) -> None:
    """Refuse a release that the index does not list.

    Raises:
        UnknownRelease: with the nearest releases.
    """
    for name in names:
        if name not in versions:
            near = ", ".join(nearest(name, versions))
            raise UnknownRelease(f"There is no release {name} on the index. Nearest: {near}. Next step: choose one.")


def _read_one(what: str, values: Collection[str]) -> str:
    if len(set(values)) > 1:
        raise WrongArguments(
            f"The receipts are of more than one {what}: {', '.join(sorted(set(values)))}. Likely cause: two runs wrote "
            "to one folder. Next step: give the folder of one stack on one target on either side."
        )
    return next(iter(values), "")


# --- the gpu tier ---------------------------------------------------------------------------------------------------


def _run_on_device(
    catalog: Catalog, options: CanaryOptions, releases: Sequence[str], progress: Progress
) -> dict[str, Any]:
    """Run the cells of every stack; returns what the gpu tier adds to the result."""
    selected = [row.id for row in choose_canary_probes(catalog, options.probes)]
    named = [host_stacks.read_spec(text) for text in options.environments]
    processes = Processes()
    variables = share_cores(os.environ, plan_jobs(options.jobs))
    here = read_facts(own_interpreter(variables), processes)
    target = find_target(catalog, options.target) if options.target else choose_target(catalog, [here])
    is_gpu, reason = bool(target.arch), why_not_here(target, here)
    requests = _choose_stacks(options, releases, named, variables, progress, looks=not reason)
    stacks = [  # nothing is made where nothing can run
        host_stacks.Stack(name, problem=reason)
        if reason
        else host_stacks.prepare_stack(name, make, variables, processes)
        for name, make in requests.items()
    ]
    room = Room(plan_jobs(options.jobs, gpu=is_gpu))
    running = host_stacks.StackOptions(
        options.times and is_gpu, room, progress.cell, probes=options.probes, fresh=options.fresh, seed=options.seed,
        receipts=options.receipts.absolute(), limit_s=options.limit_s,
    )  # fmt: skip
    ran = host_stacks.run_stacks(catalog, target, stacks, running, processes)
    sides = [StackReceipts(one.run.stack, tuple(one.receipts.values())) for one in ran]
    again = next((one.again for one in ran if one.again), {})
    return {
        "target": target.id,
        "stacks": tuple(one.run for one in ran),
        "unmade": not reason and not any(stack.environment.python for stack in stacks),
        **_judge(catalog, target.id, sides, again, selected, {}),
    }


def _choose_stacks(
    options: CanaryOptions, releases: Sequence[str], named: Sequence[host_stacks.Spec], variables: Mapping[str, str],
    progress: Progress, *, looks: bool,
) -> dict[str, host_stacks.Make]:  # fmt: skip
    """The stacks in the order of the steps; what a person named comes before what the host has."""
    host = partial(host_interpreter, variables, options.python)
    made = {spec.name: partial(host_stacks.make_environment, spec, variables, host) for spec in named}
    ids = [release if release in made else f"te{release.removeprefix('te')}" for release in releases]
    found = host_stacks.find_environments(options.overlays, variables, options.python) if looks else ()
    for place in found if options.every_installed else ():
        if place.environment is None:  # it lies among the overlays: it was meant to be judged
            progress.note(f"left out: {place.place}: {place.reason}")
    _require_step(ids)
    return {
        name: made.get(name) or partial(host_stacks.resolve_environment, name.removeprefix("te"), found) for name in ids
    }
