"""Small stacks of Transformer Engine's layers that are trained for some steps, and what is kept of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ..bench import Bench, different
from ..observe import Enter

LEARNING_RATE: Final = 1 / 32  # of the largest value of a weight: enough that each step has other weights
Batch = tuple[Any, Any]
"""Rows [R, hidden] and the gradient of the output, bf16."""


class Shape(NamedTuple):
    """Rows, width of the residual stream, width of the MLP; multiples of 128, which every recipe takes."""

    rows: int
    hidden: int
    inner: int


def shape_of(bench: Bench) -> Shape:
    """Smallest on a CPU and where only the smallest is wanted."""
    return Shape(128, 128, 128) if bench.quick or bench.device == "cpu" else Shape(256, 512, 1024)


def new_batch(bench: Bench, factor: float = 1.0) -> Batch:
    """Rows, then a gradient, both times a factor."""
    shape = shape_of(bench)
    rows, gradient = (bench.randn(shape.rows, shape.hidden, dtype=torch.bfloat16) for _ in range(2))
    return rows * factor, gradient * factor


class Block(nn.Module):
    """Norm, linear, linear, and an MLP with its own norm, one after the other: [R, hidden] -> [R, hidden]."""

    def __init__(self, bench: Bench, shape: Shape) -> None:
        super().__init__()
        norm = {"normalization": "RMSNorm"}
        self.up = bench.te_layer("layernorm_linear", shape.hidden, shape.inner, **norm)
        self.down = bench.te_layer("linear", shape.inner, shape.hidden)
        self.mlp = bench.te_layer("layernorm_mlp", shape.hidden, shape.inner, activation="swiglu", **norm)

    def forward(self, rows: Any, is_first_microbatch: bool | None = None) -> Any:
        """[R, hidden] -> [R, hidden]."""
        first = {"is_first_microbatch": is_first_microbatch}
        return self.mlp(self.down(self.up(rows, **first), **first), **first)


def new_stack(bench: Bench, depth: int, like: nn.ModuleList | None = None) -> nn.ModuleList:
    """Blocks that have never run; with the weights of another stack where one is given."""
    stack = nn.ModuleList(Block(bench, shape_of(bench)) for _ in range(depth))
    with torch.no_grad():
        for index, weight in enumerate(stack.parameters()):
            if like is not None:
                weight.copy_(list(like.parameters())[index])
            elif weight.dim() > 1:
                weight.copy_(bench.randn(*weight.shape, scale=weight.shape[1] ** -0.5))
    return stack


def te_layers(model: Any) -> dict[str, Any]:
    """Its layers with weights and low-precision state, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if hasattr(layer, "fp8_meta") and next(layer.parameters(), None) is not None
    }


def delayed_states(bench: Bench, model: Any) -> dict[str, Any]:
    """Amax histories [H, N] and scales [N] of every layer that has run under delayed scaling, copied."""
    read, ways = bench.bridge("fp8_scope").te_amax_state, {"forward": "scaling_fwd", "backward": "scaling_bwd"}
    found: dict[str, Any] = {}
    for name, layer in te_layers(model).items():
        for direction in (way for way, kind in ways.items() if kind in layer.fp8_meta):
            history, scale = read(layer, forward=direction == "forward")
            found |= {f"{name}.{direction}.history": history.clone(), f"{name}.{direction}.scale": scale.clone()}
    return found


Seen = dict[str, dict[str, Any]]
"""What a step gave: outputs ("forward"), gradients of inputs and weights ("grad"), `delayed_states` ("state")."""


def train_step(
    bench: Bench,
    stack: Any,
    enter: Enter,
    batches: Sequence[Batch],
    *,
    cached: bool = False,
    around: Callable[[Any, Any], Any] | None = None,
    late: bool = False,
    delayed: bool = False,
) -> Seen:
    """One step of training, its micro-batches one after the other; then the weights are moved.

    Args:
        bench: of the probe.
        stack: blocks, run one after the other.
        enter: the scope of each forward pass.
        batches: a micro-batch each.
        cached: whether blocks know which micro-batch is the first, and keep weights in FP8 over the others.
        around: (block, rows) -> output, how a block is called; as it is without.
        late: all forward passes before the first backward one, as a pipeline runs them.
        delayed: whether the states of delayed scaling are kept.
    """
    outs, grads = dict[str, Any](), dict[str, Any]()
    stack.zero_grad(set_to_none=True)
    waiting: list[tuple[Any, Any, Any]] = []

    def run_backward() -> None:
        for leaf, out, gradient in waiting:
            out.backward(gradient)
            # Copied: what a graph gives for its inputs is overwritten by its next replay.
            grads[f"rows{len(grads)}"] = None if leaf.grad is None else leaf.grad.clone()
        waiting.clear()

    for number, (rows, gradient) in enumerate(batches):
        leaf = out = rows.detach().clone().requires_grad_()
        options = {"is_first_microbatch": number == 0} if cached else {}
        with enter():
            for block in stack:
                out = around(block, out) if around is not None else block(out, **options)
        outs[f"micro-batch {number}"] = out.detach().clone()
        waiting.append((leaf, out, gradient))
        if not late:
            run_backward()
    run_backward()
    grads |= {name: weight.grad.clone() for name, weight in stack.named_parameters() if weight.grad is not None}
    with torch.no_grad():
        for weight in (one for one in stack.parameters() if one.grad is not None):
            largest = weight.grad.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
            weight.sub_(weight.grad / largest * weight.abs().amax() * LEARNING_RATE)
    return {"forward": outs, "grad": grads, "state": delayed_states(bench, stack) if delayed else {}}


def check_same_bits(bench: Bench, name: str, some: Sequence[Seen], other: Sequence[Seen], *kinds: str) -> None:
    """A check that tensors of these kinds ("forward", "grad", "state") have the same bits in each step of two runs."""
    found = [
        f"{tensor} in step {step}"
        for kind in kinds
        for step, (one, two) in enumerate(zip(some, other, strict=True))
        for tensor in different(one.get(kind, {}), two.get(kind, {}))
    ]
    said = f"{len(found)} with other bits: {', '.join(found[:3])}" if found else "the same bits"
    bench.check(name, not found and any(one.get(kind) for one in some for kind in kinds), said)


def evaluate(stack: Any, enter: Enter, rows: Any) -> Any:
    """Output in evaluation mode, without gradients; then training mode again."""
    stack.eval()
    with torch.no_grad(), enter():
        out = rows
        for block in stack:
            out = block(out)
    stack.train()
    return out.clone()
