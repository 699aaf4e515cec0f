"""The verb that carries sealed caches: what was changed is named, what ends it leaves nothing half done."""

from __future__ import annotations

import json
from pathlib import Path

from megacpp_validate.errors import Exit
from tests.jitcache.asking import ask
from tests.sealed_caches import flip_a_bit, make_sealed, put, small_disk


def test_what_was_changed_by_hand_is_a_changed_cache(tmp_path: Path) -> None:
    """Neither a matter of the machine, nor a cache without a manifest."""
    folder, _ = make_sealed(tmp_path)
    (folder / "triton" / "away").symlink_to("/etc/passwd")
    code, text = ask("jit-cache", "check", "--root", tmp_path)
    assert (code, "triton/away" in text and "not a plain file" in text) == (Exit.CLOSED, True), text
    (folder / "triton" / "away").unlink()
    flip_a_bit(folder / "manifest.json")
    for words in (("jit-verify", "--target", "h200", "--receipts", tmp_path / "r"), ("jit-cache", "check")):
        code, text = ask(*words, "--root", tmp_path)
        assert (code, "not the one that its hash is of" in text) == (Exit.CLOSED, True), text


def test_one_that_is_not_sealed_is_not_called_sealed(tmp_path: Path) -> None:
    folder, _ = make_sealed(tmp_path)
    assert "Sealed: 5 files" in ask("jit-cache", "check", "--root", tmp_path)[1]
    (folder / "manifest.sha256").chmod(0o644)  # as a copy has it
    put(folder / "triton" / "a\n\x1b[31mb", b"of anybody")
    code, text = ask("jit-cache", "check", "--root", tmp_path)
    assert (code, "Whole, and not sealed: 5 files" in text) == (Exit.OPEN, True), text
    assert "\x1b" not in text
    (folder / "manifest.sha256").chmod(0o444)
    code, text = ask("jit-cache", "export", tmp_path / "jit.tar", "--root", tmp_path)
    assert (code, "made since, and not exported" in text) == (Exit.OPEN, True), text
    (folder / "manifest.sha256").chmod(0o644)
    code, text = ask("jit-verify", "--target", "h200", "--root", tmp_path, "--receipts", tmp_path / "r")
    assert (code, "a copy that did not keep the modes" in text) == (Exit.EVIDENCE_MISSING, True), text


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
    assert "exists already" in text


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    make_sealed(tmp_path)
    archive = tmp_path / "jit.tar"
    assert ask("jit-cache", "export", archive, "--root", tmp_path)[0] == Exit.OPEN
    with small_disk("4k") as disk:
        for words in (("import", archive, "--root", disk, "--any-stack"), ("open", "--root", tmp_path, "--work", disk)):
            code, text = ask("jit-cache", *words)
            assert (code, "No space left" in text) == (Exit.INFRASTRUCTURE, True), text
    with small_disk("4k") as disk:
        code, text = ask("jit-cache", "export", disk / "jit.tar", "--root", tmp_path)
        assert list(disk.iterdir()) == []
    assert code == Exit.INFRASTRUCTURE, text
    assert "No space left" in text
