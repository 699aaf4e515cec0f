"""Ten thousand receipts: the reader, `history`, the gate and the report over them, and `nox -l`; in one run.

    python benchmarks/evidence.py --output docs/benchmarks [--receipts 10000] [--rounds 3] [--only history]

The store is made of the committed receipts (`benchmarks/evidence_store.py`) in a temporary folder. Each deed is a
process of its own, as a user starts it; its memory is the sum over its process tree, looked at every 50 ms, where pages
that two processes share count twice. Figures are medians of rounds; files lie in the page cache but where it says
otherwise. Where more is at work than the machine has cores, wall time says little: seconds of CPU stand beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.canary import resident_kib  # noqa: E402
from benchmarks.evidence_store import Sample, end_of, read_samples, write_store  # noqa: E402

CELL: Final = "te2.20.2-h200-attention"
_VERB: Final = ("-m", "megacpp_validate.cli")
_READ: Final = (
    "import sys, time; from pathlib import Path; from megacpp_validate.evidence.store import read_store;"
    "started = time.perf_counter(); read_store(Path(sys.argv[1])); print(time.perf_counter() - started)"
)


@dataclass(frozen=True)
class Aim:
    """What the issues ask of a row; None where it asks for nothing.

    Attributes:
        seconds, mib: at the most.
        per_second: receipts, at the least.
    """

    seconds: float | None = None
    mib: float | None = None
    per_second: float | None = None


@dataclass(frozen=True)
class Deed:
    """Something that is measured.

    Attributes:
        codes: exit codes with which it did what it is for.
        before: made ready before each round.
        rounds: how often; None for what was asked for.
    """

    name: str
    command: tuple[str, ...]
    aim: Aim = Aim()
    codes: tuple[int, ...] = (0,)
    before: Callable[[], object] = lambda: None
    rounds: int | None = None


@dataclass(frozen=True)
class Once:
    """One process: wall time and CPU time of its tree in s, its most memory in MiB, exit code, what it printed."""

    seconds: float
    cpu: float
    mib: float
    code: int
    said: str


def run_once(command: Sequence[str], environment: dict[str, str]) -> Once:
    """Run a command in a session of its own and watch its process tree."""
    with tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=said, stderr=said, start_new_session=True, cwd=ROOT
        )
        peak = 0
        stop = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not stop.wait(0.05):
                peak = max(peak, resident_kib(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - started
        stop.set()
        watcher.join()
        said.seek(0)
        return Once(seconds, used.ru_utime + used.ru_stime, peak / 1024, code, said.read().decode(errors="replace"))


def plan_deeds(store: Path, work: Path, at: str) -> list[Deed]:
    """Every row, in the order in which they are measured: each finds what the one before left.

    Args:
        at: when the gate decides.
    """

    def verb(*words: str) -> tuple[str, ...]:
        return (sys.executable, *_VERB, *words)

    history = ("history", str(store), "--format", "json")
    gate = (
        "release-gate",
        str(store),
        "--target",
        "h200",
        "--stack",
        "te2.20.2",
        "--at",
        at,
        "--unsigned",
        "--format",
        "json",
    )
    site = ("report", str(store), "--output", str(work / "site"), "--format", "json")
    return [
        Deed("read: every head", (sys.executable, "-c", _READ, str(store)), Aim(per_second=2000)),
        Deed("read: files from the disk", (sys.executable, "-c", _READ, str(store)), before=lambda: forget(store)),
        Deed("history of every cell", verb(*history), Aim(seconds=5)),
        Deed("history of a cell, its receipts read in full", verb(*history, "--cell", CELL), rounds=1),
        Deed("gate: te2.20.2 on h200", verb(*gate), Aim(seconds=5, mib=500), (0, 1, 4)),
        Deed("report site", verb(*site), Aim(seconds=20)),
        Deed("nox -l", (str(ROOT / "nox"), "-l"), Aim(seconds=1)),
    ]


def forget(folder: Path) -> None:
    """Put the files of a folder out of the page cache; what is dirty would stay."""
    os.sync()
    for path in folder.rglob("*.json"):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measure(deed: Deed, rounds: int, receipts: int, environment: dict[str, str]) -> dict[str, Any]:
    """One row; one that cannot be measured says why."""
    row: dict[str, Any] = {"what": deed.name, "aim": asdict(deed.aim)}
    each, loads = [], []
    for _ in range(deed.rounds or rounds):
        deed.before()
        loads.append(round(os.getloadavg()[0], 2))
        once = run_once(deed.command, environment)
        if once.code not in deed.codes:
            return {**row, "not_run": f"it ended with {once.code}: {' '.join(once.said.split())[-300:]}"}
        each.append(once)
    seconds = statistics.median(once.seconds for once in each)
    row |= {
        "seconds": round(seconds, 3),
        "each": [round(once.seconds, 3) for once in each],
        "cpu": round(statistics.median(once.cpu for once in each), 3),
        "mib": round(max(once.mib for once in each), 1),
        "code": each[-1].code,
        "loads": loads,
    }
    if deed.name.startswith("read"):
        row |= {"per_second": round(receipts / statistics.median(float(once.said) for once in each))}
    return {**row, "holds": holds(row, deed.aim)}


def holds(row: dict[str, Any], aim: Aim) -> bool | None:
    """Whether a row keeps what was aimed at; None where nothing was."""
    verdicts = [
        *([row["seconds"] <= aim.seconds] if aim.seconds is not None else []),
        *([row["mib"] <= aim.mib] if aim.mib is not None else []),
        *([row["per_second"] >= aim.per_second] if aim.per_second is not None else []),
    ]
    return all(verdicts) if verdicts else None


def add_first_page(row: dict[str, Any], site: Path) -> dict[str, Any]:
    """The report's first page in bytes, which is aimed at too: 300 KB."""
    page = site / "index.html"
    if "seconds" not in row or not page.is_file():
        return row
    size = page.stat().st_size
    files = [path for path in site.rglob("*") if path.is_file()]
    return {
        **row,
        "first_page_bytes": size,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "holds": row["holds"] and size <= 300_000,
    }


