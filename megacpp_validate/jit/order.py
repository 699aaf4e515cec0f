"""A task of prewarm as the host orders it, and what it answers: one JSON object each way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

CODES: Final = ("stack", "inductor_cpu", "fa4", "triton", "deep_gemm", "expert_rows")
_TEXTS: Final = ("task", "code", "library", "arch", "root")


class WrongOrder(ValueError):
    """An order that cannot be read."""


class Lacking(Exception):
    """What a task needs and is not here: no error of the task."""


@dataclass(frozen=True)
class JitOrder:
    """A task.

    Attributes:
        task: its id, in the answer again.
        code: one of CODES, which is the module `tasks_CODE`.
        library: whose kernels.
        arch: that they are compiled for: "sm_90a"; "cpu".
        settings: as the code takes them.
        root: of the caches; the variables that name each cache are set before Python starts.
        seed: of what the task makes.
    """

    task: str
    code: str
    library: str = ""
    arch: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    root: str = ""
    seed: int = 0

    def setting(self, name: str, default: str = "") -> str:
        """What the row sets under this name."""
        return str(self.settings.get(name, default))

    def words(self, name: str, default: str = "") -> list[str]:
        """The same, as words."""
        return self.setting(name, default).split()


def read_jit_order(text: str) -> JitOrder:
    """An order from its JSON text.

    Raises:
        WrongOrder: it is none; every fault is named.
    """
    try:
        given: Any = json.loads(text)
    except ValueError as fault:
        raise WrongOrder(f"no JSON came in: {fault}. Next step: give a JSON object on standard input.") from fault
    if not isinstance(given, dict):
        raise WrongOrder(f"{given!r} is no JSON object. Next step: give one with task and code.")
    known = {one.name for one in fields(JitOrder)}
    faults = [f"there is no {name}" for name in sorted(set(given) - known)]
    faults += [
        f"{name} is {given[name]!r}, and is a text" for name in _TEXTS if not isinstance(given.get(name, ""), str)
    ]
    faults += [f"{name} is missing" for name in ("task", "code") if not given.get(name)]
    if given.get("code") not in (None, *CODES):
        faults.append(f"code is {given['code']!r}, and is one of {', '.join(CODES)}")
    if not isinstance(given.get("settings", {}), dict):
        faults.append("settings is no object")
    if faults:
        raise WrongOrder(
            f"the order of a task cannot be read: {'; '.join(faults)}. Likely cause: two versions of megacpp-validate. "
            "Next step: use one on both sides."
        )
    return JitOrder(**given)
