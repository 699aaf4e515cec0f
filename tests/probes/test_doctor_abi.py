"""Compiled files against the torch that is there: real ones, damaged ones, and ones built for another torch."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from megacpp_validate.canary.firewall.damage import rename
from megacpp_validate.probes.doctor_elf import find_compiled, find_owner, look_at, read_name, torch_headers
from megacpp_validate.probes.doctor_visible import _is_other, compare_headers, group_cuda, judge_answer, read_mapped

LIBRARIES = Path(torch.__file__).parent / "lib"
INCLUDE = Path(torch.__file__).parent / "include"
EXTENSION = LIBRARIES / "libaoti_custom_ops.so"
HEADER = "c10/core/TensorImpl.h"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy that still finds torch's libraries, because they are mapped here."""
    return Path(shutil.copy(EXTENSION, tmp_path / "_C.so"))


def test_a_file_as_it_was_shipped_wants_nothing(copy: Path) -> None:
    look = look_at(copy, read_mapped(), INCLUDE)
    assert (look.problem, look.not_found, look.wanted) == ("", (), ())
    assert not look.loaded


def test_a_symbol_that_this_torch_does_not_have_is_told_as_torchs(copy: Path) -> None:
    _, new = rename(copy, r"_ZN3c10\w+", "Q")
    (wanted,) = look_at(copy, read_mapped(), INCLUDE).wanted
    assert (wanted.symbol, wanted.owner) == (new, "torch")
    assert wanted.readable.startswith("c10::")
    assert wanted.lazy


def test_a_library_that_is_nowhere_is_told_and_its_symbols_are_not(copy: Path) -> None:
    _, new = rename(copy, r"libtorch(?:_cpu)?\.so", "99")
    look = look_at(copy, (), INCLUDE)
    assert new in look.not_found


def test_what_a_neighbour_in_its_package_defines_is_there(copy: Path) -> None:
    """Transformer Engine's torch extension names no core library: that is loaded before it, or nothing is."""
    neighbour = Path(shutil.copy(LIBRARIES / "libc10.so", copy.with_name("libneighbour.so")))
    mapped = [file for file in read_mapped() if file.name != "libc10.so"]
    assert look_at(copy, mapped, None).not_found == ("libc10.so",)
    look = look_at(copy, mapped, None, [neighbour])
    assert (look.not_found, look.wanted) == ((), ())


def test_a_truncated_file_is_told(copy: Path) -> None:
    copy.write_bytes(copy.read_bytes()[:3000])
    assert look_at(copy, read_mapped(), INCLUDE).problem


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("_C.cpython-312-x86_64-linux-gnu.so", "cpython-312-x86_64-linux-gnu"),
        ("_C.abi3.so", "abi3"),
        ("_C.so", ""),
        ("libfoo.12.so", ""),
    ],
)
def test_the_tag_of_a_file_is_read_off_its_name(copy: Path, name: str, tag: str) -> None:
    assert look_at(copy.rename(copy.with_name(name)), (), None).tag == tag


