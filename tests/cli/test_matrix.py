"""The verb `matrix`: its exit codes, and cells that are real processes on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacpp_validate.environments.cell import own_folder
from megacpp_validate.evidence.store import read_receipts
from tests.command_line import Run, Said, make_run
from tests.environments.places import make_h200_host


@pytest.fixture
def matrix(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The verb in this process."""
    for name in ("MEGACPP_PYTHON", "MEGACPP_DISABLE_TE", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    call = make_run(capfd, monkeypatch, "matrix")

    def run(*arguments: object, path: str = "/usr/bin:/bin") -> Said:
        monkeypatch.setenv("PATH", path)
        return call(*arguments)

    return run


def test_cells_run_here_and_a_second_run_at_once_is_refused(matrix: Run, tmp_path: Path) -> None:
    host = make_h200_host(tmp_path / "host", "write()")
    receipts = tmp_path / "receipts"
    words = ("--targets", "cpu", "--probes", "imports", "--python", host / "python3", "--receipts", receipts)
    with own_folder(receipts):
        done = matrix(*words)
        assert (done.code, "another run writes its receipts" in done.err) == (6, True)
    done = matrix(*words, "--launcher", "slurm", path="/nowhere")
    assert (done.code, "--launcher local" in done.err) == (6, True)
    done = matrix(*words, "--format", "json")
    assert done.code == 0, done.err
    (cell,) = json.loads(done.out)["cells"]
    assert (cell["cell"], cell["outcome"], cell["retries"]) == ("native-cpu-imports", "pass", [])
    (again,) = json.loads(matrix(*words, "--format", "json").out)["cells"]
    assert again["kept"] is True


def test_a_cell_on_a_gpu(matrix: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_h200_host(tmp_path / "host", "write(outcome='error', reason=os.environ['CUDA_VISIBLE_DEVICES'])")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8")
    probes = ("--targets", "h200", "--probes", "imports", "--receipts", tmp_path / "receipts")
    words = (*probes, "--environment", f"mine=python:{host / 'python3'}", "--format", "json")
    done = matrix(*words, path=f"{host}:/usr/bin:/bin")
    assert done.code == 1, done.err
    (cell,) = json.loads(done.out)["cells"]
    assert (cell["outcome"], cell["reason"]) == ("error", "8")
    (receipt,) = read_receipts(tmp_path / "receipts").found.values()
    assert receipt.outcome.value == "error"
