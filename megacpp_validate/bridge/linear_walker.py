"""TE linear replacement walker: the TE side of it, one layer at a time."""

from __future__ import annotations

from typing import Any

from . import imports as te

NATIVE_PATH = "torch.nn.Linear, left as it is"


class TeLinear:
    """A `te.Linear` in the place of an `nn.Linear`: [..., in_features] -> [..., out_features].

    Args:
        module: the `nn.Linear` to stand in for, weight [out_features, in_features]; shape, bias, dtype and device
            are taken from it, weights are not copied.
        name: where it stands in the tree; TE uses it in its messages.
    """

    def __init__(self, module: Any, *, name: str) -> None:
        self.inner = te.linear.require()(
            in_features=module.in_features,
            out_features=module.out_features,
            bias=module.bias is not None,
            params_dtype=module.weight.dtype,
            device=module.weight.device,
            name=name,
        )

    def __call__(self, rows: Any, *, is_first_microbatch: bool | None = None) -> Any:
        """Rows [..., in_features] -> [..., out_features]."""
        return self.inner(rows, is_first_microbatch=is_first_microbatch)

    def parameters(self) -> tuple[Any, Any]:
        """Weight [out_features, in_features] and bias [out_features]."""
        return self.inner.weight, self.inner.bias
