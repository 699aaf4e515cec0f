"""The verb of ablation: orders, turns, receipts, exit codes; a stub speaks as the smoke run does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.postures import read_postures
from megacpp_validate.errors import WrongArguments
from megacpp_validate.gate.ablation import FeatureAblation
from megacpp_validate.gate.ablation_runs import (
    AblationOptions,
    find_absent,
    plan_arms,
    read_features,
    read_plan,
    read_run,
)
from megacpp_validate.process import Ended
from tests.command_line import Run, make_run_in

OPEN, WRONG, NOTHING_SELECTED, MISSING, NO_ENVIRONMENT = 0, 2, 3, 4, 5
# A smoke run that trains nothing: recompute costs 10%; what goes wrong stands in the variable STUB.
STUB = """#!{python} -SE
import json, os, random, sys
assert sys.argv[1:] == ["-P", "-u", "-m", "megacpp_validate.training.smoke"], sys.argv
order = json.load(sys.stdin)
fault, on = os.environ.get("STUB", ""), order["forms"].get("recompute", False)
draw = random.Random("/".join(order["folder"].split("/")[-4:]))  # the same wherever the test runs
print("a library says something")
if fault == "dies" and on:
    sys.exit("no memory left")
if fault == "damaged":
    print(json.dumps(dict(ending="done", ranks=[dict(rank=0)])))
    sys.exit(0)
def rank(number):
    pace, memory = 0.1 * (1.1 if on else 1) * (1 + number), 2**30 - 2**28 * on
    steps = [dict(loss=3.0 - step / 100, seconds=pace + draw.gauss(0, 2e-4)) for step in range(order["steps"])]
    forms = dict(order["forms"], recompute=False) if fault == "falls-back" else order["forms"]
    again = ("layers.0.recompute", dict(requested="recompute", observed="recompute", refusals=[]))
    return dict(
        rank=number, steps=steps, goodput=dict(tokens=256 * order["steps"], peak_bytes=dict(step=memory)),
        choices=dict([("norm", dict(requested="te", observed="native", refusals=[]))] + [again] * on),
        topology=dict(host="somewhere", device="cpu", plan=order["plan"], place=number), forms=forms,
        features=order["features"], versions=dict(torch="2"),
        model=dict(name=order["size"], pattern="AMEAR", parameters=1234, size=order["changes"]),
    )
