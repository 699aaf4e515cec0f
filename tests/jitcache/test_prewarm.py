"""A prewarm that was killed goes on: what is finished stays, and nothing half written is believed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.prewarm import PrewarmTask, read_prewarm
from megacpp_validate.errors import Exit, InfrastructureFailed, WrongArguments
from megacpp_validate.jitcache.cache import check_sealed, is_sealed, open_working
from megacpp_validate.jitcache.layout import JitCompile, Manifest, list_files
from megacpp_validate.jitcache.prewarm import (
    JitTaskRow,
    JitTaskState,
    PrewarmResult,
    Progress,
    fill,
    open_prewarm,
)
from megacpp_validate.jitcache.stack import Answer, JitOptions, select_tasks
from megacpp_validate.jitcache.verify import JitVerdict, JitVerifyResult, JitVerifyRow
from megacpp_validate.process import Processes
from tests.sealed_caches import GROUP, KERNEL, STACK, TASK, make_sealed, put

OTHER = TASK.model_copy(update={"id": "fa4_d64", "settings": {"head_dim": "64"}})
COMPILED = JitCompile(library="fa4", kernel="fwd", shape="d128")
BLANK = Manifest(architecture="sm_90a", target="h200", folder="f", mode="nvcc", stack=STACK, tasks=(), files=())


@contextmanager
def prewarm(folder: Path, **changes: Any) -> Iterator[Progress]:
    blank = BLANK.model_copy(update={"folder": str(folder), **changes})
    with open_prewarm(folder, blank) as progress:
        yield progress


def _paths(folder: Path) -> list[str]:
    return list(list_files(folder))


def _be_killed(folder: Path) -> None:
    """Finish one task, and die in the middle of the other."""
    with prewarm(folder) as progress:
        put(folder / "fa4" / "one.o", b"one")
        progress.keep(TASK, Answer(compiled=(COMPILED,), seconds=1.5))
        put(folder / "fa4" / "half.o", b"ha")
        put(folder / "fa4" / ".two.17.tmp.o", b"h")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_prewarm_keeps_what_was_finished_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    put(folder / "triton" / "earlier.cubin", b"of a training run that was there before")
    process = multiprocessing.get_context("fork").Process(target=_be_killed, args=(folder,))
    process.start()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    assert not is_sealed(folder)
    with prewarm(folder) as progress:
        assert _paths(folder) == ["fa4/one.o", "triton/earlier.cubin"]
        assert not list(folder.rglob("*.tmp.o"))
        progress.keep(TASK, Answer(hits={"fa4": 1}))
        (done,) = progress.manifest.tasks
        assert (done.compiled, done.asked) == ((COMPILED,), ("fa4",)), "what an earlier run compiled is remembered"


@pytest.mark.parametrize("damage", [b"on", None])
def test_a_file_that_is_not_as_it_was_left_undoes_all(damage: bytes | None, tmp_path: Path) -> None:
    """Truncated after the prewarm had ended: it would be sealed, with a hash of its own, as if it were a kernel."""
    folder = tmp_path / "sm_90a"
    with prewarm(folder) as progress:
        put(folder / "fa4" / "one.o", b"one")
        put(folder / "fa4" / "two.o", b"two")
        progress.keep(TASK, Answer())
    (folder / "fa4" / "one.o").unlink()
    if damage is not None:
        put(folder / "fa4" / "one.o", damage)
    with prewarm(folder) as progress:
        assert progress.manifest.tasks == ()
        assert _paths(folder) == ["fa4/two.o"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architecture": "sm_100a"}, "architecture sm_90a"),
        ({"stack": STACK.model_copy(update={"machine": "aarch64"})}, "machine x86_64 .here aarch64."),
    ],
)
def test_caches_of_another_stack_or_architecture_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    sealed, _ = make_sealed(tmp_path / "sealed")
    work = Path(open_working(sealed, tmp_path / "work").folder)
    with pytest.raises(WrongArguments, match=said), prewarm(work, **change):
        pass
    with prewarm(work):
        pass


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    with (
        prewarm(folder),
        pytest.raises(InfrastructureFailed, match="another prewarm works"),
        prewarm(folder),
    ):
        pass


def test_a_working_copy_is_continued(tmp_path: Path) -> None:
    """Its files are as the sealed manifest has them, but for Triton's groups, which name the new folder."""
    sealed, _ = make_sealed(tmp_path / "sealed")
    work = Path(open_working(sealed, tmp_path / "a-longer-name").folder)
    with prewarm(work) as progress:
        progress.keep(OTHER, Answer(hits={"fa4": 1}))
        assert [(task.id, task.compiled) for task in progress.manifest.tasks] == [(TASK.id, (KERNEL,)), (OTHER.id, ())]
        assert next(file for file in progress.manifest.files if file.path == GROUP).names_root


# --- to its end -------------------------------------------------------------------------------------------------------


def test_a_task_that_takes_more_devices_stops_neither_the_seal_nor_the_rest(catalog: Catalog, tmp_path: Path) -> None:
    selected = select_tasks(read_prewarm(catalog), "h200", JitOptions("h200"))
    assert [line.partition(":")[0] for line in selected.left_out] == ["smoke_small_experts_4"]
    folder = tmp_path / "sm_90a"

    def run(task: PrewarmTask, logs: Path, limit_s: float) -> Answer:
        put(folder / "fa4" / f"{task.id}.o", b"a kernel")
        return Answer(hits={task.library: 1})

    stack: Any = SimpleNamespace(run=run, processes=Processes())
    with open_prewarm(folder, BLANK) as progress:
        fields = fill(stack, selected, progress, JitOptions("h200"), lambda _: None)
    assert {row.state for row in fields["rows"]} == {JitTaskState.DONE}
    assert fields["sealed"]
    assert check_sealed(folder)[0].missing == ("smoke_small_experts_4",)


def test_a_prewarm_is_worth_what_the_verdict_on_its_cache_is() -> None:
    said = {"tool": "t", "target": "h200", "architecture": "sm_90a", "folder": "f", "mode": "nvcc", "interpreter": "i"}
    done = JitTaskRow(task="a", library="fa4", state=JitTaskState.DONE)
    cold = JitVerifyResult(**said, manifest="m", rows=(JitVerifyRow(task="a", verdict=JitVerdict.COMPILED),))
    assert PrewarmResult(**said, rows=(done,), verdict=cold).exit is Exit.CLOSED
    for state, code in ((JitTaskState.FAILED, Exit.CLOSED), (JitTaskState.NOT_RUN, Exit.EVIDENCE_MISSING)):
        assert PrewarmResult(**said, rows=(done, done.model_copy(update={"state": state}))).exit is code
