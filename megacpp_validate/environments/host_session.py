"""A session on the stack of one interpreter: cells are planned, run side by side, and reported as they end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

from pydantic import Field

from ..catalog.bridge import BridgeModule, Catalog, ProbeCell
from ..catalog.bridge import Target as TargetRow
from ..errors import NothingSelected
from ..evidence.receipt import Outcome, Receipt
from ..evidence.values import Frozen, Result
from ..process import Processes
from .cell import own_folder
from .fleet import Progress, Room, plan_jobs, run_here, share_cores
from .interpreter import host_interpreter, read_facts, require_torch
from .plan import RunOptions, choose_rows, choose_smoke_cells, choose_target, find_target
from .stacks import Stack, plan_cells
from .venv import cpu_interpreter


class SessionResult(Result):
    """One session, whatever its probes look at.

    Attributes:
        target, stack: what was run where.
        requested: "te" or "native", and why it is that.
        interpreter: that the probes ran in, and why it is that one.
        folder: of the receipts; empty where none was written.
        seconds: wall-clock time of the session.
        receipts: one for every probe that was selected, in their order in the matrix.
    """

    target: str
    stack: str
    requested: str
    requested_because: str
    interpreter: str
    folder: str
    seed: int
    seconds: float
    receipts: tuple[Receipt, ...]

    @property
    def breaks(self) -> bool:
        """Whether anything ran and is not good; what did not run at all is lost evidence, not a breakage."""
        return any(not r.outcome.is_good and r.outcome is not Outcome.NOT_RUN for r in self.receipts)

    @property
    def lacks(self) -> bool:
        """Whether a selected probe did not run or is not good, or none was selected."""
        return not self.receipts or not all(receipt.outcome.is_good for receipt in self.receipts)


class ParityResult(SessionResult):
    """A session of the seven bridge modules, in dependency order."""

    schema_id: Literal["megacpp-validate/parity/1"] = "megacpp-validate/parity/1"


class SmokeSession(SessionResult):
    """A session of the smoke run: a receipt a cell, with the training runs in it."""

    schema_id: Literal["megacpp-validate/moe-smoke/1"] = "megacpp-validate/moe-smoke/1"


class SupportGrid(Frozen):
    """Outcomes by stack and module.

    Attributes:
        modules: in the order of the columns.
        stacks: stack -> module -> outcome; `not-run` where there is no receipt.
        unreadable: path -> reason, of files that are no receipt.
    """

    schema_id: Literal["megacpp-validate/support/3"] = "megacpp-validate/support/3"
    modules: tuple[str, ...]
    stacks: dict[str, dict[str, Outcome]]
    unreadable: dict[str, str] = Field(default_factory=dict)


def build_support(receipts: Sequence[Receipt], modules: Sequence[str], unreadable: dict[str, str]) -> SupportGrid:
    """The grid of receipts, stacks in their order."""
    stacks = {receipt.stack: dict.fromkeys(modules, Outcome.NOT_RUN) for receipt in receipts}
    for receipt in receipts:
        if receipt.probe in modules:
            stacks[receipt.stack][receipt.probe] = receipt.outcome
    return SupportGrid(modules=tuple(modules), stacks=stacks, unreadable=unreadable)


def run_parity(catalog: Catalog, options: RunOptions, progress: Progress) -> ParityResult:
    """Every bridge module against native PyTorch. Raises as `run_session`."""
    rows = choose_rows("probe", catalog.modules, options.probes)
    return ParityResult(**dict(run_session(find_target(catalog, options.target), options, rows, progress)))


def run_smoke(
    catalog: Catalog, options: RunOptions, progress: Progress, *, ranks: int,
    admit: Callable[[Sequence[ProbeCell]], None],
) -> SmokeSession:  # fmt: skip
    """The whole model trained, one cell after the other. Raises as `run_session`.

    Args:
        options: an empty target is that of the GPU that is here, else `cpu`.
        ranks: only cells that take so many devices; 0 for all.
        admit: called with the cells before one is started; raises where one may not start.
    """
    if not options.target:
        facts = read_facts(host_interpreter(os.environ, options.python), Processes())
        options = replace(options, target="cpu" if facts.gpu is None else choose_target(catalog, [facts]).id)
    target = find_target(catalog, options.target)
    every = choose_smoke_cells(catalog, target.id, options.probes)
    rows = [row for row in every if ranks in (0, row.ranks)]
    if not rows:
        known = ", ".join(sorted({str(row.ranks) for row in every}))
        raise NothingSelected(
            f"no selected cell takes {ranks} rank(s). Next step: choose --ranks from {known}, or other --cells."
        )
    admit(rows)
    return SmokeSession(**dict(run_session(target, options, rows, progress)))


def run_session(
    target: TargetRow, options: RunOptions, rows: Sequence[BridgeModule | ProbeCell], progress: Progress
) -> SessionResult:
    """Run the cells of some rows on the host's interpreter, the longest first, or report why not here.

    Args:
        progress: called with what becomes of each cell.

    Raises:
        ToolError: no interpreter has torch; another run writes to the folder of the receipts.
    """
    started, processes = time.monotonic(), Processes()
    jobs = plan_jobs(options.jobs, gpu=bool(target.arch))
    find = host_interpreter if target.arch else cpu_interpreter
    environment = find(share_cores(os.environ, jobs), options.python)
    facts = read_facts(environment, processes)
    stack, folder = Stack("", environment, facts).on(target), options.receipts.absolute()
    cells = plan_cells(stack, target, rows, folder, seed=options.seed, limit_s=options.limit_s)
    with ExitStack() as held:
        if not stack.problem:  # else nothing is written: what the right machine wrote stays what it is
            require_torch(facts)
            held.enter_context(own_folder(folder))
        receipts = tuple(ran.receipt for ran in run_here(cells, Room(jobs), processes, progress=progress))
    order = cells[0].order
    return SessionResult(
        target=target.id, stack=order.stack, requested=order.requested,
        requested_because=order.requested_because, interpreter=stack.shown,
        folder="" if stack.problem else str(options.receipts), seed=options.seed,
        seconds=round(time.monotonic() - started, 2), receipts=receipts,
    )  # fmt: skip
