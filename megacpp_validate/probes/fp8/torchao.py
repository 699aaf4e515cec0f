"""torchao's Float8Linear: converted in its order, and in FP8 after torch.compile as before it.

What a layer's class says is not taken for what ran: the operands of every FP8 product are seen by a dispatch mode in
eager code, and torch's profiler must see as many in compiled code as the recipe has for the converted layers.
What the lane refuses, and every step out of its order, is plain Python: tests/bridge holds that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ..bench import Bench
from ..bounds import Roundings, low_precision_ran, relative_error
from ..emulation import DTYPES, Product, Recipe, operand_roundings
from ..fp8_linear import PRODUCTS
from ..references import linear
from ..trial import reference_pass
from .wrappers import watching_dequantizations

LAYERS: Final = {"fc1": (512, 384), "fc2": (256, 640)}
ROWS: Final = 208  # a multiple of 16, and none of the widths: so each product of each layer has sizes of its own
FP8_PRODUCT: Final = "aten::_scaled_mm"  # `_scaled_mm_v2` too
OPERANDS: Final = {
    "forward": ("input", "weight, turned"),
    "dgrad": ("gradient", "weight"),
    "wgrad": ("gradient, turned", "input for wgrad"),
}
NARROW: Final = ("e4m3", "tensor")
WIDE: Final = ("e5m2", "tensor")
BY_ROW: Final = (("e4m3", "row"), ("e4m3", "column"))
# Recipe -> format and scales of both operands of each FP8 product: torchao's float8/config.py.
EXPECTED: Final[dict[str, dict[Product, Any]]] = {
    "tensorwise": {"forward": (NARROW, NARROW), "dgrad": (WIDE, NARROW), "wgrad": (WIDE, NARROW)},
    "rowwise": dict.fromkeys(PRODUCTS, BY_ROW),
    "rowwise_with_gw_hp": {"forward": BY_ROW, "dgrad": (BY_ROW[0], NARROW)},
}
# Recipe, whether weights are gathered in FP8, compiler: each recipe once by the real one, which takes 5 s a graph.
CASES: Final = (
    ("tensorwise", False, "aot_eager"),
    ("tensorwise", True, "inductor"),
    ("rowwise", False, "inductor"),
    ("rowwise_with_gw_hp", False, "inductor"),
)


class Tree(nn.Module):
    """Two layers of the whitelist and a router beside each other, so that each has its own gradients."""

    def __init__(self, dtype: Any = torch.float32) -> None:
        super().__init__()
        for name, (inner, outer) in LAYERS.items():
            self.add_module(name, nn.Linear(inner, outer, bias=False, dtype=dtype))
        self.router = nn.Linear(512, 16, bias=False, dtype=dtype)

    def forward(self, first: Any, second: Any) -> tuple[Any, Any, Any]:
        """Rows [R, 512] and [R, 256] -> [R, 384], [R, 640] and the router's [R, 16]."""
        return self.fc1(first), self.fc2(second), self.router(first)


