"""What one probe process is told: one JSON object on its standard input."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from ..evidence.receipt import cell_id


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

    @property
    def cell(self) -> str:
        """The join key."""
        return cell_id(self.stack, self.target.id, self.probe)


def read_order(text: str) -> Order:
    """An order from its JSON text.

    Raises:
        ValueError: it is no JSON, lacks a key, or has one that is not known.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        row = data.pop("target")
        unknown = set(data) - {field.name for field in fields(Order)} | set(row) - {
            field.name for field in fields(Target)
        }
        if unknown:
            raise ValueError(f"unknown keys: {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        target = Target(**values)
        return Order(target=target, **data)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as fault:
        raise ValueError(
            f"the order of a probe cannot be read: {type(fault).__name__}: {fault}. Likely cause: host and environment "
            "have different versions of megacpp-validate. Next step: use one version on both sides."
        ) from fault
