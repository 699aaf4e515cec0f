"""The doctor's answer about an interpreter: every difference between what is there and what is wanted, worst first."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from ..errors import Exit, exit_for
from ..evidence.doctor_look import PackageLook, PathLook
from ..evidence.values import Frozen


class Weight(StrEnum):
    """How bad a difference is; in this order."""

    BREAKS = "breaks"  # it fails, or computes wrongly
    UNKNOWN = "unknown"  # it could not be checked
    RISK = "risk"  # it may fail, depending on what is called
    NOTE = "note"  # nothing fails because of it

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
        subject: the package or library, as people call it.
        seen, wanted: what is there, and what should be; in words.
        breaks: bridge modules that fail because of it, in dependency order.
        how: what happens to them.
        next_step: what to do.
        source: where the wanted state is documented or was seen; empty where it is plain.
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
    """One interpreter, checked.

    Attributes:
        interpreter: its path, and why the doctor chose it.
        target: the row of `matrix/targets.toml` that it is compared with.
        stack: the row of `matrix/stacks.toml` that it is compared with, and whether that is the pinned one.
        path: what it would find, without importing any of it.
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
    def exit(self) -> Exit:
        """Closed where something fails; evidence is missing where something could not be checked."""
        weights = {difference.weight for difference in self.differences}
        return exit_for(breaks=Weight.BREAKS in weights, lacks=Weight.UNKNOWN in weights)
