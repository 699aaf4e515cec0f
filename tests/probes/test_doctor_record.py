"""The files of a package against the record of its installer, and a package that is not there."""

from __future__ import annotations

import base64
import importlib.metadata
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from megacpp_validate.evidence.doctor_look import Record
from megacpp_validate.probes.doctor import is_there, main
from megacpp_validate.probes.doctor_look import compare_record

CHANGED = Record(4, ("odd/patched.py", "odd/short.so"), ("odd/gone.py",))


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a file as recorded, a patched one of the same size, a shorter one, and one that is gone."""
    (tmp_path / "odd").mkdir()
    info = tmp_path / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    lines = ["odd/cached.pyc,,", "odd-1.0.dist-info/RECORD,,", "../bin/odd,sha256=x,1"]
    files = (("__init__", b"1", b"1"), ("patched", b"good", b"evil"), ("short.so", b"12", b"1"), ("gone", b"1", None))
    for stem, recorded, there in files:
        name = stem if "." in stem else f"{stem}.py"
        digest = base64.urlsafe_b64encode(sha256(recorded).digest()).decode().rstrip("=")
        lines.append(f"odd/{name},sha256={digest},{len(recorded)}")
        if there is not None:
            (tmp_path / "odd" / name).write_bytes(there)
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "odd"


def test_what_is_gone_is_seen_by_every_python(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on `Distribution.files` leaves out what is not there."""
    monkeypatch.setattr(importlib.metadata.Distribution, "files", property(lambda _: pytest.fail("it was asked")))
    assert compare_record("odd", ("no-such", "odd"), odd) == CHANGED
    assert compare_record("odd", ("no-such",), odd) == Record()
    assert compare_record("odd", ("odd",), odd.parent / "else/odd") == Record(elsewhere=str(odd.parent))


def test_a_package_that_is_not_there_is_told_without_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [is_there(name) for name in ("json.decoder", "no_such.part", "")] == [True, False, True]
    monkeypatch.setitem(sys.modules, "megacpp_validate.probes.doctor_look", None)
    main("no_such.part", str(tmp_path / "answer"))
    assert (tmp_path / "answer").read_text() == '{"package": "no_such.part", "installed": false}'
    with pytest.raises(ImportError):
        main("json", str(tmp_path / "answer"))
