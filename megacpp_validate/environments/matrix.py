"""Many cells of many stacks and targets: what is selected, what each needs, and how all of them end.

On this machine the cells run side by side as in any session; on a cluster each is a job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from typing import Final, Literal

from ..catalog.bridge import BridgeModule, Catalog, Fp8Cell, ProbeCell, SmokeCell
from ..catalog.bridge import Target as TargetRow
from ..errors import Exit, NothingSelected, exit_for
from ..evidence.receipt import Outcome, cell_id, write_receipt
from ..evidence.values import Frozen, Result
from ..process import Processes
from .cell import Cell, own_folder
from .fleet import Progress, Ran, Room, plan_jobs, read_gpus, run_cells, run_here, share_cores
from .interpreter import host_interpreter
from .plan import SWITCH, RunOptions, choose_names, find_target, limit_of
from .slurm import Cluster, SlurmJobs, list_options, plan_job
from .stacks import (
    Make,
    Spec,
    Stack,
    find_environments,
    make_environment,
    plan_cells,
    prepare_stack,
    resolve_environment,
)
from .venv import cpu_interpreter

NATIVE: Final = "native"  # the stack without Transformer Engine, as cells name it
Launcher = Literal["local", "slurm"]


@dataclass(frozen=True)
class MatrixOptions(RunOptions):
    """What is run, and how.

    Attributes:
        targets: ids of targets.
        stacks: ids of rows of matrix/stacks.toml, `native`, or names of `specs`; without one the pinned stack on
            targets with a GPU, and `native` on others.
        specs: environments that a person described.
        cells: whole cell ids, or patterns of them; all without one.
        launcher, cluster: what runs the jobs.
    """

    targets: tuple[str, ...]
    stacks: tuple[str, ...] = ()
    specs: tuple[Spec, ...] = ()
    cells: tuple[str, ...] = ()
    launcher: Launcher = "local"
    cluster: Cluster = field(default_factory=Cluster)


class MatrixCell(Frozen):
    """How one cell of a run ended.

    Attributes:
        seconds: that its process took; 0 where it is unknown.
        retries: every infrastructure fault before the last attempt, in words.
        kept: its receipt is of an earlier run.
        node: that it ran on; empty where it is unknown.
    """

    cell: str
    stack: str
    target: str
    probe: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    retries: tuple[str, ...] = ()
    kept: bool = False
    node: str = ""


class MatrixRun(Result):
    """A run of many cells.

    Attributes:
        launcher: "local" or "slurm".
        folder: of the receipts.
        seconds: wall-clock time of this start.
        cells: one for every cell that was selected, in the order of the plan.
        unmade: not one of the stacks could be made usable.
    """

    schema_id: Literal["megacpp-validate/matrix/1"] = "megacpp-validate/matrix/1"
    launcher: str
    folder: str
    seconds: float
    cells: tuple[MatrixCell, ...]
    unmade: bool = False

    @property
    def exit(self) -> Exit:
        """Closed by a breakage; not open where a cell did not run, which is lost evidence and no breakage."""
        outcomes = {cell.outcome for cell in self.cells}
        bad = {outcome for outcome in outcomes if not outcome.is_good}
        found = exit_for(breaks=bool(bad - {Outcome.NOT_RUN}), lacks=bool(bad) or not outcomes)
        return Exit.NO_ENVIRONMENT if found is Exit.EVIDENCE_MISSING and self.unmade else found


class PlannedCell(Frozen):
    """One cell that would be run.

    Attributes:
        gpus: that its job gets.
        seconds: that it is expected to take.
        limit_s: that it may take.
        asks: options that `sbatch` would be given; empty for a run on this machine.
    """

    cell: str
    stack: str
    target: str
    probe: str
    gpus: int
    seconds: float
    limit_s: float
    asks: tuple[str, ...] = ()


class MatrixPlan(Result):
    """What would be run; nothing was started to know it."""

    schema_id: Literal["megacpp-validate/matrix-plan/1"] = "megacpp-validate/matrix-plan/1"
    launcher: str
    folder: str
    cells: tuple[PlannedCell, ...]


@dataclass(frozen=True)
class SelectedCell:
    """One cell of the matrix: a stack on a target, and the row of its probe."""

    stack: str
    target: TargetRow
    row: BridgeModule | ProbeCell

    @property
    def cell(self) -> str:
        """The join key."""
        return cell_id(self.stack, self.target.id, self.row.id)

    @property
    def gpus(self) -> int:
        """That a machine must have for it: one for each rank that it trains in."""
        ranks = self.row.ranks if isinstance(self.row, SmokeCell) else 1
        return ranks if self.target.arch else 0


def choose_cells(catalog: Catalog, options: MatrixOptions) -> tuple[SelectedCell, ...]:
    """The selected cells by target, then by stack, in the order of the matrix; one at least.

    Raises:
        WrongArguments: a target, stack, probe or whole cell id that does not exist.
        NothingSelected: what is named has nothing in common.
    """
    names = [spec.name for spec in options.specs]
    rows: list[BridgeModule | ProbeCell] = [
        *catalog.modules, *catalog.compositions, *catalog.fp8, *catalog.smoke,
    ]  # fmt: skip
    choose_names("stack", [NATIVE, *(row.id for row in catalog.stacks), *names], options.stacks)
    choose_names("probe", [row.id for row in rows], options.probes)
    own, releases = tuple(names), {row.id for row in catalog.stacks} - set(names)
    found = [
        SelectedCell(stack, target, row)
        for target in (find_target(catalog, name) for name in dict.fromkeys(options.targets))
        for stack in dict.fromkeys(options.stacks or own or (catalog.pinned.id if target.arch else NATIVE,))
        # A row of matrix/stacks.toml is Transformer Engine, which has no kernels without a GPU.
        if target.arch or stack not in releases
        for row in rows
        if _is_there(row, target, stack) and (not options.probes or row.id in options.probes)
    ]
    whole = [pattern for pattern in options.cells if not frozenset("*?[").intersection(pattern)]
    choose_names("cell", [cell.cell for cell in found], whole)
    chosen = tuple(
        cell for cell in found if not options.cells or any(fnmatchcase(cell.cell, name) for name in options.cells)
    )
    if not chosen:
        raise NothingSelected(
            "no cell is selected. Likely cause: the stacks, probes and cells that are named have nothing in common. "
            "Next step: leave one of them out; --plan shows what is selected."
        )
    return chosen


def _is_there(row: BridgeModule | ProbeCell, target: TargetRow, stack: str) -> bool:
    if isinstance(row, SmokeCell):
        return target.id in row.targets
    return not isinstance(row, Fp8Cell) or (bool(target.arch) and not (row.needs_te and stack == NATIVE))


def plan_matrix(catalog: Catalog, options: MatrixOptions) -> MatrixPlan:
    """What would be run; no process is needed to know it. Raises as `choose_cells`."""
    rows = []
    for cell in choose_cells(catalog, options):
        limit_s = limit_of(cell.row, options.limit_s)
        job = plan_job(options.cluster, cell.target.id, gpus=cell.gpus, limit_s=limit_s)
        rows.append(
            PlannedCell(
                cell=cell.cell, stack=cell.stack, target=cell.target.id, probe=cell.row.id, gpus=cell.gpus,
                seconds=cell.row.seconds, limit_s=limit_s,
                asks=list_options(job) if options.launcher == "slurm" else (),
            )
        )  # fmt: skip
    folder = str(options.receipts)
    return MatrixPlan(launcher=options.launcher, folder=folder, cells=tuple(rows))


def run_matrix(catalog: Catalog, options: MatrixOptions, progress: Progress = lambda _: None) -> MatrixRun:
    """Make every stack usable, and run every selected cell that has no receipt.

    Raises:
        WrongArguments, NothingSelected: as `choose_cells`; or the folder cannot be written.
        InfrastructureFailed: another run writes to the folder; the scheduler does not answer, or refuses a job.
        OSError: the disk is full.
    """
    started, processes, folder = time.monotonic(), Processes(), options.receipts.absolute()
    selected = choose_cells(catalog, options)
    if options.launcher == "local":
        options = replace(options, jobs=plan_jobs(options.jobs))
    stacks = _prepare_stacks(catalog, selected, options, processes)
    cells: list[Cell] = []
    for (name, _), group in groupby(selected, lambda one: (one.stack, one.target.id)):
        chosen = list(group)
        stack, target = stacks[name, bool(chosen[0].target.arch)], chosen[0].target
        stack = stack.on(target) if options.launcher == "local" else stack  # on a cluster the node checks
        rows = [one.row for one in chosen]
        planned = plan_cells(stack, target, rows, folder, seed=options.seed, limit_s=options.limit_s)
        cells += [replace(cell, gpus=one.gpus) for one, cell in zip(chosen, planned, strict=True)]
    with own_folder(folder):
        ended = _run(cells, options, processes, progress)
        for ran in ended:  # what another machine wrote stays what it is
            place = folder / f"{ran.receipt.cell}.json"
            if ran.receipt.outcome is Outcome.NOT_RUN and not place.exists():
                write_receipt(ran.receipt, place)
    return MatrixRun(
        launcher=options.launcher, folder=str(options.receipts),
        seconds=round(time.monotonic() - started, 2), cells=tuple(map(_to_row, ended)),
        unmade=not any(stack.environment.python for stack in stacks.values()),
    )  # fmt: skip


def _run(cells: Sequence[Cell], options: MatrixOptions, processes: Processes, progress: Progress) -> tuple[Ran, ...]:
    """Run them on this machine, each on GPUs of its own, or as jobs."""
    fresh, retries = options.fresh, options.cluster.retries
    if options.launcher == "local":
        gpus = read_gpus(os.environ)
        room = Room(max(options.jobs, len(gpus)), gpus)
        return run_here(cells, room, processes, fresh=fresh, retries=retries, progress=progress)
    jobs = SlurmJobs(options.cluster, cells[0].folder, options.jobs, fresh)
    return run_cells(cells, jobs, fresh=fresh, retries=retries, progress=progress)


def _to_row(ran: Ran) -> MatrixCell:
    names = ("cell", "stack", "target", "probe", "outcome", "reason", "retries")
    same = {name: getattr(ran.receipt, name) for name in names}
    return MatrixCell(**same, seconds=ran.receipt.seconds.get("total", 0.0), kept=ran.reused, node=ran.node)


def _prepare_stacks(
    catalog: Catalog, selected: Sequence[SelectedCell], options: MatrixOptions, processes: Processes
) -> dict[tuple[str, bool], Stack]:
    """The stacks by name, and whether they are for a GPU."""
    keys = tuple(dict.fromkeys((cell.stack, bool(cell.target.arch)) for cell in selected))
    specs = {spec.name: spec for spec in options.specs}
    looks = any(stack != NATIVE and stack not in specs for stack, _ in keys)
    user = share_cores(os.environ, options.jobs) if options.launcher == "local" else dict(os.environ)
    found = find_environments(options.overlays, user, options.python) if looks else ()
    stacks, releases = dict[tuple[str, bool], Stack](), {row.id: row for row in catalog.stacks}
    for name, gpus in keys:
        variables = {**user, SWITCH: "1"} if gpus and name == NATIVE else user
        spec, row = specs.get(name), releases.get(name)
        make: Make = partial(host_interpreter if gpus else cpu_interpreter, variables, options.python)
        if spec is not None:
            make = partial(make_environment, spec, variables, make)
        elif row is not None:
            make = partial(resolve_environment, row.te, found)
        stacks[name, gpus] = prepare_stack(name, make, variables, processes)
    return stacks
