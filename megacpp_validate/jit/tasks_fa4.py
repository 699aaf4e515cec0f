"""FlashAttention 4, forward and backward, for a named architecture; no GPU is wanted.

Its own functions run on tensors without memory (torch's FakeTensorMode), for which they compile and do not launch. The
name of `bwd_pre` does not hold the architecture (4.0.0b36): one folder of the cache for each, which the layout sees to.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any, Final

from .order import JitOrder, Lacking

# Multiprocessors of the device: FlashAttention asks it how to share out work, and has nobody to ask here.
_MULTIPROCESSORS: Final = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148, "sm_120a": 188, "sm_121a": 48}
_INTERFACE: Final = "flash_attn.cute.interface"


def compile_task(order: JitOrder) -> None:
    """Settings: `direction` ("forward backward"), `dtype`, `head_dim`, `heads`, `groups`, `causal`, `softcap`.

    `tokens`, 512 without it, is in no key.

    Raises:
        Lacking: FlashAttention 4 is not installed.
        ValueError: an architecture that has no such kernels, or a library that was loaded for another.
    """
    name_architecture(order.arch)
    try:
        interface = importlib.import_module(_INTERFACE)
    except ImportError as fault:
        raise Lacking(f"FlashAttention 4 cannot be imported: {fault}") from fault
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    given: dict[str, Any] = {"causal": order.setting("causal", "true") == "true"}
    if softcap := float(order.setting("softcap", "0") or 0):
        given["softcap"] = softcap
    dtype = getattr(torch, order.setting("dtype", "bfloat16"))
    tokens, width = int(order.setting("tokens", "512")), int(order.setting("head_dim", "64"))
    heads, groups = int(order.setting("heads", "8")), int(order.setting("groups", order.setting("heads", "8")))
    directions = order.words("direction", "forward backward")
    with FakeTensorMode():
        query, key, value, out = (
            torch.empty(1, tokens, number, width, dtype=dtype, device="cuda")
            for number in (heads, groups, groups, heads)
        )
        lse = torch.empty(1, heads, tokens, dtype=torch.float32, device="cuda")
        if "forward" in directions:
            interface._flash_attn_fwd(query, key, value, return_lse=False, **given)
            interface._flash_attn_fwd(query, key, value, return_lse=True, **given)
        if "backward" in directions:
            interface._flash_attn_bwd(query, key, value, out, out, lse, **given)


def name_architecture(arch: str) -> None:
    """Tell both libraries what to compile for, before they are loaded.

    Raises:
        ValueError: they have no such architecture, or are loaded already.
    """
    if arch not in _MULTIPROCESSORS:
        raise ValueError(f"FlashAttention 4 has no {arch!r}. Next step: name one of {', '.join(_MULTIPROCESSORS)}.")
    if _INTERFACE in sys.modules:
        raise ValueError(f"{_INTERFACE} is loaded already. Next step: run the task in a process of its own.")
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["FLASH_ATTENTION_ARCH"] = re.sub(r"[af]$", "", arch)
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(_MULTIPROCESSORS[arch])
