"""The amax of a shard is the largest over the ranks that own it, and over no others: seen on ranks that run.

Ranks, pairs of which share a shard, train one layer with data of their own. What each remembers is compared with what
the ranks of its pair have really seen; so is what a layer remembers that runs in a region of the scope, and is shared
otherwise. That wrong groups are seen, tests/probes holds; which groups the bridge refuses, tests/bridge.
"""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import distributed, multiprocessing

from ...bridge import imports as te
from ...bridge.amax_owner import SINGLE_OWNER
from ...bridge.fp8_scope import amax_shared_with, low_precision
from ...bridge.layer_watch import watch_layers
from ...bridge.te_fp8 import reset_te_state, te_amax_state
from ...evidence.receipt import Backend
from ..bench import Bench
from ..emulation import LARGEST, new_state, next_state

SECONDS: Final = 40.0  # that a rank waits for the others
RIGHT: Final = "owners"
# Multicast wants rights that a container may lack; NCCL then fails where it could do without. The update that layers
# in a region ask for would be compiled, while the other ranks wait.
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
Step = dict[str, dict[str, float]]
"""By tensor: "amax" of this rank's own, and behind the step "remembered", newest of the history, and "scale"."""
Seen = Mapping[int, Mapping[str, list[Step]]]
"""Rank -> plan -> steps, as `run_rank` writes them."""


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


def owners_of(world: int) -> Groups:
    """Who shares the layers of the scope: ranks in pairs."""
    return ((0, 1),) if world == 2 else ((0, 1), (2, 3))


def check_groups(bench: Bench, place: Place, program: Callable[..., None] | None = None) -> None:
    """Run the ranks and judge what they report.

    Args:
        bench: where checks go.
        place: of the ranks.
        program: what each rank runs, with the arguments of `run_rank`, which is the default.
    """
    seen = _run(bench, place, program or run_rank)
    where, shared = place.name, owners_of(place.world)
    reasons = () if place.backend == "nccl" else ("nccl: fewer GPUs than ranks, and it takes one rank a GPU",)
    bench.backends.append(Backend(f"amax_group.{where}", "nccl", place.backend, (place.backend,), reasons))
    if len(seen) < place.world:
        return
    alone = tuple((rank,) for rank in range(place.world))
    # Layers in a region of the scope, and behind it, each with its own owners.
    right = {RIGHT: (RIGHT, shared), "nested-outer": ("nested.outer", shared)}
    right["nested-inner"] = ("nested.inner", nested_of(place.world) or alone)
    for name, (plan, groups) in right.items():
        for rank in range(place.world):
            said = "; ".join(wrong_amaxes(seen, plan, rank, groups)[:3])
            bench.check(f"amax_group.{name}.{where}.rank{rank}", not said, said or "amax and scale of its owners")


def nested_of(world: int) -> Groups:
    """Who shares the layers of a region: each rank has its own, or, of four, pairs other than those of the scope."""
    return () if world == 2 else ((0, 2), (1, 3))


def wrong_amaxes(seen_by: Seen, plan: str, rank: int, groups: Groups) -> list[str]:
    """What a rank remembers under a plan that is not what the owners of its shard have seen; [] where all is."""
    owners = next(group for group in groups if rank in group)
    wrong = []
    for tensor, (forward, _) in TENSORS.items():
        largest, state = LARGEST["e4m3" if forward else "e5m2"], new_state(16, 1)
        for step, seen in enumerate(seen_by[rank][plan]):
            amax = max(seen_by[owner][plan][step]["amax"][tensor] for owner in owners)
            state = next_state(state, torch.tensor([amax]), largest)
            remembered, scale = seen["remembered"][tensor], seen["scale"][tensor]
            wanted, at = float(state.scale[0]), f"rank {rank}, step {step}, {tensor}"
            if remembered != amax:
                wrong.append(f"{at}: amax {remembered:g}, its owners saw {amax:g}")
            if abs(scale / wanted - 1.0) > torch.finfo(torch.float32).eps:
                wrong.append(f"{at}: scale {scale:g}, of its owners {wanted:g}")
    return wrong


