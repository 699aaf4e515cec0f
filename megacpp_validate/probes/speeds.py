"""What is timed of each bridge module, as a table: sizes of production on a GPU, small ones on the CPU.

The sizes keep a GPU busy for longer than the host needs to launch a use. A name says what is timed and stays: rows of
two receipts are joined by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from .bench import Bench
from .memory import Enter
from .stopwatch import Stopwatch, Use

BF16: Final = torch.bfloat16
ENTERED: Final = 50


class Made(NamedTuple):
    """A layer on its tensors: what one pass calls, the leaves and the gradient of its way back, and the choice."""

    forward: Callable[[], Any]
    leaves: Sequence[Any]
    gradient: Any
    choice: Callable[[], Any]


def _attention(bench: Bench, *, large: bool) -> Made:
    """Tensors lie in memory as [B, T, H, D], as a projection gives them: what lies otherwise is copied first."""
    batch, heads, groups, length, width = (2, 16, 4, 4096, 128) if large else (1, 8, 2, 128, 32)
    layer = bench.bridge().Attention(
        num_heads=heads, head_dim=width, num_gqa_groups=groups, backends=("te", "sdpa"), device=bench.device
    )
    leaves = [bench.randn(batch, length, of, width, dtype=BF16, grad=True) for of in (heads, groups, groups)]
    inputs = [leaf.transpose(1, 2) for leaf in leaves]
    gradient = bench.randn(batch, heads, length, width, dtype=BF16)
    return Made(partial(layer, *inputs), leaves, gradient, lambda: layer.choice)


def _linear(bench: Bench, *, large: bool) -> Made:
    width, count = (4096, 4096) if large else (256, 128)
    tree = nn.ModuleDict({"fc1": nn.Linear(width, width, bias=False, device=bench.device, dtype=BF16)})
    choice = bench.bridge().swap_linears(tree).choices["fc1"]
    return _on_rows(bench, tree["fc1"], (count, width), width, lambda: choice)


def _permute(bench: Bench, *, large: bool) -> Made:
    """Tokens to two experts each and back; the numbers of rows are given, so that no call waits for the device."""
    experts, (tokens, width) = 8, (16384, 2048) if large else (256, 128)
    dispatch = bench.bridge().Dispatch(experts)
    given = bench.randn(tokens, width, dtype=BF16, grad=True)
    probs = bench.rand(tokens, experts).add_(0.05).requires_grad_()
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool, device=bench.device)
    routing_map.scatter_(1, bench.rand(tokens, experts).argsort(1)[:, :2], True)
    counts = routing_map.sum(0).tolist()

    def forward() -> Any:
        sent = dispatch.permute(given, probs, routing_map, rows_per_expert=counts)
        return dispatch.unpermute(sent.rows, sent.row_map)

    return Made(forward, (given,), bench.randn(tokens, width, dtype=BF16), lambda: dispatch.choice)


def _experts(bench: Bench, *, large: bool) -> Made:
    """Every expert has as many rows, a multiple of what any recipe pads to."""
    experts, (tokens, wide, narrow) = 8, (1024, 4096, 2048) if large else (32, 128, 64)
    layer = bench.bridge().ExpertGemm(
        num_experts=experts, in_features=wide, out_features=narrow, dtype=BF16, device=bench.device
    )
    return _on_rows(bench, layer, (experts * tokens, wide), narrow, lambda: layer.choice, [tokens] * experts)


def _block(bench: Bench, *, large: bool) -> Made:
    batch, length, hidden, ffn, heads, groups = (2, 2048, 2048, 5632, 16, 4) if large else (1, 64, 128, 256, 4, 2)
    layer = bench.bridge().NativeBlock(
        hidden=hidden, ffn_hidden=ffn, num_heads=heads, head_dim=hidden // heads, num_gqa_groups=groups,
        activation="swiglu", eps=1e-5, dtype=BF16, device=bench.device,
    )  # fmt: skip
    return _on_rows(bench, layer, (batch, length, hidden), hidden, lambda: layer.choice)


def _in_projection(bench: Bench, *, large: bool) -> Made:
    """2048 -> 2 x 4096 + 2 x 128 + 64 = 8512 features on a GPU: a multiple of what any recipe takes."""
    tokens, hidden, state, head_dim = (4096, 2048, 128, 64) if large else (64, 128, 16, 16)
    mixer = bench.bridge().build_mamba_mixer(hidden, state=state, head_dim=head_dim, dtype=BF16, device=bench.device)
    layer = mixer.in_projection
    return _on_rows(bench, layer, (2, tokens // 2, hidden), layer.weight.shape[0], lambda: mixer.choice)


def _on_rows(bench: Bench, layer: Any, shape: Sequence[int], out: int, choice: Callable[[], Any], *more: Any) -> Made:
    rows = bench.randn(*shape, dtype=BF16, grad=True)
    gradient = bench.randn(*shape[:-1], out, dtype=BF16)
    return Made(partial(layer, rows, *more), (rows, *layer.parameters()), gradient, choice)


class Row(NamedTuple):
    """What is timed of a module.

    Attributes:
        name: dotted, without precision and direction.
        make: makes the layer.
        recipes: whether the target's production recipe is timed beside bf16.
        forward_alone: whether the forward pass is timed by itself too.
    """

    name: str
    make: Callable[..., Made]
    recipes: bool = True
    forward_alone: bool = False


SPEEDS: Final = {
    "attention": Row("causal.gqa4", _attention, recipes=False, forward_alone=True),
    "linear_walker": Row("linear", _linear),
    "permute": Row("top2.there-and-back", _permute, recipes=False),  # a further width is compiled for seconds
    "expert_gemm": Row("experts8", _experts),
    "native_block": Row("block", _block),
    "layer_spec": Row("mamba-in-projection", _in_projection),
}


def speed_of(probe: str) -> Callable[[Stopwatch], None] | None:
    """What adds the uses of a module to a stopwatch; None for a probe that is not timed."""
    if probe == "imports":
        return _time_scopes
    return partial(_time, SPEEDS[probe]) if probe in SPEEDS else None


def _time(row: Row, stopwatch: Stopwatch) -> None:
    precisions = production_precisions(stopwatch.bench) if row.recipes else {"bf16": nullcontext}
    for name, enter in precisions.items():
        for direction in ("forward", "forward-backward") if row.forward_alone else ("forward-backward",):
            backward = direction == "forward-backward"
            stopwatch.add(f"{name}.{row.name}.{direction}", partial(_new_use, stopwatch.bench, row, enter, backward))


def _new_use(bench: Bench, row: Row, enter: Enter, backward: bool) -> Use:
    made = row.make(bench, large=bench.device == "cuda")

    def call() -> Any:
        with enter():
            out = made.forward()
        if backward:
            torch.autograd.grad(out, made.leaves, made.gradient)
        return out

    return Use(call, made.choice)


def _time_scopes(stopwatch: Stopwatch) -> None:
    """The firewall and the low-precision scope: what each layer group pays on the host; nothing runs on the device."""
    bench = stopwatch.bench

    def make() -> Use:
        te = bench.bridge()
        production_precisions(bench)  # for what it has Transformer Engine forget

        def call() -> None:
            for _ in range(ENTERED):
                te.is_te_available()
                with production_scope(bench):
                    pass

        return Use(call)

    stopwatch.add(f"scope.entered-{ENTERED}-times", make, on_host_alone=True)


def production_precisions(bench: Bench) -> dict[str, Enter]:
    """Name -> what enters the scope: bf16, and the target's production recipe where Transformer Engine is requested.

    Transformer Engine forgets the layers of before: under delayed scaling it goes through all that it has ever seen
    each time a scope is left, so that a module's time would depend on what was judged before it was timed.
    """
    found: dict[str, Enter] = {"bf16": nullcontext}
    if bench.wants_te and (recipe := bench.order.target.production_recipe):
        bench.bridge("fp8_scope").reset_te_state()
        found[f"fp8.{recipe}"] = partial(production_scope, bench)
    return found


def production_scope(bench: Bench) -> Any:
    """The target's production recipe, as training enters it; where there is none, a scope that changes nothing."""
    fp8 = bench.bridge("fp8_scope")
    return fp8.low_precision(target=bench.order.target.id, amax_reduction_group=fp8.SINGLE_OWNER)
