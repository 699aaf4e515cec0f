"""Kinds of fault in one call: in its arguments, its result, a gradient, or the layer that is called.

Each takes the call, the mutant and the trace, and returns what the call gives. A fault that does not apply to a call
(an argument, a parameter or an item that is not there) leaves the call as it is and counts nothing, so that a mutant
whose target was rewritten ends as not reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import BoundArguments, Parameter
from typing import Any, Final

import torch
from torch import nn

from ..bridge.te_fp8 import te_scope, te_state
from ..evidence.selftest import Fault, Mutant


@dataclass
class Trace:
    """How often planted code changed something, and the tensors that it keeps for good."""

    reached: int = 0
    kept: list[Any] = field(default_factory=list)

    def note(self, before: Any, after: Any) -> None:
        """Count it if the two differ."""
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            self.reached += not torch.equal(before.detach(), after.detach())
        else:
            self.reached += before is not after and bool(before != after)


@dataclass(frozen=True)
class Call:
    """One call of the original.

    Attributes:
        bound: its arguments; what is put there is what the original gets.
        run: the original, with the arguments as they then are.
    """

    bound: BoundArguments
    run: Callable[[], Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, with defaults."""
        return self.bound.arguments

    @property
    def owner(self) -> Any:
        """The first argument: of a layer's call the layer."""
        return next(iter(self.arguments.values()), None)

    def default(self, name: str) -> Any:
        """The default of an argument; None where it has none."""
        default = self.bound.signature.parameters[name].default
        return None if default is Parameter.empty else default

    def parameter(self, name: str) -> Any:
        """A parameter of the layer by name; None where there is none."""
        return getattr(self.owner, name, None) if isinstance(self.owner, nn.Module) else None

    def run_with(self, parameters: Mapping[str, Any]) -> Any:
        """Run the original with other tensors in the place of the layer's parameters."""
        with _put_parameters(self.owner._parameters, parameters):
            return self.run()


@contextmanager
def _put_parameters(own: dict[str, Any], others: Mapping[str, Any]) -> Iterator[None]:
    kept = {name: own[name] for name in others}
    own.update(others)
    try:
        yield
    finally:
        own.update(kept)


# --- tensors and gradients -------------------------------------------------------------------------------------------


def damage(tensor: Any, mutant: Mutant) -> Any:
    """A tensor of the same shape with the fault in it."""
    half = tensor.numel() // 2
    index = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
    match mutant.fault:
        case Fault.ZEROS:
            return tensor * 0
        case Fault.HALF_ZEROS:
            return tensor * (index >= max(1, half))
        case Fault.NEGATED:
            return -tensor
        case Fault.SHUFFLED:
            axis = next((axis for axis, size in enumerate(tensor.shape) if size > 1), None)
            return tensor if axis is None else tensor.roll(1, axis)
        case Fault.NAN:
            return tensor.masked_fill(index == half, float("nan"))
    return tensor * float(mutant.parameters["factor"])


class _Backward(torch.autograd.Function):
    """Passes a tensor on, and a damaged gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, damaged: Callable[[Any], Any]) -> Any:
        ctx.damaged = damaged
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.damaged(grad), None


def change_tensor(call: Call, mutant: Mutant, trace: Trace) -> Any:
    """Damage the output, one item of it (`output.1`), or the gradient of an argument or parameter (`gradient.NAME`)."""
    kind, _, name = str(mutant.parameters.get("tensor", "output")).partition(".")

    def damaged(tensor: Any) -> Any:
        after = damage(tensor, mutant)
        trace.note(tensor, after)
        return after

    if kind == "gradient":
        return _run_backward(call, name, damaged)
    output = call.run()
    if not name:
        return damaged(output) if isinstance(output, torch.Tensor) else output
    if not isinstance(output, tuple | list) or not isinstance(output[int(name)], torch.Tensor):
        return output
    items = list(output)
    items[int(name)] = damaged(items[int(name)])
    return type(output)(items)


def _run_backward(call: Call, name: str, damaged: Callable[[Any], Any]) -> Any:
    given = call.arguments.get(name)
    if isinstance(given, torch.Tensor):
        call.arguments[name] = _Backward.apply(given, damaged)
        return call.run()
    parameter = call.parameter(name)
    return call.run() if parameter is None else call.run_with({name: _Backward.apply(parameter, damaged)})


# --- arguments --------------------------------------------------------------------------------------------------------


def change_argument(call: Call, mutant: Mutant, trace: Trace) -> Any:
    """Another value of one argument."""
    name = str(mutant.parameters["name"])
    if name in call.arguments:
        before = call.arguments[name]
        call.arguments[name] = _change_value(before, call.default(name), mutant)
        trace.note(before, call.arguments[name])
    return call.run()


def _change_value(value: Any, default: Any, mutant: Mutant) -> Any:
    given = mutant.parameters
    if mutant.fault is Fault.ARGUMENT:
        return given["value"] if given.get("only", value) == value else value
    if mutant.fault is Fault.ARGUMENT_LOST:
        return value.masked_fill(value < given["below"], 0.0) if "below" in given else default
    if mutant.fault is Fault.ARGUMENT_SCALED:
        return None if value is None else value * given["factor"]
    if isinstance(value, torch.Tensor):
        return value.roll(1, int(given["axis"]))
    return type(value)((*value[-1:], *value[:-1])) if isinstance(value, list | tuple) else value


# --- the layer that is called -----------------------------------------------------------------------------------------


def change_parameter(call: Call, mutant: Mutant, trace: Trace) -> Any:
    """Run with zeros in the place of the bias, or with the halves of a parameter swapped along its first axis."""
    name = str(mutant.parameters.get("name", "bias"))
    before = call.parameter(name)
    if before is None or not before.numel():
        return call.run()
    after = before * 0 if mutant.fault is Fault.BIAS_DROPPED else torch.cat(before.chunk(2)[::-1])
    trace.note(before, after)
    return call.run_with({name: after})


def ignore_scope(call: Call, _: Mutant, trace: Trace) -> Any:
    """Compute as outside of every low-precision scope."""
    state = te_state()
    if not state["enabled"]:
        return call.run()
    trace.reached += 1
    with te_scope(enabled=False, recipe=state["recipe"], amax_reduction_group=state["group"]):
        return call.run()


class _Hidden(torch.autograd.Function):
    """A call as one node of the graph: nobody sees what computed it."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any], *tensors: Any) -> Any:
        with torch.enable_grad():
            ctx.out = run()
        ctx.tensors = tensors
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        wanted = [tensor for tensor in ctx.tensors if tensor.requires_grad]
        found = iter(torch.autograd.grad(ctx.out, wanted, grad, retain_graph=True, allow_unused=True))
        return None, *(next(found) if tensor.requires_grad else None for tensor in ctx.tensors)


