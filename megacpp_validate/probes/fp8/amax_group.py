"""The amax of a shard is the largest over the ranks that own it, and over no others: seen on ranks that run.

Ranks, pairs of which share a shard, train one layer with data of their own. What each remembers is compared with what
the ranks of its pair have really seen; so is what a layer remembers that runs in a region of the scope, and is shared
otherwise. Then the same comparison must catch groups that are planted wrong: each rank alone, the ranks paired
otherwise, and all of them together.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import distributed, multiprocessing

from ...bridge import imports as te
from ...bridge.fp8_scope import SINGLE_OWNER, amax_shared_with, low_precision, reset_te_state, te_amax_state
from ...bridge.layer_watch import watch_layers
from ...evidence.receipt import Backend
from ..bench import Bench
from ..emulation import LARGEST, DelayedRule, new_state, next_state

SECONDS: Final = 75.0  # for all ranks of a place together
RIGHT: Final = "owners"
REFUSALS: Final = {"left-open": "AmaxGroupMissing", "of-others": "AmaxGroupMissing", "changed": "AmaxGroupChanged"}
# Multicast wants rights that a container may lack; NCCL then fails where it could do without. The update that layers
# in a region ask for (`_run_nested`) would be compiled, while the other ranks wait.
ENVIRONMENT: Final = {"NCCL_NVLS_ENABLE": "0", "NVTE_TORCH_COMPILE": "0"}
UNFUSED: Final = "NVTE_UNFUSED_FP8_UPDATE"
STEPS: Final = 4
# Powers of two by which the data of a rank is larger, rotated by one each step: so each rank has the largest amax of
# any group in some step, and the least in another.
FACTORS: Final = (0, 3, 1, 2)
WIDTH: Final = 128
TENSORS: Final = {"input": (True, 0), "weight": (True, 1), "gradient": (False, 0)}  # name -> is forward, column
LONGEST_TEXT: Final = 1500

Groups = tuple[tuple[int, ...], ...]
Seen = Mapping[int, Any]
"""Rank -> what `run_rank` writes."""


class Place(NamedTuple):
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
        check_groups(bench, place)


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


def check_groups(bench: Bench, place: Place, program: Callable[..., None] | None = None) -> None:
    """Run the ranks and judge what they tell.

    Args:
        bench: where checks go.
        place: of the ranks.
        program: what each rank runs, of the arguments of `run_rank`; that without one.
    """
    seen = _run(bench, place, program or run_rank)
    where, owners = place.name, plans_of(place.world)
    reasons = () if place.backend == "nccl" else ("nccl: fewer GPUs than ranks, and it takes one rank a GPU",)
    bench.backends.append(Backend(f"amax_group.{where}", "nccl", place.backend, (place.backend,), reasons))
    if len(seen) < place.world:
        return
    shared, alone = owners[RIGHT], tuple((rank,) for rank in range(place.world))
    # Layers in a region of the scope, and behind it, each with its own owners.
    right = {RIGHT: (RIGHT, shared), "nested-outer": ("nested.outer", shared)}
    right["nested-inner"] = ("nested.inner", nested_of(place.world) or alone)
    for name, (plan, groups) in right.items():
        for rank in range(place.world):
            said = "; ".join(wrong_amaxes(seen, plan, rank, groups)[:3])
            bench.check(f"amax_group.{name}.{where}.rank{rank}", not said, said or "amax and scale of its owners")
    # Planted: groups that are not the owners', and a region's layers taken for those of the scope's own group.
    planted = {**{name: name for name in owners if name != RIGHT}, "nested-inner": "nested.inner"}
    for name, plan in planted.items():
        caught = [wrong for rank in range(place.world) for wrong in wrong_amaxes(seen, plan, rank, shared)]
        bench.check(
            f"amax_group.{name}.{where}.caught", bool(caught), f"planted: {caught[0] if caught else 'not seen'}"
        )
    for name, error in REFUSALS.items():
        answers = [seen[rank]["refusals"].get(name, "") for rank in range(place.world)]
        refused = all(answer.startswith(error) and "Next step" in answer for answer in answers)
        said = " | ".join(dict.fromkeys(answers)) or "nothing was raised"
        bench.check(f"amax_group.refused.{where}.{name}", refused, said)


def nested_of(world: int) -> Groups:
    """Who shares the layers of a region: each rank has its own, or, of four, pairs other than those of the scope."""
    return plans_of(world).get("other-pairs", ())


def wrong_amaxes(seen_by: Seen, plan: str, rank: int, groups: Groups) -> list[str]:
    """What a rank remembers under a plan that is not what the owners of its shard have seen; [] where all is."""
    owners = next(group for group in groups if rank in group)
    wrong = []
    for tensor, (forward, _) in TENSORS.items():
        rule = DelayedRule(LARGEST["e4m3" if forward else "e5m2"])
        state = new_state(16, 1)
        for step, seen in enumerate(seen_by[rank]["steps"][plan]):
            amax = max(seen_by[owner]["steps"][plan][step]["amax"][tensor] for owner in owners)
            state = next_state(state, torch.tensor([amax]), rule)
            remembered, scale = seen["remembered"][tensor], seen["scale"][tensor]
            wanted, at = float(state.scale[0]), f"rank {rank}, step {step}, {tensor}"
            if remembered != amax:
                wrong.append(f"{at}: amax {remembered:g}, its owners saw {amax:g}")
            if abs(scale / wanted - 1.0) > torch.finfo(torch.float32).eps:
                wrong.append(f"{at}: scale {scale:g}, of its owners {wanted:g}")
    return wrong


def _run(bench: Bench, place: Place, program: Callable[..., None]) -> Seen:
    """What each rank tells; where one fails, that and its traceback, and the others tell nothing."""
    with tempfile.TemporaryDirectory() as folder:
        faults = start_ranks(program, place.world, (place, bench.order.target.id, folder))
        for rank, device in enumerate(place.devices):
            said = f"rank {rank} of {place.world} on {device}, {place.backend}: {faults.get(rank, 'ended well')}"
            bench.check(f"amax_group.ended.{place.name}.rank{rank}", rank not in faults, said)
        outs = {rank: Path(folder, f"{rank}.json") for rank in range(place.world)}
        return {rank: json.loads(out.read_text(encoding="utf-8")) for rank, out in outs.items() if out.exists()}


def start_ranks(
    program: Callable[..., None], world: int, given: tuple[Any, ...], seconds: float = SECONDS
) -> dict[int, str]:
    """Start one process a rank and wait for all; when one fails the others are ended, which would wait for it.

    Args:
        program: of every rank; takes its number and `given`.
        world: how many ranks.
        given: all that can be pickled.
        seconds: for all of them together.

    Returns:
        What each rank did wrong; no rank that ended well is in it.
    """
    ranks = multiprocessing.spawn(program, given, nprocs=world, join=False)
    until = time.monotonic() + seconds
    fault: dict[int, str] = {}
    try:
        while not ranks.join(timeout=max(0.0, until - time.monotonic())) and time.monotonic() < until:
            pass
        late = f"not done after {seconds:g} s"
    except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as failed:
        fault, late = {failed.error_index: failed.msg.strip()[-LONGEST_TEXT:]}, "ended, because another rank failed"
    running = {rank: late for rank, process in enumerate(ranks.processes) if process.exitcode != 0}
    for process in ranks.processes:
        process.kill()
        process.join()
    return running | fault


# --- one rank -------------------------------------------------------------------------------------------------------


def run_rank(rank: int, place: Place, target: str, folder: str) -> None:
    """Train a layer with several reduction groups, and write what it remembers to `FOLDER/RANK.json`.

    Args:
        rank: of this process.
        place: of all ranks.
        target: whose recipes hold.
        folder: where the ranks find each other, and what they tell goes.
    """
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    device = place.devices[rank]
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    distributed.init_process_group(
        place.backend, init_method=f"file://{folder}/store", rank=rank, world_size=place.world,
        timeout=timedelta(seconds=SECONDS / 2),
    )  # fmt: skip
    try:
        one = _Rank(rank, device, target)
        steps = {name: one.run(groups) for name, groups in plans_of(place.world).items()}
        told = {"steps": steps | one.run_nested(place.world), "refusals": one.refusals(place.world)}
        Path(folder, f"{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    finally:
        distributed.destroy_process_group()


Step = dict[str, dict[str, float]]
"""By tensor: "amax" of this rank's own, and behind the step "remembered", newest of the history, and "scale"."""


