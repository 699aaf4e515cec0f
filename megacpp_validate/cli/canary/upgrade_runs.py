"""Two releases or more over the tiers that are asked for: one result, and the exit code of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, NoReturn

import typer

from ...canary.dynamic.upgrade_result import StepResult, UpgradeResult
from ...canary.firewall.result import FirewallResult
from ...canary.static.findings import StaticResult
from ...catalog.bridge import Catalog
from ...catalog.needs import read_needs
from ...environments.environment import NoEnvironment
from ...environments.plan import UnknownTarget, choose_canary_probes
from ...environments.restart import FolderTaken
from ...environments.session_result import SupportGrid
from ...errors import WrongArguments
from ..app import TOOL, Exit, foreseen, refuse
from .canary_telling import Telling
from .upgrade_compare import grid_of, judge_stacks, receipts_of
from .upgrade_stacks import DynamicAsked, DynamicRun, find_installed, find_twice, run_dynamic

TIERS: Final = ("static", "firewall", "gpu")
_FIREWALL_JOBS: Final = 2
_FIREWALL_LIMIT_S: Final = 120.0


@dataclass(frozen=True)
class Dynamic:
    """What the dynamic tier gave."""

    ran: DynamicRun
    grid: SupportGrid
    steps: tuple[StepResult, ...]


def read_tiers(text: str) -> tuple[str, ...]:
    """The tiers that are named, in their order."""
    names = text.replace(",", " ").split()
    if unknown := [name for name in names if name not in TIERS]:
        refuse(
            f"there is no tier {', '.join(map(repr, unknown))}. Next step: choose from {','.join(TIERS)}.",
            Exit.WRONG_ARGUMENTS,
        )
    if not names:
        refuse(f"no tier is selected. Next step: choose from {','.join(TIERS)}.", Exit.NOTHING_SELECTED)
    return tuple(tier for tier in TIERS if tier in names)


@foreseen({
    UnknownTarget: Exit.WRONG_ARGUMENTS,
    WrongArguments: Exit.WRONG_ARGUMENTS,
    NoEnvironment: Exit.NO_ENVIRONMENT,
    FolderTaken: Exit.INFRASTRUCTURE,
})  # fmt: skip
def run_upgrade(catalog: Catalog, tiers: Sequence[str], asked: DynamicAsked, telling: Telling) -> None:
    """Run the tiers and tell one result; closed where any of them finds somebody to blame.

    What is wrong in the arguments is told before anything runs, and the tier that needs nothing comes first.
    """
    releases = _find_releases(asked)
    seconds: dict[str, float] = {}
    static: tuple[StaticResult, ...] = ()
    firewall: FirewallResult | None = None
    dynamic: Dynamic | None = None
    if "static" in tiers:
        with _timed(seconds, "static"):
            static = _run_static(catalog, releases, verbose=telling.verbose)
        if not (asked.releases[1:] or asked.environments or asked.every_installed):
            asked = replace(asked, releases=(static[0].old.version, static[0].new.version))
    if "firewall" in tiers:
        with _timed(seconds, "firewall"):
            firewall = _run_firewall(catalog)
    if "gpu" in tiers:
        with _timed(seconds, "gpu"):
            dynamic = _run_gpu(catalog, asked)
    result = UpgradeResult(
        tool=TOOL,
        target=dynamic.ran.target.id if dynamic else "",
        tiers=tuple(tiers),
        static=static,
        firewall=firewall,
        grid=dynamic.grid if dynamic else None,
        stacks=tuple(stack.run for stack in dynamic.ran.stacks) if dynamic else (),
        steps=dynamic.steps if dynamic else (),
        seconds=seconds,
    )
    telling(result)
    raise typer.Exit(_exit_code(result, unmade=dynamic is not None and dynamic.ran.unmade))


def _exit_code(result: UpgradeResult, *, unmade: bool) -> Exit:
    """A breakage before evidence that is missing, and that before an environment that could not be made."""
    if result.breaks:
        return Exit.CLOSED
    firewall = result.firewall is not None and not result.firewall.holds
    if unmade and not firewall:
        return Exit.NO_ENVIRONMENT
    return Exit.EVIDENCE_MISSING if result.lacks or firewall else Exit.OPEN


def _find_releases(asked: DynamicAsked) -> tuple[str, ...]:
    """The releases to judge, as they are named; a step takes two that differ."""
    named = tuple(text.partition("=")[0] for text in asked.environments)
    releases = asked.releases or named
    if asked.every_installed:
        found = find_installed(asked)
        releases = (*found, *(name for name in named if not find_twice((*found, name))))
        if len(releases) < 2:  # fewer would be judged against the index
            refuse(
                f"this host has {releases[0] if releases else 'no release'}{' alone' if releases else ''}: there is no "
                "step to judge. Next step: name two releases, or put more of them where --overlays finds them.",
                Exit.NOTHING_SELECTED,
            )
    if twice := find_twice(releases):
        refuse(
            f"{twice} is asked for twice: there is no step to judge. Next step: give each release once.",
            Exit.WRONG_ARGUMENTS,
        )
    return releases


def _run_static(catalog: Catalog, releases: Sequence[str], *, verbose: bool) -> tuple[StaticResult, ...]:
    try:
        from .canary_runs import compare_sources
    except ImportError as fault:  # a GPU host need not have what reads sources
        _refuse_sources("static", fault)
    return compare_sources(catalog, [release.removeprefix("te") for release in releases], verbose=verbose)


def _run_firewall(catalog: Catalog) -> FirewallResult:
    try:
        from .canary_runs import damage_installs
    except ImportError as fault:
        _refuse_sources("firewall", fault)
    return damage_installs(catalog, (), "wheels", jobs=_FIREWALL_JOBS, limit_s=_FIREWALL_LIMIT_S)


def _run_gpu(catalog: Catalog, asked: DynamicAsked) -> Dynamic:
    ran = run_dynamic(catalog, asked)
    selected = choose_canary_probes(catalog, asked.probes)
    modules = [module for module in catalog.modules if module.id in selected]
    columns = [*(module.id for module in modules), *(row.id for row in catalog.compositions if row.id in selected)]
    stacks = [receipts_of(stack) for stack in ran.stacks]
    again = next((stack.again for stack in ran.stacks if stack.again), {})
    needs = read_needs([module.id for module in catalog.modules], asked.matrix)
    return Dynamic(ran, grid_of(stacks, columns, {}), judge_stacks(stacks, again, modules, ran.target.id, needs))


@contextmanager
def _timed(seconds: dict[str, float], tier: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[tier] = round(time.monotonic() - started, 2)


def _refuse_sources(tier: str, fault: ImportError) -> NoReturn:
    refuse(
        f"the {tier} tier cannot read sources here: {fault}. Likely cause: nox runs in the interpreter of a GPU host, "
        "which has no griffe. Next step: run that tier on a laptop, and --tiers gpu here.",
        Exit.NO_ENVIRONMENT,
    )
