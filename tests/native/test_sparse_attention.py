"""Tokens that DSA layers reuse, their indexer, and residual streams; attention itself is judged by smoke_sparse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from megacpp_validate.bridge.linear_walker import plan_walk
from megacpp_validate.native.attention import rope_tables
from megacpp_validate.native.block import HyperConnection, read_streams, sinkhorn, write_streams
from megacpp_validate.native.sparse_attention import Indexer, SampledBlock, indexer_loss, pick_tokens, sampled_attention
from megacpp_validate.probes.references import norm_linear, turn, visible

SIZES = {"hidden": 16, "ffn_hidden": 16, "num_heads": 2, "head_dim": 8, "num_gqa_groups": 1}
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])


def block(heads: int) -> Any:
    torch.manual_seed(0)
    return SampledBlock(heads, index_top_k=3, index_window=2, **SIZES)


def test_a_layer_reuses_the_tokens_of_the_same_documents_alone() -> None:
    first, second = block(2), block(0)
    second.load_state_dict(first.state_dict(), strict=False)
    rows = torch.randn(1, 9, 16)
    out, cache, loss = first(rows, doc_ids=DOCUMENTS)
    again, passed_on, none = second(rows, doc_ids=DOCUMENTS, cache=cache)
    assert torch.equal(out, again)
    assert passed_on is cache
    assert (loss.item() > 0, none) == (True, None)
    assert cache.indices[0, 4].tolist() == [4, -1, -1]  # the first token of its document
    for more in ({"doc_ids": DOCUMENTS.clone(), "cache": cache}, {"cache": cache}, {}):
        with pytest.raises(ValueError, match="same documents"):
            second(rows, **more)


def test_ties_go_to_the_earlier_token() -> None:
    assert pick_tokens(torch.zeros(1, 4, 4), 2)[0].tolist() == [[0, -1], [1, 0], [2, 0], [3, 0]]


def test_the_walker_leaves_score_projections_alone_and_no_stream_grows() -> None:
    tree = nn.ModuleDict({"mixer": HyperConnection(8, 4)})
    plan = plan_walk(tree, include=("phi_*", HyperConnection))
    assert {one.name: (one.action, one.code) for one in plan.decisions} == {
        f"mixer.phi_{name}": ("keep", "mhc-score") for name in ("pre", "post", "res")
    }
    residual = sinkhorn(torch.randn(100, 4, 4, dtype=torch.float64), 200)
    for axis in (-1, -2):
        torch.testing.assert_close(residual.sum(axis), torch.ones(100, 4, dtype=torch.float64))
    pre, post, kept = tree["mixer"](torch.randn(1, 2, 4, 8))
    assert pre.allclose(torch.tensor(0.25), atol=0.02)
    assert post.allclose(torch.tensor(1.0), atol=0.02)
    assert kept.diagonal(dim1=-2, dim2=-1).min() > 0.9


def check_gradients(out: Any, wanted: Any, leaves: list[Any]) -> None:
    torch.testing.assert_close(out, wanted)
    upstream = torch.randn_like(out)
    for one, other in zip(*(torch.autograd.grad(each, leaves, upstream) for each in (out, wanted)), strict=True):
        torch.testing.assert_close(one, other)


def test_residual_streams_are_their_formula() -> None:
    mixer = HyperConnection(8, 4, dtype=torch.float64)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter)
    streams = torch.randn(2, 5, 4, 8, dtype=torch.float64, requires_grad=True)
    pre, post, residual = mixer(streams)
    out = write_streams(streams, torch.tanh(read_streams(streams, pre)), post, residual)

    rows = streams.flatten(2)
    rows = rows / torch.sqrt((rows * rows).mean(-1, keepdim=True) + 1e-5)
    phis = (mixer.phi_pre, mixer.phi_post, mixer.phi_res)
    parts = zip(mixer.bases.split([4, 4, 16]), mixer.gains, phis, strict=True)
    pre, post, residual = (base + gain * rows @ phi.weight.T for base, gain, phi in parts)
    grid = torch.exp(residual).unflatten(-1, (4, 4))
    for _ in range(20):
        grid = grid / grid.sum(-1, keepdim=True)
        grid = grid / grid.sum(-2, keepdim=True)
    read = torch.einsum("btn,btnd->btd", 1 / (1 + torch.exp(-pre)), streams)
    wanted = grid @ streams + (2 / (1 + torch.exp(-post))).unsqueeze(-1) * torch.tanh(read).unsqueeze(2)
    check_gradients(out, wanted, [streams, *mixer.parameters()])


def test_the_indexer_learns_from_the_attention_and_gives_its_rows_no_gradient() -> None:
    length, heads, width = 12, 4, 8
    indexer = Indexer(16, heads, width, eps=1e-5, dtype=torch.float64)
    rows, rope = torch.randn(2, length, 16, dtype=torch.float64, requires_grad=True), rope_tables(length, width)
    indices = pick_tokens(indexer(rows, rope).detach(), 5, window=3)
    query, key, value = (torch.randn(2, many, length, width, dtype=torch.float64) for many in (4, 2, 2))
    loss = indexer_loss(indexer(rows, rope), indices, sampled_attention(query, key, value, indices)[1])

    seen = visible(2, 1, length, indices=indices, device="cpu")
    near = query @ key.repeat_interleave(2, 1).mT / math.sqrt(width)
    wanted = near.masked_fill(~seen, -math.inf).softmax(-1).mean(1)
    given = {"input": rows.detach(), **{name.rpartition(".")[2]: one for name, one in indexer.named_parameters()}}
    parts = norm_linear(given, 1e-5).split([heads * width, width, heads], -1)
    cos, sin = (table.double() for table in rope)
    turned = (turn(one.unflatten(-1, (-1, width)).transpose(1, 2), cos, sin) for one in parts[:2])
    scores = (torch.einsum("bjtw,bosw->btsj", *turned).clamp_min(0) * parts[2].unsqueeze(2)).sum(-1)
    scores = (scores / math.sqrt(heads * width)).masked_fill(~seen[:, 0], -math.inf)
    logs = scores.log_softmax(-1).masked_fill(~seen[:, 0], 0.0)
    wanted = (torch.special.xlogy(wanted, wanted) - wanted * logs).sum(-1).mean()
    check_gradients(loss, wanted, list(indexer.parameters()))
    assert torch.autograd.grad(indexer(rows, rope).sum(), [rows], allow_unused=True) == (None,)
