"""The verbs of the JIT caches: what cannot work is refused before anything is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.errors import Exit
from tests.jitcache.asking import ask
from tests.sealed_caches import CUBIN, flip_a_bit, make_sealed


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("prewarm", "--target", "cpu", "--root", "/proc/none"), Exit.WRONG_ARGUMENTS, "cannot be written"),
        (
            ("prewarm", "--target", "h200", "--tasks", "deep_gemm_small", "--at-build"), Exit.WRONG_ARGUMENTS,
            "there is no task of h200",
        ),
        (("jit-verify", "--target", "cpu", "--root", "/nowhere"), Exit.EVIDENCE_MISSING, "is not sealed"),
        (("jit-cache", "check", "--root", "/nowhere"), Exit.EVIDENCE_MISSING, "0 caches with a manifest"),
        (("jit-cache", "check", "--root", "/nowhere", "--arch", "../x"), Exit.WRONG_ARGUMENTS, "not an architecture"),
        (("jit-cache", "import", "/nowhere.tar"), Exit.WRONG_ARGUMENTS, "cannot be unpacked"),
        (("jit-cache", "import"), Exit.WRONG_ARGUMENTS, "no archive"),
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


@pytest.mark.parametrize("option", ["--receipts", "--work"])
def test_a_folder_that_cannot_be_written_is_reported_before_anything_runs(tmp_path: Path, option: str) -> None:
    """The cache is damaged, and would be reported next."""
    folder, _ = make_sealed(tmp_path / "root")
    flip_a_bit(folder / CUBIN)
    (tmp_path / "file").touch()
    words = {"--receipts": tmp_path / "receipts", option: tmp_path / "file"}
    more = [word for two in words.items() for word in two]
    code, text = ask("jit-verify", "--target", "h200", "--root", tmp_path / "root", *more)
    assert (code, f"give {option}" in text) == (Exit.WRONG_ARGUMENTS, True), text
