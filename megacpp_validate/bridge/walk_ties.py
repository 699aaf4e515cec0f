"""Which linear layers share the memory of their weights, with each other or with what is no linear layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from .walk_graph import Node


@dataclass(frozen=True)
class Ties:
    """Weights that lie in the same memory, in part or in whole.

    Attributes:
        owners: id of a node -> name of a tensor that it shares, of no plain `nn.Linear`.
        groups: the plain `nn.Linear` layers that share their weights with each other, two or more each.
    """

    owners: Mapping[int, str]
    groups: tuple[tuple[Node, ...], ...]


class _Span(NamedTuple):
    """Where a tensor of a node lies: bytes `start` to `stop` of a space, or itself alone."""

    space: tuple[str, int]
    start: int
    stop: int
    node: Node
    part: str


def read_ties(nodes: Sequence[Node], names: Mapping[int, str]) -> Ties:
    """Every tie of a tree; layers beside each other in one flat buffer are not tied.

    Args:
        nodes: of the tree.
        names: id of a node -> its first name.
    """
    owners: dict[int, str] = {}
    groups: list[tuple[Node, ...]] = []
    for spans in _overlapping([span for node in nodes for span in _spans(node)]):
        linears = {id(span.node): span.node for span in spans if type(span.node.module) is nn.Linear}
        others = [span for span in spans if type(span.node.module) is not nn.Linear]
        if others:
            owner = f"{names[id(others[0].node)]}.{others[0].part}".removeprefix(".")
            owners |= dict.fromkeys(linears, owner)
        if len(linears) > 1:
            groups.append(tuple(linears.values()))
    return Ties(owners, tuple(groups))


def _overlapping(spans: list[_Span]) -> list[list[_Span]]:
    """Spans put together where they overlap, also by way of a third."""
    found: list[list[_Span]] = []
    ordered = sorted(spans, key=lambda span: (span.space, span.start))
    for _, here in groupby(ordered, key=lambda span: span.space):
        end = -1
        for span in here:
            if span.start < end:
                found[-1].append(span)
            else:
                found.append([span])
                end = -1
            end = max(end, span.stop)
    return found


def _spans(node: Node) -> list[_Span]:
    """Where the tensors of a module lie; of a plain linear layer the bias is left out, because it is never rounded."""
    parts = {**node.module._parameters, **node.module._buffers}
    if type(node.module) is nn.Linear:
        parts.pop("bias", None)
    return [_Span(*_memory(tensor), node, part) for part, tensor in parts.items() if tensor is not None]


def _memory(tensor: Any) -> tuple[tuple[str, int], int, int]:
    """The space in which a tensor lies, and its first and last byte there; reads no values, waits for nothing."""
    alone = ("object", id(tensor)), 0, 1
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or not tensor.numel():
        return alone
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()
    if tensor.is_meta:
        start = tensor.storage_offset() * tensor.element_size()
        return ("meta", tensor.untyped_storage()._cdata), start, start + length
    start = tensor.data_ptr()
    return ((str(tensor.device), 0), start, start + length) if start else alone  # 0: its memory was given back
