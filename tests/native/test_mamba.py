"""The scan against its recurrence and its closed form, and the mixer against the same written step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.native.mamba import Mamba2Mixer, ssd_chunked

B, H, P, G, N = 2, 4, 3, 2, 5


def make(length: int, dtype: Any = torch.float64, seed: int = 0, decay: float = 1.0) -> tuple[Any, ...]:
    """x, dt, a, b, c; steps between 0 and 1, rates between -2 and 0 times `decay`."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, generator=source, dtype=torch.float64)

    steps, rates = draw(B, length, H).sigmoid(), -2 * decay * draw(H).sigmoid()
    given = draw(B, length, H, P), steps, rates, draw(B, length, G, N), draw(B, length, G, N)
    return tuple(item.to(dtype).requires_grad_() for item in given)


def close(one: Any, other: Any, tolerance: float = 1e-10) -> bool:
    """Relative to the norm of the whole."""
    return bool((one - other).norm() <= tolerance * other.norm())


def definition(x: Any, dt: Any, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """One step after another."""
    ins, outs = (item.repeat_interleave(x.shape[2] // b.shape[2], dim=2) for item in (b, c))
    state, seen = torch.zeros(*x.shape[:1], *x.shape[2:], b.shape[3], dtype=x.dtype), []
    for now in range(x.shape[1]):
        step = dt[:, now, :, None, None]
        state = (step * a[:, None, None]).exp() * state + step * x[:, now, :, :, None] * ins[:, now, :, None]
        seen.append((state * outs[:, now, :, None]).sum(dim=-1))
    return torch.stack(seen, dim=1), state


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_chunks_of_any_size_give_the_recurrence(length: int, chunk: int) -> None:
    given, results = make(length), []
    for y, last in (ssd_chunked(*given, chunk=chunk), definition(*given)):
        weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
        loss = (y * weights).sum() + (last * last.detach()).sum()
        results.append((y, last, *torch.autograd.grad(loss, given)))
    for one, other in zip(*results, strict=True):
        assert close(one, other)


def mixer_of(groups: int = 2, dtype: Any = torch.float64, **options: Any) -> Mamba2Mixer:
    """A mixer whose every parameter matters: none at its first value."""
    torch.manual_seed(5)
    mixer = Mamba2Mixer(8, state=4, head_dim=4, groups=groups, chunk=4, **options).double()
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if name not in ("a_log", "dt_bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.5 + 0.1)
    return mixer.to(dtype)


def step_by_step(mixer: Mamba2Mixer, rows: Any) -> Any:
    """The mixer as Mamba-2 describes it, one element of each thing at a time."""
    inner, groups, state, heads, size = mixer.inner, mixer.groups, mixer.state, mixer.heads, mixer.head_dim
    normed = rows / (rows.square().mean(-1, keepdim=True) + mixer.eps).sqrt() * mixer.in_projection.layer_norm_weight
    projected = normed @ mixer.in_projection.weight.t()
    gate, mixed, raw = projected[..., :inner], projected[..., inner:-heads], projected[..., -heads:]
    out = []
    memory = torch.zeros(rows.shape[0], heads, size, state, dtype=rows.dtype)
    taps = mixer.conv_weight.shape[1]
    for now in range(rows.shape[1]):
        convolved = mixer.conv_bias.expand(rows.shape[0], -1)
        for tap in range(taps):
            then = now - (taps - 1) + tap
            if then >= 0:
                convolved = convolved + mixer.conv_weight[:, tap] * mixed[:, then]
        activated = convolved * torch.sigmoid(convolved)
        x = activated[:, :inner].reshape(-1, heads, size)
        b = (
            activated[:, inner : inner + groups * state]
            .reshape(-1, groups, state)
            .repeat_interleave(heads // groups, 1)
        )
        c = activated[:, inner + groups * state :].reshape(-1, groups, state).repeat_interleave(heads // groups, 1)
        dt = torch.log1p(torch.exp(raw[:, now] + mixer.dt_bias))
        decay = torch.exp(-dt * torch.exp(mixer.a_log))
        memory = decay[..., None, None] * memory + (dt[..., None] * x)[..., None] * b[:, :, None]
        y = (memory @ c[..., None])[..., 0] + mixer.skip[:, None] * x
        gated = y.flatten(1) * gate[:, now] * torch.sigmoid(gate[:, now])
        boxes = gated.reshape(-1, groups, inner // groups)
        boxes = boxes / (boxes.square().mean(-1, keepdim=True) + mixer.eps).sqrt()
        out.append((boxes.flatten(1) * mixer.norm_weight) @ mixer.out_projection.weight.t())
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("length", [1, 2, 4, 11])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_mixer_is_mamba_2(length: int, groups: int) -> None:
    mixer = mixer_of(groups)
    rows = torch.randn(2, length, 8, dtype=torch.float64)
    assert close(mixer(rows), step_by_step(mixer, rows))
