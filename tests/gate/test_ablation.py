"""What matched pairs show: noise is noise, a shift is found, a drift helps nobody, and no evidence is no verdict."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.postures import Feature, read_postures
from megacpp_validate.gate.ablation import (
    ARMS,
    AblationOptions,
    AblationRun,
    Change,
    FeatureAblation,
    Verdict,
    compare,
    compare_runs,
    decide_feature,
    plan_arms,
    read_features,
)
from tests.command_line import Run, make_run_in

STEPS = 40
DRAWS = 40
FEATURE = Feature.model_validate({
    "id": "thing", "title": "It is there", "plain": "it is not", "source": "here",
    "off": {"forms": {"recompute": False}, "parts": {"layers.*.block": ["native"]}},
    "on": {"forms": {"recompute": True}, "parts": {"layers.*.block": ["te", "native"]}},
})  # fmt: skip
ORDERS: dict[Any, dict[str, Any]] = {
    arm: {"steps": STEPS, "forms": {"recompute": arm == "on"}, "changes": {}, "features": {}} for arm in ARMS
}


def draw_runs(
    seed: int, *, shift: float = 0.0, between: float = 0.0, follow: float = 0.5, drift: float = 0.0, pairs: int = 2
) -> list[AblationRun]:
    """Runs whose step times are 0.1 s, times noise that follows itself (AR(1)), noise between runs, and a drift."""
    draw = random.Random(seed)
    runs = []
    for place in range(2 * pairs):
        level = 0.1 * math.exp(between * draw.gauss(0, 1) + drift * place) * (1 + shift * (place % 2))
        off, times = draw.gauss(0, 0.01), []
        for _ in range(STEPS):
            off = follow * off + math.sqrt(1 - follow * follow) * draw.gauss(0, 0.01)
            times.append(level * math.exp(off))
        losses = tuple(3 - 0.01 * step for step in range(STEPS))
        runs.append(see(place, times, losses))
    return runs


def see(place: int, times: Any, losses: Any, **more: Any) -> AblationRun:
    arm = ARMS[place % 2]
    said: dict[str, Any] = {
        "arm": arm, "ending": "done", "step_seconds": tuple(times), "losses": tuple(losses),
        "tokens": 1000, "peak_bytes": 100, "forms": {"recompute": arm == "on"},
        "parts": {"layers.0.block": {"requested": "te", "observed": "native"}},
    }  # fmt: skip
    return AblationRun(**{**said, **more})


def read(name: str, runs: list[AblationRun], precision: str = "fp32") -> Change:
    (change,) = (change for change in compare_runs(runs, precision) if change.name == name)
    return change


@pytest.mark.parametrize(
    ("how", "verdict", "share"),
    [
        ({"follow": 0.9}, Verdict.NOISE, 0.95),
        ({"between": 0.005}, Verdict.NOISE, 0.95),
        ({"between": 0.02, "pairs": 3}, Verdict.NOISE, 0.95),
        ({"shift": 0.03}, Verdict.TAX, 0.9),
        ({"shift": -0.03}, Verdict.WIN, 0.9),
        # Each run is slower than the one before, so that "on" is slower in each pair: it is no doing of the feature.
        ({"drift": 0.02}, Verdict.NOISE, 0.95),
        ({"drift": -0.02}, Verdict.NOISE, 0.95),
    ],
)
def test_noise_is_noise_a_shift_is_found_and_a_drift_helps_nobody(
    how: dict[str, Any], verdict: Verdict, share: float
) -> None:
    seen = [read("step_time", draw_runs(seed, **how)).verdict for seed in range(DRAWS)]
    assert seen.count(verdict) >= share * DRAWS


def test_a_linear_trend_is_taken_out_of_the_estimate() -> None:
    change = compare("", [math.exp(0.01 * place + (0.03 if place % 2 else 0.0)) for place in range(4)])
    assert change.ratio == pytest.approx(math.exp(0.03))
    assert change.low < 1  # twice the drift lies between equal arms, and is spread


@pytest.mark.parametrize(("shift", "verdict"), [(0.018, Verdict.NOISE), (0.021, Verdict.TAX)])
def test_arms_that_always_give_the_same_bits_are_held_to_what_rounding_does(shift: float, verdict: Verdict) -> None:
    """24 steps of 8192 tokens through 12 layers in bf16: 0.00099 * sqrt(24) of a loss of 4 are 0.019 nats."""
    runs = [
        see(place, [0.1] * 24, [4 + shift * (place % 2)] * 24, tokens=8192, pattern="AEMEAEMEAEMR")
        for place in range(4)
    ]
    assert read("loss", runs, "bf16").verdict is verdict
    assert read("loss", runs, "fp32").verdict is Verdict.TAX


def decide(runs: list[AblationRun], pairs: int = 2) -> FeatureAblation:
    said: dict[str, Any] = {
        "tool": "test", "feature": "thing", "title": "It", "plain": "not it", "source": "here", "base": "plain",
        "off": ORDERS["off"], "on": ORDERS["on"],
    }  # fmt: skip
    return FeatureAblation(**said, runs=tuple(runs), **decide_feature(FEATURE, ORDERS, runs, pairs))


def test_a_feature_is_judged_and_its_receipt_reads_back() -> None:
    row = decide(draw_runs(0, shift=0.1))
    assert (row.verdict, row.reasons) == (Verdict.TAX, ())
    assert [(change.name, change.verdict.value) for change in row.changes] == [
        ("step_time", "tax"), ("tokens_per_second", "tax"), ("memory", "noise"), ("loss", "noise"),
    ]  # fmt: skip
    assert FeatureAblation.model_validate_json(row.model_dump_json()) == row


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"ending": "died", "words": "rank 0 is at fault"}, "it ended as died: rank 0 is at fault"),
        ({"step_seconds": (0.1,) * 39}, "39 times and 40 losses of 40 steps"),
        ({"step_seconds": (0.0,) + (0.1,) * 39}, "a step has no finite loss, or took no time"),
        ({"losses": (3.0,) * 7 + (None,) * 33}, "a step has no finite loss, or took no time"),
        ({"forms": {"recompute": False}}, "forms.recompute was requested as true, and the run reports false"),
        ({"forms": {}}, "forms.recompute was requested as true, and the run reports nothing"),
        ({"parts": {}}, "no part layers.*.block was seen, which must be on te or native"),
        (
            {"parts": {"layers.0.block": {"requested": "te", "observed": "sdpa"}}},
            "layers.0.block ran on sdpa, and must be on te or native",
        ),
    ],
)
def test_a_run_that_is_no_evidence_is_reported_and_nothing_is_judged(more: dict[str, Any], said: str) -> None:
    runs = draw_runs(0)
    row = decide([*runs[:3], runs[3].model_copy(update=more)])
    assert row.verdict is Verdict.NOT_JUDGED
    assert any(said in reason and reason.startswith("run 4 (on): ") for reason in row.reasons), row.reasons
    assert len(row.runs) == 4  # what ran stands in the receipt
    assert row.changes == ()


def test_missing_runs_show_nothing() -> None:
    assert "3 of 4 runs are there" in decide(draw_runs(0)[:3]).reasons[0]


def test_committed_receipts_keep_their_verdicts() -> None:
    folder = Path(__file__).parents[2] / "docs" / "evidence" / "smoke" / "ablation"
    posture, verdicts = read_postures(), {}
    for file in sorted(folder.glob("*.json")):
        row = FeatureAblation.model_validate_json(file.read_text())
        if row.feature == "graphs":  # has been removed since
            continue
        found = decide_feature(posture.find(row.feature), {"off": row.off, "on": row.on}, row.runs, 2)
        assert found["changes"] == row.changes
        assert {change.verdict for change in row.changes if change.name == "loss"} == {Verdict.NOISE}
        verdicts[row.feature] = found["verdict"].value
    assert {name for name, verdict in verdicts.items() if verdict != "noise"} == {"fp8_experts", "recompute"}


# --- The verb, over a stub that speaks as the smoke run does. ---

OPEN, WRONG, NOTHING_SELECTED, MISSING = 0, 2, 3, 4
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
def rank():
    pace, memory = 0.1 * (1.1 if on else 1), 2**30 - 2**28 * on
    steps = [dict(loss=3.0 - step / 100, seconds=pace + draw.gauss(0, 2e-4)) for step in range(order["steps"])]
    forms = dict(order["forms"], recompute=False) if fault == "falls-back" else order["forms"]
    again = ("layers.0.recompute", dict(requested="recompute", observed="recompute", refusals=[]))
    return dict(
        rank=0, steps=steps, goodput=dict(tokens=256 * order["steps"], peak_bytes=dict(step=memory)),
        choices=dict([("norm", dict(requested="te", observed="native", refusals=[]))] + [again] * on),
        forms=forms,
        features=order["features"], versions=dict(torch="2"),
        model=dict(name=order["size"], pattern="AMEAR", parameters=1234, size=order["changes"]),
    )
print(json.dumps(dict(ending="done", words="", seconds=1.5, ranks=[rank()])))
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
    code, out, err = call("feature=recompute")
    assert code == OPEN, err
    assert "tax: recompute." in out
    row = read_row(tmp_path)
    assert [run.arm for run in row.runs] == ["off", "on", "off", "on"]
    assert (round(row.changes[0].ratio, 2), round(row.changes[0].off, 1)) == (1.1, 0.1)
    assert (row.runs[0].pattern, row.runs[0].parameters, row.runs[0].tokens) == ("AMEAR", 1234, 256)
    assert len(row.runs[3].step_seconds) == 40
    given = [json.loads(path.read_text()) for path in sorted((tmp_path / "out" / "recompute").glob("*/order.json"))]
    assert [order["forms"]["recompute"] for order in given] == [False, True, False, True]
    for order in given:  # they differ in nothing else
        del order["forms"]["recompute"], order["folder"]
    assert given == given[:1] * 4
    page = (tmp_path / "out" / "ablation.md").read_text()
    assert "recompute" in page


@pytest.mark.parametrize(
    ("fault", "runs", "said"),
    [
        ("dies", 2, "run 2 (on): it ended as exit 1: it gave no answer. Its last words: a library says"),
        ("falls-back", 2, "forms.recompute was requested as true, and the run reports false"),
        ("ends-badly", 1, "run 1 (off): it ended as exit 3: it answers done, and its process ended so"),
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


def asked(**more: Any) -> AblationOptions:
    said: dict[str, Any] = {
        "features": (), "size": "small", "steps": 40, "pairs": 2, "seed": 0,
        "device": "cuda", "target": "h200", "limit_s": 1.0, "receipts": Path(), "python": "",
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


def test_features_from_what_was_typed() -> None:
    posture = read_postures()
    assert read_features(["feature=mtp,recompute", "mtp"], posture) == ("mtp", "recompute")
    assert len(read_features(["feature=all"], posture)) == len(posture.features)