def hide_backend(call: Call, _: Mutant, trace: Trace) -> Any:
    """The right numbers without a trace of the vendor, as plain torch in the vendor's place leaves them."""
    trace.reached += 1
    given = [value for value in call.arguments.values() if isinstance(value, torch.Tensor)]
    return _Hidden.apply(call.run, *given, *call.owner.parameters())


# --- results ----------------------------------------------------------------------------------------------------------


def change_parameters_made(call: Call, mutant: Mutant, trace: Trace) -> Any:
    """Copies of the parameters that the layer that comes out should share, or values of its own."""
    layer = call.run()
    for holder in layer.modules() if isinstance(layer, nn.Module) else ():
        for name, parameter in list(holder.named_parameters(recurse=False)):
            copy = parameter.detach().clone()
            other = copy if mutant.fault is Fault.PARAMETERS_CLONED else torch.randn_like(copy) * 0.02
            setattr(holder, name, nn.Parameter(other))
            trace.reached += 1
    return layer


def answer_always(call: Call, mutant: Mutant, trace: Trace) -> Any:
    """The same answer whatever is asked, as a whole or in one item."""
    value, index = mutant.parameters["value"], mutant.parameters.get("index")
    plain = call.run()
    answer: Any = value
    if index is not None:
        answer = tuple(value if place == index else item for place, item in enumerate(plain))
    trace.note(plain, answer)
    return answer


def skip(call: Call, mutant: Mutant, trace: Trace) -> Any:
    """Do nothing; the result is None, or the argument that `returns` names."""
    name = mutant.parameters.get("returns")
    if name is not None and name not in call.arguments:
        return call.run()
    trace.reached += 1
    return None if name is None else call.arguments[str(name)]


def keep_output(call: Call, _: Mutant, trace: Trace) -> Any:
    """The tensors of every result stay in memory for good."""
    given = call.run()
    items = given if isinstance(given, tuple | list) else (given,)
    trace.kept += [item.detach() for item in items if isinstance(item, torch.Tensor)]
    trace.reached += 1
    return given


def overwrite(call: Call, mutant: Mutant, trace: Trace) -> Any:
    """Double an argument or parameter in place; without a name, write each output into the first one of its shape."""
    out, name = call.run(), str(mutant.parameters.get("name", ""))
    kept = [one for one in trace.kept if one.shape == out.shape]
    places = [call.arguments.get(name, call.parameter(name))] if name else kept
    if not places:
        trace.kept.append(out)
        return out
    after = places[0] * 2 if name else out
    trace.note(places[0], after)
    places[0].data.copy_(after)
    return out if name else places[0]


_OF_TENSORS: Final = (
    Fault.ZEROS, Fault.HALF_ZEROS, Fault.SCALED, Fault.NEGATED, Fault.SHUFFLED, Fault.NAN,
)  # fmt: skip
_OF_ARGUMENTS: Final = (Fault.ARGUMENT, Fault.ARGUMENT_SCALED, Fault.ARGUMENT_LOST, Fault.ARGUMENT_ROLLED)
FAULTS: Final[dict[Fault, Callable[[Call, Mutant, Trace], Any]]] = {
    **dict.fromkeys(_OF_TENSORS, change_tensor),
    **dict.fromkeys(_OF_ARGUMENTS, change_argument),
    **dict.fromkeys((Fault.BIAS_DROPPED, Fault.HALVES_SWAPPED), change_parameter),
    **dict.fromkeys((Fault.PARAMETERS_CLONED, Fault.PARAMETERS_FRESH), change_parameters_made),
    Fault.SCOPE_IGNORED: ignore_scope,
    Fault.NATIVE_INSTEAD: hide_backend,
    Fault.ANSWERS: answer_always,
    Fault.SKIPPED: skip,
    Fault.OUTPUT_KEPT: keep_output,
    Fault.OVERWRITTEN: overwrite,
}
