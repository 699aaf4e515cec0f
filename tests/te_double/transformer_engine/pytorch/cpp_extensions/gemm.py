"""The products of the extension, of rounded operands: who looks at them there sees what was multiplied."""

from __future__ import annotations

from typing import Any


class tex:  # noqa: N801 - Transformer Engine's name
    """What the layers take of `transformer_engine_torch`."""

    @staticmethod
    def generic_gemm(
        first: Any, first_transposed: bool, second: Any, second_transposed: bool, *, use_split_accumulator: bool = False
    ) -> Any:
        """`second` x `first`, each transposed or not: cuBLAS counts columns first. Rounded operands, fp32.

        Sums are those of fp32 whether they are said to be split or not.
        """
        del use_split_accumulator
        a = first.values.t() if first_transposed else first.values
        b = second.values.t() if second_transposed else second.values
        return b @ a
