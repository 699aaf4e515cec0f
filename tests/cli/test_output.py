"""Where a result goes: whole or not at all, with a reason where it cannot be written."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from megacpp_validate.cli.output import write_answer, write_result, write_text
from megacpp_validate.errors import Exit, InfrastructureFailed, WrongArguments
from megacpp_validate.evidence import receipt as receipt_module
from megacpp_validate.evidence.values import Frozen
from megacpp_validate.report.document import Document
from megacpp_validate.report.marks import bad


class Verdict(Frozen):
    name: str = "permute"

    @property
    def exit(self) -> Exit:
        return Exit.CLOSED


def describe(verdict: Verdict) -> Document:
    return Document("Upgrade", f"`{verdict.name}` breaks.", bad("breaks"))


OPENINGS = {
    "table": "Upgrade\n",
    "json": "{\n",
    "html": "<!doctype html>",
    "markdown": "## Upgrade\n",
    "junit": '<?xml version="1.0" encoding="UTF-8"?>\n',
    "github": "::error title=Upgrade::",
    "sarif": "{\n",
}


@pytest.mark.parametrize("fmt", OPENINGS)
def test_every_format_goes_to_stdout_and_to_a_file(
    fmt: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "megacpp_validate.report.describe.verdict", SimpleNamespace(describe=describe))
    kept = tmp_path / "kept.json"
    assert write_answer(Verdict(), "verdict:describe", output=None, as_json=kept, fmt=fmt) == Exit.CLOSED
    assert json.loads(kept.read_text(encoding="utf-8")) == {"name": "permute"}
    out, err = capsys.readouterr()
    assert err == ""
    file = tmp_path / "new" / "result"
    write_result(Verdict(), "verdict:describe", file, fmt=fmt)
    assert file.read_text(encoding="utf-8") == out
    assert out.startswith(OPENINGS[fmt])
    assert "permute" in out
    if fmt == "json":
        assert json.loads(out) == {"name": "permute"}
    if fmt == "junit":
        ET.fromstring(out.encode())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_a_file_is_whole_or_as_it_was(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result"
    file.write_text("before")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(receipt_module.os, "fsync", fail)
    with pytest.raises(WrongArguments if number == errno.EACCES else InfrastructureFailed, match="Next step"):
        write_text("after", file)
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_stdout_that_is_closed_or_full_is_no_breakage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(InfrastructureFailed, match="standard output is closed"):
        write_text("text", None)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(InfrastructureFailed, match="standard output"):
            write_text("text", None)


def test_a_place_that_cannot_be_written_is_a_wrong_argument(tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    (tmp_path / "a-folder").mkdir()
    for place in ("a-file/result", "a-folder"):
        with pytest.raises(WrongArguments, match=place):
            write_text("text", tmp_path / place)
    write_text("text", Path("/dev/null"))
