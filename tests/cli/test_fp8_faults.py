"""The verb that plants faults in the low-precision stack: copies, processes and verdict, and no green without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic import planting
from megacpp_validate.catalog.planted import FP8_FILE as FILE
from megacpp_validate.catalog.planted import FP8_HELD_OUT as HELD_OUT
from tests.command_line import Run, make_run_in
from tests.faulty_host import make_host

OPEN, CLOSED, WRONG, NOTHING_SELECTED, MISSING, NO_ENVIRONMENT = range(6)
HEAD = """
[[fault]]
id = "{name}"
releases = ["2.20.2"]
says = "It is planted."
cells = ["fp8_delayed"]
checks = ["*.scale"]
green = "fp8_current"
"""
EDIT = """
[[fault.edit]]
file = "__init__.py"
old = "{old}"
new = "{new}"
"""
SEEN = HEAD.format(name="seen") + EDIT.format(old="WRONG = ''", new="WRONG = 'fp8_delayed state.scale'")
OTHER = HEAD.format(name="other") + EDIT.format(old="WRONG = ''", new="WRONG = 'fp8_delayed forward'")
LOUD = HEAD.format(name="loud") + EDIT.format(old="WRONG = ''", new="WRONG = 'fp8_delayed fp8_current a.scale'")
WHOLE = (
    HEAD.format(name="whole") + "quick = false\n" + EDIT.format(old="WRONG = ''", new="WRONG = 'fp8_delayed a.scale'")
)
STALE = HEAD.format(name="stale") + EDIT.format(old="GONE", new="HERE")
# A probe that looks at the Transformer Engine that it imports; each run of one is a line in a file.
PROBE = """
import transformer_engine as te
open(r'{runs}', 'a').write(f"{{order['probe']}} {{order['quick']}} {{order['code']}} {{te.__file__}}" + chr(10))
words = te.WRONG.split()
wrong = order['probe'] in words
write(outcome='fail' if wrong else 'pass', reason='wrong' if wrong else '',
    checks=[dict(name=words[-1] if wrong else 'fine', passed=not wrong)])
"""


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return make_run_in(tmp_path, "fp8-faults", capfd, monkeypatch)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with one release, whose probes tell what they import; gives the file in which they write that they ran."""
    return make_host(
        tmp_path,
        PROBE,
        {FILE: SEEN + OTHER + LOUD + WHOLE + STALE, HELD_OUT: SEEN.replace("seen", "held")},
        monkeypatch,
    )


HERE = ("--target", "cpu", "--matrix", "matrix", "--copies", "copies", "--format", "json")


def verdicts(text: str) -> dict[str, str]:
    return {row["fault"]: row["verdict"] for row in json.loads(text)["faults"]}


def test_faults_are_planted_run_and_judged(host: Path, call: Run) -> None:
    code, out, err = call(*HERE)
    assert code == CLOSED, err
    assert verdicts(out) == {
        "seen": "caught", "other": "by-another", "loud": "caught", "whole": "caught", "stale": "not-planted",
    }  # fmt: skip
    assert [row["green"]["outcome"] for row in json.loads(out)["faults"][:3]] == ["pass", "pass", "fail"]
    ran = [line.split() for line in host.read_text().splitlines()]
    assert len(ran) == 2 * 6, "two cells of two clean runs and four copies, and nothing else"
    assert {probe for probe, *_ in ran} == {"fp8_delayed", "fp8_current"}
    assert {code for _, _, code, _ in ran} == {"fp8.recipe"}
    whole = {Path(file).parts[-3] for _, quick, _, file in ran if quick == "False"}
    assert whole == {"te-2.20.2", "whole"}


def test_what_was_held_out_has_a_table_of_its_own(host: Path, call: Run) -> None:
    code, out, err = call(*HERE, "--held-out", "--release", "2.20.2")
    assert (code, verdicts(out), json.loads(out)["held_out"]) == (OPEN, {"held": "caught"}, True), err


def test_started_again_it_runs_what_is_missing(host: Path, call: Run, tmp_path: Path) -> None:
    assert call(*HERE, "--faults", "seen")[0] == OPEN
    before = host.read_text().count("\n")
    lost = tmp_path / ".megacpp/fp8-faults/te2.20.2/faults/seen"
    next(lost.glob("*-fp8_delayed.json")).unlink()
    code, out, _ = call(*HERE, "--faults", "seen", "--judge-only")
    assert (code, verdicts(out)) == (MISSING, {"seen": "not-run"})
    code, out, err = call(*HERE, "--faults", "seen")
    assert (code, verdicts(out)) == (OPEN, {"seen": "caught"}), err
    assert host.read_text().count("\n") == before + 1


def test_without_a_gpu_it_is_not_run(host: Path, call: Run) -> None:
    for form in ("table", "markdown"):
        code, out, _ = call("--target", "h200", "--matrix", "matrix", "--format", form)
        assert code == MISSING
        assert "none ran." in " ".join(out.split())
        assert "not-run: the target h200 needs a GPU" in " ".join(out.split())
    assert not host.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--faults", "nothing"), "no fault 'nothing'"),
        (("--release", "1.0.0"), "not written for Transformer Engine 1.0.0"),
        (("--target", "h1000"), "no target 'h1000'"),
    ],
)
def test_wrong_arguments_are_told(arguments: tuple[str, ...], said: str, host: Path, call: Run) -> None:
    code, _, err = call("--matrix", "matrix", *arguments)
    assert code == WRONG
    assert said in err
    assert "Next step" in err


def test_a_release_that_lies_in_no_folder_is_told(host: Path, call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planting, "find_environments", lambda *_: ())
    code, _, err = call(*HERE)
    assert code == NO_ENVIRONMENT
    assert "lies in no overlay folder" in err
