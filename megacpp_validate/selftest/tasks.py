"""The order of a selftest, the tasks of its processes, and each run as a line of JSON. Torch is not imported here."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Final

from ..evidence.receipt import Outcome, Receipt
from ..evidence.selftest import Fault, Mutant, Requested, SelftestOrder, SelftestRun
from ..probes.order import Order, Target

PATHS: Final[tuple[Requested, ...]] = ("te", "native")
STACKS: Final[dict[Requested, str]] = {"te": "te0.0.0+double", "native": "native"}
BECAUSE: Final[dict[Requested, str]] = {
    "te": "the selftest plants faults in the double of Transformer Engine",
    "native": "the selftest plants faults in native paths",
}


@dataclass(frozen=True)
class Task:
    """What one process does: plant `mutant`, or nothing, and run `probes` on one path."""

    probes: tuple[str, ...]
    requested: Requested
    seed: int
    mutant: Mutant | None = None
    recipes: tuple[str, ...] = ()

    def order(self, probe: str) -> Order:
        """The order of one probe."""
        te = self.requested == "te"
        target = Target(
            id="cpu",
            arch="",
            recipes=self.recipes if te else (),
            production_recipe=self.recipes[0] if te and self.recipes else "",
            attention=("te", "sdpa") if te else ("sdpa",),
        )
        return Order(
            probe=probe,
            stack=STACKS[self.requested],
            target=target,
            requested=self.requested,
            requested_because=BECAUSE[self.requested],
            seed=self.seed,
            quick=True,
        )


@dataclass(frozen=True)
class Started:
    """A probe is under way: if the process dies now, it was this one."""

    probe: str


@dataclass(frozen=True)
class Ended:
    """The run is over."""

    reached: int
    gone: str
    seconds: float


def plan_tasks(order: SelftestOrder) -> tuple[Task, ...]:
    """One task a mutant, and as many clean ones as the order wants, on both paths in turn; a seed each.

    Clean ones come first: whatever is red there is no verdict on any mutant.
    """
    clean = -(-order.clean // max(1, len(order.probes)))
    tasks = [
        Task(order.probes, PATHS[index % len(PATHS)], order.seed + index, recipes=order.recipes)
        for index in range(clean)
    ]
    tasks += [
        Task(order.probes, mutant.requested, order.seed + clean + index, mutant, order.recipes)
        for index, mutant in enumerate(order.mutants)
    ]
    return tuple(tasks)


def lost_receipt(order: Order, outcome: Outcome, reason: str) -> Receipt:
    """The receipt of a probe that took its process with it."""
    return Receipt(
        cell=order.cell,
        stack=order.stack,
        target=order.target.id,
        probe=order.probe,
        outcome=outcome,
        reason=reason,
        requested=order.requested,
        requested_because=order.requested_because,
        seed=order.seed,
    )


def read_selftest_order(text: str) -> SelftestOrder:
    """An order from its JSON text.

    Raises:
        ValueError: invalid JSON, a missing key, or an unknown one.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        data["mutants"] = [Mutant(**{**row, "fault": Fault(row["fault"])}) for row in data["mutants"]]
        values: dict[str, Any] = {key: tuple(it) if isinstance(it, list) else it for key, it in data.items()}
        return SelftestOrder(**values)
    except (KeyError, TypeError, AttributeError, ValueError) as fault:
        raise ValueError(
            f"the order of a selftest cannot be read: {type(fault).__name__}: {fault}. Likely cause: host and "
            "environment have different versions of megacpp-validate. Next step: use one version on both sides."
        ) from fault


def run_line(run: SelftestRun) -> str:
    """The run as JSON, with a line end. JSON has no NaN and no Inf: such a number becomes null."""
    return json.dumps(_finite(asdict(run)), ensure_ascii=True, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
