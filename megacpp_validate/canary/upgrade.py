"""Which bridge module does an upgrade break: what is asked, and one result over the tiers.

A pair of releases is compared by its sources (static tier), damaged installs are tried (firewall tier), and every
module runs in every release on the device that is here (gpu tier).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..catalog.bridge import BridgeModule, Catalog
from ..catalog.needs import Needs, read_needs
from ..environments.chosen import Means, Spec, is_same_release, make_environment, read_spec, resolve_environment
from ..environments.facts import read_facts
from ..environments.fleet import Event
from ..environments.installed import find_environments
from ..environments.interpreter import own_interpreter, read_commit
from ..environments.plan import choose_canary_probes, choose_target, find_target, why_not_here
from ..environments.schedule import count_cores, plan_jobs, read_room, share_cores
from ..environments.session_result import SupportGrid, build_support
from ..environments.stacks import (
    AGAIN,
    RunOptions,
    Stack,
    StackOptions,
    StackRequest,
    StackRun,
    prepare_stacks,
    run_stacks,
)
from ..errors import NoEnvironment, NothingSelected, WrongArguments, writing_to
from ..evidence.receipt import Receipt
from ..evidence.store import ReceiptInvalid, read_receipts
from ..process import Processes
from .dynamic.slowdown import CardNoise, compare_timings, measure_noise
from .dynamic.step import StackReceipts, compare_all
from .dynamic.upgrade_result import StepResult, TimingChange, UpgradeResult

if TYPE_CHECKING:
    from .firewall.result import FirewallCase, FirewallResult
    from .static.findings import StaticResult, Sweep

TIERS: Final = ("static", "firewall", "gpu")
_FIREWALL_JOBS: Final = 2


class Mode(StrEnum):
    """What kind of answer is asked for."""

    LIST = "list"  # releases on the index
    SWEEP = "sweep"  # every adjacent pair, by sources
    PAIR = "pair"  # one pair, by sources
    UPGRADE = "upgrade"  # a step between each release and the next, over tiers


@dataclass(frozen=True)
class CanaryOptions:
    """What a person asks of the canary.

    Attributes:
        releases: of Transformer Engine, in the order of the steps.
        every_pair, listing: the static tier alone, over all releases.
        first_bad_in: id of the module whose first bad release is searched for.
        tiers: names with commas; None for what suits the rest.
        every_installed: all releases that the host has, oldest first.
        environments: "NAME=WAY:VALUE", each a stack of that name.
        target: empty for that of the GPU that is here.
        jobs, gpu_memory_mib: 0 for what suits this machine.
        limit_s: seconds that one cell may take.
        times: whether modules are timed; only a GPU is.
        matrix: folder of the matrix files; the project's own where it is None.
        verbose: list API changes that the bridge does not use, too.
    """

    releases: tuple[str, ...] = ()
    every_pair: bool = False
    first_bad_in: str = ""
    listing: bool = False
    tiers: str | None = None
    every_installed: bool = False
    environments: tuple[str, ...] = ()
    overlays: tuple[Path, ...] = ()
    python: str = ""
    target: str = ""
    probes: tuple[str, ...] = ()
    receipts: Path = Path(".megacpp/canary")
    jobs: int = 0
    gpu_memory_mib: float = 0.0
    limit_s: float = 600.0
    fresh: bool = False
    times: bool = True
    seed: int = 0
    matrix: Path | None = None
    verbose: bool = False


@dataclass(frozen=True)
class CanaryPlan:
    """What is done for it.

    Attributes:
        tiers: of `TIERS`, in that order.
        releases: of every step; fewer than two are completed by the pin and the index.
    """

    mode: Mode
    tiers: tuple[str, ...] = ("static",)
    releases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Progress:
    """Who is called as a run goes on, all of them from one thread at a time."""

    pair: Callable[[str, int, int], None] = lambda *_: None
    case: Callable[[FirewallCase], None] = lambda _: None
    cell: Callable[[Event], None] = lambda _: None
    note: Callable[[str], None] = lambda _: None


def plan_canary(options: CanaryOptions, catalog: Catalog) -> CanaryPlan:
    """What the options ask for; nothing has run when they contradict each other.

    Raises:
        WrongArguments: they do.
        NothingSelected: no tier, or no two releases.
    """
    stacks = options.every_installed or bool(options.environments)
    alone = options.every_pair or options.listing or bool(options.first_bad_in)
    if alone and (options.tiers or stacks):
        raise WrongArguments(
            "--all, --first-bad and --list belong to the static tier alone. Next step: leave out either those or "
            "--tiers, --all-installed and --environment."
        )
    modules = [row.id for row in catalog.modules]
    if options.first_bad_in and options.first_bad_in not in modules:
        raise WrongArguments(
            f"There is no bridge module {options.first_bad_in!r}. Next step: choose one of {', '.join(modules)}."
        )
    if alone and len(options.releases) > 2:
        raise WrongArguments(
            f"{' '.join(options.releases)} are more than two releases. Next step: give the first and the last."
        )
    if alone:
        return CanaryPlan(Mode.LIST if options.listing else Mode.SWEEP, releases=options.releases)
    if not (options.tiers or stacks or options.releases[2:]):
        return CanaryPlan(Mode.PAIR, releases=options.releases)
    tiers = _read_tiers(options.tiers or ("gpu" if stacks else "static"))
    return CanaryPlan(Mode.UPGRADE, tiers, _choose_releases(options))


def list_releases() -> tuple[str, ...]:
    """The releases on the index, oldest first."""
    with _needs_sources("static"):
        from .static.sources import Sources
    return tuple(Sources().versions())


def compare_pairs(
    catalog: Catalog, releases: Sequence[str], *, tool: str, verbose: bool = False
) -> tuple[StaticResult, ...]:
    """The static tier for each release and the next; fewer than two are completed by the pin and the index.

    Raises:
        WrongArguments: a release that there is not, or one that is compared with itself.
        NothingSelected: there is no newer release than the pin.
        NoEnvironment: the sources of a release cannot be had.
    """
    with _needs_sources("static"):
        from .static.sources import Sources
        from .static.sweep import read_bridge, read_pair, run_pair
    sources = Sources()
    if len(releases) < 2:
        releases = (releases[0] if releases else catalog.pinned.te, sources.versions()[-1])
        if is_same_release(*releases):
            raise NothingSelected(
                f"{releases[0]} is the newest release on the index: there is no upgrade to judge. Next step: give two "
                "releases, or --all."
            )
    for old, new in pairwise(releases):
        if old == new or is_same_release(old, new):
            raise WrongArguments(
                f"OLD and NEW are both {old}: there is nothing to compare. Next step: give two releases."
            )
    source = read_bridge(catalog)
    return tuple(
        run_pair(*read_pair(sources, old, new), source, tool=tool, verbose=verbose) for old, new in pairwise(releases)
    )


def compare_every_pair(catalog: Catalog, ends: Sequence[str], progress: Progress, *, tool: str) -> Sweep:
    """The static tier for every adjacent pair of releases on the index, between two ends where they are given.

    Raises:
        WrongArguments: an end is no release on the index.
        NothingSelected: no two releases can be read.
    """
    with _needs_sources("static"):
        from .static.sources import Sources, UnknownRelease, nearest
        from .static.sweep import OLDEST, run_sweep
    sources = Sources()
    versions = sources.versions()
    readable = versions[versions.index(OLDEST) :] if OLDEST in versions else versions  # a mirror may start later
    first, last = (*ends, *(readable[0], readable[-1])[len(ends) :])
    for name in (first, last):
        if name not in versions:
            raise UnknownRelease(
                f"There is no Transformer Engine {name} on the index. Nearest: {', '.join(nearest(name, versions))}. "
                "Next step: choose one of them; `--list` shows all."
            )
    one, other = sorted((versions.index(first), versions.index(last)))
    sweep = run_sweep(versions[one : other + 1], sources, catalog, tool=tool, progress=progress.pair)
    if not sweep.steps:
        raise NothingSelected("No two releases could be read: there is nothing to compare. Next step: see --list.")
    return sweep


def run_firewall_tier(
    catalog: Catalog, progress: Progress, *, tool: str, jobs: int = _FIREWALL_JOBS, **options: Any
) -> FirewallResult:
    """The firewall tier on releases of the index; `options` are those of `run_firewall`."""
    with _needs_sources("firewall"):
        from .firewall.run import run_firewall
        from .static.sources import Sources
    sources = Sources()
    return run_firewall(
        catalog.modules,
        lambda distribution, version: sources.wheel(version, distribution),
        tool=tool,
        jobs=jobs,
        progress=progress.case,
        **options,
    )


def run_upgrade(
    catalog: Catalog, plan: CanaryPlan, options: CanaryOptions, progress: Progress, *, tool: str
) -> UpgradeResult:
    """Run the tiers of a plan; the one that needs nothing comes first.

    Raises:
        ToolError: an argument is wrong, or a tier cannot be run at all.
    """
    started = time.monotonic()
    seconds: dict[str, float] = {}
    parts: dict[str, Any] = {}
    releases = plan.releases
    for tier in plan.tiers:
        if tier == "static":
            named = [release.removeprefix("te") for release in releases]
            parts["static"] = compare_pairs(catalog, named, tool=tool, verbose=options.verbose)
            if len(releases) < 2:  # as the pin and the index completed them
                releases = (parts["static"][0].old.version, parts["static"][0].new.version)
        elif tier == "firewall":
            parts["firewall"] = run_firewall_tier(catalog, progress, tool=tool)
        else:
            parts |= _run_on_device(catalog, options, releases, progress, tool=tool)
        seconds[tier] = round(time.monotonic() - started - sum(seconds.values()), 2)
    return UpgradeResult(tool=tool, tiers=plan.tiers, seconds=seconds, **{"target": "", **parts})


def compare_receipts(catalog: Catalog, folders: Sequence[Path], matrix: Path | None, *, tool: str) -> UpgradeResult:
    """Judge the step from each folder of receipts to the next; runs nothing.

    Raises:
        WrongArguments: a folder is given twice in a row, or holds receipts of several stacks or targets.
        NothingSelected: a folder holds no receipt.
    """
    started = time.monotonic()
    for before, after in pairwise(folder.resolve() for folder in folders):
        if before == after:
            raise WrongArguments(
                f"{after} is given twice in a row: there is no step to judge. Next step: give two folders of receipts."
            )
    try:
        found = [read_receipts(folder) for folder in folders]
    except ReceiptInvalid as fault:
        raise WrongArguments(str(fault)) from fault
    for folder, receipts in zip(folders, found, strict=True):
        if not receipts.found and not receipts.unreadable:
            raise NothingSelected(
                f"There is no receipt in {folder}. Likely cause: a typing error, or its run never began. Next step: "
                "give the folder of one stack, as `te_canary` names it in its last lines."
            )
    target = _read_one("target", (receipt.target for side in found for receipt in side.found.values()))
    sides = []
    for folder, side in zip(folders, found, strict=True):
        stack = _read_one(f"stack in {folder}", (receipt.stack for receipt in side.found.values())) or folder.name
        unreadable = {fault.file.stem: fault.reason for fault in side.unreadable}
        sides.append(StackReceipts(stack, tuple(side.found.values()), unreadable))
    again = next(filter(None, (_by_probe(_read_again(folder)) for folder in folders)), {})
    probes = {receipt.probe for side in sides for receipt in side.receipts}
    lost = {str(fault.file): fault.reason for side in found for fault in side.unreadable}
    modules = [module for module in catalog.modules if lost or module.id in probes]
    columns = [*(row.id for row in modules), *(row.id for row in catalog.compositions if row.id in probes)]
    needs = read_needs([module.id for module in catalog.modules], matrix)
    runs = (
        StackRun(
            stack=side.stack, environment="", folder=str(folder), reused=tuple(one.cell for one in side.receipts)
        )
        for folder, side in zip(folders, sides, strict=True)
    )  # fmt: skip
    return UpgradeResult(
        tool=tool,
        target=target,
        tiers=("gpu",),
        grid=_build_grid(sides, columns, lost),
        stacks=tuple(runs),
        steps=_judge_steps(sides, again, modules, target, needs),
        seconds={"gpu": round(time.monotonic() - started, 2)},
    )


# --- arguments ------------------------------------------------------------------------------------------------------


def _read_tiers(text: str) -> tuple[str, ...]:
    names = text.replace(",", " ").split()
    if unknown := [name for name in names if name not in TIERS]:
        raise WrongArguments(
            f"There is no tier {', '.join(map(repr, unknown))}. Next step: choose from {','.join(TIERS)}."
        )
    if not names:
        raise NothingSelected(f"No tier is selected. Next step: choose from {','.join(TIERS)}.")
    return tuple(tier for tier in TIERS if tier in names)


def _choose_releases(options: CanaryOptions) -> tuple[str, ...]:
    """The releases to judge, as they are named; a step takes two that differ."""
    named = tuple(text.partition("=")[0] for text in options.environments)
    releases = options.releases or named
    if options.every_installed:
        places = find_environments(options.overlays, os.environ, options.python)
        found = tuple(place.release for place in places if place.environment is not None)
        releases = (*found, *(name for name in named if not _find_twice((*found, name))))
        if len(releases) < 2:  # fewer would be judged against the index
            has = f"{releases[0]} alone" if releases else "no release"
            raise NothingSelected(
                f"This host has {has}: there is no step to judge. Next step: name two releases, or put more of them "
                "where --overlays finds them."
            )
    if twice := _find_twice(releases):
        raise WrongArguments(f"{twice} is given twice: there is no step to judge. Next step: give each release once.")
    return releases


def _find_twice(names: Sequence[str]) -> str:
    """The first that names what an earlier one names, spelled alike or not (2.9 and te2.9.0); empty where none does."""
    for index, name in enumerate(names):
        for earlier in names[:index]:
            if name == earlier or is_same_release(name.removeprefix("te"), earlier.removeprefix("te")):
                return name
    return ""


@contextmanager
def _needs_sources(tier: str) -> Iterator[None]:
    """A GPU host need not have griffe, which reads sources."""
    try:
        yield
    except ImportError as fault:
        raise NoEnvironment(
            f"The {tier} tier cannot read sources here: {fault}. Likely cause: nox runs in the interpreter of a GPU "
            "host, which has no griffe. Next step: run that tier on a laptop, and --tiers gpu here."
        ) from fault


def _read_one(what: str, values: Iterable[str]) -> str:
    found = sorted(set(values))
    if len(found) > 1:
        raise WrongArguments(
            f"The receipts are of more than one {what}: {', '.join(found)}. Likely cause: two runs wrote to one "
            "folder. Next step: give the folder of one stack on one target on either side."
        )
    return found[0] if found else ""


# --- the gpu tier ---------------------------------------------------------------------------------------------------


def _run_on_device(
    catalog: Catalog, options: CanaryOptions, releases: Sequence[str], progress: Progress, *, tool: str
) -> dict[str, Any]:
    """Run the cells of every stack; returns what the gpu tier adds to the result."""
    selected = choose_canary_probes(catalog, options.probes)  # a typing error is reported before anything is made
    named = [read_spec(text) for text in options.environments]
    processes = Processes()
    variables = share_cores(os.environ, plan_jobs(count_cores(), options.jobs))
    here = read_facts(own_interpreter(variables), processes)
    target = find_target(catalog, options.target) if options.target else choose_target(catalog, [here])
    is_gpu, reason = bool(target.arch), why_not_here(target, here)
    means = Means(variables, options.python, gpus=is_gpu)
    wanted = _choose_stacks(catalog, options, releases, named, means, progress, looks=not reason)
    if reason:  # nothing is made where nothing can run
        stacks = tuple(Stack(stack.name, problem=reason) for stack in wanted)
    else:
        stacks = prepare_stacks(wanted, processes)
    asked = StackOptions(
        probes=options.probes,
        seed=options.seed,
        times=options.times and is_gpu,
        tool=tool,
        commit=read_commit(),
        variables=variables,
    )
    room = read_room(variables, gpu=is_gpu, jobs=options.jobs, memory_mib=options.gpu_memory_mib)
    running = RunOptions(options.receipts.absolute(), room, options.limit_s, options.fresh, progress.cell)
    with writing_to(options.receipts, "receipts", "--receipts"):
        ran = run_stacks(catalog, target, stacks, asked, running, processes)
    modules = [module for module in catalog.modules if module.id in selected]
    columns = [*(module.id for module in modules), *(row.id for row in catalog.compositions if row.id in selected)]
    sides = [StackReceipts(one.run.stack, tuple(one.receipts.values())) for one in ran]
    again = next((one.again for one in ran if one.again), {})
    needs = read_needs([module.id for module in catalog.modules], options.matrix)
    return {
        "target": target.id,
        "grid": _build_grid(sides, columns, {}),
        "stacks": tuple(one.run for one in ran),
        "steps": _judge_steps(sides, again, modules, target.id, needs),
        "unmade": not reason and all(stack.environment is None for stack in stacks),
    }


def _choose_stacks(
    catalog: Catalog,
    options: CanaryOptions,
    releases: Sequence[str],
    named: Sequence[Spec],
    means: Means,
    progress: Progress,
    *,
    looks: bool,
) -> tuple[StackRequest, ...]:
    """The stacks in the order of the steps; what a person named comes before what the host has."""
    by_name = {spec.name: StackRequest(spec.name, partial(make_environment, spec, means)) for spec in named}
    if len(by_name) < len(named):
        raise WrongArguments("Two environments have one name. Next step: give each a name of its own.")
    known = [next((name for name in (one, _stack_id(one)) if name in by_name), "") for one in releases]
    found = find_environments(options.overlays, means.variables, options.python) if looks and not all(known) else ()
    if options.every_installed:
        for place in found:
            if place.environment is None:  # it lies among the overlays: it was meant to be judged
                progress.note(f"left out: {place.place}: {place.reason}")
    wanted = tuple(
        by_name.get(name)
        or StackRequest(
            _stack_id(release),
            partial(resolve_environment, release, found, catalog.stacks, means),
            release.removeprefix("te"),
        )
        for name, release in zip(known, releases, strict=True)
    )
    names = [stack.name for stack in wanted]
    if len(wanted) < 2:
        raise NothingSelected(
            f"The request selects {names[0] + ' alone' if names else 'no stack'}: there is no step to judge. Next "
            "step: name two releases, or give --environment NAME=WAY:VALUE twice."
        )
    if _find_twice(names):
        raise WrongArguments(f"One stack is given twice: {', '.join(names)}. Next step: give each once.")
    return wanted


def _stack_id(release: str) -> str:
    return release if release.startswith("te") else f"te{release}"


# --- receipts, judged step by step ----------------------------------------------------------------------------------


def _judge_steps(
    sides: Sequence[StackReceipts],
    again: Mapping[str, Receipt],
    modules: Sequence[BridgeModule],
    target: str,
    needs: Needs,
) -> tuple[StepResult, ...]:
    """The step between each stack and the next; `again` is a second run of one of them, by probe."""
    twice = {receipt.stack for receipt in again.values()}
    first = next((side for side in sides if side.stack in twice), None)
    noise = measure_noise(_by_probe(first.receipts) if first else {}, again)
    return compare_all(sides, modules, partial(_compare_times, noise), target=target, needs=needs)


def _compare_times(noise: CardNoise, one: StackReceipts, other: StackReceipts) -> Sequence[TimingChange]:
    return compare_timings(_by_probe(one.receipts), _by_probe(other.receipts), noise)


def _build_grid(sides: Sequence[StackReceipts], probes: Sequence[str], lost: dict[str, str]) -> SupportGrid:
    """Stacks x probes: modules in dependency order, then compositions."""
    return build_support([receipt for side in sides for receipt in side.receipts], probes, lost)


def _by_probe(receipts: Iterable[Receipt]) -> dict[str, Receipt]:
    return {receipt.probe: receipt for receipt in receipts}


def _read_again(folder: Path) -> Iterable[Receipt]:
    place = folder / AGAIN
    return read_receipts(place).found.values() if place.is_dir() else ()
