"""Whether receipts let a release through: rules and evidence in, open or closed out, with a reason for every receipt.

Pure: the time of the decision is an argument, whole receipts come through a function, and who is to blame is asked of
another one, because `canary` knows that and is no room that `gate` may import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ..catalog.gate import GateRules
from ..evidence.receipts_manifest import hash_manifest
from ..evidence.release_gate import GateDecision, GateRule, UnreadableReceipt
from ..evidence.store import ReceiptFile
from .release_asked import Asked, Baseline, SignedFolder
from .release_cells import Bench, Judged, Load, judge_others, judge_required, make_bench
from .release_culprits import Blame, name_culprits
from .release_sorting import sort_receipts
from .release_waivers import see_waivers

OPEN: Final = 0
CLOSED: Final = 1
EVIDENCE_MISSING: Final = 4
_FOREIGN: Final = frozenset({GateRule.STACK, GateRule.TARGET, GateRule.NOT_REQUIRED})


def decide_release(
    seen: Iterable[ReceiptFile],
    load: Load,
    rules: GateRules,
    asked: Asked,
    *,
    blame: Blame = lambda _: (),
    baseline: Baseline | None = None,
    signed: SignedFolder | None = None,
) -> GateDecision:
    """Judge every receipt of a store, and decide.

    Args:
        seen: in any order.
        load: gives the whole of one.
        rules: of the kind of release and the target.
        asked: stack, time, and what receipts must carry.
        blame: says who is to blame for red receipts.
        baseline: to compare speed and memory with; None where there is none.
        signed: what the folder was signed as; None where that was not asked for.
    """
    files = tuple(sorted(seen, key=lambda one: one.file))
    split = sort_receipts(files, rules, asked)
    bench = make_bench(files, split, load, rules, asked, baseline, signed)
    required = tuple(judge_required(bench))
    judged = (*required, *judge_others(bench))
    cells = tuple(one.verdict for one in judged)
    closed = any(verdict.closes for verdict in cells)
    breaks = any(one.breaks for one in judged)
    standing = {(one.verdict.cell, reason.rule) for one in judged for reason in one.standing}
    bound = bench.bound
    return GateDecision(
        tool=asked.tool,
        release=rules.kind.id,
        stack=asked.stack,
        target=rules.target.id,
        open=not closed,
        exit_code=CLOSED if breaks else EVIDENCE_MISSING if closed else OPEN,
        cells=cells,
        missing=_find_missing(required),
        unreadable=tuple(_find_unreadable(bench)),
        foreign=tuple(row.seen.shown.removesuffix(".json") for row in split.rejected if row.reason.rule in _FOREIGN),
        waivers=see_waivers(rules, asked, cells, standing),
        culprits=name_culprits(bench, judged, blame),
        commit=bound.commit,
        image_digest=bound.image,
        lock_hash=bound.lock,
        signed_by=signed.signer if signed is not None else "",
        baseline=baseline.stack if baseline is not None else "",
        rules_sha256=rules.sha256,
        receipts_sha256=hash_manifest({one.file: one.sha256 for one in files}),
        baseline_sha256=baseline.sha256 if baseline is not None else "",
        judged_at=asked.at.isoformat(),
    )


def _find_missing(required: Sequence[Judged]) -> tuple[str, ...]:
    return tuple(one.verdict.cell for one in required if any(not reason.breaks for reason in one.standing))


def _find_unreadable(bench: Bench) -> Iterator[UnreadableReceipt]:
    """By their files: what is no receipt at a glance, and what is none on a closer look."""
    found = {
        row.seen.shown: (row.seen.sha256, row.reason.text) for row in bench.split.rejected if _is_none(row.reason.rule)
    }
    for cell, why in bench.broken.items():
        one = bench.split.counting[cell]
        found[one.shown] = one.sha256, why
    for file in sorted(found):
        yield UnreadableReceipt(file=file, receipt_sha256=found[file][0], reason=found[file][1])


def _is_none(rule: GateRule) -> bool:
    return rule in (GateRule.UNREADABLE, GateRule.NAME)
