"""Patterns and sizes: what is read, and what is refused with its place and its reason."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.fp8_scope import WrongZone  # noqa: E402
from megacpp_validate.training.errors import UnknownSize, WrongPattern, WrongSize  # noqa: E402
from megacpp_validate.training.sizes import (  # noqa: E402
    SIZES,
    read_pattern,
    read_size,
)


@pytest.mark.parametrize("text", ["A", "R", "AEMEAEMEAEMR", "EEEE"])
def test_a_pattern_is_one_letter_a_layer(text: str) -> None:
    assert "".join(read_pattern(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("AEXM", "'X' at place 3 of 4"),
        ("aEM", "'a' at place 1 of 3, which is no kind of block. Likely cause: letters are written large"),
        ("AE M", "' ' at place 3 of 4"),
        ("AEMX", "'X' at place 4 of 4"),
        ("", "one layer or more"),
        (None, "one layer or more"),
        (["A", "E"], "one layer or more"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused_with_letter_and_place(text: Any, said: str) -> None:
    with pytest.raises(WrongPattern) as refused:
        read_pattern(text)
    assert said in str(refused.value)
    assert "A (attention), M (Mamba), E (mixture of experts), R (recurrent)" in str(refused.value)


@pytest.mark.parametrize("name", SIZES)
def test_every_product_of_a_size_fits_the_recipes(name: str) -> None:
    size = read_size(name)
    inner = 2 * size.hidden
    projection = 2 * inner + 2 * size.mamba_state + inner // size.mamba_head_dim
    joint = (size.num_heads + 2 * size.num_gqa_groups) * size.head_dim
    widths = (size.hidden, size.ffn_hidden, 2 * size.expert_width, size.expert_width, projection, joint)
    assert [width % 16 for width in (*widths, size.batch * size.length)] == [0] * 7
    inside = {letter for place, letter in enumerate(size.letters) if not size.zones.is_bf16(place)}
    assert inside >= {"A", "E", "M"}  # every kind that Transformer Engine has a part in runs in low precision
    assert 0 < size.floor < size.grammar.without_context()


@pytest.mark.parametrize(
    ("changes", "refusal", "said"),
    [
        ({"pattern": "AQ"}, WrongPattern, "'Q' at place 2"),
        ({"num_gqa_groups": 3}, WrongSize, "num_gqa_groups 3 does not divide num_heads 2"),
        ({"head_dim": 15}, WrongSize, "head_dim 15 is odd"),
        ({"top_k": 5}, WrongSize, "top_k is 5 of 4 experts"),
        ({"mamba_head_dim": 5}, WrongSize, "does not divide the inner width 64"),
        ({"length": 2}, WrongSize, "does not reach beyond the lag 2"),
        ({"hidden": 0}, WrongSize, "hidden is 0"),
        ({"hidden": True}, WrongSize, "hidden is True"),
        ({"batch": 2.0}, WrongSize, "batch is 2.0"),
        ({"num_heads": 0, "top_k": -1}, WrongSize, "num_heads is 0, which is no whole number from 1 up; top_k is -1"),
        ({"aux_coefficient": -1.0}, WrongSize, "aux_coefficient is -1.0"),
        ({"bf16_first": -1}, WrongSize, "bf16_first is -1"),
        ({"bf16_first": 4, "bf16_last": 4}, WrongZone, "overlap"),
        ({"classes": 1}, WrongSize, "1 classes"),
        ({"colour": 1}, UnknownSize, "'colour'"),
    ],
)
def test_a_size_that_cannot_be_is_refused(changes: dict[str, Any], refusal: type[Exception], said: str) -> None:
    with pytest.raises(refusal) as refused:
        read_size("tiny", **changes)
    assert said in str(refused.value)


def test_a_size_that_there_is_not_is_refused() -> None:
    with pytest.raises(UnknownSize, match="choose one of tiny, small"):
        read_size("huge")
