"""TE expert GEMM wrapper: the MoE expert bank as grouped linear layers, in TE, DeepGEMM or plain torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from ..native.grouped_gemm import ExpertBank, grouped_gemm
from ..native.norms import without_autocast
from . import imports as te
from .backends import Candidate, Choice, Refusal, check_backends, choose
from .deep_gemm import (
    WEIGHT_GRADIENT_IN_BF16,
    QuantizedWeight,
    choose_weight_gradient,
    deep_gemm_grouped,
    quantize_weight,
    why_not_deep_gemm,
)
from .errors import TokenCountMismatch, UnknownName, WeightMismatch, WrongDtype, WrongOption, WrongShape, WrongTarget
from .features import PRODUCTION, Features, why_not_te
from .permute import TePadding, whole_numbers
from .recipes import TE_DTYPES
from .te_fp8 import te_state

# --- deep gemm rule ---------------------------------------------------------------------------------------------------
# Where block-scaled FP8 by DeepGEMM is faster than bf16, as it was measured: the dispatcher's rule.
#
# Rounding costs time that does not shrink with the product: every weight is read once and written twice whatever the
# number of rows, and padding to 128 rows an expert is computed in full. So FP8 wins where each expert has many rows,
# and loses below; where weights are kept from one microbatch to the next it wins a little earlier. The numbers are
# those of `docs/benchmarks/expert_gemm.md`, made by `benchmarks/expert_gemm.py`; a test holds the rule to them.


When = Literal["faster", "always"]
WHEN: Final[tuple[When, ...]] = get_args(When)
SWITCH: Final = "MEGACPP_DEEP_GEMM_WHEN"

SOURCE: Final = "docs/benchmarks/expert_gemm.md"
# Of the experts that have any, on average. On an H200 (8 experts, 4096 -> 4096 features, forward and backward, over the
# fastest bf16 path) weights rounded in every call gave 0.94 at 512 rows and 1.16 at 1024; kept ones 1.14 at 512 after
# the first microbatch, which pays for the rounding.
LEAST_ROWS: Final = 768
LEAST_ROWS_KEPT: Final = 512


def read_when(given: When | None) -> When:
    """When FP8 is to be taken: what was given, else what the environment says, else where it is faster.

    Raises:
        UnknownName: neither "faster" nor "always".
    """
    asked = given if given is not None else os.environ.get(SWITCH, "").strip().lower() or "faster"
    found = next((one for one in WHEN if one == asked), None)
    if found is None:
        raise UnknownName(f"FP8 is to be taken {asked!r}. Next step: say one of {', '.join(WHEN)}, or unset {SWITCH}.")
    return found


def why_bf16_is_faster(counts: Sequence[int], *, kept: bool = False) -> Refusal | None:
    """Why a call with these numbers of rows stays in bf16; None where FP8 was measured to be faster.

    Args:
        counts: rows of each expert, at least one of them.
        kept: whether weights in FP8 are kept between microbatches.
    """
    busy = [count for count in counts if count]
    mean = sum(busy) / len(busy)
    least = LEAST_ROWS_KEPT if kept else LEAST_ROWS
    if mean >= least:
        return None
    reason = (
        f"{mean:.0f} rows an expert, of {len(busy)}: bf16 is faster below {least}, as {SOURCE} shows. Next step: none; "
        f"{SWITCH}=always takes FP8 all the same"
    )
    return Refusal("deep_gemm", "few-rows", reason)


# --- expert gemm ------------------------------------------------------------------------------------------------------


# --- expert checks ----------------------------------------------------------------------------------------------------
# What an expert bank refuses before any kernel: sizes, rows and numbers of rows that do not fit it.


def check_sizes(num_experts: int, in_features: int, out_features: int) -> None:
    """Refuse sizes that are not whole numbers of 1 or more."""
    if not all(isinstance(size, Integral) for size in (num_experts, in_features, out_features)):
        raise WrongOption(
            f"{num_experts!r} experts of {in_features!r} -> {out_features!r} features: each must be a whole number. "
            "Next step: read them from the model's configuration."
        )
    if min(num_experts, in_features, out_features) < 1:
        raise WrongShape(
            f"{num_experts} experts of {in_features} -> {out_features} features: each must be 1 or more. Next step: "
            "read them from the model's configuration, divided among the ranks."
        )


def check_rows(
    rows: Any, rows_per_expert: Sequence[int] | Any, num_experts: int, in_features: int, held: Any
) -> tuple[int, ...]:
    """The numbers of rows as a tuple, after rows [R, K] and they are found to fit the bank that holds `held`."""
    if rows.dim() != 2 or rows.shape[1] != in_features:
        raise WrongShape(
            f"rows are {list(rows.shape)}; wanted [R, {in_features}]. Likely cause: batch and time are not "
            "flattened, or the rows are another layer's. Next step: pass rows as permute gives them."
        )
    _check_kind(rows, held)
    counts = whole_numbers(rows_per_expert)
    if len(counts) != num_experts or min(counts) < 0 or sum(counts) != rows.shape[0]:
        raise TokenCountMismatch(
            f"{len(counts)} numbers of rows that sum to {sum(counts)}, the least {min(counts, default=0)}, for "
            f"{num_experts} experts and {rows.shape[0]} rows. Likely cause: the numbers are of all ranks, or "
            "taken before tokens were dropped. Next step: pass rows and numbers of the same permute."
        )
    return counts


def _check_kind(rows: Any, held: Any) -> None:
    if rows.dtype != held.dtype:
        raise WrongDtype(
            f"rows are {rows.dtype} and the experts {held.dtype}. Next step: cast the rows, or make the experts in "
            f"{rows.dtype}."
        )
    if rows.device != held.device:
        raise WrongTarget(
            f"rows lie on {rows.device} and the experts on {held.device}. Next step: move them to one device."
        )


# --- expert gemm ------------------------------------------------------------------------------------------------------


Backend = Literal["te", "deep_gemm", "native"]

NATIVE_PATH: Final = "a grouped matmul of plain torch"
BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)
# Rows of each group that a recipe wants, by class name: `get_align_size_for_quantization` of TE 2.12 to 2.20.
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

    The first backend that can be used at all, where the parameters lie, holds them: Transformer Engine has one
    parameter an expert, the other two share one of [E, N, K]. Single calls that it cannot take go to "native" with the
    same parameters, and the reason is recorded: no rows at all, or widths that FP8 does not take.

    | backend     | computes in, forward and backward                      |
    |-------------|--------------------------------------------------------|
    | "te"        | the dtype of the rows, or the FP8 scope's recipe       |
    | "deep_gemm" | block-scaled FP8, in an FP8 scope or not; bf16 in, out |
    | "native"    | the dtype of the rows                                  |

    "deep_gemm" rounds to FP8 whatever the scope says, so it is asked only where it is named, and calls with so few rows
    that bf16 was measured to be faster go native, where that is named too (`why_bf16_is_faster`). An expert without
    rows gets a gradient of zeros, never None, on every backend.

    Args:
        num_experts: E, experts on this rank.
        in_features, out_features: K and N of each expert.
        dtype, device: of the parameters.
        features: whether Transformer Engine may be taken.
        backends: which may be asked, in this order.
        fp8_when: "always" asks "deep_gemm" however few the rows; the environment variable MEGACPP_DEEP_GEMM_WHEN says
            it where nothing is given.

    Attributes:
        choice: of the last call; before the first, who holds the parameters.
        bank: the layer that holds them.

    Raises:
        WrongShape: a size below 1.
        WrongOption: a size that is not whole.
        WrongDtype: a dtype without fractions.
        UnknownName: a backend that there is not, or another word for when FP8 is taken.
        NoBackend: every backend that may be asked refuses.
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
        fp8_when: When | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_experts, in_features, out_features)
        check_backends(backends, BACKENDS)
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        if not dtype.is_floating_point:
            raise WrongDtype(f"experts of {dtype} cannot be trained. Next step: make them in a floating dtype.")
        device = torch.device(device) if device is not None else torch.get_default_device()
        self.features, self.backends, self.fp8_when = features, tuple(backends), read_when(fp8_when)
        self._refused = {name: self._why_not_held(name, dtype, device) for name in self.backends}
        made = choose("expert_gemm", [(name, partial(self._refused.get, name)) for name in self.backends])
        self.choice: Choice = made
        self.bank: nn.Module
        if made.observed == "te":
            self.bank = TeExpertBank(
                num_experts=num_experts,
                in_features=in_features,
                out_features=out_features,
                dtype=dtype,
                device=device,
            )
        else:
            self.bank = ExpertBank(num_experts, in_features, out_features, dtype=dtype, device=device)
        self._held_by: Final = made.observed
        self._padding: dict[int, TePadding] = {}
        self._quantized: QuantizedWeight | None = None

    def forward(
        self, rows: Any, rows_per_expert: Sequence[int] | Any, *, is_first_microbatch: bool | None = None
    ) -> Any:
        """Each expert's rows times its weight^T.

        Args:
            rows: [R, K], sorted by expert, in the dtype of the parameters; R may be 0.
            rows_per_expert: E numbers that sum to R; on the host, because a tensor of another device is waited for.
            is_first_microbatch: as in Transformer Engine: True rounds the weights to FP8 and keeps them, False takes
                the kept ones, None rounds them for this call.

        Returns:
            [R, N] in the dtype of `rows`, also inside an autocast region.

        Raises:
            WrongShape, WrongDtype, WrongTarget: rows of another rank, width, dtype or device.
            TokenCountMismatch: numbers that are not E, not whole, negative, or do not sum to R.
            NoBackend: every backend that may be asked refuses.
        """
        counts = self._check(rows, rows_per_expert)
        kept = is_first_microbatch is not None
        taken = choose("expert_gemm", self._candidates(rows, counts, kept))
        self.__dict__["choice"] = taken  # past nn.Module, whose own assignment costs more than the choice does
        if taken.observed == "te":
            with without_autocast(rows):
                return self._on_te(rows, counts, is_first_microbatch)
        if taken.observed == "deep_gemm":
            if choose_weight_gradient(counts) == "bf16":
                said = (*taken.refusals, WEIGHT_GRADIENT_IN_BF16)
                self.__dict__["choice"] = Choice(taken.module, taken.requested, "deep_gemm", said)
            if is_first_microbatch or (kept and self._quantized is None):
                self._quantized = quantize_weight(self.bank.weight)
            return deep_gemm_grouped(rows, self.bank.weight, counts, quantized=self._quantized if kept else None)
        if isinstance(self.bank, TeExpertBank):
            pieces = rows.split(list(counts))
            with without_autocast(rows):
                return torch.cat([piece @ weight.t() for piece, weight in zip(pieces, self._weights(), strict=True)])
        return grouped_gemm(rows, self.bank.weight, counts)

    def native_state_dict(self) -> dict[str, Any]:
        """The parameters as the native bank names them: `weight` [E, N, K], a copy whoever holds them."""
        return {"weight": torch.stack([weight.detach() for weight in self._weights()])}

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the parameters of a native bank, exactly.

        Raises:
            WeightMismatch: a name missing or unknown, another shape, or a dtype that the bank's does not hold exactly.
        """
        wanted = (self.num_experts, self.out_features, self.in_features)
        if set(state) != {"weight"} or tuple(state["weight"].shape) != wanted:
            seen = {name: tuple(value.shape) for name, value in state.items()}
            raise WeightMismatch(
                f"an expert bank takes one tensor, weight {list(wanted)}, and got {seen}. Likely cause: a bank of "
                "other sizes, or the state of another kind of layer. Next step: pass native_state_dict() of a bank "
                "of these sizes."
            )
        held = next(self.bank.parameters()).dtype
        given_as = state["weight"].dtype
        if given_as != held and (given_as not in TE_DTYPES or torch.promote_types(given_as, held) != held):
            raise WeightMismatch(
                f"the weight is {given_as} and the bank {held}, which cannot hold it exactly. Likely cause: master "
                f"weights for a bank in low precision. Next step: cast it knowingly, weight.to({held})."
            )
        with torch.no_grad():
            for into, given in zip(self._weights(), state["weight"].unbind(0), strict=True):
                into.copy_(given)

    def extra_repr(self) -> str:
        """Sizes and backends, for print()."""
        return f"{self.num_experts}, {self.in_features}, {self.out_features}, backends={self.backends}"

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
        """Who is asked for a call: those passed over when the bank was made, its holder, and then native."""
        asked: list[Candidate] = []
        for name in self.backends:
            asked.append((name, partial(self._why_not_now, name, rows, counts, kept)))
            if name == self._held_by:
                break
        may_be_native = "native" in self.backends or not rows.shape[0]  # nothing is computed for no rows
        if self._held_by != "native" and may_be_native:
            asked.append(("native", _never))
        return asked

    def _why_not_now(self, backend: Backend, rows: Any, counts: tuple[int, ...], kept: bool) -> Refusal | None:
        """Why this backend cannot take a call; a bank may have been moved since it was made."""
        refused = self._refused[backend] or self._why_not_held(backend, rows.dtype, rows.device)
        if refused is not None or backend == "native":
            return refused
        if not rows.shape[0]:
            return Refusal(backend, "no-rows", "no token goes to an expert of this rank: there is nothing to launch")
        odd = self.in_features % FP8_WIDTH or self.out_features % FP8_WIDTH
        if backend == "te" and odd and te_state()["enabled"]:
            widths = f"{self.in_features} -> {self.out_features} features"
            return Refusal("te", "fp8-width", f"{widths}: an FP8 product takes multiples of {FP8_WIDTH}")
        if backend == "deep_gemm" and self.fp8_when == "faster" and "native" in self.backends:
            return why_bf16_is_faster(counts, kept=kept)
        return None

    def _on_te(self, rows: Any, counts: tuple[int, ...], is_first_microbatch: bool | None) -> Any:
        rows = rows.contiguous()  # its kernels read the bytes of a matrix, not its strides
        state = te_state()
        if not state["enabled"]:
            return self.bank(rows, counts, is_first_microbatch=is_first_microbatch)
        align = FP8_ROWS.get(type(state["recipe"]).__name__, FP8_ROWS_ELSE)
        if not any(count % align for count in counts):
            return self.bank(rows, counts, is_first_microbatch=is_first_microbatch)
        if align not in self._padding:
            self._padding[align] = TePadding(self.num_experts, align=align)
        padding = self._padding[align]
        padded, padded_counts = padding.pad(rows, counts)
        out = self.bank(padded, padded_counts, is_first_microbatch=is_first_microbatch)
        return padding.unpad(out, counts)

    def _check(self, rows: Any, rows_per_expert: Sequence[int] | Any) -> tuple[int, ...]:
        """The numbers of rows as a tuple, after shapes, dtypes, devices and numbers are found right."""
        held = next(self.bank.parameters())
        return check_rows(rows, rows_per_expert, self.num_experts, self.in_features, held)


def _never() -> None:
    return None
