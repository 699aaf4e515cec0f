"""What cast the operands of products to low precision, read off the very objects that the products got.

Every product of Transformer Engine's layers goes through its extension: `generic_gemm`, or one of the grouped ones, as
`pytorch/cpp_extensions/gemm.py` calls them (the same in 2.12.0 and 2.20.2). While `watching_operands` is on, each call
is noted. How its operands are transposed tells what they are: weight and input (TN), weight and gradient (NN), input
and gradient (NT). A layer says what it would use; this is what it used.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal, NamedTuple, get_args
from unittest.mock import patch

import torch

from ..bench import Bench
from ..emulation import BLOCKS, EMULATED, FORMATS, Product

Tensor = Literal["input", "weight", "gradient"]
TENSORS: Final[tuple[Tensor, ...]] = get_args(Tensor)

GEMM: Final = "transformer_engine.pytorch.cpp_extensions.gemm"
# Product -> where a call says whether it accumulates in two stages: `use_split_accumulator`, by position.
PRODUCTS: Final = {
    "generic_gemm": 15,
    "te_general_grouped_gemm": 15,
    "te_general_grouped_gemm_for_grouped_tensor": 11,  # these three since 2.15
    "te_general_grouped_gemm_for_discrete_in": 11,
    "te_general_grouped_gemm_for_discrete_out": 11,
}
# What each recipe asks of its products: delayed scaling takes `_2X_ACC_*` of `pytorch/module/base.py`, the others the
# defaults of their `fp8_gemm_*` in `common/recipe/__init__.py`. Two stages: partial sums of 14 bits are added up in
# fp32, which gradients need and the forward pass of one scale a tensor does without. 4 and 8 bits of Blackwell, whose
# tensor cores accumulate in fp32, have no row.
SPLIT: Final[dict[str, dict[Product, bool]]] = {
    "delayed": {"forward": False, "dgrad": True, "wgrad": True},
    "current": {"forward": False, "dgrad": True, "wgrad": True},
    "block": {"forward": True, "dgrad": True, "wgrad": True},
}
# (first is transposed, second is) -> the product, and what its two operands are.
ROLES: Final[dict[tuple[bool, bool], tuple[Product, Tensor, Tensor]]] = {
    (True, False): ("forward", "weight", "input"),
    (False, False): ("dgrad", "weight", "gradient"),
    (False, True): ("wgrad", "input", "gradient"),
}
FORMAT_NAMES: Final = {"kFloat8E4M3": "float8_e4m3", "kFloat8E5M2": "float8_e5m2", "kFloat4E2M1": "float4_e2m1"}
KINDS: Final = {
    "delayed": "Float8Quantizer",
    "current": "Float8CurrentScalingQuantizer",
    "block": "Float8BlockQuantizer",
    "mxfp8": "MXFP8Quantizer",
    "nvfp4": "NVFP4Quantizer",
}


class Operand(NamedTuple):
    """One operand of one product.

    Attributes:
        product, tensor: which.
        kind: class of the quantizer that made it; of the tensor itself where it carries none.
        format: of its values: "float8_e4m3"; torch's name of the dtype where it was not cast.
        block: values that share a scale: "tensor", "1x128", "128x128", "1x32"; "" where it was not cast.
        scale_inverse: [1] fp32 for one scale a tensor, as the product took it; None otherwise.
        amax: largest absolute value that the product took, [] fp32, of one scale a tensor; None otherwise.
        call: number of the product's call, from 0; a grouped product is one call with many operands.
        split: whether the product accumulates in two stages; None where the call did not say.
    """

    product: Product
    tensor: Tensor
    kind: str
    format: str
    block: str
    scale_inverse: Any = None
    amax: Any = None
    call: int = 0
    split: bool | None = None


@contextmanager
def watching_operands() -> Iterator[list[Operand]]:
    """The operands of every product that Transformer Engine's layers take inside, in the order they are taken.

    Raises:
        LookupError: this release keeps its products elsewhere.
    """
    extension: Any = getattr(sys.modules.get(GEMM), "tex", None)
    plain = {name: getattr(extension, name) for name in PRODUCTS if hasattr(extension, name)}
    if not plain:
        raise LookupError(
            f"{GEMM} has no `tex` with {next(iter(PRODUCTS))}. Likely cause: this release of Transformer Engine takes "
            "its products elsewhere. Next step: find where, and name it in probes/fp8/quantizers.py."
        )
    seen: list[Operand] = []
    watched: dict[str, Any] = {
        name: partial(_noted, seen, function, PRODUCTS[name]) for name, function in plain.items()
    }
    with patch.multiple(extension, **watched):
        yield seen


def _noted(seen: list[Operand], function: Callable[..., Any], at: int, *given: Any, **more: Any) -> Any:
    split = given[at] if len(given) > at else more.get("use_split_accumulator")
    call = seen[-1].call + 1 if seen else 0
    first, first_transposed, second, second_transposed = given[:4]
    product, of_first, of_second = ROLES[bool(first_transposed), bool(second_transposed)]
    for tensor, operands in ((of_first, first), (of_second, second)):
        for operand in operands if isinstance(operands, list | tuple) else (operands,):
            read = _read(product, tensor, operand)
            seen.append(read._replace(call=call, split=None if split is None else bool(split)))
    return function(*given, **more)


def _read(product: Product, tensor: Tensor, operand: Any) -> Operand:
    quantizer = getattr(operand, "_quantizer", None) or getattr(operand, "quantizer", None)
    dtype = getattr(operand, "_fp8_dtype", None) or getattr(operand, "_fp4_dtype", None)
    dtype = dtype if dtype is not None else getattr(quantizer, "dtype", None)
    if dtype is None:
        plain = str(getattr(operand, "dtype", "unknown")).removeprefix("torch.")
        return Operand(product, tensor, type(operand).__name__, plain, "")
    kind, name = type(operand if quantizer is None else quantizer).__name__, str(getattr(dtype, "name", dtype))
    scale = getattr(operand, "_scale_inv", None)
    kept = scale.detach().clone() if scale is not None and scale.numel() == 1 else None
    form = FORMAT_NAMES.get(name, name)
    return Operand(product, tensor, kind, form, _block(operand), kept, _amax(operand, name, kept))


def _amax(operand: Any, name: str, scale_inverse: Any) -> Any:
    """Of the values with one scale: their bytes lie as they are, or turned where only the turned ones are kept."""
    if scale_inverse is None:
        return None
    kept = (getattr(operand, place, None) for place in ("_data", "_transpose"))
    data = next((one for one in kept if one is not None), None)
    if data is None:
        return None
    if not data.numel():
        return torch.zeros((), device=data.device)
    with torch.no_grad():
        values = data.view(torch.float8_e5m2 if "E5M2" in name else torch.float8_e4m3fn)
        return values.float().abs().amax() * scale_inverse.reshape(())


def _block(operand: Any) -> str:
    """From the shapes of the values and of their scales, whatever a quantizer says of itself."""
    if getattr(operand, "_scale_inv", None) is not None:
        scales = int(operand._scale_inv.numel())
        return "tensor" if scales == 1 else f"{scales} scales"
    for way in ("rowwise", "columnwise"):
        values, scale = getattr(operand, f"_{way}_data", None), getattr(operand, f"_{way}_scale_inv", None)
        if values is not None and scale is not None:
            return _block_of(tuple(values.shape), tuple(scale.shape), way, getattr(operand, "_is_2D_scaled", None))
    return "unknown"


def _block_of(values: Sequence[int], scales: Sequence[int], way: str, square: bool | None) -> str:
    """The block with which a matrix of these values has scales of this shape, padded as products want them."""
    rows, width = math.prod(values[:-1]), values[-1]
    if square is not None:  # `Float8BlockQuantizer.get_scale_shape`; values that serve columns are stored transposed
        along = {"1x128": (math.ceil(width / 128), _up(rows, 4))}
        area = {"128x128": (math.ceil(rows / 128), _up(math.ceil(width / 128), 4))}
        wanted = {**area, **along} if square else {**along, **area}
    else:  # `MXFP8Quantizer.get_scale_shape`, `NVFP4Quantizer.get_scale_shape`; NVFP4 packs two values
        by_row = (_up(rows, 128), _up(width // 32, 4))
        of_32 = by_row if way == "rowwise" else (_up(rows // 32, 4), _up(width, 128))
        wanted = {"1x32": of_32, "1x16": (_up(rows, 128), _up(width * 2 // 16, 4))}
    found = [block for block, shape in wanted.items() if shape == tuple(scales)]
    return found[0] if found else f"scales {tuple(scales)} for {tuple(values)}"


def _up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def wanted_format(recipe: str, product: Product, tensor: Tensor) -> str:
    """What a recipe casts an operand to: "float8_e4m3"; HYBRID is E4M3 forward and E5M2 for gradients."""
    if recipe not in EMULATED:
        return "float4_e2m1"
    first, second = FORMATS[product][recipe]
    # Of each product the operand that is no weight comes first; of the weight gradient's, the gradient does.
    lead = "input" if product == "forward" else "gradient"
    return f"float8_{first if tensor == lead else second}"


def wanted_block(recipe: str, tensor: Tensor) -> str:
    """Which values share a scale under a recipe; "" where nobody has seen it yet, so that it is only written down."""
    if recipe not in EMULATED:
        return ""
    if recipe not in BLOCKS:
        return "tensor"
    block = BLOCKS[recipe]["weight" if tensor == "weight" else "rows"]
    return f"{block.rows}x{block.along}"


def check_operands(bench: Bench, path: str, recipe: str, seen: Sequence[Operand], count: int) -> None:
    """Each operand of each product was cast as the recipe says, and none was left as it was.

    The checks are `PATH.PRODUCT.TENSOR.quantizer` and `PATH.PRODUCT.accumulator`, that each product accumulates in as
    many stages as the recipe asks for; each kind of operand that was seen goes into the receipt once.

    Args:
        bench: where they go.
        path: "fp8.delayed.linear".
        recipe: which one.
        seen: of `watching_operands`, over one step.
        count: how many of each product the layer takes in a step.
    """
    for row in dict.fromkeys((one.tensor, one.kind, one.format, one.block) for one in seen):
        bench.saw_quantizer(path, *row)
    for product, *tensors in ROLES.values():
        for tensor in tensors:
            found = [one for one in seen if (one.product, one.tensor) == (product, tensor)]
            wanted = (KINDS[recipe], wanted_format(recipe, product, tensor), wanted_block(recipe, tensor))
            kinds = list(dict.fromkeys((one.kind, one.format, one.block) for one in found))
            said = f"{len(found)} of {count}: {', '.join(map(' '.join, kinds)) or 'none'}; wanted {' '.join(wanted)}"
            right = [row if wanted[-1] else (*row[:2], "") for row in kinds] == [wanted] and len(found) == count
            bench.check(f"{path}.{product}.{tensor}.quantizer", right, said)
        if recipe in SPLIT:
            split = sorted({str(one.split) for one in seen if one.product == product})
            asked = str(SPLIT[recipe][product])
            said = f"in two stages: {', '.join(split) or 'no call'} (False is fast, in 14 bits); wanted {asked}"
            bench.check(f"{path}.{product}.accumulator", split == [asked], said)
