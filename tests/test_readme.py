"""What the README shows is what a command wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHOWN = re.compile(r"<!-- from (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)


def shown() -> list[tuple[str, str]]:
    return SHOWN.findall((ROOT / "README.md").read_text())


@pytest.mark.parametrize(("source", "text"), shown())
def test_the_readme_shows_the_file_as_it_was_written(source: str, text: str) -> None:
    written = (ROOT / source).read_text()
    inside = re.sub(r"\A```text\n|```\n\Z", "", text)
    assert inside.strip() == written.strip()


def test_there_is_something_to_hold_it_to() -> None:
    assert {source for source, _ in shown()} == {
        "docs/examples/te_canary.txt",
        "docs/examples/import_firewall.txt",
        "docs/benchmarks/canary.md",
        "docs/benchmarks/bridge.md",
        "docs/benchmarks/evidence.md",
        "docs/benchmarks/jit_caches.md",
        "docs/examples/cpu_parity.txt",
        "docs/examples/score.md",
        "docs/examples/selftest.md",
        "docs/evidence/support.md",
        "docs/examples/te_canary_h200.txt",
        "docs/examples/blame_score.md",
        "docs/examples/blame_score_held_out.md",
        "docs/examples/fp8_h200.txt",
        "docs/examples/moe_smoke_cpu.txt",
        "docs/examples/moe_smoke_h200.txt",
    }
