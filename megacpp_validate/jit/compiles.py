"""What the compilers of this process did, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

ROOT: Final = "MEGACPP_JIT_ROOT"  # set where processes share the caches
ARCH: Final = "MEGACPP_JIT_ARCH"
LONGEST: Final = 400  # characters of a shape: a signature of thirty arguments says nothing that its first twenty do not
_seen: list[Compile] = []


@dataclass(frozen=True)
class Compile:
    """One kernel or graph that was needed and not in memory.

    Attributes:
        library: "triton", "inductor", "cute", "fa4", "deep_gemm", "cuda" (the driver).
        kernel: its name.
        shape: what it was compiled for: shapes, or the signature and its constants.
        seconds: that it took; of a hit, 0.
        cached: whether a cache on disk had it.
        looked_for: key or name under which a cache keeps it, where the library tells.
    """

    library: str
    kernel: str
    shape: str
    seconds: float
    cached: bool
    looked_for: str = ""


def saw(library: str, kernel: str, shape: str, seconds: float, *, cached: bool, looked_for: str = "") -> None:
    """Note a compile, or a hit."""
    short = shape if len(shape) <= LONGEST else f"{shape[:LONGEST]} ..."
    _seen.append(Compile(library, kernel, short, round(seconds, 4), cached, looked_for))


def seen_since(mark: int = 0) -> tuple[Compile, ...]:
    """What was noted after `mark`, which is the length of the list then."""
    return tuple(_seen[mark:])


def words_of(value: Any) -> str:
    """A value as a shape has it: "bf16[8,512]" of a tensor, a list of such, else its text."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind = str(value.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
        return f"{kind}[{','.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(words_of, value))})"
    return str(value)
