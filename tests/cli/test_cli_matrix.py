"""The verb of the matrix: what is selected, what a plan says, and its exit codes; cells are real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from megacpp_validate.environments.fanout.choose import Wish, choose_cells

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.cli.sessions import matrix_verbs
from megacpp_validate.environments.plan import UnknownTarget
from megacpp_validate.environments.restart import own_folder
from megacpp_validate.evidence.store import read_receipts
from tests.command_line import Run, Said, make_run
from tests.environments.places import make_h200_host

assert matrix_verbs


@pytest.fixture
def matrix(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The verb in this process."""
    for name in ("MEGACPP_PYTHON", "MEGACPP_DISABLE_TE", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    call = make_run(capfd, monkeypatch, "matrix")

    def run(*arguments: object, path: str = "/usr/bin:/bin") -> Said:
        monkeypatch.setenv("PATH", path)
        return call(*arguments)

    return run


def chosen(catalog: Catalog, *targets: str, **more: tuple[str, ...]) -> list[str]:
    return [cell.cell for cell in choose_cells(catalog, Wish(targets, **more))]


def test_what_is_selected(catalog: Catalog) -> None:
    cpu = chosen(catalog, "cpu")
    assert len(cpu) == 14
    assert cpu[:2] == ["native-cpu-imports", "native-cpu-attention"]
    assert not any("fp8" in cell for cell in cpu)
    h200 = chosen(catalog, "h200")
    assert {cell.split("-")[0] for cell in h200} == {catalog.pinned.id}
    assert any("fp8_" in cell for cell in h200)
    both = chosen(catalog, "cpu", "h200", stacks=("native", "te2.17.1"), probes=("attention",))
    assert both == ["native-cpu-attention", "native-h200-attention", "te2.17.1-h200-attention"]
    mine = chosen(catalog, "cpu", environments=("one", "two"), cells=("*-permute", "one-cpu-imports"))
    assert mine == ["one-cpu-imports", "one-cpu-permute", "two-cpu-permute"]
    assert chosen(catalog, "cpu", stacks=("te2.17.1",)) == []
    ranks = {cell.probe: cell.gpus for cell in choose_cells(catalog, Wish(("h200",)))}
    assert (ranks["attention"], ranks["smoke_scaled_bf16_4"]) == (1, 4)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"stacks": ("te9",)}, "there is no stack 'te9'"),
        ({"probes": ("atention",)}, "there is no probe 'atention'"),
        ({"cells": ("native-cpu-no",)}, "there is no cell 'native-cpu-no'"),
    ],
)
def test_what_there_is_not_is_refused_by_name(more: dict[str, tuple[str, ...]], said: str, catalog: Catalog) -> None:
    with pytest.raises(UnknownTarget, match=f"{said}.*Next step: choose from"):
        choose_cells(catalog, Wish(("cpu",), **more))


def test_a_plan_starts_nothing_and_asks_for_what_the_site_says(matrix: Run, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('[target.h200]\npartition = "big"\n')
    words = ("--targets", "cpu,h200", "--probes", "imports,attention,smoke_scaled_bf16_4", "--cluster", str(site))
    # A tool that were started would not be found.
    done = matrix(*words, "--plan", "--launcher", "slurm", "--format", "json", path=str(tmp_path))
    assert done.code == 0, done.err
    cells = {cell["cell"]: cell for cell in json.loads(done.out)["cells"]}
    assert cells["te2.20.2-h200-attention"]["after"] == "te2.20.2-h200-imports"
    assert cells["native-cpu-attention"]["after"] == ""
    assert {"--partition=big", "--gres=gpu:4"} <= set(cells["te2.20.2-h200-smoke_scaled_bf16_4"]["asks"])
    assert not (tmp_path / ".megacpp").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--targets", "cpu", "--stacks", "te2.17.1"), 3, "no cell is selected"),
        (("--targets", "cpu", "--probes", ""), 3, "no cell is selected"),
        (("--targets", "tpu"), 2, "there is no target 'tpu'"),
        (("--targets", "cpu", "--environment", "one"), 2, "is no environment"),
        (("--targets", "cpu", "--cluster", "nowhere.toml"), 2, "cannot be read"),
        (("--targets", "cpu", "--format", "junit"), 2, "not one of"),
        (("--targets", "cpu", "--launcher", "slurm", "--plan", "--limit", "inf"), 2, "--limit"),
        (("--targets", "cpu", "--launcher", "slurm", "--plan", "--limit", "604801"), 2, "--limit"),
        (("--targets", "cpu", "--launcher", "slurm", "--plan", "--limit", "nan"), 2, "--limit"),
        (("--targets", "cpu", "--plan", "--wait", "nan"), 2, "--wait"),
        (("--targets", "cpu", "--environment", "x=python:/nowhere/python"), 5, "Of 14 cells not all ran"),
    ],
)
def test_arguments_have_exit_codes(words: tuple[str, ...], code: int, said: str, matrix: Run, tmp_path: Path) -> None:
    done = matrix(*words, "--receipts", str(tmp_path / "receipts"))
    assert done.code == code, done.err
    assert said in done.err + done.out


