"""The verb of the blame score: copies are made, every probe is run on each, and the blame of each is judged."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer

from ..canary.te_fault_verdict import Troubles, judge_plan
from ..canary.te_faults import CopyRun, Plan, UnknownFault, plan_score
from ..catalog import Catalog
from ..catalog import Target as TargetRow
from ..catalog_faults import EditDoesNotFit, read_te_faults
from ..environments.cell import Cell
from ..environments.environment import Environment, NoEnvironment
from ..environments.facts import Facts, read_facts
from ..environments.faulty_overlay import NoClean, make_faulty
from ..environments.fleet import Event, Fleet
from ..environments.installed import find_environments, open_host
from ..environments.interpreter import InterpreterEnvironment, read_commit
from ..environments.overlay import put_over
from ..environments.plan import UnknownTarget, find_target, plan_parity, why_not_here
from ..environments.processes import Processes
from ..environments.restart import FolderTaken, own_folder
from ..environments.room import count_cores, read_room, share_cores
from ..environments.schedule import Need, expect_need, plan_jobs
from ..evidence.blame_score import BlameScore
from ..evidence.receipt import Receipt
from ..evidence.store import ReceiptInvalid, read_receipts
from .app import TOOL, Exit, Format, errors, foreseen, refuse_receipts
from .telling import tell

_MAKERS = 8  # copies that are made at a time: it is the disk that they wait for


@dataclass(frozen=True)
class Asked:
    """The arguments."""

    faults: tuple[str, ...]
    release: str
    shard: str
    clean: int
    timed_clean: int
    target: str
    overlays: tuple[Path, ...]
    receipts: Path
    earlier: tuple[Path, ...]
    copies: Path | None
    judge_only: bool
    seed: int
    jobs: int
    limit_s: float
    python: str

    @property
    def of_n(self) -> tuple[int, int]:
        """The shard as numbers; (0, 0), which there is not, where it has another form."""
        one, _, n = self.shard.partition("/")
        return (int(one), int(n)) if one.isdecimal() and n.isdecimal() else (0, 0)


@dataclass(frozen=True)
class _Host:
    """Where copies run.

    Attributes:
        bare: the interpreter without overlays.
        clean: the folder that is copied.
        behind: site folders that stand behind it.
        facts: of the clean stack.
    """

    bare: InterpreterEnvironment
    clean: Path
    behind: tuple[Path, ...]
    facts: Facts


@foreseen({
    UnknownTarget: Exit.WRONG_ARGUMENTS, UnknownFault: Exit.WRONG_ARGUMENTS, NoEnvironment: Exit.NO_ENVIRONMENT,
    NoClean: Exit.NO_ENVIRONMENT, FolderTaken: Exit.INFRASTRUCTURE,
})  # fmt: skip
def run_blame_score(
    catalog: Catalog, matrix: Path | None, asked: Asked, fmt: Format, output: Path | None, *, verbose: bool
) -> None:
    """Plant, run, judge; closed where somebody else is blamed, and not open where anything did not run."""
    started = time.monotonic()
    target = find_target(catalog, asked.target)
    modules = tuple(module.id for module in catalog.modules)
    plan = plan_score(
        read_te_faults(modules, matrix), asked.release or catalog.pinned.te, asked.faults, shard=asked.of_n,
        controls=asked.clean, timed_controls=asked.timed_clean, seed=asked.seed,
    )  # fmt: skip
    folder = asked.receipts.absolute() / f"te{plan.release}"
    troubles = Troubles()
    try:
        where = f"receipts of {folder}" if asked.judge_only else _run(catalog, target, plan, asked, folder, troubles)
    except OSError as fault:
        refuse_receipts(asked.receipts, fault)
    verdicts = judge_plan(plan, _read_runs(plan, folder, troubles), catalog.modules, troubles)
    for place in reversed(asked.earlier):
        runs = _read_runs(plan, place.absolute() / folder.name, Troubles())
        verdicts = judge_plan(plan, runs, catalog.modules, Troubles()).joined(verdicts)
    where += "".join(f"; receipts of {place}" for place in asked.earlier)
    score = BlameScore(
        tool=TOOL,
        target=target.id,
        environment=where,
        modules=modules,
        faults=verdicts.faults,
        controls=verdicts.controls,
        seconds=round(time.monotonic() - started, 1),
    )
    tell(score, fmt, output, verbose=verbose)
    if score.breaks:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.EVIDENCE_MISSING if score.lacks else Exit.OPEN)


# --- the runs ---------------------------------------------------------------------------------------------


def _run(catalog: Catalog, target: TargetRow, plan: Plan, asked: Asked, folder: Path, troubles: Troubles) -> str:
    """Make every copy and run every cell that has no receipt yet; where that was, or why it was not."""
    processes = Processes()
    variables = share_cores(os.environ, plan_jobs(count_cores(), asked.jobs))
    bare = open_host(variables, asked.python)
    if reason := why_not_here(target, facts := read_facts(bare, processes)):
        troubles.everything = f"not-run: {reason}"
        return troubles.everything
    host = _find_clean(bare, plan.release, asked, variables, processes)
    with own_folder(folder):
        cells = list(_make_cells(catalog, target, plan, asked, host, folder, troubles))
        room = read_room(variables, gpu=bool(target.arch), jobs=asked.jobs)
        fleet = Fleet(room, fresh=False, progress=_Progress(len(catalog.modules)))
        # What times waits for what computes to end: one after the other, nobody waits long.
        for timed in (False, True):
            fleet.run([(cell, need) for cell, need in cells if cell.order.times is timed], processes)
    return f"{host.facts.executable}, Transformer Engine {plan.release} of {host.clean}, {facts.gpu and facts.gpu.name}"


def _find_clean(
    bare: InterpreterEnvironment, release: str, asked: Asked, variables: Mapping[str, str], processes: Processes
) -> _Host:
    """The folder of the release that copies are made of."""
    every = find_environments(asked.overlays, variables, asked.python)
    found = next((one for one in every if one.release == release and one.environment is not None), None)
    if found is None or found.environment is None or not found.environment.folders:
        there = ", ".join(sorted({one.release for one in every if one.environment is not None})) or "none"
        raise NoEnvironment(
            f"Transformer Engine {release} lies in no overlay folder of this host (releases that are there: {there}). "
            "Likely cause: no --overlays and no MEGACPP_OVERLAYS, or it is installed into the interpreter itself, "
            "which is not copied. Next step: name with --overlays the folder that holds it, as `pip install --target` "
            "makes one."
        )
    clean, *behind = found.environment.folders
    return _Host(bare, clean, tuple(behind), read_facts(found.environment, processes))


def _make_cells(
    catalog: Catalog, target: TargetRow, plan: Plan, asked: Asked, host: _Host, folder: Path, troubles: Troubles
) -> Iterator[tuple[Cell, Need]]:  # fmt: skip
    """The cells of every run whose copy can be made."""
    rows = {module.id: module for module in catalog.modules}
    copies = asked.copies or Path(tempfile.gettempdir(), f"megacpp-te-copies-{os.getuid()}")
    turnstile = folder / "turnstile"
    orders = plan_parity(catalog, target, host.facts, (), host.bare.variables, tool=TOOL, commit=read_commit())

    def make(run: CopyRun) -> tuple[Environment, str] | None:
        try:
            environment = _open(run, plan.release, host, copies)
            return environment, environment.identity
        except EditDoesNotFit as fault:
            troubles.not_planted[run.name] = str(fault)
        except (NoEnvironment, OSError) as fault:
            troubles.not_run[run.name] = f"its copy cannot be made: {fault}"
        return None

    with ThreadPoolExecutor(_MAKERS) as pool:
        made = list(pool.map(make, plan.runs))
    for run, usable in zip(plan.runs, made, strict=True):
        if usable is None:
            continue
        for order in orders:
            own = replace(
                order, seed=run.seed, quick=True, times=run.times, only_times=run.times,
                turnstile=str(turnstile), environment=usable[1],
            )  # fmt: skip
            cell = Cell(usable[0], own, folder / run.name, asked.limit_s)
            yield cell, expect_need(own, rows[own.probe], {})


def _open(run: CopyRun, release: str, host: _Host, copies: Path) -> InterpreterEnvironment:
    place = make_faulty(host.clean, release, run.fault, copies) if run.copied else host.clean
    return put_over(host.bare, (place, *host.behind), f"{run.name} of Transformer Engine {release}")


@dataclass
class _Progress:
    """A line for each copy whose cells have all ended."""

    cells_of_a_run: int
    _ended: dict[Path, int] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        if event.receipt is None:
            return
        folder = event.cell.folder
        self._ended[folder] = self._ended.get(folder, 0) + 1
        if self._ended[folder] == self.cells_of_a_run:
            errors.print(f"{event.done:4} of {event.total} cells: {folder.name}", markup=False)


# --- what came of it --------------------------------------------------------------------------------------


def _read_runs(plan: Plan, folder: Path, troubles: Troubles) -> dict[str, dict[str, Receipt]]:
    """Receipts of every run by probe; what an earlier run left is no answer where this one did not run at all."""
    return {} if troubles.everything else {run.name: _read(folder / run.name) for run in plan.runs}


def _read(folder: Path) -> dict[str, Receipt]:
    """Receipts by probe; one that cannot be believed is one that there is not."""
    try:
        return {receipt.probe: receipt for receipt in read_receipts(folder).found.values()}
    except ReceiptInvalid:
        return {}
