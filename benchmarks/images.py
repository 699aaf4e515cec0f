"""Seconds of the cpu image: a cold build, one after a changed Python file, `doctor` in a container, `lock --check`.

Needs an engine and a base: `eval "$(containers/docker_engine up)"`. Writes docs/benchmarks/images.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.images.build import Engine, bake, find_engine
from megacpp_validate.images.plan import ImageRows, name_image
from megacpp_validate.images.tools import call

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "benchmarks"
TAG = "benchmark"
CHANGED = "megacpp_validate/report/describe/changes.py"


@dataclass(frozen=True)
class Row:
    """What was done: median and every value in seconds, the aim, and the load of the machine before each."""

    seconds: float
    each: tuple[float, ...]
    aim: float
    loads: tuple[float, ...]


def measure(deed: Callable[[], object], times: int, aim: float) -> Row:
    """Time a deed; the load is that of the minute before, without the deed itself."""
    each, loads = [], []
    for _ in range(times):
        loads.append(round(os.getloadavg()[0], 2))
        started = time.monotonic()
        deed()
        each.append(round(time.monotonic() - started, 2))
    return Row(round(statistics.median(each), 2), tuple(each), aim, tuple(loads))


def copy_checkout(folder: Path) -> Path:
    """What a build reads, so that a file can be changed without anybody else seeing it."""
    for name in ("containers", "matrix", "megacpp_validate"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def build(engine: Engine, root: Path, base: str, *, fresh: bool) -> str:
    """Build the image from a checkout, without a push; its name."""
    plan = ImageRows(read_catalog(root / "matrix"), os.environ).plan("cpu", base)
    name = name_image("cpu", "", TAG)
    bake(engine, plan, name, root, root / "build.log", fresh=fresh)
    return name


def change(root: Path, number: int) -> None:
    """One changed Python file, as after an edit."""
    with (root / CHANGED).open("a", encoding="utf-8") as file:
        file.write(f"\n# changed {number}\n")


def run(engine: Engine, image: str, *words: str) -> None:
    """One container, without a network; raises where it does not end well."""
    command = [engine.docker, "run", "--rm", "--network", "none", image, *words]
    subprocess.run(command, check=True, capture_output=True, env=dict(engine.variables))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default=os.environ.get("MEGACPP_BASE", ""), help="REPOSITORY@sha256:DIGEST")
    parser.add_argument("--times", type=int, default=5)
    asked = parser.parse_args()
    engine = find_engine(os.environ)
    with tempfile.TemporaryDirectory(prefix="megacpp-images-") as name:
        root = copy_checkout(Path(name))
        rows = {
            "cold build, nothing from the cache": measure(lambda: build(engine, root, asked.base, fresh=True), 1, 90)
        }
        numbers = iter(range(asked.times))

        def build_after_a_change() -> None:
            change(root, next(numbers))
            build(engine, root, asked.base, fresh=False)

        rows["build after one changed Python file"] = measure(build_after_a_change, asked.times, 3)
        image = build(engine, root, asked.base, fresh=False)
    rows["doctor in a container"] = measure(lambda: run(engine, image, "doctor"), asked.times, 3)
    check = [sys.executable, "-m", "megacpp_validate.cli", "lock", "--check"]
    rows["`lock --check`"] = measure(
        lambda: subprocess.run(check, cwd=ROOT, check=True, capture_output=True), asked.times, 10
    )
    rows["list of sessions in a container"] = measure(lambda: run(engine, image), asked.times, 1)
    call([engine.docker, "image", "rm", "--force", image], engine.variables)
    text = render_table(engine, rows)
    print(text)
    (DOCS / "images.md").write_text(text)
    (DOCS / "images.json").write_text(json.dumps({key: asdict(row) for key, row in rows.items()}, indent=2) + "\n")


def render_table(engine: Engine, rows: dict[str, Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "<!-- written by benchmarks/images.py -->",
        f"The cpu image, {datetime.now(UTC):%Y-%m-%d}, Docker Engine {engine.version}, {os.cpu_count()} cores. Load is "
        "that of the machine before the measurement: what others did there at the time.",
        "",
        "| | median, s | each, s | aim, s | load before |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {row.seconds:g} | {', '.join(f'{value:g}' for value in row.each)} | {row.aim:g} | "
        f"{', '.join(f'{value:g}' for value in row.loads)} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
