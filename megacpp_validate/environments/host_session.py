"""A session on the stack of one interpreter: cells are planned, run side by side, and reported as they end."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from .. import TOOL
from ..catalog.bridge import Catalog
from ..catalog.bridge import Target as TargetRow
from ..errors import NothingSelected, WrongArguments
from ..evidence.receipt import Outcome, Receipt
from ..probes.order import Order
from ..process import Processes
from .cpu_stack import find_cpu_python
from .environment import Environment
from .facts import Facts, read_facts, require_torch
from .fleet import Expected, Session
from .interpreter import host_interpreter, read_commit
from .plan import (
    choose_request,
    choose_smoke_cells,
    choose_target,
    find_target,
    plan_blank,
    plan_parity,
    plan_smoke,
    receipt_without_probe,
    why_not_here,
)
from .restart import own_folder
from .schedule import share_cores
from .session_result import ParityResult, SessionResult, SmokeSession

_JOBS_ON_A_GPU: Final = 8
_JOBS_WITHOUT: Final = 2


@dataclass(frozen=True)
class SessionOptions:
    """What a session is asked for.

    Attributes:
        target: id of a row of matrix/targets.toml.
        probes: ids of probes or cells; None for all.
        jobs: cells at a time; 0 for what suits the target.
        limit_s: seconds that one cell may take.
        receipts: folder of the receipts and logs.
        python: interpreter of the stack; empty for MEGACPP_PYTHON, else the host's.
    """

    target: str
    probes: tuple[str, ...] | None
    seed: int
    jobs: int
    limit_s: float
    receipts: Path
    python: str

    def require_cells(self, option: str = "--probes") -> None:
        """Refuse a selection that is empty.

        Raises:
            NothingSelected: no cell is selected.
        """
        if self.probes == ():
            raise NothingSelected(f"no cell is selected. Next step: name one, or leave {option} out for all cells.")


Progress = Callable[[str, Receipt | None], None]
"""Called with a cell when it starts (None) and when it has ended, from one thread."""

Plan = Callable[[Facts, Mapping[str, str]], tuple[Order, ...]]
"""The cells of a session, from what the environment has and the variables that it is given."""


def run_parity(catalog: Catalog, options: SessionOptions, progress: Progress) -> ParityResult:
    """Every bridge module against native PyTorch. Raises as `run_session`."""
    options.require_cells()
    target = find_target(catalog, options.target)

    def plan(facts: Facts, variables: Mapping[str, str]) -> tuple[Order, ...]:
        return plan_parity(catalog, plan_blank_order(target, facts, variables, options), options.probes or ())

    return ParityResult(**dict(run_session(target, options, plan, progress)))


def run_smoke(
    catalog: Catalog, options: SessionOptions, progress: Progress, *, ranks: int, launcher: str
) -> SmokeSession:
    """The whole model trained, one cell after the other. Raises as `run_session`.

    Args:
        options: an empty target is that of the GPU that is here, else `cpu`.
        ranks: only cells that take so many devices; 0 for all.
        launcher: what starts the ranks.
    """
    options.require_cells("--cells")
    if not options.target:
        with tempfile.TemporaryDirectory(prefix="megacpp-package-") as folder:
            facts = read_facts(host_interpreter(os.environ, Path(folder), options.python), Processes())
        options = replace(options, target="cpu" if facts.gpu is None else choose_target(catalog, [facts]).id)
    target = find_target(catalog, options.target)
    every = choose_smoke_cells(catalog, target.id, options.probes or ())
    rows = [row for row in every if ranks in (0, row.ranks)]
    if not rows:
        known = ", ".join(sorted({str(row.ranks) for row in every}))
        raise NothingSelected(
            f"no selected cell takes {ranks} rank(s). Next step: choose --ranks from {known}, or other --cells."
        )

    def plan(facts: Facts, variables: Mapping[str, str]) -> tuple[Order, ...]:
        orders = plan_smoke(catalog, plan_blank_order(target, facts, variables, options), [row.id for row in rows])
        return tuple(replace(order, settings={**order.settings, "launcher": launcher}) for order in orders)

    expected = {row.id: Expected(row.seconds, row.limit_s) for row in rows}
    return SmokeSession(**dict(run_session(target, options, plan, progress, expected)))


def run_session(
    target: TargetRow,
    options: SessionOptions,
    plan: Plan,
    progress: Progress,
    expected: Mapping[str, Expected] | None = None,
) -> SessionResult:
    """Run what `plan` gives on the host's interpreter, or say why not here.

    Raises:
        ToolError: as `plan`; no interpreter has torch; another run writes to the folder of the receipts.
    """
    started = time.monotonic()
    processes = Processes()
    jobs = options.jobs or (_JOBS_ON_A_GPU if target.arch else _JOBS_WITHOUT)
    python = options.python if target.arch else find_cpu_python(options.python)
    variables = share_cores(os.environ, jobs)
    with tempfile.TemporaryDirectory(prefix="megacpp-package-") as folder:
        environment = host_interpreter(variables, Path(folder), python)
        facts = read_facts(environment, processes)
        orders = plan(facts, variables)
        if reason := why_not_here(target, facts):
            # Nothing is written: what an earlier run on the right machine wrote stays what it is.
            receipts = tuple(receipt_without_probe(order, Outcome.NOT_RUN, reason) for order in orders)
        else:
            require_torch(facts)
            orders = tuple(replace(order, environment=environment.identity) for order in orders)
            session = Session(environment, options.receipts.absolute(), options.limit_s, jobs)
            receipts = _run_orders(orders, session, processes, progress, expected)
    request = choose_request(target, facts, variables)
    return SessionResult(
        tool=TOOL,
        target=target.id,
        stack=request.stack,
        requested=request.backend,
        requested_because=request.because,
        interpreter=_describe_interpreter(environment, facts),
        folder="" if reason else str(options.receipts),
        seed=options.seed,
        seconds=round(time.monotonic() - started, 2),
        receipts=receipts,
    )


def plan_blank_order(target: TargetRow, facts: Facts, variables: Mapping[str, str], options: SessionOptions) -> Order:
    """What all orders of a session have in common."""
    return plan_blank(target, facts, variables, seed=options.seed, tool=TOOL, commit=read_commit())


def _run_orders(
    orders: Sequence[Order],
    session: Session,
    processes: Processes,
    progress: Progress,
    expected: Mapping[str, Expected] | None,
) -> tuple[Receipt, ...]:
    """Run cells while nobody else writes to their folder: a receipt there would be of either run."""
    try:
        with own_folder(session.folder):
            return session.run(orders, processes, progress, expected)
    except (FileExistsError, NotADirectoryError, PermissionError) as fault:
        raise WrongArguments(
            f"receipts cannot be written to {session.folder}: {fault.strerror or fault}. Likely cause: it is a file, "
            "or you may not write there. Next step: give --receipts a folder that you can write."
        ) from fault


def _describe_interpreter(environment: Environment, facts: Facts) -> str:
    te = f"Transformer Engine {facts.te}" if facts.te else "no Transformer Engine"
    return f"{facts.executable} ({environment.because}): Python {facts.python}, torch {facts.torch or 'none'}, {te}"
