"""The pages of the smoke run under docs/examples, from its receipts under docs/evidence; a test holds them to those.

python tests/report/smoke_pages.py
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

from rich.console import Console

from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.environments.session_result import SmokeSession
from megacpp_validate.evidence.store import read_receipts
from megacpp_validate.gate.ablation_result import AblationResult, read_ablation
from megacpp_validate.report.html.pages import render_session_html
from megacpp_validate.report.markdown.ablation import render_ablation_page
from megacpp_validate.report.terminal.parity import render_session

ROOT: Final = Path(__file__).resolve().parents[2]
EVIDENCE: Final = ROOT / "docs" / "evidence" / "smoke"
EXAMPLES: Final = ROOT / "docs" / "examples"
WIDTH: Final = 104


def read_session() -> SmokeSession:
    """The cells of all sessions on H200s, in the order of the matrix."""
    found = [receipt for name in ("small", "scaled") for receipt in read_receipts(EVIDENCE / name).found.values()]
    order = [cell.id for cell in read_catalog().smoke]
    receipts = sorted(found, key=lambda receipt: order.index(receipt.probe))
    first = receipts[0]
    return SmokeSession(
        tool=first.tool,
        target=first.target,
        stack=first.stack,
        requested=first.requested,
        requested_because="the target h200 is there for Transformer Engine",
        interpreter="two sessions on the same two H200s",
        folder="",
        seed=first.seed,
        seconds=sum(receipt.seconds.get("total", 0.0) for receipt in receipts),
        receipts=tuple(receipts),
    )


def make_pages() -> dict[str, str]:
    """Name -> text."""
    session = read_session()
    text = io.StringIO()
    render_session(session, console=Console(file=text, width=WIDTH, color_system=None))
    told = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
    features = tuple(read_ablation(path) for path in sorted((EVIDENCE / "ablation").glob("*.json")))
    return {
        "moe_smoke_h200.txt": f"{told}\n",
        "moe_smoke_h200.html": render_session_html(session),
        "ablation_h200.md": render_ablation_page(AblationResult(tool=features[0].tool, features=features)),
    }


if __name__ == "__main__":
    for name, page in make_pages().items():
        (EXAMPLES / name).write_text(page, encoding="utf-8")
