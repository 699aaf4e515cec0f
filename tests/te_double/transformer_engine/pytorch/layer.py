"""What every layer of the double shares: its FP8 state, and refusing what the double does not do."""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

import torch

from ..recipes import DelayedScaling, Format, Recipe
from .quantization import FP8GlobalStateManager as Manager
from .quantized import Cast, cast_of
from .scaling import BLOCK, DelayedState, largest, round_blocks, round_scaled, round_tensor

DTYPES = torch.float32, torch.float16, torch.bfloat16  # what TE's kernels take
Role = Literal["input", "weight", "grad"]


# Options that the bridge passes, each with the one value that the double takes: there is one rank, and one kind of
# attention.
ALONE = {
    "attention_type": "self",
    "core_attention_bias_type": "no_bias",
    "parallel_mode": None,
    "sequence_parallel": False,
    "set_parallel_mode": False,
    "tp_group": None,
    "tp_size": 1,
    "zero_centered_gamma": False,
}


def check_alone(options: dict[str, Any]) -> None:
    """Refuse what Transformer Engine has and the double does not do.

    Raises:
        TypeError: an option that nobody passes.
        NotImplementedError: another value than that of `ALONE`.
    """
    for name, value in options.items():
        if name not in ALONE:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
        if value != ALONE[name]:
            raise NotImplementedError(f"the double of Transformer Engine does not do {name}={value!r}")


class Float8Tensor(torch.nn.Parameter):
    """A weight whose values are those of an FP8 format."""


class Rounder:
    """Rounds the operands of one call of one layer by its recipe.

    Attributes:
        kept: weights of past calls, rounded, by GEMM.
        first: whether this is the first microbatch of a step: True rounds weights and keeps them, False takes what is
            kept, None rounds and keeps nothing.
    """

    def __init__(
        self, recipe: Recipe, forward: DelayedState | None, backward: DelayedState | None, kept_scale: Any
    ) -> None:
        self.recipe = recipe
        self.forward, self.backward = forward, backward
        self.kept_scale = kept_scale  # of the forward pass that is being recomputed
        self.kept: dict[int, tuple[Any, Any]] = {}
        self.first: bool | None = None

    def round(self, tensor: Any, role: Role, gemm: int = 0) -> tuple[Any, Any]:
        """A matrix [M, N] rounded for use along its rows, and along its columns; fp32."""
        if role != "weight" or self.first is None or isinstance(tensor, Float8Tensor):
            return self._round(tensor, role, gemm)
        if self.first or gemm not in self.kept:
            self.kept[gemm] = self._round(tensor, role, gemm)
        return self.kept[gemm]

    def cast(self, tensor: Any, role: Role, gemm: int) -> Cast:
        """What casts an operand [M, N]: to be asked right after it was rounded."""
        state, index = self.forward, 3 * gemm + (role == "weight")
        if role == "grad":
            state, index = self.backward, 2 * gemm
        scale = None if state is None else state.scale[index]
        if role != "grad" and self.kept_scale is not None:
            scale = self.kept_scale[index]
        top = largest(self.recipe, forward=role != "grad")
        return cast_of(tensor, self.recipe, top, scale, is_weight=role == "weight")

    def _round(self, tensor: Any, role: Role, gemm: int) -> tuple[Any, Any]:
        top = largest(self.recipe, forward=role != "grad")
        if self.recipe.float8_block_scaling():
            if role == "weight":
                square = round_blocks(tensor, BLOCK, BLOCK, top)
                return square, square
            return round_blocks(tensor, 1, BLOCK, top), round_blocks(tensor, BLOCK, 1, top)
        if self.forward is None or self.backward is None:
            rounded = round_tensor(tensor, top)
        elif role == "grad":
            rounded = self.backward.round(tensor, 2 * gemm)
        elif self.kept_scale is not None:
            rounded = round_scaled(tensor, self.kept_scale[3 * gemm + (role == "weight")], top)
        else:
            rounded = self.forward.round(tensor, 3 * gemm + (role == "weight"))
        return rounded, rounded


