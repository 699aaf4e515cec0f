"""The verb of the search for the first bad release: what it runs, and the exit code of each answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, assert_never

import typer

from ...canary.dynamic.bisect_result import Answer, Axis, BisectResult, SearchEnd, Verdict
from ...canary.dynamic.search.answers import Answers, digest_tool
from ...canary.dynamic.search.judge import Judge, Question, run_search
from ...canary.dynamic.search.repeats import Trust
from ...catalog.bridge import Catalog
from ...environments.environment import NoEnvironment
from ...environments.plan import UnknownTarget
from ...environments.restart import FolderTaken, own_folder
from ...process import Processes
from ...report.summaries import first_sentence
from ...report.words.bisect import mark_point, say_axis
from ..app import TOOL, Exit, Format, errors, foreseen, refuse, refuse_full_disk
from ..telling import tell
from .bisect_axes import AxisInvalid, order_releases, read_axes
from .bisect_places import NotHere, Places

_WHY_NO_INDEX = (
    "the index of releases cannot be read from here: only those of this host are known, and what was released between "
    "them is not spoken of"
)


@dataclass(frozen=True)
class Asked:
    """The arguments."""

    good: str
    bad: str
    module: str
    is_static: bool
    target: str
    overlays: tuple[Path, ...]
    python: str
    axes: tuple[str, ...]
    flaky: float
    error: float
    patience: int
    seed: int
    limit_s: float
    answers: Path
    matrix: Path | None


@foreseen({
    AxisInvalid: Exit.WRONG_ARGUMENTS,
    UnknownTarget: Exit.WRONG_ARGUMENTS,
    NoEnvironment: Exit.NO_ENVIRONMENT,
    NotHere: Exit.EVIDENCE_MISSING,
    FolderTaken: Exit.INFRASTRUCTURE,
})  # fmt: skip
def run_bisect(catalog: Catalog, asked: Asked, fmt: Format, output: Path | None) -> None:
    """Search, tell, and end with the code of the answer's class."""
    known = [row.id for row in catalog.modules]
    if asked.module not in known:
        refuse(
            f"there is no bridge module {asked.module!r}. Next step: choose one of {', '.join(known)}.",
            Exit.WRONG_ARGUMENTS,
        )
    result = _search_sources(catalog, asked) if asked.is_static else _search_stacks(catalog, asked)
    tell(result, fmt, output)
    raise typer.Exit(choose_code(result))


def choose_code(result: BisectResult) -> Exit:
    """The exit code of an answer: a breakage that was found closes, one that was not pinned down lacks evidence."""
    match result.end:
        case SearchEnd.FOUND:
            return Exit.CLOSED
        case SearchEnd.NARROWED | SearchEnd.END_UNTOLD:
            return Exit.EVIDENCE_MISSING
        case SearchEnd.GOOD_IS_BAD | SearchEnd.BAD_IS_GOOD:
            return Exit.WRONG_ARGUMENTS
        case SearchEnd.END_UNBUILT:
            return Exit.NO_ENVIRONMENT
        case _:
            assert_never(result.end)


def _search_sources(catalog: Catalog, asked: Asked) -> BisectResult:
    for name, given in (("--axis", asked.axes), ("--target", asked.target), ("--flaky", asked.flaky)):
        if given:
            refuse(
                f"{name} is of the gpu tier: sources are those of Transformer Engine alone, and never flaky. Next "
                "step: leave it out, or add --tier gpu.",
                Exit.WRONG_ARGUMENTS,
            )
    try:
        from .bisect_sources import open_sources
    except ImportError as fault:  # a GPU host need not have what reads sources
        refuse(
            f"the static tier cannot read sources here: {fault}. Likely cause: nox runs in the interpreter of a GPU "
            "host, which has no griffe. Next step: run it on a laptop, or add --tier gpu.",
            Exit.NO_ENVIRONMENT,
        )
    axis, judge = open_sources(catalog, asked.module, asked.good, asked.bad)
    return _run(asked, "static", f"compared with {asked.good}", (axis,), judge)


def _search_stacks(catalog: Catalog, asked: Asked) -> BisectResult:
    if not asked.target:
        refuse(
            f"the gpu tier judges by a target. Next step: add --target, one of "
            f"{', '.join(row.id for row in catalog.targets)}.",
            Exit.WRONG_ARGUMENTS,
        )
    others = read_axes(asked.axes)
    processes = Processes()
    places = Places.open(catalog, asked.target, asked.overlays, asked.python, others, processes)
    te = order_releases(_list_releases(places), asked.good, asked.bad, places.releases)
    receipts = asked.answers.absolute() / "receipts"
    judge = places.make_judge(asked.module, receipts, asked.seed, asked.limit_s)
    conditions = f"target {asked.target}, seed {asked.seed}, limit {asked.limit_s:g} s"
    try:
        with _own(receipts, asked.answers):
            return _run(asked, "gpu", conditions, (te, *(spec.axis for spec in others)), judge)
    except BaseException:  # an interrupt too: nothing may keep running behind it
        processes.stop()
        raise


@contextmanager
def _own(receipts: Path, answers: Path) -> Iterator[None]:
    """Hold the folder against a second search, which would run the same cells over this one's."""
    try:
        with own_folder(receipts):
            yield
    except FolderTaken as fault:
        raise FolderTaken(
            f"another search keeps its answers in {answers}. Likely cause: it was started twice, or a first one was "
            "put in the background. Next step: wait for it, or give this one another folder with --answers."
        ) from fault
    except OSError as fault:
        _refuse_answers(answers, fault)


def _list_releases(places: Places) -> list[str]:
    """All releases that there are; without the index those of this host, and that is said."""
    try:
        from .bisect_sources import list_releases

        if known := list_releases():
            return known
    except ImportError:
        pass
    errors.print(_WHY_NO_INDEX, markup=False)
    return list(places.releases)


def _run(asked: Asked, tier: str, conditions: str, axes: tuple[Axis, ...], judge: Judge) -> BisectResult:
    if all(len(axis.values) == 1 for axis in axes):
        refuse(
            f"GOOD and BAD are both {asked.good}, and no --axis changes: there is nothing to search. Next step: give "
            "two releases.",
            Exit.WRONG_ARGUMENTS,
        )
    trust = Trust(asked.flaky, asked.error)
    kept = Answers(asked.answers, asked.module, tier, digest_tool(asked.matrix), conditions)
    try:
        return run_search(Question(TOOL, tier, asked.module, axes, trust, asked.patience), judge, kept, _progress)
    except OSError as fault:
        _refuse_answers(asked.answers, fault)
    except ValueError as fault:
        refuse(str(fault), Exit.WRONG_ARGUMENTS)


def _refuse_answers(folder: Path, fault: OSError) -> NoReturn:
    refuse_full_disk(folder, fault)
    refuse(
        f"answers cannot be kept in {folder}: {fault.strerror or fault}. Likely cause: it is a file, or lies in a "
        "place that is not yours. Next step: give --answers a folder that you can write.",
        Exit.WRONG_ARGUMENTS,
    )


def _progress(choices: Mapping[str, str], answer: Answer, known: bool) -> None:
    """A line a run."""
    where = ", ".join(f"{say_axis(name)} {value}" for name, value in choices.items())
    said = "" if answer.verdict is Verdict.GOOD else f": {first_sentence(answer.reason)}"
    errors.print(f"{mark_point(answer.verdict).word:12} {where}{' (known)' if known else ''}{said}", markup=False)
