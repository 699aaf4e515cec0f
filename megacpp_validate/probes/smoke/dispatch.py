"""The ways to the experts, against one formula in fp64: padded batches, and jagged rows that the host never counts.

Where DeepGEMM has kernels, jagged rows go through them in FP8 too.

Equal results within what is rounded on either way, forward and every gradient; no assignment is lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import torch

from ...bridge.backends import Choice, forget_choices, recorded_choices
from ...bridge.deep_gemm import cast_weight
from ...bridge.jagged_experts import jagged_moe, why_not_fp8, why_not_fused
from ...bridge.permute import padded_moe
from ..bench import Bench
from ..bounds import Roundings
from ..trial import reference_pass, run_pass

SHAPES: Final = {"cpu": (256, 64, 32, 8, 2), "cuda": (8192, 2048, 1408, 64, 2)}  # T, D, F, E, k
Inputs = dict[str, Any]


def probe(bench: Bench) -> None:
    """Compare both ways with the formula, and look at how rows are sorted."""
    inputs = make_inputs(bench)
    dtype = "bf16" if bench.device == "cuda" else "fp32"
    leaves = {name: inputs[name] for name in ("tokens", "weights", "up", "down")}
    wanted, _ = reference_pass(lambda given: reference({**inputs, **given}), leaves, inputs["gradient"])
    ways: dict[str, Callable[..., Any]] = {"padded": padded, "jagged": jagged}
    if why_not_fp8(inputs["tokens"], inputs["chosen"].shape[1], inputs["up"], inputs["down"]) is None:
        ways["jagged-fp8"] = partial(jagged, low=True)
    for name, way in ways.items():
        forget_choices()
        seen = run_pass(partial(way, inputs), leaves, inputs["gradient"])
        check_path(bench, name, recorded_choices(), seen["forward"])
        with bench.scope(f"{dtype}.{name}"):
            bench.compare_pass(seen, wanted, partial(_roundings, dtype, inputs, low=name == "jagged-fp8"))
    if bench.device == "cuda":
        why = why_not_fused(inputs["tokens"], inputs["up"], inputs["down"])
        waits = why or find_waits(lambda: run_pass(partial(jagged, inputs), leaves, inputs["gradient"]))
        bench.check("jagged.on-the-device", not waits, waits or "forward and backward never waited for the device")


def check_path(bench: Bench, way: str, choices: Iterable[Choice], out: Any) -> None:
    """The backends of one way: as the bridge recorded them for its calls, and as the graph of the output shows them.

    The jagged way has no backend to choose: its kernels are the bridge's own.
    """
    own = way.startswith("jagged")
    made = [Choice("jagged_moe", "native", "native", ())] if own else list(choices)
    bench.check(f"{way}.parts", bool(made), f"{len(made)} calls report their backend")
    for choice in made:
        wanted = "native" if own else ""
        bench.ran_on(f"dispatch.{way}.{choice.module}", choice, out, wanted=wanted)


def find_waits(use: Callable[[], Any]) -> str:
    """What of a use on the GPU waits for the device; empty where nothing does. Used once before, to be warm."""
    use()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # torch warns of a prototype
        torch.cuda.set_sync_debug_mode("error")  # whatever waits for the device raises
    try:
        use()
    except RuntimeError as fault:
        if "synchroniz" not in str(fault):  # "called a synchronizing CUDA operation"
            raise
        return str(fault)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def make_inputs(bench: Bench) -> Inputs:
    """Tokens, experts of each, weights of those, and both weights of the experts."""
    tokens, hidden, width, experts, top_k = SHAPES["cpu" if bench.quick else bench.device]
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    logits = bench.randn(tokens, experts)
    chosen = logits.topk(top_k).indices
    return {
        "chosen": chosen,
        "tokens": bench.randn(tokens, hidden, dtype=dtype, grad=True),
        "weights": logits.gather(1, chosen).softmax(1).requires_grad_(True),
        "up": bench.randn(experts, 2 * width, hidden, dtype=dtype, grad=True, scale=hidden**-0.5),
        "down": bench.randn(experts, hidden, width, dtype=dtype, grad=True, scale=width**-0.5),
        "gradient": bench.randn(tokens, hidden, dtype=dtype),
    }


def jagged(given: Mapping[str, Any], *, low: bool = False) -> Any:
    """Sort by expert, jagged products, with `low` in FP8 but for the gradients of the weights, weighted scatter."""
    fp8 = (cast_weight(given["up"]), cast_weight(given["down"])) if low else None
    return jagged_moe(given["tokens"], given["chosen"], given["weights"], given["up"], given["down"], fp8=fp8)


def padded(given: Mapping[str, Any]) -> Any:
    """Permute, pad, batched products, unpad, unpermute."""
    routing = torch.zeros(given["tokens"].shape[0], given["up"].shape[0], device=given["tokens"].device)
    probs = routing.scatter(1, given["chosen"], given["weights"])
    taken = routing.scatter(1, given["chosen"], 1.0).bool()
    return padded_moe(given["tokens"], taken, probs, given["up"], given["down"])


def reference(given: Mapping[str, Any]) -> Any:
    """The formula, one expert after the other, in the dtype that it is given."""
    tokens, chosen, weights = given["tokens"], given["chosen"], given["weights"]
    out = torch.zeros_like(tokens)
    for expert in range(given["up"].shape[0]):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        gate, linear = (tokens[token] @ given["up"][expert].T).chunk(2, dim=1)
        inner = torch.nn.functional.silu(gate) * linear
        out = out.index_add(0, token, weights[token, slot, None] * (inner @ given["down"][expert].T))
    return out


def _roundings(dtype: str, inputs: Inputs, tensor: str, *, low: bool) -> Roundings:
    """On the way forward: what the first product gave, the gate, its product, the weight, the second product, the sum.

    Backward each of those has a gradient of its own. In FP8 each of two products rounds two operands, and backward
    these and their gradients' again.
    """
    steps = 6 if tensor == "forward" else 12
    longest = max(*inputs["up"].shape[1:], inputs["tokens"].shape[0])
    operands = (("e4m3", 4 if tensor == "forward" else 8),) if low else ()
    return Roundings(
        ((dtype, steps), *operands), longest, "fp32", why="products, gate, weight and sum, each stored once"
    )
