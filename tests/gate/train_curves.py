"""Trains the curves of `tests/gate/curves`: a two-layer language model on the CPU under emulated FP8, faults planted.

    python tests/gate/train_curves.py PRECISION FAULT SEED FOLDER     (about 10 s on one free core)
    python tests/gate/train_curves.py pack FOLDER                     (all of them into tests/gate/curves)

The workload is made so that each property of the format matters to the loss:

- range: every other sequence is *quiet*, its loss weighted 2^-16. Adam does not care; a format whose range ends there
  flushes those gradients, and the quiet half is learned without its embeddings.
- resolution: a *gauge* shows one of seven levels of one binade to a linear layer, and the next token is that level.
  E4M3 has them all, E5M2 has every other one.
- memory: the loss of step 60 is multiplied by 2^18, and the gradients clipped. What remembers that amax for longer
  than its 16 steps flushes what is quiet.

Emulated: linear layers of the blocks have their operands cast as Transformer Engine's DelayedScaling (HYBRID, history
of 16, max) or Float8CurrentScaling do; sums are in fp32. Embeddings and head stay in BF16.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from megacpp_validate.evidence.loss_curve import LossCurve, write_curve
from megacpp_validate.probes.emulation import LARGEST

VOCABULARY, LENGTH, BATCH, WIDTH, HEADS = 32, 16, 16, 64, 2
STEPS: Final = 1000
HISTORY: Final = 16
QUIET: Final = 2.0**-16
PULSE: Final = {60: 2.0**18}
GAUGE: Final = VOCABULARY - 1
HALF: Final = GAUGE // 2
LEVELS: Final = (8, 14)  # 8/14 .. 14/14 of the largest value are those that E4M3 has between 256 and 448
FAULTS: Final = ("none", "e4m3_grad", "frozen", "no_roll", "e5m2_act", "zero_layer", "backward_1.03")
SHAPES: Final[dict[str, tuple[int, int]]] = {"e4m3": (3, -6), "e5m2": (2, -14)}


def cast(values: Any, name: str, scale: float) -> Any:
    """What `emulation.round_to_fp8` gives, in fp32 and five times as fast: normals by Veltkamp's split."""
    mantissa, lowest = SHAPES[name]
    scaled = (values * scale).clamp_(-LARGEST[name], LARGEST[name])
    split = scaled * (2.0 ** (23 - mantissa) + 1)
    step = 2.0 ** (lowest - mantissa)
    subnormal = (scaled / step).round_() * step
    return torch.where(scaled.abs() < 2.0**lowest, subnormal, split - (split - scaled)).div_(scale)


class Quantizer:
    """One operand of one layer: rounds it, and under delayed scaling keeps the amax history."""

    def __init__(self, name: str, precision: str, fault: str) -> None:
        self.name, self.precision, self.fault = name, precision, fault
        self.history, self.scale, self.amax = [0.0] * HISTORY, 1.0, 0.0

    def __call__(self, values: Any) -> Any:
        if self.precision == "bf16":
            return values.bfloat16().float()
        amax = values.abs().max().item()
        if self.precision == "current":
            return cast(values, self.name, LARGEST[self.name] / amax if amax else 1.0)
        self.amax = max(self.amax, amax)
        return cast(values, self.name, self.scale)

    def roll(self) -> None:
        """Once a step, after backward."""
        if self.precision != "delayed" or self.fault == "frozen":
            return
        if self.fault == "no_roll":  # the slot of the step at hand is never moved on and never cleared
            self.history[0] = max(self.history[0], self.amax)
        else:
            self.history = [*self.history[1:], self.amax]
        largest = max(self.history)
        self.scale, self.amax = (LARGEST[self.name] / largest if largest else 1.0), 0.0


