"""The signature of a failure: what makes two failures one, whichever module, install, run or release shows them.

What varies between two sightings of one fault is taken out of its text: paths, addresses, numbers, shapes, versions,
process ids, cells. Names are kept: an undefined symbol or a lost keyword is the point.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ...evidence.receipt import Outcome, Receipt
from .failed_checks import read_failed_checks
from .raised import Raised, read_raised

_SHOWN: Final = 400  # characters of a signature's text

# In this order: each pattern is written for what the ones before it leave. What replaces has no digit and no slash, so
# that normalising again changes nothing.
_VARYING: Final[tuple[tuple[str, str], ...]] = (
    (r"\x1b\[[0-9;]*m", ""),  # colours of a log
    # Boilerplate that torch adds to every asynchronous error, or to none, by build.
    (r"Search for `\w+' in https?://\S+ for more information\.?", ""),
    (r"CUDA kernel errors might be asynchronously reported.*?(?:incorrect\.|$)", ""),
    (r"For debugging consider passing CUDA_LAUNCH_BLOCKING=\d\.?", ""),
    (r"Compile with `?TORCH_USE_CUDA_DSA`? to enable device-side assertions\.?", ""),
    (r"https?://\S+", "URL"),
    (r"0x[0-9a-fA-F]+", "ADDRESS"),
    (r"\b(?:te|native)[\w.+]*-(?:h200|b200|gb10|cpu)-(\w+)", "CELL"),  # a cell's id
    (r"(?:~|\.{1,2})?(?:/[^\s/:'\"(),;\[\]]+)*/([^\s/:'\"(),;\[\]]+)", r"\1"),  # a path: its last name
    (r"(\.(?:py|cu|cpp|cc|c|cuh|h|hpp|pyx)):\d+(?::\d+)?", r"\1"),  # a line
    (r"(\.so)(?:\.\d+)+", r"\1"),
    (r"\.(?:cpython|abi)[\w-]*\.so", ".so"),
    (r"\bline \d+", "line"),
    (r"torch\.Size\(\[[^\]]*\]\)", "SHAPE"),
    (r"[\[(]\s*-?\d+(?:\s*[,x]\s*-?\d+)*,?\s*[\])]", "SHAPE"),
    (r"\b\d+(?:x\d+)+\b", "SHAPE"),
    (r"\b(?:pid|PID)[ =:]*\d+", "PID"),
    (r"\bv?\d+(?:\.\d+){2,}(?:[a-z]+\d*)?(?:\+[\w.]+)?", "VERSION"),
    (r"(?<![A-Za-z_\d.])[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![A-Za-z_\d])", "N"),
    (r"\bN(?:[ ,x]+N\b)+", "N"),
    (r"\s+", " "),
)
_COMPILED: Final = tuple((re.compile(pattern), new) for pattern, new in _VARYING)


@dataclass(frozen=True)
class Signature:
    """What makes failures one failure.

    Attributes:
        what: exception class, signal, "timeout"; "fail" where checks failed and nothing was raised.
        frame: innermost frame of vendor code, from its package on and without the line; empty where there is none.
        text: normalised.
        checks: kinds of the checks that failed, sorted, each once.
    """

    what: str
    frame: str = ""
    text: str = ""
    checks: tuple[str, ...] = ()

    @property
    def is_of_checks(self) -> bool:
        """Whether checks make it up, and nothing was raised."""
        return bool(self.checks)

    def __str__(self) -> str:
        if self.checks:
            return f"{self.what}: {', '.join(self.checks)}"
        where = f" in {self.frame}" if self.frame else ""
        text = f": {self.text}" if self.text else ""
        return f"{self.what}{where}{text}"[:_SHOWN]


def sign(receipt: Receipt) -> Signature | None:
    """The signature of a receipt's failure; None where it is good, or says nothing.

    A blocked one has that of what blocks it, as far as its reason tells it.
    """
    if receipt.outcome.is_good or receipt.outcome is Outcome.NOT_RUN:
        return None
    if receipt.outcome is Outcome.FAIL:
        kinds = {check.shown for check in read_failed_checks(receipt)}
        return Signature("fail", checks=tuple(sorted(kinds)) or ("unknown",))
    return sign_raised(read_raised(receipt))


def sign_raised(raised: Raised) -> Signature:
    """The signature of what was raised."""
    if raised.died:  # its last words are a log: what else ran then, in which order
        return Signature(raised.kind, raised.frame)
    return Signature(raised.kind, raised.vendor_frame, normalise(raised.text))


def is_same(one: Signature | None, other: Signature | None) -> bool:
    """Whether two failures are one. Of checks: the later one has no kind that the earlier one had not."""
    if one is None or other is None:
        return False
    if one.is_of_checks and other.is_of_checks:
        return set(other.checks) <= set(one.checks)
    return one == other


def normalise(text: str) -> str:
    """A text without what varies between two sightings of one fault. Normalising again changes nothing."""
    text = text[:20_000]
    for _ in range(8):
        made = _once(text)
        if made == text:
            return made
        text = made
    return text


def _once(text: str) -> str:
    for pattern, new in _COMPILED:
        text = pattern.sub(new, text)
    return text.strip()
