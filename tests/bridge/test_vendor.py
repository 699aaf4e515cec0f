"""The firewall between a training stack and one vendor library: what it finds, decides once, and never raises."""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megacpp_validate.bridge.vendor import (
    Install,
    Vendor,
    VendorEntryMissing,
    bytes_needed,
    find_cut_short,
    look_for_te,
    read_failure,
    text_of,
)
from tests.running_processes import is_running


def elf(*, machine: int = 62, loaded: int, size: int | None = None, offset: int = 0) -> bytes:
    """One that the loader would map `loaded` bytes of; the file has `size` bytes, all that is promised without one."""
    header = struct.pack(
        "<4sBBBB8xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 0, 3, machine, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, offset, 0, 0, loaded, loaded, 4096)
    whole = (header + segment).ljust(loaded, b"\0")
    return whole if size is None else whole[:size]


SWITCH, TRIAL = "DISABLE_FAKELIB", "FAKELIB_TRIAL_SECONDS"

Make = Callable[..., Vendor]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A vendor whose library is a module written by the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (SWITCH, f"{SWITCH}_H200", TRIAL):
        monkeypatch.delenv(name, raising=False)

    def go(source: str | None = "value = 1\n", explain: Callable[[BaseException], str] | None = None) -> Vendor:
        monkeypatch.delitem(sys.modules, "fakelib", raising=False)
        if source is not None:
            (tmp_path / "fakelib.py").write_text(source)
        return Vendor(
            "Fake Library",
            module="fakelib",
            switch=SWITCH,
            explain=explain or (lambda fault: f"{type(fault).__name__}: {fault}"),
        )

    return go


RAISED = ["ImportError('x')", "OSError('x')", "AssertionError('x')", "StopIteration('x')", "SystemExit('x')",
          "MemoryError('x')", "GeneratorExit('x')", "BaseException('x')"]  # fmt: skip


@pytest.mark.parametrize("raised", RAISED)
def test_whatever_an_import_raises_is_a_reason(make: Make, raised: str) -> None:
    vendor = make(f"raise {raised}\n")
    assert vendor.is_available() is False
    assert vendor.why_unavailable() == f"{raised.partition('(')[0]}: x"


def test_an_interrupt_goes_through_and_decides_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = make("import os\nif 'FAKE_INTERRUPT' in os.environ:\n    raise KeyboardInterrupt\n")
    monkeypatch.setenv("FAKE_INTERRUPT", "1")
    with pytest.raises(KeyboardInterrupt):
        vendor.is_available()
    monkeypatch.delenv("FAKE_INTERRUPT")
    assert vendor.is_available() is True


@pytest.mark.parametrize("change", ["sys.path[:] = ['/nowhere']", "sys.path = ['/nowhere']", "sys.path.append('/x')"])
def test_an_import_that_fails_leaves_the_path_as_it_was(make: Make, change: str) -> None:
    path, kept = sys.path, list(sys.path)
    seen: list[list[str]] = []
    vendor = make(f"import sys\n{change}\nraise ImportError('x')\n", lambda _: str(seen.append(list(sys.path))))
    assert vendor.is_available() is False
    assert sys.path is path
    assert sys.path == kept == seen[0]


def test_a_library_that_is_cut_short_is_not_imported(make: Make, tmp_path: Path) -> None:
    package = tmp_path / "fakelib"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "libfakelib.so").write_bytes(elf(loaded=4096, size=2048))
    vendor = make(None)
    assert vendor.is_available() is False
    assert "libfakelib.so: file too short: 2048 bytes of the 4096" in vendor.why_unavailable()


# --- switches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_the_switch_turns_it_off(make: Make, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(SWITCH, value)
    vendor = make("raise AssertionError('imported although it is off')\n")
    assert vendor.is_available() is False
    assert f"turned off by {SWITCH}={value.strip()}" in vendor.why_unavailable()
    assert "unset" in vendor.why_unavailable()


