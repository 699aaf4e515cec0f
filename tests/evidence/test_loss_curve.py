"""A loss curve goes to its file and back, and what is no curve is refused with what is wrong with it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.evidence.loss_curve import CURVE_SCHEMA_ID, LossCurve, curve_text, write_curve
from megacpp_validate.evidence.loss_curves import CurveInvalid, loss_curve_schema, parse_curve, read_curve

CURVE = LossCurve("delayed", 3, "a" * 64, 4, (0, 1, 2), (2.5, 2.25, 0.1), (1.0, 0.5, 1e-12))


def test_a_curve_goes_to_its_file_and_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "curve.json"
    write_curve(CURVE, path)
    assert read_curve(path) == CURVE
    assert [found.name for found in path.parent.iterdir()] == ["curve.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_comes_back_as_one(value: float) -> None:
    text = curve_text(LossCurve("bf16", 0, "a" * 64, 1, (0,), (value,), (1.0,)))
    assert json.loads(text)["losses"] == [None]
    assert math.isnan(parse_curve(text).losses[0])


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "another schema": ({"schema_id": "megacpp-validate/loss-curve/9"}, "schema_id: "),
    "an unknown key": ({"mood": "good"}, "mood: "),
    "a step as text": ({"steps": ["0", 1, 2]}, "steps.0: "),
    "a step as a fraction": ({"steps": [0.5, 1, 2]}, "steps.0: "),
    "a step as a truth": ({"steps": [True, 1, 2]}, "steps.0: "),
    "a loss as text": ({"losses": ["2.5", 2.25, 0.1]}, "losses.0: "),
    "a loss too few": ({"losses": [2.5, 2.25]}, "3 steps, and a series of 2 values"),
    "a norm too many": ({"gradient_norms": [1.0] * 4}, "3 steps, and a series of 4 values"),
    "a norm below 0": ({"gradient_norms": [1.0, -0.5, 1.0]}, "gradient_norms.1: "),
    "no data": ({"data": ""}, "data: "),
    "no recipe": ({"recipe": ""}, "recipe: "),
    "nothing planned": ({"planned": 0}, "planned: "),
    "more planned than can be": ({"planned": 10**12}, "planned: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_curve_is_refused_and_says_where(name: str) -> None:
    change, said = BROKEN[name]
    text = json.dumps({**json.loads(curve_text(CURVE)), **change})
    with pytest.raises(CurveInvalid) as caught:
        parse_curve(text, "curve.json")
    assert said in caught.value.reason
    assert str(caught.value).startswith("curve.json is not a valid loss curve: ")
    assert "Next step: " in str(caught.value)


@pytest.mark.parametrize("key", list(json.loads(curve_text(CURVE))))
def test_no_key_may_be_missing(key: str) -> None:
    data = json.loads(curve_text(CURVE))
    del data[key]
    with pytest.raises(CurveInvalid, match=key):
        parse_curve(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (curve_text(CURVE)[:-20], "Unterminated|Expecting value"),
        (curve_text(CURVE).replace("2.5", "NaN"), "finite"),
        (curve_text(CURVE).replace("2.5", "1e999"), "finite"),
        (curve_text(CURVE).replace('"seed": 3', '"seed": 3, "seed": 4'), "the key 'seed' appears twice"),
        ("", "Unterminated|Expecting value"),
        ("[]", "the file"),
    ],
)
def test_damaged_text_is_refused(text: str, said: str) -> None:
    with pytest.raises(CurveInvalid, match=said):
        parse_curve(text)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CurveInvalid, match="it cannot be read"):
        read_curve(tmp_path / "none.json")


def test_the_schema_has_the_keys_of_a_curve_and_allows_no_others() -> None:
    schema = loss_curve_schema()
    assert schema["$id"] == CURVE_SCHEMA_ID
    assert set(schema["properties"]) == set(schema["required"]) == set(json.loads(curve_text(CURVE)))
    assert schema["additionalProperties"] is False


def test_a_pipe_and_a_nest_are_no_curves(tmp_path: Path) -> None:
    """A pipe would be waited for, and a nest is deeper than a reader goes."""
    pipe, nest = tmp_path / "x.bf16-0.curve", tmp_path / "x.bf16-1.curve"
    os.mkfifo(pipe)
    nest.write_text("[" * 100_000)
    with pytest.raises(CurveInvalid, match="not a regular file"):
        read_curve(pipe)
    with pytest.raises(CurveInvalid):
        read_curve(nest)
