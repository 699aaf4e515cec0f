"""What every benchmark does around its measurement: options, the facts of a run, a JSON file and the page beside it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
WritePage = Callable[[dict[str, Any]], str]


def make_parser(description: str | None, *, rounds: int = 0) -> argparse.ArgumentParser:
    """A parser with --output and --render, and --rounds where a benchmark has a number of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of both files")
    parser.add_argument("--render", type=Path, help="figures of an earlier run: writes the page beside them")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def render_earlier(figures: Path | None, write_page: WritePage) -> bool:
    """Whether figures of an earlier run were named; then the page beside them is written."""
    if figures is not None:
        save_page(figures, json.loads(figures.read_text(encoding="utf-8")), write_page)
    return figures is not None


def describe_run(**more: Any) -> dict[str, Any]:
    """The head of a result: day, torch and Transformer Engine, and what the benchmark adds."""
    head = {"date": datetime.now(UTC).date().isoformat(), "torch": version("torch")}
    return head | {"te": version("transformer_engine")} | more


def version(distribution: str) -> str:
    """The version of a distribution, or "absent"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def save(figures: Path, result: dict[str, Any], write_page: WritePage) -> str:
    """Write figures and the page beside them; returns the page."""
    figures.parent.mkdir(parents=True, exist_ok=True)
    figures.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return save_page(figures, result, write_page)


def save_page(figures: Path, result: dict[str, Any], write_page: WritePage) -> str:
    """Write the page beside its figures; returns the page."""
    page = write_page(result)
    figures.with_suffix(".md").write_text(page, encoding="utf-8")
    return page
