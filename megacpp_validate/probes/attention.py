"""The attention wrapper: parity with fp64, forward and every gradient; what it refuses; what it falls back to.

By which of its kernels Transformer Engine's attention ran, and what a call of the wrapper leaves behind.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from ..evidence.receipt import Backend
from ..native.attention import attention as native_attention
from ..native.sparse_attention import pick_tokens
from .bench import DTYPES, Bench
from .bounds import Roundings
from .observe import attention_kernels, graph_nodes
from .references import attend, visible
from .trial import Case, Tensors, Trial, try_case

# Architectures on which every release from 2.12.0 to 2.20.2 has cuDNN's attention for what the wrapper hands on: half
# precision, head sizes 64 and 128, two tokens or more, causal or unmasked, no dropout (`get_attention_backend` in
# attention/dot_product_attention/utils.py). sm_121 is none: there kernels depend on the release of cuDNN. The double
# of Transformer Engine has no architecture, and chooses by the same rule. Where gradients must be deterministic, none
# is promised on sm_100: 2.8 to 2.11 turn cuDNN's off there (`deterministic` in that function), later releases do below
# cuDNN 9.18.1 (`nvte_get_fused_attn_backend` in common/fused_attn/fused_attn.cpp).
FUSED_ON: Final = ("sm_90", "sm_100", "")
HALF: Final = (torch.float16, torch.bfloat16)
SWITCHED_OFF: Final = "NVTE_FUSED_ATTN"
ANY_ORDER: Final = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


def check_kernel(bench: Bench, path: str, out: Any) -> None:
    """Where there is a fused kernel for a call, the unfused one is a fallback that nobody says.

    Either fused kernel will do, cuDNN's or FlashAttention's; which one it was stands in the receipt's row of the path.
    Where the graph shows neither name, nor torch's own softmax, nothing is known, and nothing fails.
    """
    kernels = attention_kernels(out)
    if not kernels and any("Softmax" in name for name in graph_nodes(out)):
        kernels = ("unfused",)
    deterministic = os.environ.get(ANY_ORDER) == "0" or torch.are_deterministic_algorithms_enabled()
    target, no_fused = bench.order.target, os.environ.get(SWITCHED_OFF) == "0"
    expected = target.arch in FUSED_ON and out.dtype in HALF and not no_fused
    expected = expected and not (target.arch == "sm_100" and deterministic)
    wanted = f"a fused one is there for {out.dtype} on {target.id}" if expected else "none is expected here"
    said = f"Transformer Engine's attention ran by {', '.join(kernels) or 'a kernel that leaves no name'}; {wanted}"
    bench.check(f"{path}.kernel.backend", not expected or "unfused" not in kernels, said)


HEADS: Final = 8
# Of query, key and value: scores have a deviation of 1/2, so that no query rests on one key alone, where the gradient
# of its score would be what rounding leaves of a difference.
SCALES: Final = (0.5, 1.0, 1.0)
ENOUGH_KEYS: Final = 16


CASES: Final = (
    Case("gqa4.d64"),
    Case("gqa1.d64", groups=4, heads=4, quick=True),
    Case("gqa8.d64", groups=1),
    Case("gqa4.d128", width=128),
    Case("gqa4.d64.odd", extra=5, quick=True),
    Case("gqa4.d64.one-token", length=1, code="one-token", quick=True),
    Case("gqa4.d64.strided", strided=True, quick=True),
    Case("gqa4.d64.no-mask", causal=False, quick=True),
    Case("gqa4.d64.scale", scale=0.25, quick=True),
)
# cuDNN takes heads above 128 in training from 9.5 on sm_90 and nowhere else in every release from 2.12.0 to 2.20.2
# (head dimension in `nvte_get_fused_attn_backend`). Only in half precision: no fused kernel takes fp32.
WIDE: Final = Case("gqa4.d256", width=256)
REFUSED: Final = (
    Case("gqa4.d64.packed", options=("doc_ids",), code="packed-documents"),
    Case("gqa4.d64.window", options=("window",), code="local-window"),
    Case("gqa4.d64.soft-cap", options=("softcap",), code="soft-cap"),
    Case("gqa4.d64.blocks", options=("block_mask", "block_size"), code="block-routing"),
    Case("gqa4.d64.sampled", options=("indices",), code="sampled-tokens"),
)
FLASH: Final = {
    "fa3": (Case("gqa4.d128", width=128), Case("gqa4.d64.window", extra=5, options=("window",))),
    "fa4": (Case("gqa4.d128", width=128), Case("gqa4.d64.soft-cap", extra=5, options=("softcap",))),
}


def probe(bench: Bench) -> None:
    """Run it."""
    bridge = bench.bridge()
    for name in DTYPES:
        for case in CASES:
            if case.quick or not bench.quick:
                run_case(bench, bridge, case, name)
    if bench.order.target.arch in ("sm_90", ""):
        run_case(bench, bridge, WIDE, "bf16")
    shapes = [(2, heads, _length(bench), 64) for heads in (HEADS, CASES[0].groups, CASES[0].groups)]
    tensors = [bench.randn(*shape, dtype=torch.bfloat16) for shape in shapes]
    layer = _layer(bench, bridge, CASES[0])
    bench.layer_keeps_nothing("bf16", layer, *tensors, draws=True)
    both = partial(layer, *tensors, doc_ids=tensors[0].new_zeros(2, _length(bench)).long(), window=4)
    bench.refuses("refuses.packed-and-windowed", bench.bridge("errors").MaskConflict, both)


def probe_last(bench: Bench) -> None:
    """What is refused, and the FlashAttentions that take some of it: they load libraries of their own."""
    bridge = bench.bridge()
    for case in REFUSED:
        run_case(bench, bridge, case, "bf16")
    if bench.wants_te:
        for backend in ("fa3", "fa4"):
            _run_flash(bench, bridge, backend)


def run_case(bench: Bench, bridge: Any, case: Case, dtype: str, flash: str = "", **more: Any) -> None:
    """One case in one dtype, through the wrapper; by one FlashAttention where it is named.

    `more` are options of the call that the case does not draw.
    """
    leaves, gradient, options = _tensors(bench, case, DTYPES[dtype])
    options |= more
    masks = {name: value for name, value in options.items() if name != "softcap"}
    seen = visible(*gradient.shape[:3], causal=case.causal, device=gradient.device, **masks)
    # Where a query sees few keys, dS = P (dP - <P, dP>) nearly cancels: rounding of dP would outweigh what is left of
    # that row. So such rows weigh less in the loss; their output is held to its reference all the same.
    weights = seen.sum(-1, keepdim=True).clamp_max(ENOUGH_KEYS) / ENOUGH_KEYS
    gradient = (gradient * weights).to(gradient.dtype)
    layer, path = _layer(bench, bridge, case, flash), f"{flash}.{dtype}.{case.name}".removeprefix(".")

    def roundings(tensor: str) -> Roundings:
        return _roundings(bench, case, tensor, gradient.shape, options, dtype=dtype, backend=layer.choice.observed)

    def formula(given: Tensors) -> Any:
        query, key, value = given.values()
        return attend(query, key, value, seen, scale=case.scale, softcap=options.get("softcap"))

    def native(given: Tensors) -> Any:
        return native_attention(*given.values(), causal=case.causal, scale=case.scale, **options)

    trial = Trial(
        path,
        call=partial(layer, *leaves.values(), causal=case.causal, **options),
        leaves=leaves,
        choice=lambda: layer.choice,
        formula=formula,
        roundings=roundings,
        native=None if "block_mask" in options else native,  # it has no routing
        gradient=gradient,
        wanted=flash,
        code=case.code,
        ran_as=f"attention.{path}",
        tf32=False,
        scales=_cancelled(gradient, **leaves),
    )
    out = try_case(bench, trial).seen["forward"]
    if layer.choice.observed == "te" and not case.code:
        check_kernel(bench, path, out)


def _layer(bench: Bench, bridge: Any, case: Case, flash: str = "") -> Any:
    # Without Transformer Engine the native path is meant, not another vendor's.
    backends = (flash,) if flash else bridge.BACKENDS if bench.wants_te else ("te", "sdpa")
    sizes = {"num_heads": case.heads, "head_dim": case.width, "num_gqa_groups": case.groups}
    return bridge.Attention(**sizes, softmax_scale=case.scale, backends=backends, device=bench.device)


def _run_flash(bench: Bench, bridge: Any, backend: str) -> None:
    """One FlashAttention, where the target lists it; it is a fallback, so the environment may lack it."""
    if backend not in bench.order.target.attention:
        return
    vendor = bridge.KERNELS[backend].vendor
    if not vendor.is_available():
        reason = vendor.why_unavailable()
        bench.backends.append(Backend(f"attention.{backend}", backend, "", (), (f"{backend}: {reason}",)))
        bench.check(f"{backend}.present", True, f"absent, and needed only where Transformer Engine refuses: {reason}")
        return
    bench.check(f"{backend}.present", True, f"{vendor.name} can be imported")
    for case in FLASH[backend][-1:] if bench.quick else FLASH[backend]:
        run_case(bench, bridge, case, "bf16", flash=backend)


# --- tensors ----------------------------------------------------------------------------------------------


def _tensors(bench: Bench, case: Case, dtype: Any) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Query, key and value as leaves, the gradient of the output, and options of the call."""
    batch, length = 2, case.length or _length(bench) + case.extra

    def new(heads: int, scale: float = 1.0) -> Any:
        """[B, H, T, D]; of a strided case as from a projection."""
        if case.strided:
            return bench.randn(batch, length, heads, case.width, dtype=dtype, scale=scale).transpose(1, 2)
        return bench.randn(batch, heads, length, case.width, dtype=dtype, scale=scale)

    shapes = (case.heads, case.groups, case.groups)
    query, key, value = (new(heads, scale) for heads, scale in zip(shapes, SCALES, strict=True))
    if case.strided:  # a key whose last axis has a stride of two
        wide = bench.randn(batch, case.groups, length, 2 * case.width, dtype=dtype)
        wide[..., ::2] = key
        key = wide[..., ::2]
    gradient, named = new(case.heads), {"query": query, "key": key, "value": value}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in named.items()}
    return leaves, gradient, options_of(bench, case, batch, length)


