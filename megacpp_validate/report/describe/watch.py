"""One run of the watch, and the issue about one new release, as documents."""

from __future__ import annotations

from ...canary.dynamic.upgrade_result import UpgradeResult
from ...canary.watch import JudgedRelease, WatchResult
from ...canary.wheel_requirements import WheelRequirements
from ...errors import Exit
from ...text import count
from ..document import Block, Bullets, Diagnostic, Document, Heading, Paragraph, Preformatted
from ..marks import bad, find_worst_mark, good, missing
from .firewall import summarize_firewall
from .requirements import describe_requirements
from .static import describe_static
from .upgrade import mark_upgrade, summarize_upgrade


def describe_watch(result: WatchResult) -> Document:
    """What is new, the verdict on it, and where its issue text lies."""
    judged = tuple(map(_diagnose, result.judged))
    unjudged = tuple(
        Diagnostic(name, missing("no verdict"), "releases", reason, help="the next run tries again", code="no-verdict")
        for name, reason in result.failed.items()
    )
    broken = ", ".join(row.version for row in result.judged if row.code == Exit.CLOSED)
    summary = (
        f"{count(judged, 'new release')}; breaks the bridge: {broken or 'none'}; without a verdict: {len(unjudged)}; "
        f"on the index: {result.listed}; pinned: {result.pinned}."
    )
    mark = find_worst_mark((case.mark for case in (*judged, *unjudged)), good("nothing new"))
    return Document("Releases of Transformer Engine", summary, mark, (*judged, *unjudged))


def describe_release(result: UpgradeResult, release: str, wheels: WheelRequirements) -> Document:
    """The issue about a new release; its title is the same whatever is found out about the release."""
    against = result.static[0].old.version if result.static else "the pinned release"
    again = f"./nox -s te_canary -- {against} {release}"
    blocks: list[Block] = []
    for static in result.static:
        blocks += describe_static(static).blocks
    if result.firewall is not None:
        laid_out = ", ".join(dict.fromkeys(case.release for case in result.firewall.cases))
        blocks.append(Paragraph(f"On damaged installs of {laid_out}: {summarize_firewall(result.firewall)}"))
    blocks += [
        Heading("Next steps"),
        Bullets((
            "Follow the next step of each finding above.",
            "Run every module in both releases on a GPU: the static tier does not cover numerics and performance.",
        )),
        Preformatted(f"{again} --tiers static,firewall\n{again} --tiers gpu --target h200"),
    ]  # fmt: skip
    needs = describe_requirements(wheels)
    blocks += [Heading(needs.title, mark=needs.mark), Paragraph(needs.summary), *needs.blocks]
    title = f"Transformer Engine {release} against {against}"
    return Document(title, summarize_upgrade(result), mark_upgrade(result), tuple(blocks))


def _diagnose(row: JudgedRelease) -> Diagnostic:
    mark = bad("breaks") if row.code == Exit.CLOSED else good("open")
    fields = (("judged against", row.against), ("issue", row.issue))
    return Diagnostic(row.version, mark, "releases", fields=fields, code=row.judged_at[:10])