ranks = [rank(number) for number in range(order["plan"]["world"])]
print(json.dumps(dict(ending="done", words="", seconds=1.5, ranks=ranks)))
print("and a library says good-bye", file=sys.stderr)
sys.exit(3 if fault == "ends-badly" else 0)
"""


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    stub = tmp_path / "python-stub"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    run = make_run_in(tmp_path, "ablate", capfd, monkeypatch)
    shared = ("--python", str(stub), "--device", "cpu", "--size", "tiny", "--receipts", "out")
    return lambda *arguments: run(*arguments, *shared)


def read_row(folder: Path) -> FeatureAblation:
    return FeatureAblation.model_validate_json((folder / "out" / "recompute.json").read_text())


def test_a_feature_is_run_in_turns_judged_and_reported(call: Run, tmp_path: Path) -> None:
    code, out, err = call("feature=recompute", "--ranks", "2")
    assert code == OPEN, err
    assert "tax: recompute." in out
    row = read_row(tmp_path)
    assert [run.arm for run in row.runs] == ["off", "on", "off", "on"]
    assert row.step_time is not None
    # The slowest rank decides, which is the second one.
    assert (round(row.step_time.ratio, 2), round(row.step_time.off, 1)) == (1.1, 0.2)
    assert (row.runs[0].pattern, row.runs[0].parameters, row.runs[0].tokens) == ("AMEAR", 1234, 256)
    assert row.runs[0].topology == {"device": "cpu", "plan": {"data": 2, "world": 2}}
    assert len(row.runs[3].step_seconds) == 40
    given = [json.loads(path.read_text()) for path in sorted((tmp_path / "out" / "recompute").glob("*/order.json"))]
    assert [order["forms"]["recompute"] for order in given] == [False, True, False, True]
    for order in given:  # they differ in nothing else
        del order["forms"]["recompute"], order["folder"]
    assert given == given[:1] * 4
    page = (tmp_path / "out" / "ablation.md").read_text()
    assert "recompute" in page
    assert "forms.recompute" in page


def test_several_features_make_one_page_and_what_cannot_run_is_reported(call: Run, tmp_path: Path) -> None:
    code, out, err = call("feature=mtp,te_block", "recompute", "--format", "json", "--pairs", "2", "--steps", "16")
    assert code == MISSING, err
    rows = {row["feature"]: row for row in json.loads(out)["features"]}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "mtp": "noise", "te_block": "not-judged", "recompute": "tax",
    }  # fmt: skip
    assert rows["te_block"]["reasons"] == [
        "it needs a GPU, and the CPU was requested. Next step: --device cuda"
    ]  # and no process was started
    assert not (tmp_path / "out" / "te_block").exists()
    page = (tmp_path / "out" / "ablation.md").read_text()
    assert all(name in page for name in rows)


@pytest.mark.parametrize(
    ("fault", "runs", "said"),
    [
        ("dies", 2, "run 2 (on): it ended as exit: it gave no answer. Its last words: a library says something no mem"),
        ("falls-back", 2, "forms.recompute was requested as true, and the run reports false"),
        ("ends-badly", 1, "run 1 (off): it ended as contradiction: it answers done, and its process ended with exit 3"),
        ("damaged", 1, "its answer has another form: KeyError: 'model'"),
    ],
)
def test_a_run_that_is_no_evidence(
    call: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, runs: int, said: str
) -> None:
    monkeypatch.setenv("STUB", fault)
    code, out, _ = call("feature=recompute", "--format", "json")
    assert code == MISSING
    (row,) = json.loads(out)["features"]
    assert row["verdict"] == "not-judged"
    assert any(said in reason for reason in row["reasons"]), row["reasons"]
    kept = read_row(tmp_path)  # what ran before it is kept
    assert len(kept.runs) == runs
    assert (tmp_path / "out" / "recompute" / "1-off" / "log").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("feature=fast",), WRONG, "there is no feature 'fast'. Next step: choose one of auto_dispatch, "),
        (("feature=",), NOTHING_SELECTED, "no feature is selected"),
        (("recompute", "--plan", "data"), WRONG, "--plan has 'data'"),
        (("recompute", "--plan", "world=2", "--ranks", "4"), WRONG, "a world of 2, and --ranks 4"),
        (("recompute", "--pairs", "1"), WRONG, "pairs"),
        (("recompute", "--matrix", "nowhere"), WRONG, "postures.toml"),
    ],
)
def test_arguments_that_cannot_be(call: Run, arguments: tuple[str, ...], code: int, said: str) -> None:
    got, _, err = call(*arguments)
    assert (got, said in " ".join(err.split())) == (code, True), err


def asked(**more: Any) -> AblationOptions:
    said: dict[str, Any] = {
        "features": (), "size": "small", "steps": 40, "pairs": 2, "seed": 0, "plan": read_plan("", 0),
        "device": "cuda", "target": "h200", "base": "posture", "limit_s": 1.0, "receipts": Path(), "python": "",
    }  # fmt: skip
    return AblationOptions(**{**said, **more})


def test_arms_differ_in_the_feature_alone_and_begin_with_the_posture() -> None:
    posture = read_postures()
    for feature in posture.features:
        arms = plan_arms(posture, feature, asked())
        differ = {key for key in arms["on"] if arms["on"][key] != arms["off"].get(key)}
        assert differ == set(feature.on.as_order), feature.id
    arms = plan_arms(posture, posture.find("recompute"), asked())
    assert arms["off"]["forms"]["moe"] == "jagged"
    assert (arms["off"]["watch"], arms["off"]["profile"]) == (False, False)  # nobody looks on
    shared = plan_arms(posture, posture.find("recompute"), asked(plan=read_plan("expert_parallel=2", 2)))
    assert shared["off"]["forms"]["moe"] == "bridge"  # the other ways know no other ranks


def test_plans_and_names_from_what_was_typed() -> None:
    assert read_plan("", 4) == {"data": 4, "world": 4}
    assert read_plan("tensor_parallel=2,sequence_parallel=true", 4) == {
        "tensor_parallel": 2, "sequence_parallel": True, "data": 2, "world": 4,
    }  # fmt: skip
    assert read_plan("data=2,tensor_parallel=2", 0)["world"] == 4
    with pytest.raises(WrongArguments):
        read_plan("data=-1", 0)
    posture = read_postures()
    assert read_features(["feature=mtp,graphs", "mtp"], posture) == ("mtp", "graphs")
    assert len(read_features(["feature=all"], posture)) == len(posture.features)


@pytest.mark.parametrize(
    ("more", "gpu", "absent"),
    [
        ({}, True, set()),
        ({}, False, {"", "te"}),
        ({"device": "cpu"}, False, {"gpu"}),
        ({"plan": read_plan("expert_parallel=2", 2)}, True, {"one-rank", "own-experts"}),
    ],
)
def test_what_a_feature_may_need_and_is_absent(more: dict[str, Any], gpu: bool, absent: set[str]) -> None:
    assert set(find_absent(asked(**more), gpu=gpu, te=gpu)) == absent


def test_an_answer_is_the_last_one_and_ranks_that_differ_are_told() -> None:
    part = {"requested": "te", "observed": "te"}
    rank = {
        "rank": 0, "steps": [{"loss": "nan", "seconds": 1.0}], "goodput": {"tokens": 8, "peak_bytes": {"step": 5}},
        "choices": {"norm": part}, "topology": {}, "forms": {}, "features": {}, "versions": {},
        "model": {"name": "tiny", "pattern": "A", "parameters": 1, "size": {}},
    }  # fmt: skip
    other = {**rank, "rank": 1, "choices": {"norm": {**part, "observed": "native"}}}
    first = json.dumps({"ending": "died", "ranks": []})
    words = f"{first}\n{json.dumps({'ending': 'done', 'ranks': [other, rank]})}\ngood-bye"
    run = read_run(Ended("exit", 0, 1.0, words), "on", 1)
    assert (run.ending, run.losses, run.peak_bytes) == ("done", (None,), 5)
    assert {name: seen.observed for name, seen in run.parts.items()} == {"norm": "te", "norm@1": "native"}
    assert "it gave no answer" in read_run(Ended("exit", 1, 1.0, "a crash"), "on", 1).words
    assert read_run(Ended("exit", 0, 1.0, first), "off", 0).ending == "died"
