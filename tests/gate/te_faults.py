"""Faults planted in a run of the loss gate on the real Transformer Engine, from outside of the library.

    python tests/gate/te_faults.py FAULT RECIPE SEED STEPS FOLDER

trains one curve with the fault in it, on the GPU that is there, and writes FOLDER/RECIPE-FAULT-SEED.json. `none` plants
nothing. What is planted is in Transformer Engine or in what the trainer does with gradients; the model, the data and
what is recorded stay as they are.

| fault         | what is done                                                                                     |
|---------------|--------------------------------------------------------------------------------------------------|
| e4m3_grad     | the recipe's format is E4M3 both ways                                                            |
| e5m2_act      | inputs of the layers are cast to E5M2; a product of two E5M2 operands, which cuBLAS has not, is  |
|               | made of their values in bf16                                                                     |
| frozen        | scales and histories are never updated: every scale stays 1                                      |
| no_roll       | the row of the step at hand is never moved on and never cleared; the scale is of its maximum     |
| zero_layer    | the gradients of the A-layer in low precision are zeros                                          |
| backward_1.03 | the loss is scaled by 1.03 before backward                                                       |
| loss_1.03     | the same, and it is reported scaled as well                                                      |
| cut           | the run ends ten steps early                                                                     |
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from megacpp_validate.bridge import fp8_scope, te_fp8
from megacpp_validate.bridge import imports as te
from megacpp_validate.evidence.loss_curve import LossCurve, write_curve
from megacpp_validate.training.gate_run import GateRun, GateTrainer

SCALED: Final = 1.03
CUT: Final = 10


def plant_e4m3_gradients() -> None:
    def delayed(*, reduce_amax: bool = True) -> Any:
        recipe = te_fp8.te_delayed_scaling(reduce_amax=reduce_amax)
        recipe.fp8_format = te_fp8.te_format("E4M3")
        return recipe

    def current() -> Any:
        return te.float8_current_scaling.require()(fp8_format=te_fp8.te_format("E4M3"))

    fp8_scope.te_delayed_scaling, fp8_scope.te_current_scaling = delayed, current


def plant_e5m2_activations() -> None:
    from transformer_engine.pytorch import quantization

    tex = sys.modules["transformer_engine_torch"]  # the extension, which the import above loads

    for name in ("DelayedScalingRecipeState", "Float8CurrentScalingRecipeState"):
        state = getattr(quantization, name)
        state.make_quantizers = _with_e5m2_inputs(state.make_quantizers)
    one, grouped = tex.generic_gemm, tex.te_general_grouped_gemm

    def gemm(a: Any, transa: bool, b: Any, transb: bool, *rest: Any, **named: Any) -> Any:
        if _is_e5m2(a) and _is_e5m2(b):
            a, b = _plain(a), _plain(b)
        return one(a, transa, b, transb, *rest, **named)

    def grouped_gemm(a: Any, transa: bool, b: Any, transb: bool, *rest: Any, **named: Any) -> Any:
        if all(map(_is_e5m2, (*a, *b))):
            a, b = [*map(_plain, a)], [*map(_plain, b)]
        return grouped(a, transa, b, transb, *rest, **named)

    tex.generic_gemm, tex.te_general_grouped_gemm = gemm, grouped_gemm
    _cast_behind_norms(lambda rows, quantizer: quantizer(rows))  # there is no norm with an E5M2 output


def _with_e5m2_inputs(make: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    def made(state: Any) -> list[Any]:
        quantizers = make(state)
        if state.mode == "forward":
            for quantizer in quantizers[::3]:  # of each product's input, weight and output
                quantizer.dtype = type(quantizer.dtype).kFloat8E5M2
        return quantizers

    return made


def _cast_behind_norms(cast: Callable[[Any, Any], Any]) -> None:
    """Layers that norm and cast in one kernel do it in two, the second of which is `cast(rows, quantizer)`."""
    from transformer_engine.pytorch.module import layernorm_linear, layernorm_mlp

    def apart(plain: Callable[..., Any]) -> Callable[..., Any]:
        def normed(*given: Any) -> Any:
            quantizer = given[5]
            rows, *kept = plain(*given[:5], None, *given[6:])
            return (rows if quantizer is None else cast(rows, quantizer)), *kept

        return normed

    for module in (layernorm_linear, layernorm_mlp):
        module.apply_normalization = apart(module.apply_normalization)


def _is_e5m2(tensor: Any) -> bool:
    return getattr(getattr(tensor, "_fp8_dtype", None), "name", "") == "kFloat8E5M2"


def _plain(tensor: Any) -> Any:
    """The values of a Float8 tensor in bf16, whichever of its two layouts it has."""
    if tensor._data is not None:
        payload = tensor._data.view(torch.float8_e5m2)
    else:
        payload = tensor._transpose.view(torch.float8_e5m2).movedim(0, -1)
    return (payload.float() * tensor._scale_inv.float()).bfloat16().contiguous()


def plant_frozen_scales() -> None:
    manager = te.fp8_state_manager.require()
    manager.reduce_and_update_fp8_tensors = classmethod(lambda _, forward=True: None)


def plant_history_that_never_rolls() -> None:
    manager = te.fp8_state_manager.require()

    def update(cls: Any, forward: bool = True) -> None:
        held = getattr(cls, "quantization_state", cls)
        for key, histories in held.global_amax_history_buffer.items():
            if key.startswith("forward") is not forward:
                continue
            largest = 448.0 if forward else 57344.0
            for history, scale in zip(histories, held.global_scale_buffer[key], strict=True):
                amax = history.amax(0)
                scale.copy_(torch.where(amax > 0, largest / amax, scale))

    manager.reduce_and_update_fp8_tensors = classmethod(update)


class _Zeroing(GateTrainer):
    """One layer's gradients are zeros."""

    def __init__(self, run: GateRun) -> None:
        super().__init__(run)
        for parameter in self.model.hybrid.layers[3].parameters():
            parameter.register_hook(torch.zeros_like)


