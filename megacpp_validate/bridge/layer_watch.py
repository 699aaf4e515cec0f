"""Checks of layers that run in low precision, for mistakes that Transformer Engine does not report.

They show as drift weeks later: torch's checkpoint around a layer, a change of the amax reduction group (TE keeps the
group of the layer's first pass), NaN and infinity in inputs, second passes in another order than the first.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from . import features
from . import imports as te
from .amax_owner import AmaxGroupChanged
from .errors import BridgeError, NotDivisible, WrongTarget
from .expert_gemm import FP8_ROWS, FP8_ROWS_ELSE
from .fp8_scope import current_scope, refuse_torch_recompute
from .recipes import ALIGNMENT, RECIPE_NAMES
from .te_fp8 import te_recompute, te_state

# --- layer watch ---

_VENDOR: Final = "transformer_engine"
_reduced_over: Final[WeakKeyDictionary[Any, tuple[Any, bool]]] = WeakKeyDictionary()


def watch_layers(model: Any) -> tuple[str, ...]:
    """Check every layer of Transformer Engine in a model before each of its passes in low precision.

    Call it once after the model is built; a second call changes nothing. Passes in high precision, outside of the
    bridge's scope, and in compiled code are not checked.

    Args:
        model: a module, or one TE layer.

    Returns:
        Names of the layers.

    A watched layer raises:
        WrongRecomputeOwner: it runs in torch's checkpoint.
        AmaxGroupChanged: under delayed scaling, its amax would be reduced over another group than before.
    """
    found = {name: layer for name, layer in model.named_modules() if type(layer).__module__.startswith(_VENDOR)}
    for layer in found.values():
        if _look not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_look)
    return tuple(found)


@contextmanager
def unwatched(modules: tuple[Any, ...]) -> Iterator[None]:
    """Remove the checks of these modules inside the scope: graph capture refuses modules with hooks."""
    watched = []
    for module in modules:
        keys = [key for key, hook in module._forward_pre_hooks.items() if hook is _look]
        watched += [module] if keys else []
        for key in keys:
            del module._forward_pre_hooks[key]
    try:
        yield
    finally:
        for module in watched:
            module.register_forward_pre_hook(_look)


def _look(layer: Any, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    scope = current_scope()
    if scope is None or not scope.is_low:
        return
    refuse_torch_recompute(type(layer).__name__)
    if scope.recipe == "delayed" and torch.is_grad_enabled():
        _check_group(layer)


def _check_group(layer: Any) -> None:
    state = te_state()
    now = state["group"], bool(state["recipe"].reduce_amax)
    first = _reduced_over.setdefault(layer, now)
    if first[1] != now[1] or first[0] is not now[0]:
        raise AmaxGroupChanged(
            f"the amax of {type(layer).__name__} was reduced over {_said(first)} so far, and is to be reduced over "
            f"{_said(now)} now, which Transformer Engine ignores. Likely cause: a warm-up ran with another group than "
            "training. Next step: pass the same group from the first pass on, or build the layer again."
        )


def _said(reduced: tuple[Any, bool]) -> str:
    group, reduces = reduced
    if not reduces:
        return "this rank alone"
    if group is None:
        return "the whole world"
    return f"ranks {torch.distributed.get_process_group_ranks(group)}"


# --- inputs of layers in low precision: checked before a wrong value becomes a wrong scale ---

# Without gradients a recipe takes 8 rows; the weight gradient sums over the rows and takes 16: with 8 rows 2.12 and
# 2.20 run the forward pass and raise in the backward pass ("Leading dimension requirement"; H200, 2026-11-21).
FORWARD_ROWS: Final = 8
TRAINING_ROWS: Final = 16

INPUT, GRADIENT = 0, 1  # columns of the largest values of a layer


class NotFinite(BridgeError, ValueError):
    """A NaN or an infinity in what a layer was given in low precision."""


class Fp8Guard(AbstractContextManager["Fp8Guard"]):
    """Watches the inputs and output gradients of every TE layer with weights in a model.

    Args:
        model: the model; errors name its layers.

    Use it as a context around training, or call `close`. Call `end_step` after each backward pass, before the
    optimizer's step. Each rank checks its own layers: where one raises, the launcher must end the others.
    """

    def __init__(self, model: Any) -> None:
        found = {name: layer for name, layer in model.named_modules() if _is_watched(layer)}
        self._layers: Final[dict[str, Any]] = found
        self._order: dict[str, None] = {}  # names in the order of the calls of this step
        self._largest: dict[Any, Any] = {}  # device -> [layers, 2] fp32
        self._rows: Final = {name: index for index, name in enumerate(found)}
        # Now, so that a captured graph does not make its own, empty at each replay.
        for device in {next(layer.parameters()).device for layer in found.values()}:
            if device.type != "meta":
                self._largest_on(device)
        self._handles = []
        for name, layer in found.items():
            self._handles += [
                layer.register_forward_pre_hook(partial(self._before, name), with_kwargs=True),
                layer.register_forward_hook(partial(self._after, name)),
            ]

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end_step(self, step: int) -> None:
        """Check that everything the layers were given in low precision since the last call was finite.

        Args:
            step: number of the training step, for the text.

        Raises:
            NotFinite: the text names the first such tensor, its layer and the step.
        """
        order, self._order = tuple(self._order), {}
        for device, largest in self._largest.items():
            seen = largest.tolist()  # the one synchronization of a step
            largest.zero_()
            if not all(map(math.isfinite, (value for row in seen for value in row))):
                raise self._explained(step, order, seen, device)

    def _before(self, name: str, layer: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        state = te_state()
        if not state["enabled"]:
            return
        rows = given[0] if given else next(iter(options.values()))
        recipe = type(state["recipe"]).__name__
        _refuse(name, layer, rows, given[1:], recipe)
        self._note(INPUT, name, rows)
        self._order[name] = None

    def _after(self, name: str, layer: Any, given: Any, out: Any) -> None:
        del layer, given
        out = out[0] if isinstance(out, tuple) else out
        if isinstance(out, torch.Tensor) and out.requires_grad and te_state()["enabled"]:
            out.register_hook(partial(self._note, GRADIENT, name))

    def _note(self, column: int, name: str, tensor: Any) -> None:
        """Keep the larger of what is there and the tensor's largest absolute value; a NaN is larger than all."""
        if not tensor.numel():
            return
        place = self._largest_on(tensor.device)[self._rows[name], column]
        with torch.no_grad():
            largest = torch.linalg.vector_norm(tensor.detach(), math.inf, dtype=torch.float32)
            torch.maximum(place, largest, out=place)

    def _largest_on(self, device: Any) -> Any:
        if device not in self._largest:
            self._largest[device] = torch.zeros(len(self._layers), 2, device=device)
        return self._largest[device]

    def _explained(self, step: int, order: tuple[str, ...], seen: list[list[float]], device: Any) -> NotFinite:
        """Forward from the first layer: its input, then its weights; then gradients from the last layer back."""
        for name in order:
            if not math.isfinite(value := seen[self._rows[name]][INPUT]):
                return _not_finite("input", name, step, value, device)
            for part, weight in self._layers[name].named_parameters(recurse=False):
                if not math.isfinite(value := float(weight.detach().abs().amax())):
                    return _not_finite(part, name, step, value, device)
        for name in reversed(order):
            if not math.isfinite(value := seen[self._rows[name]][GRADIENT]):
                return _not_finite("gradient of the output", name, step, value, device)
        name = next(name for name, row in self._rows.items() if not all(map(math.isfinite, seen[row])))
        return _not_finite("input or gradient of the output", name, step, math.nan, device)