def test_compiled_files_are_found_with_their_versions(tmp_path: Path) -> None:
    for name in ("a.so", "deep/b.so.12", "c.so.txt", "d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert [file.name for file in find_compiled([tmp_path])] == ["a.so", "b.so.12"]


@pytest.mark.parametrize(
    ("symbol", "owner", "readable"),
    [
        (
            "_ZN3c1010ValueErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcEE",
            "torch",
            "c10::ValueError::ValueError()",
        ),
        ("_ZNK3c104cuda10CUDAStream6streamEv", "torch", "c10::cuda::CUDAStream::stream()"),
        ("_ZN3c10lsERSoRKNS_6IValueE", "torch", "c10::operator..."),
        ("_ZTVN5torch8autograd12AutogradMetaE", "torch", "torch::autograd::AutogradMeta"),
        (
            "_ZN3c105ErrorC2ENS_14SourceLocationESs",
            "torch",
            "c10::Error::Error (with the C++ strings of before 2015)()",
        ),
        ("cublasLtGroupedMatrixLayoutInit_internal", "cuBLAS", "cublasLtGroupedMatrixLayoutInit_internal"),
        ("cudnnGetVersion", "cuDNN", "cudnnGetVersion"),
        ("cudaLaunchKernel", "CUDA runtime", "cudaLaunchKernel"),
        ("cuModuleLoad", "CUDA driver", "cuModuleLoad"),
        ("nvte_multi_cast", "Transformer Engine's core library", "nvte_multi_cast"),
        ("PyUnicode_New", "Python", "PyUnicode_New"),
        ("something", "", "something"),
    ],
)
def test_whose_a_symbol_is(symbol: str, owner: str, readable: str) -> None:
    assert (find_owner(symbol)[0], read_name(symbol)) == (owner, readable)


def _assertion(line: int, condition: str = "extra_meta_ && extra_meta_->symbolic_shape_meta_") -> bytes:
    """What a compiler leaves of an assertion of a torch header."""
    text = (
        f'\0{condition} INTERNAL ASSERT FAILED at "/build/site-packages/torch/include/{HEADER}":{line}, please report\0'
    )
    return text.encode()


def _real_line() -> int:
    lines = (INCLUDE / HEADER).read_text().splitlines()
    return next(
        i for i, line in enumerate(lines, 1) if "TORCH_INTERNAL_ASSERT(extra_meta_ && extra_meta_->symb" in line
    )


@pytest.mark.parametrize(
    ("off", "condition", "moved"),
    [
        (0, "extra_meta_ && extra_meta_->symbolic_shape_meta_", False),
        (1, "extra_meta_ && extra_meta_->symbolic_shape_meta_", True),
        (-31, "extra_meta_ && extra_meta_->symbolic_shape_meta_", True),
        (0, "extra_meta_", True),
    ],
)
def test_an_assertion_that_stands_elsewhere_is_another_header(off: int, condition: str, moved: bool) -> None:
    headers = compare_headers(_assertion(_real_line() + off, condition), INCLUDE)
    assert headers.compared == 1
    assert bool(headers.moved) is moved


def test_a_header_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert compare_headers(_assertion(1), tmp_path).compared == 0


@pytest.mark.network
@pytest.mark.parametrize(("version", "fits"), [("0.1.3", False), ("0.1.7", True)])
def test_real_builds_of_deep_gemm_tell_which_torch_they_are_for(version: str, fits: bool, tmp_path: Path) -> None:
    """0.1.3 is built with torch 2.10 or 2.11, 0.1.7 with 2.13, by which it reads sizes wrongly on 2.11."""
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"not-run: torch is {torch.__version__}, the builds are told apart on 2.13")
    image = _deep_gemm(version, tmp_path)
    headers = compare_headers(image, INCLUDE)
    assert headers.compared >= 15
    assert (not headers.moved) is fits
    assert any(place.startswith(HEADER) for place in headers.moved) is not fits


def _deep_gemm(version: str, folder: Path) -> bytes:
    import subprocess

    command = [
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--platform",
        "manylinux2014_x86_64", "-d", str(folder), f"sgl-deep-gemm=={version}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"not-run: the index does not give sgl-deep-gemm {version}: {done.stderr[-200:]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        return archive.read("deep_gemm/_C.so")


def test_an_answer_is_right_only_where_it_is_the_tensor() -> None:
    scales = torch.arange(16.0).as_strided((8, 2), (1, 8))
    for answer, right in ((scales, True), (scales.contiguous(), True), (scales.t(), False), (scales * 2, False)):
        assert judge_answer("call", "scales", scales, answer).right is right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Assertion error (csrc/layout.hpp:37): dim == 2 or dim == 3", False),
        ("Assertion error: sf.scalar_type() == torch::kFloat", False),
        ("sf.size(-2) == ceil_div(mn, gran_mn)", False),
        ("nvcc fatal: unknown option, size of the queue", None),
        ("CUDA driver error: out of memory", None),
    ],
)
def test_a_refusal_counts_only_where_it_is_about_sizes(text: str, right: bool | None) -> None:
    assert _is_other(RuntimeError(text)) is right


def test_mapped_files_are_grouped_by_library() -> None:
    files = [
        "/a/libcudnn.so.9",
        "/b/libcudnn.so.9.14.0",
        "/b/libcudnn_graph.so.9",
        "/c/libfoo.so",
        "/a/libcublasLt.so.13",
    ]
    assert group_cuda(map(Path, files)) == {
        "libcublasLt": ("/a/libcublasLt.so.13",),
        "libcudnn": ("/a/libcudnn.so.9", "/b/libcudnn.so.9.14.0"),
        "libcudnn_graph": ("/b/libcudnn_graph.so.9",),
    }
    assert torch_headers() == INCLUDE
