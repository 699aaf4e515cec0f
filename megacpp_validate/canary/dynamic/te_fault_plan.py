"""Which faults are planted for the blame score, in which copies, and what runs on each. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from ...catalog.te_faults import TeFault

Item = TypeVar("Item")

CLEAN: Final = "clean"  # runs of the copied folder itself: without speeds,
CLEAN_TIMED: Final = "clean-timed"  # with speeds,
CLEAN_AGAIN: Final = "clean-again"  # and with speeds a second time


class UnknownFault(ValueError):
    """Faults, a release or a shard that there are not; the text says which there are."""


@dataclass(frozen=True)
class Control:
    """A copy without a fault; its seed is its own, so that it is a draw of its own."""

    name: str
    seed: int
    timed: bool


@dataclass(frozen=True)
class CopyRun:
    """Every probe once, in one copy of a release.

    Attributes:
        name: of its folder below that of the release.
        fault: what is planted; None in a clean one.
        copied: whether it runs in a copy; else in the folder that the copies are made of.
        seed: of weights and inputs.
        times: whether speeds are what it is about; then nothing is judged beside them.
        against: name of the clean run that it is compared with; empty for a clean run itself.
    """

    name: str
    fault: TeFault | None = None
    copied: bool = False
    seed: int = 0
    times: bool = False
    against: str = ""


@dataclass(frozen=True)
class Plan:
    """What is planted in one release.

    Attributes:
        release: of Transformer Engine.
        seed: of the clean runs and the faults.
        faults: in the order of the matrix.
        controls: copies without a fault.
    """

    release: str
    seed: int
    faults: tuple[TeFault, ...]
    controls: tuple[Control, ...]

    @property
    def runs(self) -> tuple[CopyRun, ...]:
        """The clean runs that something is compared with, then every copy.

        What is timed has clean runs of its own: one to compare with, and a second one for the noise of the card.
        """
        timed = [*(fault.times for fault in self.faults), *(control.timed for control in self.controls)]
        clean = [] if all(timed) else [CopyRun(CLEAN, seed=self.seed)]
        if any(timed):
            clean.append(CopyRun(CLEAN_TIMED, seed=self.seed, times=True))
            clean.append(CopyRun(CLEAN_AGAIN, seed=self.seed, times=True))
        return (*clean, *map(self.run_of, self.faults), *map(self.run_of, self.controls))

    def run_of(self, row: TeFault | Control) -> CopyRun:
        """The run of a fault or a control."""
        if isinstance(row, Control):
            against = CLEAN_TIMED if row.timed else CLEAN
            return CopyRun(f"controls/{row.name}", copied=True, seed=row.seed, times=row.timed, against=against)
        against = CLEAN_TIMED if row.times else CLEAN
        return CopyRun(f"faults/{row.id}", fault=row, copied=True, seed=self.seed, times=row.times, against=against)


def plan_score(
    faults: Sequence[TeFault],
    release: str,
    wanted: Collection[str] = (),
    *,
    shard: tuple[int, int] = (1, 1),
    controls: int = 0,
    timed_controls: int = 0,
    seed: int = 0,
) -> Plan:
    """What is planted in a release.

    Args:
        faults: of the matrix.
        release: of Transformer Engine.
        wanted: ids; all of the release where there is none.
        shard: (I, N): every N-th of them from the I-th on, counted from 1. All shards together are the whole, and each
            has about as many timed rows as the others.
        controls, timed_controls: copies without a fault, of all shards together.
        seed: of the clean run and the faults; controls take those after it.

    Raises:
        UnknownFault: an id, a release or a shard that there is not.
    """
    known = {fault.id: fault for fault in faults}
    if unknown := sorted(set(wanted) - set(known)):
        raise UnknownFault(
            f"there is no fault {', '.join(map(repr, unknown))}. Next step: choose from the ids in "
            "matrix/te_faults.toml."
        )
    if not 1 <= shard[0] <= shard[1]:
        raise UnknownFault(f"there is no shard {shard[0]} of {shard[1]}. Next step: --shard I/N with I from 1 to N.")
    there = [fault for fault in faults if release in fault.releases]
    if not there:
        releases = sorted({release for fault in faults for release in fault.releases})
        raise UnknownFault(
            f"no fault is written for Transformer Engine {release}. Next step: choose one of {', '.join(releases)}, "
            "or give rows of matrix/te_faults.toml a text for it."
        )
    for name in wanted:
        if release not in known[name].releases:
            raise UnknownFault(
                f"the fault {name!r} is not written for {release}, only for {', '.join(known[name].releases)}. Next "
                "step: choose one of those releases with --release."
            )
    chosen = [fault for fault in there if not wanted or fault.id in wanted]
    # The timed ones apart, because each of them holds the device alone for seconds.
    rows = _take_shard([fault for fault in chosen if not fault.times], shard)
    rows += _take_shard([fault for fault in chosen if fault.times], shard)
    order = {fault.id: index for index, fault in enumerate(faults)}
    plain = [Control(f"control-{number}", seed + number, False) for number in range(1, controls + 1)]
    timed = [
        Control(f"control-timed-{number}", seed + controls + number, True) for number in range(1, timed_controls + 1)
    ]
    return Plan(
        release,
        seed,
        tuple(sorted(rows, key=lambda fault: order[fault.id])),
        (*_take_shard(plain, shard), *_take_shard(timed, shard)),
    )


def _take_shard(rows: Sequence[Item], shard: tuple[int, int]) -> list[Item]:
    return list(rows[shard[0] - 1 :: shard[1]])
