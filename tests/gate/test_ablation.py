"""What pairs show: 10% is found, no effect is named, noise takes more pairs; and no evidence is no verdict."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.catalog.postures import Feature, read_postures
from megacpp_validate.gate.ablation import (
    ARMS,
    FIRST_LOOK,
    AblationOptions,
    FeatureAblation,
    Verdict,
    choose_features,
    critical_t,
    decide_feature,
    judge_pairs,
    plan_arms,
)
from tests.catalog.refusals import copy_matrix, edit
from tests.command_line import Run, make_run_in

FEATURE = Feature.model_validate({
    "id": "thing", "title": "It is there", "plain": "it is not", "source": "here",
    "off": {"forms": {"recompute": False}, "parts": {"layers.*.block": ["native"]}},
    "on": {"forms": {"recompute": True}, "parts": {"layers.*.block": ["te", "native"]}},
})  # fmt: skip
ORDERS: dict[Any, dict[str, Any]] = {
    arm: {"forms": {"recompute": arm == "on"}, "changes": {}, "features": {}} for arm in ARMS
}


def simulate(draw: random.Random, effect: float, noise: float, drift: float = 0.0) -> tuple[Verdict, int]:
    """Verdict and number of pairs, 32 at most, of blocks A B B A whose times have a noise and a drift."""
    pairs: list[tuple[float, float]] = []
    verdict = Verdict.UNDECIDED
    while verdict is Verdict.UNDECIDED and len(pairs) < 32:
        for turn in ((0, 1), (1, 0)):
            took = {}
            for place, arm in enumerate(turn):
                level = 0.1 * math.exp(drift * (2 * len(pairs) + place)) * (1 + effect * arm)
                took[arm] = level * math.exp(draw.gauss(0, noise))
            pairs.append((took[0], took[1]))
        verdict = judge_pairs(pairs)[0] if len(pairs) >= FIRST_LOOK else verdict
    return verdict, len(pairs)


@pytest.mark.parametrize(
    ("effect", "noise", "drift", "verdict", "share", "typical"),
    [
        (-0.1, 0.01, 0.0, Verdict.WIN, 1000, 4),
        (0.1, 0.01, 0.0, Verdict.TAX, 1000, 6),
        (0.0, 0.01, 0.0, Verdict.NO_EFFECT, 1000, 8),
        (0.0, 0.01, 0.02, Verdict.NO_EFFECT, 1000, 14),  # each block is 2% slower than the one before
        (-0.1, 0.05, 0.0, Verdict.WIN, 987, 16),
        (0.0, 0.2, 0.0, Verdict.UNDECIDED, 1000, 32),
    ],
)
def test_a_thousand_features(
    effect: float, noise: float, drift: float, verdict: Verdict, share: int, typical: int
) -> None:
    """All that are not decided so run out of pairs: none has a wrong verdict."""
    found = [simulate(random.Random(seed), effect, noise, drift) for seed in range(1000)]
    assert sum(one is verdict for one, _ in found) == share
    assert {one for one, _ in found} <= {verdict, Verdict.UNDECIDED}
    assert sorted(pairs for _, pairs in found)[500] == typical


def test_student_of_each_look() -> None:
    """Two-sided: 0.0005 with 3 degrees of freedom, 0.001 / 6 with 5. By integration of the density."""
    for pairs, share in ((4, 0.001 / 2), (6, 0.001 / 6)):
        t, freedom, width = critical_t(pairs), pairs - 1, 1e-3
        scale = math.gamma(pairs / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
        inside = sum((1 + (place * width) ** 2 / freedom) ** (-pairs / 2) for place in range(round(t / width))) * width
        assert 2 * scale * inside == pytest.approx(1 - share, abs=1e-3)


def answer(**more: Any) -> dict[str, Any]:
    arms = {
        arm: {
            "model": {"size": {}}, "features": {}, "peak_bytes": 100,
            "forms": {"recompute": arm == "on"}, "choices": {"layers.0.block": {"observed": "native"}},
            "steps": [{"loss": 3.0}],
        } | (more if arm == "on" else {})
        for arm in ARMS
    }  # fmt: skip
    return {"pairs": [(0.1, 0.11)] * 3 + [(0.1, 0.1101)], "steps": 2, "arms": arms}


def decide(given: dict[str, Any]) -> FeatureAblation:
    said: dict[str, Any] = {
        "tool": "test", "feature": "thing", "title": "It", "plain": "not it",
        "off": ORDERS["off"], "on": ORDERS["on"],
    }  # fmt: skip
    return FeatureAblation(**said, **decide_feature(FEATURE, ORDERS, given))


def test_a_feature_is_judged_and_its_receipt_reads_back() -> None:
    row = decide(answer())
    assert (row.verdict, row.reasons, round(row.ratio, 3)) == (Verdict.TAX, (), 1.1)
    assert FeatureAblation.model_validate_json(row.model_dump_json()) == row


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"forms": {"recompute": False}}, "on: forms.recompute was requested as true, and the run reports false"),
        ({"forms": {}}, "forms.recompute was requested as true, and the run reports nothing"),
        ({"choices": {}}, "no part layers.*.block was seen, which must be on te or native"),
        (
            {"choices": {"layers.0.block": {"observed": "sdpa"}}},
            "layers.0.block ran on sdpa, and must be on te or native",
        ),
    ],
)
def test_what_is_no_evidence_is_reported_and_nothing_is_judged(more: dict[str, Any], said: str) -> None:
    row = decide(answer(**more))
    assert (row.verdict, row.ratio) == (Verdict.NOT_JUDGED, 0)
    assert said in row.reasons[0]


# --- The verb, over a stub that speaks as the smoke run does. ---

OPEN, WRONG, MISSING, NO_ENVIRONMENT = 0, 2, 4, 5
# A process that trains nothing: recompute costs 10%; what goes wrong stands in the variable STUB.
STUB = """#!{python} -SE
import json, os, sys
if sys.argv[2] == "-c":
    names = ("python", "executable", "machine", "te", "te_folder", "why_no_gpu")
    sys.exit(print(json.dumps(dict.fromkeys(names, "") | dict(torch="2.13.0", gpu=None))))