def test_without_a_scheduler_it_says_so_and_what_it_says_helps(matrix: Run, tmp_path: Path) -> None:
    host = make_h200_host(tmp_path / "host", "write()")
    words = ("--targets", "cpu", "--probes", "imports", "--receipts", tmp_path, "--python", host / "python3")
    done = matrix(*words, "--launcher", "slurm", path="/nowhere")
    assert (done.code, "there is no Slurm here: sbatch is not on the PATH" in done.err) == (6, True)
    assert "use --launcher local" in done.err
    done = matrix(*words, "--launcher", "local")  # nothing was given, so nothing is on its way
    assert (done.code, "The one cell holds: 1 pass." in done.out) == (0, True), done.err


def test_cells_run_here_and_a_second_run_at_once_is_refused(matrix: Run, tmp_path: Path) -> None:
    host = make_h200_host(tmp_path / "host", "write()")
    receipts = tmp_path / "receipts"
    words = ("--targets", "cpu", "--probes", "imports", "--python", host / "python3", "--receipts", receipts)
    with own_folder(receipts):
        done = matrix(*words)
        assert (done.code, "another run writes its receipts" in done.err) == (6, True)
    done = matrix(*words, "--format", "json")
    assert done.code == 0, done.err
    (cell,) = json.loads(done.out)["cells"]
    assert (cell["cell"], cell["outcome"], cell["retries"]) == ("native-cpu-imports", "pass", [])
    assert "1/1 pass" in done.err
    again = matrix(*words, "--format", "markdown")
    assert "| ✓ pass | native-cpu-imports | (kept) |" in again.out


def test_on_a_gpu_what_cannot_be_imported_blocks_the_rest_without_a_process(
    matrix: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    host = make_h200_host(
        tmp_path / "host",
        f"open({str(ran)!r}, 'a').write(order['probe'] + ' ')\nwrite(outcome='import-error', reason='no', checks=[])",
    )
    probes = ("--targets", "h200", "--probes", "imports,attention,permute", "--receipts", tmp_path / "receipts")
    words = (*probes, "--environment", f"mine=python:{host / 'python3'}", "--format", "json")
    done = matrix(*words, path=f"{host}:/usr/bin:/bin")
    assert done.code == 1, done.err
    cells = {cell["probe"]: cell for cell in json.loads(done.out)["cells"]}
    assert {probe: cell["outcome"] for probe, cell in cells.items()} == {
        "imports": "import-error", "attention": "blocked", "permute": "blocked",
    }  # fmt: skip
    assert cells["permute"]["reason"] == "blocked by mine-h200-imports: no"
    assert ran.read_text() == "imports "


def test_cells_of_another_machine_are_not_run_and_have_receipts_that_say_so(matrix: Run, tmp_path: Path) -> None:
    words = ("--targets", "h200", "--stacks", "native", "--probes", "imports", "--receipts", tmp_path)
    done = matrix(*words, "--python", sys.executable)
    assert (done.code, "1 not run" in done.out) == (4, True)
    (receipt,) = read_receipts(tmp_path).found.values()
    assert (receipt.cell, receipt.outcome.value) == ("native-h200-imports", "not-run")
    assert "there is none" in receipt.reason
