"""CUDA graphs of the layers A of a model: their training pass is replayed, everything else is launched as before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..bridge.backends import Choice
from ..bridge.fp8_scope import high_precision
from ..bridge.graph_capture import capture_graphs
from .layers import AttentionLayer
from .model import HybridModel, ScopeFactory


class TurnedBlock(nn.Module):
    """An A-block with its rotary tables: what is captured takes rows alone."""

    def __init__(self, block: Any, rope: tuple[Any, Any]) -> None:
        super().__init__()
        self.block, self.rope = block, rope

    def forward(self, rows: Any) -> Any:
        """[B, T, hidden] -> [B, T, hidden]."""
        return self.block(rows, rope=self.rope)


def capture_attention(model: HybridModel, batch: int, scope: ScopeFactory | None) -> dict[str, Choice]:
    """Capture every layer A that runs once in a pass, in the precision that it is trained in.

    Args:
        model: on a GPU, in training mode, without hooks; one rank holds all of it.
        batch: sequences of a pass.
        scope: of the layers outside of the BF16 zones; None for none.

    Returns:
        Part, as in layers.4.graph -> "te" where there is a graph now, "native" where there is nothing to capture by.
    """
    size, taken = model.size, dict[str, Choice]()
    for place, layer in enumerate(model.layers):
        twice = size.mtp and place == len(model.layers) - 1
        if not isinstance(layer, AttentionLayer) or twice:
            continue
        low = scope is not None and not size.zones.is_bf16(place)
        turned = TurnedBlock(layer.block, (model.cos, model.sin))
        rows = torch.randn(
            batch, size.length, size.hidden, device=model.cos.device, dtype=model.build.dtype
        ).requires_grad_()
        made = scope() if low and scope is not None else high_precision("a layer of the BF16 zone is captured")
        taken[f"layers.{place}.graph"] = choice = capture_graphs([turned], [(rows,)], made)  # type: ignore[arg-type]
        if choice.observed == "te":
            layer.__dict__["graph"] = turned  # past nn.Module: its parameters are the block's
    return taken
