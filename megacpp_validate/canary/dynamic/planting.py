"""Planted faults: each is laid into a copy or a run, probes run, and receipts are judged.

Three suites: `blame-score` runs every probe in a copy of Transformer Engine and judges who is blamed. `fp8-faults` runs
the FP8 cells that a fault names in a copy and judges which checks fail. `smoke-faults` trains with a fault between
ranks and judges which check names its place.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import Field, JsonValue, ValidationError

from ...catalog import planted
from ...catalog.bridge import BridgeModule, Catalog
from ...catalog.bridge import Target as TargetRow
from ...catalog.planted import EditDoesNotFit, Fp8Fault, PlantedFault, TeFault
from ...diagnosis.blame import is_red
from ...environments import plan as planning
from ...environments.cell import Cell, own_folder
from ...environments.faulty_overlay import make_faulty
from ...environments.fleet import Progress, Room, plan_jobs, run_here, share_cores
from ...environments.host_session import run_session
from ...environments.interpreter import InterpreterEnvironment, host_interpreter, put_over, read_facts
from ...environments.stacks import find_environments, resolve_environment
from ...errors import NoEnvironment, WrongArguments
from ...evidence.receipt import Outcome, Receipt
from ...evidence.store import read_receipts
from ...evidence.values import Frozen
from ...probes.order import Order
from ...process import Processes
from .scores import FaultScore, ScoreRow, Sighting, Verdict
from .step import StackReceipts, compare_stacks

CLEAN: Final = "clean"  # the run of the folder that is copied
_Row = TypeVar("_Row", bound=PlantedFault)
Receipts = Mapping[str, Receipt]
"""Receipts of one run by probe."""
Trouble = tuple[Verdict, str]
"""Why a run has no receipts: `NOT_PLANTED` or `NOT_RUN`, and the reason."""


@dataclass(frozen=True)
class PlantOptions(planning.RunOptions):
    """What is planted and where it runs.

    Attributes:
        faults: ids; empty for all of the release.
        release: of Transformer Engine; empty for the pinned one.
        clean: copies without a fault.
        held_out: faults that no check was written for.
    """

    faults: tuple[str, ...]
    release: str
    clean: int = 0
    held_out: bool = False


def run_planted(
    catalog: Catalog, suite: Literal["blame-score", "fp8-faults"], options: PlantOptions, progress: Progress
) -> FaultScore:
    """Plant, run, judge: is the right module blamed, or does the right FP8 check see each fault?

    Raises:
        WrongArguments, NoEnvironment: no such row or target; no interpreter, or no such release.
    """
    started = time.monotonic()
    target = planning.find_target(catalog, options.target)
    release = options.release or catalog.pinned.te
    known: Sequence[TeFault | Fp8Fault]
    if suite == "blame-score":
        known = planted.read_te_faults(catalog)
    else:
        known = planted.read_fp8_faults(catalog, held_out=options.held_out)
    faults = choose_faults(known, release, options.faults)
    runs = plan_copies(faults, controls=options.clean, seed=options.seed)
    seen, troubles, where = _run_copies(catalog, target, release, runs, options, progress)
    rows, clean = judge_copies(release, runs, seen, troubles, catalog.modules)
    return FaultScore(
        suite=suite, target=target.id, environment=where, faults=rows, clean=clean,
        seconds=round(time.monotonic() - started, 1),
    )  # fmt: skip


# --- the plan -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CopyRun:
    """Some cells once with the smallest shapes, in one copy of a release.

    Attributes:
        name: of its folder below that of the release; `CLEAN` for the clean run, which makes no copy.
        fault: what is planted; None in the clean run and in a control.
        seed: of weights and inputs.
        cells: FP8 cells that run; empty for every probe.
    """

    name: str
    fault: PlantedFault | None = None
    seed: int = 0
    cells: tuple[str, ...] = ()


def choose_faults(faults: Sequence[_Row], release: str, wanted: Collection[str]) -> list[_Row]:
    """The faults of a release that are named; all of the release where none is.

    Raises:
        WrongArguments: an id that no row has, or that is not written for the release.
    """
    chosen = [fault for fault in planning.choose_rows("fault", faults, tuple(wanted)) if release in fault.releases]
    if not chosen or len(chosen) < len(set(wanted)):
        lacking = ", ".join(sorted(set(wanted) - {fault.id for fault in chosen})) or "every fault"
        raise WrongArguments(
            f"{lacking}: not written for Transformer Engine {release}. Next step: choose a release that the rows of "
            "the matrix name, or add an edit for this release to the rows."
        )
    return chosen


def plan_copies(faults: Sequence[PlantedFault], *, controls: int = 0, seed: int = 0) -> tuple[CopyRun, ...]:
    """The clean run, then a copy for each fault, then copies without a fault, which take the seeds after `seed`.

    The clean run has every FP8 cell that a fault names.
    """
    named = [(*one.cells, one.green) if isinstance(one, Fp8Fault) else () for one in faults]
    copies = [CopyRun(f"faults/{one.id}", one, seed, cells) for one, cells in zip(faults, named, strict=True)]
    copies += [CopyRun(f"controls/control-{one}", seed=seed + one) for one in range(1, controls + 1)]
    return (CopyRun(CLEAN, None, seed, tuple(dict.fromkeys(chain(*named)))), *copies)


# --- the judge ------------------------------------------------------------------------------------------------------


def judge_copies(
    release: str, runs: Sequence[CopyRun], seen: Mapping[str, Receipts], troubles: Mapping[str, Trouble],
    modules: Sequence[BridgeModule] = (),
) -> tuple[tuple[ScoreRow, ...], tuple[ScoreRow, ...]]:  # fmt: skip
    """Every fault, and every control and every cell that must stay green, judged.

    Args:
        seen: receipts by name of the run; a run without any is one that did not run.
        troubles: by name of the run.
        modules: of the blame, in dependency order.
    """
    faults: list[ScoreRow] = []
    clean: list[ScoreRow] = []
    before = seen.get(CLEAN, {})
    for run in (one for one in runs if one.name != CLEAN):
        copy, fault = seen.get(run.name, {}), run.fault
        row = ScoreRow(
            id=fault.id if fault else run.name.removeprefix("controls/"), where=release, verdict=Verdict.NOT_RUN,
            says=fault.says if fault else f"A copy without a fault, with seed {run.seed}.",
            seconds=round(sum(receipt.seconds.get("total", 0.0) for receipt in copy.values()), 1),
        )  # fmt: skip
        trouble = troubles.get(run.name) or _find_trouble(run, before, copy, modules)
        found: dict[str, Any] = {"verdict": trouble[0], "reason": trouble[1]} if trouble else {}
        if isinstance(fault, Fp8Fault):
            found = {"expected": tuple(Sighting(by=cell, names=tuple(fault.checks)) for cell in fault.cells), **found}
            if not trouble:
                found |= _judge_cells(fault, copy)
                clean.append(_judge_green(fault, row, copy.get(fault.green)))
        elif not trouble:
            found = _judge_blame(run, before, copy, modules)
        if isinstance(fault, TeFault):
            found["expected"] = (Sighting(by=fault.module, names=(fault.cause.value,)),)
        (faults if fault else clean).append(row.model_copy(update=found))
    return tuple(faults), tuple(clean)


def _find_trouble(run: CopyRun, clean: Receipts, copy: Receipts, modules: Sequence[BridgeModule]) -> Trouble | None:
    """Why a copy cannot be judged beside the clean one: cells are missing, or the clean one is red by itself."""
    cells = run.cells or [module.id for module in modules]
    sides = (("the clean copy", clean),) if run.cells else (("the clean copy", clean), ("this copy", copy))
    for side, receipts in sides:
        if missing := [one for one in cells if one not in receipts or receipts[one].outcome is Outcome.NOT_RUN]:
            why = "".join(f": {receipts[one].reason}" for one in missing if one in receipts)
            return Verdict.NOT_RUN, f"{side} has no evidence of {', '.join(missing)}{why}"
    if red := [one for one in cells if not clean[one].outcome.is_good]:
        return Verdict.NOT_RUN, f"the clean copy is red by itself in {', '.join(red)}: nothing to compare with"
    return None


def _judge_blame(run: CopyRun, clean: Receipts, copy: Receipts, modules: Sequence[BridgeModule]) -> dict[str, Any]:
    """Who is blamed in a copy, and what that is worth."""
    sides = [StackReceipts(name, tuple(it.values())) for name, it in ((CLEAN, clean), (run.name, copy))]
    step = compare_stacks(sides[0], sides[1], modules)
    named = ", ".join(f"{culprit.module} ({culprit.cause.value})" for culprit in step.culprits)
    verdict, reason = Verdict.RIGHT, ""
    if not step.culprits and step.lost:
        verdict, reason = Verdict.NOT_RUN, f"no evidence of {'; '.join(map(': '.join, step.lost.items()))}"
    elif not isinstance(fault := run.fault, TeFault):
        verdict = Verdict.FALSE_ALARM if step.culprits else Verdict.QUIET
    elif not step.culprits:
        verdict, reason = Verdict.MISSED, "every module is as it is in the clean copy"
    elif not (right := [culprit for culprit in step.culprits if culprit.module in fault.names]):
        verdict, reason = Verdict.WRONG_MODULE, f"{named} instead of {fault.module}"
    elif len(step.culprits) > 1:
        verdict, reason = Verdict.OTHERS_TOO, f"{named} instead of {fault.module} alone"
    elif right[0].cause not in fault.causes:
        verdict, reason = Verdict.WRONG_CAUSE, f"{named} instead of {fault.cause.value}"
    seen = tuple(Sighting(by=one.module, names=(one.cause.value, *one.cascades)) for one in step.culprits)
    return {"verdict": verdict, "reason": reason, "seen": seen}


def _judge_cells(fault: Fp8Fault, copy: Receipts) -> dict[str, Any]:
    """Which checks fail in the cells of a fault, and what that is worth."""
    red = {cell: list_failed(copy[cell]) for cell in fault.cells if is_red(copy.get(cell))}
    still = ", ".join(cell for cell in fault.cells if cell not in red)
    lost = [f"{cell}: {_why_lost(copy.get(cell))}" for cell in fault.cells if not _ran(copy.get(cell))]
    wrong = [f"{still} stays green"] if still else []
    wrong += [
        f"{cell} is red by {', '.join(failed) or copy[cell].reason}"
        for cell, failed in red.items()
        if not any(map(fault.wants, failed))
    ]
    verdict, reason = Verdict.BY_ANOTHER if wrong else Verdict.CAUGHT, "; ".join(wrong)
    if lost:
        verdict, reason = Verdict.NOT_RUN, f"no evidence of {'; '.join(lost)}"
    elif not red:
        verdict, reason = Verdict.MISSED, f"{still}: as in the clean copy"
    seen = tuple(
        Sighting(by=cell, names=tuple(sorted(failed, key=fault.wants, reverse=True))) for cell, failed in red.items()
    )
    return {"verdict": verdict, "reason": reason, "seen": seen}


def _judge_green(fault: Fp8Fault, row: ScoreRow, receipt: Receipt | None) -> ScoreRow:
    """The cell of a fault that must stay green."""
    found: dict[str, Any] = {"id": f"{fault.id}: {fault.green}", "says": f"{fault.green} must stay green.",
                             "verdict": Verdict.QUIET, "seconds": 0.0}  # fmt: skip
    if not _ran(receipt):
        found |= {"verdict": Verdict.NOT_RUN, "reason": _why_lost(receipt)}
    elif is_red(receipt):
        seen = (Sighting(by=fault.green, names=tuple(list_failed(receipt))),)
        found |= {"verdict": Verdict.FALSE_ALARM, "reason": receipt.reason, "seen": seen}
    return row.model_copy(update=found)


def list_failed(receipt: Receipt) -> list[str]:
    """Checks that failed, and the class of what was raised."""
    failed = [check.name for check in receipt.checks if not check.passed]
    return failed + ([f"raised {receipt.failure.type}"] if receipt.failure is not None else [])


def _ran(receipt: Receipt | None) -> bool:
    return receipt is not None and receipt.outcome not in (Outcome.NOT_RUN, Outcome.BLOCKED)


def _why_lost(receipt: Receipt | None) -> str:
    return "there is no receipt of it" if receipt is None else receipt.reason


# --- the runs -------------------------------------------------------------------------------------------------------


def _run_copies(
    catalog: Catalog, target: TargetRow, release: str, runs: Sequence[CopyRun], options: PlantOptions,
    progress: Progress,
) -> tuple[dict[str, Receipts], dict[str, Trouble], str]:  # fmt: skip
    """Make every copy and run every cell that has no receipt yet.

    Returns:
        Receipts of every run by probe, the runs without any, and where it ran or why it did not.

    Raises:
        NoEnvironment: the release lies in no overlay folder.
    """
    folder = options.receipts.absolute() / f"te{release}"
    troubles: dict[str, Trouble] = {}
    processes = Processes()
    # TE's Triton kernels are tuned once for all copies, not once a copy: 113 s of each `permute` on an H200.
    variables = {"TRITON_CACHE_AUTOTUNING": "1", **share_cores(os.environ, plan_jobs(options.jobs))}
    bare = host_interpreter(variables, options.python)
    if reason := planning.why_not_here(target, read_facts(bare, processes)):
        where = f"not-run: {reason}"
        return {}, {run.name: (Verdict.NOT_RUN, where) for run in runs}, where
    found = resolve_environment(release, find_environments(options.overlays, variables, options.python))
    if not found.folders:
        raise NoEnvironment(
            f"Transformer Engine {release} is installed into the interpreter itself, which is not copied. Next step: "
            "name with --overlays the folder that holds it, as `pip install --target` makes one."
        )
    facts = read_facts(found, processes)
    room = Room(plan_jobs(options.jobs, gpu=bool(target.arch)))
    with own_folder(folder):
        blank = planning.plan_blank(target, facts, bare.variables)
        cells: list[Cell] = []
        for run in runs:
            try:
                environment = _make_copy(bare, found, release, run)
                cells += _plan_cells(catalog, blank, run, environment, options.limit_s, folder)
            except EditDoesNotFit as stale:
                troubles[run.name] = Verdict.NOT_PLANTED, str(stale)
            except (NoEnvironment, OSError) as why:
                troubles[run.name] = Verdict.NOT_RUN, f"its copy cannot be made: {why}"
        run_here(cells, room, processes, fresh=False, progress=progress)
    gpu = facts.gpu.name if facts.gpu else "no GPU"
    seen: dict[str, Receipts] = {}
    for run in runs:
        with suppress(WrongArguments):  # nothing ran, so that there is no folder
            seen[run.name] = {one.probe: one for one in read_receipts(folder / run.name).found.values()}
    return seen, troubles, f"{facts.executable}, Transformer Engine {release} of {found.folders[0]}, {gpu}"


def _make_copy(
    bare: InterpreterEnvironment, found: InterpreterEnvironment, release: str, run: CopyRun
) -> InterpreterEnvironment:
    """An environment with a copy of the release, with the fault or without one; a clean run takes the release itself.

    Raises:
        EditDoesNotFit: the fault is written for other sources.
        NoEnvironment, OSError: the copy cannot be made or read.
    """
    clean, *behind = found.folders
    scratch = Path(tempfile.gettempdir(), f"megacpp-te-copies-{os.getuid()}")
    place = clean if run.name == CLEAN else make_faulty(clean, release, run.fault, scratch)
    return put_over(bare, (place, *behind), f"{run.name} of Transformer Engine {release}")


def _plan_cells(
    catalog: Catalog, blank: Order, run: CopyRun, environment: InterpreterEnvironment, limit_s: float, folder: Path
) -> Iterator[Cell]:
    for row in planning.choose_rows("cell of FP8", catalog.fp8_cells, run.cells) if run.cells else catalog.modules:
        own = replace(
            planning.plan_row(blank, row), seed=run.seed, quick=True,
            turnstile="" if run.cells else str(folder / "turnstile"), environment=environment.identity,
        )  # fmt: skip
        yield Cell(environment, own, folder / run.name, limit_s, row.seconds)


# --- faults between the ranks of the smoke run ------------------------------------------------------------------------

FOUND: Final = "found.json"  # beside the receipt of a cell: `CellFound`


class SmokeFinding(Frozen):
    """What one check reports about one run; `named` has step, ranks, module, tensor and whatever else it names."""

    check: str
    named: dict[str, JsonValue] = Field(default_factory=dict)
    words: str = ""


class RunFound(Frozen):
    """One run of a cell: the fault's id, or of a run without one the way that it took.

    Attributes:
        fault: as it was planted; empty for none.
        ending: as the launcher said it.
        seconds: wall time, of all processes that it took.
    """

    run: str
    fault: str
    ending: str
    findings: tuple[SmokeFinding, ...] = ()
    seconds: float = Field(default=0.0, ge=0.0)


class CellFound(Frozen):
    """What a cell leaves beside its receipt."""

    schema_id: Literal["megacpp-validate/smoke-found/1"] = "megacpp-validate/smoke-found/1"
    cell: str
    clean: tuple[RunFound, ...]
    faulty: tuple[RunFound, ...]


def run_smoke_faults(
    catalog: Catalog, known: planted.SmokeFaults, ids: Sequence[str], options: planning.RunOptions, progress: Progress
) -> FaultScore:
    """Run the cells that the target has, and judge every fault. Raises as `run_session`.

    Args:
        ids: of the faults to plant; all where none is named.

    Raises:
        WrongArguments: an id that no row has.
    """
    chosen = known.select(planning.choose_names("fault", [fault.id for fault in known.faults], ids))
    row = planning.find_target(catalog, options.target)
    cells = tuple(cell for cell in chosen.cells() if row.id in cell.targets)
    receipts: dict[str, Receipt] = {}
    found: dict[str, CellFound] = {}
    environment, seconds = f"no cell with these faults belongs to {row.id}", 0.0
    if cells:
        session = run_session(row, options, cells, progress)
        receipts = {receipt.probe: receipt for receipt in session.receipts}
        for cell, receipt in receipts.items():
            with suppress(OSError, ValidationError):  # a cell that was ended early left nothing that is whole
                place = Path(session.folder, f"{receipt.cell}.{FOUND}")
                found[cell] = CellFound.model_validate_json(place.read_bytes())
        environment, seconds = session.interpreter.rpartition("): ")[2], session.seconds
    clean = tuple(_judge_clean(plan, run) for plan in chosen.plans if plan.id in found for run in found[plan.id].clean)
    return FaultScore(
        suite="smoke-faults", target=row.id, environment=environment, clean=clean, seconds=seconds,
        faults=tuple(_judge_smoke(fault, chosen, row.id, found, receipts) for fault in chosen.faults),
    )  # fmt: skip


def judge_finding(expected: Sighting, seen: Sequence[Sighting]) -> tuple[Verdict, str]:
    """What findings on a run with a fault are worth: the verdict, and why it is not good."""
    right = [one for one in seen if one.by == expected.by]
    if not right and seen:
        others = ", ".join(dict.fromkeys(one.by for one in seen))
        return Verdict.BY_ANOTHER, f"{expected.by} found nothing; {others} did"
    if not right:
        return Verdict.MISSED, "no check found anything"
    lacking = [[name for name in expected.names if name not in one.names] for one in right]
    if all(lacking):
        return Verdict.MISNAMED, f"{expected.by} does not name {', '.join(lacking[0])}"
    return Verdict.CAUGHT, ""


def list_named(named: Mapping[str, Any]) -> tuple[str, ...]:
    """What a check names: "module layers.3", "ranks 0, 1", "step 2", in one order whatever wrote them."""
    values = {key: named[key] for key in sorted(named) if named[key] not in ("", [])}
    return tuple(
        f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}" for key, value in values.items()
    )


def _list_sightings(run: RunFound) -> tuple[Sighting, ...]:
    return tuple(Sighting(by=one.check, names=list_named(one.named) or (one.words,)) for one in run.findings)


def _judge_clean(plan: planted.FaultPlan, run: RunFound) -> ScoreRow:
    died = "" if run.ending == "done" else f"It ended otherwise: {run.ending}."
    seen = _list_sightings(run)
    return ScoreRow(
        id=f"{plan.id}: {run.run}", says="A run without a fault.", where=f"{plan.title}; {run.run}", seen=seen,
        verdict=Verdict.FALSE_ALARM if died or seen else Verdict.QUIET, reason=died, seconds=run.seconds,
    )  # fmt: skip


def _judge_smoke(
    fault: planted.SmokeFault, chosen: planted.SmokeFaults, target: str, found: Mapping[str, CellFound],
    receipts: Mapping[str, Receipt],
) -> ScoreRow:  # fmt: skip
    plan = next(plan for plan in chosen.plans if plan.id == fault.plan)
    runs = found[plan.id].faulty if plan.id in found else ()
    run = next((one for one in runs if (one.run, one.fault) == (fault.id, fault.fault)), None)
    expected, seen = Sighting(by=fault.caught_by, names=list_named(fault.names)), _list_sightings(run) if run else ()
    receipt = receipts.get(plan.id)
    if run is not None:
        verdict, reason = judge_finding(expected, seen)
    elif target not in plan.targets:
        verdict = Verdict.ELSEWHERE
        reason = f"not for {target}: its cell takes {plan.ranks} devices of {' or '.join(plan.targets)}"
    else:
        verdict = Verdict.NOT_RUN
        reason = f"its cell is {receipt.outcome.value}: {receipt.reason}" if receipt else "its cell left no receipt"
    return ScoreRow(
        id=fault.id, says=fault.says, where=f"{plan.title}; {fault.way}", expected=(expected,), seen=seen,
        verdict=verdict, reason=reason, held_out=fault.held_out, seconds=run.seconds if run else 0.0,
    )  # fmt: skip
