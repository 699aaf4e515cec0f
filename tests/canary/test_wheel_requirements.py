"""Requirements from symbols: compiled libraries in wheels on an index of files."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from megacpp_validate.canary.package_index import UnknownRelease
from megacpp_validate.canary.requirements import WheelRequirements, run_requirements
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.errors import Exit
from megacpp_validate.report.describe.canary import describe_requirements
from megacpp_validate.report.marks import Tone
from tests.canary.static.small_index import PACKAGE, use_index, write_index, write_wheel
from tests.catalog.refusals import copy_matrix

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="not-run: there is no C compiler")
PLATFORM = "manylinux_2_{}_x86_64"
OLD, NEW = "int cublasLtCreate(void) { return 0; }", "int cublasLtGroupedThing(void) { return 0; }"
CORE = "int cublasLtCreate(void); int cublasLtGroupedThing(void);\nint nvte_run(void) { return cublasLtCreate() + cublasLtGroupedThing(); }"  # noqa: E501


def compile_library(file: Path, code: str) -> bytes:
    """A shared library; what it does not define stays undefined."""
    source = file.with_suffix(".c")
    source.write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-nostdlib", "-o", str(file), str(source)], check=True)
    return file.read_bytes()


@pytest.fixture
def read(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Code of each nvidia-cublas, and the loader of the release -> its requirements; the index has no CUDA 12."""

    def run(libraries: Mapping[str, str], loader: str = "") -> WheelRequirements:
        package = PACKAGE | {"transformer_engine/common/__init__.py": loader}
        use_index(monkeypatch, write_index(tmp_path / "index", {"2.14.1": package}))
        monkeypatch.setenv("MEGACPP_CACHE_DIR", str(tmp_path / "cache"))
        core = {"transformer_engine/wheel_lib/libtransformer_engine.so": compile_library(tmp_path / "core.so", CORE)}
        index = tmp_path / "index" / "simple"
        write_wheel(index / "transformer-engine-cu13", "2.14.1", core, "transformer_engine_cu13", PLATFORM.format(18))
        for version, code in libraries.items():
            files = {"nvidia/cu13/lib/libcublasLt.so.13": compile_library(tmp_path / "lt.so", code)}
            platform = PLATFORM.format(17 + len(version) % 3)
            write_wheel(index / "nvidia-cublas", version, files, "nvidia_cublas", platform)
        matrix = copy_matrix(tmp_path / "matrix") if not (tmp_path / "matrix").exists() else tmp_path / "matrix"
        return run_requirements(catalog.model_copy(update={"folder": matrix}), "2.14.1")

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
    assert list(result.unknown) == ["transformer-engine-cu12 2.14.1"]  # this index has none: unknown, never fine
    assert result.exit == Exit.EVIDENCE_MISSING
    assert describe_requirements(result).mark.tone in (Tone.BAD, Tone.MISSING)


def test_what_is_bound_at_the_first_call_fails_no_import(read) -> None:  # type: ignore[no-untyped-def]
    (need,) = read({"13.0.0.19": OLD, "13.4.3": BOTH}, "import os\nMODE = os.RTLD_LAZY\n").needs
    assert (need.at_load, need.known) == (False, "")


def test_a_release_that_the_index_lacks_is_refused(read, catalog: Catalog) -> None:  # type: ignore[no-untyped-def]
    read({"13.0.0.19": OLD})
    with pytest.raises(UnknownRelease, match=r"Nearest: 2\.14\.1"):
        run_requirements(catalog, "2.14.9")
