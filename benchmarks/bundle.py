"""Verifying an offline bundle beside `sha256sum` and `cp` of the same files: does verifying every byte cost time?

    python benchmarks/bundle.py --output docs/benchmarks [--folder DIR on the disk to be measured]

A bundle of about 1 GB: an image, wheels, and thousands of small files as JIT caches have them. Rounds of all
competitors are interleaved and their order turned; each starts with its sources out of the page cache (cold) or in it
(warm). Figures are medians, ratios medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megacpp_validate.images.bundle import write_sums  # noqa: E402
from megacpp_validate.images.restore import SCHEMA  # noqa: E402

AIM = 0.8  # of the speed of cp
MB = 10**6
SIZES = {"image.tar": 700 * MB, "jit.tar": 240 * MB}
SMALL, SMALL_BYTES = 3000, 20_000  # what a Triton cache of a training run looks like


def write_sample(folder: Path) -> None:
    """A bundle of bytes that do not compress."""
    noise = random.Random(0).randbytes(MB)
    for name, size in SIZES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            for number in range(size // MB):
                file.write(number.to_bytes(8, "big") + noise[8:])
    for number in range(SMALL):
        path = folder / f"jit/cpu/triton/{number % 256:02x}/{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number.to_bytes(8, "big") + noise[:SMALL_BYTES])
    shutil.copy(ROOT / "megacpp_validate/images/restore.py", folder)
    texts = {"made": "", "target": "cpu", "platform": "linux/amd64", "python": "3.11", "lock": "0" * 64}
    manifest = {"schema": SCHEMA, **texts, "image": None, "absent": {}}
    (folder / "bundle.json").write_text(json.dumps(manifest))
    write_sums(folder)


def forget(folder: Path) -> None:
    """Put the files of a folder out of the page cache; what is dirty would stay."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            opened = os.open(path, os.O_RDONLY)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(opened)


def remember(folder: Path) -> None:
    """Read every file once."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(MB):
                    pass


def measure(bundle: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every competitor, a value a round, for cold and warm sources."""
    restore = [sys.executable, "-I", str(bundle / "restore.py")]
    runs = {
        "sha256sum --check": ["sh", "-c", f"cd '{bundle}' && sha256sum --quiet --check SHA256SUMS"],
        "cp": ["sh", "-c", f"cp -r '{bundle}' '{bundle}.copy' && rm -r '{bundle}.copy'"],
        "restore.py": restore,
    }
    found: dict[str, dict[str, list[float]]] = {state: {name: [] for name in runs} for state in ("cold", "warm")}
    names = list(runs)
    for turn in range(rounds):
        for state, prepare in (("cold", forget), ("warm", remember)):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                prepare(bundle)
                started = time.perf_counter()
                subprocess.run(runs[name], check=True, stdout=subprocess.DEVNULL)
                found[state][name].append(time.perf_counter() - started)
    return found


def tell(found: dict[str, dict[str, list[float]]], size: int) -> list[dict[str, Any]]:
    """A row a competitor and state: median seconds, spread, bytes a second, and the ratio to what it stands beside."""
    beside = {"restore.py": "cp"}
    rows = []
    for state, runs in found.items():
        for name, times in runs.items():
            other = runs.get(beside.get(name, ""), [])
            ratios = [theirs / ours for ours, theirs in zip(times, other, strict=True)] if other else []
            row = {
                "state": state,
                "what": name,
                "seconds": statistics.median(times),
                "low": min(times),
                "high": max(times),
                "mb_s": size / statistics.median(times) / MB,
                "beside": beside.get(name, ""),
                "speed_ratio": statistics.median(ratios) if ratios else None,
            }
            rows.append(row)
    return rows


def write_page(data: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        "<!-- written by benchmarks/bundle.py -->",
        f"{data['date']}, {data['machine']}; a bundle of {data['bytes'] / 1e9:.2f} GB in {data['files']} "
        f"files, {data['rounds']} rounds, interleaved. Speed ratio: of `restore.py` to what stands beside it, the "
        f"median of the ratios within a round; the aim is {AIM:g} of its speed.",
        "",
        "| sources | what | s | from | to | MB/s | beside | speed ratio |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for row in data["rows"]:
        times = " | ".join(f"{row[name]:.2f}" for name in ("seconds", "low", "high"))
        speed = f"{row['mb_s']:.0f}" if row["mb_s"] else ""
        ratio = f"{row['speed_ratio']:.2f}" if row["speed_ratio"] else ""
        beside = f"`{row['beside']}`" if row["beside"] else ""
        lines.append(f"| {row['state']} | `{row['what']}` | {times} | {speed} | {beside} | {ratio} |")
    lines += [
        "",
        "Cold: the sources are out of the page cache, so that it is the disk which is read. Warm: they are in it.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, write both files; 1 where the aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--folder", type=Path, help="folder on the disk that is measured")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megacpp-bundle-", dir=asked.folder) as name:
        bundle = Path(name, "bundle")
        bundle.mkdir()
        write_sample(bundle)
        listed = [path.stat().st_size for path in bundle.rglob("*") if path.is_file()]
        found = measure(bundle, asked.rounds)
    data = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "rounds": asked.rounds,
        "bytes": sum(listed),
        "files": len(listed),
        "aim": AIM,
        "rows": tell(found, sum(listed)),
        "seconds": found,
    }
    page = write_page(data)
    if asked.output:
        asked.output.mkdir(parents=True, exist_ok=True)
        (asked.output / "bundle.json").write_text(json.dumps(data, indent=2) + "\n")
        (asked.output / "bundle.md").write_text(page)
    print(page)
    cold = next(row for row in data["rows"] if (row["state"], row["what"]) == ("cold", "restore.py"))
    return 0 if cold["speed_ratio"] >= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
