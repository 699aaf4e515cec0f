"""Tensors that say bf16 and store FP8 hand over payload and scale together, and nothing is dequantized in silence.

The tensors are Transformer Engine's own, made by the quantizers of a layer that ran under each recipe, and torchao's.
What is handed over must be, bit by bit, what the tensor itself says when it is dequantized; and while it is handed
over, and while it is multiplied, nobody may dequantize without saying so.

Every dequantization is counted: by a tensor's own method, by a vendor's kernel, by a plain cast of its bytes. Nothing
is asked of the path: methods of all loaded vendor tensors are wrapped, and a dispatch mode sees casts from FP8 to wider
formats.

A view, a slice, a copy of an FP8 tensor keeps its payload and its scale. Whatever class comes out, its values must be
those of the same operation on the dequantized tensor, bit by bit: moving values rounds nothing. An operation that a
release does not know may raise; the check records that.
"""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..bench import Bench
from .quantizers import wanted_block

VENDORS: Final = ("transformer_engine", "torchao")
_METHODS: Final = ("dequantize", "to_original_precision", "from_float8")
_COMPILED: Final = ("transformer_engine_torch", "dequantize")  # what Transformer Engine's own layers call below
_NARROW: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


class Dequantization(NamedTuple):
    """A tensor read in a wider format: by which method, kernel or operator, and what was said of it before."""

    what: str
    because: str


@dataclass
class Watch:
    """What was seen so far; `saying` gives what is announced of the dequantization that runs, or nothing."""

    saying: Callable[[], str]
    seen: list[Dequantization] = field(default_factory=list)
    depth: int = 0  # of a method that calls another: one dequantization is counted once

    @property
    def silent(self) -> list[str]:
        """Those of which nothing was said."""
        return [one.what for one in self.seen if not one.because]

    @property
    def said(self) -> str:
        """The silent ones in words."""
        return "; ".join(self.silent) or f"{len(self.seen)} were announced"

    def note(self, what: str) -> None:
        """Count one, where it is no part of another."""
        if not self.depth:
            self.seen.append(Dequantization(what, self.saying()))


@contextmanager
def watching_dequantizations(saying: Callable[[], str]) -> Iterator[Watch]:
    """Count every dequantization of this thread and of the autograd engine while inside.

    Args:
        saying: the bridge's account of what it announces: `quantized_tensor.saying`.
    """
    watch = Watch(saying)
    with ExitStack() as watching:
        for owner, name in list(_places()):
            wrapped = _wrapped(watch, vars(owner)[name], f"{owner.__name__}.{name}")
            watching.enter_context(patch.object(owner, name, wrapped))
        watching.enter_context(_Casts(watch))
        yield watch


def _places() -> Iterator[tuple[Any, str]]:
    """Classes and modules that dequantize, as far as they are loaded."""
    todo, done = [torch.Tensor], {torch.Tensor}
    while todo:
        found = set(todo.pop().__subclasses__()) - done
        done |= found
        todo += found
    owners = {base for kind in done for base in kind.__mro__ if base.__module__.partition(".")[0] in VENDORS}
    yield from ((owner, name) for owner in owners for name in _METHODS if inspect.isfunction(vars(owner).get(name)))
    module = sys.modules.get(_COMPILED[0])
    if module is not None and _COMPILED[1] in vars(module):
        yield module, _COMPILED[1]


def _wrapped(watch: Watch, old: Any, label: str) -> Any:
    def dequantize(*arguments: Any, **options: Any) -> Any:
        watch.note(label)
        watch.depth += 1
        try:
            return old(*arguments, **options)
        finally:
            watch.depth -= 1

    return dequantize


