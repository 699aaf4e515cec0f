"""The kinds of fault, and the one function that plants a row of `matrix/mutants.toml` in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..evidence.selftest import Fault, Mutant
from .faults_of_calls import (
    TENSOR_FAULTS,
    plant_answer,
    plant_entry_lost,
    plant_in_argument,
    plant_in_tensor,
    plant_item_lost,
    plant_kept,
    plant_mask_off_by_one,
    plant_skip,
)
from .faults_of_layers import (
    plant_bias_dropped,
    plant_experts_exchanged,
    plant_halves_swapped,
    plant_native_instead,
    plant_parameters_cloned,
    plant_parameters_fresh,
    plant_rope_late,
    plant_scope_ignored,
)
from .points import Trace, find_point

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
