"""One rank of the probe `amax_group`: a layer is trained with several reduction groups, and what it remembers is told.

Started as a process, with one JSON object on its standard input; writes one JSON file, and an error as its last words.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from .ranks import end_with_who_started_it

STEPS: Final = 4
# Powers of two by which the data of a rank is larger, rotated by one each step: so each rank has the largest amax of
# any group in some step, and the least in another.
FACTORS: Final = (0, 3, 1, 2)
WIDTH: Final = 128
TENSORS: Final = {"input": (True, 0), "weight": (True, 1), "gradient": (False, 0)}


@dataclass(frozen=True)
class RankOrder:
    """What a rank is told.

    Attributes:
        rank, world: of this process.
        backend: "nccl" or "gloo".
        device: "cuda:0", or "cpu".
        target: whose recipes hold.
        store: a file that the ranks find each other by.
        seconds: how long a rank waits for the others.
        out: where its JSON goes.
        plans: name -> the ranks of each group; () where each rank is alone.
    """

    rank: int
    world: int
    backend: str
    device: str
    target: str
    store: str
    seconds: float
    out: str
    plans: dict[str, tuple[tuple[int, ...], ...]]

    def write(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Step:
    """One step of one rank under one plan, by tensor.

    Attributes:
        amax: largest absolute value of this rank's own tensor.
        remembered: the newest entry of the amax history after the step.
        scale: after the step.
    """

    amax: dict[str, float]
    remembered: dict[str, float]
    scale: dict[str, float]


def main() -> None:
    """Run one rank."""
    end_with_who_started_it()
    order = RankOrder(**json.loads(sys.stdin.read()))
    import torch

    torch.set_num_threads(1)
    if order.device.startswith("cuda"):
        torch.cuda.set_device(order.device)
    torch.distributed.init_process_group(
        order.backend,
        init_method=f"file://{order.store}",
        rank=order.rank,
        world_size=order.world,
        timeout=timedelta(seconds=order.seconds),
    )
    try:
        told = {
            "steps": {name: _run(order, groups) for name, groups in order.plans.items()},
            "refusals": _refusals(order),
        }
        Path(order.out).write_text(json.dumps(told), encoding="utf-8")
    finally:
        torch.distributed.destroy_process_group()


def _run(order: RankOrder, groups: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    layer, owner = _new_layer(order), _group_of(order, groups)
    return [asdict(_step(order, layer, owner, step)) for step in range(STEPS)]


def _step(order: RankOrder, layer: Any, owner: Any, step: int) -> Step:
    import torch

    from ...bridge.fp8_scope import low_precision, te_amax_state

    factor = 2.0 ** FACTORS[(order.rank + step) % len(FACTORS)]
    made = torch.Generator("cpu").manual_seed(1000 * step + order.rank)

    def draw(scale: float) -> Any:
        return (torch.randn(WIDTH, WIDTH, generator=made) * scale).to(order.device, torch.bfloat16)

    rows, weight, gradient = draw(factor), draw(factor), draw(factor / 4)
    with torch.no_grad():
        layer.weight.copy_(weight)
    with low_precision(target=order.target, amax_reduction_group=owner, recipe="delayed"):
        out = layer(rows.requires_grad_())
    out.backward(gradient)
    layer.zero_grad(set_to_none=True)
    remembered, scale = {}, {}
    for name, (forward, column) in TENSORS.items():
        history, scales = te_amax_state(layer, forward=forward)
        remembered[name], scale[name] = float(history[-1, column]), float(scales[column])
    amax = {"input": rows, "weight": weight, "gradient": gradient}
    return Step({name: float(one.detach().abs().amax()) for name, one in amax.items()}, remembered, scale)


def _new_layer(order: RankOrder) -> Any:
    import torch

    from ...bridge import imports as te
    from ...bridge.fp8_scope import reset_te_state
    from ...bridge.layer_watch import watch_layers

    reset_te_state()
    layer = te.linear.require()(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device=order.device)
    watch_layers(layer)
    return layer


def _group_of(order: RankOrder, groups: Sequence[Sequence[int]]) -> Any:
    """This rank's group; every rank makes every group, as `new_group` wants."""
    import torch

    from ...bridge.fp8_scope import SINGLE_OWNER

    made = [(ranks, torch.distributed.new_group(list(ranks))) for ranks in groups]
    return next((group for ranks, group in made if order.rank in ranks), SINGLE_OWNER)


def _refusals(order: RankOrder) -> Mapping[str, str]:
    """What the bridge says to a group that is left open, to one of other ranks, and to one that changes."""
    import torch

    from ...bridge.fp8_scope import SINGLE_OWNER, low_precision

    outside = [torch.distributed.new_group([rank for rank in range(order.world) if rank != out])
               for out in range(order.world)]  # fmt: skip
    said = {
        "left-open": _said(lambda: low_precision(target=order.target, amax_reduction_group=None)),
        "of-others": _said(lambda: low_precision(target=order.target, amax_reduction_group=outside[order.rank])),
    }
    layer = _new_layer(order)
    _step(order, layer, SINGLE_OWNER, 0)
    return {**said, "changed": _said(lambda: _step(order, layer, torch.distributed.group.WORLD, 1))}


def _said(call: Any) -> str:
    """Class and text of what was raised; empty where nothing was."""
    try:
        call()
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"
    return ""


if __name__ == "__main__":
    main()
