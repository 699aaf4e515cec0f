"""The verbs of the JIT caches: what cannot work is refused before anything is compiled; what a verdict covers."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.prewarm import PrewarmTask, read_prewarm
from megacpp_validate.environments.plan import find_target
from megacpp_validate.errors import Exit, WrongArguments
from megacpp_validate.jitcache.manifest import CacheChanged
from megacpp_validate.jitcache.prewarm import SealOptions, Selected, fill, find_sealed, open_prewarm, select_tasks
from megacpp_validate.jitcache.result import JitTaskState, JitVerdict, JitVerifyResult, PrewarmResult
from megacpp_validate.jitcache.seal import check_sealed, unseal
from megacpp_validate.jitcache.stack import Answer, JitOptions
from megacpp_validate.jitcache.verify import judge_tasks, name_verdict, run_on_copy
from megacpp_validate.process import Processes
from tests.jitcache.asking import ask
from tests.sealed_caches import (
    CUBIN,
    STACK,
    as_nobody,
    flip_a_bit,
    make_manifest,
    make_sealed,
    open_to_all,
    put,
    small_disk,
)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("prewarm", "--target", "abacus"), Exit.WRONG_ARGUMENTS, "abacus"),
        (("prewarm", "--target", "cpu", "--tasks", "nun"), Exit.WRONG_ARGUMENTS, "has no task 'nun'"),
        (("prewarm", "--target", "cpu", "--tasks", ","), Exit.NOTHING_SELECTED, "nothing is selected"),
        (("prewarm", "--target", "cpu", "--root", "/proc/none"), Exit.WRONG_ARGUMENTS, "cannot be written"),
        (
            ("prewarm", "--target", "h200", "--tasks", "deep_gemm_small", "--at-build"), Exit.WRONG_ARGUMENTS,
            "cannot be compiled without a GPU",
        ),
        (("prewarm", "--target", "cpu", "--python", "/nowhere/python"), Exit.NO_ENVIRONMENT, "/nowhere/python"),
        (("jit-verify", "--target", "cpu", "--root", "/nowhere"), Exit.EVIDENCE_MISSING, "is not sealed"),
        (("jit-cache", "check", "--root", "/nowhere"), Exit.EVIDENCE_MISSING, "has no cache with a manifest"),
        (("jit-cache", "check", "--root", "/nowhere", "--arch", "../x"), Exit.WRONG_ARGUMENTS, "not an architecture"),
        (("jit-cache", "check", "--root", "/nowhere", "--arch", "cpu"), Exit.EVIDENCE_MISSING, "no manifest"),
        (("jit-cache", "import", "/nowhere.tar", "--any-stack"), Exit.WRONG_ARGUMENTS, "there is no archive"),
        (("jit-cache", "import"), Exit.WRONG_ARGUMENTS, "no cache to import"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: Exit, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    seen, text = ask(*arguments)
    assert seen == code, text
    assert said in text
    assert "Next step" in text


@pytest.mark.parametrize(
    ("option", "place"),
    [
        ("--receipts", "file"),
        ("--receipts", "file/below"),
        ("--work", "file"),
    ],
)
def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path, option: str, place: str) -> None:
    """The cache is damaged, and would be told of next."""
    folder, _ = make_sealed(tmp_path / "root")
    flip_a_bit(folder / CUBIN)
    (tmp_path / "file").touch()
    words = {"--receipts": tmp_path / "receipts", option: tmp_path / place}
    code, text = ask(
        "jit-verify", "--target", "h200", "--root", tmp_path / "root", *(w for two in words.items() for w in two)
    )
    assert code == Exit.WRONG_ARGUMENTS, text
    assert f"give {option}" in text


def test_a_folder_from_which_no_library_can_be_loaded_is_told(tmp_path: Path) -> None:
    make_sealed(tmp_path)
    with small_disk("4m", "noexec") as disk:
        for words in (
            ("prewarm", "--target", "cpu", "--root", disk / "root"),
            ("jit-verify", "--target", "h200", "--root", tmp_path, "--work", disk, "--receipts", tmp_path / "receipts"),
        ):
            code, text = ask(*words)
            assert code == Exit.WRONG_ARGUMENTS, text
            assert "mounted noexec" in text


def test_no_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    for words in (("prewarm", "--target", "cpu"), ("jit-verify", "--target", "cpu", "--receipts", tmp_path)):
        code, text = ask(*words, "--root", tmp_path)
        assert code == Exit.NO_ENVIRONMENT, text
        assert "--tmpfs /tmp:exec" in text


# --- what a verdict is about -----------------------------------------------------------------------------------------


def _select(
    catalog: Catalog, *, tasks: tuple[str, ...] | None = None, ranks: int = 1, at_build: bool = False
) -> Selected:
    options = JitOptions("h200", tasks, ranks=ranks, at_build=at_build)
    return select_tasks(read_prewarm(catalog), "h200", options)


def _verdict(selected: Selected, root: Path) -> JitVerifyResult:
    """Where every task that could run was found warm."""
    checked = check_sealed(make_sealed(root)[0])
    answers = {task.id: Answer(hits={"fa4": 1, task.library: 1}) for task in selected.tasks}
    fields: dict[str, Any] = judge_tasks(selected, answers, checked)
    return JitVerifyResult(
        tool="t", target="h200", architecture="sm_90a", folder="f", mode="nvcc", manifest="m", interpreter="i",
        left_out=selected.left_out, **fields,
    )  # fmt: skip


def test_a_task_that_takes_more_devices_is_left_out_of_the_verdict_by_name(catalog: Catalog, tmp_path: Path) -> None:
    """A cache that was verified in part must not read as one that was verified whole."""
    selected = _select(catalog)
    result = _verdict(selected, tmp_path)
    (left,) = result.left_out
    assert left.startswith("smoke_small_experts_4: it takes 4 devices, and --ranks is 1. Next step: `--ranks 4")
    assert {row.verdict for row in result.rows} == {JitVerdict.WARM}
    assert (result.exit, name_verdict(result)) == (Exit.OPEN, "jit_verify-h200.part.json")
    whole = _verdict(_select(catalog, ranks=4), tmp_path / "whole")
    assert (whole.left_out, name_verdict(whole)) == ((), "jit_verify-h200.json")
    assert [row.task for row in whole.rows] == [task.id for task in selected.of_target]


def _prewarmed(selected: Selected, catalog: Catalog, root: Path, *, whole: bool = False) -> PrewarmResult:
    """What a prewarm comes to in a folder in which whatever can run on one device is finished; or everything."""
    options = JitOptions("h200", None, root)
    idle: Any = SimpleNamespace(  # nothing is left to run on it
        target=find_target(catalog, "h200"), mode="nvcc", processes=Processes(),
        environment=SimpleNamespace(variables={}),
    )  # fmt: skip
    blank = make_manifest(root / "sm_90a").model_copy(update={"tasks": ()})
    keys = {task.id: task.id for task in selected.of_target}
    with open_prewarm(root / "sm_90a", blank, selected.of_target, keys) as progress:
        for task in selected.of_target:
            if whole or task.ranks == 1:
                put(root / "sm_90a" / "fa4" / f"{task.id}.o", b"a kernel")
                progress.keep(task, Answer(hits={}))
        fields: dict[str, Any] = fill(idle, selected, progress, options, SealOptions(), lambda _: None)
    return PrewarmResult(
        tool="t", target="h200", architecture="sm_90a", folder="f", mode="nvcc", interpreter="i",
        left_out=selected.left_out, **fields,
    )  # fmt: skip


def test_a_task_that_takes_more_devices_stops_neither_the_seal_nor_the_rest(catalog: Catalog, tmp_path: Path) -> None:
    selected = _select(catalog)
    result = _prewarmed(selected, catalog, tmp_path)
    assert {row.state for row in result.rows} == {JitTaskState.KEPT}
    assert [line.partition(":")[0] for line in result.left_out] == ["smoke_small_experts_4"]
    assert (result.sealed, result.exit) == (True, Exit.OPEN)
    checked = check_sealed(tmp_path / "sm_90a")
    assert checked.manifest.missing == ("smoke_small_experts_4",)
    keys = {task.id: task.id for task in selected.of_target}
    again: dict[str, Any] = find_sealed(tmp_path / "sm_90a", selected, keys, reopen=False)
    assert again["rows"] == result.rows, "a second look at what is sealed says the same"


def test_a_prewarm_is_worth_what_the_verdict_on_its_cache_is(catalog: Catalog, tmp_path: Path) -> None:
    selected = _select(catalog)
    result = _prewarmed(selected, catalog, tmp_path)
    warm = _verdict(selected, tmp_path / "copy")
    cold = warm.model_copy(update={"unreported": ("fa4/new.o",)})
    lost = warm.model_copy(update={"unproven": ("files appeared",)})
    exits = [result.model_copy(update={"verdict": verdict}).exit for verdict in (warm, cold, lost)]
    assert exits == [Exit.OPEN, Exit.CLOSED, Exit.EVIDENCE_MISSING]


def test_a_sealed_cache_that_was_changed_is_not_taken_for_one_of_another_stack(
    catalog: Catalog, tmp_path: Path
) -> None:
    """The task that left the file is not finished by its time either, and to go on in it was the advice."""
    selected, folder = _select(catalog), tmp_path / "sm_90a"
    _prewarmed(selected, catalog, tmp_path)
    keys = {task.id: task.id for task in selected.of_target}
    flip_a_bit(folder / "fa4" / "fa4_d64.o")
    os.utime(folder / "fa4" / "fa4_d64.o", (1, 1))
    with pytest.raises(CacheChanged, match=r"fa4_d64\.o has another content"):
        find_sealed(folder, selected, keys, reopen=False)


@pytest.mark.parametrize(("names", "at_build"), [(("fa4_d64", "triton_rotation"), False), (None, True)])
def test_what_the_caller_leaves_out_is_named_and_missed_by_nobody(
    catalog: Catalog, tmp_path: Path, names: tuple[str, ...] | None, at_build: bool
) -> None:
    selected = _select(catalog, tasks=names, at_build=at_build)
    result = _verdict(selected, tmp_path)
    assert result.exit is Exit.OPEN
    covered = {row.task for row in result.rows}
    assert covered == set(names or [task.id for task in selected.of_target if not task.gpu])
    assert {line.partition(":")[0] for line in result.left_out} == {task.id for task in selected.of_target} - covered


@pytest.mark.parametrize(
    ("unwatched", "closes"), [(("cuda: /r/cuda has 600 MiB, too much to be copied",), False), ((), True)]
)
def test_what_appears_in_a_drivers_cache_closes_where_it_could_be_watched(
    catalog: Catalog, tmp_path: Path, unwatched: tuple[str, ...], closes: bool
) -> None:
    work = tmp_path / "work"

    def run(task: PrewarmTask, logs: Path, limit_s: float) -> Answer:
        """What the driver does when a process asks it for a kernel, and the process says nothing of it."""
        put(work / "sm_90a" / "cuda" / "0" / "e" / "f557", task.id.encode())
        return Answer(hits={"fa4": 1}, unwatched=unwatched)

    stack: Any = SimpleNamespace(
        target=find_target(catalog, "h200"), architecture="sm_90a", mode="nvcc", read_seen=lambda: STACK,
        root=work, run=run, processes=Processes(), environment=SimpleNamespace(variables={}),
    )  # fmt: skip
    sealed = make_sealed(tmp_path)[0]
    checked = check_sealed(sealed)
    selected, options = _select(catalog, tasks=("fa4_d128",)), JitOptions("h200", ("fa4_d128",), tmp_path)
    ran = run_on_copy(stack, sealed, checked, selected, options, tmp_path / "receipts", lambda _: None)
    assert ran["unreported"] == (("cuda/0/e/f557",) if closes else ())
    assert any("cuda/0/e/f557" in line for line in ran["unproven"]) is not closes
    assert ran["unwatched"] == unwatched


@pytest.mark.parametrize(("answer", "told"), [(Answer(hits={"fa4": 1}), False), (Answer(), True)])
def test_a_variable_that_differs_is_told_where_anything_was_cold(
    catalog: Catalog, tmp_path: Path, answer: Answer, told: bool
) -> None:
    """Where all was found, it is in no key of what ran."""
    stack: Any = SimpleNamespace(
        target=find_target(catalog, "h200"), architecture="sm_90a", mode="nvcc", read_seen=lambda: STACK,
        root=tmp_path / "work", run=lambda *_: answer, processes=Processes(),
        environment=SimpleNamespace(variables={"TRITON_HOME": "/x"}),
    )  # fmt: skip
    folder, _ = make_sealed(tmp_path)
    checked = check_sealed(folder)
    variables = checked.manifest.model_copy(update={"variables": {}})
    selected, options = _select(catalog, tasks=("fa4_d128",)), JitOptions("h200", ("fa4_d128",), tmp_path)
    other = replace(checked, manifest=variables)
    ran = run_on_copy(stack, folder, other, selected, options, tmp_path / "receipts", lambda _: None)
    assert any("TRITON_HOME differs" in line for line in ran["notes"]) is told


def test_a_verdict_in_part_never_lies_where_a_whole_one_is_looked_for(catalog: Catalog, tmp_path: Path) -> None:
    names = [
        name_verdict(_verdict(_select(catalog, tasks=tasks, ranks=4), tmp_path / str(tasks)))
        for tasks in (None, ("fa4_d128",))
    ]
    assert names == ["jit_verify-h200.json", "jit_verify-h200.part.json"]


def test_a_cache_of_another_architecture_is_refused(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    folder.rename(tmp_path / "sm_100a")
    code, text = ask("jit-verify", "--target", "b200", "--root", tmp_path)
    assert code == Exit.WRONG_ARGUMENTS, text
    assert "sm_90a on x86_64, and sm_100a on x86_64 is requested" in text


def test_the_folder_of_an_architecture_is_no_root(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    before = sorted(folder.iterdir())
    code, text = ask("prewarm", "--target", "h200", "--root", folder)
    assert code == Exit.WRONG_ARGUMENTS, text
    assert f"give {tmp_path}" in text
    assert sorted(folder.iterdir()) == before


def test_the_sealed_cache_of_another_user_is_not_opened_again() -> None:
    with open_to_all() as root:
        folder, _ = make_sealed(root, shared=True)

        def reopen() -> str:
            try:
                unseal(folder)
            except WrongArguments as fault:
                return str(fault)
            return "opened"

        assert "jit_cache -- open --root" in as_nobody(reopen)