def sharding(mesh: Any) -> Callable[[Any], object]:
    """FSDP2's rule: the whole model as one unit, gathered in bf16, gradients reduced in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return partial(fully_shard, mesh=mesh, mp_policy=policy)


@contextmanager
def one_rank(device: str) -> Iterator[Any]:
    """A mesh of this rank alone: FSDP2 as it is, with nobody to share with."""
    if device == "cuda":
        torch.cuda.set_device(torch.cuda.current_device())  # else the mesh guesses, and warns that it does
    init_process_group("nccl" if device == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (1,))
    finally:
        destroy_process_group()


def probe(bench: Bench) -> None:
    """Each recipe, eager and compiled, under FSDP2 on one rank."""
    vendor = bench.bridge("torchao")
    if not vendor.TORCHAO.is_available():
        bench.cannot_run(vendor.TORCHAO.why_unavailable())
    if bench.device == "cpu":
        bench.cannot_run("torchao's FP8 products want an FP8 GPU. Next step: run this cell on one.")
    with one_rank(bench.device) as mesh:
        for recipe, float8_all_gather, backend in CASES:
            with bench.scope(f"{recipe}.all-gather" if float8_all_gather else recipe):
                check_recipe(bench, mesh, recipe, backend, float8_all_gather=float8_all_gather)


class Case(NamedTuple):
    """What goes into the tree and comes back: rows [R, K] and the gradient of the output [R, N], of each layer."""

    rows: dict[str, Any]
    gradients: dict[str, Any]


class Products(TorchDispatchMode):
    """Payloads of both operands of every FP8 product of eager code, by M, N and K, and how many reached the kernel."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.read = read
        self.seen: dict[tuple[int, int, int], tuple[Any, Any]] = {}
        self.ran = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if any(kind.__module__.partition(".")[0] == "torchao" for kind in types):
            if name == "aten::mm":
                sizes = (int(args[0].shape[0]), int(args[1].shape[1]), int(args[0].shape[1]))
                self.seen[sizes] = (self.read(args[0]), self.read(args[1]))
            return NotImplemented  # torchao's tensors handle their operators, and what they call comes back here
        self.ran += name.startswith(FP8_PRODUCT)
        return func(*args, **(kwargs or {}))


def check_recipe(bench: Bench, mesh: Any, recipe: str, backend: str, *, float8_all_gather: bool) -> None:
    """One recipe through the whole order; numbers, operands and products, eager and compiled."""
    bridge = bench.bridge("quantized_tensor")
    with torch.device("meta"):
        model = Tree()
    vendor = bench.bridge("torchao")
    vendor.convert_linears(model, recipe, device=bench.device, float8_all_gather=float8_all_gather)
    sharding(mesh)(model)
    model.to_empty(device=bench.device)
    with torch.no_grad():
        _write(bench, model)
    if float8_all_gather:
        vendor.after_step(model)
    case, weights = _new_case(bench), {name: _whole(model.get_submodule(name).weight) for name in LAYERS}
    with Products(bridge.read_payload) as products:
        eager = run_case(model, case)
    path = f"torchao.{recipe}.all-gather" if float8_all_gather else f"torchao.{recipe}"
    check_operands(bench, path, recipe, products)
    with watching_dequantizations(bridge.saying) as watch:
        run_case(model, case)
    bench.check("eager.silent", not watch.silent, watch.said)
    compiled = torch.compile(model, backend=backend)
    for kind, seen in (("eager", eager), ("compiled", run_case(compiled, case))):
        with bench.scope(kind):
            check_numbers(bench, recipe, case, weights, seen)
    _check_gemms(bench, recipe, partial(run_case, compiled, case))


def _write(bench: Bench, model: Any) -> None:
    """Weights with values that bf16 holds, so that a cast of them rounds nothing."""
    for parameter in model.parameters():
        made = bench.randn(*parameter.shape, dtype=torch.bfloat16, scale=parameter.shape[1] ** -0.5)
        parameter.to_local().copy_(made) if hasattr(parameter, "to_local") else parameter.copy_(made)


def _new_case(bench: Bench) -> Case:
    case = Case({}, {})
    for name, (inner, outer) in LAYERS.items():
        case.rows[name] = bench.randn(ROWS, inner, dtype=torch.bfloat16)
        case.gradients[name] = bench.randn(ROWS, outer, dtype=torch.bfloat16, scale=0.1)
    return case


def run_case(model: Any, case: Case) -> dict[str, dict[str, Any]]:
    """One forward and backward pass: layer -> out, gradient of the rows, gradient of the weight."""
    model.zero_grad(set_to_none=True)
    leaves = {name: rows.detach().clone().requires_grad_() for name, rows in case.rows.items()}
    outs = model(*leaves.values())
    # Nothing goes back from the router, so that the rows' gradient is that of the one layer.
    torch.autograd.backward(outs[:2], list(case.gradients.values()))
    plain = getattr(model, "_orig_mod", model)
    found = {}
    for name, out in zip(LAYERS, outs[:2], strict=True):
        weight = _whole(plain.get_submodule(name).weight.grad)
        found[name] = {"forward": out.detach(), "grad.input": leaves[name].grad, "grad.weight": weight}
    return found


