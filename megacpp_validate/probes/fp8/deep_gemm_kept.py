"""The FP8 copy of the weights that an expert bank keeps for a step: it is never that of other weights.

What TE keeps is right as long as the caller tells the truth about microbatches and every change of a weight is seen.
Here the weights are changed in every way that is known to go past a tensor's version, and the caller tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ..bench import Bench
from .deep_gemm_samples import new_layer, new_sample, run


def _in_place(weight: Any) -> None:
    with torch.no_grad():
        weight.neg_()


def _by_data(weight: Any) -> None:
    weight.data.neg_()


def _one_value(weight: Any) -> None:
    weight.data[0, 77, 130] += 1


def _two_swapped(weight: Any) -> None:
    weight.data[0, [3, 9], 5] = weight.data[0, [9, 3], 5]


def _by_an_optimizer(weight: Any) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1, fused=weight.device.type == "cuda").step()
    weight.grad = None


def _through_other_memory(weight: Any) -> None:
    """As a collective writes into the flat buffer that parameters are views of."""
    flat = torch.empty(0, dtype=weight.dtype, device=weight.device).set_(weight.untyped_storage())
    flat.neg_()


CHANGES: Final[dict[str, Callable[[Any], None]]] = {
    "in-place": _in_place,
    "data": _by_data,
    "one-value": _one_value,
    "two-swapped": _two_swapped,
    "optimizer": _by_an_optimizer,
    "other-memory": _through_other_memory,
}


def check_kept(bench: Bench, counts: tuple[int, ...]) -> None:
    """After each change, what is kept gives the bits that rounding anew gives, forward and backward; and other ones."""
    sample = new_sample(bench, counts)
    for name, change in CHANGES.items():
        with bench.scope(name):
            layer = new_layer(bench, sample.weights)
            before = run(layer, sample, first=True)
            again = run(layer, sample, first=False)
            bench.same_bits("unchanged", _tensors(before), _tensors(again))
            change(layer.bank.weight)
            for first in (False, True):
                seen, wanted = run(layer, sample, first=first), run(layer, sample)
                bench.same_bits(f"changed.{first}", _tensors(seen), _tensors(wanted))
            moved = not torch.equal(wanted.out, before.out)
            bench.check("the-change-shows", moved, "other weights give another output")


def _tensors(seen: Any) -> list[Any]:
    return [seen.out, seen.rows, seen.weights]
