"""Copies of a release with faults in them are made, cells run in each, and what they leave is judged."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ... import TOOL
from ...catalog.bridge import Catalog
from ...catalog.bridge import Target as TargetRow
from ...catalog.te_faults import EditDoesNotFit, read_fp8_faults, read_te_faults
from ...environments.cell import Cell, own_folder
from ...environments.chosen import find_environments
from ...environments.facts import Facts, read_facts
from ...environments.faulty_overlay import make_faulty
from ...environments.fleet import (
    CONTEXT_MIB,
    Event,
    Fleet,
    Need,
    count_cores,
    expect_need,
    plan_jobs,
    read_room,
    share_cores,
)
from ...environments.interpreter import InterpreterEnvironment, host_interpreter, put_over, read_commit
from ...environments.plan import find_target, plan_blank, plan_fp8, plan_parity, why_not_here
from ...errors import NoEnvironment, writing_to
from ...evidence.receipt import Receipt
from ...evidence.store import ReceiptInvalid, read_receipts
from ...probes.order import Order
from ...process import Processes
from . import plants
from .plants import BlamePlan, CopyRun, Fp8Plan, Troubles
from .scores import BlameScore, Fp8FaultResult, Fp8FaultScore

_MAKERS: Final = 8  # copies that are made at a time: it is the disk that they wait for
Say = Callable[[str], object]


@dataclass(frozen=True)
class PlantOptions:
    """What is planted and where it runs.

    Attributes:
        faults: ids; empty for all of the release.
        releases: of Transformer Engine; empty for the pinned one.
        receipts: folder; a cell with a receipt there does not run again.
        copies: folder for the copies; None for one of this user's below the temporary files.
        judge_only: run nothing.
        jobs: cells at a time; 0 for what suits the cores.
        limit_s: seconds that one cell may take.
        matrix: folder; the project's own where it is None.
        shard, clean, timed_clean: see `plants.plan_blame`.
        earlier: receipts of earlier runs, oldest first.
        held_out: faults that no check was written for.
    """

    faults: tuple[str, ...]
    releases: tuple[str, ...]
    target: str
    overlays: tuple[Path, ...]
    receipts: Path
    copies: Path | None
    judge_only: bool
    seed: int
    jobs: int
    limit_s: float
    python: str
    matrix: Path | None = None
    shard: tuple[int, int] = (1, 1)
    clean: int = 0
    timed_clean: int = 0
    earlier: tuple[Path, ...] = ()
    held_out: bool = False


def run_blame_score(catalog: Catalog, options: PlantOptions, say: Say) -> BlameScore:
    """Plant, run, judge: is the right module blamed for each fault?

    Raises:
        WrongArguments, NoEnvironment: no such row or target; no interpreter, or no such release.
        OSError: receipts cannot be written.
    """
    started = time.monotonic()
    target = find_target(catalog, options.target)
    modules = tuple(module.id for module in catalog.modules)
    release = next(iter(options.releases), catalog.pinned.te)
    plan = plants.plan_blame(
        read_te_faults(modules, options.matrix), release, options.faults, shard=options.shard, controls=options.clean,
        timed_controls=options.timed_clean, seed=options.seed,
    )  # fmt: skip
    troubles = Troubles()
    where = _run_whole(catalog, target, plan, options, troubles, say)
    judged = plants.judge_blame(plan, _read_runs(plan, options.receipts, troubles), catalog.modules, troubles)
    for folder in reversed(options.earlier):
        runs = _read_runs(plan, folder, Troubles())
        judged = plants.join_earlier(plants.judge_blame(plan, runs, catalog.modules, Troubles()), judged)
    return BlameScore(
        tool=TOOL,
        target=target.id,
        environment="; ".join([where, *(f"receipts of {place}" for place in options.earlier)]),
        modules=modules,
        faults=judged[0],
        controls=judged[1],
        seconds=round(time.monotonic() - started, 1),
    )


def run_fp8_faults(catalog: Catalog, options: PlantOptions, say: Say) -> Fp8FaultScore:
    """Plant, run, judge: does the right check see each fault? Raises as `run_blame_score`."""
    started = time.monotonic()
    target = find_target(catalog, options.target)
    known = read_fp8_faults((cell.id for cell in catalog.fp8), options.matrix, held_out=options.held_out)
    releases = options.releases or (catalog.pinned.te,)
    plans = [plants.plan_fp8(known, release, options.faults, options.seed) for release in releases]
    faults: list[Fp8FaultResult] = []
    places = []
    for plan in plans:
        troubles = Troubles()
        places.append(_run_whole(catalog, target, plan, options, troubles, say))
        faults += plants.judge_fp8(plan, _read_runs(plan, options.receipts, troubles), troubles)
    return Fp8FaultScore(
        tool=TOOL,
        target=target.id,
        environment="; ".join(dict.fromkeys(places)),
        held_out=options.held_out,
        faults=tuple(faults),
        seconds=round(time.monotonic() - started, 1),
    )


@dataclass(frozen=True)
class _CopyHost:
    """Where copies run: the interpreter without overlays, the folder that is copied, and what stands behind it."""

    bare: InterpreterEnvironment
    release: str
    clean: Path
    behind: tuple[Path, ...]
    facts: Facts
    copies: Path

    def open(self, run: CopyRun) -> InterpreterEnvironment:
        """A copy with a fault, or without one, or the clean folder itself. Raises as `make_faulty`."""
        place = make_faulty(self.clean, self.release, run.fault, self.copies) if run.copied else self.clean
        return put_over(self.bare, (place, *self.behind), f"{run.name} of Transformer Engine {self.release}")


def _run_whole(
    catalog: Catalog, target: TargetRow, plan: BlamePlan | Fp8Plan, options: PlantOptions, troubles: Troubles, say: Say
) -> str:
    with writing_to(options.receipts, "receipts", "--receipts"):
        return _run_plan(catalog, target, plan, options, troubles, say)


def _run_plan(
    catalog: Catalog, target: TargetRow, plan: BlamePlan | Fp8Plan, options: PlantOptions, troubles: Troubles, say: Say
) -> str:
    """Make every copy and run every cell that has no receipt yet; where that was, or why it was not."""
    folder = options.receipts.absolute() / f"te{plan.release}"
    if options.judge_only:
        return f"receipts of {folder}"
    processes = Processes()
    variables = share_cores(os.environ, plan_jobs(count_cores(), options.jobs))
    bare = host_interpreter(variables, options.python)
    if reason := why_not_here(target, facts := read_facts(bare, processes)):
        troubles.everything = f"not-run: {reason}"
        return troubles.everything
    host = _find_clean(bare, plan.release, options, variables, processes)
    with own_folder(folder):
        cells = list(_make_cells(catalog, target, plan, options, host, folder, troubles))
        room = read_room(variables, gpu=bool(target.arch), jobs=options.jobs)
        left = Counter(cell.folder for cell, _ in cells)

        def progress(event: Event) -> None:
            left[event.cell.folder] -= event.receipt is not None
            if event.receipt is not None and not left[event.cell.folder]:
                say(f"{event.done:4} of {event.total} cells: {event.cell.folder.name}")

        for timed in (False, True):  # what times waits for what computes to end
            wave = [(cell, need) for cell, need in cells if cell.order.times is timed]
            Fleet(room, fresh=False, progress=progress).run(wave, processes)
    gpu = facts.gpu.name if facts.gpu else "no GPU"
    return f"{host.facts.executable}, Transformer Engine {host.release} of {host.clean}, {gpu}"


def _find_clean(
    bare: InterpreterEnvironment, release: str, options: PlantOptions, variables: Mapping[str, str],
    processes: Processes,
) -> _CopyHost:  # fmt: skip
    """The folder of the release that copies are made of.

    Raises:
        NoEnvironment: the release lies in no overlay folder.
    """
    every = [
        one for one in find_environments(options.overlays, variables, options.python) if one.environment is not None
    ]
    found = next((one.environment for one in every if one.release == release), None)
    if found is None or not found.folders:
        raise NoEnvironment(
            f"Transformer Engine {release} lies in no overlay folder of this host (releases here: "
            f"{', '.join(sorted({one.release for one in every})) or 'none'}). Likely cause: no --overlays and no "
            "MEGACPP_OVERLAYS, or the release is installed into the interpreter itself, which is not copied. Next "
            "step: name with --overlays the folder that holds it, as `pip install --target` makes one."
        )
    clean, *behind = found.folders
    copies = options.copies or Path(tempfile.gettempdir(), f"megacpp-te-copies-{os.getuid()}")
    return _CopyHost(bare, release, clean, tuple(behind), read_facts(found, processes), copies)


def _make_cells(
    catalog: Catalog, target: TargetRow, plan: BlamePlan | Fp8Plan, options: PlantOptions, host: _CopyHost,
    folder: Path, troubles: Troubles,
) -> Iterator[tuple[Cell, Need]]:  # fmt: skip
    """The cells of every run whose copy can be made."""
    rows = {module.id: module for module in catalog.modules}
    fp8 = {row.id: row for row in catalog.fp8}
    blank = plan_blank(target, host.facts, host.bare.variables, seed=options.seed, tool=TOOL, commit=read_commit())
    orders = plan_fp8(catalog, blank, ()) if isinstance(plan, Fp8Plan) else plan_parity(catalog, blank, ())
    for run, environment in _open_copies(host, plan.runs, troubles):
        for order in orders:
            if run.cells and order.probe not in run.cells:
                continue
            own: Order = replace(
                order, seed=run.seed, quick=run.quick, times=run.times, only_times=run.times,
                turnstile="" if run.cells else str(folder / "turnstile"), environment=environment.identity,
            )  # fmt: skip
            if (cell := fp8.get(order.probe)) is not None and run.cells:
                limit = options.limit_s if run.quick else max(options.limit_s, cell.limit_s)
                need = Need(cell.gpu_memory_mib + CONTEXT_MIB, cell.seconds)
            else:
                limit, need = options.limit_s, expect_need(own, rows[own.probe])
            yield Cell(environment, own, folder / run.name, limit), need


def _open_copies(
    host: _CopyHost, runs: Sequence[CopyRun], troubles: Troubles
) -> list[tuple[CopyRun, InterpreterEnvironment]]:
    """Every copy that can be made; `troubles` has why another cannot."""

    def make(run: CopyRun) -> tuple[CopyRun, InterpreterEnvironment] | None:
        try:
            environment = host.open(run)
            _ = environment.identity  # reads every file, side by side with the other copies
        except EditDoesNotFit as stale:
            troubles.not_planted[run.name] = str(stale)
        except (NoEnvironment, OSError) as why:
            troubles.not_run[run.name] = f"its copy cannot be made: {why}"
        else:
            return run, environment
        return None

    with ThreadPoolExecutor(_MAKERS) as pool:
        return [one for one in pool.map(make, runs) if one is not None]


def _read_runs(plan: BlamePlan | Fp8Plan, receipts: Path, troubles: Troubles) -> dict[str, dict[str, Receipt]]:
    """Receipts of every run by probe; what an earlier run left is no answer where this one did not run at all."""
    found: dict[str, dict[str, Receipt]] = {}
    for run in () if troubles.everything else plan.runs:
        try:
            place = receipts.absolute() / f"te{plan.release}" / run.name
            found[run.name] = {receipt.probe: receipt for receipt in read_receipts(place).found.values()}
        except ReceiptInvalid:  # no receipt there can be believed
            found[run.name] = {}
    return found
