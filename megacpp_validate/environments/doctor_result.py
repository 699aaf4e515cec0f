"""What the doctor made of an interpreter: every difference between what is there and what is wanted, worst first."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from ..evidence.doctor_look import PackageLook, PathLook
from ..evidence.values import Frozen


class Weight(StrEnum):
    """How bad a difference is; in this order."""

    BREAKS = "breaks"  # it fails, or computes wrongly
    UNKNOWN = "unknown"  # it could not be looked at
    RISK = "risk"  # it may fail, depending on what is called
    NOTE = "note"  # nothing fails by it

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Weight).index(self)


class Aspect(StrEnum):
    """What a difference is about."""

    IMPORT = "import"
    MISSING = "missing"
    VERSION = "version"
    SECOND_COPY = "second copy"
    SYMBOL = "symbol"
    LIBRARY = "library"
    TORCH_ABI = "torch ABI"
    PYTHON_ABI = "Python ABI"
    CUDA_RUNTIME = "CUDA runtime"
    DRIVER = "driver"
    METADATA = "metadata"
    LOOK = "look"


class Difference(Frozen):
    """One difference.

    Attributes:
        subject: package or library that it is about, as people call it.
        seen, wanted: what is there, and what should be; in words.
        breaks: bridge modules that fail by it, in dependency order.
        how: what happens to them.
        next_step: what to do.
        source: where it is known from that this is wanted; empty where it is plain.
    """

    weight: Weight
    aspect: Aspect
    subject: str
    seen: str
    wanted: str
    breaks: tuple[str, ...] = ()
    how: str
    next_step: str
    source: str = ""


class DoctorResult(Frozen):
    """One interpreter, looked at.

    Attributes:
        interpreter: that was looked at, and why it is that one.
        target: whose row it was held against.
        stack: whose row it was held against, and whether it is the one that is pinned.
        path: what it would find, told without importing any of it.
        packages: as loaded, a process each.
        differences: worst first, then in dependency order of what they break.
    """

    schema_id: Literal["megacpp-validate/doctor/1"] = "megacpp-validate/doctor/1"
    tool: str
    interpreter: str
    target: str
    stack: str
    path: PathLook
    packages: tuple[PackageLook, ...]
    differences: tuple[Difference, ...]
    seconds: float

    @property
    def breaks(self) -> bool:
        """Whether something fails."""
        return any(difference.weight is Weight.BREAKS for difference in self.differences)

    @property
    def lacks(self) -> bool:
        """Whether something could not be looked at."""
        return any(difference.weight is Weight.UNKNOWN for difference in self.differences)
