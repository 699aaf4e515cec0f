"""One run of the watch, and the issue about one new release, as documents."""

from __future__ import annotations

from ...canary.dynamic.upgrade_result import UpgradeResult
from ...canary.watch import JudgedRelease, WatchResult
from ...errors import Exit
from ...text import count
from ..document import Block, Bullets, Diagnostic, Document, Heading, Paragraph, Preformatted
from ..marks import bad, good, missing
from .firewall import summarize_firewall
from .static import describe_static
from .upgrade import mark_upgrade, summarize_upgrade


def describe_watch(result: WatchResult) -> Document:
    """What is new, the verdict on it, and where its issue text lies."""
    bad_ones = [row.version for row in result.judged if row.code == Exit.CLOSED]
    verdict = (
        f"{', '.join(bad_ones)} {'breaks' if len(bad_ones) == 1 else 'break'} the bridge" if bad_ones else "none breaks"
    )
    new = f"{count(result.judged, 'new release')}: {verdict}" if result.judged else "No new release was judged"
    failed = f"; {count(result.failed, 'release has', 'releases have')} no verdict yet" if result.failed else ""
    unjudged = tuple(
        Diagnostic(name, missing("no verdict"), "releases", reason, help="the next run tries again", code="no-verdict")
        for name, reason in result.failed.items()
    )
    mark = bad("breaks") if bad_ones else missing("no verdict") if result.failed else good("nothing new breaks")
    return Document(
        "Releases of Transformer Engine",
        f"{new}{failed}. {count(result.listed, 'release is', 'releases are')} on the index; {result.pinned} is pinned.",
        mark,
        (*map(_diagnose, result.judged), *unjudged),
    )


def describe_release(result: UpgradeResult, release: str) -> Document:
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
    title = f"Transformer Engine {release} against {against}"
    return Document(title, summarize_upgrade(result), mark_upgrade(result), tuple(blocks))


def _diagnose(row: JudgedRelease) -> Diagnostic:
    breaks = row.code == Exit.CLOSED
    return Diagnostic(
        name=row.version,
        mark=bad("breaks") if breaks else good("open"),
        group="releases",
        message=f"{row.version} {'breaks' if breaks else 'does not break'} the bridge, judged against {row.against}",
        fields=(("issue", row.issue),),
        code=row.judged_at[:10],
    )
