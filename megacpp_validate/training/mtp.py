"""The head that predicts the token after the next one (multi-token prediction).

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2, with one module: the representation of the trunk at position t,
ahead of its last norm, and the embedding of token t + 1 are normed each, joined, projected to the width of the stream,
and run through one layer, which here is the last of the trunk, before the trunk's own norm and head predict token
t + 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from ..bridge.backends import Choice
from ..bridge.layer_spec import build_norm
from ..native.norms import INIT_STD
from .layers import Build, copy_weights, take_weights
from .seeds import generator_of
from .sizes import Size

NO_TARGET: Final = -100  # what `cross_entropy` leaves out


class MtpJoin(nn.Module):
    """What is this head's own: two norms and the projection. Layer, last norm and head are the trunk's.

    Args:
        size, build, seed: as `HybridModel` takes them.

    Attributes:
        hidden_norm, token_norm: of the stream, and of the embedding of the next token.
        projection: nn.Linear without bias, [hidden, 2 hidden]; the stream comes first.
    """

    def __init__(self, size: Size, build: Build, *, seed: int) -> None:
        super().__init__()
        made = {"dtype": build.dtype, "device": build.device}
        self.hidden_norm = build_norm(size.hidden, eps=size.eps, features=build.features, **made)
        self.token_norm = build_norm(size.hidden, eps=size.eps, features=build.features, **made)
        drawn = torch.randn(size.hidden, 2 * size.hidden, generator=generator_of(seed, "weights", "mtp"))
        self.projection = nn.Linear(2 * size.hidden, size.hidden, bias=False, device="meta", dtype=build.dtype)
        self.projection.weight = nn.Parameter(drawn.mul_(INIT_STD).to(build.device, build.dtype))

    def forward(self, stream: Any, ahead: Any) -> Any:
        """Stream and embeddings of the next tokens, each [B, T, hidden] -> [B, T, hidden] for the shared layer."""
        return self.projection(torch.cat([self.hidden_norm(stream), self.token_norm(ahead)], dim=-1))

    def choices(self) -> dict[str, Choice]:
        """Part -> what the last call took."""
        return {"hidden_norm": self.hidden_norm.choice, "token_norm": self.token_norm.choice}

    def native_state_dict(self) -> dict[str, Any]:
        """The weights under their own names."""
        return copy_weights(self)

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such weights, exactly."""
        take_weights(self, state)


def targets_of(tokens: Any, here: range) -> tuple[Any, Any]:
    """Of tokens [B, T + 1]: those after each position, and those after these; int64 [B, positions here].

    The last position of a sequence has no token to predict, and gets `NO_TARGET`. Every rank reads whole sequences, so
    nothing is asked of the others.
    """
    positions = slice(here.start, here.stop)
    behind = functional.pad(tokens[:, 2:], (0, 1), value=NO_TARGET)
    return tokens[:, 1:][:, positions], behind[:, positions]


def summed_surprise(logits: Any, targets: Any) -> Any:
    """[] the cross-entropies of logits [B, T, V] summed, nats, in fp32 at least; `NO_TARGET` counts nothing."""
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide, targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
