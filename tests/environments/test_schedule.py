"""Which cell is started next: never over budget, nothing starves, the longest first."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.environments.schedule import (
    CONTEXT_MIB,
    GpuMemory,
    Need,
    Room,
    choose_next,
    expect_need,
    order_longest_first,
    plan_jobs,
    plan_room,
    read_gpu_memory,
    read_gpus,
)
from megacpp_validate.evidence.receipt import Machine, Outcome, Receipt
from megacpp_validate.probes.order import Order, Target

H200 = Target("h200", "sm_90")


def needs(*memory: float) -> list[Need]:
    return [Need(mib, 10.0) for mib in memory]


CHOICES: dict[str, tuple[list[Need], list[Need], Room, int | None]] = {
    "first": (needs(100, 100), [], Room(4, 1000), 0),
    "no-job-left": (needs(100), needs(100, 100), Room(2, 1000), None),
    "none-waits": ([], needs(100), Room(2, 1000), None),
    "fits-to-the-last-mib": (needs(400), needs(600), Room(2, 1000), 0),
    "does-not-fit": (needs(401), needs(600), Room(2, 1000), None),
    "the-next-that-fits": (needs(900, 401, 400, 10), needs(600), Room(2, 1000), 2),
    "bigger-than-all-waits-for-all": (needs(2000), needs(1), Room(2, 1000), None),
    "bigger-than-all-runs-alone": (needs(2000), [], Room(2, 1000), 0),
    "others-before-what-is-bigger-than-all": (needs(2000, 10), [], Room(2, 1000), 1),
    "none-beside-what-is-bigger-than-all": (needs(0), needs(2000), Room(2, 1000), None),
    "a-card-that-is-full": (needs(500, 100), [], Room(2, 0), 0),
    "a-gpu-of-its-own": ([Need(0, 9, gpus=2), Need(0, 1, gpus=1)], [Need(0, 9, gpus=1)], Room(3, gpus=("0", "1")), 1),
    "no-gpu-left": ([Need(0, 9, gpus=1)], [Need(0, 9, gpus=1)], Room(3, gpus=("0",)), None),
    "more-gpus-than-there-are-runs-alone": ([Need(0, 9, gpus=4)], [], Room(3, gpus=("0",)), 0),
    "memory-is-not-counted": (needs(10**9), needs(10**9), Room(2), 0),
}


@pytest.mark.parametrize(("waiting", "running", "room", "chosen"), CHOICES.values(), ids=CHOICES)
def test_which_cell_is_started(waiting: list[Need], running: list[Need], room: Room, chosen: int | None) -> None:
    assert choose_next(waiting, running, room) == chosen


A, B, PLAIN = Need(0.0, 10.0, "a"), Need(0.0, 10.0, "b"), Need(0.0, 10.0)
KERNELS: dict[str, tuple[list[Need], list[Need], set[str], int | None]] = {
    "one-compiles": ([A], [A], set(), None),
    "others-pass-it": ([A, B, PLAIN], [A, PLAIN], set(), 1),
    "nothing-to-compile": ([PLAIN], [A, PLAIN], set(), 0),
    "compiled": ([A], [A], {"a"}, 0),
    "compiled-by-others": ([A, B], [A, B], {"b"}, 1),
    "none-runs": ([A, A], [], set(), 0),
}


@pytest.mark.parametrize(("waiting", "running", "compiled", "chosen"), KERNELS.values(), ids=KERNELS)
def test_kernels_are_compiled_by_one(
    waiting: list[Need], running: list[Need], compiled: set[str], chosen: int | None
) -> None:
    assert choose_next(waiting, running, Room(8), compiled) == chosen
    assert choose_next(waiting, running, Room(8, 100.0), compiled) == chosen


MEMORY = st.one_of(st.integers(0, 3000), st.just(0)).map(float)
NEEDS = st.lists(st.builds(Need, MEMORY, st.integers(0, 60).map(float)), max_size=40)
ROOMS = st.builds(Room, st.integers(1, 16), st.one_of(st.none(), st.integers(0, 4000).map(float)))


def simulate(every: list[Need], room: Room) -> list[tuple[float, int, list[int]]]:
    """Run them on a clock of its own: when each was started, and beside which others."""
    waiting = list(order_longest_first(every))
    running: dict[int, float] = {}
    now, started = 0.0, []
    while waiting or running:
        while (found := choose_next([every[i] for i in waiting], [every[i] for i in running], room)) is not None:
            index = waiting.pop(found)
            running[index] = now + every[index].seconds
            started.append((now, index, [other for other in running if other != index]))
        assert running, "everything waits and nothing runs"
        now = min(running.values())
        running = {index: end for index, end in running.items() if end > now}
    return started


@given(NEEDS, ROOMS)
def test_every_cell_runs_once_and_never_over_budget(every: list[Need], room: Room) -> None:
    started = simulate(every, room)
    assert sorted(index for _, index, _ in started) == list(range(len(every)))
    for _, index, beside in started:
        assert len(beside) < room.jobs
        if room.memory_mib is not None and beside:
            assert sum(every[i].memory_mib for i in (index, *beside)) <= room.memory_mib


@given(NEEDS, ROOMS)
def test_nothing_that_fits_is_kept_waiting_for_what_takes_less_time(every: list[Need], room: Room) -> None:
    """Whatever was started while a longer one waited, the longer one did not fit then."""
    when = {index: position for position, (_, index, _) in enumerate(simulate(every, room))}
    for _, index, beside in simulate(every, room):
        taken = sum(every[i].memory_mib for i in beside)
        for other, need in enumerate(every):
            if when[other] > when[index] and need.seconds > every[index].seconds:
                assert room.memory_mib is not None
                assert taken + need.memory_mib > room.memory_mib


@given(NEEDS)
def test_the_longest_is_first_and_equals_stay_as_they_are(every: list[Need]) -> None:
    order = order_longest_first(every)
    assert sorted(order) == list(range(len(every)))
    keys = [(-every[index].seconds, index) for index in order]
    assert keys == sorted(keys)


ROOM_TABLE: dict[str, tuple[tuple[int, int, float, float | None, float | None], Room]] = {
    "an-h200": ((16, 0, 0, 143771, 143000), Room(14, 143000 - 0.05 * 143771)),
    "asked-for": ((16, 3, 9000, 143771, 143000), Room(3, 9000)),
    "taken-by-another": ((16, 0, 0, 143771, 100), Room(14, 0)),
    "shared-with-the-host": ((16, 0, 0, None, None), Room(1, None)),
    "shared-and-asked-for": ((16, 0, 9000, None, None), Room(14, 9000)),
}


@pytest.mark.parametrize(("given_", "room"), ROOM_TABLE.values(), ids=ROOM_TABLE)
def test_the_room_that_there_is(given_: tuple[int, int, float, float | None, float | None], room: Room) -> None:
    assert plan_room(*given_) == room


def test_two_cores_are_left_where_there_are_more() -> None:
    assert [plan_jobs(cores) for cores in (1, 2, 3, 4, 16)] == [1, 2, 2, 2, 14]
    assert plan_jobs(2, 9) == 9


def receipt(outcome: Outcome, seconds: float, peak: float, gpu: str = "NVIDIA H200") -> Receipt:
    return Receipt(
        cell="te1-h200-permute", stack="te1", target="h200", probe="permute", outcome=outcome, reason="",
        requested="te", machine=Machine(gpu=gpu), seconds={"total": seconds}, peak_memory_mib=peak,
    )  # fmt: skip


def test_what_a_cell_takes_is_what_its_row_says_or_an_earlier_receipt(catalog: Catalog) -> None:
    row = next(module for module in catalog.modules if module.id == "permute")
    order = Order("permute", "te2", H200, "te")
    kernels = "te2/permute"
    assert expect_need(order, row, {}) == Need(row.gpu_memory_mib + CONTEXT_MIB, row.seconds, kernels)
    seen = {"permute": [receipt(Outcome.PASS, 99.0, 50.0), receipt(Outcome.FAIL, 10.0, 9000.0)], "imports": []}
    assert expect_need(order, row, seen) == Need(9000.0 + CONTEXT_MIB, 99.0, kernels)
    # How far a cell came that died, and what a process holds without a GPU, say nothing.
    little = {"permute": [receipt(Outcome.ERROR, 3.0, 1.0), receipt(Outcome.PASS, 50.0, 99999.0, gpu="")]}
    assert expect_need(order, row, little) == Need(row.gpu_memory_mib + CONTEXT_MIB, 50.0, kernels)
    plain = next(module for module in catalog.modules if module.id == "imports")
    assert not expect_need(order, plain, {}).kernels
    again = Order("permute", "te2", H200, "te", only_times=True)
    assert expect_need(again, row, seen).seconds < 99.0


@pytest.mark.parametrize(
    ("script", "memory", "gpus"),
    [("echo '143771, 143000'", (143771.0, 143000.0), ("143771",)), ("echo '[N/A], [N/A]'", (None, None), ("[N/A]",)),
     ("echo 'NVIDIA-SMI has failed'; exit 9", (None, None), ()), ("exit 0", (None, None), ())],
    ids=["an-h200", "shared-with-the-host", "no-driver", "silent"],
)  # fmt: skip
def test_what_nvidia_smi_answers(
    script: str, memory: tuple[float | None, float | None], gpus: tuple[str, ...], tmp_path: Path
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "asked"}\n{script}\n')
    smi.chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert read_gpus(path) == gpus
    assert read_gpu_memory({**path, "CUDA_VISIBLE_DEVICES": "3,1"}) == GpuMemory(*memory)
    assert "--id=3" in (tmp_path / "asked").read_text()
    assert read_gpu_memory({"PATH": "/nowhere"}) == GpuMemory(None, None)
    assert read_gpus({"CUDA_VISIBLE_DEVICES": "3, -1,1"}) == ("3", "1")
