"""The script of action.yml on a small repository: which step it judges, where it writes, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megacpp_validate.canary.static.sources import CACHE_VARIABLE
from tests.canary.static.small_index import PACKAGE, use_index, write_index

ROOT = Path(__file__).parents[2]
LINEAR = "class Linear:\n    def __init__(self, in_features, out_features, bias=True): ...\n"
RELEASES = {"2.8.0": LINEAR, "2.9.0": LINEAR.replace("bias=True", "bias=False"), "2.10.0": LINEAR.replace("in_", "no_")}
TRAIN = "import transformer_engine.pytorch as te\n\nlayer = te.Linear(in_features=8, out_features=8)\n"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository that pins a release, uses it in one file, and has an index of three releases."""
    package = "transformer_engine/pytorch/__init__.py"
    use_index(monkeypatch, write_index(tmp_path / "index", {v: PACKAGE | {package: t} for v, t in RELEASES.items()}))
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    for name, value in {
        CACHE_VARIABLE: tmp_path / "cache", "PYTHONPATH": ROOT,
        "MEGACPP_TOOL": f"{sys.executable} -m megacpp_validate.cli",
        "GITHUB_STEP_SUMMARY": tmp_path / "summary.md", "GIT_CONFIG_GLOBAL": os.devnull,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    git(folder, "init", "--quiet")
    return folder


def git(folder: Path, *words: str) -> None:
    own = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)


def pin(folder: Path, line: str) -> None:
    (folder / "requirements.txt").write_text(f"torch\n{line}\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", line)


def act(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **{f"MEGACPP_{name.upper()}": value for name, value in settings.items()}}
    command = [str(ROOT / "ci" / "canary_action.sh")]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=120)


def test_a_change_of_the_pin_that_breaks_fails_at_the_line(repository: Path, tmp_path: Path) -> None:
    pin(repository, "transformer-engine[pytorch]==2.8.0")
    pin(repository, "Transformer_Engine[pytorch] == 2.10.0  # newer")
    done = act(repository, requirements="requirements.txt", sarif="canary.sarif")
    assert done.returncode == 1, done.stderr
    assert "::error file=train.py,line=3," in done.stdout
    assert "train.py" in (tmp_path / "summary.md").read_text()
    results = json.loads((repository / "canary.sarif").read_text())["runs"][0]["results"]
    (found,) = results
    assert found["level"] == "error"
    assert found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "train.py"


def test_a_risk_fails_where_it_is_to(repository: Path) -> None:
    assert act(repository, old="2.8.0", new="2.9.0").returncode == 0
    assert act(repository, old="2.8.0", new="2.9.0", fail_on="risk").returncode == 1


def test_a_pin_that_stays_and_what_is_not_known(repository: Path) -> None:
    pin(repository, "transformer-engine==2.8.0")
    shallow = act(repository, requirements="requirements.txt")
    assert (shallow.returncode, "fetch-depth: 2" in shallow.stdout) == (2, True)
    pin(repository, "transformer-engine==2.8.0")
    same = act(repository, requirements="requirements.txt")
    assert (same.returncode, "stays at 2.8.0" in same.stdout) == (0, True)
    pin(repository, "transformer-engine>=2.8")
    unknown = act(repository, requirements="requirements.txt")
    assert (unknown.returncode, "OLD ('2.8.0') and NEW ('')" in unknown.stdout) == (2, True)
    assert act(repository).returncode == 2


def test_an_unknown_release_keeps_its_exit_code(repository: Path) -> None:
    done = act(repository, old="2.8.0", new="2.99.0", sarif="canary.sarif")
    assert (done.returncode, "2.99.0" in done.stderr) == (2, True)
    assert not (repository / "canary.sarif").exists()


def test_every_input_reaches_the_script() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (step,) = action["runs"]["steps"]
    given = {f"MEGACPP_{name.upper().replace('-', '_')}": f"${{{{ inputs.{name} }}}}" for name in action["inputs"]}
    assert step["env"] == given
    script = (ROOT / "ci" / "canary_action.sh").read_text()
    assert [name for name in given if f"{{{name}" not in script] == []
    assert os.access(ROOT / "ci" / "canary_action.sh", os.X_OK)