def write_page(data: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        "<!-- written by benchmarks/evidence.py -->",
        f"{data['date']}, {data['machine']}; {data['receipts']} receipts of {data['bytes'] / 1e9:.2f} GB "
        f"({data['bytes'] / data['receipts'] / 1000:.0f} KB each, made of {data['samples']} committed ones). Each row "
        f"is a process of its own, started afresh: the median of {data['rounds']} rounds, the most memory of its "
        "process tree, and the load of the minute before, which is the machine's and not its own.",
        "",
        "| what | s | from | to | CPU s | receipts/s | MiB | load | aim | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    lines += [_write_row(row) for row in data["rows"]]
    notes = [
        "Receipts a second are those of the reader alone, without the start of Python; the seconds beside them are "
        "whole. It reads the head of a receipt, and every check of those cells alone that are named."
    ]
    notes += [
        f"The report has {row['files']} files of {row['bytes'] / 1e6:.1f} MB; its first page has "
        f"{row['first_page_bytes'] / 1000:.0f} KB, and 300 KB is the aim."
        for row in data["rows"]
        if "first_page_bytes" in row
    ]
    return "\n".join([*lines, "", *notes]) + "\n"


def _write_row(row: dict[str, Any]) -> str:
    aims = {"seconds": "<= {:g} s", "mib": "<= {:g} MiB", "per_second": ">= {:g} receipts/s"}
    aim = ", ".join(text.format(row["aim"][name]) for name, text in aims.items() if row["aim"][name] is not None)
    if "not_run" in row:
        return f"| {row['what']} | | | | | | | | {aim} | not-run: {row['not_run'].replace('|', '/')} |"
    verdict = {True: "holds", False: "missed", None: ""}[row["holds"]]
    if row["holds"] is False and max(row["loads"]) > (os.cpu_count() or 1):
        verdict = "missed, and the machine had other work"
    times = f"{row['seconds']:.2f} | {min(row['each']):.2f} | {max(row['each']):.2f}"
    return (
        f"| {row['what']} | {times} | {row['cpu']:.2f} | {row.get('per_second', '')} | {row['mib']:.0f} | "
        f"{max(row['loads']):.1f} | "
        f"{aim} | {verdict} |"
    )


def run_all(work: Path, samples: tuple[Sample, ...], asked: argparse.Namespace) -> dict[str, Any]:
    """Make the store, measure every row."""
    store = work / "store"
    size = write_store(store, asked.receipts, samples)

    environment = {"MEGACPP_CACHE_DIR": str(work / "cache"), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    rows = []
    for deed in plan_deeds(store, work, end_of(asked.receipts, samples).date().isoformat()):
        if asked.only in deed.name:
            row = measure(deed, asked.rounds, asked.receipts, environment)
            rows.append(add_first_page(row, work / "site") if deed.name == "report site" else row)
            print(_write_row(rows[-1]), flush=True)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "receipts": asked.receipts,
        "samples": len(samples),
        "bytes": size,
        "rounds": asked.rounds,
        "rows": rows,
    }


def main() -> int:
    """Measure, write both files; 1 where an aim is missed or could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--receipts", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows with this in their name")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megacpp-evidence-") as name:
        data = run_all(Path(name), read_samples(), asked)
    page = write_page(data)
    print(page)
    if asked.output:
        (asked.output / "evidence.json").write_text(json.dumps(data, indent=2) + "\n")
        (asked.output / "evidence.md").write_text(page)
    return 0 if all(row.get("holds", "not_run" not in row) is not False for row in data["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
