"""What really ran, seen from the autograd graph of an output: no wrapper is asked. And what a call leaves behind.

A Python autograd function leaves its class in the graph, a custom operator its name, and torch's own operators theirs.
So `transformer_engine.pytorch.module.linear._Linear` in the graph is Transformer Engine's linear layer, and its
absence is a fallback, whatever the wrapper claims. A vendor layer made of torch's own operators leaves no such name
(Transformer Engine's unfused attention, which takes fp32, seen 2026-11-21): while `marking_vendor_layers` is on, the
node that such a layer ends in is marked with the layer's class. It works with and without a GPU.

A layer that keeps a tensor of every call for good is right in every number, and ends a training run out of memory
hours later. What is made once (workspaces of cuBLAS, weights in FP8, amax histories, masks and lengths by shape, what
Triton tunes) is made in the first calls, or shows in one call and in no other: only what rises with every call counts.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook

from ..evidence.receipt import Check
from .bounds import check_of, part, relative_error

Enter = Callable[[], AbstractContextManager[Any]]
"""Makes a scope anew for each step."""

_MARK: Final = "megacpp_validate.layers"
_VENDOR_PACKAGES: Final = ("transformer_engine.", "flash_attn", "deep_gemm")

# Part of a node's name -> backend. First match wins; what matches none is no backend.
_BACKENDS: Final = (
    ("transformer_engine", "te"),
    ("te_moe", "te"),
    ("flash_attn_interface", "fa3"),
    ("flash_attn_3", "fa3"),
    ("flash_attn.cute", "fa4"),
    ("deep_gemm", "deep_gemm"),
    ("liger_kernel", "liger"),
    ("ScaledDotProduct", "sdpa"),
    ("GroupedMm", "grouped_mm"),
)
# Which of its kernels Transformer Engine's attention ran by: the layers behind DotProductAttention and their functions
# (attention/dot_product_attention/backends.py and softmax.py; the same names in every release from 2.10.0 to 2.20.2).
_KERNELS: Final = (
    (re.compile(r"transformer_engine\..*\b(?:FusedAttention|FusedAttnFunc|AttnFuncWithCP)"), "cudnn"),
    (re.compile(r"transformer_engine\..*\bFlashAttention$"), "flash"),
    (re.compile(r"transformer_engine\..*\b(?:UnfusedDotProductAttention|Scaled\w*Softmax)$"), "unfused"),
)


@contextmanager
def marking_vendor_layers() -> Iterator[None]:
    """While inside, the graph node that a vendor's layer ends in carries the layer's class."""
    handle = register_module_forward_hook(_mark)
    try:
        yield
    finally:
        handle.remove()


def _mark(layer: Any, _inputs: Any, output: Any) -> None:
    kind = type(layer)
    if not kind.__module__.startswith(_VENDOR_PACKAGES):
        return
    for tensor in output if isinstance(output, tuple | list) else (output,):
        node = getattr(tensor, "grad_fn", None)
        if node is not None:
            node.metadata.setdefault(_MARK, []).append(f"{kind.__module__}.{kind.__qualname__}")


def is_te(kind: type) -> bool:
    """Whether a class is Transformer Engine's own."""
    return kind.__module__.startswith("transformer_engine")


