"""A prewarm that was killed goes on: what is finished for this stack stays, and nothing half written is believed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.prewarm import PrewarmTask, read_prewarm
from megacpp_validate.errors import Exit, InfrastructureFailed, WrongArguments
from megacpp_validate.jitcache.cache import check_sealed, open_working
from megacpp_validate.jitcache.layout import DRAFT, CacheChanged, list_files
from megacpp_validate.jitcache.manifest import JitCompile, Manifest
from megacpp_validate.jitcache.prewarm import (
    JitTaskRow,
    JitTaskState,
    PrewarmResult,
    Progress,
    SealOptions,
    fill,
    hash_task,
    list_sealed,
    open_prewarm,
)
from megacpp_validate.jitcache.stack import Answer, JitOptions, select_tasks
from megacpp_validate.jitcache.verify import JitVerdict, JitVerifyResult, JitVerifyRow, VerifiedPrewarm
from megacpp_validate.process import Processes
from tests.sealed_caches import GROUP, STACK, TASK, flip_a_bit, make_sealed, put

OTHER = TASK.model_copy(update={"id": "fa4_d64", "settings": {"head_dim": "64"}})
KEYS = {TASK.id: "key-1", OTHER.id: "key-2"}
COMPILED = JitCompile(library="fa4", kernel="fwd", shape="d128")
BLANK = Manifest(architecture="sm_90a", target="h200", folder="", mode="nvcc", stack=STACK, tasks=(), files=())


@contextmanager
def prewarm(folder: Path, keys: Mapping[str, str] = KEYS) -> Iterator[Progress]:
    blank = BLANK.model_copy(update={"folder": str(folder)})
    with open_prewarm(folder, blank, (TASK, OTHER), keys) as progress:
        yield progress


def _paths(folder: Path) -> list[str]:
    return [seen.path for seen in list_files(folder)]


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
    assert not (folder / "manifest.json").exists()
    with prewarm(folder) as progress:
        (done,) = progress.done.values()
        assert (done.id, done.compiled, done.seconds) == (TASK.id, (COMPILED,), 1.5)
        assert (_paths(folder), progress.swept) == (["fa4/one.o", "triton/earlier.cubin"], 1)
        assert not list(folder.rglob("*.tmp.o"))


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
        assert progress.done == {}
        assert (_paths(folder), progress.swept) == (["fa4/two.o"], int(damage is not None))


def test_another_stack_or_a_damaged_draft_undoes_all(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    with prewarm(folder) as progress:
        progress.keep(TASK, Answer(compiled=(COMPILED,)))
    with prewarm(folder, {TASK.id: "of another torch"}) as progress:
        assert progress.done == {}
    with prewarm(folder) as progress:
        progress.keep(TASK, Answer())
    put(folder / DRAFT, b'{"key": ')
    with prewarm(folder) as progress:
        assert progress.done == {}


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
    work = Path(open_working(sealed, check_sealed(sealed), tmp_path / "a-longer-name").folder)
    with prewarm(work) as progress:
        assert progress.swept == 0
        progress.keep(OTHER, Answer(hits={"fa4": 1}))
        assert progress.manifest.missing == (TASK.id,)
        assert next(file for file in progress.manifest.files if file.path == GROUP).names_root


def _hash(task: PrewarmTask = TASK, arch: str = "sm_90a", mode: str = "nvcc", **versions: str) -> str:
    stack = STACK.model_copy(update={"versions": {**STACK.versions, **versions}})
    blank = BLANK.model_copy(update={"architecture": arch, "mode": mode, "stack": stack})
    return hash_task(task, blank, "sources")


def test_what_is_in_the_key_of_a_task() -> None:
    assert _hash() == _hash(TASK.model_copy(update={"seconds": 99, "targets": ["b200"]}))
    others = [
        _hash(OTHER), _hash(arch="sm_100a"), _hash(mode="nvrtc"), _hash(torch="2.13.0"), _hash(cutlass="4.5.2"),
        hash_task(TASK, BLANK, "other sources"),
    ]  # fmt: skip
    assert len({_hash(), *others}) == 7
    assert _hash() == _hash(gpu="", driver=""), "what was compiled in an image is finished on its GPU"
    on_a_gpu = TASK.model_copy(update={"gpu": True})
    assert len({_hash(on_a_gpu), _hash(on_a_gpu, gpu="NVIDIA H200 NVL"), _hash(on_a_gpu, driver="610.43.02")}) == 3


# --- to its end -------------------------------------------------------------------------------------------------------


def test_a_task_that_takes_more_devices_stops_neither_the_seal_nor_the_rest(catalog: Catalog, tmp_path: Path) -> None:
    """Then the sealed cache is found as it is; and what was changed in it is not taken for one of another stack."""
    selected = select_tasks(read_prewarm(catalog), "h200", JitOptions("h200"))
    assert [line.partition(":")[0] for line in selected.left_out] == ["smoke_small_experts_4"]
    folder, keys = tmp_path / "sm_90a", {task.id: task.id for task in selected.of_target}

    def run(task: PrewarmTask, logs: Path, limit_s: float) -> Answer:
        put(folder / "fa4" / f"{task.id}.o", b"a kernel")
        return Answer(hits={task.library: 1})

    stack: Any = SimpleNamespace(run=run, processes=Processes())
    with open_prewarm(folder, BLANK, selected.of_target, keys) as progress:
        fields = fill(stack, selected, progress, JitOptions("h200"), SealOptions(), lambda _: None)
    assert {row.state for row in fields["rows"]} == {JitTaskState.DONE}
    assert fields["sealed"]
    assert check_sealed(folder).manifest.missing == ("smoke_small_experts_4",)
    again = list_sealed(folder, selected, keys)
    assert ({row.state for row in again["rows"]}, again["manifest"]) == ({JitTaskState.KEPT}, fields["manifest"])
    with pytest.raises(WrongArguments, match="jit_cache -- open"):
        list_sealed(folder, selected, {})
    flip_a_bit(folder / "fa4" / "fa4_d64.o")
    with pytest.raises(CacheChanged, match=r"fa4_d64\.o has another content"):
        list_sealed(folder, selected, {})


@pytest.mark.parametrize(("verdict", "code"), [
    (JitVerdict.WARM, Exit.OPEN), (JitVerdict.COMPILED, Exit.CLOSED), (JitVerdict.NOT_RUN, Exit.EVIDENCE_MISSING),
])  # fmt: skip
def test_a_prewarm_is_worth_what_the_verdict_on_its_cache_is(verdict: JitVerdict, code: Exit) -> None:
    said = {"tool": "t", "target": "h200", "architecture": "sm_90a", "folder": "f", "mode": "nvcc", "interpreter": "i"}
    row = JitTaskRow(task="a", library="fa4", state=JitTaskState.DONE)
    verified = JitVerifyResult(**said, manifest="m", rows=(JitVerifyRow(task="a", verdict=verdict),))
    assert VerifiedPrewarm(**said, rows=(row,), verdict=verified).exit is code
    for state, alone in ((JitTaskState.FAILED, Exit.CLOSED), (JitTaskState.NOT_RUN, Exit.EVIDENCE_MISSING)):
        assert PrewarmResult(**said, rows=(row, row.model_copy(update={"state": state}))).exit is alone