def _length(bench: Bench) -> int:
    if bench.device == "cuda":
        return 128 if bench.quick else 1024
    return 24 if bench.quick else 40


def options_of(bench: Bench, case: Case, batch: int, length: int) -> dict[str, Any]:
    """What the call of a case asks for besides its tensors."""
    size = 8
    blocks = math.ceil(length / size)
    made: dict[str, Callable[[], Any]] = {
        "doc_ids": lambda: bench.randint(2, batch, length).cumsum(-1) // 5,  # runs of about ten tokens
        "window": lambda: 7,
        "softcap": lambda: 0.5,  # as large as scores are, so that it bites
        "block_mask": lambda: bench.rand(batch, case.heads, blocks, blocks) < 0.5,  # some rows see nothing
        "block_size": lambda: size,
        "indices": lambda: pick_tokens(bench.randn(batch, length, length), size),
    }
    return {name: made[name]() for name in case.options}


def _cancelled(gradient: Any, query: Any, key: Any, value: Any) -> dict[str, float]:
    """Norms of what cancels in the gradients of a single token.

    The weight of the only key is 1 whatever its score is, so both gradients vanish: dS = P (dP - dP).
    """
    if gradient.shape[2] > 1:
        return {}
    upstream, query, key, value = (one.detach().double() for one in (gradient, query, key, value))
    keys, values = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    terms = (upstream * values).sum(-1, keepdim=True) / math.sqrt(gradient.shape[3])
    return {"grad.query": float((terms * keys).norm()), "grad.key": float((terms * query).norm())}


