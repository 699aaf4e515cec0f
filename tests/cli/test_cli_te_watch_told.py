"""What the watch has learnt is told, once, whatever ends a run: verdicts, withdrawals, and what a GPU saw."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.upgrade_result import UpgradeResult
from megacpp_validate.canary.static.findings import ChangeKind, Finding, Impact, ReleaseSource, StaticResult
from megacpp_validate.cli.app import TOOL
from megacpp_validate.cli.canary import te_watch_runs
from megacpp_validate.evidence.values import Cause
from tests.canary.static.small_index import serve, serve_nothing, use_index
from tests.cli import test_cli_te_watch as place
from tests.cli.test_cli_te_watch import BROKEN, CLOSED, GOOD, MISSING, OPEN, WRONG, gpu_answer, judged, kept, offer
from tests.command_line import Run

assert GOOD != BROKEN
own_cache, matrix, state, watch = place.own_cache, place.matrix, place.state, place.watch
NOTHING_SELECTED, INTERRUPTED, LIMIT_S = 3, 130, 15.0


def command(state: Path, matrix: Path, *words: str) -> list[str]:
    code = "from megacpp_validate.cli import main, te_watch_verbs; main()"
    return [sys.executable, "-c", code, "te-watch", "--matrix", str(matrix), "--state", str(state), *words]


def leave_answer(state: Path, release: str) -> None:
    """What te-canary said of a release that breaks permute, in the place where a killed run has left it."""
    finding = Finding(
        module="permute", modules=("permute",), kind=ChangeKind.REMOVED, impact=Impact.BREAKING, cause=Cause.API,
        symbol="a.b",
    )  # fmt: skip
    old, new = (ReleaseSource(version=version, wheel="w", sha256="") for version in ("2.9.0", release))
    static = StaticResult(tool=TOOL, old=old, new=new, downgrade=False, modules=(), findings=(finding,))
    (state / "results").mkdir(parents=True, exist_ok=True)
    answer = UpgradeResult(tool=TOOL, target="", tiers=("static",), static=(static,))
    (state / "results" / f"{release}.json").write_text(answer.model_dump_json())


def row_of(state: Path, release: str) -> dict[str, object]:
    rows = json.loads((state / "state.json").read_text())["releases"]
    return next(row for row in rows if row["version"] == release)


def test_a_break_that_nobody_could_be_told_is_told_by_the_next_run_and_then_no_more(
    watch: Run, state: Path, matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path / "index", monkeypatch)
    leave_answer(state, "2.10.0")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command(state, matrix), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode not in (OPEN, CLOSED), done.stderr
    assert (row_of(state, "2.10.0")["standing"], row_of(state, "2.10.0")["untold"]) == ("judged", "verdict")

    again = watch()
    assert (again.code, again.told["judged"]) == (CLOSED, ["2.10.0"])
    assert again.told["issues"] == [str(state / "issues" / "2.10.0.md")]
    assert "2.11.0rc1" in {row["version"] for row in again.told["changed"]}  # what was left out is told too
    last = watch()
    assert (last.code, last.told["changed"], last.told["judged"]) == (OPEN, [], [])


def test_what_a_gpu_saw_and_nobody_could_be_told_is_told_by_the_next_run(
    watch: Run, state: Path, matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(state, matrix)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "2.10.0.json").write_text(gpu_answer("2.10.0"))
    monkeypatch.setattr(te_watch_runs, "tell_whole", die)
    assert watch("--gpu-results", tmp_path / "gpu").code == INTERRUPTED
    monkeypatch.undo()
    offer(tmp_path / "index", monkeypatch, broken="2.10.0")
    monkeypatch.setenv("NO_COLOR", "1")
    said = subprocess.run(command(state, matrix), capture_output=True, text=True, check=False)
    assert said.returncode == CLOSED, said.stderr
    assert "2.10.0 breaks the bridge" in said.stdout


@pytest.mark.parametrize(
    "words", [["--format", "html"], ["--output", "/proc/x/y.json"], ["--output", "/"]], ids=" ".join
)
def test_what_cannot_be_told_is_refused_before_anything_is_judged(
    words: list[str], watch: Run, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path / "index", monkeypatch)
    assert watch(*words).code == WRONG
    assert not state.exists()


def die(*_: object, **__: object) -> None:
    """As if it was ended here."""
    raise KeyboardInterrupt


def test_a_withdrawal_is_in_its_issue_before_anything_is_judged(
    watch: Run, state: Path, matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(state, matrix)
    page = offer(tmp_path / "index", monkeypatch, broken="2.11.0")  # 2.10.0 is deleted, and the pinned one yanked
    page.write_text(page.read_text().replace('-2.9.0-py3-none-any.whl"', '-2.9.0-py3-none-any.whl" data-yanked="no"'))
    monkeypatch.setattr(te_watch_runs, "judge", die)
    assert watch().code == INTERRUPTED
    assert "deleted from the index" in (state / "issues" / "2.10.0.md").read_text()
    assert "which is pinned, was withdrawn" in (state / "issues" / "2.9.0.md").read_text()
    assert (row_of(state, "2.10.0")["withdrawn"], row_of(state, "2.10.0")["untold"]) == (
        "deleted from the index", "look",
    )  # fmt: skip
    leave_answer(state, "2.11.0")
    monkeypatch.undo()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index" / "simple").as_uri())
    told = subprocess.run(
        command(state, matrix, "--format", "json"), capture_output=True, text=True, check=False
    ).stdout  # fmt: skip
    assert {row["version"] for row in json.loads(told)["changed"]} >= {"2.9.0", "2.10.0", "2.11.0"}
    assert json.loads(told)["judged"] == ["2.11.0"]


def test_an_answer_without_evidence_takes_no_verdict_away_and_the_same_one_again_is_nothing_new(
    watch: Run, state: Path, matrix: Path, tmp_path: Path
) -> None:
    judged(state, matrix)
    file = tmp_path / "gpu" / "2.10.0.json"
    file.parent.mkdir()
    file.write_text(gpu_answer("2.10.0"))
    first = watch("--gpu-results", file.parent, "--format", "table")
    assert first.code == CLOSED
    assert "2.10.0  judged against 2.9.0, exit code 1, of the gpu tier" in first.out
    assert "no index was asked" in first.out
    before, known = kept(state), (state / "state.json").read_bytes()

    again = watch("--gpu-results", file.parent)
    assert (again.code, again.told["changed"], again.told["judged"], again.told["left"]) == (OPEN, [], [], [])
    assert kept(state) == before

    file.write_text(gpu_answer("2.10.0", lost=True))
    lacking = watch("--gpu-results", file.parent)
    assert (lacking.code, lacking.told["changed"], lacking.told["gpu"]) == (MISSING, [], [])
    assert lacking.told["left"] == ["2.10.0.json lacks evidence: the verdict that there is on 2.10.0 stays"]
    assert (kept(state), (state / "state.json").read_bytes()) == (before, known)

    file.unlink()
    assert watch("--gpu-results", file.parent).code == NOTHING_SELECTED


def find_started(scratch: Path) -> list[list[bytes]]:
    """The commands of all processes whose temporary files go there: this test's, and nobody else's."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(scratch).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().split(b"\0"))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_watch_ends_its_canary(
    number: signal.Signals, state: Path, matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with serve_nothing() as nobody:  # te-canary waits for a wheel that never comes
        names = [f"transformer_engine-{version}-py3-none-any.whl" for version in ("2.9.0", "2.10.0")]
        page = "".join(f'<a href="{nobody}/{name}">{name}</a>' for name in names)
        with serve({"/transformer-engine/": (200, "text/html", page.encode())}) as url:
            use_index(monkeypatch, url)
            with subprocess.Popen(command(state, matrix), stderr=subprocess.PIPE, text=True) as verb:
                wait_for(lambda: any(b"download" in words for words in find_started(scratch)))
                verb.send_signal(number)
                assert verb.wait(LIMIT_S) == (INTERRUPTED if number == signal.SIGTERM else -number)
                wait_for(lambda: not find_started(scratch))
                if number == signal.SIGTERM:
                    assert verb.stderr is not None
                    assert "interrupted: what was judged is kept" in verb.stderr.read()
                    assert list(scratch.iterdir()) == []


def wait_for(happens: Callable[[], object]) -> None:
    until = time.monotonic() + LIMIT_S
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.02)
