"""`loss-gate`: whether each FP8 recipe trained as BF16 did."""

from pathlib import Path
from typing import Annotated

from .app import Result, verb


@verb("session:describe_losses")
def loss_gate(folder: Annotated[Path, "Folder of curves, as `fp8` leaves them beside its receipts."], /) -> Result:
    """Compare the loss of each FP8 recipe with BF16 on the same data and seeds.

    Exit code 0: every recipe follows. 1: one does not. 2: there is no such folder. 4: curves are missing, cannot be
    read, or cannot be compared.
    """
    from ..gate.loss import judge_folder

    return judge_folder(folder)