def _is_watched(layer: Any) -> bool:
    """Layers of Transformer Engine have FP8 state; attention has it too, and no weights that are cast."""
    return hasattr(layer, "fp8_meta") and any(weight.dim() > 1 for weight in layer.parameters(recurse=False))


def _not_finite(tensor: str, name: str, step: int, value: float, device: Any) -> NotFinite:
    kind = "NaN" if math.isnan(value) else "an infinity"
    return NotFinite(
        f"{kind} in the {tensor} of the layer {name or 'at the root'} at step {step} ({device}), in low precision, "
        "which no amax shows. Likely cause: a bad batch, or an overflow in an earlier layer or step. Next step: skip "
        "this step before the optimizer's, and look at the input of that layer."
    )


def _refuse(name: str, layer: Any, rows: Any, others: tuple[Any, ...], recipe: str) -> None:
    if rows.device.type not in features.TE_DEVICES:
        raise WrongTarget(
            f"the input of the layer {name or 'at the root'} lies on {rows.device.type} in the low-precision scope "
            f"({recipe}). Next step: move the batch to the GPU, or leave the scope."
        )
    columns = ALIGNMENT[RECIPE_NAMES.get(recipe, "delayed")]
    if others and isinstance(others[0], list | tuple):  # rows of each expert
        counts, tokens = list(others[0]), FP8_ROWS.get(recipe, FP8_ROWS_ELSE)
    else:
        counts = [rows.numel() // max(rows.shape[-1], 1)]
        least = TRAINING_ROWS if torch.is_grad_enabled() else FORWARD_ROWS
        tokens = least if columns <= TRAINING_ROWS else columns  # MXFP8: blocks of 32 rows in every pass
    widths = sorted({width for weight in layer.parameters(recurse=False) if weight.dim() > 1 for width in weight.shape})
    if any(count % tokens for count in counts) or any(width % columns for width in widths):
        raise NotDivisible(
            f"the layer {name or 'at the root'} was given {', '.join(map(str, counts))} rows, and its weights have "
            f"widths of {', '.join(map(str, widths))}: {recipe} takes rows in multiples of {tokens} and widths in "
            f"multiples of {columns}. Likely cause: a smaller last batch, or a vocabulary without padding. Next step: "
            "pad the rows, or keep this layer out of the low-precision scope."
        )


# --- recompute ---


class RecomputeOutOfOrder(BridgeError, RuntimeError):
    """A second pass to which Transformer Engine would give the scales of another first pass."""


def recompute(function: Callable[..., Any], *tensors: Any, use_reentrant: bool, tp_group: Any = None) -> Any:
    """Run `function(*tensors)` without saving activations, and run it again in the backward pass.

    Call it inside the low-precision scope; the second pass runs in the same scope. Without Transformer Engine it is
    torch's checkpoint.

    Args:
        function: of layers, with or without low precision.
        tensors: its arguments.
        use_reentrant: which of the two kinds, as in torch.
        tp_group: of the ranks that share a layer.

    Raises:
        RecomputeOutOfOrder: in the backward pass, under delayed scaling: an older pass of a layer was not run again.
    """
    if te.checkpoint() is None:
        return torch_checkpoint(function, *tensors, use_reentrant=use_reentrant)
    if not torch.is_grad_enabled():
        return function(*tensors)
    return te_recompute(_Passes(function), *tensors, use_reentrant=use_reentrant, tp_group=tp_group)


_numbers: Final = itertools.count()
_laid_aside: Final[WeakKeyDictionary[Any, deque[int]]] = WeakKeyDictionary()  # layer -> passes not recomputed yet


class _Passes:
    """A function that runs twice, and checks that its layers run again in the order of their first passes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._number, self._is_second = function, next(_numbers), False

    def __call__(self, *given: Any, **options: Any) -> Any:
        here, look = threading.get_ident(), self._take if self._is_second else self._lay_aside
        self._is_second = True
        handle = register_module_forward_pre_hook(
            lambda layer, _: look(layer) if threading.get_ident() == here else None
        )
        try:
            return self._function(*given, **options)
        finally:
            handle.remove()

    def _lay_aside(self, layer: Any) -> None:
        if hasattr(layer, "fp8_meta"):
            state = te_state()
            if state["enabled"] and state["recipe"].delayed():
                _laid_aside.setdefault(layer, deque()).append(self._number)

    def _take(self, layer: Any) -> None:
        passes = _laid_aside.get(layer)
        if passes is None or self._number not in passes:
            return
        if passes[0] != self._number:
            raise RecomputeOutOfOrder(
                f"a pass of {type(layer).__name__} is recomputed before an older pass, and would take the older pass's "
                "scales. Likely cause: one backward pass through several forward passes, or a forward pass without a "
                "backward pass. Next step: run the backward pass of each forward pass, the oldest first, and forward "
                "passes without gradients under torch.no_grad(); then start from the last checkpoint."
            )
        passes.popleft()
