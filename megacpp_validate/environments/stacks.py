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
from ..evidence.store import ReceiptInvalid, read_receipts
from ..probes.order import Order
from ..process import Processes
from .cell import Cell
from .chosen import is_same_release
from .container import ContainerEnvironment
from .environment import Environment, NoEnvironment
from .facts import Facts, read_facts, require_torch
from .fleet import Fleet, Progress
from .identity import hash_parts
from .interpreter import InterpreterEnvironment
from .plan import choose_canary_probes, plan_blank, plan_compositions, plan_parity, receipt_without_probe, why_not_here
from .restart import own_folder
from .schedule import Need, Room, expect_need
from .stack_run import StackRun

AGAIN: Final = "again"  # folder of the second run of the first stack
_AT_A_TIME: Final = 4


@dataclass(frozen=True)
class Wanted:
    """A stack that is asked for.

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
class Asked:
    """What is asked of every stack.

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
class Running:
    """How the cells are run.

    Attributes:
        folder: of the receipts: one folder a stack, and in that of the first `again/`.
        room: what all cells together may take at a time.
        limit_s: seconds that one cell may take.
        fresh: run again what an earlier run has a receipt of.
        progress: told what becomes of each cell.
    """

    folder: Path
    room: Room
    limit_s: float
    fresh: bool = False
    progress: Progress = lambda _: None


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


def prepare_stacks(wanted: Sequence[Wanted], processes: Processes) -> tuple[Stack, ...]:
    """Make every stack usable and ask it what it has, side by side.

    An interrupt waits for nobody: uv and docker take minutes, and end with this tool.
    """
    slots, ended = threading.Semaphore(_AT_A_TIME), queue.SimpleQueue[tuple[int, Stack | BaseException]]()

    def prepare(index: int) -> None:
        with slots:
            try:
                ended.put((index, _prepare(wanted[index], processes)))
            except BaseException as fault:  # for the thread that waits for it
                ended.put((index, fault))

    for index in range(len(wanted)):
        threading.Thread(target=prepare, args=(index,), daemon=True).start()
    found: dict[int, Stack] = {}
    try:
        while len(found) < len(wanted):
            index, made = ended.get()
            if isinstance(made, BaseException):
                raise made
            found[index] = made
    except BaseException:
        processes.stop()
        raise
    return tuple(found[index] for index in range(len(wanted)))


def run_stacks(
    catalog: Catalog,
    target: TargetRow,
    stacks: Sequence[Stack],
    asked: Asked,
    running: Running,
    processes: Processes,
) -> tuple[RanStack, ...]:
    """Run every cell of every stack that is missing, in one fleet.

    Args:
        catalog, target: what the cells are planned by.
        stacks: as `prepare_stacks` gave them.
        asked: of every stack.
        running: how the cells are run.
        processes: that the cells' processes are among.

    Raises:
        UnknownTarget: a probe that there is not.
        FolderTaken: another run writes its receipts there.
        OSError: the folder cannot be written.
    """
    folder, limit_s = running.folder, running.limit_s
    stacks = [_with_target(stack, target) for stack in stacks]
    usable = [stack for stack in stacks if not stack.problem]
    with own_folder(folder), tempfile.TemporaryDirectory(prefix="megacpp-turnstile-") as turnstile:
        gate = Path(turnstile, "device") if target.arch else None
        orders = {stack.name: _plan(catalog, target, stack, asked, gate) for stack in stacks}
        again = _plan_again(orders[usable[0].name]) if usable and asked.times else ()
        cells = [_cell(stack, order, folder, limit_s) for stack in usable for order in orders[stack.name]] + [
            _cell(usable[0], order, folder, limit_s) for order in again
        ]
        fleet = Fleet(running.room, running.fresh, running.progress)
        ended = fleet.run(_with_needs(cells, catalog, _read_earlier(folder, stacks)), processes)
    found = [(cell, receipt, reused) for cell, (receipt, reused) in zip(cells, ended, strict=True)]
    return tuple(_collect(stack, orders[stack.name], folder, found) for stack in stacks)


def _prepare(wanted: Wanted, processes: Processes) -> Stack:
    try:
        environment = wanted.make()
        facts = read_facts(environment, processes)
        require_torch(facts)
        _ = environment.identity  # kept from here on; a folder of gigabytes is walked side by side with the others
    except NoEnvironment as fault:
        return Stack(wanted.name, problem=str(fault))
    if wanted.release and not is_same_release(facts.te, wanted.release):
        has = f"Transformer Engine {facts.te}" if facts.te else "no Transformer Engine whose metadata can be read"
        return Stack(
            wanted.name,
            problem=f"{wanted.name} is to be Transformer Engine {wanted.release}, and {environment.shown} has {has}. "
            "Likely cause: a folder or an image with another release than its name says. Next step: look at what "
            f"is there ({environment.because}).",
        )
    return Stack(wanted.name, environment, facts)


