"""A loss curve goes to its file and back, and what is no curve is refused with what is wrong with it."""

from __future__ import annotations

import json
import lzma
import math
import os
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.evidence.loss_curve import (
    CURVE_SCHEMA_ID,
    CurveInvalid,
    LossCurve,
    curve_text,
    parse_curve,
    read_curve,
    read_curves,
)
from megacpp_validate.evidence.receipt import write_whole
from megacpp_validate.evidence.store import json_schema

CURVE = LossCurve("delayed", 3, "a" * 64, 4, (0, 1, 2), (2.5, 2.25, 0.1), (1.0, 0.5, 1e-12))
TEXT = curve_text(CURVE)


def test_a_curve_goes_to_its_file_and_back_compressed_or_not(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cell.delayed-3.curve"
    write_whole(path, curve_text(CURVE))
    assert read_curve(path) == CURVE
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    packed = path.with_name(f"{path.name}.xz")
    packed.write_bytes(lzma.compress(path.read_bytes()))
    assert read_curves(path.parent) == {"cell": {"delayed": [CURVE, CURVE]}}
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(CurveInvalid, match="it cannot be read"):
        read_curve(packed)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_comes_back_as_none(value: float) -> None:
    text = curve_text(LossCurve("bf16", 0, "a" * 64, 1, (0,), (value,), (1.0,)))
    assert json.loads(text)["losses"] == [None]
    assert math.isnan(parse_curve(text).losses[0])


def changed(**values: Any) -> str:
    return json.dumps({**json.loads(TEXT), **values})


BROKEN = {
    "another schema": (changed(schema_id="megacpp-validate/loss-curve/9"), "schema_id"),
    "an unknown key": (changed(mood="good"), "mood: "),
    "a loss too few": (changed(losses=[2.5, 2.25]), r"3 steps, and a series of \[2\] values"),
    "nothing planned": (changed(planned=0), "planned is 0"),
    "cut short": (TEXT[:-20], "Unterminated|Expecting"),
    "a key less": (TEXT.replace('"planned": 4,', ""), "planned"),
    "another key": (TEXT.replace('"losses"', '"loss"'), "losses"),
    "empty": ("", "Expecting"),
    "a list": ("[]", "list indices"),
}


@pytest.mark.parametrize(("text", "said"), BROKEN.values(), ids=BROKEN)
def test_what_is_no_curve_is_refused_and_says_where(text: str, said: str) -> None:
    with pytest.raises(CurveInvalid, match=rf"(?s)({said}).*Next step: "):
        parse_curve(text)


def test_a_pipe_and_nothing_are_no_curves(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.bf16-0.curve")
    for path in (tmp_path / "x.bf16-0.curve", tmp_path / "none"):
        with pytest.raises(CurveInvalid, match="not a regular file"):
            read_curve(path)


def test_the_published_schema_is_fresh_and_allows_no_other_keys() -> None:
    schema = json_schema(LossCurve, CURVE_SCHEMA_ID)
    assert schema["$id"] == CURVE_SCHEMA_ID
    assert set(schema["properties"]) == set(json.loads(TEXT))
    assert schema["additionalProperties"] is False
    published = Path(__file__).parents[2] / "docs" / "schema" / "loss_curve.json"
    assert json.loads(published.read_text()) == schema
