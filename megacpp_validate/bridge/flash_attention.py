"""FlashAttention 3 and 4 behind the same firewall: attention's first fallbacks, each with a check that fails closed.

What a release takes is written down as data, read from the sources of flash-attn 2.8.3.post2 (`hopper/`, which is
FlashAttention 3) and flash-attn-4 4.0.0b36 (`flash_attn/cute/interface.py`, `_validate_head_dims`). A device, head size
or dtype that is not listed is refused: a kernel that was never named here is never launched. As in `imports.py`,
importing this module imports neither library and never raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from .backends import Refusal
from .vendor import Vendor, explain_plainly

FlashBackend = Literal["fa3", "fa4"]
Capability = tuple[int, int]

FA3: Final = Vendor(
    "FlashAttention 3",
    module="flash_attn_interface",
    switch="MEGACPP_DISABLE_FA3",
    explain=explain_plainly("FlashAttention 3", "build it from the folder `hopper` of flash-attn for this torch"),
)
FA4: Final = Vendor(
    "FlashAttention 4",
    module="flash_attn.cute",
    switch="MEGACPP_DISABLE_FA4",
    explain=explain_plainly("FlashAttention 4", "pip install flash-attn-4, with the extra `cu13` on CUDA 13"),
)


# [B, T, H, D] -> [B, T, H, D], or (that, logsumexp) in some builds.
fa3_attention: Final = FA3.attribute("flash_attn_func")
# [B, T, H, D] -> ([B, T, H, D], logsumexp).
fa4_attention: Final = FA4.attribute("flash_attn_func")


@dataclass(frozen=True)
class Kernels:
    """What one FlashAttention takes; everything else is refused.

    Attributes:
        backend: its id.
        vendor: the library.
        head_sizes: compute capability -> head sizes D that have a forward and a backward kernel there.
        dtypes: of query, key and value.
        soft_cap: compute capabilities where logits may be capped, forward and backward.
    """

    backend: FlashBackend
    vendor: Vendor
    head_sizes: Mapping[Capability, frozenset[int]]
    soft_cap: frozenset[Capability]
    dtypes: frozenset[Any] = frozenset({torch.float16, torch.bfloat16})


def _eights(most: int) -> frozenset[int]:
    return frozenset(range(8, most + 1, 8))


# The head size 256 of FlashAttention 4 on sm_100 has a kernel of its own that takes neither a window nor a soft cap;
# on sm_120 and sm_121 head sizes are checked nowhere, so that only the usual two are taken.
KERNELS: Final[Mapping[str, Kernels]] = {
    # Whether a build has soft caps cannot be seen before the launch: it may be compiled with
    # FLASHATTENTION_DISABLE_SOFTCAP, as the one in xformers is, and still name the parameter.
    "fa3": Kernels("fa3", FA3, {(9, 0): _eights(256)}, frozenset()),
    "fa4": Kernels(
        "fa4",
        FA4,
        {
            (9, 0): _eights(256),
            (10, 0): _eights(128),
            (10, 3): _eights(128),
            (12, 0): frozenset({64, 128}),
            (12, 1): frozenset({64, 128}),
        },
        frozenset({(9, 0), (10, 0), (10, 3)}),  # its backward asserts that there is none on sm_12x
    ),
}


def why_not_flash(kernels: Kernels, query: Any, *, softcap: float | None) -> Refusal | None:
    """Why one FlashAttention cannot take a call; None where it can.

    What costs nothing is asked first: the library is imported only where everything else fits.

    Args:
        kernels: which one, from `KERNELS`.
        query: [B, H, T, D]; key and value have its dtype, device and head size.
        softcap: of the call.
    """
    name, width = kernels.vendor.name, query.shape[-1]
    if query.device.type != "cuda":
        return Refusal(kernels.backend, "device", f"the tensors lie on {query.device.type}; {name} needs a CUDA device")
    if query.dtype not in kernels.dtypes:
        taken = " and ".join(sorted(map(str, kernels.dtypes)))
        return Refusal(kernels.backend, "dtype", f"{name} takes {taken}, not {query.dtype}")
    capability = torch.cuda.get_device_capability(query.device)
    sizes = kernels.head_sizes.get(capability)
    if sizes is None:
        known = ", ".join(map(_architecture, kernels.head_sizes))
        return Refusal(
            kernels.backend, "architecture", f"{name} runs on {known}; this device is {_architecture(capability)}"
        )
    if width not in sizes:
        return Refusal(
            kernels.backend,
            "head-size",
            f"{name} has no kernel of head size {width} on {_architecture(capability)}; it takes "
            f"{', '.join(map(str, sorted(sizes)))}",
        )
    if softcap is not None and capability not in kernels.soft_cap:
        return Refusal(
            kernels.backend,
            "soft-cap",
            f"{name} cannot be relied on for soft-capped logits on {_architecture(capability)}: it has no backward for "
            "them there, or a build may lack them and say so only at the launch",
        )
    if not kernels.vendor.is_available():
        return Refusal(kernels.backend, "unavailable", kernels.vendor.why_unavailable())
    return None


def flash_attention(
    kernels: Kernels,
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> Any:
    """Attention by one FlashAttention; `why_not_flash` was None.

    Args:
        kernels: which one, from `KERNELS`.
        query, key, value: [B, H, T, D], [B, G, T, D] and [B, G, T, D]; fp16 or bf16.
        causal: whether a query sees no later key.
        window: how many keys a query sees, itself included; None is all.
        softcap: logits become softcap * tanh(logits / softcap); None leaves them.
        scale: factor on the scores; None is 1 / sqrt(D).

    Returns:
        [B, H, T, D], a view of [B, T, H, D].
    """
    rows = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    entry, unbounded = (fa3_attention, -1) if kernels.backend == "fa3" else (fa4_attention, None)
    sides = (unbounded, unbounded) if window is None else (window - 1, 0)
    out = entry.require()(*rows, softmax_scale=scale, causal=causal, window_size=sides, softcap=softcap or 0.0)
    # FlashAttention 4 and some builds of 3 give the logsumexp too.
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def _architecture(capability: Capability) -> str:
    return f"sm_{capability[0]}{capability[1]}"
