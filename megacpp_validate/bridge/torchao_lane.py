"""The torchao lane: Float8Linear under FSDP2 and torch.compile, in the one order that works.

    meta device -> convert -> fully_shard -> materialise -> compile -> train

Converted after sharding, a layer's weight is a DTensor that FSDP goes on gathering in bf16, or none that it knows of;
compiled before, the graph holds the layer that was there before; not on meta, a rank holds the whole model once. Each
of these trains, and is wrong. So each step looks at the model, not at what was called: what was done behind the lane's
back counts. (https://docs.pytorch.org/ao/stable/workflows/training.html, and torchtitan's float8 guide.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch

from .errors import BridgeError
from .float8_gemms import SeenGemms, find_missing, see_gemms
from .torchao import (
    IN_FP8,
    Float8Plan,
    convert_to_float8_training,
    float8_config,
    float8_linear,
    plan_float8,
    precompute_scales,
    refuse,
    why_not_float8,
)
from .walk_rules import PROJECTIONS

# --- model history ----------------------------------------------------------------------------------------------------
# What was done to a model, seen on the model: compiled, sharded, given memory. Whoever did it.
#
# torch's sharding is imported when it is asked about: it takes a second, which everybody who imports the bridge would
# wait.


def why_compiled(model: Any) -> str:
    """Which module torch.compile took, as a wrapper or in place; empty where it took none."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return f"`{name or 'the model'}` is compiled already"
    return ""


def why_sharded(model: Any) -> str:
    """Which module FSDP took; empty where it took none."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for name, module in model.named_modules():
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            return f"`{name or 'the model'}` is sharded by FSDP already"
    return ""


def why_parallel(model: Any) -> str:
    """Which parameter is a DTensor, by FSDP or a tensor-parallel plan; empty where none is."""
    from torch.distributed.tensor import DTensor

    found = next((name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)), None)
    return f"`{found}` is a DTensor already" if found is not None else ""


def sharded_modules(model: Any) -> frozenset[str]:
    """Names of the modules that FSDP2 manages."""
    from torch.distributed.fsdp import FSDPModule

    return frozenset(name for name, module in model.named_modules() if isinstance(module, FSDPModule))


def unsharded(model: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Those of these layers whose weight no FSDP2 module around them shards."""
    from torch.distributed.tensor import DTensor

    around = sharded_modules(model)
    return tuple(
        name
        for name in names
        if not isinstance(model.get_submodule(name).weight, DTensor)
        or not any(f"{name}.".startswith(f"{one}." if one else "") for one in around)
    )


