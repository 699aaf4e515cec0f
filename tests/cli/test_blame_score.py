"""The verb of the blame score: copies, processes and verdict together, and no green without evidence."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic import planting
from megacpp_validate.catalog.planted import TE_FILE as FILE
from megacpp_validate.environments.interpreter import put_over
from megacpp_validate.environments.stacks import Found
from tests.catalog.refusals import copy_matrix
from tests.command_line import Run, make_run_in
from tests.environments.places import LAPTOP, make_probes
from tests.environments.site_folders import make_te

CLOSED = 1
ROWS = """
[[fault]]
id = "attention-wrong"
module = "attention"
cause = "numerics"
releases = ["2.20.2"]
says = "Attention is wrong."
[[fault.edit]]
file = "__init__.py"
old = "WRONG = ''\\n"
new = "WRONG = 'attention native_block'\\n"

[[fault]]
id = "permute-wrong"
module = "permute"
cause = "numerics"
releases = ["2.20.2"]
says = "Permute is right, so nobody can be named."
[[fault.edit]]
file = "__init__.py"
append = "NOTHING = True\\n"
"""
# A probe that looks at the Transformer Engine that it imports; each run of one is a line in a file.
PROBE = """
import transformer_engine as te
open(r'{runs}', 'a').write(cell + ' ' + te.__file__ + chr(10))
wrong = order['probe'] in te.WRONG.split()
write(environment=order['environment'], tool=order['tool'], commit=order['commit'],
    outcome='fail' if wrong else 'pass', reason='wrong' if wrong else '',
    checks=[dict(name='bf16.gqa4.d64.forward', passed=not wrong)])
"""


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return make_run_in(tmp_path, "blame-score", capfd, monkeypatch)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with one release, whose probes tell what they import; gives the file in which they write that they ran."""
    runs = tmp_path / "runs"
    bare = make_probes(tmp_path, PROBE.format(runs=runs))
    bare = replace(bare, variables={**bare.variables, "PYTHONDONTWRITEBYTECODE": "1"})
    clean = make_te(tmp_path / "overlays" / "te-2.20.2", "2.20.2")
    (clean / "transformer_engine" / "__init__.py").write_text("WRONG = ''\n")
    found = Found("2.20.2", str(clean), put_over(bare, (clean,)))
    monkeypatch.setattr(planting, "host_interpreter", lambda *_: bare)
    monkeypatch.setattr(planting, "read_facts", lambda *_: LAPTOP)
    monkeypatch.setattr(planting, "find_environments", lambda *_: (found,))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of the copies
    (copy_matrix(tmp_path / "matrix") / FILE).write_text(ROWS)
    return runs


HERE = ("--target", "cpu", "--matrix", "matrix", "--clean", "1")


def verdicts(text: str) -> dict[str, str]:
    return {row["id"]: row["verdict"] for row in json.loads(text)["faults"]}


def test_faults_are_planted_run_and_judged(host: Path, call: Run) -> None:
    code, out, err = call(*HERE, "--format", "json")
    assert code == CLOSED, err
    assert verdicts(out) == {"attention-wrong": "right", "permute-wrong": "missed"}
    assert json.loads(out)["faults"][0]["seen"] == [{"by": "attention", "names": ["numerics", "native_block"]}]
    assert [row["verdict"] for row in json.loads(out)["clean"]] == ["quiet"]
    ran = [line.split() for line in host.read_text().splitlines()]
    assert len(ran) == 7 * 4, "the clean run, two faults and a control"
    assert {Path(file).parts[-3] for _, file in ran} == {
        "te-2.20.2", "attention-wrong", "permute-wrong", "clean-copy"
    }  # fmt: skip