def graph_nodes(*outputs: Any) -> tuple[str, ...]:
    """Names of the nodes of the graph behind some outputs, each once, in the order met going back.

    A Python autograd function or a custom operator is named by module and class, torch's own by its class.
    """
    names: dict[str, None] = {}
    seen: set[Any] = set()
    todo = [output.grad_fn for output in outputs if getattr(output, "grad_fn", None) is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        forward = getattr(node, "_forward_cls", None)
        own = str(node.name()).removesuffix("0").removesuffix("1")
        names.setdefault(f"{forward.__module__}.{forward.__qualname__}" if forward is not None else own)
        names.update(dict.fromkeys(node.metadata.get(_MARK, ())))
        todo.extend(parent for parent, _ in node.next_functions if parent is not None)
    return tuple(names)


def observed_backends(*outputs: Any) -> tuple[str, ...]:
    """Which vendor backends the graph behind some outputs holds, sorted; ("native",) where there is none."""
    found = (next((backend for mark, backend in _BACKENDS if mark in name), "") for name in graph_nodes(*outputs))
    return tuple(sorted(set(found) - {""})) or ("native",)


def attention_kernels(*outputs: Any) -> tuple[str, ...]:
    """The kernels by which Transformer Engine's attention ran: "cudnn", "flash", "unfused"; () where none is seen.

    The names of its layers are there only where `marking_vendor_layers` was on.
    """
    names = graph_nodes(*outputs)
    return tuple(kernel for pattern, kernel in _KERNELS if any(pattern.search(name) for name in names))


# --- uses of a layer --------------------------------------------------------------------------------------------------

WARM_UP: Final = 2  # delayed scaling has its histories and scales then, and each direction its workspaces
CALLS: Final = 3
BLOCK: Final = 512  # bytes of the smallest block that torch's CUDA allocator counts (kMinBlockSize)
SCALARS: Final = 8  # blocks a call: scales and the like, no activation, no weight, no history


class Used(NamedTuple):
    """What one use of a layer gave."""

    outputs: list[Any]
    gradients: list[Any]


def use_of(
    layer: Callable[..., Any], inputs: Sequence[Any], enter: Enter, options: dict[str, Any]
) -> Callable[[], Used]:
    """A use of a layer: a copy of each tensor goes forward through it in the scope, and gradients come back outside."""

    def use() -> Used:
        given = _copies(inputs)
        rows = [one.requires_grad_() for one in given if isinstance(one, torch.Tensor) and one.is_floating_point()]
        with enter():
            out = layer(*given, **options)
        trained = layer.parameters() if isinstance(layer, torch.nn.Module) else ()
        leaves = [*rows, *(parameter for parameter in trained if parameter.requires_grad)]
        made = _tensors_of(out)
        behind = [one for one in made if one.requires_grad]
        gradients: Sequence[Any] = ()
        if behind:  # a fault that cuts the graph shows elsewhere
            ones = [torch.ones_like(one) for one in behind]
            gradients = torch.autograd.grad(behind, leaves, ones, allow_unused=True)
        return Used([one.detach() for one in made], [one for one in gradients if one is not None])

    return use


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in inputs]


def _tensors_of(given: Any) -> list[Any]:
    return [one for one in (given if isinstance(given, tuple | list) else (given,)) if isinstance(one, torch.Tensor)]


# --- the tenth use ----------------------------------------------------------------------------------------------------

USES: Final = 5  # after those that memory is measured in, ten together
ROUNDING: Final = 2.0**-8  # of bf16


def check_steady(name: str, call: Callable[[], Used], *, draws: bool) -> Check:
    """Whether later uses of a layer, of the same tensors, give what earlier ones gave."""
    before = _generators(draws)
    uses = [call() for _ in range(USES + 1)]
    why = "each of the later uses against the one before: one rounding to bf16; on an H200 all bits are the same"
    parts = []
    for kind in Used._fields:
        lists = [getattr(use, kind) for use in uses]
        worst = max(_worst(later, earlier) for earlier, later in pairwise(lists))
        parts.append(part(kind, worst, ROUNDING, why))
    moved = not all(map(torch.equal, before, _generators(draws)))
    return check_of(f"{name}.steady", *parts, part("generators-moved", moved, 0.0, "nothing is drawn without dropout"))


