"""A layer by Transformer Engine in the place of a plain one: the same parameters, mode and names in checkpoints."""

from __future__ import annotations

from typing import Any

from torch import nn

from .errors import WeightMismatch
from .plain_checkpoints import keep_checkpoints_plain


def take_over(layer: Any, plain: Any, name: str) -> Any:
    """Give a TE layer the parameters of a plain one, under the same names. The plain one keeps them, too.

    Parameters are handed over and not copied: values, gradients, ties, `requires_grad`, hooks on them and an optimizer
    that already holds them stay right, and no second copy of the weights is made.

    Args:
        layer: by Transformer Engine, just built.
        plain: the layer it stands in for.
        name: what to call it in an error.

    Raises:
        WeightMismatch: the layer has other parameters than the plain one.
    """
    wanted = dict(plain.named_parameters())
    shapes = {part: tuple(tensor.shape) for part, tensor in wanted.items()}
    built = {part: tuple(tensor.shape) for part, tensor in layer.named_parameters() if type(tensor) is nn.Parameter}
    if built != shapes:
        raise WeightMismatch(
            f"Transformer Engine built {name} with the plain parameters {built}, not {shapes}. Likely cause: it was "
            "built inside `te_quantized_weights`, or this release names them otherwise. Next step: build it outside of "
            "that scope, or run the upgrade canary."
        )
    for part, tensor in wanted.items():
        setattr(layer, part, tensor)
    layer.train(plain.training)
    return keep_checkpoints_plain(layer)
