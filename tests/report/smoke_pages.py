"""The pages of the smoke run under docs/examples, from its receipts under docs/evidence.

python tests/report/smoke_pages.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.environments.host_session import SmokeSession
from megacpp_validate.evidence.store import read_receipts
from megacpp_validate.report.describe.session import describe_session
from megacpp_validate.report.render.html import render_html
from megacpp_validate.report.render.terminal import render_terminal

ROOT: Final = Path(__file__).resolve().parents[2]
EVIDENCE: Final = ROOT / "docs" / "evidence" / "smoke"
EXAMPLES: Final = ROOT / "docs" / "examples"
WIDTH: Final = "104"


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
        requested_because="Transformer Engine is the default on the target h200",
        interpreter="two sessions on the same two H200s",
        folder="",
        seed=first.seed,
        seconds=sum(receipt.seconds.get("total", 0.0) for receipt in receipts),
        receipts=tuple(receipts),
    )


def make_pages() -> dict[str, str]:
    """Name -> text."""
    document = describe_session(read_session())
    os.environ["COLUMNS"] = WIDTH
    text = "\n".join(line.rstrip() for line in render_terminal(document).splitlines())
    return {"moe_smoke_h200.txt": f"{text}\n", "moe_smoke_h200.html": render_html(document)}


if __name__ == "__main__":
    for name, page in make_pages().items():
        (EXAMPLES / name).write_text(page, encoding="utf-8")