def _worst(seen: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The largest relative error of some tensors; infinite where one is not finite."""
    errors = [relative_error(*pair) for pair in zip(seen, wanted, strict=True)]
    return max(errors, default=0.0) if all(map(math.isfinite, errors)) else math.inf


def _generators(draws: bool) -> list[Any]:
    """States of torch's generators; without the GPU's where a fused kernel takes numbers even for no dropout."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() and not draws else [])]


# --- evaluation -------------------------------------------------------------------------------------------------------


def check_eval(
    name: str, layer: Callable[..., Any], inputs: Sequence[Any], enter: Enter, options: dict[str, Any]
) -> Check:
    """Whether uses without gradients give what training gives, and leave alone what they take and what they gave.

    They take inputs, options and parameters. The second use takes other values. Where a scope is entered, kernels of an
    evaluation may round some values to FP8 differently from those of training: outputs may differ by half of what
    leaving the scope changes in training. Outputs without the scope must differ by the other half at least.

    Args:
        name: the check is `NAME.eval`.
        layer, inputs, enter, options: as `use_of` takes them.
    """

    def evaluate(given: Sequence[Any]) -> list[Any]:
        with torch.no_grad(), enter():
            return _tensors_of(layer(*given, **options))

    trained, first, second = use_of(layer, inputs, enter, options)().outputs, _copies(inputs), _copies(inputs)
    for one in _tensors_of(second):
        one.copy_(one.flip(-1))
    taken = [*first, *second, *(tensor for one in options.values() for tensor in _tensors_of(one))]
    taken += layer.parameters() if isinstance(layer, torch.nn.Module) else ()
    given, outputs = _copies(taken), evaluate(first)
    kept = _copies(outputs)
    evaluate(second)
    half, outside = 0.0, trained
    if enter is not nullcontext:  # last: leaving low precision resets a layer of TE
        outside = use_of(layer, inputs, nullcontext, options)().outputs
        half = _worst(trained, outside) / 2
    why = "half of what leaving the scope changes in training"
    parts = [
        part("outputs", _worst(kept, trained), max(half, ROUNDING), f"{why}; one rounding to bf16 at least"),
        part("inputs", _differ(taken, given), 0.0, "an evaluation writes into no tensor that it takes"),
        part("earlier-outputs", _differ(outputs, kept), 0.0, "nor into one that it gave before"),
    ]
    if enter is not nullcontext:
        parts.append(part("low-precision-ran", _worst(kept, outside), half, why, at_least=True))
    return check_of(f"{name}.eval", *parts)


def _differ(seen: list[Any], wanted: list[Any]) -> int:
    """How many tensors have other bits than they should."""
    return sum(not torch.equal(*pair) for pair in zip(_tensors_of(seen), _tensors_of(wanted), strict=True))


# --- memory -----------------------------------------------------------------------------------------------------------


def check_memory(name: str, device: str, call: Callable[[], Any]) -> Check:
    """Whether calls leave the bytes on the device as they were; see `Bench.layer_keeps_nothing`."""
    kept, bound = bytes_kept(device, call), float(BLOCK * SCALARS if device == "cuda" else 0)
    why = (
        f"the smallest rise of {CALLS} calls after {WARM_UP} of warm-up: what is made once rises in one of them at most"
    )
    if device == "cuda":
        why += f"; {SCALARS} of the allocator's smallest blocks, {BLOCK} bytes each, are less than any tensor of a call"
    said = f"every call of forward and backward keeps {kept:.0f} bytes on the device for good: memory grows with steps"
    return check_of(f"{name}.memory", part("bytes-kept-a-call", kept, bound, why), detail=said if kept > bound else "")


def bytes_kept(device: str, call: Callable[[], Any]) -> float:
    """Bytes a call by which what lives on the device rises in every one of some; 0 where there is one without.

    Args:
        device: "cuda", or "cpu", where only tensors that Python knows of can be seen.
        call: forward and backward of new inputs; what it gives is dropped.
    """
    held = []
    gc.freeze()  # the collector looks at nothing that was there before: it would take it longer than all the calls
    try:
        for number in range(WARM_UP + CALLS):
            call()
            if number >= WARM_UP - 1:
                held.append(_living_bytes(device))
    finally:
        gc.unfreeze()
    return max(0.0, min(after - before for before, after in pairwise(held)))


def _living_bytes(device: str) -> int:
    """Bytes of living tensors: of all on a GPU, of those made since the freeze on a CPU."""
    gc.collect()
    if device == "cuda":
        return int(torch.cuda.memory_allocated())
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.layout is torch.strided:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
