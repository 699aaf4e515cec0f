"""Time, memory and bytes of the static tier, beside installing both releases with pip; side by side in one run.

Writes docs/benchmarks/canary.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "benchmarks"
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass(frozen=True)
class Measured:
    """One command: wall time in s, peak of its whole process tree in MiB, bytes fetched."""

    seconds: float
    peak_mib: float
    fetched: int


def run_measured(command: list[str], **environment: str) -> Measured:
    """Run a command in a session of its own and watch its process tree; raises if it fails."""
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    peak = 0
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.02):
            peak = max(peak, resident_kib(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    stop.set()
    watcher.join()
    if code not in {0, 1}:
        raise SystemExit(f"{' '.join(command)} ended with {code}")
    return Measured(time.monotonic() - started, peak / 1024, 0)


def resident_kib(session: int) -> int:
    """Resident memory of every process of a session; pages that they share count for each."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    total += int((entry / "statm").read_text().split()[1]) * PAGE_KIB
            except (OSError, ValueError, IndexError):
                continue
    return total


def measure_canary(old: str, new: str, cache: Path, *arguments: str) -> Measured:
    """One call of the canary with a cache folder; what it fetched is what is new among the wheels there."""
    before = wheel_bytes(cache)
    command = [sys.executable, "-m", "megacpp_validate.cli", "canary", *([old, new] if old else []), *arguments]
    got = run_measured(command, MEGACPP_CACHE_DIR=str(cache))
    return Measured(got.seconds, got.peak_mib, wheel_bytes(cache) - before)


def wheel_bytes(folder: Path) -> int:
    """Bytes of the wheels in a folder tree."""
    return sum(file.stat().st_size for file in folder.rglob("*.whl"))


def measure_install(version: str, folder: Path) -> Measured:
    """`pip install` of one release without its dependencies: sources and core library."""
    names = [f"transformer_engine=={version}", f"transformer_engine_cu12=={version}"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    fetch = run_measured([*pip, "download", "--no-deps", "--only-binary=:all:", "-d", str(folder / "wheels"), *names])
    wheels = [str(file) for file in (folder / "wheels").glob("*.whl")]
    put = run_measured([*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site"), *wheels])
    return Measured(fetch.seconds + put.seconds, max(fetch.peak_mib, put.peak_mib), wheel_bytes(folder / "wheels"))


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", default="2.17.1")
    parser.add_argument("--new", default="2.20.2")
    parser.add_argument("--without-install", action="store_true", help="leave pip install out (it fetches gigabytes)")
    asked = parser.parse_args()
    rows: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        rows["one pair, cold cache"] = measure_canary(asked.old, asked.new, work / "cache")
        rows["one pair, warm cache"] = measure_canary(asked.old, asked.new, work / "cache")
        rows["all adjacent pairs, cold cache"] = measure_canary("", "", work / "cache", "--all")
        rows["all adjacent pairs, warm cache"] = measure_canary("", "", work / "cache", "--all")
        if not asked.without_install:
            installs = []
            for version in (asked.old, asked.new):
                installs.append(measure_install(version, work / version))
                shutil.rmtree(work / version)
            rows["pip install of both releases, no dependencies"] = Measured(
                sum(one.seconds for one in installs),
                max(one.peak_mib for one in installs),
                sum(one.fetched for one in installs),
            )
    text = render_table(asked.old, asked.new, rows)
    print(text)
    DOCS.mkdir(parents=True, exist_ok=True)
    (DOCS / "canary.md").write_text(text)
    (DOCS / "canary.json").write_text(json.dumps({key: asdict(row) for key, row in rows.items()}, indent=2) + "\n")


def render_table(old: str, new: str, rows: dict[str, Measured]) -> str:
    """The rows as Markdown, with ratios to one cold pair."""
    base = rows["one pair, cold cache"]
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    lines = [
        "<!-- written by benchmarks/canary.py -->",
        f"Transformer Engine {old} to {new}, {now}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        "one run side by side. Memory is the sum over the process tree.",
        "",
        "| | time, s | peak memory, MiB | fetched, MB | time, x cold pair | bytes, x cold pair |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {row.seconds:.1f} | {row.peak_mib:.0f} | {row.fetched / 1e6:.2f} | "
        f"{row.seconds / base.seconds:.2f} | {row.fetched / max(base.fetched, 1):.1f} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
