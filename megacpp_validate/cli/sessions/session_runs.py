"""A session on the stack of one interpreter: the cells that were planned, run and told as they end."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...catalog.bridge import Target as TargetRow
from ...environments.environment import Environment
from ...environments.facts import Facts, read_facts, require_torch
from ...environments.fleet import Expected, Session
from ...environments.interpreter import host_interpreter
from ...environments.plan import choose_request, receipt_without_probe, why_not_here
from ...environments.restart import own_folder
from ...environments.schedule import share_cores
from ...environments.session_result import SessionResult
from ...evidence.receipt import Outcome, Receipt
from ...probes.order import Order
from ...process import Processes
from ...report.marks import mark_cell
from ..app import TOOL, refuse_receipts
from ..progress import Progress

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


Plan = Callable[[Facts, Mapping[str, str]], tuple[Order, ...]]
"""The cells of a session, from what the environment has and the variables that it is given."""


def run_session(
    target: TargetRow, asked: Asked, plan: Plan, expected: Mapping[str, Expected] | None = None
) -> SessionResult:
    """Run what `plan` gives on the host's interpreter, or say why not here.

    Raises:
        UnknownTarget: as `plan`.
        NoEnvironment: there is no interpreter that has torch.
        FolderTaken: another run writes to the folder of the receipts.
    """
    started = time.monotonic()
    processes = Processes()
    jobs = asked.jobs or (_JOBS_ON_A_GPU if target.arch else _JOBS_WITHOUT)
    variables = share_cores(os.environ, jobs)
    with tempfile.TemporaryDirectory(prefix="megacpp-door-") as door:
        environment = host_interpreter(variables, Path(door), asked.python)
        facts = read_facts(environment, processes)
        orders = plan(facts, variables)
        folder = asked.receipts.absolute()
        if reason := why_not_here(target, facts):
            # Nothing is written: what an earlier run on the right machine wrote stays what it is.
            receipts = tuple(receipt_without_probe(order, Outcome.NOT_RUN, reason) for order in orders)
        else:
            require_torch(facts)
            orders = tuple(replace(order, environment=environment.identity) for order in orders)
            session = Session(environment, folder, asked.limit_s, jobs)
            receipts = _run_orders(orders, session, processes, expected)
    request = choose_request(target, facts, variables)
    return SessionResult(
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


def _run_orders(
    orders: Sequence[Order], session: Session, processes: Processes, expected: Mapping[str, Expected] | None
) -> tuple[Receipt, ...]:
    """Run them while nobody else writes to their folder: a receipt there would be of either run."""
    with _CellProgress() as progress:
        try:
            with own_folder(session.folder):
                return session.run(orders, processes, progress, expected)
        except OSError as fault:
            refuse_receipts(session.folder, fault)


def _say_interpreter(environment: Environment, facts: Facts) -> str:
    te = f"Transformer Engine {facts.te}" if facts.te else "no Transformer Engine"
    return f"{facts.executable} ({environment.because}): Python {facts.python}, torch {facts.torch or 'none'}, {te}"


@dataclass
class _CellProgress(Progress):
    _running: dict[str, None] = field(default_factory=dict)

    def __call__(self, cell: str, receipt: Receipt | None) -> None:
        if receipt is None:
            self._running[cell] = None
        else:
            self._running.pop(cell, None)
            seconds = receipt.seconds.get("total", 0.0)
            self.say(f"{mark_cell(receipt.outcome).word:12} {cell} ({seconds:.1f} s)")
        self.show("", self._running)
