"""A prewarm that was killed goes on: what is finished for this stack stays, and nothing half written is believed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from megacpp_validate.catalog.prewarm import PrewarmTask
from megacpp_validate.errors import InfrastructureFailed, WrongArguments
from megacpp_validate.jitcache.answer import Answer
from megacpp_validate.jitcache.files import list_files
from megacpp_validate.jitcache.layout import STATE
from megacpp_validate.jitcache.manifest import StackSeen, read_manifest
from megacpp_validate.jitcache.place import require_place
from megacpp_validate.jitcache.progress import Progress, hash_task, open_prewarm
from megacpp_validate.jitcache.result import JitCompile
from megacpp_validate.jitcache.seal import open_working
from megacpp_validate.jitcache.stack import run_tasks
from megacpp_validate.process import Processes
from tests.sealed_caches import OBJECT, STACK, TASK, make_sealed, put

OTHER = TASK.model_copy(update={"id": "fa4_d64", "settings": {"head_dim": "64"}})
KEYS = {TASK.id: "key-1", OTHER.id: "key-2"}
COMPILED = JitCompile(library="fa4", kernel="fwd", shape="d128")


def is_done(progress: Progress, task: PrewarmTask) -> bool:
    return progress.find_done(task) is not None


def _paths(folder: Path) -> list[str]:
    return [seen.path for seen in list_files(folder)]


def _be_killed(folder: Path) -> None:
    """Finish one task, and die in the middle of the other."""
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        put(folder / "fa4" / "one.o", b"one")
        progress.keep(TASK, Answer(compiled=(COMPILED,), seconds=1.5))
        put(folder / "fa4" / "half.o", b"ha")
        put(folder / "fa4" / ".two.17.tmp.o", b"h")
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_one(folder: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_be_killed, args=(folder,))
    process.start()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL


def test_a_killed_prewarm_keeps_what_was_finished_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    put(folder / "triton" / "earlier.cubin", b"of a training run that was there before")
    _kill_one(folder)
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        assert (is_done(progress, TASK), is_done(progress, OTHER)) == (True, False)
        done = progress.find_done(TASK)
        assert done is not None
        assert (done.compiled, done.seconds) == ((COMPILED,), 1.5)
        assert _paths(folder) == ["fa4/one.o", "triton/earlier.cubin"]
        assert progress.swept == 1
        assert not list(folder.rglob("*.tmp.o"))


def test_one_that_came_to_its_end_is_not_swept(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    with open_prewarm(folder, "x86_64", KEYS):
        pass
    put(folder / "triton" / "later.cubin", b"of a training run")
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        assert progress.swept == 0
    _kill_one(folder)  # and it is still owned when the next one dies
    with open_prewarm(folder, "x86_64", KEYS):
        assert _paths(folder) == ["fa4/one.o", "triton/later.cubin"]


@pytest.mark.parametrize("damage", [b"on", b"another"])
def test_a_file_that_is_not_as_its_task_left_it_goes_and_the_task_with_it(damage: bytes, tmp_path: Path) -> None:
    """Truncated after the prewarm had ended: it would be sealed, with a hash of its own, as if it were a kernel."""
    folder = tmp_path / "sm_90a"
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        put(folder / "fa4" / "one.o", b"one")
        progress.keep(TASK, Answer(compiled=(COMPILED,)))
        put(folder / "fa4" / "two.o", b"two")
        progress.keep(OTHER, Answer())
    put(folder / "fa4" / "one.o", damage)
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        assert (is_done(progress, TASK), is_done(progress, OTHER)) == (False, True)
        assert (_paths(folder), progress.swept) == (["fa4/two.o"], 1)


def test_a_file_that_a_later_task_wrote_anew_is_still_there(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        put(folder / "triton" / "group.json", b"one")
        progress.keep(TASK, Answer())
        put(folder / "triton" / "group.json", b"one and two")
        progress.keep(OTHER, Answer())
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        assert (is_done(progress, TASK), is_done(progress, OTHER), progress.swept) == (True, True, 0)


def test_what_a_failed_task_left_is_thrown_away(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        put(folder / "fa4" / "one.o", b"one")
        progress.keep(TASK, Answer())
        put(folder / "fa4" / "half.o", b"ha")
        progress.failed = True
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        assert (_paths(folder), progress.swept) == (["fa4/one.o"], 1)


def test_a_manifest_of_before_does_not_stay(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    with open_prewarm(folder, "x86_64", KEYS):
        assert not (folder / "manifest.json").exists()


def test_a_file_that_is_gone_undoes_its_task(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        put(folder / "fa4" / "one.o", b"one")
        progress.keep(TASK, Answer())
    (folder / "fa4" / "one.o").unlink()
    assert not is_done(Progress(folder, KEYS), TASK)


def test_what_passed_while_others_ran_undoes_nothing(tmp_path: Path) -> None:
    """A task ends while one beside it has a file under a name that is none of its own: that is gone a moment later."""
    folder = tmp_path / "sm_90a"
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        put(folder / "fa4" / "one.o", b"one")
        put(folder / "cute" / "half.of_another", b"half")
        progress.keep(TASK, Answer())
        (folder / "cute" / "half.of_another").rename(folder / "cute" / "whole")
        progress.keep(OTHER, Answer())
        assert not is_done(progress, TASK)
        progress.settle()
        assert list(progress.list_finished([TASK, OTHER], STACK, "nvcc")) == [TASK.id, OTHER.id]
    (folder / "fa4" / "one.o").unlink()
    assert [is_done(Progress(folder, KEYS), task) for task in (TASK, OTHER)] == [False, True]


def test_another_stack_undoes_all(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        progress.keep(TASK, Answer(compiled=(COMPILED,)))
    assert is_done(Progress(folder, KEYS), TASK)
    assert not is_done(Progress(folder, {TASK.id: "of another torch"}), TASK)


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        progress.keep(TASK, Answer())
    put(folder / STATE / "done" / f"{TASK.id}.json", b'{"key": ')
    assert not is_done(Progress(folder, KEYS), TASK)


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    with open_prewarm(folder, "x86_64", KEYS):
        with pytest.raises(InfrastructureFailed, match="started twice"), open_prewarm(folder, "x86_64", KEYS):
            pass
        with pytest.raises(WrongArguments, match="aarch64"):  # known from the first moment
            require_place(tmp_path, "sm_90a", "aarch64")


def test_what_is_found_again_keeps_its_kernels(tmp_path: Path) -> None:
    """Finished for another stack, and run again on the same files: what it compiled then is what the cache has."""
    folder = tmp_path / "sm_90a"
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        progress.keep(TASK, Answer(compiled=(COMPILED,)))
    with open_prewarm(folder, "x86_64", {TASK.id: "another"}) as progress:
        progress.keep(TASK, Answer(hits={"fa4": 1}))
        done = progress.find_done(TASK)
        assert done is not None
        assert done.compiled == (COMPILED,)


def test_what_others_finished_in_a_working_copy_is_not_missing(tmp_path: Path) -> None:
    """Two tasks are sealed, and in a copy one of them is run again: the other's kernels lie there as before."""
    sealed = make_sealed(tmp_path / "sealed")[0]
    manifest = read_manifest(sealed)[0]
    work = open_working(sealed, manifest, tmp_path / "work")
    with open_prewarm(work, "x86_64", KEYS) as progress:
        progress.keep(OTHER, Answer(hits={"fa4": 1}))
        tasks = [TASK, OTHER]

        def carried(rows: list[PrewarmTask], mode: str = "nvcc") -> list[str]:
            return [name for name in progress.list_finished(rows, STACK, mode) if name != OTHER.id]

        assert carried(tasks) == [TASK.id]
        other_rows = [task.model_copy(update={"settings": {"head_dim": "96"}}) for task in tasks]
        assert [carried(other_rows), carried(tasks, "nvrtc"), carried([OTHER])] == [[], [], []]
        (work / OBJECT).unlink()
        assert carried(tasks) == []


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


