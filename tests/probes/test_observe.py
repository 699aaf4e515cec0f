"""What ran is read from the autograd graph: vendor functions by their module, torch's own by their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megacpp_validate.probes.observe import attention_kernels, graph_nodes, marking_vendor_layers, observed_backends


def function_of(module: str, name: str = "_Function") -> Any:
    """A Python autograd function that lives in a module, as a vendor's do."""

    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    def backward(ctx: Any, g: Any) -> Any:
        return g * 2

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": module}
    return type(name, (torch.autograd.Function,), body)


def leaf(*shape: int) -> Any:
    return torch.ones(*shape or (4, 4), requires_grad=True)


@pytest.mark.parametrize(
    ("module", "backend"),
    [
        ("transformer_engine.pytorch.module.linear", "te"),
        ("transformer_engine_torch", "te"),
        ("flash_attn_interface", "fa3"),
        ("flash_attn.cute.interface", "fa4"),
        ("deep_gemm.autograd", "deep_gemm"),
        ("megacpp_validate.bridge.deep_gemm", "deep_gemm"),
        ("some_model.layers", "native"),
    ],
)
def test_a_vendor_is_known_by_the_module_of_its_function(module: str, backend: str) -> None:
    assert observed_backends(function_of(module).apply(leaf())) == (backend,)


def test_what_torch_itself_takes() -> None:
    assert observed_backends(leaf() @ leaf()) == ("native",)
    query = torch.randn(1, 2, 8, 16, requires_grad=True)
    assert observed_backends(scaled_dot_product_attention(query, query, query, is_causal=True)) == ("sdpa",)


def test_everything_behind_every_output_is_seen_once() -> None:
    vendor, other = function_of("transformer_engine.pytorch.x"), function_of("flash_attn_interface")
    deep = vendor.apply(leaf())
    for _ in range(300):  # far behind what came out, past views and sums
        deep = (deep + deep).reshape(2, 8).reshape(4, 4)
    assert observed_backends(deep) == ("te",)
    assert observed_backends(torch.ones(1), deep, other.apply(leaf())) == ("fa3", "te")
    names = graph_nodes(vendor.apply(vendor.apply(leaf())))
    assert len(names) == len(set(names))


# --- layers of torch's own operators ----------------------------------------------------------------------


class Plain(torch.nn.Module):
    """A vendor's layer that leaves no function of its own in the graph."""

    def forward(self, x: Any) -> Any:
        return x * 2


class Pair(Plain):
    def forward(self, x: Any) -> Any:
        return x * 2, None, x * 3


def test_every_output_of_a_layer_is_marked() -> None:
    pair = type("Pair", (Pair,), {"__module__": "transformer_engine.pytorch.attention"})()
    with marking_vendor_layers():
        first, _, last = pair(leaf())
    assert (observed_backends(first), observed_backends(last)) == (("te",), ("te",))


# --- kernels of Transformer Engine's attention ------------------------------------------------------------

BACKENDS = "transformer_engine.pytorch.attention.dot_product_attention.backends"


@pytest.mark.parametrize(
    ("module", "name", "kernels"),
    [
        (BACKENDS, "FusedAttnFunc", ("cudnn",)),
        (BACKENDS, "FusedAttentionWithScoreModFunc", ("cudnn",)),
        (BACKENDS.replace("backends", "context_parallel"), "AttnFuncWithCPAndKVP2P", ("cudnn",)),
        (BACKENDS.replace("backends", "softmax"), "ScaledUpperTriangMaskedSoftmax", ("unfused",)),
        (BACKENDS, "FP8EmulationFunc", ()),
        ("flash_attn_interface", "FlashAttnFunc", ()),  # called by nobody of Transformer Engine's
        ("some_model.layers", "FusedAttnFunc", ()),
    ],
)
def test_a_kernel_is_known_by_the_name_of_its_function(module: str, name: str, kernels: tuple[str, ...]) -> None:
    assert attention_kernels(function_of(module, name).apply(leaf())) == kernels


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("FusedAttention", "cudnn"), ("FlashAttention", "flash"), ("UnfusedDotProductAttention", "unfused")],
)
def test_a_kernel_is_known_by_the_layer_that_called_it(name: str, kernel: str) -> None:
    layer = type(name, (Plain,), {"__module__": BACKENDS})()
    assert attention_kernels(layer(leaf())) == ()
    with marking_vendor_layers():
        out = layer(leaf())
    assert attention_kernels(out.view(-1).transpose(0, 0)) == (kernel,)
    assert observed_backends(out) == ("te",)
