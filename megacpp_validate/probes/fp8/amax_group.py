"""The amax of a shard is the largest over the ranks that own it, and over no others: seen on ranks that run.

Ranks, pairs of which share a shard, train one layer with data of their own. What each remembers is compared with what
the ranks of its pair have really seen; so is what a layer remembers that runs in a region of the scope, and is shared
otherwise. Then the same comparison must catch groups that are planted wrong: each rank alone, the ranks paired
otherwise, and all of them together.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from ...evidence.receipt import Backend
from ..bench import Bench
from ..emulation import LARGEST
from ..references.delayed_scaling import DelayedRule, new_state, next_state
from .amax_rank import TENSORS, RankOrder, python_command, run_ranks

SECONDS: Final = 75.0
RIGHT: Final = "owners"
REFUSALS: Final = {"left-open": "AmaxGroupMissing", "of-others": "AmaxGroupMissing", "changed": "AmaxGroupChanged"}
RANK_PROGRAM: Final = "megacpp_validate.probes.fp8.amax_rank"
# Multicast wants rights that a container may lack; NCCL then fails where it could do without. The update that layers
# in a region ask for (`amax_rank`) would be compiled, while the other ranks wait.
ENVIRONMENT: Final = {"NCCL_NVLS_ENABLE": "0", "NVTE_TORCH_COMPILE": "0"}

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Place:
    """Where ranks run: by which library they talk, and on which device each."""

    backend: Literal["nccl", "gloo"]
    devices: tuple[str, ...]

    @property
    def world(self) -> int:
        """How many ranks."""
        return len(self.devices)

    @property
    def name(self) -> str:
        """Of the checks: "nccl2"."""
        return f"{self.backend}{self.world}"


def probe(bench: Bench) -> None:
    """On every place that there is."""
    if bench.device == "cpu":
        bench.cannot_run(
            "ranks that share an amax want a GPU, and this is a CPU. Next step: run it where there is one."
        )
    if "delayed" not in bench.recipes:
        bench.cannot_run("only delayed scaling reduces amax, and this target does not have it. Next step: none.")
    for place in places(torch.cuda.device_count()):
        check_groups(bench, place, python_command(RANK_PROGRAM))


def places(gpus: int) -> tuple[Place, ...]:
    """NCCL where there are two GPUs or more, as training has it; four ranks on Gloo too where those are fewer.

    NCCL refuses two ranks on one GPU; Gloo takes GPU tensors, and goes through the host. Only four ranks can be paired
    wrongly.
    """
    on_nccl = (Place("nccl", tuple(f"cuda:{rank}" for rank in range(4 if gpus >= 4 else 2))),) if gpus >= 2 else ()
    if gpus >= 4:
        return on_nccl
    return (*on_nccl, Place("gloo", tuple(f"cuda:{rank % max(gpus, 1)}" for rank in range(4))))


def plans_of(world: int) -> dict[str, Groups]:
    """Plan -> its groups, () where each rank is alone. The first is right; each other one is a fault to be seen."""
    if world == 2:
        return {RIGHT: ((0, 1),), "alone": ()}
    return {RIGHT: ((0, 1), (2, 3)), "alone": (), "other-pairs": ((0, 2), (1, 3)), "everybody": ((0, 1, 2, 3),)}


def check_groups(bench: Bench, place: Place, command: Sequence[str]) -> None:
    """Run the ranks and judge what they tell.

    Args:
        bench: where checks go.
        place: of the ranks.
        command: that starts one.
    """
    told = _run(bench, place, command)
    where = place.name
    reasons = () if place.backend == "nccl" else ("nccl: fewer GPUs than ranks, and it takes one rank a GPU",)
    bench.backends.append(Backend(f"amax_group.{where}", "nccl", place.backend, (place.backend,), reasons))
    if len(told) < place.world:
        return
    owners = plans_of(place.world)
    for rank in range(place.world):
        wrong = wrong_amaxes(told, RIGHT, rank, owners[RIGHT])
        bench.check(
            f"amax_group.{RIGHT}.{where}.rank{rank}", not wrong, "; ".join(wrong[:3]) or "amax and scale of its owners"
        )
    for plan in [name for name in owners if name != RIGHT]:
        caught = [wrong for rank in range(place.world) for wrong in wrong_amaxes(told, plan, rank, owners[RIGHT])]
        said = f"planted: {caught[0]}" if caught else "planted, and nothing was seen"
        bench.check(f"amax_group.{plan}.{where}.caught", bool(caught), said)
    _check_nested(bench, place, told)
    for name, error in REFUSALS.items():
        answers = [told[rank]["refusals"].get(name, "") for rank in range(place.world)]
        refused = all(answer.startswith(error) and "Next step" in answer for answer in answers)
        bench.check(
            f"amax_group.refused.{where}.{name}", refused, " | ".join(dict.fromkeys(answers)) or "nothing was raised"
        )


def nested_of(world: int) -> Groups:
    """Who shares the layers of a region: each rank has its own, or, of four, pairs other than those of the scope."""
    return plans_of(world).get("other-pairs", ())


def _check_nested(bench: Bench, place: Place, told: Mapping[int, Any]) -> None:
    """Layers in a region and behind it; then the region's are to be caught as those of the scope's own group."""
    owners, where = plans_of(place.world)[RIGHT], place.name
    alone: Groups = tuple((rank,) for rank in range(place.world))
    for layer, groups in (("outer", owners), ("inner", nested_of(place.world) or alone)):
        for rank in range(place.world):
            wrong = wrong_amaxes(told, f"nested.{layer}", rank, groups)
            said = "; ".join(wrong[:3]) or "amax and scale of its owners, each pass once"
            bench.check(f"amax_group.nested-{layer}.{where}.rank{rank}", not wrong, said)
    caught = [wrong for rank in range(place.world) for wrong in wrong_amaxes(told, "nested.inner", rank, owners)]
    said = f"planted: {caught[0]}" if caught else "planted, and nothing was seen"
    bench.check(f"amax_group.nested-inner.{where}.caught", bool(caught), said)


def wrong_amaxes(told: Mapping[int, Any], plan: str, rank: int, groups: Groups) -> list[str]:
    """What a rank remembers under a plan that is not what the owners of its shard have seen; [] where all is."""
    owners = next(group for group in groups if rank in group)
    wrong = []
    for tensor, (forward, _) in TENSORS.items():
        rule = DelayedRule(LARGEST["e4m3" if forward else "e5m2"])
        state = new_state(16, 1)
        for step, seen in enumerate(told[rank]["steps"][plan]):
            amax = max(told[owner]["steps"][plan][step]["amax"][tensor] for owner in owners)
            state = next_state(state, torch.tensor([amax]), rule)
            remembered, scale = seen["remembered"][tensor], seen["scale"][tensor]
            if remembered != amax:
                wrong.append(f"rank {rank}, step {step}, {tensor}: amax {remembered:g}, its owners saw {amax:g}")
            wanted = float(state.scale[0])
            if abs(scale / wanted - 1.0) > torch.finfo(torch.float32).eps:
                wrong.append(f"rank {rank}, step {step}, {tensor}: scale {scale:g}, of its owners {wanted:g}")
    return wrong


def _run(bench: Bench, place: Place, command: Sequence[str]) -> dict[int, Any]:
    """What each rank tells; a rank that fails is told with its number and its last words, and tells nothing."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"told-{rank}.json") for rank in range(place.world)]
        orders = [
            RankOrder(
                rank=rank,
                world=place.world,
                backend=place.backend,
                device=device,
                target=bench.order.target.id,
                store=str(Path(folder, "store")),
                seconds=SECONDS / 2,
                out=str(outs[rank]),
                plans=plans_of(place.world),
                nested=nested_of(place.world),
            ).write()
            for rank, device in enumerate(place.devices)
        ]
        results = run_ranks(command, orders, seconds=SECONDS, environment=ENVIRONMENT)
        for rank, (fault, device) in enumerate(zip(results, place.devices, strict=True)):
            said = f"rank {rank} of {place.world} on {device}, {place.backend}: {fault or 'ended well'}"
            bench.check(f"amax_group.ended.{place.name}.rank{rank}", not fault, said)
        return {rank: json.loads(out.read_text(encoding="utf-8")) for rank, out in enumerate(outs) if out.exists()}
