"""What the process of a task answered, and whether it did what it is there for.

Where compiling is switched off, a process ends well and did nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ..catalog.prewarm import PrewarmTask
from ..evidence.receipt import Outcome, Receipt
from .manifest import hash_variables
from .result import JitCompile

# Libraries whose processes report what a cache had. Kernels of a graph of TorchInductor are Triton's when it is
# compiled, and the graph's when it is found.
COUNTED: Final = {
    "deep_gemm": "deep_gemm", "fa4": "fa4", "inductor": "inductor or triton", "triton": "inductor or triton",
}  # fmt: skip
_REPORT_THEIR_KEY: Final = ("fa4", "inductor")  # always, where a cache was asked at all (jit/watch_*.py)
_REPORTS_NOTHING: Final = "cuda"  # what its cache has: its compiles are seen in new files alone
_NAMED: Final = 4
_GOOD: Final = (Outcome.PASS, Outcome.EXPECTED_UNSUPPORTED)
_DID_NOT_RUN: Final = (Outcome.NOT_RUN, Outcome.BLOCKED)


@dataclass(frozen=True)
class Answer:
    """What the process of a task answered.

    Attributes:
        compiled: kernels that no cache had.
        hits: library -> kernels that a cache had; None where it is not counted.
        failure: why it did not come to a good end.
        missing: why it could not run here: no GPU, no such library. That is no failure.
        unwatched: what it compiled in memory, where there is no cache: "LIBRARY: why".
        notes: what else a person should know.
    """

    compiled: tuple[JitCompile, ...] = ()
    hits: Mapping[str, int] | None = field(default_factory=dict)
    failure: str = ""
    missing: str = ""
    unwatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def asked(self) -> tuple[str, ...] | None:
        """Libraries that it compiled for, or found in a cache; None where it does not count what it found."""
        if self.hits is None:
            return None
        found = {library for library, number in self.hits.items() if number}
        return tuple(sorted(found | {one.library for one in self.compiled}))


def asked_nothing(task: PrewarmTask, answer: Answer) -> bool:
    """Whether a task neither compiled nor found anything of the library that it is there for.

    Of probes and cells nothing is known beforehand: their library is that of the cache that gains most from them, and
    another precision may not ask it. The driver's cache does not report hits.
    """
    if task.is_cell or answer.asked is None or task.library == _REPORTS_NOTHING:
        return False
    return COUNTED.get(task.library, task.library) not in {COUNTED.get(one, one) for one in answer.asked}


def hold_to_purpose(task: PrewarmTask, answer: Answer, variables: Mapping[str, str]) -> Answer:
    """The answer, as a failure where nothing was compiled ahead of time, or nothing of it was kept.

    Args:
        task: that answered.
        answer: of a task that ran.
        variables: of its environment, in which the cause may be.
    """
    if task.is_cell or answer.failure or answer.missing:
        return answer
    lost = [one for one in answer.compiled if one.library in _REPORT_THEIR_KEY and not one.looked_for]
    if asked_nothing(task, answer):
        said = f"it compiled nothing for {task.library}, and looked for nothing in its cache"
    elif lost:
        names = ", ".join(f"{one.library} {one.kernel}" for one in lost[:_NAMED])
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        said = f"what it compiled is in no cache, since none was asked: {names}{more}"
    else:
        return answer
    names = ", ".join(hash_variables(variables)) or "none"
    cause = f"a variable switches compiling, or its cache, off (set: {names}), or the monitor does not know the release"
    return replace(answer, failure=f"{said}. Likely cause: {cause}. Next step: unset it, or look at the log.")


def read_receipt_answer(receipt: Receipt) -> Answer:
    """What the receipt of a cell reports of compiles; those that it counts and does not list are compiles too."""
    jit = receipt.jit
    listed = [
        JitCompile(library=one.library, kernel=one.kernel, shape=one.shape, seconds=max(0.0, one.seconds))
        for one in jit.compiled
    ]
    counted = Counter(jit.warm_up) + Counter(jit.after) - Counter(one.library for one in listed)
    unlisted = [JitCompile(library=name, kernel="(not listed in the receipt)") for name in counted.elements()]
    reason = f"{receipt.outcome.value}: {receipt.reason}" if receipt.reason else receipt.outcome.value
    return Answer(
        compiled=(*listed, *unlisted),
        hits=jit.hits,
        failure="" if receipt.outcome in (*_GOOD, *_DID_NOT_RUN) else reason,
        missing=reason if receipt.outcome in _DID_NOT_RUN else "",
        unwatched=tuple(f"{library}: {why}" for library, why in jit.unwatched.items()),
        notes=jit.notes,
        seconds=receipt.seconds.get("total", 0.0),
    )
