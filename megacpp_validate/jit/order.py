"""A task of prewarm as the host orders it: one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

CODES: Final = ("stack", "inductor_cpu", "fa4", "triton", "deep_gemm", "expert_rows")


class WrongOrder(ValueError):
    """An order that cannot be read."""


class Lacking(Exception):
    """A task cannot run here, because something that it needs is missing: no error of the task."""


@dataclass(frozen=True)
class JitOrder:
    """A task.

    Attributes:
        task: its id, in the answer again.
        code: one of CODES, a function of `tasks.TASKS`.
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
        WrongOrder: invalid JSON, an unknown or a missing key, or an unknown code.
    """
    try:
        order = JitOrder(**json.loads(text))
        if order.code not in CODES:
            raise ValueError(f"code is {order.code!r}, and is one of {', '.join(CODES)}")
    except (TypeError, ValueError) as fault:
        raise WrongOrder(
            f"the order of a task cannot be read: {fault}. Likely cause: two versions of megacpp-validate. Next step: "
            "use one on both sides."
        ) from fault
    return order
