"""What an A-block may be made of and called with: every refusal before any layer is built or run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from ..native.mlp import is_gated
from ..native.norms import check_eps
from .errors import NotDivisible, UnknownName, WrongDtype, WrongOption, WrongShape, WrongTarget

DTYPES: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def check_sizes(sizes: Mapping[str, Any]) -> None:
    """Refuse what counts nothing; heads, groups and ranks below 1 are told by `check_heads`."""
    whole = {name: isinstance(size, int) and not isinstance(size, bool) for name, size in sizes.items()}
    wrong = [name for name in sizes if not whole[name] or (name in ("hidden", "ffn_hidden") and sizes[name] < 1)]
    if wrong:
        seen = ", ".join(f"{name}={sizes[name]!r}" for name in wrong)
        raise WrongShape(
            f"{seen}: each size is an integer from 1 up. Next step: read them from the model's configuration, as int."
        )


def check_options(dtype: Any, eps: float) -> None:
    """Refuse parameters of a dtype that no layer computes in, and an eps that gives NaN."""
    if dtype not in DTYPES:
        names = ", ".join(sorted(map(str, DTYPES)))
        raise WrongDtype(
            f"a block of {dtype!r} has no layers. Next step: choose one of {names}; low precision is a scope around "
            "the call, not a dtype of the parameters."
        )
    try:
        check_eps(eps)
    except ValueError as fault:
        raise WrongOption(f"{fault} Next step: give the model's own, such as 1e-5.") from fault


def gate_of(activation: str) -> bool:
    """Whether an activation has a gate; UnknownName where there is none of that name."""
    try:
        return is_gated(activation)
    except ValueError as fault:
        raise UnknownName(f"{fault} Next step: choose one of them.") from fault


def check_rope(rope: Any, rows: Any, width: int) -> None:
    """Refuse tables that do not fit rows [B, T, hidden] with heads of this size."""
    if width % 2:
        raise NotDivisible(
            f"rope is given and heads have {width} channels; a rotary embedding turns pairs of them. Next step: use an "
            "even head_dim, or leave out rope."
        )
    length = rows.shape[1]
    shapes = [tuple(table.shape) for table in rope]
    if len(shapes) != 2 or shapes[0] != shapes[1] or shapes[0][1:] != (width // 2,) or shapes[0][0] < length:
        raise WrongShape(
            f"rotary tables have shapes {', '.join(map(str, shapes))}; wanted cosine and sine, both [at least "
            f"{length}, {width // 2}]. Next step: make both by rope_tables(length, {width}) for the longest sequence."
        )
    for table in rope:
        if table.device != rows.device:
            raise WrongTarget(
                f"a rotary table lies on {table.device} and the rows on {rows.device}. Next step: make the tables by "
                f"rope_tables(length, {width}, device=...) where the rows are."
            )