class _Rank(NamedTuple):
    """What one rank does."""

    rank: int
    device: str
    target: str

    def run(self, groups: Groups) -> list[Step]:
        """Train a layer that the ranks of this one's group share."""
        layer, owner = self.new_layer(), self.group_of(groups)
        return [self.step(layer, owner, step) for step in range(STEPS)]

    def step(self, layer: Any, owner: Any, step: int) -> Step:
        """One step in a scope."""
        drawn = self.draw(step)
        with self.scope(owner):
            out = drawn.run(layer)
        out.backward(drawn.gradient)
        return drawn.seen(layer)

    def run_nested(self, world: int) -> dict[str, list[Step]]:
        """Two layers at once: "nested.inner" in a region of the scope, "nested.outer" behind it, in the scope itself.

        The region comes first: what it takes from the layer behind it, or leaves to it, then shows. Neither layer feeds
        the other, so that what each sees is known. The fused update leaves histories alone that have nothing new, so
        that one too many would not show (docs/fp8.md); the other one, asked for at each update, moves them all.
        """
        inner, outer = self.new_layer(), self.new_layer(anew=False)
        owner, other = self.group_of(plans_of(world)[RIGHT]), self.group_of(nested_of(world))
        told: dict[str, list[Step]] = {"nested.inner": [], "nested.outer": []}
        os.environ[UNFUSED] = "1"
        for step in range(STEPS):
            first, second = self.draw(step), self.draw(STEPS + step)
            with self.scope(owner):
                with amax_shared_with(other):
                    outs = [first.run(inner)]
                outs.append(second.run(outer))
            torch.autograd.backward(outs, [first.gradient, second.gradient])
            told["nested.inner"].append(first.seen(inner))
            told["nested.outer"].append(second.seen(outer))
        del os.environ[UNFUSED]
        return told

    def refusals(self, world: int) -> dict[str, str]:
        """What the bridge says to a group that is left open, to one of other ranks, and to one that changes."""
        outside = [distributed.new_group([rank for rank in range(world) if rank != out]) for out in range(world)]
        said = {
            "left-open": _said(lambda: self.scope(None)),
            "of-others": _said(lambda: self.scope(outside[self.rank])),
        }
        layer = self.new_layer()
        self.step(layer, SINGLE_OWNER, 0)
        return {**said, "changed": _said(lambda: self.step(layer, distributed.group.WORLD, 1))}

    def scope(self, owner: Any) -> Any:
        return low_precision(target=self.target, amax_reduction_group=owner, recipe="delayed")

    def draw(self, step: int) -> _Drawn:
        factor = 2.0 ** FACTORS[(self.rank + step) % len(FACTORS)]
        made = torch.Generator("cpu").manual_seed(1000 * step + self.rank)

        def draw(scale: float) -> Any:
            return (torch.randn(WIDTH, WIDTH, generator=made) * scale).to(self.device, torch.bfloat16)

        return _Drawn(draw(factor), draw(factor), draw(factor / 4))

    def new_layer(self, *, anew: bool = True) -> Any:
        """A watched layer, in a process without a memory of others unless these stay."""
        if anew:
            reset_te_state()
        layer = te.linear.require()(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device=self.device)
        watch_layers(layer)
        return layer

    def group_of(self, groups: Groups) -> Any:
        """This rank's group; every rank makes every group, as `new_group` wants."""
        made = [(ranks, distributed.new_group(list(ranks))) for ranks in groups]
        return next((group for ranks, group in made if self.rank in ranks), SINGLE_OWNER)


class _Drawn(NamedTuple):
    """What a layer gets in a step, each [WIDTH, WIDTH] bf16."""

    input: Any
    weight: Any
    gradient: Any

    def run(self, layer: Any) -> Any:
        """Its output, to be called in a scope."""
        with torch.no_grad():
            layer.weight.copy_(self.weight)
        return layer(self.input.requires_grad_())

    def seen(self, layer: Any) -> Step:
        """What it remembers behind the backward pass."""
        layer.zero_grad(set_to_none=True)
        told: Step = {"amax": {}, "remembered": {}, "scale": {}}
        for name, (forward, column) in TENSORS.items():
            history, scales = te_amax_state(layer, forward=forward)
            told["amax"][name] = float(getattr(self, name).detach().abs().amax())
            told["remembered"][name], told["scale"][name] = float(history[-1, column]), float(scales[column])
        return told


def _said(call: Callable[[], Any]) -> str:
    """Class and text of what was raised; empty where nothing was."""
    try:
        call()
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"
    return ""
