"""TE expert GEMM wrapper: the MoE expert bank as grouped linear layers, in TE, DeepGEMM or plain torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, get_args

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..native.grouped_gemm import ExpertBank, grouped_gemm
from ..native.norms import without_autocast
from . import imports as te
from .backends import Candidate, Choice, Refusal, check_backends, choose
from .deep_gemm import (
    WEIGHT_GRADIENT_IN_BF16,
    QuantizedWeight,
    cast_weight,
    choose_weight_gradient,
    deep_gemm_grouped,
    why_not_deep_gemm,
)
from .errors import TokenCountMismatch, WeightMismatch, WrongDtype, WrongShape
from .features import PRODUCTION, Features, why_not_te
from .permute import TePadding, whole_numbers
from .recipes import TE_DTYPES
from .te_fp8 import te_state

# --- where block-scaled FP8 by DeepGEMM is faster than bf16 -----------------------------------------------------------
# Rounding reads every weight once and writes it twice, whatever the number of rows, and 128 rows of padding an expert
# are computed in full. So FP8 wins where each expert has many rows; where weights are kept from one microbatch to the
# next, it wins a little earlier. `benchmarks/expert_gemm.py` measures the numbers; a test compares the rule with them.


SWITCH: Final = "MEGACPP_DEEP_GEMM_WHEN"

SOURCE: Final = "docs/benchmarks/expert_gemm.md"
JAGGED_SOURCE: Final = "docs/benchmarks/fp8_jagged.md"
# Path -> mean rows an expert, of those that have any, from which FP8 is taken, and what an H200 measured: forward and
# backward, relative to the fastest bf16 path. "bank" rounds weights in every call, "kept" in the first microbatch.
# "jagged" is `jagged_experts` with one pass an optimizer step: forward and backward share one rounding. "jagged-kept"
# has two or more passes a step, which all share one rounding, and is taken where it is at least 1.15 x.
FP8_FROM: Final[dict[str, tuple[float, str]]] = {
    "bank": (768, f"0.91 x bf16 at 512 rows, 1.14 x at 1024: {SOURCE}"),
    "kept": (512, f"1.36 x bf16 at 512 rows: {SOURCE}"),
    "jagged": (math.inf, f"with one pass a step 0.80 x bf16 at 256 rows, 1.09 x at 1024: {JAGGED_SOURCE}"),
    "jagged-kept": (1024, f"with two passes a step 0.97 x bf16 at 256 rows, 1.19 x at 1024: {JAGGED_SOURCE}"),
}


def why_bf16_is_faster(counts: Sequence[float], path: str) -> Refusal | None:
    """Why a call with these numbers of rows stays in bf16.

    None where FP8 was measured to be faster, and where MEGACPP_DEEP_GEMM_WHEN is "always".

    Args:
        counts: rows of each expert, not all 0.
        path: of `FP8_FROM`.
    """
    busy = [count for count in counts if count]
    mean, (least, measured) = sum(busy) / len(busy), FP8_FROM[path]
    if mean >= least or os.environ.get(SWITCH, "").strip().lower() == "always":
        return None
    reason = (
        f"with {mean:.0f} rows an expert bf16 is taken ({measured}). Next step: none; {SWITCH}=always uses FP8 "
        "nevertheless"
    )
    return Refusal("deep_gemm", "few-rows", reason)


_steps: Final = [0]  # of all optimizers: fused ones change weights without counting up `Tensor._version`


def _count_step(*_: Any) -> None:
    _steps[0] += 1


register_optimizer_step_post_hook(_count_step)


# --- the expert bank --------------------------------------------------------------------------------------------------


def check_rows(rows: Any, rows_per_expert: Sequence[int] | Any, experts: int, width: int, held: Any) -> tuple[int, ...]:
    """The numbers of rows as a tuple, after a check that rows [R, width] fit the bank with the parameter `held`.

    Raises:
        WrongShape, WrongDtype, TokenCountMismatch: see `ExpertGemm.forward`.
    """
    if rows.dim() != 2 or rows.shape[1] != width:
        raise WrongShape(
            f"rows are {list(rows.shape)}; wanted [R, {width}]. Likely cause: batch and time are not flattened. Next "
            "step: pass rows in the layout of permute."
        )
    if rows.dtype != held.dtype:
        raise WrongDtype(f"rows are {rows.dtype} and the experts {held.dtype}. Next step: cast the rows.")
    counts = whole_numbers(rows_per_expert)
    if len(counts) != experts or min(counts) < 0 or sum(counts) != rows.shape[0]:
        raise TokenCountMismatch(
            f"{len(counts)} numbers of rows that sum to {sum(counts)}, the least {min(counts, default=0)}, for "
            f"{experts} experts and {rows.shape[0]} rows. Likely cause: the numbers are of all ranks, or from before "
            "tokens were dropped. Next step: pass rows and numbers of the same permute."
        )
    return counts


Backend = Literal["te", "deep_gemm", "native"]

NATIVE_PATH: Final = "a grouped matmul of plain torch"
BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)
# Recipe class -> the multiple of rows of each group: `get_align_size_for_quantization` of TE 2.12 to 2.20.
FP8_ROWS: Final = {"MXFP8BlockScaling": 32, "NVFP4BlockScaling": 128}
FP8_ROWS_ELSE: Final = 16
FP8_WIDTH: Final = 16  # features in and out of a layer in FP8


class TeExpertBank(nn.Module):
    """One linear layer an expert: rows sorted by expert [R, in_features] -> [R, out_features].

    Args:
        num_experts: experts on this rank.
        in_features, out_features: of each expert.
        dtype, device: of the parameters.
    """

    def __init__(self, *, num_experts: int, in_features: int, out_features: int, dtype: Any, device: Any) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.inner = te.grouped_linear.require()(
            num_gemms=num_experts,
            in_features=in_features,
            out_features=out_features,
            bias=False,
            params_dtype=dtype,
            device=device,
        )

    def forward(self, rows: Any, rows_per_expert: Sequence[int], *, is_first_microbatch: bool | None = None) -> Any:
        """Rows [R, in_features] with `rows_per_expert` summing to R -> [R, out_features]."""
        return self.inner(rows, list(rows_per_expert), is_first_microbatch=is_first_microbatch)

    def weight_of(self, expert: int) -> Any:
        """Weight [out_features, in_features] of one expert."""
        return getattr(self.inner, f"weight{expert}")


class ExpertGemm(nn.Module):
    """The MoE expert bank: one linear layer an expert, without bias, over rows sorted by expert.

    The first usable backend holds the parameters: Transformer Engine one parameter an expert, the other two one of
    [E, N, K]. Single calls that the holder cannot take (no rows, widths that FP8 does not take) go to "native" with the
    same parameters, and the reason is recorded.

    | backend     | computes in, forward and backward                      |
    |-------------|--------------------------------------------------------|
    | "te"        | the dtype of the rows, or the FP8 scope's recipe       |
    | "deep_gemm" | block-scaled FP8, in an FP8 scope or not; bf16 in, out |
    | "native"    | the dtype of the rows                                  |

    "deep_gemm" rounds to FP8 also outside of a scope, so it is used only where `backends` names it. Calls with few rows
    go to "native", if named, because bf16 is faster (`why_bf16_is_faster`). On every backend the gradient of an expert
    without rows is zeros, never None.

    Args:
        num_experts: E, experts on this rank.
        in_features, out_features: K and N of each expert.
        dtype, device: of the parameters.
        features: whether Transformer Engine may be used.
        backends: backends to ask, in this order.

    Attributes:
        choice: of the last call; before the first, of the holder of the parameters.
        bank: the layer that holds the parameters.

    Raises:
        UnknownName: an unknown backend.
        NoBackend: every backend refuses.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        in_features: int,
        out_features: int,
        dtype: Any = None,
        device: Any = None,
        features: Features = PRODUCTION,
        backends: Sequence[Backend] = ("te", "native"),
    ) -> None:
        super().__init__()
        check_backends(backends, BACKENDS)
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        device = torch.device(device) if device is not None else torch.get_default_device()
        self.features, self.backends = features, tuple(backends)
        self._refused = {name: self._why_not_held(name, dtype, device) for name in self.backends}
        made = choose("expert_gemm", [(name, partial(self._refused.get, name)) for name in self.backends])
        self.choice: Choice = made
        self.bank: nn.Module
        if made.observed == "te":
            self.bank = TeExpertBank(
                num_experts=num_experts, in_features=in_features, out_features=out_features, dtype=dtype, device=device
            )
        else:
            self.bank = ExpertBank(num_experts, in_features, out_features, dtype=dtype, device=device)
        self._held_by: Final = made.observed
        self._quantized: tuple[tuple[int, int, int], QuantizedWeight] | None = None

    def forward(
        self, rows: Any, rows_per_expert: Sequence[int] | Any, *, is_first_microbatch: bool | None = None
    ) -> Any:
        """Each expert's rows times its weight^T.

        Args:
            rows: [R, K], sorted by expert, in the dtype of the parameters; R may be 0.
            rows_per_expert: E numbers that sum to R; the host waits for a tensor on a device.
            is_first_microbatch: as in Transformer Engine: True rounds the weights to FP8 and keeps them, False takes
                the kept ones (DeepGEMM: see `quantized_weight`), None rounds them for this call.

        Returns:
            [R, N] in the dtype of `rows`, also inside an autocast region.

        Raises:
            WrongShape, WrongDtype: rows of another rank, width or dtype.
            TokenCountMismatch: numbers that are not E, negative, or do not sum to R.
            NoBackend: every backend refuses.
        """
        held = next(self.bank.parameters())
        counts = check_rows(rows, rows_per_expert, self.num_experts, self.in_features, held)
        kept = is_first_microbatch is not None
        taken = choose("expert_gemm", self._candidates(rows, counts, kept))
        self.__dict__["choice"] = taken  # nn.Module's attribute assignment costs more than the choice
        if taken.observed == "te":
            with without_autocast(rows):
                return self._on_te(rows, counts, is_first_microbatch)
        if taken.observed == "deep_gemm":
            if choose_weight_gradient(counts) == "bf16":
                said = (*taken.refusals, WEIGHT_GRADIENT_IN_BF16)
                self.__dict__["choice"] = Choice(taken.module, taken.requested, "deep_gemm", said)
            if is_first_microbatch:
                self._quantized = None
            quantized = self.quantized_weight() if kept else None
            return deep_gemm_grouped(rows, self.bank.weight, counts, quantized=quantized)
        if isinstance(self.bank, TeExpertBank):
            pieces = rows.split(list(counts))
            with without_autocast(rows):
                return torch.cat([piece @ weight.t() for piece, weight in zip(pieces, self._weights(), strict=True)])
        return grouped_gemm(rows, self.bank.weight, counts)

    def quantized_weight(self) -> QuantizedWeight:
        """The weight [E, N, K] of a native bank in DeepGEMM's FP8, rounded once for all passes of an optimizer step.

        It is rounded again after a step of any optimizer, and after it was replaced or changed in place, as
        `Tensor._version` counts. Not seen are an optimizer step that a CUDA graph replays and, outside of an optimizer,
        a change through `.data` or under FSDP2: they take `is_first_microbatch=True`. While a CUDA graph is captured
        nothing is kept: each replay rounds the weight that it finds. A weight made in inference mode is rounded for
        each call.
        """
        weight = self.bank.weight
        if weight.is_inference() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return cast_weight(weight)
        state = weight.data_ptr(), weight._version, _steps[0]
        if self._quantized is None or self._quantized[0] != state:
            self._quantized = state, cast_weight(weight)
        return self._quantized[1]

    def native_state_dict(self) -> dict[str, Any]:
        """A copy of the parameters under the native name: `weight` [E, N, K]."""
        return {"weight": torch.stack([weight.detach() for weight in self._weights()])}

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the parameters of a native bank exactly.

        Raises:
            WeightMismatch: a missing or unknown name, another shape, or a dtype that the bank's dtype cannot represent.
        """
        wanted = (self.num_experts, self.out_features, self.in_features)
        held = next(self.bank.parameters()).dtype
        given: Any = state.get("weight")
        fits = set(state) == {"weight"} and tuple(given.shape) == wanted
        if not fits or given.dtype not in (held, *TE_DTYPES) or torch.promote_types(given.dtype, held) != held:
            seen = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
            raise WeightMismatch(
                f"an expert bank takes one tensor, weight {list(wanted)}, in a dtype that {held} represents, and got "
                f"{seen}. Next step: pass native_state_dict() of a bank of these sizes, or cast the weight."
            )
        with torch.no_grad():
            for into, one in zip(self._weights(), given.unbind(0), strict=True):
                into.copy_(one)

    def _weights(self) -> Sequence[Any]:
        """Weight [N, K] of each expert, in the autograd graph."""
        if isinstance(self.bank, TeExpertBank):
            return [self.bank.weight_of(expert) for expert in range(self.num_experts)]
        weights: Sequence[Any] = self.bank.weight.unbind(0)
        return weights

    def _why_not_held(self, backend: Backend, dtype: Any, device: Any) -> Refusal | None:
        """Why this backend cannot hold parameters of this dtype on this device."""
        if backend == "te":
            if dtype not in TE_DTYPES:
                return Refusal("te", "dtype", f"Transformer Engine has no linear layers in {dtype}")
            return why_not_te(self.features, "expert_gemm", device)
        if backend == "deep_gemm":
            return why_not_deep_gemm(device, dtype, self.in_features, self.out_features)
        return None

    def _candidates(self, rows: Any, counts: tuple[int, ...], kept: bool) -> list[Candidate]:
        """The candidates of a call: `backends` up to the holder of the parameters, then native."""
        asked: list[Candidate] = []
        for name in self.backends:
            asked.append((name, partial(self._why_not_now, name, rows, counts, kept)))
            if name == self._held_by:
                break
        may_be_native = "native" in self.backends or not rows.shape[0]  # nothing is computed for no rows
        if self._held_by != "native" and may_be_native:
            asked.append(("native", lambda: None))
        return asked

    def _why_not_now(self, backend: Backend, rows: Any, counts: tuple[int, ...], kept: bool) -> Refusal | None:
        """Why this backend cannot take a call; the bank may have been moved since it was built."""
        refused = self._refused[backend] or self._why_not_held(backend, rows.dtype, rows.device)
        if refused is not None or backend == "native":
            return refused
        if not rows.shape[0]:
            return Refusal(backend, "no-rows", "no token is routed to an expert of this rank")
        odd = self.in_features % FP8_WIDTH or self.out_features % FP8_WIDTH
        if backend == "te" and odd and te_state()["enabled"]:
            widths = f"{self.in_features} -> {self.out_features} features"
            return Refusal("te", "fp8-width", f"{widths}: an FP8 product takes multiples of {FP8_WIDTH}")
        if backend == "deep_gemm" and "native" in self.backends:
            return why_bf16_is_faster(counts, "kept" if kept else "bank")
        return None

    def _on_te(self, rows: Any, counts: tuple[int, ...], is_first_microbatch: bool | None) -> Any:
        rows = rows.contiguous()  # TE's kernels ignore strides
        state = te_state()
        align = FP8_ROWS.get(type(state["recipe"]).__name__, FP8_ROWS_ELSE) if state["enabled"] else 1
        if not any(count % align for count in counts):
            return self.bank(rows, counts, is_first_microbatch=is_first_microbatch)
        padding = TePadding(self.num_experts, align=align)
        padded, padded_counts = padding.pad(rows, counts)
        out = self.bank(padded, padded_counts, is_first_microbatch=is_first_microbatch)
        return padding.unpad(out, counts)
