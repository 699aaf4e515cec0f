"""Sizes go together, and every number that does not is named."""

from __future__ import annotations

from typing import Any

import pytest

from megacpp_validate.training import WrongSize
from megacpp_validate.training.optimizer import Schedule
from megacpp_validate.training.sizes import SIZES, Forms, read_size


@pytest.mark.parametrize("name", SIZES)
def test_every_size_goes_together(name: str) -> None:
    size = read_size(name)
    assert "".join(size.letters) == size.pattern
    assert 0 < size.grammar.floor(size.length + 1) < size.grammar.without_context()
    assert [size.zones.is_bf16(place) for place in (0, len(size.letters) - 1)] == [True, True]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pattern": ""}, ["pattern is ''"]),
        ({"pattern": "ASDR"}, ["a layer S before the first D"]),
        ({"attention": "mha"}, ["attention is 'mha'"]),
        ({"batch": 0, "hidden": "8", "top_k": True}, ["batch is 0", "hidden is '8'", "top_k is True"]),
        ({"bf16_first": -1, "words": 1}, ["bf16_first is -1", "words is 1, and is a whole number from 2 up"]),
        ({"mtp_coefficient": 1.0, "pattern": "AmX"}, ["mtp_coefficient is 1.0", "pattern is 'AmX'"]),
    ],
)
def test_numbers_that_do_not_go_together_are_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(WrongSize, match="Next step") as refused:
        read_size("tiny", **changes)
    assert all(word in str(refused.value) for word in words)


def test_unknown_sizes_forms_and_schedules_are_refused() -> None:
    with pytest.raises(WrongSize, match="unknown size 'huge'"):
        read_size("huge")
    with pytest.raises(WrongSize, match="moe is 'dense'"):
        Forms(moe="dense")  # type: ignore[arg-type]


def test_the_rate_rises_and_decays() -> None:
    schedule = Schedule(100, 2.0, warm_up=4, last=0.1)
    assert [schedule.rate(step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert schedule.rate(52) == pytest.approx(2.0 * 0.55)
    assert schedule.rate(100) == pytest.approx(0.2)