class Product(torch.autograd.Function):
    """y = x W^T, dx = g W, dW = g^T x on rounded operands."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any, quantizers: tuple[Quantizer, ...]) -> Any:
        x, w = quantizers[0](rows), quantizers[1](weight)
        ctx.save_for_backward(x, w)
        ctx.of_gradient = quantizers[2]
        return (x @ w.T).bfloat16().float()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        g = ctx.of_gradient(gradient)
        return (g @ w).bfloat16().float(), g.T @ x, None


class Linear(nn.Module):
    def __init__(self, wide: int, out: int, precision: str, fault: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, wide) / math.sqrt(wide))
        names = ("e5m2" if fault == "e5m2_act" else "e4m3", "e4m3", "e4m3" if fault == "e4m3_grad" else "e5m2")
        self.quantizers = tuple(Quantizer(name, precision, fault) for name in names)

    def forward(self, x: Any) -> Any:
        return Product.apply(x.reshape(-1, x.shape[-1]), self.weight, self.quantizers).reshape(*x.shape[:-1], -1)


class Block(nn.Module):
    def __init__(self, precision: str, fault: str) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = Linear(WIDTH, 3 * WIDTH, precision, fault)
        self.out = Linear(WIDTH, WIDTH, precision, fault)
        self.up = Linear(WIDTH, 2 * WIDTH, precision, fault)
        self.down = Linear(2 * WIDTH, WIDTH, precision, fault)

    def forward(self, x: Any) -> Any:
        qkv = self.qkv(self.before_attention(x)).reshape(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS)
        mixed = nn.functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


class Model(nn.Module):
    def __init__(self, precision: str, fault: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.5)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.gauge, self.from_gauge = (Linear(WIDTH, WIDTH, precision, fault) for _ in range(2))
        kinks = torch.linspace(LEVELS[0] - 0.5, LEVELS[1] + 0.5, WIDTH)[torch.randperm(WIDTH)] / LEVELS[1]
        self.kinks = nn.Parameter(-self.gauge.weight.detach().sum(1) * kinks)
        self.blocks = nn.ModuleList(Block(precision, fault) for _ in range(2))
        self.last, self.head = nn.LayerNorm(WIDTH), Linear(WIDTH, VOCABULARY, "bf16", "none")

    def forward(self, tokens: Any, levels: Any) -> Any:
        shown = (levels / LEVELS[1])[..., None].expand(-1, -1, WIDTH)
        read = self.from_gauge(nn.functional.gelu(4 * (self.gauge(shown) + self.kinks)))
        x = self.tokens(tokens) + self.places + read * (levels > 0)[..., None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


KIND = torch.arange(BATCH) % 2  # 1 is quiet


def make_batches() -> Iterator[tuple[Any, Any]]:
    """Tokens [B, T + 1] and levels [B, T] of each step: a Markov chain with three successors a token, and gauges."""
    generator = torch.Generator().manual_seed(7)
    successors = torch.randint(0, HALF, (2, HALF, 3), generator=generator)
    for _ in range(STEPS):
        tokens = torch.zeros(BATCH, LENGTH + 1, dtype=torch.long)
        tokens[:, 0] = torch.randint(0, HALF, (BATCH,), generator=generator)
        chance = torch.tensor([0.5, 0.3, 0.2]).expand(BATCH, 3)
        picks = torch.multinomial(chance, LENGTH, replacement=True, generator=generator)
        for place in range(LENGTH):
            tokens[:, place + 1] = successors[KIND, tokens[:, place], picks[:, place]]
        tokens += HALF * KIND[:, None]
        levels = torch.zeros(BATCH, LENGTH)
        for place in (3, 9):
            level = torch.randint(LEVELS[0], LEVELS[1] + 1, (BATCH,), generator=generator)
            tokens[:, place], tokens[:, place + 1] = GAUGE, level - LEVELS[0] + HALF * KIND
            levels[:, place] = level
        yield tokens, levels


def train(precision: str, fault: str, seed: int) -> LossCurve:
    """One run; the data are the same for every seed, which is that of the weights."""
    torch.manual_seed(seed)
    model, digest = Model(precision, fault), hashlib.sha256()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-15)
    half = torch.arange(VOCABULARY) >= HALF
    other = torch.stack([half, ~half])[KIND][:, None]
    other[..., GAUGE] = False
    losses, norms = [], []
    for step, (tokens, levels) in enumerate(make_batches()):
        digest.update(tokens.numpy().tobytes())
        rate = 1e-3 * min(1, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = rate
        logits = model(tokens[:, :-1], levels).masked_fill(other, -1e4).reshape(-1, VOCABULARY)
        each = nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1), reduction="none").reshape(BATCH, LENGTH)
        loss = (each * torch.where(KIND == 1, QUIET, 1.0)[:, None]).mean() * PULSE.get(step, 1.0)
        optimizer.zero_grad()
        (loss * (1.03 if fault == "backward_1.03" else 1.0)).backward()
        if fault == "zero_layer":
            for parameter in model.blocks[1].parameters():
                parameter.grad.zero_()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for linear in (module for module in model.modules() if isinstance(module, Linear)):
            for quantizer in linear.quantizers:
                quantizer.roll()
        losses.append(each.mean().item())
        norms.append(norm.item())
    return LossCurve(precision, seed, digest.hexdigest(), STEPS, tuple(range(STEPS)), tuple(losses), tuple(norms))


def main(arguments: list[str]) -> None:
    if arguments[0] == "pack":
        from recorded_curves import pack

        pack(Path(arguments[1]))
        return
    precision, fault, seed, folder = arguments
    if precision not in ("bf16", "delayed", "current") or fault not in FAULTS:
        sys.exit(f"PRECISION is bf16, delayed or current; FAULT one of {', '.join(FAULTS)}")
    torch.set_num_threads(1)
    write_curve(train(precision, fault, int(seed)), Path(folder) / f"{precision}-{fault}-{seed}.json")


if __name__ == "__main__":
    main(sys.argv[1:])
