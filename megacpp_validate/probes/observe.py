"""What really ran, seen from the autograd graph of an output: no wrapper is asked.

A Python autograd function leaves its class in the graph, a custom operator its name, and torch's own operators theirs.
So `transformer_engine.pytorch.module.linear._Linear` in the graph is Transformer Engine's linear layer, and its
absence is a fallback, whatever the wrapper claims. A vendor layer made of torch's own operators leaves no such name
(Transformer Engine's unfused attention, which takes fp32, seen 2026-11-21): while `marking_vendor_layers` is on, the
node that such a layer ends in is marked with the layer's class. It works with and without a GPU.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch.nn.modules.module import register_module_forward_hook

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
        names.setdefault(_name(node))
        names.update(dict.fromkeys(node.metadata.get(_MARK, ())))
        todo.extend(parent for parent, _ in node.next_functions if parent is not None)
    return tuple(names)


def observed_backends(*outputs: Any) -> tuple[str, ...]:
    """Which vendor backends the graph behind some outputs holds, sorted; ("native",) where there is none."""
    found = {_backend(name) for name in graph_nodes(*outputs)} - {""}
    return tuple(sorted(found)) or ("native",)


def attention_kernels(*outputs: Any) -> tuple[str, ...]:
    """The kernels by which Transformer Engine's attention ran: "cudnn", "flash", "unfused"; () where none is seen.

    The names of its layers are there only where `marking_vendor_layers` was on.
    """
    names = graph_nodes(*outputs)
    return tuple(kernel for pattern, kernel in _KERNELS if any(pattern.search(name) for name in names))


def _name(node: Any) -> str:
    forward = getattr(node, "_forward_cls", None)
    if forward is not None:
        return f"{forward.__module__}.{forward.__qualname__}"
    return str(node.name()).removesuffix("0").removesuffix("1")


def _backend(name: str) -> str:
    return next((backend for mark, backend in _BACKENDS if mark in name), "")


@contextmanager
def recording_argument(module: Any, name: str) -> Iterator[list[tuple[str, Any]]]:
    """What Transformer Engine's layers in `module` that know this keyword are given: (class, value) a call."""
    seen: list[tuple[str, Any]] = []

    def note(layer: Any, _: Any, keywords: dict[str, Any]) -> None:
        seen.append((type(layer).__name__, keywords.get(name, "left out")))

    layers = [layer for layer in module.modules() if type(layer).__module__.startswith("transformer_engine")]
    known = [layer for layer in layers if name in inspect.signature(type(layer).forward).parameters]
    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in known]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
