"""A prewarm builds on what a manifest has, and on nothing that is half written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import Catalog, read_catalog
from megacpp_validate.catalog.prewarm import PrewarmTask, read_prewarm
from megacpp_validate.errors import Exit, WrongArguments
from megacpp_validate.jitcache.cache import check_sealed, is_sealed, open_working
from megacpp_validate.jitcache.layout import Manifest, list_files
from megacpp_validate.jitcache.prewarm import PrewarmResult, fill, take_over
from megacpp_validate.jitcache.stack import Answer, JitOptions, JitRow, JitVerdict, Selected, select_tasks
from megacpp_validate.jitcache.verify import JitVerifyResult
from megacpp_validate.process import Processes
from tests.sealed_caches import GROUP, KERNEL, STACK, TASK, make_sealed, put

OTHER = TASK.model_copy(update={"id": "fa4_d64", "settings": {"head_dim": "64"}})


def take(folder: Path, **changes: Any) -> Manifest:
    blank = Manifest(
        architecture="sm_90a", target="h200", folder=str(folder), mode="nvcc", stack=STACK, tasks=(), files=()
    )
    folder.mkdir(parents=True, exist_ok=True)
    return take_over(folder, blank.model_copy(update=changes), read_prewarm(read_catalog()).keys)


def run(folder: Path, manifest: Manifest, answer: Answer, *tasks: PrewarmTask) -> dict[str, Any]:
    """A prewarm whose tasks each leave a kernel and answer so."""

    def one(task: PrewarmTask, logs: Path, limit_s: float) -> Answer:
        put(folder / "fa4" / f"{task.id}.o", b"a kernel")
        return answer

    stack: Any = SimpleNamespace(run=one, processes=Processes())
    return fill(stack, Selected(tasks, tasks, ()), manifest, JitOptions(target="h200"), lambda _: None)


def test_what_a_failed_or_killed_prewarm_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    put(folder / "triton" / "earlier.cubin", b"of a training run that was there before")
    fields = run(folder, take(folder), Answer(failure="it crashed"), TASK)
    assert ({row.verdict for row in fields["rows"]}, is_sealed(folder)) == ({JitVerdict.FAILED}, False)
    put(folder / "fa4" / ".two.17.tmp.o", b"h")
    take(folder)
    assert list(list_files(folder)) == ["triton/earlier.cubin"]
    assert not list(folder.rglob("*.tmp.o"))


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
    with pytest.raises(WrongArguments, match=said):
        take(work, **change)


def test_a_working_copy_is_continued_as_long_as_it_is_whole(tmp_path: Path) -> None:
    """Its files are as the sealed manifest has them, but for Triton's groups, which name the new folder."""
    sealed, _ = make_sealed(tmp_path / "sealed")
    work = Path(open_working(sealed, tmp_path / "a-longer-name").folder)
    manifest = take(work)
    assert [(task.id, task.compiled) for task in manifest.tasks] == [(TASK.id, (KERNEL,))]
    assert next(file for file in manifest.files if file.path == GROUP).names_root
    assert run(work, manifest, Answer(hits={"fa4": 1}), OTHER)["sealed"]
    assert [task.id for task in check_sealed(work)[0].tasks] == [TASK.id, OTHER.id]
    put(work / "fa4" / f"{OTHER.id}.o", b"cut")  # it would be sealed, with a hash of its own, as if it were a kernel
    assert take(work).tasks == ()
    assert f"fa4/{OTHER.id}.o" not in list_files(work)


# --- to its end -------------------------------------------------------------------------------------------------------


def test_a_task_that_cannot_run_here_stops_neither_the_seal_nor_the_rest(catalog: Catalog, tmp_path: Path) -> None:
    selected = select_tasks(read_prewarm(catalog).task, "h200", JitOptions(target="h200"))
    assert [line.partition(":")[0] for line in selected.left_out] == ["smoke_small_experts_4"]
    folder = tmp_path / "sm_90a"
    manifest, every = take(folder), selected.of_target

    def answer(task: PrewarmTask, *_: Any) -> Answer:
        return (
            Answer(missing="No module named 'flash_attn'") if task.library == "fa4" else Answer(hits={task.library: 1})
        )

    stack: Any = SimpleNamespace(run=answer, processes=Processes())
    fields = fill(stack, selected, manifest, JitOptions(target="h200"), lambda _: None)
    left = {row.task for row in fields["rows"] if row.verdict is JitVerdict.NOT_RUN}
    assert fields["sealed"]
    assert left == {task.id for task in every if task.library == "fa4"}
    sealed = check_sealed(folder)[0]
    assert {*sealed.missing} == left | {"smoke_small_experts_4"}
    assert len(sealed.tasks) == len(every) - len(sealed.missing)


def test_a_prewarm_is_worth_what_the_verdict_on_its_cache_is() -> None:
    said = {"tool": "t", "target": "h200", "architecture": "sm_90a", "folder": "f", "mode": "nvcc", "interpreter": "i"}
    done = JitRow(task="a", verdict=JitVerdict.DONE)
    cold = JitVerifyResult(**said, manifest="m", rows=(JitRow(task="a", verdict=JitVerdict.COMPILED),))
    assert PrewarmResult(**said, rows=(done,), verdict=cold).exit is Exit.CLOSED
    for state, code in ((JitVerdict.FAILED, Exit.CLOSED), (JitVerdict.NOT_RUN, Exit.EVIDENCE_MISSING)):
        assert PrewarmResult(**said, rows=(done, done.model_copy(update={"verdict": state}))).exit is code
