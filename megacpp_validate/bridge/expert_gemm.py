"""TE expert GEMM wrapper: the MoE expert bank as grouped linear layers, in TE, DeepGEMM or plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from ..native.autocast import without_autocast
from ..native.grouped_gemm import ExpertBank, grouped_gemm
from . import imports as te
from .backends import Candidate, Choice, Refusal, choose
from .deep_gemm_product import BACKWARD, QuantizedWeight, deep_gemm_grouped, quantize_weight, why_not_deep_gemm
from .errors import TokenCountMismatch, UnknownName, WeightMismatch, WrongDtype, WrongOption, WrongShape, WrongTarget
from .features import PRODUCTION, Features, why_not_te
from .permute import TePadding
from .row_map import whole_numbers
from .te_fp8 import te_state

Backend = Literal["te", "deep_gemm", "native"]

NATIVE_PATH: Final = "a grouped matmul of plain torch"
BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)
TE_DTYPES: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
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

    | backend     | computes in                                            | gradients                              |
    |-------------|--------------------------------------------------------|----------------------------------------|
    | "te"        | the dtype of the rows, or the FP8 scope's recipe       | the same                               |
    | "deep_gemm" | block-scaled FP8, in an FP8 scope or not; bf16 in, out | native, in bf16, from unrounded tensors |
    | "native"    | the dtype of the rows                                  | the same                               |

    "deep_gemm" rounds to FP8 whatever the scope says, so it is asked only where it is named. An expert without rows
    gets a gradient of zeros, never None, on every backend.

    Args:
        num_experts: E, experts on this rank.
        in_features, out_features: K and N of each expert.
        dtype, device: of the parameters.
        features: whether Transformer Engine may be taken.
        backends: which may be asked, in this order.

    Attributes:
        choice: of the last call; before the first, who holds the parameters.
        bank: the layer that holds them.

    Raises:
        WrongShape: a size below 1.
        WrongOption: a size that is not whole.
        WrongDtype: a dtype without fractions.
        UnknownName: a backend that there is not.
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
    ) -> None:
        super().__init__()
        _check_sizes(num_experts, in_features, out_features)
        _check_backends(backends)
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        if not dtype.is_floating_point:
            raise WrongDtype(f"experts of {dtype} cannot be trained. Next step: make them in a floating dtype.")
        device = torch.device(device) if device is not None else torch.get_default_device()
        self.features, self.backends = features, tuple(backends)
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
        taken = choose("expert_gemm", self._candidates(rows))
        if taken.observed == "te":
            self.__dict__["choice"] = taken  # past nn.Module, whose own assignment costs more than the choice does
            with without_autocast(rows):
                return self._on_te(rows, counts, is_first_microbatch)
        if taken.observed == "deep_gemm":
            self.__dict__["choice"] = Choice(taken.module, taken.requested, "deep_gemm", (*taken.refusals, BACKWARD))
            weight = self._quantized_weight(is_first_microbatch)
            return deep_gemm_grouped(rows, self.bank.weight, counts, quantized=weight)
        self.__dict__["choice"] = taken
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
        self._quantized = None

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

    def _candidates(self, rows: Any) -> list[Candidate]:
        """Who is asked for a call: those passed over when the bank was made, its holder, and then native."""
        asked: list[Candidate] = []
        for name in self.backends:
            asked.append((name, partial(self._why_not_now, name, rows)))
            if name == self._held_by:
                break
        may_be_native = "native" in self.backends or not rows.shape[0]  # nothing is computed for no rows
        if self._held_by != "native" and may_be_native:
            asked.append(("native", _never))
        return asked

    def _why_not_now(self, backend: Backend, rows: Any) -> Refusal | None:
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

    def _quantized_weight(self, is_first_microbatch: bool | None) -> QuantizedWeight | None:
        """The kept weights in FP8, or None where the call is to round them for itself."""
        if is_first_microbatch is None:
            return None
        if is_first_microbatch or self._quantized is None:
            self._quantized = quantize_weight(self.bank.weight)
        return self._quantized

    def _check(self, rows: Any, rows_per_expert: Sequence[int] | Any) -> tuple[int, ...]:
        """The numbers of rows as a tuple, after shapes, dtypes, devices and numbers are found right."""
        if rows.dim() != 2 or rows.shape[1] != self.in_features:
            raise WrongShape(
                f"rows are {list(rows.shape)}; wanted [R, {self.in_features}]. Likely cause: batch and time are not "
                "flattened, or the rows are another layer's. Next step: pass rows as permute gives them."
            )
        held = next(self.bank.parameters())
        if rows.dtype != held.dtype:
            raise WrongDtype(
                f"rows are {rows.dtype} and the experts {held.dtype}. Next step: cast the rows, or make the experts in "
                f"{rows.dtype}."
            )
        if rows.device != held.device:
            raise WrongTarget(
                f"rows lie on {rows.device} and the experts on {held.device}. Next step: move them to one device."
            )
        counts = whole_numbers(rows_per_expert)
        if len(counts) != self.num_experts or min(counts) < 0 or sum(counts) != rows.shape[0]:
            raise TokenCountMismatch(
                f"{len(counts)} numbers of rows that sum to {sum(counts)}, the least {min(counts, default=0)}, for "
                f"{self.num_experts} experts and {rows.shape[0]} rows. Likely cause: the numbers are of all ranks, or "
                "taken before tokens were dropped. Next step: pass rows and numbers of the same permute."
            )
        return counts


def _never() -> None:
    return None


def _check_sizes(num_experts: int, in_features: int, out_features: int) -> None:
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


def _check_backends(backends: Sequence[Backend]) -> None:
    unknown = [name for name in backends if name not in BACKENDS]
    if unknown or not backends or len(set(backends)) != len(backends):
        raise UnknownName(
            f"backends are {tuple(backends)!r}. Next step: name each at most once, at least one, of "
            f"{', '.join(BACKENDS)}."
        )
