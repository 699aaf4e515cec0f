"""Whether a task did what it is there for: where compiling is switched off, its process ends well and did nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ..catalog.prewarm import PrewarmTask
from .prewarm import Answer
from .variables import hash_variables

# Libraries whose processes tell what a cache had. Kernels of a graph of TorchInductor are Triton's when it is compiled,
# and the graph's when it is found.
COUNTED: Final = {
    "deep_gemm": "deep_gemm", "fa4": "fa4", "inductor": "inductor or triton", "triton": "inductor or triton",
}  # fmt: skip
_TELL_THEIR_KEY: Final = ("fa4", "inductor")  # always, where a cache was asked at all (jit/watch_*.py)
_TELLS_NOBODY: Final = "cuda"  # what its cache has: its compiles are seen in new files alone
_NAMED: Final = 4


def asked_nothing(task: PrewarmTask, answer: Answer) -> bool:
    """Whether a task neither compiled nor found anything of the library that it is there for.

    Of probes and cells nothing is known beforehand: their library is that of the cache that gains most from them, and
    another precision may not ask it. Of the driver's cache nobody knows what it was asked for and had.
    """
    if task.is_cell or answer.asked is None or task.library == _TELLS_NOBODY:
        return False
    return COUNTED.get(task.library, task.library) not in {COUNTED.get(one, one) for one in answer.asked}


def hold_to_purpose(task: PrewarmTask, answer: Answer, variables: Mapping[str, str]) -> Answer:
    """The answer, as a failure where nothing was compiled ahead of time, or nothing of it was kept.

    Args:
        task: that answered.
        answer: of a task that ran.
        variables: of its environment, in which the cause is looked for.
    """
    if task.is_cell or answer.failure or answer.missing:
        return answer
    if asked_nothing(task, answer):
        said = f"it compiled nothing for {task.library}, and looked for nothing in its cache"
    elif lost := [one for one in answer.compiled if one.library in _TELL_THEIR_KEY and not one.looked_for]:
        names = ", ".join(f"{one.library} {one.kernel}" for one in lost[:_NAMED])
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        said = f"what it compiled is in no cache, since none was asked: {names}{more}"
    else:
        return answer
    return replace(answer, failure=f"{said}. {_say_cause(variables)}")


def _say_cause(variables: Mapping[str, str]) -> str:
    if names := ", ".join(hash_variables(variables)):
        return (
            f"Likely cause: a variable switches compiling, or its cache, off; set are {names}. Next step: unset it, "
            "and prewarm again."
        )
    return (
        "Likely cause: a release of that library which the monitor does not know, or a setting in its own files. Next "
        "step: look at the log."
    )
