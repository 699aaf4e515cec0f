"""A store of thousands of receipts, made of the committed ones: other runs, commits, machines and times.

What is multiplied are real receipts, byte for byte but for the fields that differ from run to run, so that sizes and
shapes are those of real evidence.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Final

from megacpp_validate.evidence.receipt import seal

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
_TOTAL: Final = re.compile(rb'("(?:total|probe)": )([0-9.]+)')
_MEMORY: Final = re.compile(rb'("peak_memory_mib": )([0-9.]+)')
_STARTED: Final = re.compile(rb'(\n  "started": )"[^"]*"')
_COMMIT: Final = re.compile(rb'(\n  "commit": )"[^"]*"')
_FIRST: Final = datetime(2026, 1, 1, tzinfo=UTC)
_TURN: Final = timedelta(days=2)  # the committed receipts are of little more than one
_SEAL: Final = re.compile(rb'"seal": "[0-9a-f]*"')
_HOST: Final = re.compile(rb'(\n    "host": )"[^"]*"')


@dataclass(frozen=True)
class Sample:
    """One committed receipt.

    Attributes:
        folder: of its run, below the evidence.
        body, tail: up to the first field that differs from run to run, and from there; the body is checks mostly.
        after: time from the oldest committed receipt to this one, so that what is newest of a cell stays so.
    """

    name: str
    folder: str
    body: bytes
    tail: bytes
    after: timedelta


def read_samples(evidence: Path = EVIDENCE) -> tuple[Sample, ...]:
    """Every committed receipt."""
    texts = {path: lzma.decompress(path.read_bytes()) for path in sorted(evidence.rglob("*.json.xz"))}
    started = {path: datetime.fromisoformat(json.loads(text)["started"]) for path, text in texts.items()}
    first = min(started.values())
    return tuple(_split(path, evidence, text, started[path] - first) for path, text in texts.items())


def write_store(store: Path, receipts: int, samples: tuple[Sample, ...], first: int = 0) -> int:
    """Write that many receipts, a folder a run of each sample's folder; gives their bytes.

    Args:
        first: number of the first turn; each turn has every sample once.
    """
    noise, size = random.Random(first), 0
    for turn, sample in islice(_take_turns(samples, first), receipts):
        folder = store / f"run{turn:+05}" / sample.folder
        folder.mkdir(parents=True, exist_ok=True)
        text = _SEAL.sub(b'"seal": ""', sample.body + _vary(sample, turn, noise))
        text = seal(text.decode()).encode()
        (folder / sample.name).write_bytes(text)
        size += len(text)
    return size


def end_of(receipts: int, samples: tuple[Sample, ...]) -> datetime:
    """When the last turn of that many receipts is over."""
    return _FIRST + _TURN * (-(-receipts // len(samples)))


def _take_turns(samples: tuple[Sample, ...], turn: int) -> Iterator[tuple[int, Sample]]:
    while True:
        yield from ((turn, sample) for sample in samples)
        turn += 1


def _split(path: Path, evidence: Path, text: bytes, after: timedelta) -> Sample:
    cut = text.rfind(b'\n  "machine": ')
    return Sample(path.stem, str(path.parent.relative_to(evidence)), text[:cut], text[cut:], after)


def _vary(sample: Sample, turn: int, noise: random.Random) -> bytes:
    """Another run: two days later, a commit every ten runs, one of eight machines, seconds and memory within 3%."""

    def jitter(match: re.Match[bytes]) -> bytes:
        return match[1] + f"{float(match[2]) * noise.uniform(0.97, 1.03):.3f}".encode()

    started = _FIRST + _TURN * turn + sample.after
    tail = _STARTED.sub(rb'\1"' + started.isoformat().encode() + b'"', sample.tail)
    tail = _COMMIT.sub(rb'\1"' + f"{abs(turn) // 10 + 1:040x}".encode() + b'"', tail)
    tail = _HOST.sub(rb'\1"' + f"node-{turn % 8}".encode() + b'"', tail)
    return _MEMORY.sub(jitter, _TOTAL.sub(jitter, tail))
