"""The scan against its recurrence and its closed form, and the mixer against the same written step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megacpp_validate.native.mamba import Mamba2Mixer, ssd_chunked, ssd_sequential

B, H, P, G, N = 2, 4, 3, 2, 5


def make(length: int, dtype: Any = torch.float64, seed: int = 0, decay: float = 1.0) -> tuple[Any, ...]:
    """x, dt, a, b, c; steps between 0 and 1, rates between -2 and 0 times `decay`."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, generator=source, dtype=torch.float64)

    steps, rates = draw(B, length, H).sigmoid(), -2 * decay * draw(H).sigmoid()
    given = draw(B, length, H, P), steps, rates, draw(B, length, G, N), draw(B, length, G, N)
    return tuple(item.to(dtype).requires_grad_() for item in given)


def state_of(seed: int = 9) -> Any:
    return torch.randn(B, H, P, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(one: Any, other: Any, tolerance: float = 1e-10) -> bool:
    """Relative to the norm of the whole."""
    return bool((one - other).norm() <= tolerance * other.norm())


def test_the_recurrence_is_its_closed_form() -> None:
    x, dt, a, b, c = (item.detach() for item in make(6))
    first = state_of()
    y, last = ssd_sequential(x, dt, a, b, c, initial_state=first)
    for batch in range(B):
        for head in range(H):
            group = head // (H // G)
            ins, outs = b[batch, :, group], c[batch, :, group]
            for now in range(6):
                wanted = math.exp(a[head] * dt[batch, : now + 1, head].sum()) * (first[batch, head] @ outs[now])
                for then in range(now + 1):
                    decay = math.exp(a[head] * dt[batch, then + 1 : now + 1, head].sum())
                    step = dt[batch, then, head]
                    wanted = wanted + decay * step * (ins[then] @ outs[now]) * x[batch, then, head]
                torch.testing.assert_close(y[batch, now, head], wanted)
    torch.testing.assert_close((last * c[:, -1].repeat_interleave(2, dim=1)[:, :, None]).sum(-1), y[:, -1])


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 16, 64])
def test_chunks_of_any_size_give_the_recurrence(length: int, chunk: int) -> None:
    given, first = make(length), state_of().requires_grad_()
    results = []
    for scan in (lambda: ssd_chunked(*given, chunk=chunk, initial_state=first),
                 lambda: ssd_sequential(*given, initial_state=first)):  # fmt: skip
        y, last = scan()
        weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
        loss = (y * weights).sum() + (last * last.detach()).sum()
        results.append((y, last, *torch.autograd.grad(loss, (*given, first))))
    for one, other in zip(*results, strict=True):
        assert close(one, other)


@pytest.mark.parametrize("cuts", [[5, 6], [1, 9, 1], [10, 1], [3, 3, 3, 2]])
def test_a_carried_state_joins_the_pieces(cuts: list[int]) -> None:
    x, dt, a, b, c = make(11)
    whole, last = ssd_sequential(x, dt, a, b, c)
    state, seen, at = None, [], 0
    for cut in cuts:
        piece = slice(at, at + cut)
        y, state = ssd_chunked(x[:, piece], dt[:, piece], a, b[:, piece], c[:, piece], chunk=4, initial_state=state)
        seen.append(y)
        at += cut
    assert close(torch.cat(seen, dim=1), whole)
    assert close(state, last)


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_gradients_are_right(chunk: int) -> None:
    given = [item.detach()[:, :3] if item.dim() > 1 else item.detach() for item in make(3)]
    small = [
        given[0][:1, :, :2, :1],
        given[1][:1, :, :2],
        given[2][:2],
        given[3][:1, :, :1, :2],
        given[4][:1, :, :1, :2],
    ]
    first = state_of()[:1, :2, :1, :2]
    inputs = [item.clone().requires_grad_() for item in (*small, first)]
    assert torch.autograd.gradcheck(lambda *item: ssd_chunked(*item[:5], chunk=chunk, initial_state=item[5]), inputs)
    assert torch.autograd.gradcheck(lambda *item: ssd_sequential(*item[:5], initial_state=item[5]), inputs)


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


def test_no_row_sees_a_later_one() -> None:
    mixer, rows = mixer_of(), torch.randn(1, 10, 8, dtype=torch.float64)
    changed = rows.clone()
    changed[:, 6] += 1
    before, after = mixer(rows), mixer(changed)
    assert close(after[:, :6], before[:, :6], 1e-14)
    assert (after[:, 6:] - before[:, 6:]).abs().amin(dim=-1).gt(1e-9).all()


def test_the_mixer_starts_as_mamba_2_does() -> None:
    torch.manual_seed(0)
    mixer = Mamba2Mixer(64, state=8, head_dim=2)
    rates, steps = mixer.a_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert rates.min() >= 1
    assert 14 < rates.max() <= 16
    assert 1e-3 * (1 - 1e-4) <= steps.min() < 2e-3
    assert 5e-2 < steps.max() <= 1e-1 * (1 + 1e-4)
    assert mixer.in_projection.weight.shape == (2 * 128 + 2 * 8 + 64, 64)


def test_wrong_input_is_refused_with_the_shapes_that_are_wanted() -> None:
    x, dt, a, b, c = make(6)
    refusals = {
        r"dt \[B, T, H\].*dt \(2, 6\)": lambda: ssd_sequential(x, dt[..., 0], a, b, c),
        r"c \(2, 5, 2, 5\)": lambda: ssd_chunked(x, dt, a, b, c[:, 1:], chunk=4),
        r"x \(2, 6, 4\)": lambda: ssd_chunked(x[..., 0], dt, a, b, c, chunk=4),
        r"G dividing H": lambda: ssd_chunked(x[:, :, :3], dt[:, :, :3], a[:3], b, c, chunk=4),
        r"T 1 or more": lambda: ssd_chunked(x[:, :0], dt[:, :0], a, b[:, :0], c[:, :0], chunk=4),
        r"state \[B, H, P, N\]": lambda: ssd_chunked(x, dt, a, b, c, chunk=4, initial_state=state_of()[:1]),
        r"a chunk of 0 steps": lambda: ssd_chunked(x, dt, a, b, c, chunk=0),
        r"16 \(2 \* 8\) with heads of 5": lambda: Mamba2Mixer(8, state=4, head_dim=5),
        r"4, 3 groups": lambda: Mamba2Mixer(8, state=4, head_dim=4, groups=3),
        r"head_dim=0: each is 1 or more": lambda: Mamba2Mixer(8, state=4, head_dim=0),
        r"groups=0: each is 1 or more": lambda: Mamba2Mixer(8, state=4, head_dim=4, groups=0),
        r"state=0: each is 1 or more": lambda: Mamba2Mixer(8, state=0, head_dim=4),
        r"eps is nan": lambda: Mamba2Mixer(8, state=4, head_dim=4, eps=math.nan),
        r"\[B, T, 8\] and got \(2, 8\)": lambda: mixer_of()(torch.zeros(2, 8)),
    }
    for words, call in refusals.items():
        with pytest.raises(ValueError, match=words):
            call()
