"""Plant one mutant in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ...evidence.selftest import Fault, Mutant
from ..points import find_point
from ..trace import Trace
from .answers import plant_answer, plant_entry_lost, plant_item_lost, plant_kept, plant_skip
from .arguments import plant_in_argument, plant_mask_off_by_one
from .layers import (
    plant_bias_dropped,
    plant_experts_exchanged,
    plant_halves_swapped,
    plant_parameters_cloned,
    plant_parameters_fresh,
    plant_rope_late,
    plant_scope_ignored,
)
from .native_instead import plant_native_instead
from .tensors import TENSOR_FAULTS, plant_in_tensor

Planter = Callable[[Any, Mutant, Trace], Any]


PLANTERS: Final[dict[Fault, Planter]] = {
    **dict.fromkeys(TENSOR_FAULTS, plant_in_tensor),
    Fault.ARGUMENT: plant_in_argument,
    Fault.ARGUMENT_SCALED: plant_in_argument,
    Fault.ARGUMENT_LOST: plant_in_argument,
    Fault.ARGUMENT_ROLLED: plant_in_argument,
    Fault.MASK_OFF_BY_ONE: plant_mask_off_by_one,
    Fault.BIAS_DROPPED: plant_bias_dropped,
    Fault.HALVES_SWAPPED: plant_halves_swapped,
    Fault.EXPERTS_EXCHANGED: plant_experts_exchanged,
    Fault.ROPE_LATE: plant_rope_late,
    Fault.SCOPE_IGNORED: plant_scope_ignored,
    Fault.PARAMETERS_CLONED: plant_parameters_cloned,
    Fault.PARAMETERS_FRESH: plant_parameters_fresh,
    Fault.ITEM_LOST: plant_item_lost,
    Fault.ANSWERS: plant_answer,
    Fault.SKIPPED: plant_skip,
    Fault.OUTPUT_KEPT: plant_kept,
    Fault.NATIVE_INSTEAD: plant_native_instead,
    Fault.ENTRY_LOST: plant_entry_lost,
}


def plant(mutant: Mutant) -> Trace:
    """Plant a mutant for the rest of this process's life.

    Returns:
        What tells afterwards whether the planted code ever ran and changed something.

    Raises:
        PlantPointGone: its patch point is not there, or is not what the fault works on.
    """
    trace = Trace()
    point = find_point(mutant)
    if mutant.fault is Fault.MISSING:
        point.take_away(trace)
    else:
        point.put(PLANTERS[mutant.fault](point.value, mutant, trace))
    return trace
