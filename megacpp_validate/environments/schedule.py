"""Which cell is started next: pure functions of what waits, what runs, and the room that there is.

Longest first, because what is started last decides when all is done; a cell that does not fit beside what runs is
passed over by those that do. Nothing starves: when nothing runs, the first that waits is started, even if it is bigger
than the whole room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..catalog.bridge import BridgeModule, ProbeCell
from ..evidence.receipt import Outcome, Receipt
from ..probes.order import Order

CONTEXT_MIB: Final = 1536.0  # of a CUDA context with cuBLAS, cuDNN and Triton loaded, beside what torch allocates
RESERVE: Final = 0.05  # of a card: what its driver and a screen take
_ONLY_TIMES: Final = 0.5  # of a whole run: what is judged is left out, importing and compiling are not
RAN_WHOLE: Final = frozenset({Outcome.PASS, Outcome.FAIL, Outcome.EXPECTED_UNSUPPORTED})


@dataclass(frozen=True)
class Need:
    """What one cell is expected to take.

    Attributes:
        memory_mib: of GPU memory at its peak.
        seconds: in all.
        kernels: a name for what it compiles at its first use; cells of one name find it in the cache when one has run.
    """

    memory_mib: float
    seconds: float
    kernels: str = ""


@dataclass(frozen=True)
class Room:
    """What all cells together may take at a time; `memory_mib` is None where no memory is counted."""

    jobs: int
    memory_mib: float | None = None


def order_longest_first(needs: Sequence[Need]) -> tuple[int, ...]:
    """Indices in the order in which cells are to be started; equals stay as they are."""
    return tuple(sorted(range(len(needs)), key=lambda index: -needs[index].seconds))


def choose_next(
    waiting: Sequence[Need], running: Sequence[Need], room: Room, compiled: Collection[str] = ()
) -> int | None:
    """Index of the cell that is to be started now, of those that wait; None where one that runs must end first.

    Of cells that compile the same kernels, one runs until they are compiled: side by side each would compile them all,
    and tune them against the others' load.

    Args:
        waiting, running: what each takes.
        room: what there is.
        compiled: names of kernels that a cell has compiled.
    """
    if not waiting or len(running) >= room.jobs:
        return None
    left = None if room.memory_mib is None else room.memory_mib - sum(need.memory_mib for need in running)
    compiling = {need.kernels for need in running} - {"", *compiled}
    fits = (
        index
        for index, need in enumerate(waiting)
        if need.kernels not in compiling and (left is None or need.memory_mib <= left)
    )
    return next(fits, None if running else 0)


def plan_room(cores: int, jobs: int, memory_mib: float, total_mib: float | None, free_mib: float | None) -> Room:
    """How many cells at a time, and how much memory of the card.

    Args:
        cores: that this process may use: importing torch and a vendor library takes one for 8 seconds a cell.
        jobs: what was asked for; 0 for what suits the cores, two of which are left to the tool and the system.
        memory_mib: what was asked for; 0 for what is free now, less a reserve.
        total_mib, free_mib: of the card; None where it tells neither, as one with unified memory does: then cells run
            one at a time.
    """
    if not memory_mib and (total_mib is None or free_mib is None):
        return Room(jobs=1)
    return Room(
        jobs=plan_jobs(cores, jobs),
        memory_mib=memory_mib or max(0.0, (free_mib or 0.0) - RESERVE * (total_mib or 0.0)),
    )


def plan_jobs(cores: int, jobs: int = 0) -> int:
    """How many cells at a time: what was asked for, else two less than there are cores."""
    return jobs or max(1, min(cores, 2), cores - 2)


def expect_need(order: Order, row: BridgeModule | ProbeCell, earlier: Mapping[str, Sequence[Receipt]]) -> Need:
    """What a cell is expected to take: what its row says, more where an earlier receipt says more.

    Args:
        order: the cell.
        row: of its bridge module, or of itself.
        earlier: receipts by probe, of any stack on the same target.
    """
    seen = [receipt for receipt in earlier.get(order.probe, ()) if receipt.outcome in RAN_WHOLE]
    # Resident memory of the process is what a receipt tells where there is no GPU.
    peaks = [receipt.peak_memory_mib for receipt in seen if receipt.machine.gpu]
    seconds = [receipt.seconds["total"] for receipt in seen if "total" in receipt.seconds]
    took = max(seconds, default=row.seconds)
    return Need(
        memory_mib=max([row.gpu_memory_mib, *peaks]) + CONTEXT_MIB,
        seconds=took * _ONLY_TIMES if order.only_times else took,
        kernels=f"{order.stack}/{order.probe}" if row.compiles else "",
    )