def _run(bench: Bench, place: Place, program: Callable[..., None]) -> Seen:
    """What each rank reports; a check each says how it ended. torch ends all ranks when one fails.

    A rank that lost its peer fails too, and says that: each has the text of its own fault.
    """
    fault, seen = "", {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.spawn(program, (place, bench.order.target.id, folder), nprocs=place.world)
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as raised:
            fault = raised.msg.strip()
        for rank, device in enumerate(place.devices):
            out, own = Path(folder, f"{rank}.json"), Path(folder, f"{rank}.fault")
            if out.exists():
                seen[rank] = json.loads(out.read_text(encoding="utf-8"))
            said = own.read_text(encoding="utf-8") if own.exists() else fault
            said = "ended well" if rank in seen else said[-LONGEST_TEXT:]
            where = f"rank {rank} of {place.world} on {device}, {place.backend}"
            bench.check(f"amax_group.ended.{place.name}.rank{rank}", rank in seen, f"{where}: {said}")
    return seen


# --- one rank -------------------------------------------------------------------------------------------------------


def run_rank(rank: int, place: Place, target: str, folder: str) -> None:
    """Train a layer with several reduction groups, and write what it remembers to `FOLDER/RANK.json`.

    Args:
        rank: of this process.
        place: of all ranks.
        target: whose recipes hold.
        folder: where the ranks find each other, and where their reports go.
    """
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    if place.devices[rank].startswith("cuda"):
        torch.cuda.set_device(place.devices[rank])
    distributed.init_process_group(
        place.backend, init_method=f"file://{folder}/store", rank=rank, world_size=place.world,
        timeout=timedelta(seconds=SECONDS),
    )  # fmt: skip
    train = partial(_train, rank, place.devices[rank], target)
    try:
        owner, region = (_group_of(rank, groups(place.world)) for groups in (owners_of, nested_of))
        steps = {RIGHT: train(owner)[0]}
        # The fused update leaves histories alone that have nothing new, so that one too many would not show
        # (docs/fp8.md); the other one, asked for at each update, moves them all.
        os.environ[UNFUSED] = "1"  # to the end of this process
        steps |= zip(("nested.inner", "nested.outer"), train(owner, region), strict=True)
        Path(folder, f"{rank}.json").write_text(json.dumps(steps), encoding="utf-8")
    except Exception:
        Path(folder, f"{rank}.fault").write_text(traceback.format_exc().strip(), encoding="utf-8")
        raise
    finally:
        distributed.destroy_process_group()


def _group_of(rank: int, groups: Groups) -> Any:
    """This rank's group; every rank makes every group, as `new_group` wants."""
    made = [(ranks, distributed.new_group(list(ranks))) for ranks in groups]
    return next((group for ranks, group in made if rank in ranks), SINGLE_OWNER)


def _train(rank: int, device: str, target: str, owner: Any, *regions: Any) -> list[list[Step]]:
    """Train a layer that the ranks of `owner` share, behind one in a region of the scope for each of `regions`.

    A region comes first: what it takes from the layer behind it, or leaves to it, then shows. No layer feeds another:
    what each sees is known.
    """
    reset_te_state()
    layers = [_Layer(rank, device) for _ in (*regions, owner)]
    for step in range(STEPS):
        for number, layer in enumerate(layers):
            layer.draw(STEPS * number + step)
        outs = []
        with low_precision(target=target, amax_reduction_group=owner, recipe="delayed"):
            for layer, region in zip_longest(layers, regions):
                with nullcontext() if region is None else amax_shared_with(region):
                    outs.append(layer.run())
        torch.autograd.backward(outs, [layer.drawn["gradient"] for layer in layers])
        for layer in layers:
            layer.note()
    return [layer.steps for layer in layers]


class _Layer:
    """A watched layer, the tensors of its step, each [WIDTH, WIDTH] bf16, and what it remembered behind each step."""

    def __init__(self, rank: int, device: str) -> None:
        self.rank, self.device = rank, device
        self.layer = te.linear.require()(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device=device)
        self.drawn: dict[str, Any] = {}
        self.steps: list[Step] = []
        watch_layers(self.layer)

    def draw(self, step: int) -> None:
        """The tensors of this rank's step."""
        factor = 2.0 ** FACTORS[(self.rank + step) % len(FACTORS)]
        made = torch.Generator("cpu").manual_seed(1000 * step + self.rank)
        for name, scale in {"input": factor, "weight": factor, "gradient": factor / 4}.items():
            self.drawn[name] = (torch.randn(WIDTH, WIDTH, generator=made) * scale).to(self.device, torch.bfloat16)
        with torch.no_grad():
            self.layer.weight.copy_(self.drawn["weight"])

    def run(self) -> Any:
        """The output, to be called in a scope."""
        return self.layer(self.drawn["input"].requires_grad_())

    def note(self) -> None:
        """Keep what the layer remembers behind the backward pass."""
        self.layer.zero_grad(set_to_none=True)
        step: Step = {"amax": {}, "remembered": {}, "scale": {}}
        for name, (forward, column) in TENSORS.items():
            history, scales = te_amax_state(self.layer, forward=forward)
            step["amax"][name] = float(self.drawn[name].detach().abs().amax())
            step["remembered"][name], step["scale"][name] = float(history[-1, column]), float(scales[column])
        self.steps.append(step)
