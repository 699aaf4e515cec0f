"""Requirements from symbols: compiled libraries in wheels on an index of files."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from megacpp_validate.canary.requirements import (
    WheelRequirements,
    list_libraries,
    open_wheel,
    read_library,
    run_requirements,
)
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.errors import Exit, NoEnvironment
from megacpp_validate.report.describe.canary import describe_requirements
from megacpp_validate.report.marks import Tone
from tests.canary.static.small_index import PACKAGE, serve, use_index, write_index
from tests.catalog.refusals import copy_matrix

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="not-run: there is no C compiler")
OLD, NEW = "int cublasLtCreate(void) { return 0; }", "int cublasLtGroupedThing(void) { return 0; }"
CORE = "int cublasLtCreate(void); int cublasLtGroupedThing(void);\nint nvte_run(void) { return cublasLtCreate() + cublasLtGroupedThing(); }"  # noqa: E501


def compile_library(file: Path, code: str) -> bytes:
    """A shared library; what it does not define stays undefined."""
    source = file.with_suffix(".c")
    source.write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-nostdlib", "-o", str(file), str(source)], check=True)
    return file.read_bytes()


def write_wheel(index: Path, name: str, version: str, files: Mapping[str, bytes], tag: str = "manylinux_2_18") -> Path:
    folder, stem = index / "simple" / name.replace("_", "-"), f"{name}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-py3-none-{tag}_x86_64.whl"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for place, content in files.items():
            archive.writestr(place, content)
        archive.writestr(f"{stem}.dist-info/METADATA", about)
        archive.writestr(f"{stem}.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: py3-none-{tag}_x86_64\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    (folder / "index.html").write_text(
        "".join(f'<a href="{one.name}">{one.name}</a>\n' for one in folder.glob("*.whl"))
    )
    return wheel


@pytest.fixture
def read(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Code of each nvidia-cublas, and the loader of the release -> its requirements; the index has no CUDA 12."""

    def run(libraries: Mapping[str, str], loader: str = "") -> WheelRequirements:
        package = PACKAGE | {"transformer_engine/common/__init__.py": loader}
        use_index(monkeypatch, write_index(tmp_path / "index", {"2.14.1": package}))
        monkeypatch.setenv("MEGACPP_CACHE_DIR", str(tmp_path / "cache"))
        core = {"transformer_engine/wheel_lib/libtransformer_engine.so": compile_library(tmp_path / "core.so", CORE)}
        write_wheel(tmp_path / "index", "transformer_engine_cu13", "2.14.1", core)
        for version, code in libraries.items():
            files = {"nvidia/cu13/lib/libcublasLt.so.13": compile_library(tmp_path / "lt.so", code)}
            write_wheel(tmp_path / "index", "nvidia_cublas", version, files, f"manylinux_2_{17 + len(version) % 3}")
        matrix = copy_matrix(tmp_path / "matrix") if not (tmp_path / "matrix").exists() else tmp_path / "matrix"
        return run_requirements(catalog, "2.14.1", matrix)

    return run


BOTH = OLD + NEW


@pytest.mark.parametrize(
    ("libraries", "first", "before", "known"),
    [
        ({"13.0.0.19": OLD, "13.1.0.3": OLD, "13.1.2.11": OLD, "13.2.0.9": BOTH, "13.4": BOTH}, "13.2.0.9", "13.1.2.11",
         "cublas-grouped-layout"),
        ({"13.0.0.19": OLD, "13.4.1": OLD, "13.4.3": BOTH}, "13.4.3", "13.4.1", ""),
        ({"13.0.0.19": OLD, "13.5.1": BOTH}, "13.5.1", "13.0.0.19", "cublas-grouped-layout"),
        ({"13.0.0.19": OLD, "13.1": OLD}, "", "13.1", ""),
    ],
)  # fmt: skip
def test_the_first_wheel_that_defines_a_symbol(  # type: ignore[no-untyped-def]
    read, libraries: dict[str, str], first: str, before: str, known: str
) -> None:
    result = read(libraries)
    (need,) = result.needs
    assert (need.symbols, need.first, need.before) == (("cublasLtGroupedThing",), first, before)
    assert (need.library, need.distribution, need.cuda, need.at_load) == ("libcublasLt", "nvidia-cublas", 13, True)
    assert need.known == known
    assert result.cores[0].undefined == 2
    assert list(result.unknown) == ["transformer-engine-cu12 2.14.1"]  # this index has none: unknown, never fine
    assert result.exit == Exit.EVIDENCE_MISSING
    assert describe_requirements(result).mark.tone in (Tone.BAD, Tone.MISSING)


def test_what_is_bound_at_the_first_call_fails_no_import(read) -> None:  # type: ignore[no-untyped-def]
    (need,) = read({"13.0.0.19": OLD, "13.4.3": BOTH}, "import os\nMODE = os.RTLD_LAZY\n").needs
    assert (need.at_load, need.known) == (False, "")


class _InRanges(BaseHTTPRequestHandler):
    content = b""

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = self.content[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        pass


def test_one_library_of_a_wheel_on_a_server(tmp_path: Path) -> None:
    files = {"a/lib/libx.so.13": compile_library(tmp_path / "x.so", OLD), "a/text.txt": b"no library"}
    content = write_wheel(tmp_path, "x", "1", files).read_bytes()
    handler = type("Handler", (_InRanges,), {"content": content})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        with open_wheel(f"http://127.0.0.1:{server.server_address[1]}/x-1-py3-none-any.whl") as wheel:
            assert list_libraries(wheel) == {"libx.so.13": "a/lib/libx.so.13"}
            elf = read_library(wheel, "a/lib/libx.so.13")
            assert (elf.defines("cublasLtCreate"), elf.defines("cublasLtGroupedThing")) == (True, False)
        server.shutdown()


def test_a_server_without_ranges_is_named(tmp_path: Path) -> None:
    with (
        serve({".whl": (200, "application/zip", b"PK")}) as address,
        pytest.raises(NoEnvironment, match="ranges"),
        open_wheel(f"{address}/x-1-py3-none-any.whl"),
    ):
        pass
