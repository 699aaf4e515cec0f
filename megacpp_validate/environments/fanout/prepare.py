"""Cells that are planned, made ready to be run: their stacks made usable, their orders written.

Whatever is wrong with one stack costs no other anything: its cells are not run, for a reason in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from ...catalog.bridge import Catalog
from ...catalog.bridge import Target as TargetRow
from ...evidence.receipt import Outcome, Receipt
from ...probes.order import Order
from ...process import Processes
from ..chosen import Means, Spec, make_environment, resolve_environment
from ..container import ContainerEnvironment
from ..environment import Environment, NoEnvironment
from ..facts import Facts
from ..identity import hash_parts
from ..installed import find_environments, open_host
from ..interpreter import InterpreterEnvironment
from ..plan import (
    SWITCH,
    plan_blank,
    plan_compositions,
    plan_fp8,
    plan_parity,
    plan_smoke,
    receipt_without_probe,
    why_not_here,
)
from ..stacks import Stack, Wanted, prepare_stacks
from .choose import NATIVE, Planned
from .decide import find_ground
from .launcher import Work
from .pyxis import PyxisEnvironment, open_pyxis

_KINDS: Final[Mapping[str, Callable[[Catalog, Order, Sequence[str]], tuple[Order, ...]]]] = {
    "module": plan_parity, "composition": plan_compositions, "fp8": plan_fp8, "smoke": plan_smoke,
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """What stacks are made from.

    Attributes:
        specs: environments that a person described.
        overlays: roots of folders with releases.
        python: interpreter that they stand on; the host's where it is empty.
        variables: environment variables of the user.
        container_python: interpreter in an image that the scheduler makes a container of; empty where it makes none.
        here: whether cells run on this machine, so that what it lacks is known now.
    """

    specs: tuple[Spec, ...]
    overlays: tuple[Path, ...]
    python: str
    variables: Mapping[str, str]
    container_python: str = ""
    here: bool = True


@dataclass(frozen=True)
class Carried:
    """What receipts carry, and how long a cell may take at least."""

    seed: int
    tool: str
    commit: str
    limit_s: float


@dataclass(frozen=True)
class Prepared:
    """Cells as jobs, and those that cannot be any.

    Attributes:
        works: in the order of the plan.
        lost: a receipt of each cell that is not run here, with the reason.
        unmade: not one of the stacks could be made usable.
    """

    works: tuple[Work, ...]
    lost: tuple[Receipt, ...]
    unmade: bool


def prepare(
    catalog: Catalog, planned: Sequence[Planned], source: Source, carried: Carried, processes: Processes
) -> Prepared:
    """Make every stack usable, side by side, and write the orders of their cells.

    Raises:
        NoEnvironment: the interpreter that everything stands on cannot be started.
    """
    keys = tuple(dict.fromkeys((cell.stack, bool(cell.target.arch)) for cell in planned))
    stacks = dict(zip(keys, _prepare_stacks(catalog, keys, source, processes), strict=True))
    works: list[Work] = []
    lost: list[Receipt] = []
    groups = dict.fromkeys((cell.stack, cell.target.id) for cell in planned)
    for name, target_id in groups:
        cells = [cell for cell in planned if (cell.stack, cell.target.id) == (name, target_id)]
        target = cells[0].target
        stack = stacks[name, bool(target.arch)]
        problem = stack.problem or (why_not_here(target, stack.facts) if source.here and stack.facts else "")
        orders = _plan_orders(catalog, target, stack, cells, source, carried)
        if problem:
            lost += [receipt_without_probe(orders[cell.probe], Outcome.NOT_RUN, problem) for cell in cells]
            continue
        works += [_to_work(cell, orders[cell.probe], stack, carried) for cell in cells]
    by_cell = {work.order.cell: work.order for work in works}
    return Prepared(
        works=tuple(replace(work, ground=find_ground(work.order, by_cell)) for work in works),
        lost=tuple(lost),
        unmade=all(stack.environment is None for stack in stacks.values()),
    )


def _prepare_stacks(
    catalog: Catalog, keys: Sequence[tuple[str, bool]], source: Source, processes: Processes
) -> tuple[Stack, ...]:
    """The stacks; what the scheduler makes containers of is not looked into before it has."""
    specs = {spec.name: spec for spec in source.specs}
    looks = any(stack != NATIVE and stack not in specs for stack, _ in keys)
    found = find_environments(source.overlays, source.variables, source.python) if looks else ()
    releases = {row.id: row for row in catalog.stacks}
    ready: dict[tuple[str, bool], Stack] = {}
    wanted: dict[tuple[str, bool], Wanted] = {}
    for name, gpus in keys:
        variables = {**source.variables, SWITCH: "1"} if name == NATIVE and gpus else source.variables
        means = Means(variables, source.python, gpus=gpus)
        spec, row = specs.get(name), releases.get(name)
        image = spec.value if spec and spec.way == "image" else row.image if row and not spec else ""
        if image and source.container_python:
            ready[name, gpus] = _open_pyxis(name, image, row.te if row else "", source)
        elif spec is not None:
            wanted[name, gpus] = Wanted(name, partial(make_environment, spec, means))
        elif name == NATIVE or row is None:
            wanted[name, gpus] = Wanted(name, partial(open_host, variables, source.python))
        else:
            make = partial(resolve_environment, row.te, found, catalog.stacks, means)
            wanted[name, gpus] = Wanted(name, make, row.te)
    made = prepare_stacks(tuple(wanted.values()), processes)
    ready |= dict(zip(wanted, made, strict=True))
    return tuple(ready[key] for key in keys)


def _open_pyxis(name: str, image: str, release: str, source: Source) -> Stack:
    try:
        environment = open_pyxis(image, source.container_python, source.variables)
    except NoEnvironment as fault:
        return Stack(name, problem=str(fault))
    facts = Facts(
        python="", executable=environment.shown, machine="", torch="", te=release, te_folder="in the image", gpu=None,
        why_no_gpu="the node has it",
    )  # fmt: skip
    return Stack(name, environment, facts)


def _plan_orders(
    catalog: Catalog, target: TargetRow, stack: Stack, cells: Sequence[Planned], source: Source, carried: Carried
) -> dict[str, Order]:
    """The orders of one stack on one target, by probe."""
    facts = stack.facts or Facts(
        python="", executable="", machine="", torch="", te="", te_folder="", gpu=None, why_no_gpu=""
    )
    variables = {**source.variables, SWITCH: "1"} if stack.name == NATIVE and target.arch else source.variables
    blank = plan_blank(target, facts, variables, seed=carried.seed, tool=carried.tool, commit=carried.commit)
    found: dict[str, Order] = {}
    for kind, plan in _KINDS.items():
        if names := [cell.probe for cell in cells if cell.kind == kind]:
            found |= {order.probe: order for order in plan(catalog, blank, names)}
    environment = stack.environment
    smoke = {cell.probe for cell in cells if cell.kind == "smoke"}  # a job has one machine, and starts its ranks there
    image = environment.image_digest if isinstance(environment, ContainerEnvironment | PyxisEnvironment) else ""
    lock_hash = environment.lock_hash if isinstance(environment, InterpreterEnvironment) else ""
    return {
        probe: replace(
            order,
            stack=stack.name,
            lock_hash=lock_hash or order.lock_hash,
            image_digest=image or order.image_digest,
            environment=_identify(environment, order),
            settings={**order.settings, "launcher": "local"} if probe in smoke else order.settings,
        )
        for probe, order in found.items()
    }


def _identify(environment: Environment | None, order: Order) -> str:
    """What a receipt is an answer on: an environment, and the row of the matrix that it is judged by."""
    return "" if environment is None else hash_parts((environment.identity, repr(order.target)))


def _to_work(cell: Planned, order: Order, stack: Stack, carried: Carried) -> Work:
    if stack.environment is None:  # never: a stack without one has a problem
        raise NoEnvironment(stack.problem)
    return Work(
        order=order,
        environment=stack.environment,
        limit_s=cell.limit_s(carried.limit_s),
        gpus=cell.gpus,
        seconds=float(cell.row.seconds),
    )
