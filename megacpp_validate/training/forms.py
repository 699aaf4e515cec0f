"""Which form each part of a model has; what of it may take Transformer Engine is in `bridge.features`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from .errors import WrongSize

MoePath = Literal["bridge", "padded", "jagged"]
MOE_PATHS: Final[tuple[MoePath, ...]] = get_args(MoePath)


@dataclass(frozen=True)
class Forms:
    """The form of each part.

    Attributes:
        moe: how tokens reach the experts of an E-layer: "bridge" (`bridge.permute` and `bridge.expert_gemm`, any
            backend and precision, numbers of rows on the host), "padded" (route, permute, pad, batched GEMM, unpad,
            unpermute: the plain form), or "jagged" (sort by expert, grouped GEMM, weighted scatter: the host
            waits for nothing, and once a layer where experts are shared out over ranks).
        compiled_scan: whether the scan of M is compiled by torch.compile.
        fused_residual_norm: whether a residual connection and the norm behind it are one kernel, where a norm is a
            layer of its own.
        fused_mla_ingress: whether the projections into MLA are one product.
        recompute: whether layers A, M and R keep nothing, and run again in the backward pass.
        graphs: whether layers A are captured as CUDA graphs.
        expert_backends: which backends of `bridge.expert_gemm` the path "bridge" may ask, in this order.
        low_precision_experts: whether E-layers enter the low-precision scope where there is one.

    Raises:
        WrongSize: there is no such path.
    """

    moe: MoePath = "bridge"
    compiled_scan: bool = False
    fused_residual_norm: bool = False
    fused_mla_ingress: bool = False
    recompute: bool = False
    graphs: bool = False
    expert_backends: tuple[Literal["te", "deep_gemm", "native"], ...] = ("te", "native")
    low_precision_experts: bool = True

    def __post_init__(self) -> None:
        if self.moe not in MOE_PATHS:
            raise WrongSize(
                f"there is no way {self.moe!r} to the experts. Next step: choose one of {', '.join(MOE_PATHS)}."
            )
