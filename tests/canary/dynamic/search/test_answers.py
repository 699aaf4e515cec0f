"""Answers as files: whole or none, believed only for the question that they answer."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.bisect_result import Answer, Verdict
from megacpp_validate.canary.dynamic.search import answers as answers_module
from megacpp_validate.canary.dynamic.search.answers import Answers, digest_tool
from megacpp_validate.catalog.bridge import matrix_folder
from megacpp_validate.environments import identity

BAD = Answer(verdict=Verdict.BAD, reason="cuDNN raises")
HERE = {"te": "2.17.1", "cudnn": "9.19.0"}


@pytest.fixture
def answers(tmp_path: Path) -> Answers:
    return Answers(tmp_path / "answers", "attention", "gpu", "tool")


def test_what_is_kept_is_found(answers: Answers) -> None:
    answers.keep(HERE, "env", 0, BAD)
    assert answers.find(HERE, "env", 0) == BAD
    assert [path.name[:10] for path in answers.folder.iterdir()] == ["attention-"]


@pytest.mark.parametrize("other", ["choices", "environment", "run", "module", "tier", "tool", "conditions"])
def test_an_answer_to_another_question_is_none(answers: Answers, other: str) -> None:
    answers.keep(HERE, "env", 0, BAD)
    asked = replace(answers, **{other: "other"}) if hasattr(answers, other) else answers
    choices = HERE | ({"te": "2.16.1"} if other == "choices" else {})
    environment, run = ("env2" if other == "environment" else "env"), int(other == "run")
    assert asked.find(choices, environment, run) is None


def test_a_file_under_another_name_answers_nothing(answers: Answers) -> None:
    answers.keep(HERE, "env", 0, BAD)
    answers.keep(HERE, "env", 1, Answer(verdict=Verdict.GOOD))
    one, other = sorted(answers.folder.iterdir())
    shutil.copy(one, other)
    assert sorted(answers.find(HERE, "env", run) is None for run in (0, 1)) == [False, True]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_id": "other/1"}', "\x00" * 40])
def test_a_damaged_file_is_as_good_as_none(answers: Answers, text: str) -> None:
    answers.keep(HERE, "env", 0, BAD)
    (path,) = answers.folder.iterdir()
    path.write_text(text)
    assert answers.find(HERE, "env", 0) is None
    assert not list(answers.recall())
    answers.keep(HERE, "env", 0, BAD)
    assert answers.find(HERE, "env", 0) == BAD


@pytest.mark.parametrize("cut", [10, 100, 300])
def test_half_a_file_is_as_good_as_none(answers: Answers, cut: int) -> None:
    answers.keep(HERE, "env", 0, BAD)
    (path,) = answers.folder.iterdir()
    path.write_bytes(path.read_bytes()[:cut])
    assert answers.find(HERE, "env", 0) is None


def test_what_may_be_otherwise_tomorrow_is_not_kept(answers: Answers) -> None:
    answers.keep(HERE, "env", 0, Answer(verdict=Verdict.CANNOT_TELL, lasting=False))
    assert not answers.folder.exists()


def test_only_what_says_something_of_this_question_is_recalled(answers: Answers) -> None:
    answers.keep(HERE, "env", 0, BAD)
    answers.keep(HERE, "env", 1, BAD)
    answers.keep({"te": "2.18.0"}, "env", 0, Answer(verdict=Verdict.CANNOT_TELL))
    replace(answers, module="permute").keep(HERE, "env", 0, BAD)
    replace(answers, tool="older").keep({"te": "2.19.0"}, "env", 0, BAD)
    replace(answers, conditions="target b200").keep({"te": "2.20.0"}, "env", 0, BAD)
    assert list(answers.recall()) == [(HERE, Verdict.BAD)]


def test_a_tool_of_other_code_or_matrix_has_another_digest(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(matrix_folder(), tmp_path / "matrix"))
    assert digest_tool(copy) == digest_tool()
    (copy / "bridge.toml").write_text((copy / "bridge.toml").read_text() + "\n# another\n")
    assert digest_tool(copy) != digest_tool()


def test_all_that_runs_in_an_environment_decides_an_answer() -> None:
    rooms = {name for name in identity._OURS_THERE if not name.endswith(".py")}
    assert rooms | {"canary", "environments", "evidence"} == set(answers_module._ROOMS)
