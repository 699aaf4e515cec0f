"""The doors of the JIT caches: what cannot be is refused before anything is compiled, with what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sealed_caches import CUBIN, as_nobody, flip_a_bit, make_sealed, open_to_all, small_disk
from typer.testing import CliRunner

from megacpp_validate.cli import (  # noqa: F401 - registers verbs
    jit_cache_verbs,
    jit_verify_verbs,
    main,
    prewarm_runs,
    prewarm_verbs,
)
from megacpp_validate.cli.app import Exit, app
from megacpp_validate.jitcache.place import CacheReadOnly
from megacpp_validate.jitcache.seal import CacheDamaged

RUNNER = CliRunner()


def ask(*arguments: object) -> tuple[int, str]:
    done = RUNNER.invoke(app, [str(one) for one in arguments])
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("prewarm", "--target", "abacus"), Exit.WRONG_ARGUMENTS, "abacus"),
        (("prewarm", "--target", "cpu", "--tasks", "nun"), Exit.WRONG_ARGUMENTS, "has no task 'nun'"),
        (("prewarm", "--target", "cpu", "--tasks", ","), Exit.NOTHING_SELECTED, "no task is selected"),
        (("prewarm", "--target", "cpu", "--format", "html"), Exit.WRONG_ARGUMENTS, "choose table or json"),
        (("prewarm", "--target", "cpu", "--root", "/proc/none"), Exit.WRONG_ARGUMENTS, "cannot be written"),
        (
            ("prewarm", "--target", "h200", "--tasks", "deep_gemm_small", "--at-build"), Exit.WRONG_ARGUMENTS,
            "cannot be compiled without a GPU",
        ),
        (("prewarm", "--target", "cpu", "--python", "/nowhere/python"), Exit.NO_ENVIRONMENT, "/nowhere/python"),
        (("jit-verify", "--target", "cpu", "--root", "/nowhere"), Exit.EVIDENCE_MISSING, "is not sealed"),
        (("jit-cache", "check", "--root", "/nowhere"), Exit.WRONG_ARGUMENTS, "has 0 caches"),
        (("jit-cache", "check", "--root", "/nowhere", "--arch", "../x"), Exit.WRONG_ARGUMENTS, "no architecture"),
        (("jit-cache", "check", "--root", "/nowhere", "--arch", "cpu"), Exit.EVIDENCE_MISSING, "no manifest"),
        (("jit-cache", "import", "/nowhere.tar", "--any-stack"), Exit.WRONG_ARGUMENTS, "there is no archive"),
        (("jit-cache", "import"), Exit.WRONG_ARGUMENTS, "import what?"),
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
    assert "unforeseen" not in text


def test_a_flipped_bit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    flip_a_bit(folder / CUBIN)
    archive = tmp_path / "a.tar"
    for words in (("jit-verify", "--target", "h200"), ("jit-cache", "check"), ("jit-cache", "export", archive)):
        code, text = ask(*words, "--root", tmp_path)
        assert code == Exit.CLOSED, text
        assert CUBIN in text
    assert not archive.exists()


def test_a_cache_of_another_architecture_is_refused(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    folder.rename(tmp_path / "sm_100a")
    code, text = ask("jit-verify", "--target", "b200", "--root", tmp_path)
    assert code == Exit.WRONG_ARGUMENTS, text
    assert "architecture sm_90a, and sm_100a is asked for" in text


def test_the_folder_of_an_architecture_is_no_root(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    before = sorted(folder.iterdir())
    code, text = ask("prewarm", "--target", "h200", "--root", folder)
    assert code == Exit.WRONG_ARGUMENTS, text
    assert f"give {tmp_path}" in text
    assert sorted(folder.iterdir()) == before


def test_a_damaged_cache_is_not_opened_again(tmp_path: Path) -> None:
    """It would be sealed once more, with the hash of the damage, and called warm."""
    folder, _ = make_sealed(tmp_path)
    flip_a_bit(folder / CUBIN)
    with pytest.raises(CacheDamaged, match=CUBIN):
        prewarm_runs._open_again(folder)


def test_the_sealed_cache_of_another_user_is_not_opened_again() -> None:
    with open_to_all() as root:
        folder, _ = make_sealed(root, shared=True)

        def reopen() -> str:
            try:
                prewarm_runs._open_again(folder)
            except CacheReadOnly as fault:
                return str(fault)
            return "opened"

        assert "jit_cache -- open --root" in as_nobody(reopen)


def test_carried_and_opened_by_the_verb(tmp_path: Path) -> None:
    _, digest = make_sealed(tmp_path / "one")
    archive = tmp_path / "jit.tar.gz"
    code, text = ask("jit-cache", "export", archive, "--root", tmp_path / "one", "--format", "json")
    assert code == Exit.OPEN, text
    assert json.loads(text)["manifest"] == digest
    code, text = ask("jit-cache", "import", archive, "--root", tmp_path / "two", "--any-stack", "--format", "json")
    assert code == Exit.OPEN, text
    assert (json.loads(text)["manifest"], json.loads(text)["in_place"]) == (digest, False)
    code, text = ask("jit-cache", "open", "--root", tmp_path / "two", "--work", tmp_path / "work", "--format", "json")
    assert code == Exit.OPEN, text
    assert json.loads(text)["variables"]["TRITON_CACHE_DIR"] == str(tmp_path / "work" / "sm_90a" / "triton")
    code, text = ask("jit-cache", "open", "--root", tmp_path / "two", "--work", tmp_path / "work")
    assert code == Exit.WRONG_ARGUMENTS, text
    assert "is there already" in text


def test_a_full_disk_is_told_before_anything_is_compiled() -> None:
    with small_disk("512k") as disk:
        code, text = ask("prewarm", "--target", "cpu", "--root", disk)
    assert code == Exit.INFRASTRUCTURE, text
    assert "No space left" in text


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    make_sealed(tmp_path)
    with small_disk("4k") as disk:
        code, text = ask("jit-cache", "export", disk / "jit.tar", "--root", tmp_path)
        assert list(disk.iterdir()) == []
    assert code == Exit.INFRASTRUCTURE, text
    assert "No space left" in text
    assert "make room" in text