def test_a_preset_is_turned_off_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{SWITCH}_H200", "1")
    vendor = make()
    assert vendor.is_enabled_for("h200") is False
    assert f"{SWITCH}_H200=1" in vendor.why_disabled_for("h200")
    assert vendor.is_enabled_for("b200") is True
    assert vendor.why_disabled_for("b200") == ""
    assert vendor.is_available() is True


# --- decided once -----------------------------------------------------------------------------------------


def test_a_verdict_is_kept_whatever_changes_later(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = make("raise OSError('gone')\n")
    assert vendor.is_available() is False
    (tmp_path / "fakelib.py").write_text("value = 1\n")
    assert vendor.is_available() is False
    sound = make()
    assert sound.is_available() is True
    monkeypatch.setenv(SWITCH, "1")
    assert sound.is_available() is True


def test_threads_that_ask_at_once_get_one_verdict_of_one_import(make: Make, tmp_path: Path) -> None:
    imports = tmp_path / "imports"
    vendor = make(f"import os, time\nos.mkdir({str(imports)!r})\ntime.sleep(0.3)\nraise OSError('gone')\n")
    start = threading.Barrier(16)

    def ask(_: int) -> tuple[bool, str]:
        start.wait()
        return vendor.is_available(), vendor.why_unavailable()

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == [(False, "OSError: gone")] * 16
    assert imports.is_dir()  # a second import would find it there


def test_a_question_during_the_import_is_answered_and_not_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = make("import sys\nanswer = sys.fake_vendor.is_available()\n")
    monkeypatch.setattr(sys, "fake_vendor", vendor, raising=False)
    entry = vendor.entry(lambda: __import__("fakelib").answer)
    assert vendor.is_available() is True
    assert entry() is False


# --- entries ----------------------------------------------------------------------------------------------


def value() -> int:
    return __import__("fakelib").value


def other() -> int:
    from fakelib import other

    return other


def test_an_optional_entry_is_missing_alone(make: Make) -> None:
    vendor = make()
    there, missing = vendor.entry(value), vendor.entry(other)
    assert vendor.is_available() is True
    assert (there(), there.require(), there.why_missing()) == (1, 1, "")
    assert missing() is None
    assert "entry point `other`" in missing.why_missing()
    with pytest.raises(VendorEntryMissing, match="entry point `other`"):
        missing.require()


def test_an_entry_is_imported_when_it_is_first_asked_for_and_then_kept(make: Make) -> None:
    loaded: list[int] = []
    entry = make().entry(lambda: loaded.append(1) or object())
    assert loaded == []
    assert entry() is entry()
    assert loaded == [1]


def test_a_required_entry_decides_over_the_library(make: Make) -> None:
    vendor = make()
    missing = vendor.required_entry(other)
    assert vendor.is_available() is False
    assert "required entry point `other`" in vendor.why_unavailable()
    assert "ImportError: cannot import name 'other'" in vendor.why_unavailable()
    assert missing.why_missing() == vendor.why_unavailable()


# --- the trial import -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os\nos.abort()\n", r"ends the interpreter (signal 6) in {file}:2 (<module>)"),
        ("import os\nos._exit(3)\n", "ends the interpreter (exit status 3)"),
        ("import os\nos._exit(0)\n", "ends the interpreter (exit status 0)"),
        ("import ctypes\nctypes.string_at(0)\n", "ends the interpreter (signal 11)"),
    ],
)
def test_an_import_that_ends_the_process_costs_a_verdict(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    monkeypatch.setenv(TRIAL, "60")
    vendor = make(source)
    assert vendor.is_available() is False
    assert says.replace("{file}", str(tmp_path / "fakelib.py")) in vendor.why_unavailable()
    assert f"{SWITCH}=1" in vendor.why_unavailable()


def test_an_import_that_hangs_costs_a_verdict_and_what_it_started_is_gone(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRIAL, "3")
    vendor = make(
        "import pathlib, subprocess, time\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(subprocess.Popen(['sleep', '600']).pid))\n"
        "time.sleep(600)\n"
    )
    started = time.monotonic()
    assert vendor.is_available() is False
    assert time.monotonic() - started < 30
    assert f"hangs in {tmp_path / 'fakelib.py'}:3 (<module>)" in vendor.why_unavailable()
    started_by_it = int((tmp_path / "pid").read_text())
    limit = time.monotonic() + 30  # a kill is delivered when the kernel next runs the process, not when it is sent
    while is_running(started_by_it) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not is_running(started_by_it)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "vendor_x"
    (made / "wheel_lib").mkdir(parents=True)
    (made / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return made


@pytest.mark.parametrize("place", ["libvendor_x.so", "wheel_lib/libvendor_x.so", "../vendor_x_torch.cpython-312.so"])
def test_one_that_is_cut_short_is_named(package: Path, place: str) -> None:
    (package / "whole.so").write_bytes(elf(machine=183, loaded=4096))
    (package / "later.so").write_bytes(elf(loaded=4096, offset=512))
    assert [bytes_needed(package / name) for name in ("whole.so", "later.so")] == [4096, 4608]
    (package / "later.so").unlink()
    (package / "libvendor_x.so.debug").write_bytes(elf(loaded=4096, size=2048))  # what a build strips off
    assert find_cut_short("vendor_x") == ""
    (package / place).write_bytes(elf(loaded=4096, size=2048))
    assert Path(place).name in find_cut_short("vendor_x")
    assert "file too short: 2048 bytes of the 4096" in find_cut_short("vendor_x")


class Odd(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (ValueError(), "no text"),
        (ValueError("two\nlines\tand a tab"), "two lines and a tab"),
        (ValueError("\x1b[31mred \udc80 \x00"), "\\x1b[31mred \\udc80 \\x00"),
        (Odd(), "its text cannot be made"),
    ],
)
def test_it_is_one_line_that_any_stream_takes(fault: BaseException, text: str) -> None:
    assert text_of(fault) == text
    text_of(fault).encode("ascii")


def test_the_facts_are_json_with_what_rules_ask_for() -> None:
    try:
        raise AttributeError("no x", name="x", obj=json)
    except AttributeError as fault:
        other = PermissionError(13, "Permission denied", "/s/x.py")
        fault.__cause__ = other
        facts = json.loads(json.dumps(read_failure(fault)))
    first, second = facts["raised"]
    assert (first["kinds"][0], first["name"], first["owner"], first["file"]) == (
        "AttributeError",
        "x",
        "json",
        json.__file__,
    )
    assert second["kinds"][:2] == ["PermissionError", "OSError"]
    assert (second["number"], second["file"]) == (13, "/s/x.py")
    assert facts["handled"] == []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of distributions, in which Transformer Engine has its sources."""
    (tmp_path / "transformer_engine" / "wheel_lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def write(site: Path, name: str, data: bytes = b"") -> None:
    folder = site / f"{name}-2.20.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_bytes(data or f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.20.2\n".encode())


def test_parts_copies_and_libraries_are_found(site: Path) -> None:
    for name in ("transformer_engine", "transformer_engine_cu13", "transformer_engine_torch"):
        write(site, name)
    package = site / "transformer_engine"
    for name in ("libtransformer_engine.so", "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so"):
        (package / "wheel_lib" / name).touch()
    whole = dict.fromkeys(("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"), "2.20.2")
    install = look_for_te()
    assert install == Install(whole, (str(package),), True, True, has_record=False)
    assert str(package) in install.describe()


def test_metadata_that_cannot_be_read_is_told_apart(site: Path) -> None:
    write(site, "transformer_engine", b"\xff\xfe\x00")
    write(site, "transformer_engine_torch")
    assert look_for_te().unreadable == ("transformer-engine",)
    assert "metadata cannot be read" in look_for_te().describe()
