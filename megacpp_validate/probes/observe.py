"""What really ran, seen from the autograd graph of an output: no wrapper is asked.

A Python autograd function leaves its class in the graph, a custom operator its name, and torch's own operators theirs.
So `transformer_engine.pytorch.module.linear._Linear` in the graph is Transformer Engine's linear layer, and its absence
is a fallback, whatever the wrapper claims. It works with and without a GPU.
"""

from __future__ import annotations

from typing import Any, Final

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
        todo.extend(parent for parent, _ in node.next_functions if parent is not None)
    return tuple(names)


def observed_backends(*outputs: Any) -> tuple[str, ...]:
    """Which vendor backends the graph behind some outputs holds, sorted; ("native",) where there is none."""
    found = {_backend(name) for name in graph_nodes(*outputs)} - {""}
    return tuple(sorted(found)) or ("native",)


def _name(node: Any) -> str:
    forward = getattr(node, "_forward_cls", None)
    if forward is not None:
        return f"{forward.__module__}.{forward.__qualname__}"
    return str(node.name()).removesuffix("0").removesuffix("1")


def _backend(name: str) -> str:
    return next((backend for mark, backend in _BACKENDS if mark in name), "")
