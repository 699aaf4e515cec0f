"""The verb of ablation: runs that take turns, each a process, and the exit code of each answer."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer

from ...catalog.postures import Feature, Posture, UnknownFeature, read_postures
from ...environments.environment import Environment, NoEnvironment
from ...environments.facts import read_facts
from ...environments.interpreter import host_interpreter, read_commit
from ...environments.restart import FolderTaken, own_folder
from ...evidence.whole_file import write_whole
from ...gate.ablation import decide_feature, find_run_faults
from ...gate.ablation_result import (
    ARMS,
    AblationInvalid,
    AblationResult,
    ArmName,
    FeatureAblation,
    RunSeen,
    Verdict,
    read_ablation,
)
from ...gate.smoke_answer import AnswerInvalid, parse_answer, see_run
from ...process import Ended, Processes
from ...report.markdown.ablation import render_ablation_page
from ...report.terminal.ablation import render_ablation
from ...report.words.ablation import say_row
from ..app import TOOL, Exit, errors, foreseen, refuse, refuse_receipts
from ..told_options import PageFormat
from ..whole_telling import tell_whole
from .ablate_plan import Asked, WrongAblation, plan_arms, read_features, read_plan, why_not_run

__all__ = ["Asked", "observe_ablation", "read_features", "read_plan", "run_ablation"]

MODULE: Final = "megacpp_validate.training.smoke"
PAGE: Final = "ablation.md"
_GRACE_S: Final = 60.0  # the run has a limit of its own, and says which rank was late
_LAST_WORDS: Final = 600  # characters of a log that are told


@dataclass(frozen=True)
class Host:
    """Where runs are started.

    Attributes:
        gpu, te: whether it has them; not asked for where the CPU is to train.
    """

    environment: Environment
    processes: Processes
    gpu: bool = False
    te: bool = False


@foreseen({
    UnknownFeature: Exit.WRONG_ARGUMENTS, WrongAblation: Exit.WRONG_ARGUMENTS, NoEnvironment: Exit.NO_ENVIRONMENT,
    FolderTaken: Exit.INFRASTRUCTURE, AblationInvalid: Exit.EVIDENCE_MISSING,
})  # fmt: skip
def run_ablation(
    matrix: Path | None, words: list[str], asked: dict[str, Any], again: bool, fmt: PageFormat, output: Path | None
) -> None:
    """Run, judge and tell; not open where a feature could not be judged. A tax is an answer, and closes nothing.

    Args:
        matrix: its folder; the project's own without it.
        words: that name features.
        asked: the other arguments of `Asked`, but `plan` a text, and `ranks` beside it.
        again: judge the receipts that are there, and run nothing.
        fmt, output: how to tell it, and where.
    """
    posture = read_postures(matrix)
    names = read_features(words, posture)
    if not names:
        refuse("no feature is selected. Next step: name one, as in feature=recompute, or all.", Exit.NOTHING_SELECTED)
    plan = read_plan(asked.pop("plan"), asked.pop("ranks"))
    order = Asked(features=names, plan=plan, **asked)
    result = judge_again(posture, order) if again else observe_ablation(posture, order)
    tell_whole(
        result,
        fmt,
        output,
        render=lambda console: render_ablation(result, console=console),
        markdown=render_ablation_page(result).splitlines,
    )
    raise typer.Exit(Exit.OPEN if result.holds else Exit.EVIDENCE_MISSING)


def observe_ablation(posture: Posture, asked: Asked) -> AblationResult:
    """Run every feature after the other; each receipt is written when its feature is through, and the page with it.

    Raises:
        NoEnvironment: there is no interpreter.
        FolderTaken: another run writes to the folder of the receipts.
    """
    rows: list[FeatureAblation] = []
    with tempfile.TemporaryDirectory(prefix="megacpp-door-") as door:
        environment = host_interpreter(os.environ, Path(door), asked.python)
        host = _look(environment, asked)
        try:
            with own_folder(asked.receipts):
                for name in asked.features:
                    row = _ablate(posture, posture.find(name), asked, host)
                    rows.append(row)
                    write_whole(asked.receipts / f"{name}.json", row.model_dump_json(indent=2) + "\n")
                    so_far = AblationResult(tool=TOOL, features=tuple(rows))
                    write_whole(asked.receipts / PAGE, render_ablation_page(so_far))
                    errors.print(say_row(row), markup=False)
        except OSError as fault:
            refuse_receipts(asked.receipts, fault)
    return AblationResult(tool=TOOL, features=tuple(rows))


def judge_again(posture: Posture, asked: Asked) -> AblationResult:
    """Judge the runs that receipts hold by the rules of today, and write the receipts and the page anew.

    Raises:
        AblationInvalid: a receipt is damaged, or is not there.
        FolderTaken: another run writes to the folder of the receipts.
    """
    rows: list[FeatureAblation] = []
    try:
        with own_folder(asked.receipts):
            for name in asked.features:
                row = read_ablation(asked.receipts / f"{name}.json")
                orders: dict[ArmName, dict[str, Any]] = {"off": dict(row.off), "on": dict(row.on)}
                found = decide_feature(posture.find(name), orders, row.runs, row.pairs)
                rows.append(row.model_copy(update={"reasons": (), **found}))
            for row in rows:
                write_whole(asked.receipts / f"{row.feature}.json", row.model_dump_json(indent=2) + "\n")
            write_whole(asked.receipts / PAGE, render_ablation_page(AblationResult(tool=TOOL, features=tuple(rows))))
    except OSError as fault:
        refuse_receipts(asked.receipts, fault)
    return AblationResult(tool=TOOL, features=tuple(rows))


def _look(environment: Environment, asked: Asked) -> Host:
    processes = Processes()
    if asked.device == "cpu":
        return Host(environment, processes)
    facts = read_facts(environment, processes)
    return Host(environment, processes, gpu=facts.gpu is not None, te=bool(facts.te))


def _ablate(posture: Posture, feature: Feature, asked: Asked, host: Host) -> FeatureAblation:
    """One feature: off, on, off, on. A run that is no evidence ends it: the same order would end alike."""
    orders = plan_arms(posture, feature, asked)
    said: dict[str, Any] = {
        "tool": TOOL, "commit": read_commit(), "feature": feature.id, "title": feature.title, "plain": feature.plain,
        "source": feature.source, "size": asked.size, "seed": asked.seed, "steps": asked.steps, "pairs": asked.pairs,
        "ranks": asked.ranks, "device": asked.device, "interpreter": host.environment.shown, "base": asked.base,
        "off": orders["off"], "on": orders["on"],
    }  # fmt: skip
    if reasons := tuple(why_not_run(feature, asked, gpu=host.gpu, te=host.te)):
        return FeatureAblation(**said, verdict=Verdict.NOT_JUDGED, reasons=reasons)
    runs: list[RunSeen] = []
    for place in range(2 * asked.pairs):
        arm: ArmName = ARMS[place % 2]
        run = _run(orders[arm], arm, place, asked.receipts / feature.id, asked, host)
        runs.append(run)
        line = f"{run.ending:12} {feature.id} {arm} {place + 1}/{2 * asked.pairs} ({run.seconds:.1f} s)"
        errors.print(line, markup=False)
        if any(find_run_faults(feature.on if arm == "on" else feature.off, orders[arm], run)):
            break
    return FeatureAblation(**said, runs=tuple(runs), **decide_feature(feature, orders, runs, asked.pairs))


def _run(order: Mapping[str, Any], arm: ArmName, place: int, folder: Path, asked: Asked, host: Host) -> RunSeen:
    """One run: its order, its log and what it left in a folder of its own."""
    home = folder.absolute() / f"{place + 1}-{arm}"
    home.mkdir(parents=True, exist_ok=True)
    given, log = home / "order.json", home / "log"
    write_whole(given, json.dumps({**order, "folder": str(home / "run"), "limit_s": asked.limit_s}) + "\n")
    call = host.environment.call(MODULE, shares=(home,))
    try:
        ended = host.processes.run(call, folder=home, limit_s=asked.limit_s + _GRACE_S, log=log, given=given)
    except OSError as fault:
        return RunSeen(arm=arm, place=place, ending="not-started", words=str(fault))
    return _see(ended, arm, place, f"{folder.name}/{home.name}")


def _see(ended: Ended, arm: ArmName, place: int, file: str) -> RunSeen:
    """What a process answered; one that was killed or has no answer is told with its last words."""
    last = " ".join(ended.words.split())[-_LAST_WORDS:]
    try:
        answer = parse_answer(ended.words)
    except AnswerInvalid as fault:
        how = ended.how if ended.code != 0 else "no-answer"
        words = f"{fault}. Its last words: {last or 'none'}"
        return RunSeen(arm=arm, place=place, ending=how, words=words, seconds=ended.seconds, file=file)
    run = see_run(answer, arm, place, file)
    if ended.code == 0 or run.ending != "done":
        return run
    words = f"it answers done, and its process ended with {ended.how} {ended.code}: {last}"
    return run.model_copy(update={"ending": "contradiction", "words": words})