class TransformerEngineBaseModule(torch.nn.Module):
    """A layer with FP8 state of its own.

    Attributes:
        fp8_meta: with delayed scaling "scaling_fwd" and "scaling_bwd", each with `amax_history` and `scale`. Columns of
            the forward one: input, weight, output of each GEMM; of the backward one: two of each.
    """

    def __init__(self, num_gemms: int) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"num_gemms": num_gemms, "recipe": None, "kept_scales": deque()}
        self._kept_by: type[Recipe] | None = None
        self._kept_weights: dict[int, tuple[Any, Any]] = {}

    def new_weight(self, rows: int, columns: int, dtype: Any, device: Any) -> Any:
        """A weight [rows, columns], normal with a deviation of 0.023."""
        data = torch.empty(rows, columns, dtype=dtype or torch.get_default_dtype(), device=device)
        torch.nn.init.normal_(data, std=0.023)
        if not Manager.with_fp8_parameters():
            return torch.nn.Parameter(data)
        rounded = round_tensor(data, largest(Manager.get_fp8_recipe(), forward=True)).to(data.dtype)
        return torch.Tensor._make_subclass(Float8Tensor, rounded, True)

    def add_weights(self, rows: Mapping[str, int], columns: int, bias: bool, dtype: Any, device: Any) -> list[str]:
        """Register a weight [rows, columns] a name, then a bias [rows] each, empty without `bias`: names of the biases.

        Args:
            rows: of each weight, by its name, which holds "weight"; its bias has "bias" there.
        """
        dtype = dtype or torch.get_default_dtype()
        for name, count in rows.items():
            self.register_parameter(name, self.new_weight(count, columns, dtype, device))
        biases = {name.replace("weight", "bias"): count for name, count in rows.items()}
        for name, count in biases.items():
            if bias:
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(count, dtype=dtype, device=device)))
            else:
                setattr(self, name, torch.empty(0, dtype=dtype, device=device))
        return list(biases)

    def start(self, inp: Any, is_first_microbatch: bool | None = None) -> tuple[Rounder | None, bool]:
        """How this call rounds (None: not at all), and whether its backward pass is the last of the scope."""
        rounder, last = self._start(inp)
        if rounder is not None:
            if self._kept_by is not type(rounder.recipe):  # copies of another format
                self._kept_by, self._kept_weights = type(rounder.recipe), {}
            rounder.kept, rounder.first = self._kept_weights, is_first_microbatch
        return rounder, last

    def _start(self, inp: Any) -> tuple[Rounder | None, bool]:
        if inp.dtype not in DTYPES:
            raise KeyError(inp.dtype)  # as TE, which looks the dtype up in a table
        for name, parameter in self.named_parameters():
            if parameter.dtype != inp.dtype:
                raise AssertionError(
                    "Data types for parameters must match when outside of autocasted region. "
                    f"Found input dtype: {inp.dtype} and {name!r} dtype: {parameter.dtype}"
                )
        if not Manager.is_fp8_enabled():
            return None, False
        recipe = Manager.get_fp8_recipe()
        first = Manager.is_first_fp8_module() and torch.is_grad_enabled()
        if not isinstance(recipe, DelayedScaling):
            self.fp8_meta["recipe"] = recipe
            return Rounder(recipe, None, None, None), first
        forward, backward = self._delayed(recipe, inp.device)
        kept = None
        if Manager.phase == "forward":
            Manager.copy_forward_fp8_meta_tensors_for_recompute(self.fp8_meta)
        elif Manager.phase == "recompute":
            kept = Manager.get_old_fp8_meta_tensors_for_recompute(self.fp8_meta)
        return Rounder(recipe, forward, backward, kept), first

    def get_extra_state(self) -> Any:
        """Scales and amax histories of delayed scaling as bytes; empty where there are none."""
        meta = self.fp8_meta
        if not isinstance(meta["recipe"], DelayedScaling):
            return torch.empty(0, dtype=torch.uint8)
        kept: dict[str, Any] = {"recipe": {**asdict(meta["recipe"]), "fp8_format": meta["recipe"].fp8_format.name}}
        for key in ("scaling_fwd", "scaling_bwd"):
            kept[key] = meta[key].scale.cpu(), meta[key].amax_history.cpu()
        file = io.BytesIO()
        torch.save(kept, file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Take them over; an empty state changes nothing. As in TE, the manager hears of them when the layer runs."""
        if state is None or state.numel() == 0:
            return
        kept = torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=True)
        fields = {**kept["recipe"], "fp8_format": Format[kept["recipe"]["fp8_format"]]}
        forward, backward = self._new_states(DelayedScaling(**fields), kept["scaling_fwd"][0].device)
        for key, own in (("scaling_fwd", forward), ("scaling_bwd", backward)):
            own.scale.copy_(kept[key][0])
            own.amax_history.copy_(kept[key][1])

    def _new_states(self, recipe: DelayedScaling, device: Any) -> tuple[DelayedState, DelayedState]:
        meta = self.fp8_meta
        if meta["recipe"] != recipe:
            count = int(meta["num_gemms"])
            meta["recipe"], meta["fp8_group"] = recipe, Manager.get_fp8_group()
            meta["scaling_fwd"] = DelayedState(recipe, 3 * count, forward=True, device=device)
            meta["scaling_bwd"] = DelayedState(recipe, 2 * count, forward=False, device=device)
        return meta["scaling_fwd"], meta["scaling_bwd"]

    def _delayed(self, recipe: DelayedScaling, device: Any) -> tuple[DelayedState, DelayedState]:
        meta = self.fp8_meta
        self._new_states(recipe, device)
        if meta.get("known_to") is not Manager.states:  # anew after a reset
            meta["known_to"] = Manager.states
            for forward, key in ((True, "scaling_fwd"), (False, "scaling_bwd")):
                Manager.states.append((forward, meta[key], recipe, meta["fp8_group"]))
        return meta["scaling_fwd"], meta["scaling_bwd"]


def check_fp8_shape(*tensors: Any) -> None:
    """The shapes that an FP8 GEMM takes.

    Raises:
        ValueError: leading dimensions no multiple of 8, or the last one no multiple of 16.
    """
    for tensor in tensors:
        if math.prod(tensor.shape[:-1]) % 8 or tensor.shape[-1] % 16:
            raise ValueError(
                "FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the "
                f"last dimension to be divisible by 16, but got tensor with dims={list(tensor.shape)}"
            )
