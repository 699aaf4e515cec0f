"""The architecture fails the build: plants in a copy of the project, judged by the linters that `nox -s lint` runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("megacpp_validate", "ci"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def lint_imports(project: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(project), "COLUMNS": "200"}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


def house_rules(project: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "ci/house.py"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


def test_the_project_as_it_is_passes(project: Path) -> None:
    done = lint_imports(project)
    assert done.returncode == 0, done.stdout
    assert house_rules(project).returncode == 0


PLANTS = {
    "a host room imports torch": ("gate/__init__.py", "import torch\n", "gate -> torch"),
    "the canary imports the report": ("canary/plant.py", "from ..report import document\n", "canary.plant -> megacpp_"),
    "the bridge imports the project": (
        "bridge/plant.py",
        "from .. import errors\n",
        "bridge.plant -> megacpp_validate.errors",
    ),
    "what it copies does": ("native/plant.py", "from .. import errors\n", "native.plant -> megacpp_validate.errors"),
    "a room without a place": ("attic.py", "", "attic"),
}


@pytest.mark.parametrize(("file", "text", "told"), PLANTS.values(), ids=PLANTS)
def test_an_import_against_the_layers_is_refused(project: Path, file: str, text: str, told: str) -> None:
    (project / "megacpp_validate" / file).write_text(text)
    done = lint_imports(project)
    assert (done.returncode, told in done.stdout) == (1, True), done.stdout


def test_names_that_say_nothing_are_refused(project: Path) -> None:
    names = [f"megacpp_validate/canary/{name}.py" for name in ("utils", "helpers", "common", "misc", "base", "manager")]
    for name in names:
        (project / name).write_text("")
    done = house_rules(project)
    assert done.returncode == 1
    assert all(name in done.stderr for name in names)


def test_a_file_and_a_function_that_grew_too_far_are_refused(project: Path) -> None:
    body = "def f():\n" + "    x = 1\n" * 61
    (project / "megacpp_validate" / "canary" / "long.py").write_text(body + "\n" * 600)
    done = house_rules(project)
    assert "600 at most" in done.stderr
    assert "f has 62 lines, 60 at most" in done.stderr