def test_side_by_side_and_those_that_train_alone() -> None:
    alone = PrewarmTask(
        id="smoke", library="inductor", code="smoke", targets=["h200"], gpu=True, settings={"cell": "x"}, seconds=99
    )
    begun: list[str] = []

    def run(task: PrewarmTask) -> Answer:
        begun.append(task.id)
        return Answer(seconds=float(task.seconds))

    longest = OTHER.model_copy(update={"seconds": 50})
    answers = run_tasks([TASK, alone, longest], run, 1, Processes())
    assert {task: answer.seconds for task, answer in answers.items()} == {TASK.id: 0.0, OTHER.id: 50.0, "smoke": 99.0}
    assert begun == [OTHER.id, TASK.id, "smoke"]


def test_a_full_disk_stops_the_others(tmp_path: Path) -> None:
    processes = Processes()

    def run(task: PrewarmTask) -> Answer:
        raise OSError(28, os.strerror(28), str(tmp_path))

    with pytest.raises(OSError, match="No space left"):
        run_tasks([TASK, OTHER], run, 1, processes)
    assert processes._stopped


def test_the_record_is_plain(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    with open_prewarm(folder, "x86_64", KEYS) as progress:
        put(folder / "fa4" / "one.o", b"one")
        progress.keep(TASK, Answer(compiled=(COMPILED,)))
    record = json.loads((folder / STATE / "done" / f"{TASK.id}.json").read_text())
    assert record["key"] == "key-1"
    assert [file["path"] for file in record["files"]] == ["fa4/one.o"]
