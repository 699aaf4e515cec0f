"""One process of benchmarks/jit_caches.py: the first steps of a small hybrid model, and DeepGEMM's products beside.

Every process trains a whole model of its own: several share a GPU, which no plan of ranks can, and each compiles all
that a rank compiles. They start their work together.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from megacpp_validate.jit import monitor
from megacpp_validate.jit.driver_cache import give_back
from megacpp_validate.jit.monitor import start_compiling


def main() -> None:
    """Train, and leave the figures in a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--port", type=int, required=True, help="of the store where all meet")
    parser.add_argument("--device", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--profile", action="store_true", help="of the first step, by function; it takes longer so")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    asked.output = asked.output.absolute()
    start_compiling()
    result = run(asked)
    result["compiled"] = [vars(one) for one in monitor.compiles_since()]
    result |= monitor.describe_jit()
    asked.output.write_text(json.dumps(result), encoding="utf-8")
    give_back()
    os._exit(0)  # pools of compilers would be waited for


def run(asked: Any) -> dict[str, Any]:
    """Seconds of the start, of each step and of DeepGEMM's first and second call."""
    import torch
    from torch import distributed

    from megacpp_validate.training.parallel.goodput import Ledger, process_began_ns
    from megacpp_validate.training.parallel.ranks import Rank
    from megacpp_validate.training.smoke.order import SmokeOrder
    from megacpp_validate.training.smoke.trainer import SmokeTrainer

    began = process_began_ns()
    if asked.device == "cpu":
        torch.set_num_threads(1)
        device = "cpu"
    else:
        device = f"cuda:{asked.rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    order = SmokeOrder(
        size=asked.size,
        steps=asked.steps,
        precision="bf16" if asked.device == "cuda" else "fp32",
        device=asked.device,
        target=asked.target,
        learning_rate=1e-3,
        forms={"compiled_scan": True, "fused_residual_norm": True},
    )
    ledger = Ledger(began_ns=began)
    trainer = SmokeTrainer(order, Rank(device=device), ledger)
    started = (time.monotonic_ns() - began) / 1e9
    meet(asked)
    together = time.monotonic()
    if asked.rehearse:
        trainer.rehearse()
        synchronize(torch)
    rehearsed = time.monotonic() - together
    spent = profile_step(trainer) if asked.profile else []
    trainer.run()
    synchronize(torch)
    steps = [record.seconds for record in trainer.records]
    return {
        "rank": asked.rank,
        "gpu": torch.cuda.get_device_name() if asked.device == "cuda" else "cpu",
        "torch": str(torch.__version__),
        "started_s": started,
        "rehearsed_s": rehearsed if asked.rehearse else 0.0,
        "first_step_s": rehearsed + steps[0],
        "steps": steps,
        "losses": [record.loss for record in trainer.records],
        "profile": spent,
        "deep_gemm": deep_gemm(asked) if asked.device == "cuda" else {},
    }


def profile_step(trainer: Any) -> list[str]:
    """One step by function: seconds with all that it calls, seconds of its own."""
    profile = cProfile.Profile()
    profile.runcall(trainer.step)
    rows = []
    for (file, line, name), (_, calls, own, whole, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        rows.append((whole, own, calls, f"{'/'.join(Path(file).parts[-3:])}:{line} {name}"))
    by_whole = sorted(rows, reverse=True)[:70]
    by_own = sorted(rows, key=lambda row: -row[1])[:25]
    return [f"{whole:8.3f} {own:8.3f} {calls:7d} {name}" for whole, own, calls, name in (*by_whole, *by_own)]


def deep_gemm(asked: Any) -> dict[str, Any]:
    """Its products for the experts of the size, forward and both gradients, twice."""
    from megacpp_validate.training.sizes import read_size

    size, seconds = read_size(asked.size), []
    try:
        for _ in range(2):
            began = time.monotonic()
            for inputs, outputs in ((size.hidden, 2 * size.expert_width), (size.expert_width, size.hidden)):
                multiply_grouped(size.num_experts, size.batch * size.length * size.top_k, inputs, outputs)
            seconds.append(time.monotonic() - began)
    except Exception as fault:
        return {"failure": f"{type(fault).__name__}: {fault}"[:2000]}
    return {"first_s": seconds[0], "second_s": seconds[1]}


def multiply_grouped(experts: int, rows: int, inputs: int, outputs: int) -> None:
    """DeepGEMM's grouped product, [rows, inputs] to [rows, outputs] in bf16, with equal and with unequal experts."""
    import torch

    from megacpp_validate.bridge.deep_gemm import deep_gemm_grouped

    each = rows // experts
    weight = torch.randn(experts, outputs, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for counts in ([each] * experts, [each - each // 2, *[each] * (experts - 2), each + each // 2]):
        out = deep_gemm_grouped(tokens, weight, counts)
        out.backward(torch.randn_like(out))
    torch.cuda.synchronize()


def meet(asked: Any) -> None:
    """Wait until all processes are here."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", asked.port, is_master=False, timeout=timedelta(seconds=120))
    if store.add("here", 1) == asked.ranks:
        store.set("go", "1")
    store.wait(["go"])


def synchronize(torch: Any) -> None:
    """Wait for the device."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