class _Scaling(GateTrainer):
    """The loss is scaled before backward."""

    def __init__(self, run: GateRun) -> None:
        super().__init__(run)
        plain = self.model.losses

        def losses(*inputs: Any, **named: Any) -> Any:
            made = plain(*inputs, **named)
            return replace(made, total=made.total * SCALED)

        self.model.losses = losses


FAULTS: Final[dict[str, tuple[Callable[[], None], type[GateTrainer]]]] = {
    "none": (lambda: None, GateTrainer),
    "e4m3_grad": (plant_e4m3_gradients, GateTrainer),
    "e5m2_act": (plant_e5m2_activations, GateTrainer),
    "frozen": (plant_frozen_scales, GateTrainer),
    "no_roll": (plant_history_that_never_rolls, GateTrainer),
    "zero_layer": (lambda: None, _Zeroing),
    "backward_1.03": (lambda: None, _Scaling),
}


def as_scaled_report(curve: LossCurve) -> LossCurve:
    """`loss_1.03` of a curve of `backward_1.03`."""
    return replace(curve, losses=tuple(SCALED * value for value in curve.losses))


def as_cut(curve: LossCurve) -> LossCurve:
    """`cut` of a whole curve."""
    kept = slice(0, -CUT)
    return replace(
        curve,
        steps=curve.steps[kept],
        losses=curve.losses[kept],
        gradient_norms=curve.gradient_norms[kept],
        part_losses={name: values[kept] for name, values in curve.part_losses.items()},
        part_norms={name: values[kept] for name, values in curve.part_norms.items()},
    )


def main(arguments: list[str]) -> None:
    fault, recipe, seed, steps, folder = arguments
    if fault not in FAULTS:
        sys.exit(f"FAULT is one of {', '.join(FAULTS)}")
    plant, trainer = FAULTS[fault]
    plant()
    torch.set_num_threads(1)
    path, started = Path(folder) / f"{recipe}-{fault}-{seed}.json", time.perf_counter()

    def keep(made: GateTrainer, step: int) -> None:
        if step % 100 == 99:  # what was trained until a run is ended from outside
            write_curve(made.curve(), path)
            sys.stderr.write(f"{recipe} {fault} {seed}: step {step}, {time.perf_counter() - started:.1f} s\n")

    write_curve(trainer(GateRun(recipe, int(seed), steps=int(steps))).train(keep), path)


if __name__ == "__main__":
    main(sys.argv[1:])
