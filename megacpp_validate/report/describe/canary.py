"""What the firewall, the search for a first bad release, and the symbols of wheels showed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...canary.dynamic.bisect import TE, BisectResult, PointResult, SearchEnd, Verdict
from ...canary.firewall.run import FirewallCase, FirewallResult
from ...canary.requirements import WheelRequirements
from ...text import count, first_sentence
from ..document import Block, Content, Details, Diagnostic, Document, Paragraph, Table
from ..marks import Tone, bad, good, mark_exit, mark_of, missing, risk
from .receipt import split_reason
from .words import sum_up, tabulate, tabulate_facts

_NAMES: Final = {"te": "Transformer Engine", "cudnn": "cuDNN", "cublas": "cuBLAS", "nccl": "NCCL"}
_ENDS: Final = {  # answer, and next step
    SearchEnd.FOUND: ("{module} breaks first with {first}; the last good point is {last}.", "stay on {last}"),
    SearchEnd.NARROWED: (
        "{module} breaks first with one of {first}; the last good point is {last}.",
        "make a point without a result usable, and run again: finished receipts are reused",
    ),
    SearchEnd.GOOD_IS_BAD: (
        "The good end is bad already: {why}.",
        "name an older good end, one that was seen to be good",
    ),
    SearchEnd.BAD_IS_GOOD: ("The bad end is good.", "search by `--tier gpu`, or give what else differs as --axis"),
    SearchEnd.END_UNTOLD: ("An end cannot be judged: {why}.", "choose the nearest release that can be judged"),
    SearchEnd.END_UNBUILT: ("An end cannot be built: {why}.", "choose the nearest release that can be built"),
}


def summarize_firewall(result: FirewallResult) -> str:
    """The answer in one sentence."""
    if not result.lacks:
        return f"The firewall holds in {count(result.cases, 'case')}."
    return f"The firewall in {count(result.cases, 'case')}: {sum_up(map(_diagnose_case, result.cases)) or 'none ran'}."


def describe_firewall(result: FirewallResult) -> Document:
    """Every case that does not hold in full, then a row for each case; what was done in each is folded."""
    cases = tuple(map(_diagnose_case, result.cases))
    rows = tuple(
        (case.case, mark_of(case.outcome), split_reason(case.reason)[0] or "available") for case in result.cases
    )
    blocks: tuple[Block, ...] = (
        *(case for case in cases if case.mark.tone is not Tone.GOOD),
        Table(("damaged install", "verdict", "cause that the bridge reports"), rows),
        Details("Every case", cases),
        Paragraph(f"{result.tool}, Python {result.python}, torch {result.torch or 'none'}."),
    )
    mark = mark_exit(result.exit, open_="holds", closed="fails")
    return Document("Import firewall", summarize_firewall(result), mark, blocks, cases)


def _diagnose_case(case: FirewallCase) -> Diagnostic:
    message = "; ".join(case.problems) or f"The bridge reports: {split_reason(case.reason)[0] or 'available'}"
    fields = (
        ("damage", f"{case.damage}; Transformer Engine {case.release}, compiled half: {case.compiled}"),
        ("available", "no answer" if case.available is None else str(case.available)),
        ("reason", case.reason),
        ("native", tuple(f"{module}: {path}" for module, path in case.native_paths.items())),
        ("ended", case.ended),
    )
    return Diagnostic(case.case, mark_of(case.outcome), "firewall", message, fields, seconds=case.seconds)


def describe_requirements(result: WheelRequirements) -> Document:
    """Each library that a release needs in a later version than the oldest on the index."""
    unread = [
        Diagnostic(name, missing("unknown"), "wheels", why, code="not-read") for name, why in result.unknown.items()
    ]
    new = ", ".join(one.distribution for one in result.needs if not one.known)
    parts = {
        "Needs": ", ".join(f"{one.distribution}>={one.first or '?'}" for one in result.needs) or "any on the index",
        "Not in matrix/needs.toml": new,
        "Not read": ", ".join(result.unknown),
    }
    summary = " ".join(f"{label}: {text}." for label, text in parts.items() if text)
    mark = bad("new") if new else missing("unknown") if unread else good("known")
    needs = tabulate(result.needs, "distribution cuda symbols at_load first before known")
    title = f"Requirements of Transformer Engine {result.te}"
    return Document(title, summary, mark, (needs, *unread))


def describe_run(run: PointResult) -> str:
    """One run of a search in a line."""
    reason = "" if run.verdict is Verdict.GOOD else f": {first_sentence(run.reason)}"
    return f"{mark_of(run.verdict).word:12} {_join(run.point)}{reason}"


def _join(point: Mapping[str, str]) -> str:
    return " with ".join(f"{_NAMES.get(axis, axis)} {version}" for axis, version in point.items())


def describe_bisect(result: BisectResult) -> Document:
    """The answer, and every point that was tried."""
    why = first_sentence(result.points[-1].reason).rstrip("., ")
    first = " or ".join(_join({axis: ", ".join(versions)}) for axis, versions in result.culprits.items())
    words = {"module": result.module, "first": first, "last": _join(result.last_good), "why": why}
    answer, step = (text.format_map(words) for text in _ENDS[result.end])
    if result.end is SearchEnd.FOUND and TE in result.culprits:
        pair = f"{result.last_good[TE]} {result.culprits[TE][0]}"
        step = f"{step}; `nox -s te_canary -- {pair}` shows what changed in that step"
    rows: tuple[tuple[Content, ...], ...] = tuple(
        (*row.point.values(), mark_of(row.verdict), first_sentence(row.reason)) for row in result.points
    )
    cost = f"{count(result.points, 'point')}, {result.seconds:.0f} s"
    summary = f"{answer} Judged by the {result.tier} tier."
    found = bad("found") if result.end is SearchEnd.FOUND else risk(result.end.value.replace("-", " "))
    case = Diagnostic(result.module, found, "te_bisect", summary, help=step, seconds=result.seconds)
    mark = missing("no answer") if result.end in (SearchEnd.END_UNTOLD, SearchEnd.END_UNBUILT) else found
    table = Table((*(_NAMES.get(axis, axis) for axis in result.axes), "verdict", "reason"), rows)
    blocks = table, tabulate_facts({"cost": cost, "next step": step})
    return Document(f"First bad release for {result.module}", summary, mark, blocks, (case,))
