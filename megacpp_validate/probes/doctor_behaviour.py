"""Calls that show whether an extension reads tensors as the torch that is there lays them out.

An extension that was compiled with another torch may load and read sizes and strides from the wrong place. What it
then says of a tensor contradicts the tensor.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, Final

from ..evidence.doctor_look import Behaviour

# What an assertion about a tensor reads like: "dim == 2 or dim == 3", "sf.size(-1) == k", "sf.scalar_type() == kFloat".
_CONDITION: Final = re.compile(
    r"\b(?:n?dim|sizes?|strides?|shape|numel|scalar_type|dtype)\w*(?:\([^)]*\))?\s*(?:[=!<>]=|[<>])"
)
_ROWS, _COLUMNS = 8, 2  # 8 rows of fp32 are 32 bytes, which is aligned for the TMA: no kernel is compiled for it


def show_behaviours(package: str) -> tuple[Behaviour, ...]:
    """What calls of a package show; nothing for one that has none to offer."""
    show = _CALLS.get(package)
    return () if show is None else (show(),)


def _read_scales() -> Behaviour:
    """Have DeepGEMM look at fp32 scales that lie in the layout it wants already: it gives them back as they are.

    sgl-deep-gemm 0.1.7 and 0.2.0 refuse them on torch 2.11 with "dim == 2 or dim == 3".
    """
    import torch

    name = "deep_gemm.utils.layout.get_mn_major_tma_aligned_tensor"
    given = f"fp32 tensor [{_ROWS}, {_COLUMNS}] with strides (1, {_ROWS})"
    if not torch.cuda.is_available():
        return Behaviour(name, given, "torch sees no GPU, and the call takes CUDA tensors only", None)
    scales = torch.arange(float(_ROWS * _COLUMNS), device="cuda").as_strided((_ROWS, _COLUMNS), (1, _ROWS))
    try:
        call = importlib.import_module("deep_gemm.utils.layout").get_mn_major_tma_aligned_tensor
    except Exception as fault:
        return Behaviour(name, given, f"this release does not offer it: {type(fault).__name__}: {fault}", None)
    try:
        answer = call(scales)
        answer = answer if isinstance(answer, torch.Tensor) else torch.from_dlpack(answer)
    except Exception as fault:
        return Behaviour(name, given, f"{type(fault).__name__}: {' '.join(str(fault).split())[:400]}", _is_other(fault))
    return judge_answer(name, given, scales, answer)


def judge_answer(name: str, given: str, scales: Any, answer: Any) -> Behaviour:
    """Whether an answer is the tensor that was given, [rows, columns] in fp32."""
    import torch

    seen = f"{answer.dtype} tensor {list(answer.shape)} with strides {tuple(answer.stride())}"
    same = answer.shape == scales.shape and bool(torch.equal(answer.float().cpu(), scales.float().cpu()))
    return Behaviour(name, given, seen if same else f"{seen}, other than what was given", same)


def _is_other(fault: Exception) -> bool | None:
    """A refusal contradicts the tensor where it is a condition on its sizes; other trouble is no statement about it."""
    return False if _CONDITION.search(str(fault)) else None


_CALLS: Final[dict[str, Callable[[], Behaviour]]] = {"deep_gemm": _read_scales}
