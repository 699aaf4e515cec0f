"""Which matrix products a step really ran, and which of them in FP8: what a profiler saw, before and after compiling.

A module's class says what was meant. A graph that was made before the layer was converted, or a kernel that was not
there, leaves the class and multiplies in bf16. `torch._scaled_mm` is one operator to torch's profiler in eager code and
in compiled code; a product of a converted layer that is not among them was not in FP8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.profiler import ProfilerActivity, profile

Product = Literal["forward", "dgrad", "wgrad"]
PRODUCTS: Final[tuple[Product, ...]] = ("forward", "dgrad", "wgrad")
Sizes = tuple[int, int, int]  # M, N and K of [M, K] x [K, N]

_FP8: Final = ("aten::_scaled_mm",)  # `_scaled_mm_v2` too
_PLAIN: Final = frozenset({"aten::mm", "aten::addmm", "aten::_addmm_activation"})
_ENGINE: Final = "autograd::engine"
_REGION: Final = "Torch-Compiled Region"


@dataclass(frozen=True)
class Gemm:
    """One matrix product that ran.

    Attributes:
        sizes: M, N, K.
        in_fp8: whether both operands were FP8.
        backward: whether the autograd engine ran it.
        kernels: names of the kernels that it launched; () where the profiler sees no device.
    """

    sizes: Sizes
    in_fp8: bool
    backward: bool = False
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class SeenGemms:
    """What one run multiplied.

    Attributes:
        gemms: in the order they ran.
        compiled_regions: how often compiled code was entered; 0 in eager code.
        kernels: names of all kernels, each once; of a fused one it is the only sign.
    """

    gemms: tuple[Gemm, ...]
    compiled_regions: int
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Missing:
    """A product of a converted layer that did not run as it should.

    Attributes:
        layers: names of the layers that it may belong to: those with a product of this size.
        products: which.
        sizes: M, N, K.
        wanted, found: how many such products were to run in FP8 (or beside it, in bf16), and did.
        in_fp8: which of both.
    """

    layers: tuple[str, ...]
    products: tuple[Product, ...]
    sizes: Sizes
    wanted: int
    found: int
    in_fp8: bool

    def say(self) -> str:
        """The same for a person."""
        what = "FP8" if self.in_fp8 else "bf16"
        return (
            f"{'/'.join(self.products)} of {', '.join(f'`{name}`' for name in self.layers)} {list(self.sizes)}: "
            f"{self.wanted} wanted in {what}, {self.found} ran"
        )


def see_gemms(run: Callable[[], Any]) -> SeenGemms:
    """Run something once and see its matrix products. It is slow: for a check, not for training.

    Args:
        run: forward and backward of one step.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as record:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = record.events() or ()
    gemms = tuple(made for event in events if (made := _read(event)) is not None)
    regions = sum(1 for event in events if event.name.startswith(_REGION))
    names = dict.fromkeys(kernel.name for event in events for kernel in event.kernels)
    return SeenGemms(gemms, regions, tuple(names))


def find_missing(
    layers: Mapping[str, tuple[int, int]],
    rows: int,
    in_fp8: Iterable[str],
    seen: SeenGemms,
    *,
    without_dgrad: Iterable[str] = (),
) -> tuple[Missing, ...]:
    """Products of converted layers that did not run in the precision that their recipe says.

    Products of one size and direction are counted together. Rows that differ from every width tell dgrad from wgrad.

    Args:
        layers: name -> (in_features, out_features).
        rows: rows that each layer was given.
        in_fp8: products that the recipe runs in FP8; the others are to run in bf16.
        seen: one forward and backward pass, without recomputation.
        without_dgrad: layers whose input wants no gradient, so that they have no dgrad.
    """
    narrow, skipped = frozenset(in_fp8), frozenset(without_dgrad)
    wanted: dict[tuple[Sizes, bool, bool], list[tuple[str, Product]]] = {}
    for name, (inner, outer) in layers.items():
        for product, sizes in _sizes(rows, inner, outer).items():
            if product != "dgrad" or name not in skipped:
                key = _turned(sizes), product in narrow, product != "forward"
                wanted.setdefault(key, []).append((name, product))
    counts = Counter((_turned(gemm.sizes), gemm.in_fp8, gemm.backward) for gemm in seen.gemms)
    missing = []
    for key, owners in wanted.items():
        if counts[key] < len(owners):
            names, products = (tuple(dict.fromkeys(column)) for column in zip(*owners, strict=True))
            missing.append(Missing(names, products, key[0], len(owners), counts[key], key[1]))
    return tuple(missing)


def _sizes(rows: int, inner: int, outer: int) -> dict[Product, Sizes]:
    return {"forward": (rows, outer, inner), "dgrad": (rows, inner, outer), "wgrad": (outer, inner, rows)}


def _turned(sizes: Sizes) -> Sizes:
    """The same for a product and its transpose, which a compiler may take instead: the larger side first."""
    high, wide, inner = sizes
    return (max(high, wide), min(high, wide), inner)


def _read(event: Any) -> Gemm | None:
    """A matrix product, where an event is one and no part of one."""
    narrow = event.name.startswith(_FP8)
    if not narrow and (event.name not in _PLAIN or _is_around(event) or _is_inside(event)):
        return None
    shapes = [shape for shape in event.input_shapes or () if len(shape) == 2]
    if event.name in ("aten::addmm", "aten::_addmm_activation"):
        shapes = shapes[-2:]
    if len(shapes) < 2:
        return None
    (high, inner), (_, wide) = shapes[:2]
    backward = any(name.startswith(_ENGINE) for name in _above(event))
    return Gemm((high, wide, inner), narrow, backward, tuple(kernel.name for kernel in _kernels(event)))


def _is_around(event: Any) -> bool:
    """Whether an operator on wrapped tensors only led to the one in FP8, or to a plain one that is counted itself."""
    below = list(event.cpu_children)
    while below:
        child = below.pop()
        if child.name.startswith(_FP8) or child.name in _PLAIN:
            return True
        below.extend(child.cpu_children)
    return False


def _is_inside(event: Any) -> bool:
    """Whether it is how an operator in FP8 is made on a machine without it."""
    return any(name.startswith(_FP8) for name in _above(event))


def _above(event: Any) -> Iterator[str]:
    """Names of what an event is part of."""
    above = event.cpu_parent
    while above is not None:
        yield above.name
        above = above.cpu_parent


def _kernels(event: Any) -> list[Any]:
    """Kernels of an event and of what is below it."""
    found = list(event.kernels)
    for child in event.cpu_children:
        found += _kernels(child)
    return found
