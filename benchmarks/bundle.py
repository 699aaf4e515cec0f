"""Restoring an offline bundle beside `cp` of the files that it restores, and verifying it beside `sha256sum`.

    python benchmarks/bundle.py --output docs/benchmarks [--folder DIR on the disk to be measured]

A bundle of about 1 GB of JIT caches, large files and thousands of small ones. `restore.py --jit` verifies the archive
and unpacks it; `cp -r` copies the same files from where they lie unpacked, and verifies nothing. Rounds of all
competitors are interleaved and their order turned; each starts with its sources out of the page cache (cold) or in it
(warm). Figures are medians, ratios medians of the ratios within a round.

Two costs of the machine, of up to 2 s each, are kept out of every time. An ext4 without a journal searches past each
inode that was deleted in the last minutes when it creates a file, so what a run wrote is emptied and stays until the
end. A virtual machine gets memory from its host at the first write to it, so that is written to before each run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import mmap
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megacpp_validate.images.bundle import write_sums  # noqa: E402
from megacpp_validate.images.restore import CACHES, MANIFEST, SCHEMA  # noqa: E402

AIM = 0.8  # of the speed of cp
MB = 10**6
LARGE, LARGE_BYTES = 9, 104 * MB
SMALL, SMALL_BYTES = 3000, 20_000  # what a Triton cache of a training run looks like


def write_sample(caches: Path, bundle: Path) -> None:
    """Caches of bytes that do not compress, and a bundle that has them as its archive."""
    noise = random.Random(0).randbytes(MB)
    for number in range(SMALL):
        path = caches / f"triton/{number % 256:02x}/{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number.to_bytes(8, "big") + noise[: SMALL_BYTES - 8])
    for large in range(LARGE):
        with (caches / f"{large}.bin").open("wb") as file:
            for number in range(LARGE_BYTES // MB):
                file.write(number.to_bytes(8, "big") + noise[8:])
    with tarfile.open(bundle / CACHES, "w") as archive:
        archive.add(caches, ".")
    shutil.copy(ROOT / "megacpp_validate/images/restore.py", bundle)
    texts = {"made": "", "target": "cpu", "platform": "linux/amd64", "python": "3.11", "lock": "0" * 64}
    manifest = {"schema": SCHEMA, **texts, "image": None, "absent": {}}
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    write_sums(bundle)


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


def empty(folder: Path) -> None:
    """Give the space of every file back, and keep the file."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            os.truncate(path, 0)


def back_memory() -> None:
    """Write to as much free memory as a run takes for what it reads and writes: the host has then given it."""
    size = 3 * (LARGE * LARGE_BYTES + SMALL * SMALL_BYTES)
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, size, 2**21):
            memory[start] = 1


def measure(caches: Path, bundle: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every competitor, a value a round, for cold and warm sources."""
    written = bundle.parent / "written"
    written.mkdir()
    target = written / "now"
    restore = [sys.executable, "-I", str(bundle / "restore.py")]
    runs = {
        "sha256sum --check": ["sh", "-c", f"cd '{bundle}' && sha256sum --quiet --check SHA256SUMS"],
        "restore.py": restore,
        "cp -r": ["cp", "-r", str(caches), str(target)],
        "restore.py --jit": [*restore, "--jit", str(target)],
    }
    found: dict[str, dict[str, list[float]]] = {state: {name: [] for name in runs} for state in ("cold", "warm")}
    names = list(runs)
    for turn in range(rounds):
        for state, prepare in (("cold", forget), ("warm", remember)):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                os.sync()  # what the one before wrote
                prepare(caches if name == "cp -r" else bundle)
                back_memory()
                started = time.perf_counter()
                subprocess.run(runs[name], check=True, stdout=subprocess.DEVNULL)
                found[state][name].append(time.perf_counter() - started)
                if target.exists():
                    empty(target.rename(written / f"{turn}, {state}, {name}"))
    return found


def tell(found: dict[str, dict[str, list[float]]], size: int) -> list[dict[str, Any]]:
    """A row a competitor and state: median seconds, spread, bytes a second, and the ratio to what it stands beside."""
    beside = {"restore.py": "sha256sum --check", "restore.py --jit": "cp -r"}
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
        f"{data['date']}, {data['machine']}; caches of {data['bytes'] / 1e9:.2f} GB in {data['files']} "
        f"files, {data['rounds']} rounds, interleaved. Speed ratio: of `restore.py` to what stands beside it, the "
        f"median of the ratios within a round; the aim is {AIM:g} of the speed of `cp -r`.",
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
        "`restore.py` verifies; `restore.py --jit` verifies and writes the files that `cp -r` writes, which verifies "
        "nothing. Cold: the sources are not in the page cache. Warm: they are in it. No time includes a wait until "
        "what was written is on the disk.",
        "",
        f"The archive has one SHA-256, which one core computes, so no restore is faster than `restore.py` verifies: "
        f"the speed ratio to `cp -r` is {data['bound']['cold']:.2f} at most cold, {data['bound']['warm']:.2f} warm.",
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
        caches, bundle = Path(name, "caches"), Path(name, "bundle")
        for folder in (caches, bundle):
            folder.mkdir()
        write_sample(caches, bundle)
        listed = [path.stat().st_size for path in caches.rglob("*") if path.is_file()]
        found = measure(caches, bundle, asked.rounds)
    data = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "rounds": asked.rounds,
        "bytes": sum(listed),
        "files": len(listed),
        "aim": AIM,
        "rows": tell(found, sum(listed)),
        "bound": {
            state: statistics.median(runs["cp -r"]) / statistics.median(runs["restore.py"])
            for state, runs in found.items()
        },
        "seconds": found,
    }
    page = write_page(data)
    if asked.output:
        asked.output.mkdir(parents=True, exist_ok=True)
        (asked.output / "bundle.json").write_text(json.dumps(data, indent=2) + "\n")
        (asked.output / "bundle.md").write_text(page)
    print(page)
    cold = next(row for row in data["rows"] if (row["state"], row["what"]) == ("cold", "restore.py --jit"))
    return 0 if cold["speed_ratio"] >= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
