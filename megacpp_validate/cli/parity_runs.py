"""The verbs of parity: what they run, and the exit code of each answer."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer
from rich.status import Status

from ..catalog import Catalog
from ..catalog import Target as TargetRow
from ..environments.environment import Environment, NoEnvironment
from ..environments.facts import Facts, read_facts, require_torch
from ..environments.interpreter import host_interpreter, read_commit
from ..environments.plan import (
    UnknownTarget,
    choose_request,
    find_target,
    plan_parity,
    receipt_without_probe,
    why_not_here,
)
from ..environments.processes import Processes
from ..environments.restart import FolderTaken, own_folder
from ..environments.room import share_cores
from ..environments.session import Session
from ..evidence.parity import ParityResult, build_support
from ..evidence.receipt import Outcome, Receipt
from ..evidence.store import ReceiptInvalid, read_receipts
from ..probes.order import Order
from ..report.marks import mark_cell
from .app import TOOL, Exit, Format, errors, foreseen, refuse, refuse_receipts
from .telling import tell

_JOBS_ON_A_GPU = 8
_JOBS_WITHOUT = 2


@dataclass(frozen=True)
class Asked:
    """The arguments of a session; `probes` is None for all, `jobs` 0 for what suits the target."""

    target: str
    probes: tuple[str, ...] | None
    seed: int
    jobs: int
    limit_s: float
    receipts: Path
    python: str


@foreseen({
    UnknownTarget: Exit.WRONG_ARGUMENTS, NoEnvironment: Exit.NO_ENVIRONMENT, FolderTaken: Exit.INFRASTRUCTURE,
})  # fmt: skip
def run_parity(catalog: Catalog, asked: Asked, fmt: Format, output: Path | None, *, verbose: bool) -> None:
    """A session; closed where anything is red, and not open where anything did not run."""
    target = find_target(catalog, asked.target)
    if asked.probes == ():
        refuse("no probe is selected. Next step: name one, or leave --probes out for all.", Exit.NOTHING_SELECTED)
    result = _run(catalog, target, asked)
    tell(result, fmt, output, verbose=verbose)
    if result.breaks:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.OPEN if result.holds else Exit.EVIDENCE_MISSING)


@foreseen({ReceiptInvalid: Exit.WRONG_ARGUMENTS})
def show_support(catalog: Catalog, folders: Sequence[Path], fmt: Format, output: Path | None) -> None:
    """The grid of some folders of receipts; a file that cannot be read is evidence that is missing."""
    found = [read_receipts(folder) for folder in folders]
    receipts = [receipt for folder in found for receipt in folder.found.values()]
    unreadable = {str(fault.file): fault.reason for folder in found for fault in folder.unreadable}
    if not receipts and not unreadable:
        refuse(
            f"there is no receipt in {', '.join(map(str, folders))}. Likely cause: a typing error, or no run wrote "
            "there. Next step: give folders of receipts, such as docs/evidence/h200/*/.",
            Exit.NOTHING_SELECTED,
        )
    tell(build_support(receipts, [module.id for module in catalog.modules], unreadable), fmt, output)
    raise typer.Exit(Exit.EVIDENCE_MISSING if unreadable else Exit.OPEN)


def _run(catalog: Catalog, target: TargetRow, asked: Asked) -> ParityResult:
    started = time.monotonic()
    processes = Processes()
    jobs = asked.jobs or (_JOBS_ON_A_GPU if target.arch else _JOBS_WITHOUT)
    variables = share_cores(os.environ, jobs)
    with tempfile.TemporaryDirectory(prefix="megacpp-door-") as door:
        environment = host_interpreter(variables, Path(door), asked.python)
        facts = read_facts(environment, processes)
        orders = plan_parity(
            catalog,
            target,
            facts,
            asked.probes or (),
            variables,
            seed=asked.seed,
            tool=TOOL,
            commit=read_commit(),
        )
        folder = asked.receipts.absolute()
        if reason := why_not_here(target, facts):
            # Nothing is written: what an earlier run on the right machine wrote stays what it is.
            receipts = tuple(receipt_without_probe(order, Outcome.NOT_RUN, reason) for order in orders)
        else:
            require_torch(facts)
            orders = tuple(replace(order, environment=environment.identity) for order in orders)
            receipts = _run_orders(orders, Session(environment, folder, asked.limit_s, jobs), processes)
    request = choose_request(target, facts, variables)
    return ParityResult(
        tool=TOOL,
        target=target.id,
        stack=request.stack,
        requested=request.backend,
        requested_because=request.because,
        interpreter=_say_interpreter(environment, facts),
        folder="" if reason else str(asked.receipts),
        seed=asked.seed,
        seconds=round(time.monotonic() - started, 2),
        receipts=receipts,
    )


def _run_orders(orders: Sequence[Order], session: Session, processes: Processes) -> tuple[Receipt, ...]:
    """Run them while nobody else writes to their folder: a receipt there would be of either run."""
    with _Progress() as progress:
        try:
            with own_folder(session.folder):
                return session.run(orders, processes, progress)
        except OSError as fault:
            refuse_receipts(session.folder, fault)


def _say_interpreter(environment: Environment, facts: Facts) -> str:
    te = f"Transformer Engine {facts.te}" if facts.te else "no Transformer Engine"
    return f"{facts.executable} ({environment.because}): Python {facts.python}, torch {facts.torch or 'none'}, {te}"


@dataclass
class _Progress:
    """What runs, where a person looks on; what has ended, a line each, everywhere."""

    _running: dict[str, None] = field(default_factory=dict)
    _status: Status | None = None

    def __enter__(self) -> _Progress:
        if errors.is_terminal:
            self._status = errors.status("starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, cell: str, receipt: Receipt | None) -> None:
        if receipt is None:
            self._running[cell] = None
        else:
            self._running.pop(cell, None)
            seconds = receipt.seconds.get("total", 0.0)
            errors.print(f"{mark_cell(receipt.outcome).word:12} {cell} ({seconds:.1f} s)", markup=False)
        if self._status is not None and self._running:
            self._status.update(f"running: {', '.join(self._running)}")