def _with_target(stack: Stack, target: TargetRow) -> Stack:
    if stack.problem or stack.facts is None:
        return stack
    return replace(stack, problem=why_not_here(target, stack.facts))


def _plan(catalog: Catalog, target: TargetRow, stack: Stack, asked: Asked, gate: Path | None) -> tuple[Order, ...]:
    facts = stack.facts or Facts(
        python="", executable="", machine="", torch="", te="", te_folder="", gpu=None, why_no_gpu=""
    )
    probes = choose_canary_probes(catalog, asked.probes)
    modules = {module.id for module in catalog.modules}
    blank = plan_blank(target, facts, asked.variables, seed=asked.seed, tool=asked.tool, commit=asked.commit)
    orders: tuple[Order, ...] = ()
    if own := tuple(name for name in probes if name in modules):
        orders += plan_parity(catalog, blank, own)
    if more := tuple(name for name in probes if name not in modules):
        orders += plan_compositions(catalog, blank, more)
    image = stack.environment.image_digest if isinstance(stack.environment, ContainerEnvironment) else ""
    made_from = stack.environment.lock_hash if isinstance(stack.environment, InterpreterEnvironment) else ""
    return tuple(
        replace(
            order,
            stack=stack.name,
            lock_hash=made_from or order.lock_hash,
            image_digest=image or order.image_digest,
            times=asked.times and not order.code,
            turnstile=str(gate or ""),
            environment="" if stack.environment is None or stack.problem else _identify(stack.environment, order),
        )
        for order in orders
    )


def _identify(environment: Environment, order: Order) -> str:
    """What a receipt is an answer on: an environment, and the row of the matrix that it is judged by."""
    return hash_parts((environment.identity, repr(order.target)))


def _plan_again(orders: Sequence[Order]) -> tuple[Order, ...]:
    """Modules a second time; a composition is not timed."""
    return tuple(replace(order, only_times=True) for order in orders if not order.code)


def _cell(stack: Stack, order: Order, folder: Path, limit_s: float) -> Cell:
    if stack.environment is None:  # never: only usable stacks have cells
        raise NoEnvironment(stack.problem)
    place = folder / stack.name / (AGAIN if order.only_times else "")
    return Cell(stack.environment, order, place, limit_s)


def _read_earlier(folder: Path, stacks: Sequence[Stack]) -> dict[str, list[Receipt]]:
    """Receipts of earlier runs by probe, whatever stack they are of: they say what a cell takes."""
    earlier: dict[str, list[Receipt]] = {}
    for stack in stacks:
        try:
            found = read_receipts(folder / stack.name).found.values()
        except ReceiptInvalid:
            continue  # no such folder yet
        for receipt in found:
            earlier.setdefault(receipt.probe, []).append(receipt)
    return earlier


def _with_needs(
    cells: Sequence[Cell], catalog: Catalog, earlier: Mapping[str, Sequence[Receipt]]
) -> list[tuple[Cell, Need]]:
    rows: dict[str, BridgeModule | ProbeCell] = {row.id: row for row in catalog.modules}
    rows |= {row.id: row for row in catalog.compositions}
    return [(cell, expect_need(cell.order, rows[cell.order.probe], earlier)) for cell in cells]


def _collect(
    stack: Stack, orders: Sequence[Order], folder: Path, found: Sequence[tuple[Cell, Receipt, bool]]
) -> RanStack:
    mine = [row for row in found if row[0].order.stack == stack.name]
    receipts = {order.probe: receipt_without_probe(order, Outcome.NOT_RUN, stack.problem) for order in orders}
    receipts |= {cell.order.probe: receipt for cell, receipt, _ in mine if not cell.order.only_times}
    again = {cell.order.probe: receipt for cell, receipt, _ in mine if cell.order.only_times}
    run = StackRun(
        stack=stack.name,
        environment=_say_environment(stack),
        folder="" if stack.problem else str(folder / stack.name),
        ran=tuple(_label(cell) for cell, _, reused in mine if not reused),
        reused=tuple(_label(cell) for cell, _, reused in mine if reused),
        problem=stack.problem,
    )
    return RanStack(run, receipts, again)


def _label(cell: Cell) -> str:
    return f"{AGAIN}/{cell.order.cell}" if cell.order.only_times else cell.order.cell


def _say_environment(stack: Stack) -> str:
    if stack.environment is None or stack.facts is None:
        return ""
    return (
        f"{stack.environment.shown} ({stack.environment.because}): Python {stack.facts.python}, "
        f"torch {stack.facts.torch}"
    )