def _whole(tensor: Any) -> Any:
    """A sharded tensor as a plain one."""
    if tensor is None:
        return None
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return getattr(whole, "_tensor", whole).detach().clone()


def check_operands(bench: Bench, path: str, recipe: str, products: Products) -> None:
    """Formats and scales of what really went into each FP8 product; and that there were as many as there should."""
    wanted = len(LAYERS) * len(EXPECTED[recipe])
    bench.check("eager.products", products.ran == wanted, f"{products.ran} FP8 products in eager code, {wanted} wanted")
    for name, (inner, outer) in LAYERS.items():
        sizes = {"forward": (ROWS, outer, inner), "dgrad": (ROWS, inner, outer), "wgrad": (outer, inner, ROWS)}
        for product, expected in EXPECTED[recipe].items():
            seen = products.seen.get(sizes[product], ())
            found = tuple((str(getattr(one, "format", one)), getattr(one, "block", "")) for one in seen)
            bench.check(f"eager.{name}.{product}.operands", found == expected, f"{found or 'was no FP8 product'}")
            for tensor, one in zip(OPERANDS[product], seen, strict=False):
                if hasattr(one, "format"):
                    bench.saw_quantizer(f"{path}.{name}", tensor, one.source, f"float8_{one.format}", one.block)


def check_numbers(bench: Bench, recipe: str, case: Case, weights: Any, seen: dict[str, dict[str, Any]]) -> None:
    """Output and both gradients of each layer beside fp64; and that what should be in FP8 is no more accurate."""
    for name, given in seen.items():
        inner, outer = LAYERS[name]
        lengths: dict[Product, int] = {"forward": inner, "dgrad": outer, "wgrad": ROWS}
        operands = {"input": case.rows[name], "weight": weights[name]}
        reference, _ = reference_pass(linear, operands, case.gradients[name])
        for product, tensor in PRODUCTS.items():
            roundings = _roundings(recipe, product, lengths[product])
            wanted, found = reference[tensor], given[tensor]
            bench.compare(f"{name}.{product}", found, wanted, roundings=roundings)
            if found is not None and roundings.steps[0][0] != "bf16":
                # Those roundings that must have been made; an accumulator may well be better than Hopper's.
                least = Roundings(tuple(step for step in roundings.steps if step[0] in DTYPES), 0)
                bench.check_parts(f"{name}.{product}.in-fp8", low_precision_ran(relative_error(found, wanted), least))


def _roundings(recipe: str, product: Product, k: int) -> Roundings:
    """What is rounded on the way to one product: torchao's float8/config.py and float8_ops.py."""
    if recipe == "rowwise_with_gw_hp" and product == "wgrad":
        return Roundings((("bf16", 1),), k, why="the weight's gradient stays in bf16 in this recipe")
    # Fast accumulation of the output's product alone, as current scaling has it, whose formats those of one scale a
    # tensor are; gradients with one scale a row are E4M3, as those of block scaling are.
    same_as: Recipe = "current" if recipe == "tensorwise" or product == "forward" else "block"
    return operand_roundings(same_as, product, k)


def _check_gemms(bench: Bench, recipe: str, run: Callable[[], Any]) -> None:
    """After compiling: compiled code ran, and as many FP8 products as the recipe has for the converted layers."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        run()
    names = [
        event.name
        for event in record.events() or ()
        if not getattr(event.cpu_parent, "name", "").startswith(FP8_PRODUCT)
    ]
    regions = sum(name.startswith("Torch-Compiled Region") for name in names)
    bench.check("compiled.regions", regions > 0, f"{regions} compiled regions were entered")
    found = sum(name.startswith(FP8_PRODUCT) for name in names)
    wanted = len(LAYERS) * len(bench.bridge("torchao").IN_FP8[recipe])
    bench.check("compiled.products", found == wanted, f"{found} FP8 products in compiled code, {wanted} wanted")
