"""What kind of check failed, in which precision and direction, and over which entry points: read from its name.

The names are the probes' own. A name that no row below knows is still a failed check: of contract where nothing was
measured, else of numbers, over everything that its module uses.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ..evidence.receipt import Check, Receipt
from .entries import entries_of_check


class CheckKind(StrEnum):
    """What a failed check means."""

    NUMBERS = "numbers"  # out of bounds, not finite, another dtype or shape
    MEMORY = "memory"  # what calls keep on the device for good
    BACKEND = "backend"  # another path ran than was asked for
    ENTRY = "entry"  # an entry point that is not there
    RAISED = "raised"  # something was raised where nothing should be, or another class of it
    CONTRACT = "contract"  # what is refused, kept, restored, named or supported is not as agreed


class Precision(StrEnum):
    """What was computed in; a fault in one shows in the ones below it, not in the ones above."""

    FP32 = "fp32"
    HALF = "bf16"  # and fp16
    LOW = "fp8"  # and fp4
    ANY = ""


_HALF: Final = frozenset({"bf16", "fp16", "bfloat16", "float16"})
_LOW: Final = frozenset({
    "fp8", "delayed", "current", "block", "mxfp8", "nvfp4", "amax", "scope", "float8_e4m3fn", "float8_e5m2",
})  # fmt: skip
_BACKWARD: Final = frozenset({"grad", "dgrad", "wgrad", "backward"})
_FORWARD: Final = frozenset({"forward", "rows", "row_probs", "out"})
_TENSORS: Final = (
    _BACKWARD | _FORWARD | {"bias", "dtype", "finite", "history", "scale", "blocks", "unpadded", "applied"}
)
_RAISED: Final = re.compile(
    r"(?:^|; |cannot be used: )([A-Za-z_][\w.]*(?:Error|Exception|Missing|Mismatch|Exit|NoBackend))"
    r"(?: instead of \w+)?: (.*)",
    re.DOTALL,
)
_BY_NATIVE: Final = re.compile(r"\bby native\b|, seen native\b|not seen: ")


@dataclass(frozen=True)
class FailedCheck:
    """One check that failed.

    Attributes:
        backward: it is about gradients; None where a name does not tell.
        entries: accessors of the entry points that it can be about; None where it can be any.
        raised: what its detail says was raised, as "class: text"; empty where nothing was.
        shape: a tensor of another shape came out.
    """

    name: str
    kind: CheckKind
    precision: Precision
    backward: bool | None
    entries: frozenset[str] | None
    raised: str = ""
    shape: bool = False

    @property
    def shown(self) -> str:
        """Its kind as a signature keeps it: not which case, nor how many."""
        if self.kind is CheckKind.RAISED:
            return f"raised {self.raised.partition(':')[0]}"
        if self.kind is CheckKind.ENTRY:
            return f"entry {', '.join(sorted(self.entries or ()))}"
        if self.kind is CheckKind.CONTRACT:
            return f"contract {_stem(self.name)}"
        way = {None: "", True: " backward", False: " forward"}[self.backward]
        return f"{self.kind.value}{f' {self.precision.value}' if self.precision.value else ''}{way}"


def read_failed_checks(receipt: Receipt) -> tuple[FailedCheck, ...]:
    """Every failed check of a receipt, in its order."""
    return tuple(read_failed_check(receipt.probe, check) for check in receipt.checks if not check.passed)


def read_failed_check(probe: str, check: Check) -> FailedCheck:
    """What a failed check of a probe means."""
    words = re.split(r"[.]", check.name)
    kind, raised = _kind(check, words)
    shape = kind is CheckKind.NUMBERS and bool(re.search(r"\bshape\b|\] instead of ", check.detail))
    return FailedCheck(
        check.name, kind, _precision(words), _direction(words), entries_of_check(probe, check), raised, shape
    )


def _kind(check: Check, words: list[str]) -> tuple[CheckKind, str]:
    name, detail = check.name, check.detail
    if words[0] == "accessor":
        return CheckKind.ENTRY, ""
    if not check.parts and (found := _RAISED.search(detail)):
        return CheckKind.RAISED, f"{found[1].rpartition('.')[2]}: {found[2]}"
    if _says_nothing_finite(check):
        return CheckKind.NUMBERS, ""  # also where what failed asks which precision it was: NaN is in none
    if words[-1] == "memory":
        return CheckKind.MEMORY, ""
    failed = {part.name for part in check.parts if not part.passed}
    if words[-1] in ("backend", "layers", "rounded") or "low-precision-ran" in failed or _SCOPE.match(name):
        return CheckKind.BACKEND, ""
    if not check.parts and (words[0] == "spec" or words[-1] == "codes") and _BY_NATIVE.search(detail):
        return CheckKind.BACKEND, ""
    measured = check.parts or words[0] == "amax" or name == "second-use"
    if measured or (not _CONTRACT.match(name) and _TENSORS.intersection(words)):
        return CheckKind.NUMBERS, ""
    return CheckKind.CONTRACT, ""


def _says_nothing_finite(check: Check) -> bool:
    """Whether what was measured is no number: of a part, a receipt keeps None in place of NaN."""
    if not check.parts:
        return bool(_NO_NUMBER.search(check.detail))
    failed = [part.observed for part in check.parts if not part.passed]
    return bool(failed) and all(one is None or not math.isfinite(one) for one in failed)


_SCOPE: Final = re.compile(r"scope\.\w+\.(?:on|recipe)$")
_NO_NUMBER: Final = re.compile(r"\brelative error nan\b")
_CONTRACT: Final = re.compile(r"(?:refuses|scope|support|availability|plan|swap|spec|weights|shards|checkpoints)\b")


def _precision(words: list[str]) -> Precision:
    for word in words:
        if word == "fp32":
            return Precision.FP32
        if word in _HALF:
            return Precision.HALF
        if word in _LOW:
            return Precision.LOW
    return Precision.ANY


def _direction(words: list[str]) -> bool | None:
    if _BACKWARD.intersection(words):
        return True
    return False if _FORWARD.intersection(words) else None


def _stem(name: str) -> str:
    """A name without its case: its first word, and its last one where that is no number."""
    words = name.split(".")
    return ".".join(dict.fromkeys((words[0], words[-1]))) if len(words) > 1 else name