assert sys.argv[1:] == ["-P", "-u", "-m", "megacpp_validate.training.smoke"], sys.argv
order, fault = json.load(sys.stdin), os.environ.get("STUB", "")
print("a library says something")
for feature, arms in order["arms"].items():
    if fault == "dies" and feature == "mtp":
        sys.exit("no memory left")
    if fault == "slow" and feature == "mtp":
        break
    cost = 1.1 if feature == "recompute" else 1.0001
    seen = dict()
    for arm, given in arms.items():
        again = dict(observed="recompute") if given["forms"].get("recompute") else dict(observed="native")
        seen[arm] = dict(
            steps=[dict(loss=3.0)], choices={{"layers.0.recompute": again}}, forms=given["forms"], peak_bytes=2**30,
            features=given["features"], model=dict(size=given["changes"]),
        )
    pairs = [[0.1, 0.1 * cost], [0.1, 0.1002 * cost], [0.1001, 0.1 * cost], [0.1, 0.1 * cost]]
    answer = dict(fault="it raised") if fault == feature else dict(pairs=pairs, steps=2, arms=seen)
    with open(os.path.join(order["folder"], feature + ".json"), "w") as stream:
        json.dump(answer, stream)
"""


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    stub = tmp_path / "python-stub"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    run = make_run_in(tmp_path, "ablate", capfd, monkeypatch)
    shared = ("--python", str(stub), "--device", "cpu", "--receipts", "out", "--format", "json")
    return lambda *arguments: run("feature=recompute,mtp,dsa_index_reuse", *shared, *arguments)


@pytest.mark.parametrize(
    ("fault", "verdicts", "said"),
    [
        ("", ["tax", "no-effect", "no-effect"], None),
        ("mtp", ["tax", "not-judged", "no-effect"], "it raised"),
        # What was decided is kept, and another process takes what is left.
        (
            "dies",
            ["tax", "not-judged", "no-effect"],
            "its process ended by exit 1: a library says something | no memory",
        ),
        ("slow", ["tax", "not-judged", "not-judged"], "the budget of 900 s ended. Next step: run the feature alone"),
    ],
)
def test_features_run_in_one_process_and_are_judged_one_by_one(
    call: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, verdicts: list[str], said: str | None
) -> None:
    monkeypatch.setenv("STUB", fault)
    code, out, err = call()
    assert code == (MISSING if said else OPEN), err
    rows = json.loads(out)["features"]
    assert [row["verdict"] for row in rows] == verdicts
    assert said is None or said in rows[1]["reasons"][0]
    kept = FeatureAblation.model_validate_json((tmp_path / "out" / "recompute.json").read_text())
    assert (round(kept.ratio, 2), kept.off["size"], len(kept.pairs)) == (1.1, "tiny", 4)


def test_a_machine_without_a_gpu_is_refused_before_the_start(call: Run) -> None:
    code, _, err = call("--device", "cuda")
    assert (code, "this machine has no GPU" in err) == (NO_ENVIRONMENT, True), err


def test_an_arm_in_a_preset_that_was_rolled_back_does_not_start(call: Run, tmp_path: Path) -> None:
    matrix = copy_matrix(tmp_path / "matrix")
    edit(
        matrix / "postures.toml",
        ("changes = { mtp = true }", 'precision = "delayed"\nfeatures = { preset = "routers" }'),
    )
    code, _, err = call("--matrix", matrix)
    assert (code, "mtp does not start: the FP8 preset routers was rolled back" in " ".join(err.split())) == (
        WRONG,
        True,
    )


def asked(**more: Any) -> AblationOptions:
    said: dict[str, Any] = {
        "features": (), "pairs": 64, "seed": 0, "device": "cuda", "target": "h200", "receipts": Path(),
    }  # fmt: skip
    return AblationOptions(**{**said, **more})


def test_arms_differ_in_the_feature_alone_and_begin_with_the_posture() -> None:
    posture = read_postures(read_catalog())
    for feature in posture.features:
        arms = plan_arms(posture, feature, asked())
        differ = {key for key in arms["on"] if arms["on"][key] != arms["off"].get(key)}
        assert differ == set(feature.on.as_order), feature.id
    (recompute,) = (feature for feature in posture.features if feature.id == "recompute")
    arms = plan_arms(posture, recompute, asked())
    assert arms["off"]["forms"]["moe"] == "jagged"
    assert (arms["off"]["watch"], arms["off"]["profile"]) == (False, False)  # nobody looks on


def test_features_from_what_was_typed() -> None:
    posture = read_postures(read_catalog())
    assert [one.id for one in choose_features(["feature=mtp,recompute", "mtp"], posture)] == ["recompute", "mtp"]
    assert len(choose_features(["feature=all"], posture)) == len(posture.features)