# --- bounds -----------------------------------------------------------------------------------------------


def _roundings(
    bench: Bench, case: Case, tensor: str, shape: Any, options: dict[str, Any], *, dtype: str, backend: str
) -> Roundings:
    """What is rounded on the way to a tensor.

    A fused kernel keeps scores and sums in fp32, and rounds the weights P for the product with V, the score gradients
    dS for those with K and Q, and what it returns. The backward pass starts from the rounded output, D = <dO, O>, once.
    """
    length, longest = shape[2], max(shape[2:])
    if dtype == "fp32":
        if bench.device == "cuda":
            why = (
                "four operands and their products; PyTorch's memory-efficient kernel splits each into two of 11 bits "
                "(CUTLASS OpMultiplyAddFastF32), which leaves 2^-22 of it: as much as 16 roundings to fp32"
            )
            return Roundings((("fp32", 64),), longest, why=why)
        return Roundings((("fp32", 6),), longest, why="scores, weights, their gradients and the result")
    if backend == "sdpa" and "softcap" in options:
        return Roundings(((dtype, 1),), longest, why="computed in fp32, the result rounded")
    count, why = (2, "weights and output rounded") if tensor == "forward" else (2, "weights and result rounded")
    if tensor in ("grad.query", "grad.key"):
        count, why = 3, "output, score gradients and result rounded"
    if tensor in ("grad.key", "grad.value"):
        more, because = _partial_sums(bench, case.heads // case.groups, length, bool(options), backend)
        count, why = count + more, f"{why}; {because}"
    return Roundings(((dtype, count),), longest, why=why)


def _partial_sums(bench: Bench, share: int, length: int, masked: bool, backend: str) -> tuple[int, str]:
    """Roundings of partial sums in gradients of key and value: over query heads of a group, and query blocks."""
    if backend != "sdpa" or bench.device == "cuda":
        return (1, "each query head's part rounded before those of a group are summed") if share > 1 else (0, "")
    # PyTorch's CPU kernel adds blocks of 32 queries, and without a mask the heads of a group, into a bf16 result: n
    # partial sums that grow evenly have (n + 1) / 2 times the squared error of one rounding.
    blocks = math.ceil(length / 32)
    if masked:
        return math.ceil((blocks + 1) / 2), f"{blocks} partial sums in bf16, then a group's heads summed"
    return math.ceil((share * blocks + 1) / 2) - 1, f"{share * blocks} partial sums in bf16"
