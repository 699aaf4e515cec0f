"""Results that were written as JSON come back, and are described as their verb describes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from megacpp_validate.report import reading
from megacpp_validate.report.reading import describe_result, read_result
from megacpp_validate.report.render.json import render_json
from tests.report.describe.test_session import GRID
from tests.report.sessions import ALL, CLEAN, NOTHING


@pytest.mark.parametrize("result", [ALL, CLEAN, NOTHING, GRID], ids=["red", "clean", "not-run", "grid"])
def test_a_result_comes_back(result: object) -> None:
    again = read_result(render_json(result))
    assert again == result
    assert describe_result(again).title


@pytest.mark.parametrize("schema", reading._RESULTS)
def test_every_known_result_has_a_model_and_words(schema: str) -> None:
    model, words = (
        reading._load(*place) for place in zip(("", ".report.describe"), reading._RESULTS[schema], strict=True)
    )
    assert callable(words)
    assert schema in get_args(model.model_fields["schema_id"].annotation)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_id": "x"}', '{"schema_id": 1}', "[" * 100_000])
def test_what_is_no_result_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_result(text)


def test_a_session_is_shown_again_as_a_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megacpp_validate.cli.result_again"]
    (tmp_path / "result.json").write_text(render_json(CLEAN))
    done = subprocess.run([*command, str(tmp_path / "result.json")], capture_output=True, text=True, check=True)
    assert "Parity holds in 1 probe" in done.stdout
    (tmp_path / "other.json").write_text(json.dumps({"a": 1}))
    done = subprocess.run([*command, str(tmp_path / "other.json")], capture_output=True, text=True, check=False)
    assert (done.returncode, "Next step" in done.stderr) == (2, True)
