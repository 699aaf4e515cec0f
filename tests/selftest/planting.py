"""Plant a mutant in this process, and take it out again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megacpp_validate.evidence.selftest import Fault, Mutant
from megacpp_validate.selftest.faults import Trace
from megacpp_validate.selftest.plant import find_point, plant


def vendor(at: str, fault: Fault, **parameters: Any) -> Mutant:
    """A mutant of what an accessor gives."""
    return Mutant("test", "attention", "vendor", "te", at, fault, "says", parameters)


def wrapper(at: str, fault: Fault, **parameters: Any) -> Mutant:
    """A mutant of an attribute below `bridge`."""
    return Mutant("test", "attention", "wrapper", "te", at, fault, "says", parameters)


@contextmanager
def planted(mutant: Mutant) -> Iterator[Trace]:
    """The mutant is in place inside."""
    point = find_point(mutant)
    kept = inspect.getattr_static(point.holder, point.name)
    try:
        yield plant(mutant)
    finally:
        setattr(point.holder, point.name, kept)
