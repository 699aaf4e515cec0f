"""Tokens that DSA layers reuse, and residual streams under the linear walker; the cell smoke_sparse has the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megacpp_validate.bridge.linear_walker import plan_walk
from megacpp_validate.native.block import HyperConnection, sinkhorn
from megacpp_validate.native.sparse_attention import SampledBlock, pick_tokens, sampled_attention

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


def test_ties_go_to_the_earlier_token_and_impossible_numbers_are_refused() -> None:
    assert pick_tokens(torch.zeros(1, 4, 4), 2)[0].tolist() == [[0, -1], [1, 0], [2, 0], [3, 0]]
    with pytest.raises(ValueError, match="window of 3"):
        pick_tokens(torch.zeros(1, 4, 4), 2, window=3)
    query = torch.randn(2, 1, 4, 8)
    with pytest.raises(ValueError, match="wanted"):
        sampled_attention(query, query, query, torch.zeros(1, 4, 1, dtype=torch.int64))


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
