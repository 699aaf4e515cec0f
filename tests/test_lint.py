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


@pytest.mark.parametrize("vendor", ["torch", "transformer_engine"])
def test_the_gate_must_not_import_torch(project: Path, vendor: str) -> None:
    (project / "megacpp_validate" / "gate" / "__init__.py").write_text(f"import {vendor}\n")
    done = lint_imports(project)
    assert done.returncode == 1
    assert f"megacpp_validate.gate -> {vendor}" in done.stdout


def test_the_canary_must_not_import_the_report_or_the_bridge(project: Path) -> None:
    (project / "megacpp_validate" / "canary" / "plant.py").write_text(
        "from ..report import document\nfrom ..bridge import imports\n"
    )
    done = lint_imports(project)
    assert done.returncode == 1
    assert "megacpp_validate.canary.plant -> megacpp_validate.report.document" in done.stdout
    assert "megacpp_validate.canary.plant -> megacpp_validate.bridge.imports" in done.stdout


@pytest.mark.parametrize("room", ["bridge", "native"])
def test_the_bridge_imports_nothing_of_the_project(project: Path, room: str) -> None:
    rooms = sorted(
        place.stem
        for place in (project / "megacpp_validate").iterdir()
        if place.stem not in ("bridge", "native", "__init__", "__pycache__", "py")
    )
    lines = [f"from .. import {name}\n" for name in rooms]
    (project / "megacpp_validate" / room / "plant.py").write_text("".join(lines))
    done = lint_imports(project)
    assert done.returncode == 1
    told = f"megacpp_validate.{room}.plant -> megacpp_validate."
    assert [name for name in rooms if told + name not in done.stdout] == []


def test_a_new_room_must_take_a_place(project: Path) -> None:
    (project / "megacpp_validate" / "attic.py").write_text("")
    done = lint_imports(project)
    assert done.returncode == 1
    assert "attic" in done.stdout


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
