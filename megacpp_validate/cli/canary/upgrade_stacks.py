"""The dynamic tier: which stacks are asked for, and their cells on the device that is here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...catalog.bridge import Catalog
from ...catalog.bridge import Target as TargetRow
from ...environments.chosen import Means, Spec, is_same_release, make_environment, read_spec, resolve_environment
from ...environments.environment import Environment
from ...environments.facts import read_facts
from ...environments.installed import Found, find_environments
from ...environments.interpreter import own_interpreter, read_commit
from ...environments.plan import choose_canary_probes, choose_target, find_target, why_not_here
from ...environments.schedule import count_cores, plan_jobs, read_room, share_cores
from ...environments.stacks import RanStack, RunOptions, Stack, StackOptions, StackRequest, prepare_stacks, run_stacks
from ...process import Processes
from ..app import TOOL, Exit, errors, refuse, refuse_receipts
from .upgrade_progress import UpgradeProgress


@dataclass(frozen=True)
class DynamicAsked:
    """The arguments of the dynamic tier.

    Attributes:
        releases: of Transformer Engine, in the order of the steps.
        every_installed: all that the host has instead, oldest first.
        environments: "NAME=WAY:VALUE", each a stack of that name.
        target: empty for that of the GPU that is here.
        jobs, gpu_memory_mib: 0 for what suits this machine.
        limit_s: seconds that one cell may take.
        times: whether modules are timed; only a GPU is.
        matrix: folder of the matrix files; the project's own where it is None.
    """

    releases: tuple[str, ...]
    every_installed: bool
    environments: tuple[str, ...]
    overlays: tuple[Path, ...]
    python: str
    target: str
    probes: tuple[str, ...]
    receipts: Path
    jobs: int
    gpu_memory_mib: float
    limit_s: float
    fresh: bool
    times: bool
    seed: int
    matrix: Path | None = None


@dataclass(frozen=True)
class DynamicRun:
    """What the dynamic tier ran; `unmade` where not one of the environments could be made."""

    target: TargetRow
    stacks: tuple[RanStack, ...]
    unmade: bool


def run_dynamic(catalog: Catalog, asked: DynamicAsked) -> DynamicRun:
    """Run the cells of every stack that is asked for.

    Raises:
        UnknownTarget, SpecInvalid: wrong arguments.
        NoEnvironment: the interpreter that everything stands on cannot be started.
        FolderTaken: another run writes its receipts there.
    """
    choose_canary_probes(catalog, asked.probes)  # a typing error is told before anything is made
    named = [read_spec(text) for text in asked.environments]
    processes = Processes()
    variables = share_cores(os.environ, plan_jobs(count_cores(), asked.jobs))
    here = read_facts(own_interpreter(variables), processes)
    target = find_target(catalog, asked.target) if asked.target else choose_target(catalog, [here])
    reason = why_not_here(target, here)
    wanted = _choose_stacks(catalog, asked, named, variables, gpus=bool(target.arch), made=not reason)
    if reason:  # nothing is made where nothing can run
        stacks = tuple(Stack(stack.name, problem=reason) for stack in wanted)
    else:
        stacks = prepare_stacks(wanted, processes)
    for_all = StackOptions(
        probes=asked.probes,
        seed=asked.seed,
        times=asked.times and bool(target.arch),
        tool=TOOL,
        commit=read_commit(),
        variables=variables,
    )
    room = read_room(variables, gpu=bool(target.arch), jobs=asked.jobs, memory_mib=asked.gpu_memory_mib)
    rows = [stack.name for stack in stacks if not stack.problem]
    with UpgradeProgress(choose_canary_probes(catalog, asked.probes), rows) as progress:
        running = RunOptions(asked.receipts.absolute(), room, asked.limit_s, asked.fresh, progress)
        try:
            found = run_stacks(catalog, target, stacks, for_all, running, processes)
        except OSError as fault:
            refuse_receipts(asked.receipts, fault)
    return DynamicRun(target, found, not reason and all(stack.environment is None for stack in stacks))


def find_installed(asked: DynamicAsked) -> tuple[str, ...]:
    """Releases that this host has, oldest first."""
    found = find_environments(asked.overlays, os.environ, asked.python)
    return tuple(place.release for place in found if place.environment is not None)


def _choose_stacks(
    catalog: Catalog,
    asked: DynamicAsked,
    named: Sequence[Spec],
    variables: Mapping[str, str],
    *,
    gpus: bool,
    made: bool,
) -> tuple[StackRequest, ...]:
    """The stacks in the order of the steps; what a person named comes before what the host has."""
    means = Means(variables, asked.python, gpus=gpus)
    by_name = {spec.name: StackRequest(spec.name, partial(make_environment, spec, means)) for spec in named}
    if len(by_name) < len(named):
        refuse("two environments have one name. Next step: give each a name of its own.", Exit.WRONG_ARGUMENTS)
    if not asked.every_installed and not asked.releases:
        return _at_least_two(tuple(by_name.values()), asked)
    looks = asked.every_installed or any(_name_in(by_name, release) is None for release in asked.releases)
    found = find_environments(asked.overlays, variables, asked.python) if looks and (made or not asked.releases) else ()
    if asked.every_installed:
        _tell_unusable(found)
        installed = [_wanted_found(place.release, place.environment) for place in found if place.environment]
        others = [stack for name, stack in by_name.items() if name not in {stack.name for stack in installed}]
        return _at_least_two((*(by_name.get(stack.name, stack) for stack in installed), *others), asked)
    return _at_least_two(
        tuple(
            by_name[name]
            if (name := _name_in(by_name, release)) is not None
            else StackRequest(
                _stack_id(release),
                partial(resolve_environment, release, found, catalog.stacks, means),
                release.removeprefix("te"),
            )
            for release in asked.releases
        ),
        asked,
    )


def _at_least_two(wanted: tuple[StackRequest, ...], asked: DynamicAsked) -> tuple[StackRequest, ...]:
    names = [stack.name for stack in wanted]
    if find_twice(names):
        refuse(f"one stack is asked for twice: {', '.join(names)}. Next step: give each once.", Exit.WRONG_ARGUMENTS)
    if len(wanted) < 2:
        has = f"{names[0]} alone" if names else "no stack"
        where = "this host has" if asked.every_installed else "what is asked for is"
        refuse(
            f"{where} {has}: there is no step to judge. Next step: name two releases, put more of them where "
            "--overlays finds them, or give --environment NAME=WAY:VALUE twice.",
            Exit.NOTHING_SELECTED,
        )
    return wanted


def find_twice(names: Sequence[str]) -> str:
    """The first that names what an earlier one names, spelled alike or not (2.9 and te2.9.0); empty where none does."""
    for index, name in enumerate(names):
        for earlier in names[:index]:
            if name == earlier or is_same_release(name.removeprefix("te"), earlier.removeprefix("te")):
                return name
    return ""


def _wanted_found(release: str, environment: Environment) -> StackRequest:
    return StackRequest(_stack_id(release), lambda: environment, release)


def _name_in(by_name: Mapping[str, StackRequest], release: str) -> str | None:
    return next((name for name in (release, _stack_id(release)) if name in by_name), None)


def _stack_id(release: str) -> str:
    return release if release.startswith("te") else f"te{release}"


def _tell_unusable(found: Sequence[Found]) -> None:
    """What lies in a folder of overlays and is left out is said: it was meant to be judged."""
    for place in found:
        if place.environment is None:
            errors.print(f"left out: {place.place}: {place.reason}", markup=False)
