"""One rank of the probe `amax_group`: a layer is trained with several reduction groups, and what it remembers is told.

Started as a process, with one JSON object on its standard input; writes one JSON file, and an error as its last words.

Ranks as processes: started together, watched, and gone when this is over, whatever becomes of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

LOOK_EVERY: Final = 0.05  # seconds
STARTED_BY: Final = "MEGACPP_RANKS_OF"  # process id, in the environment of a rank
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
LONGEST_TEXT: Final = 1500


def run_ranks(
    command: Sequence[str], orders: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Start one process a rank, each with its order on standard input, and wait for all.

    When one fails the others are ended: they would wait for it. None of them, and nothing that they started, is left.

    Args:
        command: of every rank.
        orders: of each rank, in order.
        seconds: for all of them together.
        environment: added to this process's.

    Returns:
        What each rank did wrong, with its last words; "" where it ended well.
    """
    variables = {**os.environ, **(environment or {}), STARTED_BY: str(os.getpid())}
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, f"{number}.txt") for number in range(len(orders))]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for order, place in zip(orders, said, strict=True):
                place.with_suffix(".json").write_text(order, encoding="utf-8")
                with place.with_suffix(".json").open("rb") as given, place.open("wb") as words:
                    ranks.append(
                        subprocess.Popen(
                            list(command), stdin=given, stdout=words, stderr=subprocess.STDOUT, start_new_session=True,
                            env=variables,
                        )  # a session of its own, so that what it starts can be ended with it
                    )  # fmt: skip
            codes = _wait(ranks, time.monotonic() + seconds)
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
        late = "ended, because another rank failed" if any(codes) else f"not done after {seconds:g} s"
        return tuple(_fault(code, late, place) for code, place in zip(codes, said, strict=True))


def _wait(ranks: Sequence[subprocess.Popen[bytes]], until: float) -> list[int | None]:
    """Exit codes once all have ended, one has failed, or time is over; None of a rank that still runs."""
    while time.monotonic() < until:
        codes = [rank.poll() for rank in ranks]
        if any(codes):
            time.sleep(4 * LOOK_EVERY)  # the others may be about to say why
            break
        if None not in codes:
            break
        time.sleep(LOOK_EVERY)
    return [rank.poll() for rank in ranks]


def _fault(code: int | None, late: str, said: Path) -> str:
    words = said.read_text(encoding="utf-8", errors="replace").strip()[-LONGEST_TEXT:] or "nothing"
    return "" if code == 0 else f"{late}; it said: {words}" if code is None else f"exit code {code}: {words}"


def end_with_who_started_it() -> None:
    """In a rank: the kernel ends this process with the one that started it, which may be killed first."""
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if STARTED_BY in os.environ and os.getppid() != int(os.environ[STARTED_BY]):
        sys.exit("who started this rank is gone")


def python_command(module: str) -> list[str]:
    """Runs a module of this project by this interpreter."""
    return [sys.executable, "-P", "-u", "-m", module]  # -P: the folder it is started in is none of its path


STEPS: Final = 4
# Powers of two by which the data of a rank is larger, rotated by one each step: so each rank has the largest amax of
# any group in some step, and the least in another.
FACTORS: Final = (0, 3, 1, 2)
WIDTH: Final = 128
UNFUSED: Final = "NVTE_UNFUSED_FP8_UPDATE"
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
        nested: the same of layers in a region, inside a scope of the first plan.
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
    nested: tuple[tuple[int, ...], ...] = ()

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
            "steps": {name: _run(order, groups) for name, groups in order.plans.items()} | _run_nested(order),
            "refusals": _refusals(order),
        }
        Path(order.out).write_text(json.dumps(told), encoding="utf-8")
    finally:
        torch.distributed.destroy_process_group()


def _run(order: RankOrder, groups: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    layer, owner = _new_layer(order), _group_of(order, groups)
    return [asdict(_step(order, layer, owner, step)) for step in range(STEPS)]


def _step(order: RankOrder, layer: Any, owner: Any, step: int) -> Step:
    from ...bridge.fp8_scope import low_precision

    drawn = _draw(order, step)
    with low_precision(target=order.target, amax_reduction_group=owner, recipe="delayed"):
        out = drawn.run(layer)
    out.backward(drawn.gradient)
    return drawn.seen(layer)


def _run_nested(order: RankOrder) -> dict[str, list[dict[str, Any]]]:
    """Two layers at once: "nested.inner" in a region of the scope, "nested.outer" behind it, in the scope itself.

    The region comes first: what it takes from the layer behind it, or leaves to it, then shows. Neither layer feeds
    the other, so that what each sees is known. The fused update leaves histories alone that have nothing new, so that
    one too many would not show (docs/fp8.md); the other one, asked for at each update, moves them all.
    """
    import torch

    from ...bridge.fp8_scope import amax_shared_with, low_precision

    inner, outer = _new_layer(order), _new_layer(order, anew=False)
    owner, other = _group_of(order, next(iter(order.plans.values()))), _group_of(order, order.nested)
    told: dict[str, list[dict[str, Any]]] = {"nested.inner": [], "nested.outer": []}
    os.environ[UNFUSED] = "1"
    for step in range(STEPS):
        first, second = _draw(order, step), _draw(order, STEPS + step)
        with low_precision(target=order.target, amax_reduction_group=owner, recipe="delayed"):
            with amax_shared_with(other):
                outs = [first.run(inner)]
            outs.append(second.run(outer))
        torch.autograd.backward(outs, [first.gradient, second.gradient])
        told["nested.inner"].append(asdict(first.seen(inner)))
        told["nested.outer"].append(asdict(second.seen(outer)))
    del os.environ[UNFUSED]
    return told


@dataclass(frozen=True, eq=False)
class _Drawn:
    """What a layer gets in a step, each [WIDTH, WIDTH] bf16."""

    rows: Any
    weight: Any
    gradient: Any

    def run(self, layer: Any) -> Any:
        """Its output, to be called in a scope."""
        import torch

        with torch.no_grad():
            layer.weight.copy_(self.weight)
        return layer(self.rows.requires_grad_())

    def seen(self, layer: Any) -> Step:
        """What it remembers behind the backward pass."""
        from ...bridge.fp8_scope import te_amax_state

        layer.zero_grad(set_to_none=True)
        remembered, scale = {}, {}
        for name, (forward, column) in TENSORS.items():
            history, scales = te_amax_state(layer, forward=forward)
            remembered[name], scale[name] = float(history[-1, column]), float(scales[column])
        amax = {"input": self.rows, "weight": self.weight, "gradient": self.gradient}
        return Step({name: float(one.detach().abs().amax()) for name, one in amax.items()}, remembered, scale)


def _draw(order: RankOrder, step: int) -> _Drawn:
    import torch

    factor = 2.0 ** FACTORS[(order.rank + step) % len(FACTORS)]
    made = torch.Generator("cpu").manual_seed(1000 * step + order.rank)

    def draw(scale: float) -> Any:
        return (torch.randn(WIDTH, WIDTH, generator=made) * scale).to(order.device, torch.bfloat16)

    return _Drawn(draw(factor), draw(factor), draw(factor / 4))


def _new_layer(order: RankOrder, *, anew: bool = True) -> Any:
    """A watched layer, in a process without a memory of others unless these stay."""
    import torch

    from ...bridge import imports as te
    from ...bridge.fp8_scope import reset_te_state
    from ...bridge.layer_watch import watch_layers

    if anew:
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