class _Casts(TorchDispatchMode):
    """Sees plain tensors cast from FP8; a vendor's tensor handles its operators first, and what it does comes back."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__module__.partition(".")[0] in VENDORS for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "name", lambda: "")()
        if name.startswith(("aten::_to_copy", "aten::copy_", "prims::convert_element_type")):
            source = args[1] if name.startswith("aten::copy_") else args[0]
            if source.dtype in _NARROW and out.dtype not in _NARROW:
                self._watch.note(name)
        return out


def _with_data(target: Any, one: Any) -> Any:
    target.data = one
    return target


def _saved_and_loaded(one: Any) -> Any:
    torch.save(one, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


# What moves values of a matrix [rows, width] without arithmetic.
MOVES: Final[dict[str, Callable[[Any], Any]]] = {
    "view": lambda one: one.view(2, one.shape[0] // 2, one.shape[1]),
    "reshape": methodcaller("reshape", -1),
    "transpose": methodcaller("t"),
    "slice": lambda one: one[one.shape[0] // 4 : one.shape[0] // 2],
    "split": lambda one: torch.split(one, one.shape[0] // 2)[1],
    "detach": methodcaller("detach"),
    "clone": methodcaller("clone"),
    "clone-of-view": lambda one: one.view(2, one.shape[0] // 2, one.shape[1]).clone(),
    "saved": _saved_and_loaded,
}


def check_derived(bench: Bench, name: str, tensor: Any) -> None:
    """What is moved has, bit by bit, the values of the same operation on the dequantized tensor, or is refused."""
    bridge, wrong, refused = bench.bridge("quantized_tensor"), [], []
    exact, plain = (tensor.dequantize(dtype=dtype) for dtype in (torch.float32, tensor.dtype))

    def of_another_scale(one: Any) -> Any:
        # No clone: in TE 2.20.2 a clone shares its scale with its source, which a write to the clone changes. No
        # arithmetic in place: a Float8Tensor that was loaded refuses it (H200, 2026-11-28).
        made = _saved_and_loaded(one)
        if bridge.is_quantized(made):
            bridge.read_payload(made).scale.mul_(4.0)
        return made

    written: dict[str, Callable[[Any], Any]] = {
        "copy-into": lambda one: of_another_scale(one).copy_(one),
        "data": lambda one: _with_data(of_another_scale(one), one),
    }
    for operation, move in {**MOVES, **written}.items():
        try:
            with torch.no_grad():
                made = move(tensor)
                quantized = bridge.is_quantized(made)
                seen = bridge.read_payload(made).values(torch.float32) if quantized else made.float()
        except Exception as fault:
            refused.append(f"{operation} ({type(fault).__name__})")
            continue
        # What is no FP8 tensor any more may have gone through the dtype that the tensor says it has.
        if not any(torch.equal(seen, move(one).float()) for one in ((exact,) if quantized else (exact, plain))):
            wrong.append(operation)
    said = f"other values after: {', '.join(wrong) or 'none'}; refused: {', '.join(refused) or 'none'}"
    bench.check(f"{name}.derived", not wrong and len(refused) < len(MOVES), said)


ROWS, INNER, OUTER = 256, 512, 384
# Class of what a recipe's quantizers make.
KINDS: Final = {
    "delayed": "Float8Tensor", "current": "Float8Tensor", "block": "Float8BlockwiseQTensor", "mxfp8": "MXFP8Tensor",
}  # fmt: skip
TURNED: Final = {"tensor": "tensor", "1x128": "128x1", "128x128": "128x128", "1x32": "32x1"}


def probe(bench: Bench) -> None:
    """Transformer Engine's tensors under each recipe of the target, then torchao's."""
    recipes = [recipe for recipe in bench.recipes if recipe in KINDS]
    for recipe in recipes:
        with bench.scope(recipe):
            check_te(bench, recipe)
    if not (vendor := bench.bridge("torchao").TORCHAO).is_available():
        bench.cannot_run(vendor.why_unavailable())
    with bench.scope("torchao"):
        check_torchao(bench)
    if not recipes:
        bench.cannot_run("no recipe of Transformer Engine is here. Next step: run this cell on an FP8 GPU.")


# --- one tensor -------------------------------------------------------------------------------------------------------


def check_tensor(bench: Bench, name: str, tensor: Any, block: str, own: Callable[[], Any] | None = None) -> None:
    """That a tensor hands over payload and scale, in silence and whole: they give what it gives itself, bit by bit.

    Args:
        tensor: quantized.
        block: which of its values share a scale.
        own: how its vendor dequantizes it; its `dequantize` to fp32 without it.
    """
    bridge = bench.bridge("quantized_tensor")
    with watching_dequantizations(bridge.saying) as watch:
        payload = bridge.read_payload(tensor)
    bench.check(f"{name}.reads-nothing", not watch.seen, watch.said)
    handed = isinstance(payload, bridge.ScaledPayload)
    bench.check(f"{name}.handed-over", handed and payload.block == block, str(payload)[:300])
    if not handed:
        return
    seen = payload.payload.shape, payload.logical_dtype
    bench.check(f"{name}.logical", seen == (tensor.shape, tensor.dtype), f"{payload.logical_dtype} {list(seen[0])}")
    wanted = (own or partial(tensor.dequantize, dtype=torch.float32))()  # fp32 hides no bit of a scale
    bench.same_bits(
        f"{name}.parity", (payload.values(wanted.dtype), payload.values()), (wanted, wanted.to(tensor.dtype))
    )
    scale = payload.scale.float()
    telling = bool(((scale - 1).abs() > 0.01).any()) and bool(torch.isfinite(scale).all())
    bench.check(f"{name}.scale-matters", telling, f"{scale.numel()} scales from {scale.min():.3g} to {scale.max():.3g}")
    bench.saw_quantizer(f"wrappers.{name}", name, payload.source, f"float8_{payload.format}", payload.block)


# --- Transformer Engine -----------------------------------------------------------------------------------------------


def check_te(bench: Bench, recipe: str) -> None:
    """Rows, weight and gradient as the recipe quantizes them, in both directions; then who multiplies them."""
    kind, (layer, stored, run) = KINDS[recipe], _layers(bench, recipe)
    made = dict(_quantized(bench, layer))
    for name, tensor in made.items():
        block = wanted_block(recipe, "weight" if name.startswith("weight") else "input")
        bench.check(f"{name}.class", type(tensor).__name__ == kind, type(tensor).__name__)
        if name.endswith(".turned"):
            twin = made[name.removesuffix(".turned")]
            check_tensor(bench, name, tensor, TURNED[block], partial(_own_of_turned, tensor, twin))
        else:
            check_tensor(bench, name, tensor, block)
            check_derived(bench, name, tensor)
    bench.check("stored.class", type(stored.weight).__name__ == kind, type(stored.weight).__name__)
    for name, one in (("layer", layer), ("stored", stored)):
        with watching_dequantizations(bench.bridge("quantized_tensor").saying) as watch:
            run(one)
        bench.check(f"{name}.silent", not watch.silent, watch.said)


def _layers(bench: Bench, recipe: str) -> tuple[Any, Any, Callable[[Any], None]]:
    """A layer that ran two steps, so that delayed scaling has scales; one whose weight is kept in FP8 alone; a step."""
    scope = bench.bridge("fp8_scope")
    made = scope.te_recipe(recipe, reduce_amax=False)
    layer = bench.te_layer("linear", INNER, OUTER)
    given = bench.randn(ROWS, INNER, dtype=torch.bfloat16, scale=3.0)
    gradient = bench.randn(ROWS, OUTER, scale=0.01).to(torch.bfloat16)

    def run(one: Any) -> None:
        with scope.te_scope(enabled=True, recipe=made, amax_reduction_group=None):
            out = one(given.detach().clone().requires_grad_())
        out.backward(gradient)

    for _ in range(2):
        run(layer)
    with scope.te_quantized_weights(enabled=True, recipe=made):
        return layer, bench.te_layer("linear", INNER, OUTER), run


def _own_of_turned(tensor: Any, twin: Any) -> Any:
    """What a tensor with turned storage alone says itself; of one with one scale its twin, up to 2.18."""
    try:
        return tensor.dequantize(dtype=torch.float32)
    except NotImplementedError:  # "Casting back from the transpose not implemented yet!" (2.12.0)
        return twin.dequantize(dtype=torch.float32)


def _quantized(bench: Bench, layer: Any) -> Iterator[tuple[str, Any]]:
    """Tensors by the quantizers that the layer ran with: as they are, and where it can, with turned storage alone."""
    plain = {
        "rows": (layer.quantizers["scaling_fwd"][0], bench.randn(ROWS, INNER, dtype=torch.bfloat16, scale=3.0)),
        "weight": (layer.quantizers["scaling_fwd"][1], layer.weight.detach()),
        "gradient": (layer.quantizers["scaling_bwd"][0], bench.randn(ROWS, OUTER, dtype=torch.bfloat16, scale=0.01)),
    }
    for name, (old, values) in plain.items():
        quantizer = old.copy()
        quantizer.internal = False
        for ending, by_row in (("", True), (".turned", False)):
            # No quantizer of one scale makes turned bytes alone.
            quantizer.set_usage(rowwise=True, columnwise=not by_row)
            with torch.no_grad():
                made = quantizer(values)
            made.update_usage(rowwise_usage=by_row, columnwise_usage=not by_row)
            yield f"{name}{ending}", made


# --- torchao ----------------------------------------------------------------------------------------------------------


def check_torchao(bench: Bench) -> None:
    """The tensors of its training: scales that divide, one in all, one a row, one a column, and turned."""
    layer = bench.bridge("torchao").cast_to_float8.require()
    values = bench.randn(ROWS, INNER, dtype=torch.bfloat16, scale=3.0)
    powers = torch.exp2(bench.randint(9, INNER).float() - 3)  # torchao divides in bf16: these it divides by exactly
    # Name and block of each tensor, the block of the tensor turned, and its scale.
    cases = (
        ("tensor", "tensor", torch.tensor(8.0, device=bench.device)),
        ("row", "column", powers[:ROWS, None]),
        ("column", "row", powers[None, :]),
    )
    for name, turned, scale in cases:
        made = layer(values, scale, torch.float8_e4m3fn, axiswise_dim=None if name == "tensor" else -1)
        check_tensor(bench, name, made, name, made.to_original_precision)
        check_tensor(bench, f"{name}.turned", made.t(), turned, made.t().to_original_precision)
