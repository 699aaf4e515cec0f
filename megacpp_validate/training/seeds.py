"""Seeds by name: what is drawn for one part depends on the run's seed and that part's name, on nothing else.

A part that is added, left out or built by another backend therefore shifts no other part's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch


def seed_of(seed: int, *name: str | int) -> int:
    """The seed of one named part of a run, from 0 to 2^63 - 1; the same on every machine and release."""
    text = "/".join(map(str, (seed, *name)))
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big") >> 1


def generator_of(seed: int, *name: str | int) -> Any:
    """A generator for that part. It lies on the CPU, whose stream is the same beside every GPU."""
    return torch.Generator("cpu").manual_seed(seed_of(seed, *name))


@contextmanager
def drawn_from(seed: int, *name: str | int) -> Iterator[None]:
    """A region in which torch's own CPU generator starts from that part's seed; left as it was found."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(seed, *name))
        yield
