"""A prewarm that was killed goes on: what is finished for this stack stays, and nothing half written is believed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from megacpp_validate.catalog.prewarm import PrewarmTask
from megacpp_validate.errors import InfrastructureFailed, WrongArguments
from megacpp_validate.jitcache.layout import DRAFT
from megacpp_validate.jitcache.manifest import Manifest, StackSeen, list_files, read_manifest, require_place
from megacpp_validate.jitcache.prewarm import Progress, hash_task, open_prewarm
from megacpp_validate.jitcache.result import JitCompile
from megacpp_validate.jitcache.seal import open_working, unseal
from megacpp_validate.jitcache.stack import Answer
from tests.sealed_caches import GROUP, OBJECT, STACK, TASK, make_sealed, put

OTHER = TASK.model_copy(update={"id": "fa4_d64", "settings": {"head_dim": "64"}})
KEYS = {TASK.id: "key-1", OTHER.id: "key-2"}
COMPILED = JitCompile(library="fa4", kernel="fwd", shape="d128")


@contextmanager
def prewarm(
    folder: Path, keys: Mapping[str, str] = KEYS, tasks: tuple[PrewarmTask, ...] = (TASK, OTHER), mode: str = "nvcc"
) -> Iterator[Progress]:
    blank = Manifest(
        architecture="sm_90a", target="h200", folder=str(folder), mode=mode, stack=STACK, tasks=(), files=()
    )
    with open_prewarm(folder, blank, tasks, keys) as progress:
        yield progress


def _paths(folder: Path) -> list[str]:
    return [seen.path for seen in list_files(folder)]


def _be_killed(folder: Path, finishes: bool) -> None:
    """Finish one task, or none, and die in the middle of the other."""
    with prewarm(folder) as progress:
        if finishes:
            put(folder / "fa4" / "one.o", b"one")
            progress.keep(TASK, Answer(compiled=(COMPILED,), seconds=1.5))
        put(folder / "fa4" / "half.o", b"ha")
        put(folder / "fa4" / ".two.17.tmp.o", b"h")
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_one(folder: Path, *, finishes: bool = True) -> None:
    process = multiprocessing.get_context("fork").Process(target=_be_killed, args=(folder, finishes))
    process.start()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL


def test_a_killed_prewarm_keeps_what_was_finished_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    put(folder / "triton" / "earlier.cubin", b"of a training run that was there before")
    _kill_one(folder, finishes=False)
    assert not (folder / "manifest.json").exists()
    with prewarm(folder) as progress:
        assert (_paths(folder), progress.done, progress.swept) == (["triton/earlier.cubin"], {}, 1)
    _kill_one(folder)
    with prewarm(folder) as progress:
        (done,) = progress.done.values()
        assert (done.id, done.compiled, done.seconds) == (TASK.id, (COMPILED,), 1.5)
        assert (_paths(folder), progress.swept) == (["fa4/one.o", "triton/earlier.cubin"], 1)
        assert not list(folder.rglob("*.tmp.o"))


def test_one_that_came_to_its_end_is_not_swept(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    with prewarm(folder):
        pass
    put(folder / "triton" / "later.cubin", b"of a training run")
    with prewarm(folder) as progress:
        assert progress.swept == 0
    _kill_one(folder)  # and it is still known when the next one dies
    with prewarm(folder):
        assert _paths(folder) == ["fa4/one.o", "triton/later.cubin"]


@pytest.mark.parametrize("damage", [b"on", b"another", None])
def test_a_file_that_is_not_as_it_was_left_undoes_all(damage: bytes | None, tmp_path: Path) -> None:
    """Truncated after the prewarm had ended: it would be sealed, with a hash of its own, as if it were a kernel."""
    folder = tmp_path / "sm_90a"
    with prewarm(folder) as progress:
        put(folder / "fa4" / "one.o", b"one")
        progress.keep(TASK, Answer(compiled=(COMPILED,)))
        put(folder / "fa4" / "two.o", b"two")
        progress.keep(OTHER, Answer())
    (folder / "fa4" / "one.o").unlink()
    if damage is not None:
        put(folder / "fa4" / "one.o", damage)
    with prewarm(folder) as progress:
        assert progress.done == {}
        assert (_paths(folder), progress.swept) == (["fa4/two.o"], int(damage is not None))
        progress.keep(TASK, Answer(hits={"fa4": 1}))
        assert progress.done[TASK.id].compiled == (COMPILED,), "found again, it keeps its kernels"


def test_what_a_failed_task_left_is_thrown_away(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    with prewarm(folder) as progress:
        put(folder / "fa4" / "one.o", b"one")
        progress.keep(TASK, Answer())
        put(folder / "fa4" / "half.o", b"ha")
        progress.failed = True
    with prewarm(folder) as progress:
        assert (list(progress.done), _paths(folder), progress.swept) == ([TASK.id], ["fa4/one.o"], 1)


def test_what_passed_while_others_ran_or_was_written_anew_undoes_nothing(tmp_path: Path) -> None:
    """A task ends while one beside it has a file under a name that is none of its own: that is gone a moment later."""
    folder = tmp_path / "sm_90a"
    with prewarm(folder) as progress:
        put(folder / "triton" / "group.json", b"one")
        put(folder / "cute" / "half.of_another", b"half")
        progress.keep(TASK, Answer())
        (folder / "cute" / "half.of_another").rename(folder / "cute" / "whole")
        put(folder / "triton" / "group.json", b"one and two")
        progress.keep(OTHER, Answer())
    with prewarm(folder) as progress:
        assert (list(progress.done), progress.swept) == ([TASK.id, OTHER.id], 0)


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
    with prewarm(folder):
        with pytest.raises(InfrastructureFailed, match="started twice"), prewarm(folder):
            pass
        for arch, machine in (("sm_90a", "aarch64"), ("sm_100a", "x86_64")):  # known from the first moment
            with pytest.raises(WrongArguments, match="Next step"):
                require_place(tmp_path if arch == "sm_90a" else folder, arch, machine)


@pytest.mark.parametrize("where", ["work", "unsealed"])
def test_what_others_finished_in_a_working_copy_is_not_missing(where: str, tmp_path: Path) -> None:
    """Two tasks are sealed, and in a copy one of them is run again: the other's kernels lie there as before."""
    folder = make_sealed(tmp_path / "sealed")[0]
    if where == "work":
        folder = open_working(folder, read_manifest(folder)[0], tmp_path / "a-longer-name")
    else:
        unseal(folder)
    with prewarm(folder) as progress:
        assert not (folder / "manifest.json").exists(), "a manifest of before does not stay"
        assert not progress.done
        progress.keep(OTHER, Answer(hits={"fa4": 1}))
        assert [done.id for done in progress.manifest.tasks] == [TASK.id, OTHER.id]
        assert next(file for file in progress.manifest.files if file.path == GROUP).names_root
    others = tuple(task.model_copy(update={"settings": {"head_dim": "96"}}) for task in (TASK, OTHER))
    for change in ({"tasks": others}, {"mode": "nvrtc"}, {"tasks": (OTHER,)}):
        with prewarm(folder, **change) as progress:  # type: ignore[arg-type]
            assert TASK.id not in [done.id for done in progress.manifest.tasks]
    (folder / OBJECT).unlink()
    with prewarm(folder) as progress:
        assert progress.manifest.tasks == ()


def _hash(task: PrewarmTask = TASK, arch: str = "sm_90a", mode: str = "nvcc", **versions: str) -> str:
    stack: StackSeen = STACK.model_copy(update={"versions": {**STACK.versions, **versions}})
    return hash_task(task, arch, mode, stack, "sources")


def test_what_is_in_the_key_of_a_task() -> None:
    assert _hash() == _hash()
    assert _hash() == _hash(TASK.model_copy(update={"seconds": 99, "targets": ["b200"]}))
    others = [
        _hash(OTHER), _hash(arch="sm_100a"), _hash(mode="nvrtc"), _hash(torch="2.13.0"), _hash(cutlass="4.5.2"),
        hash_task(TASK, "sm_90a", "nvcc", STACK, "other sources"),
    ]  # fmt: skip
    assert len({_hash(), *others}) == 7


def test_what_was_compiled_in_an_image_is_finished_on_its_gpu() -> None:
    assert _hash() == _hash(gpu="", driver="")
    on_a_gpu = TASK.model_copy(update={"gpu": True})
    assert _hash(on_a_gpu) != _hash(on_a_gpu, gpu="NVIDIA H200 NVL")
    assert _hash(on_a_gpu) != _hash(on_a_gpu, driver="610.43.02")
