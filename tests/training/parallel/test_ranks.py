"""Collectives are recorded with their group; the records name the rank that the others wait for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.training.parallel.ranks import (
    Collective,
    CollectiveRecord,
    RankRecord,
    find_behind,
    read_record,
    watch_collectives,
)
from tests.training.parallel.gloo_ranks import on_ranks

pytestmark = pytest.mark.thorough


def recorded_on_a_rank(folder: str) -> list[tuple[str, tuple[int, ...], str]]:
    """The record of a collective of all, and of one of a part that raises."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    path = Path(folder, f"rank-{distributed.get_rank()}")
    watch_collectives(record := CollectiveRecord(path))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    distributed.all_reduce(torch.ones(2))
    with pytest.raises(Exception, match=r"(?i)size|shape|dim|split"):
        distributed.all_to_all_single(torch.ones(2), torch.ones(3), [2], [3], group=mesh["data"].get_group())
    assert record.seconds_inside > 0
    return [(one.operation, one.group, one.state) for one in read_record(path).collectives][-2:]


def test_collectives_are_recorded_with_their_group(tmp_path: Path) -> None:
    for rank, seen in enumerate(on_ranks(4, recorded_on_a_rank, str(tmp_path))):
        assert seen == [("all_reduce", (0, 1, 2, 3), "left"), ("all_to_all_single", (rank % 2, rank % 2 + 2), "raised")]


def left(*seen: tuple[str, tuple[int, ...], int, Any]) -> RankRecord:
    return RankRecord(
        1.0, 0, tuple(Collective(name, group, number, state, "", 2.0) for name, group, number, state in seen)
    )


BOTH = (0, 1)
ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("records", "behind"),
    [
        # One never came to what the other waits in.
        ({0: left(("all_reduce", BOTH, 5, "inside")), 1: left(("all_reduce", BOTH, 4, "left"))}, (1,)),
        # As asynchronous ones leave it: issued, not waited for.
        ({0: left(("all_reduce", BOTH, 5, "left")), 1: left(("all_reduce", BOTH, 4, "left"))}, (1,)),
        # It never joined.
        ({0: left(), 1: RankRecord()}, (1,)),
        ({0: left(("barrier", BOTH, 1, "inside")), 1: left()}, (1,)),
        # 3 holds up 2 in a group of two, and both hold up the others: 3 alone waits for nobody.
        (
            {
                0: left(("all_reduce", ALL, 2, "inside")),
                1: left(("all_reduce", ALL, 2, "inside")),
                2: left(("all_reduce", ALL, 1, "left"), ("all_gather", (2, 3), 1, "inside")),
                3: left(("all_reduce", ALL, 1, "left")),
            },
            (3,),
        ),
        # All wait, one of them in another collective.
        (
            {
                0: left(("barrier", (0, 1, 2), 2, "inside")),
                1: left(("all_reduce", (0, 1, 2), 2, "inside")),
                2: left(("barrier", (0, 1, 2), 2, "inside")),
            },
            (1,),
        ),
        ({0: left(("barrier", BOTH, 2, "left")), 1: left(("barrier", BOTH, 2, "left"))}, ()),
    ],
)
def test_who_is_waited_for(records: dict[int, RankRecord], behind: tuple[int, ...]) -> None:
    assert find_behind(records) == behind


def test_a_record_survives_what_it_cannot_hold(tmp_path: Path) -> None:
    record = CollectiveRecord(tmp_path / "record")
    with record.inside("all_reduce", tuple(range(1000))):
        pass
    with pytest.raises(ValueError, match="planted"), record.inside("barrier", (0,)):
        raise ValueError("planted")
    seen = read_record(tmp_path / "record").collectives
    assert [(one.operation, one.group, one.state) for one in seen] == [
        ("all_reduce", (0, 999), "left"),
        ("barrier", (0,), "raised"),
    ]
    half = (tmp_path / "record").read_bytes()[:600]
    (tmp_path / "record").write_bytes(half)  # died in the middle of a slot
    assert read_record(tmp_path / "record").collectives == ()
    assert read_record(tmp_path / "none") == RankRecord()