def why_not_meta(model: Any) -> str:
    """Which parameter or buffer has memory; empty where all are on meta."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta:
            return f"`{name}` is on {tensor.device}, not on meta"
    return ""


# --- torchao lane -----------------------------------------------------------------------------------------------------


Step = Literal["convert", "fully_shard", "materialise", "compile", "train"]
ORDER: Final[tuple[Step, ...]] = get_args(Step)
_SCALE_TOLERANCE: Final = 2.0**-20  # a scale is one division: fp32 and fp64 differ by a rounding, 2^-24


class WrongOrder(BridgeError, RuntimeError):
    """A step of the lane out of its order, by the lane or behind its back."""


class LaneLost(BridgeError, RuntimeError):
    """A layer that was converted and is no Float8Linear any more, has another recipe, or did not run in FP8."""


@dataclass(frozen=True)
class StaleScale:
    """A weight whose scale for the next all-gather is not that of its values.

    Attributes:
        name: of the layer.
        found: the scale that is there; None where there is none.
        wanted: the largest FP8 value over the weight's largest magnitude.
    """

    name: str
    found: float | None
    wanted: float


class Float8Lane:
    """A model on its way to FP8 training; each step once and in the order of `ORDER`.

    Args:
        model: all of it on the meta device, not sharded, not compiled.
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp".
        device: where it will train.
        include: the whitelist of layers, as `plan_walk` takes it.
        float8_all_gather: FSDP gathers weights in FP8; then `after_step` must follow each step of the optimizer.
        emulate: as `why_not_float8`.

    Raises:
        WrongOrder: the model was materialised, converted, sharded or compiled before.
        WrongTarget: torchao or FP8 is not here.
        UnknownName, WrongOption: as `plan_float8` and `float8_config`.
    """

    def __init__(
        self,
        model: Any,
        recipe: str,
        *,
        device: Any,
        include: Sequence[str | type] = PROJECTIONS,
        float8_all_gather: bool = False,
        emulate: bool = False,
    ) -> None:
        refusal = why_not_float8(device, emulate=emulate)
        if refusal is not None:
            refuse(refusal)
        self.model: Final = model
        self.device: Final = torch.device(device)
        self.float8_all_gather: Final = float8_all_gather
        self._next: Step = "convert"
        self._sharded: frozenset[str] = frozenset()
        self._due = False
        self._look("convert")
        self.plan: Final[Float8Plan] = plan_float8(model, recipe, include=include)
        self._config = float8_config(self.plan.recipe, float8_all_gather=float8_all_gather, emulate=emulate)

    @property
    def next_step(self) -> Step:
        """The step that is to follow."""
        return self._next

    @property
    def converted(self) -> dict[str, Any]:
        """Name -> module, of the layers that the plan converts, as they are now."""
        return {name: self.model.get_submodule(name) for name in self.plan.names}

    def convert(self) -> None:
        """`convert_to_float8_training` on the layers of the plan, and that these and no others are Float8Linear now.

        Raises:
            WrongOrder: not the next step, or the model is not what it was.
            LaneLost: torchao converted other layers than those of the plan.
        """
        self._start("convert")
        names = frozenset(self.plan.names)
        convert_to_float8_training.require()(
            self.model, module_filter_fn=lambda _, name: name in names, config=self._config
        )
        self._hold()
        self._next = "fully_shard"

    def fully_shard(self, shard: Callable[[Any], object]) -> None:
        """FSDP2 on the converted model, by the caller's own rule.

        Args:
            shard: calls `torch.distributed.fsdp.fully_shard` on the blocks and then on the model that it is given.

        Raises:
            WrongOrder: not the next step, or a converted layer is not sharded afterwards.
        """
        self._start("fully_shard")
        shard(self.model)
        whole = unsharded(self.model, self.plan.names)
        if whole:
            raise WrongOrder(
                f"after the step fully_shard the weight of `{whole[0]}` is not sharded ({len(whole)} such). Likely "
                "cause: the rule shards some blocks and not the model around them. Next step: call fully_shard on the "
                "model last."
            )
        self._hold()
        self._sharded = sharded_modules(self.model)
        self._next = "materialise"

    def materialise(self, initialise: Callable[[Any], object]) -> None:
        """Memory on the device, and values.

        Args:
            initialise: writes every parameter and buffer of the model that it is given, each rank its own shard.

        Raises:
            WrongOrder: not the next step.
        """
        self._start("materialise")
        self.model.to_empty(device=self.device)
        with torch.no_grad():
            initialise(self.model)
        self._hold()
        self._next = "compile"
        if self.float8_all_gather:
            self._precompute()

    def compile(self, **options: Any) -> Any:
        """`torch.compile` of the model, as the last step before training.

        Args:
            options: of `torch.compile`.

        Returns:
            The compiled model, which shares the parameters.

        Raises:
            WrongOrder: not the next step.
        """
        self._start("compile")
        compiled = torch.compile(self.model, **options)
        self._next = "train"
        return compiled

    def require_ready(self) -> None:
        """Hold the model to the whole order before the first step of training.

        Raises:
            WrongOrder: a step is missing, or one was taken behind the lane's back.
            LaneLost: a layer was swapped back.
        """
        if self._next != "train":
            raise _order("train", self._next, f"the step {self._next} was not taken")
        self._look("train")

    def require_fp8(self, run: Callable[[], Any], rows: int, *, without_dgrad: Sequence[str] = ()) -> SeenGemms:
        """Hold one step of training to the recipe: every product of every converted layer ran as it says.

        Args:
            run: forward and backward of the compiled model, once warm; slow, because a profiler looks on.
            rows: that each converted layer is given; best none of the widths, which tells the products apart.
            without_dgrad: layers whose input wants no gradient.

        Raises:
            LaneLost: a product fell back to another precision, or nothing compiled ran; the text names the layers.
        """
        self.require_ready()
        seen = see_gemms(run)
        widths = {name: (layer.in_features, layer.out_features) for name, layer in self.converted.items()}
        missing = find_missing(widths, rows, IN_FP8[self.plan.recipe], seen, without_dgrad=without_dgrad)
        wrong = [one.say() for one in missing]
        if not seen.compiled_regions:
            wrong.append("no compiled code ran")
        if wrong:
            raise LaneLost(
                f"the torchao lane fell back ({self.plan.recipe}): {'; '.join(wrong)}. Likely cause: a graph of "
                "before the conversion, a forward that was replaced, or compiling that gave up. Next step: look for "
                "what the layers named here share, and run with TORCH_LOGS=graph_breaks,recompiles."
            )
        return seen

    def attach(self, optimizer: Any) -> Any:
        """Call `after_step` after every step of an optimizer; gives the handle that takes it off again."""
        return optimizer.register_step_post_hook(lambda *_: self.after_step())

    def remind(self, optimizer: Any) -> tuple[Any, Any]:
        """Hold the caller to `after_step`: the next step of the optimizer raises where it was not called in between.

        Args:
            optimizer: of the model; only where weights are gathered in FP8 is there anything to forget.

        Returns:
            The handles that take both hooks off again.
        """

        def hold(*_: Any) -> None:
            if self._due:
                raise WrongOrder(
                    "the optimizer steps again and after_step was not called since its last step: the weights were "
                    "gathered with the scales of older values. Likely cause: a training loop written for bf16. Next "
                    "step: call after_step after each step, or attach the optimizer to the lane."
                )

        def note(*_: Any) -> None:
            self._due = self.float8_all_gather

        return optimizer.register_step_pre_hook(hold), optimizer.register_step_post_hook(note)

    def after_step(self) -> None:
        """Scales of the next all-gather, by one all-reduce: `precompute_float8_dynamic_scale_for_fsdp`.

        Nothing where weights are gathered in bf16.

        Raises:
            WrongOrder: before the model is ready.
        """
        if self._next != "train":
            raise _order("after_step", self._next, f"the step {self._next} was not taken")
        if self.float8_all_gather:
            self._precompute()

    def stale_scales(self) -> tuple[StaleScale, ...]:
        """Weights whose scale is not that of their values: the optimizer stepped and `after_step` was not called.

        Reads values from the device and reduces over the ranks that share a weight: for a check, not for each step. All
        ranks must call it. () where weights are gathered in bf16.
        """
        if not self.float8_all_gather:
            return ()
        found = []
        for name, layer in self.converted.items():
            weight, scale = layer.weight, layer.weight._local_tensor._precomputed_scale
            amax = float(torch._foreach_norm([weight.detach()], ord=float("inf"))[0].full_tensor())
            wanted = torch.finfo(layer.config.cast_config_weight.target_dtype).max / max(amax, 1e-12)
            seen = None if scale is None else float(scale)
            if seen is None or abs(seen - wanted) > _SCALE_TOLERANCE * wanted:
                found.append(StaleScale(name, seen, wanted))
        return tuple(found)

    def _precompute(self) -> None:
        precompute_scales.require()(self.model)
        self._due = False

    def _start(self, step: Step) -> None:
        if step != self._next:
            done = ORDER.index(step) < ORDER.index(self._next)
            what = "it was taken before" if done else f"the step {self._next} was not taken"
            raise _order(step, self._next, what)
        self._look(step)

    def _look(self, step: Step) -> None:
        """Hold the model to what it must be before a step, whoever touched it."""
        wrong = (
            why_compiled(self.model)
            or (step in ("convert", "fully_shard") and (why_sharded(self.model) or why_not_meta(self.model)))
            or (step == "convert" and (why_parallel(self.model) or _why_converted(self.model)))
        )
        if wrong:
            raise _order(step, step, str(wrong))
        if step != "convert":
            self._hold()
        if step in ("materialise", "compile", "train") and sharded_modules(self.model) != self._sharded:
            raise _order(step, step, "FSDP was put around other modules than in the step fully_shard")

    def _hold(self) -> None:
        """Hold the layers to the plan: these are Float8Linear of this recipe, and no others are."""
        kind = float8_linear.require()
        lost = [name for name, layer in self.converted.items() if type(layer) is not kind]
        others = [name for name, layer in self.model.named_modules() if isinstance(layer, kind)]
        other = sorted(set(others) - set(self.plan.names))
        if lost or other:
            what = f"`{lost[0]}` is no Float8Linear" if lost else f"`{other[0]}` is a Float8Linear that no plan names"
            raise LaneLost(
                f"{what} ({len(lost)} lost, {len(other)} more than planned). Likely cause: the layer was put in or "
                "swapped back by other code. Next step: let the lane convert it, and change the whitelist instead."
            )
        changed = [name for name, layer in self.converted.items() if layer.config != self._config]
        if changed:
            raise LaneLost(
                f"`{changed[0]}` has another configuration than the recipe {self.plan.recipe} ({len(changed)} such). "
                "Likely cause: converted a second time. Next step: convert once."
            )


def _order(step: str, wanted: str, what: str) -> WrongOrder:
    order = " -> ".join(("meta device", *ORDER))
    follow = (
        f"take {wanted}" if wanted != step else "build the model anew on the meta device and take the steps in order"
    )
    return WrongOrder(
        f"the step {step} of the torchao lane cannot be taken: {what}. The order is {order}. Likely cause: a step "
        f"taken early, twice, or by other code. Next step: {follow}."
    )


def _why_converted(model: Any) -> str:
    kind = float8_linear.require()
    found = next((name for name, module in model.named_modules() if isinstance(module, kind)), None)
    return f"`{found}` is a Float8Linear already" if found is not None else ""
