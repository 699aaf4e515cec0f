"""What promises a dtype keeps it inside an autocast region too."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_KINDS = ("cuda", "cpu")


def without_autocast(tensor: Any) -> AbstractContextManager[Any]:
    """A region in which products run in the dtype of their operands, on the kind of device that `tensor` lies on.

    Nothing is entered where no autocast is on: that costs more than to ask.
    """
    kind = tensor.device.type
    if kind in _KINDS and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
