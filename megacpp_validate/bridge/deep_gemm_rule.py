"""Where block-scaled FP8 by DeepGEMM is faster than bf16, as it was measured: the dispatcher's rule.

Rounding costs time that does not shrink with the product: every weight is read once and written twice whatever the
number of rows, and padding to 128 rows an expert is computed in full. So FP8 wins where each expert has many rows, and
loses below; where weights are kept from one microbatch to the next it wins a little earlier. The numbers are those of
`docs/benchmarks/expert_gemm.md`, made by `benchmarks/expert_gemm.py`; a test holds the rule to them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Literal, get_args

from .backends import Refusal
from .errors import UnknownName

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
