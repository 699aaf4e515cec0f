"""The verb of the matrix: what it runs, and the exit code of each answer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Final

import typer

from ...catalog.bridge import Catalog, read_catalog
from ...environments.chosen import Spec, SpecInvalid, read_spec
from ...environments.environment import NoEnvironment
from ...environments.fanout.choose import Planned, Wish, choose_cells
from ...environments.fanout.cluster import Cluster, ClusterInvalid, read_cluster
from ...environments.fanout.decide import FIREWALL
from ...environments.fanout.drive import Cancelled, Drive
from ...environments.fanout.events import Done, Rules
from ...environments.fanout.launcher import JobRefused, Launcher, SchedulerDown
from ...environments.fanout.local import LocalLauncher, read_gpus
from ...environments.fanout.prepare import Carried, Prepared, Source, prepare
from ...environments.fanout.pyxis import has_pyxis, require_pyxis
from ...environments.fanout.slurm import SlurmLauncher
from ...environments.fanout.slurm_words import choose_options
from ...environments.fanout.state import StateDamaged
from ...environments.interpreter import read_commit
from ...environments.matrix_result import MatrixCell, MatrixPlan, MatrixRun, PlannedCell
from ...environments.plan import UnknownTarget
from ...environments.restart import FolderTaken
from ...environments.room import count_cores, share_cores
from ...environments.schedule import plan_jobs
from ...evidence.receipt import Receipt
from ...evidence.receipt_file import write_receipt
from ...process import Processes, Stopped
from ...report.markdown.matrix import tell_matrix, tell_matrix_plan
from ...report.terminal.matrix import render_matrix, render_matrix_plan
from ..app import TOOL, Exit, foreseen, refuse, refuse_receipts
from ..told_options import PageFormat
from ..whole_telling import tell_whole
from .matrix_progress import MatrixProgress

_LOCAL_POLL_S: Final = 0.2


@dataclass(frozen=True)
class MatrixAsked:
    """The arguments of the verb; None where everything is selected.

    Attributes:
        jobs: at a time; 0 for what suits.
        wait_s: for all cells; 0 for as long as it takes.
    """

    targets: tuple[str, ...]
    stacks: tuple[str, ...] | None
    environments: tuple[str, ...]
    overlays: tuple[Path, ...]
    probes: tuple[str, ...] | None
    cells: tuple[str, ...] | None
    launcher: str
    cluster: Path | None
    jobs: int
    limit_s: float
    wait_s: float
    fresh: bool
    seed: int
    receipts: Path
    python: str


@foreseen({
    UnknownTarget: Exit.WRONG_ARGUMENTS, SpecInvalid: Exit.WRONG_ARGUMENTS, ClusterInvalid: Exit.WRONG_ARGUMENTS,
    NoEnvironment: Exit.NO_ENVIRONMENT, FolderTaken: Exit.INFRASTRUCTURE, StateDamaged: Exit.INFRASTRUCTURE,
    SchedulerDown: Exit.INFRASTRUCTURE, JobRefused: Exit.INFRASTRUCTURE,
})  # fmt: skip
def run_matrix(
    matrix: Path | None, asked: MatrixAsked, fmt: PageFormat, output: Path | None, *, only_plan: bool
) -> None:
    """Run the cells; closed where anything is red, and not open where anything did not run."""
    catalog, cluster = read_catalog(matrix), read_cluster(asked.cluster)
    _refuse_targets(catalog, cluster)
    specs = tuple(read_spec(text) for text in asked.environments)
    planned = _choose(catalog, asked, specs)
    if only_plan:
        plan = _plan(planned, asked, cluster)
        tell_whole(
            plan, fmt, output, render=lambda console: render_matrix_plan(plan, console=console),
            markdown=partial(tell_matrix_plan, plan),
        )  # fmt: skip
        raise typer.Exit(Exit.OPEN)
    run, unmade = _observe(catalog, planned, asked, cluster, specs)
    tell_whole(
        run, fmt, output, render=lambda console: render_matrix(run, console=console), markdown=partial(tell_matrix, run)
    )
    if run.breaks:
        raise typer.Exit(Exit.CLOSED)
    if unmade:
        raise typer.Exit(Exit.NO_ENVIRONMENT)
    raise typer.Exit(Exit.OPEN if run.holds else Exit.EVIDENCE_MISSING)


def _choose(catalog: Catalog, asked: MatrixAsked, specs: Sequence[Spec]) -> tuple[Planned, ...]:
    """The cells that are asked for, one at least."""
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        refuse("two environments have one name. Next step: give each a name of its own.", Exit.WRONG_ARGUMENTS)
    wish = Wish(asked.targets, asked.stacks or (), tuple(names), asked.probes or (), asked.cells or ())
    emptied = () in (asked.stacks, asked.probes, asked.cells) or not asked.targets
    if emptied or not (planned := choose_cells(catalog, wish)):
        refuse(
            "no cell is selected. Likely cause: the stacks, probes and cells that are named have nothing in common, or "
            "one of them is empty. Next step: leave one of them out; --plan shows what is selected.",
            Exit.NOTHING_SELECTED,
        )
    return planned


def _refuse_targets(catalog: Catalog, cluster: Cluster) -> None:
    known = [target.id for target in catalog.targets]
    if unknown := [name for name in cluster.target if name not in known]:
        raise ClusterInvalid(
            f"the settings of the scheduler name the target {', '.join(unknown)}, which there is not. Next step: "
            f"choose from {', '.join(known)}."
        )


def _plan(planned: Sequence[Planned], asked: MatrixAsked, cluster: Cluster) -> MatrixPlan:
    """What would be run; no process is needed to say it."""
    cells = {cell.cell for cell in planned}
    rows = []
    for cell in planned:
        limit_s = cell.limit_s(asked.limit_s)
        ground = cell.cell.removesuffix(cell.probe) + FIREWALL
        needs = cell.stands_on_te and cell.probe != FIREWALL and ground in cells
        asks = choose_options(
            cluster, target=cell.target.id, gpus=cell.gpus, limit_s=limit_s, name="JOB", folder=Path("FOLDER")
        )
        rows.append(
            PlannedCell(
                cell=cell.cell,
                stack=cell.stack,
                target=cell.target.id,
                probe=cell.probe,
                gpus=cell.gpus,
                seconds=cell.row.seconds,
                limit_s=limit_s,
                after=ground if needs else "",
                asks=asks if asked.launcher == "slurm" else (),
            )
        )
    return MatrixPlan(tool=TOOL, launcher=asked.launcher, folder=str(asked.receipts), cells=tuple(rows))


def _observe(
    catalog: Catalog, planned: Sequence[Planned], asked: MatrixAsked, cluster: Cluster, specs: tuple[Spec, ...]
) -> tuple[MatrixRun, bool]:
    """Run them, and whether not one of the stacks could be made usable."""
    started = time.monotonic()
    here = asked.launcher == "local"
    jobs = plan_jobs(count_cores(), asked.jobs)
    variables = share_cores(os.environ, jobs) if here else dict(os.environ)
    source = Source(
        specs=specs,
        overlays=asked.overlays,
        python=asked.python,
        variables=variables,
        container_python="" if here else _choose_container_python(cluster),
        here=here,
    )
    processes = Processes()
    carried = Carried(asked.seed, TOOL, read_commit(), asked.limit_s)
    prepared = prepare(catalog, planned, source, carried, processes)
    done: dict[str, Done] = {}
    if prepared.works:
        launcher, rules = _make_launcher(asked, cluster, jobs, variables)
        with _stopping() as stop, MatrixProgress() as progress:
            drive = Drive(prepared.works, launcher, asked.receipts.absolute(), rules, stop, progress)
            try:
                done = drive.run()
            except (Cancelled, Stopped, KeyboardInterrupt):
                refuse(
                    "interrupted: jobs that were on their way are cancelled. Receipts that came are in "
                    f"{asked.receipts}; the same command goes on from there.",
                    Exit.INTERRUPTED,
                )
            except OSError as fault:
                refuse_receipts(asked.receipts, fault)
    _write_lost(prepared.lost, asked.receipts)
    cells = tuple(_to_cell(done.get(cell.cell), prepared, cell) for cell in planned)
    seconds = round(time.monotonic() - started, 2)
    folder = str(asked.receipts)
    return MatrixRun(tool=TOOL, launcher=asked.launcher, folder=folder, seconds=seconds, cells=cells), prepared.unmade


def _write_lost(lost: Sequence[Receipt], folder: Path) -> None:
    """A receipt of each cell that cannot run here, where there is none: what another machine wrote stays what it is."""
    try:
        for receipt in lost:
            if not (place := folder / f"{receipt.cell}.json").exists():
                write_receipt(receipt, place)
    except OSError as fault:
        refuse_receipts(folder, fault)


def _choose_container_python(cluster: Cluster) -> str:
    """The interpreter in images, where the scheduler makes containers of them; empty where it does not.

    Raises:
        NoEnvironment: the plugin is demanded and not there.
    """
    if cluster.containers == "pyxis":
        require_pyxis(os.environ)
    use = cluster.containers == "pyxis" or (cluster.containers == "auto" and has_pyxis(os.environ))
    return cluster.python if use else ""


def _make_launcher(
    asked: MatrixAsked, cluster: Cluster, jobs: int, variables: dict[str, str]
) -> tuple[Launcher, Rules]:
    waits = {"retries": cluster.retries, "wait_s": asked.wait_s, "fresh": asked.fresh}
    if asked.launcher == "local":
        rules = Rules(poll_s=_LOCAL_POLL_S, grace_s=0.0, patience_s=0.0, **waits)  # type: ignore[arg-type]
        gpus = read_gpus(variables)
        return LocalLauncher(asked.jobs or max(jobs, len(gpus)), gpus), rules
    rules = Rules(poll_s=cluster.poll_s, grace_s=cluster.grace_s, patience_s=cluster.patience_s, **waits)  # type: ignore[arg-type]
    given = cluster.model_copy(update={"at_a_time": asked.jobs}) if asked.jobs else cluster
    return SlurmLauncher(given, variables), rules


@contextmanager
def _stopping() -> Iterator[Event]:
    """An event that the first interrupt sets, so that no step is cut in two; the second one ends everything at once."""
    stop = Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            signal.default_int_handler(number, frame)
        stop.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _to_cell(done: Done | None, prepared: Prepared, planned: Planned) -> MatrixCell:
    receipt = done.receipt if done else _find_lost(prepared, planned.cell)
    return MatrixCell(
        cell=receipt.cell,
        stack=receipt.stack,
        target=receipt.target,
        probe=receipt.probe,
        outcome=receipt.outcome,
        reason=receipt.reason,
        seconds=receipt.seconds.get("total", 0.0),
        retries=receipt.retries,
        kept=done.kept if done else False,
        node=done.node if done else "",
    )


def _find_lost(prepared: Prepared, cell: str) -> Receipt:
    return next(receipt for receipt in prepared.lost if receipt.cell == cell)
