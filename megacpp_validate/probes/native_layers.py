"""What the layer spec leaves to plain PyTorch and no other probe computes, in fp64 on the CPU: no vendor is asked.

Each is held to its formula written out, forward and every gradient; and the same call twice gives the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from ..native.mamba import Mamba2Mixer, ssd_chunked, ssd_sequential
from ..native.mlp import NormMLP
from ..native.norms import LayerNorm, NormLinear, RMSNorm
from ..native.recurrent import MatrixRecurrentBlock
from ..native.router import TopKRouter
from .bench import Bench
from .bounds import Roundings
from .references import layers
from .trial import Formula, reference_pass, run_pass

EPS: Final = 3e-5
WIDTH: Final = 24
FFN: Final = 40
ROWS: Final = (2, 7, WIDTH)
LENGTH: Final = 40  # more than one chunk of the scans, and no multiple of one
CHUNK: Final = 32
# The reference is in fp64 as well, so that there are as many roundings in it. The longest chain, a scan, multiplies
# and adds once a step on both sides; norms, exponentials and quotients before and after it add a few dozen.
EXACT: Final = Roundings(
    (("fp64", 2 * (2 * LENGTH + 48)),), 512, sum_format="fp64", why="the operations of both sides, each in fp64"
)
LOSSES: Final[dict[str, Any]] = {"aux_coefficient": 0.5, "z_coefficient": 0.25}


def check_native_layers(bench: Bench) -> None:
    """All of them."""
    made = {"dtype": torch.float64}
    for name in (*layers.PLAIN, *layers.GATES, layers.CLAMPED):
        layer = NormMLP(WIDTH, FFN, activation=name, eps=EPS, normalization="LayerNorm", bias=True, **made)  # type: ignore[arg-type]
        _check(bench, f"mlp.{name}", _filled(bench, layer), partial(layers.mlp, activation=name, eps=EPS, norm="layer"))
    _check(
        bench,
        "layer-norm",
        _filled(bench, LayerNorm(WIDTH, eps=EPS, **made)),
        partial(layers.layer_norm, eps=EPS),
    )
    layer = NormLinear(WIDTH, FFN, eps=EPS, normalization="LayerNorm", bias=True, **made)
    _check(bench, "norm-linear", _filled(bench, layer), partial(layers.layer_norm_linear, eps=EPS))
    sizes: dict[str, Any] = {"state": 8, "head_dim": 4, "groups": 2}
    mixer = Mamba2Mixer(WIDTH, **sizes, eps=EPS, chunk=CHUNK, **made)
    _calm(bench, mixer)
    _check(bench, "mixer", mixer, partial(layers.mamba_mixer, **sizes, eps=EPS), LENGTH)
    block = MatrixRecurrentBlock(WIDTH, num_heads=4, key_dim=8, value_dim=4, eps=EPS, chunk=CHUNK, **made)
    _check(
        bench,
        "recurrent",
        _filled(bench, block),
        partial(layers.recurrent_block, heads=4, key_dim=8, value_dim=4, eps=EPS),
        LENGTH,
    )
    _check_scans(bench)
    _check_router(bench)
    _check_autocast(bench)


def _calm(bench: Bench, mixer: Any) -> None:
    """Taps, steps and directions that vary little, as the layer spec's probe has them.

    A scan multiplies four projections: left alone, one channel rules the norm of its group now and then, whose gradient
    is then a small difference of large numbers.
    """
    own = {"a_log": (-0.3, 0.3), "dt_bias": (-1.5, 0.3), "skip": (1.0, 0.1), "conv_bias": (0.0, 0.5)}
    own |= {"conv_weight": (0.0, 0.25)}
    with torch.no_grad():
        for name, value in mixer.named_parameters():
            usual = (1.0, 0.2) if value.dim() == 1 else (0.0, value.shape[-1] ** -0.5)
            mean, deviation = own.get(name, usual)
            value.copy_(mean + bench.randn(*value.shape, dtype=torch.float64, scale=deviation))
        mixer.in_projection.weight[-mixer.heads :] *= 0.3
        mixer.conv_bias[mixer.inner :] += 1.0


def _filled(bench: Bench, layer: Any) -> Any:
    """Every parameter away from where it starts: biases too, and products so large that clamps are reached."""
    with torch.no_grad():
        for value in layer.parameters():
            moved = bench.randn(*value.shape, dtype=torch.float64)
            value.add_(moved * (0.3 if value.dim() == 1 else value.shape[-1] ** -0.5))
            if value.shape[0] in (FFN, 2 * FFN) and value.dim() == 2:
                value.mul_(6.0)
    return layer


def _check(bench: Bench, name: str, layer: Any, formula: Formula, length: int = ROWS[1]) -> None:
    """One layer: forward and every gradient."""
    rows = (bench.randn(ROWS[0], length, WIDTH, dtype=torch.float64) + 0.5).requires_grad_()
    with torch.no_grad():
        shape = layer(rows).shape
    gradient = bench.randn(*shape, dtype=torch.float64)
    leaves = {"input": rows, **dict(layer.named_parameters())}
    seen, again = (run_pass(partial(layer, rows), leaves, gradient) for _ in range(2))
    wanted, scales = reference_pass(formula, leaves, gradient, layers.EXPANDED)
    with bench.scope(name):
        bench.same_bits("bits", seen.values(), again.values())
        bench.compare_pass(seen, wanted, lambda _: EXACT, scales=scales)


def _check_scans(bench: Bench) -> None:
    """The scans of Mamba-2 from a state that is not zero, and the state that they end in."""
    batch, heads, groups, width, size = 2, 4, 2, 3, 5
    randn = partial(bench.randn, dtype=torch.float64)
    x, state = randn(batch, LENGTH, heads, width), randn(batch, heads, width, size)
    dt, a = randn(batch, LENGTH, heads).abs() * 0.1, -randn(heads).abs() - 0.1
    b, c = randn(batch, LENGTH, groups, size), randn(batch, LENGTH, groups, size)
    leaves = [tensor.requires_grad_() for tensor in (x, dt, a, b, c, state)]
    of_y, of_state = randn(batch, LENGTH, heads, width), randn(batch, heads, width, size)
    wanted = layers.scan(*leaves)
    wanted_grads = torch.autograd.grad(wanted, leaves, (of_y, of_state))
    for name, scan in (("chunked", partial(ssd_chunked, chunk=CHUNK)), ("sequential", ssd_sequential)):
        seen = scan(*leaves[:5], initial_state=state)
        grads = torch.autograd.grad(seen, leaves, (of_y, of_state))
        with bench.scope(f"scan.{name}"):
            bench.compare("forward", seen[0], wanted[0], roundings=EXACT)
            bench.compare("state", seen[1], wanted[1], roundings=EXACT)
            for key, value, right in zip(("x", "dt", "a", "b", "c", "state"), grads, wanted_grads, strict=True):
                bench.compare(f"grad.{key}", value, right, roundings=EXACT)


def _check_router(bench: Bench) -> None:
    """Probabilities, both losses, and the gradients of all three together."""
    router = TopKRouter(WIDTH, 6, 2, **LOSSES, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(bench.randn(6, WIDTH, dtype=torch.float64, scale=WIDTH**-0.5))
    tokens = bench.randn(11, WIDTH, dtype=torch.float64, grad=True)
    upstream = bench.randn(11, 6, dtype=torch.float64)
    seen = router(tokens)
    probs, balance, z = layers.router(tokens, router.weight, 2)
    wanted = {"probs": probs, "aux": LOSSES["aux_coefficient"] * balance, "z": LOSSES["z_coefficient"] * z}
    found = {"probs": seen.probs, "aux": seen.aux_loss, "z": seen.z_loss}
    with bench.scope("router"):
        for name, value in wanted.items():
            bench.compare(name, found[name], value, roundings=EXACT)
            given = upstream if name == "probs" else torch.ones_like(value)
            leaves = (tokens, router.weight)
            grads = torch.autograd.grad(found[name], leaves, given, retain_graph=True)
            right = torch.autograd.grad(value, leaves, given, retain_graph=True)
            for leaf, own, other in zip(("tokens", "weight"), grads, right, strict=True):
                bench.compare(f"{name}.grad.{leaf}", own, other, roundings=EXACT)


def _check_autocast(bench: Bench) -> None:
    """Norms take their statistics in fp32 at least, in an autocast region too."""
    rows = bench.randn(*ROWS)
    norms: dict[str, Any] = {"rms": RMSNorm(WIDTH, eps=EPS), "layer": LayerNorm(WIDTH, eps=EPS)}
    for name, norm in norms.items():
        outside = norm(rows)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = norm(rows)
        same = inside.dtype == outside.dtype and torch.equal(inside, outside)
        bench.check(f"autocast.{name}", same, f"{inside.dtype} inside, {outside.dtype} outside, the same bits")
