"""Gated experts on padded rows, the plain form: permute, pad, batched products, unpad, unpermute.

Every expert gets as many rows as the fullest one, or a capacity. The host waits once for the numbers of rows, and the
batched product multiplies the padding too: `jagged_experts` does without both.
"""

from __future__ import annotations

from typing import Any

import torch

from ..native.autocast import without_autocast
from ..native.mlp import gated_activation
from .features import PRODUCTION, Features
from .permute import Dispatch


def padded_moe(
    tokens: Any,
    routing_map: Any,
    probs: Any,
    up_weight: Any,
    down_weight: Any,
    *,
    capacity: int | None = None,
    features: Features = PRODUCTION,
) -> Any:
    """Each token through its experts, summed with their probabilities.

    Args:
        tokens: [T, D].
        routing_map: [T, E] bool.
        probs: [T, E] float32 at least; of a token that an expert does not get, nothing is used.
        up_weight: [E, 2F, D] in the dtype of the tokens, the gate first.
        down_weight: [E, D, F], likewise.
        capacity: rows of each expert, later tokens being dropped by number; None takes the largest number of rows.
        features: whether Transformer Engine may permute.

    Returns:
        [T, D] in the dtype of the tokens.

    Raises:
        WrongShape, WrongDtype, WrongOption: as `Dispatch` raises them.
    """
    counts = routing_map.sum(dim=0).tolist()  # the host waits here
    height = capacity if capacity is not None else max(1, *counts)
    dispatch = Dispatch(len(counts), layout="padded", capacity=height, features=features)
    sent = dispatch.permute(tokens, None, routing_map, rows_per_expert=counts)
    with without_autocast(tokens):
        inner = gated_activation(torch.bmm(sent.rows, up_weight.transpose(1, 2)), "swiglu")
        out = torch.bmm(inner, down_weight.transpose(1, 2))
    return dispatch.unpermute(out, sent.row_map, probs=probs)
