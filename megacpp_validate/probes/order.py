"""What one probe process is told: one JSON object on its standard input."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ..evidence.receipt import cell_id

# Probes that have a row in `speeds`: the host asks for timings of no other.
TIMED = frozenset({"attention", "linear_walker", "permute", "expert_gemm", "native_block", "layer_spec"})


@dataclass(frozen=True)
class Target:
    """The row of `matrix/targets.toml` that the probe is judged by."""

    id: str
    arch: str
    recipes: tuple[str, ...] = ()
    production_recipe: str = ""
    attention: tuple[str, ...] = ()
    deep_gemm: bool = False


@dataclass(frozen=True)
class Order:
    """One cell to run.

    Attributes:
        probe: id of the probe.
        stack: id of the stack, as the receipt names it.
        target: what holds on this kind of machine.
        requested: "te" or "native".
        requested_because: why it is that.
        seed: of weights and inputs.
        tool, commit, lock_hash, image_digest: what the receipt carries.
        quick: the smallest shapes only (the suite's own score runs a probe hundreds of times).
        times: whether the module is timed after it was judged.
        only_times: nothing is judged but that the module runs; for a second look at the noise of the same card.
        turnstile: a file that the probes of one device lock: shared while they compute, alone while they time; empty
            where nothing else runs there.
        environment: identity of the environment, for the receipt.
        code: module below `probes` that looks; without one the probe is named as its module is.
        stands_on: bridge modules that the probe reaches, its own first; without them the one named as the probe.
        settings: what tells this probe from others of the same code.
        needs_te: whether there is nothing to see without Transformer Engine.
        once: a second use tells nothing, or would take too long.
        folder: where the receipt goes, and what lies beside it; empty where nothing is to be written.
    """

    probe: str
    stack: str
    target: Target
    requested: str
    requested_because: str = ""
    seed: int = 0
    tool: str = ""
    commit: str = ""
    lock_hash: str = ""
    image_digest: str = ""
    quick: bool = False
    times: bool = False
    only_times: bool = False
    turnstile: str = ""
    environment: str = ""
    code: str = ""
    stands_on: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    needs_te: bool = True
    once: bool = False
    folder: str = ""

    @property
    def bridge_modules(self) -> tuple[str, ...]:
        """Bridge modules that the probe reaches, its own first."""
        return self.stands_on or (self.probe,)

    @property
    def cell(self) -> str:
        """The join key."""
        return cell_id(self.stack, self.target.id, self.probe)


def read_order(text: str) -> Order:
    """An order from its JSON text.

    Raises:
        ValueError: it is no JSON, or its keys are not those of an order.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        row = data.pop("target")
        return Order(target=Target(**_with_tuples(row)), **_with_tuples(data))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as fault:
        raise ValueError(
            f"the order of a probe cannot be read: {type(fault).__name__}: {fault}. Likely cause: host and environment "
            "have different versions of megacpp-validate. Next step: use one version on both sides."
        ) from fault


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """JSON knows lists only."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
