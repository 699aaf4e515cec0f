"""The readers of `te_faults` under their earlier names."""

from .te_faults import FP8_FILE as FILE
from .te_faults import FP8_HELD_OUT as HELD_OUT
from .te_faults import Fp8Fault, read_fp8_faults

__all__ = ["FILE", "HELD_OUT", "Fp8Fault", "read_fp8_faults"]
