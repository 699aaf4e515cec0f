"""The loop around a search: what is asked, what is kept, what is told; killed and gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.bisect_result import Answer, Axis, SearchEnd, Verdict
from megacpp_validate.canary.dynamic.search.answers import Answers
from megacpp_validate.canary.dynamic.search.judge import NotBuilt, Question, run_search
from megacpp_validate.canary.dynamic.search.repeats import Trust
from tests.canary.dynamic.search.culprits import make_axes


@dataclass
class Planted:
    """A judge for whom one axis turns bad at a value.

    Attributes:
        unbuilt: values that there is no environment for.
        dies_at: the number of the question at which it is interrupted.
    """

    turn: int
    unbuilt: frozenset[str] = frozenset()
    dies_at: int = 0
    environment: str = "env"
    built: Counter[str] = field(default_factory=Counter)
    asked: Counter[tuple[str, int]] = field(default_factory=Counter)

    def identify(self, choices: Mapping[str, str]) -> str:
        self.built[choices["te"]] += 1
        if choices["te"] in self.unbuilt:
            raise NotBuilt(f"no environment for {choices['te']}")
        return f"{self.environment} {choices['te']}"

    def judge(self, choices: Mapping[str, str], run: int) -> Answer:
        if sum(self.asked.values()) == self.dies_at - 1:
            raise KeyboardInterrupt
        self.asked[choices["te"], run] += 1
        verdict = Verdict.BAD if int(choices["te"][1:]) >= self.turn else Verdict.GOOD
        return Answer(verdict=verdict, reason="seen")


def ask(folder: Path, size: int = 30, trust: Trust | None = None) -> tuple[Question, Answers]:
    question = Question("tool", "gpu", "attention", make_axes([size]), trust or Trust())
    return question, Answers(folder, "attention", "gpu", "tool")


def test_thirty_releases_take_seven_environments(tmp_path: Path) -> None:
    for turn in range(1, 30):
        judge = Planted(turn)
        question, answers = ask(tmp_path / str(turn))
        result = run_search(question, judge, answers)
        assert result.culprits[0].turns[0].first_bad == (f"v{turn}",)
        assert result.environments == len(judge.built) <= 7 < 5 + 3
        assert result.runs == sum(judge.asked.values()) <= result.best == 7


@pytest.mark.parametrize("dies_at", [1, 2, 3, 6])
def test_an_interrupted_search_goes_on_where_it_was(tmp_path: Path, dies_at: int) -> None:
    first, second, whole = Planted(17, dies_at=dies_at), Planted(17), Planted(17)
    question, answers = ask(tmp_path / "answers")
    with pytest.raises(KeyboardInterrupt):
        run_search(question, first, answers)
    result = run_search(question, second, answers)
    run_search(question, whole, ask(tmp_path / "whole")[1])
    assert first.asked + second.asked == whole.asked  # none lost, none run twice
    assert sum(point.reused for point in result.points) == dies_at - 1
    assert result.runs == sum(whole.asked.values())


def test_a_damaged_answer_is_run_again_and_no_other(tmp_path: Path) -> None:
    question, answers = ask(tmp_path)
    run_search(question, Planted(17), answers)
    sorted(tmp_path.glob("*.json"))[2].write_text("{")
    again = Planted(17)
    run_search(question, again, answers)
    assert sum(again.asked.values()) == 1


def test_each_run_of_a_flaky_point_is_kept_for_itself(tmp_path: Path) -> None:
    question, answers = ask(tmp_path, trust=Trust(0.1))
    first = Planted(17)
    run_search(question, first, answers)
    assert max(run for _, run in first.asked) >= 2
    again = Planted(17)
    result = run_search(question, again, answers)
    assert not again.asked
    assert sum(point.reused for point in result.points) == result.runs


def test_another_environment_is_asked_anew(tmp_path: Path) -> None:
    question, answers = ask(tmp_path)
    first, other = Planted(17), Planted(17, environment="another")
    run_search(question, first, answers)
    run_search(question, other, answers)
    assert other.asked == first.asked


def test_what_cannot_be_built_is_told_apart_tried_once_and_not_kept(tmp_path: Path) -> None:
    question, answers = ask(tmp_path)
    judge = Planted(17, unbuilt=frozenset({"v15", "v16"}))
    result = run_search(question, judge, answers)
    assert result.end is SearchEnd.NARROWED
    assert result.culprits[0].turns[0].first_bad == ("v15", "v16", "v17")
    assert judge.built["v15"] == 1
    unbuilt = [point for point in result.points if point.verdict is Verdict.CANNOT_BUILD]
    assert all("no environment for v1" in point.reason for point in unbuilt)
    assert result.environments == len(result.points) - len(unbuilt)
    mended = Planted(17)
    assert run_search(question, mended, answers).end is SearchEnd.FOUND
    assert {value for value, _ in mended.asked} <= {"v15", "v16"}


def test_answers_of_an_earlier_search_that_contradict_this_one_are_said(tmp_path: Path) -> None:
    question, answers = ask(tmp_path)
    answers.keep({"te": "v28"}, "env v28", 0, Answer(verdict=Verdict.GOOD))
    answers.keep({"te": "v28", "cudnn": "v1"}, "env", 0, Answer(verdict=Verdict.GOOD))  # of another question
    result = run_search(question, Planted(17), answers)
    assert result.end is SearchEnd.FOUND
    assert {pair.good for pair in result.contradictions} == {("v28",)}
    assert ("v17",) in {pair.bad for pair in result.contradictions}


def test_absent_releases_do_not_count_towards_the_best_possible(tmp_path: Path) -> None:
    values = tuple(f"v{number}" for number in range(33))
    axis = Axis(name="te", values=values, absent=values[1:17])
    question = Question("tool", "gpu", "attention", (axis,))
    assert run_search(question, Planted(20), ask(tmp_path)[1]).best == 6


SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_judge import Planted, ask
from megacpp_validate.canary.dynamic.search.judge import run_search

class Slow(Planted):
    def judge(self, choices, run):
        with open(sys.argv[1] + "/asked", "a") as log:
            log.write(choices["te"] + "\\n")
        answer = super().judge(choices, run)
        time.sleep(0.15)
        return answer

question, answers = ask(Path(sys.argv[1], "answers"))
print(run_search(question, Slow(17), answers).culprits[0].turns[0].first_bad[0])
"""


def test_a_search_that_is_killed_outright_goes_on_and_runs_again_only_what_was_under_way(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(Path(__file__).parent)]
    log = tmp_path / "asked"
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while (log.read_text() if log.exists() else "").count("\n") < 4 and time.monotonic() < until:
        time.sleep(0.005)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    before = log.read_text().split()
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    after = log.read_text().split()[len(before) :]
    assert done.stdout.strip() == "v17"
    assert set(before) & set(after) <= {before[-1]}
    assert len(set(before) | set(after)) == 7
