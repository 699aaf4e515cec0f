"""Faults that are planted in a run which must find them, each a thing that goes wrong between ranks without a word.

A fault is written NAME, or NAME:STEP; it is planted on the last rank where it is one rank's. What finds it is in
matrix/smoke_faults.toml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..errors import TrainingError
from . import fault_plants as plants
from .order import SmokeOrder

if TYPE_CHECKING:
    from .trainer import SmokeTrainer

After = Callable[["SmokeTrainer"], None]
Needs = Callable[[SmokeOrder], str]
"""What a run lacks that a fault has its place in, in words; empty where it lacks nothing."""

_STEP: Final = 2  # where a fault of a single step is planted, where none is named


class UnknownFault(TrainingError, ValueError):
    """A fault that there is not, or that this run has no place for."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        plant: changes a trainer before its first step; gives what is called after each step, if anything.
        needs: what it has its place in, all of it.
        of_step: whether it is of a single step, which may be named.
    """

    plant: Callable[[Any, int], After | None]
    needs: tuple[Needs, ...] = ()
    of_step: bool = False


def plant(text: str, trainer: SmokeTrainer) -> After | None:
    """Plant a fault; what is to be called after each step, if anything.

    Args:
        text: name, and a step if it is of one; empty for none.
        trainer: of this rank, before its first step.

    Raises:
        UnknownFault: there is none of that name, or nothing in this run that could have it.
    """
    if not text:
        return None
    fault, step = read_fault(text)
    _refuse(text, fault, step, trainer.order)
    return fault.plant(trainer, step)


def refuse_fault(order: SmokeOrder) -> None:
    """Refuse an order whose fault has no place in it, before any process is started.

    Raises:
        UnknownFault: there is none of that name, or nothing in this run that could have it; all reasons are named.
    """
    if order.fault:
        _refuse(order.fault, *read_fault(order.fault), order)


def read_fault(text: str) -> tuple[Fault, int]:
    """The fault, and the step that it is planted in.

    Raises:
        UnknownFault: there is none of that name, or it is of no step and one is named, or that is no number.
    """
    name, colon, step = text.partition(":")
    if name not in FAULTS:
        raise UnknownFault(f"there is no fault {name!r}. Next step: choose one of {', '.join(FAULTS)}.")
    if colon and not (FAULTS[name].of_step and step.isdecimal()):
        steps = [known for known, fault in FAULTS.items() if fault.of_step]
        raise UnknownFault(
            f"the fault {text!r} cannot be read. Next step: write NAME, or NAME:STEP of one of {', '.join(steps)}."
        )
    return FAULTS[name], int(step or _STEP)


def _refuse(text: str, fault: Fault, step: int, order: SmokeOrder) -> None:
    lacking = [reason for need in fault.needs if (reason := need(order))]
    if fault.of_step and step >= order.steps:
        lacking.append(f"the run ends before its step {step}: train {step + 1} steps or more")
    if lacking:
        raise UnknownFault(f"the fault {text!r} has no place in this run. Next step: {'; '.join(lacking)}.")


def _several_ranks(order: SmokeOrder) -> str:
    return "" if order.read_plan().world > 1 else "plan with several ranks"


def _experts(order: SmokeOrder) -> str:
    return "" if "E" in order.read_size().letters else "train a pattern with an E"


def _two_experts(order: SmokeOrder) -> str:
    here = order.read_size().num_experts // order.read_plan().expert_parallel
    return "" if here > 1 else "leave 2 experts or more to a rank"


def _top_2(order: SmokeOrder) -> str:
    return "" if order.read_size().top_k == 2 else "send a token to 2 experts"


def _balance(order: SmokeOrder) -> str:
    return "" if order.read_size().aux_coefficient else "balance experts by a loss: aux_coefficient above 0"


def _bridge_dispatch(order: SmokeOrder) -> str:
    return "" if order.read_forms().moe == "bridge" else "take the form moe='bridge'"


def _exchange(order: SmokeOrder) -> str:
    return "" if order.read_plan().expert_parallel > 1 else "plan with expert_parallel of 2 or more"


def _same_experts(order: SmokeOrder) -> str:
    plan = order.read_plan()
    holders = plan.mesh_shape[0] * (plan.tensor_parallel if plan.sequence_parallel else 1)
    return "" if holders > 1 else "let several ranks hold the same experts: data above expert_parallel"


def _positions(order: SmokeOrder) -> str:
    return "" if order.read_plan().sequence_parallel else "plan with sequence_parallel"


def _readers(order: SmokeOrder) -> str:
    return "" if order.read_plan().data > 1 else "plan with data of 2 or more"


def _passes(order: SmokeOrder) -> str:
    return "" if order.read_plan().accumulate > 1 else "plan with accumulate of 2 or more"


def _amax(order: SmokeOrder) -> str:
    return "" if order.recipe == "delayed" else "train in the precision delayed"


def _mtp(order: SmokeOrder) -> str:
    size = order.read_size()
    return "" if size.mtp and 0 < size.mtp_coefficient < 0.5 else "train with mtp, its coefficient below 0.5"


def _checkpoints(order: SmokeOrder) -> str:
    return "" if order.checkpoint_folder else "name a checkpoint_folder"


def _resumes(order: SmokeOrder) -> str:
    return "" if order.resume else "resume a run"


def _evaluations(order: SmokeOrder) -> str:
    return "" if order.validate_every else "evaluate: validate_every above 0"


def _two_layers(order: SmokeOrder) -> str:
    return "" if len(order.read_size().letters) > 1 else "train a pattern of 2 layers or more"


_LAYER_OF_EXPERTS: Final = (_experts, _several_ranks)
FAULTS: Final[dict[str, Fault]] = {
    "experts-not-synchronised": Fault(plants.keep_experts_apart, (_experts, _same_experts)),
    "norm-gradient-not-summed": Fault(plants.leave_norm_out, (_positions,)),
    "token-dropped": Fault(plants.drop_token, (*_LAYER_OF_EXPERTS, _bridge_dispatch)),
    "rows-swapped": Fault(plants.swap_rows, (_experts, _exchange)),
    "experts-swapped": Fault(plants.swap_experts, (*_LAYER_OF_EXPERTS, _two_experts)),
    "weights-exchanged": Fault(plants.exchange_weights, (*_LAYER_OF_EXPERTS, _bridge_dispatch, _top_2)),
    "expert-without-gradient": Fault(plants.stop_expert, _LAYER_OF_EXPERTS),
    "balance-not-shared": Fault(plants.keep_balance_apart, (*_LAYER_OF_EXPERTS, _balance)),
    "wrong-sequences": Fault(plants.read_as_first, (_readers,)),
    "pass-lost": Fault(plants.lose_passes, (_passes,)),
    "gradients-averaged": Fault(plants.average_gradients, (_readers,)),
    "block-gradient-lost": Fault(plants.lose_block, (_readers, _two_layers)),
    "mtp-counted-twice": Fault(plants.count_mtp_twice, (_mtp,)),
    "shard-not-updated": Fault(plants.skip_update, (_readers, _two_layers), of_step=True),
    "learning-rate-apart": Fault(plants.raise_rate, (_several_ranks,)),
    "wrong-amax-group": Fault(plants.scale_alone, (_several_ranks, _amax)),
    "evaluation-moves-data": Fault(plants.move_data_by_evaluation, (_evaluations,), of_step=True),
    "stale-checkpoint": Fault(plants.save_old_weights, (_checkpoints,), of_step=True),
    "nan": Fault(plants.make_nan, (_two_layers,), of_step=True),
    "dies": Fault(plants.die, (_several_ranks,), of_step=True),
    "hangs": Fault(plants.hang, (_several_ranks,), of_step=True),
    "rope-reversed": Fault(plants.reverse_rope, (_several_ranks,)),
    "router-drawn-apart": Fault(plants.draw_router_apart, _LAYER_OF_EXPERTS),
    "gradient-infinite": Fault(plants.make_infinite_gradient, (_two_layers,), of_step=True),
    "expert-gradients-late": Fault(plants.delay_expert_gradients, _LAYER_OF_EXPERTS),
    "weight-bit-flipped": Fault(plants.flip_bit, (_several_ranks,), of_step=True),
    "moments-lost": Fault(plants.lose_moments, (_resumes,)),
    "data-from-the-start": Fault(plants.read_from_the_start, (_resumes,)),
}
