"""Many stacks on one target: each made usable, asked what it has, and its cells run beside those of the others.

Whatever is wrong with one of them costs no other anything: it has a problem in words, and its cells are not run.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ..catalog.bridge import BridgeModule, Catalog, ProbeCell
from ..catalog.bridge import Target as TargetRow
from ..evidence.receipt import Outcome, Receipt
from ..evidence.values import Frozen
from ..probes.order import Order
from ..process import Processes
from .cell import Cell, own_folder
from .chosen import is_same_release
from .container import ContainerEnvironment
from .environment import Environment, NoEnvironment, hash_parts
from .facts import Facts, read_facts, require_torch
from .fleet import Fleet, Need, Progress, Ran, Room, expect_need
from .interpreter import InterpreterEnvironment
from .plan import choose_canary_probes, plan_blank, plan_row, receipt_without_probe, why_not_here

AGAIN: Final = "again"  # folder of the second run of the first stack
NO_FACTS: Final = Facts(
    python="", executable="", machine="", torch="", te="", te_folder="", gpu=None, why_no_gpu="it is unknown"
)
_AT_A_TIME: Final = 4


@dataclass(frozen=True)
class StackRequest:
    """A stack to be made usable.

    Attributes:
        name: its id in cells, folders and reports.
        make: makes it usable; raises `NoEnvironment`.
        release: of Transformer Engine that it must have; empty where the name is a person's own.
    """

    name: str
    make: Callable[[], Environment]
    release: str = ""


@dataclass(frozen=True)
class Stack:
    """A stack, as far as it came.

    Attributes:
        name: its id.
        environment, facts: None where it could not be made usable.
        problem: why it is not run; empty where it is.
    """

    name: str
    environment: Environment | None = None
    facts: Facts | None = None
    problem: str = ""


@dataclass(frozen=True)
class StackOptions:
    """What is run on every stack.

    Attributes:
        probes: by id; all where there is none.
        times: whether modules are timed, and the first stack a second time, for the noise of the card.
        variables: environment variables of the user.
        tool, commit: what the receipts carry.
    """

    probes: tuple[str, ...]
    seed: int
    times: bool
    tool: str
    commit: str
    variables: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class RunOptions:
    """How the cells are run.

    Attributes:
        folder: of the receipts: one folder a stack, and in that of the first `again/`.
        room: what all cells together may take at a time.
        limit_s: seconds that one cell may take.
        fresh: run again what an earlier run has a receipt of.
        progress: called with what becomes of each cell.
    """

    folder: Path
    room: Room
    limit_s: float
    fresh: bool = False
    progress: Progress = lambda _: None


class StackRun(Frozen):
    """One stack of a run, for the report.

    Attributes:
        environment: where it comes from.
        folder: of its receipts.
        ran, reused: cells that this run started, and cells whose receipts it found.
        problem: why it could not be made usable; empty where it could.
    """

    stack: str
    environment: str
    folder: str
    ran: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class RanStack:
    """What one stack's cells ended in.

    Attributes:
        run: for the report.
        receipts: by probe; `not-run` with the reason where the stack has a problem.
        again: of the second run, by probe; empty where there was none.
    """

    run: StackRun
    receipts: Mapping[str, Receipt]
    again: Mapping[str, Receipt] = field(default_factory=dict)


def prepare_stacks(requests: Sequence[StackRequest], processes: Processes) -> tuple[Stack, ...]:
    """Make every stack usable and ask it what it has, side by side.

    An interrupt waits for none of them: uv and docker take minutes, and end with this tool.
    """
    slots, ended = threading.Semaphore(_AT_A_TIME), queue.SimpleQueue[tuple[int, Stack | BaseException]]()

    def prepare(index: int) -> None:
        with slots:
            try:
                ended.put((index, _prepare(requests[index], processes)))
            except BaseException as fault:  # for the thread that waits for it
                ended.put((index, fault))

    for index in range(len(requests)):
        threading.Thread(target=prepare, args=(index,), daemon=True).start()
    found: dict[int, Stack] = {}
    try:
        while len(found) < len(requests):
            index, made = ended.get()
            if isinstance(made, BaseException):
                raise made
            found[index] = made
    except BaseException:
        processes.stop()
        raise
    return tuple(found[index] for index in range(len(requests)))


def _prepare(request: StackRequest, processes: Processes) -> Stack:
    try:
        environment = request.make()
        facts = read_facts(environment, processes)
        require_torch(facts)
        _ = environment.identity  # kept from here on; a folder of gigabytes is walked side by side with the others
    except NoEnvironment as fault:
        return Stack(request.name, problem=str(fault))
    if request.release and not is_same_release(facts.te, request.release):
        has = f"Transformer Engine {facts.te}" if facts.te else "no Transformer Engine whose metadata can be read"
        return Stack(
            request.name,
            problem=f"{request.name} stands for Transformer Engine {request.release}, and {environment.shown} has "
            f"{has}. Likely cause: the folder or image holds another release than its name. Next step: check what it "
            f"holds ({environment.because}).",
        )
    return Stack(request.name, environment, facts)


def run_stacks(
    catalog: Catalog,
    target: TargetRow,
    stacks: Sequence[Stack],
    wanted: StackOptions,
    options: RunOptions,
    processes: Processes,
) -> tuple[RanStack, ...]:
    """Run every cell of every stack that is missing, in one fleet.

    Args:
        catalog, target: what the cells are planned by.
        stacks: as `prepare_stacks` gave them.
        wanted: what is run on each.
        options: how the cells are run.
        processes: that the cells' processes are among.

    Raises:
        UnknownTarget: there is no such probe.
        FolderTaken: another run writes its receipts there.
        OSError: the folder cannot be written.
    """
    folder = options.folder
    modules = {module.id for module in catalog.modules}
    rows: dict[str, BridgeModule | ProbeCell] = {row.id: row for row in catalog.modules}
    rows |= {row.id: row for row in catalog.compositions}
    ran: dict[str, tuple[Stack, list[Order]]] = {}
    cells: list[tuple[Cell, Need]] = []
    with own_folder(folder), tempfile.TemporaryDirectory(prefix="megacpp-device-") as lock:
        device, is_first = str(Path(lock, "device")) if target.arch else "", True
        for given in stacks:
            reason = given.problem or (why_not_here(target, given.facts) if given.facts else "")
            stack = replace(given, problem=reason)
            orders = _plan(catalog, target, stack, wanted, device)
            ran[stack.name] = stack, orders
            if stack.problem or stack.environment is None:
                continue
            # Modules of the first stack a second time; a composition is not timed.
            again = [replace(one, only_times=True) for one in orders if one.probe in modules and wanted.times]
            for order in (*orders, *(again if is_first else ())):
                place = folder / stack.name / (AGAIN if order.only_times else "")
                cell = Cell(stack.environment, order, place, options.limit_s)
                cells.append((cell, expect_need(order, rows[order.probe])))
            is_first = False
        ended = Fleet(options.room, options.fresh, options.progress).run(cells, processes)
    found = list(zip((cell.order for cell, _ in cells), ended, strict=True))
    return tuple(_collect(stack, orders, folder, found) for stack, orders in ran.values())


def _plan(catalog: Catalog, target: TargetRow, stack: Stack, wanted: StackOptions, device: str) -> list[Order]:
    blank = plan_blank(
        target, stack.facts or NO_FACTS, wanted.variables, seed=wanted.seed, tool=wanted.tool, commit=wanted.commit
    )
    probes = choose_canary_probes(catalog, wanted.probes)
    every: list[BridgeModule | ProbeCell] = [*catalog.modules, *catalog.compositions]
    orders = (on_stack(plan_row(blank, row), stack) for row in every if row.id in probes)
    return [replace(order, times=wanted.times and not order.code, turnstile=device) for order in orders]


def on_stack(order: Order, stack: Stack) -> Order:
    """An order with the name of its stack, and what its receipt says of the environment.

    The receipt is an answer on an environment and on the row of the matrix that it is judged by.
    """
    environment = stack.environment
    image = environment.image_digest if isinstance(environment, ContainerEnvironment) else ""
    lock = environment.lock_hash if isinstance(environment, InterpreterEnvironment) else ""
    usable = environment is not None and not stack.problem
    return replace(
        order,
        stack=stack.name,
        lock_hash=lock or order.lock_hash,
        image_digest=image or order.image_digest,
        environment=hash_parts((environment.identity, repr(order.target))) if environment and usable else "",
    )


def _collect(stack: Stack, orders: Sequence[Order], folder: Path, found: Sequence[tuple[Order, Ran]]) -> RanStack:
    mine = [(order, ran) for order, ran in found if order.stack == stack.name]
    receipts = {order.probe: receipt_without_probe(order, Outcome.NOT_RUN, stack.problem) for order in orders}
    receipts |= {order.probe: ran.receipt for order, ran in mine if not order.only_times}
    again = {order.probe: ran.receipt for order, ran in mine if order.only_times}
    names = [(f"{AGAIN}/{order.cell}" if order.only_times else order.cell, ran.reused) for order, ran in mine]
    environment = ""
    if stack.environment is not None and stack.facts is not None:
        versions = f"Python {stack.facts.python}, torch {stack.facts.torch}"
        environment = f"{stack.environment.shown} ({stack.environment.because}): {versions}"
    run = StackRun(
        stack=stack.name, environment=environment, folder="" if stack.problem else str(folder / stack.name),
        ran=tuple(name for name, old in names if not old), reused=tuple(name for name, old in names if old),
        problem=stack.problem,
    )  # fmt: skip
    return RanStack(run, receipts, again)
