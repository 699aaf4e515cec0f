"""The judgement of the doctor: nothing is said of a clean host, and each fault by itself is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.environments.doctor import judge
from megacpp_validate.environments.doctor_result import Aspect, Difference, Weight
from megacpp_validate.environments.doctor_seen import TE, Seen
from megacpp_validate.evidence.doctor_look import Behaviour, Extension, Headers, PackageLook, Record, Wanted
from tests.environments.doctor_hosts import (
    LIBRARIES,
    SITE,
    TWO_RUNTIMES,
    extension,
    failure,
    host,
    look,
    rows,
    with_cudnn,
    with_distributions,
    with_path,
)

EVERY = ("imports", "attention", "linear_walker", "permute", "expert_gemm", "native_block", "layer_spec")
OF_TORCH = Wanted("_ZN3c1010ValueErrorC1E", "c10::ValueError::ValueError()", "torch", lazy=True)
OF_CUBLAS = Wanted(
    "cublasLtGroupedMatrixLayoutInit_internal", "cublasLtGroupedMatrixLayoutInit_internal", "cuBLAS", lazy=False
)
OTHER_TORCH = Headers(15, ("c10/core/TensorImpl.h:1338", "c10/util/intrusive_ptr.h:393"))
GIVEN = "fp32 tensor [8, 2]"
REFUSED = Behaviour("call", GIVEN, "RuntimeError: dim == 2 or dim == 3", right=False)
ANSWERED = Behaviour("call", GIVEN, "float32 tensor [8, 2]", right=True)
NOT_ASKED = Behaviour("call", GIVEN, "AttributeError: no such call", right=None)


def deep_gemm(**more: object) -> Seen:
    return host(deep_gemm=look("deep_gemm", "0.1.7", **more))


def without_metadata(seen: Seen) -> Seen:
    kept = [one for one in seen.path.distributions if "cudnn-cu" not in one.name]
    return with_path(seen, distributions=tuple(kept))


def te(version: str, **more: object) -> Seen:
    return host(transformer_engine=look(TE, version, **more))


def test_nothing_is_said_of_a_clean_host(catalog: Catalog) -> None:
    assert judge(host(), rows(catalog)) == ()


# What is planted; the weight, the aspect and the modules that must be told of it, and a word of the next step.
FAULTS: dict[str, tuple[Callable[[], Seen], Weight, Aspect, tuple[str, ...], str]] = {
    "no TE": (
        lambda: host(transformer_engine=PackageLook(TE, installed=False)),
        Weight.BREAKS,
        Aspect.MISSING,
        EVERY,
        "install",
    ),
    "no FA3": (
        lambda: host(flash_attn_interface=PackageLook("flash_attn_interface", installed=False)),
        Weight.NOTE,
        Aspect.MISSING,
        (),
        "flash-attn-3",
    ),
    "import raises": (
        lambda: te("2.20.2", failure=failure("no such file")),
        Weight.BREAKS,
        Aspect.IMPORT,
        EVERY,
        "again",
    ),
    "import aborts": (lambda: deep_gemm(ended="signal 6"), Weight.BREAKS, Aspect.IMPORT, ("expert_gemm",), "again"),
    "import hangs": (
        lambda: deep_gemm(ended="killed after 180 s"),
        Weight.BREAKS,
        Aspect.IMPORT,
        ("expert_gemm",),
        "again",
    ),
    "not started": (
        lambda: deep_gemm(ended="not started: no memory"),
        Weight.UNKNOWN,
        Aspect.IMPORT,
        ("expert_gemm",),
        "",
    ),
    "cuBLAS too old": (lambda: te("2.14.1"), Weight.BREAKS, Aspect.LIBRARY, EVERY, "nvidia-cublas>=13.2"),
    "cuDNN without reshape mode": (
        lambda: host(transformer_engine=with_cudnn("9.19.0, 9.14.0", te="2.17.1")),
        Weight.BREAKS,
        Aspect.LIBRARY,
        ("attention", "native_block"),
        "nvidia-cudnn-cu13>=9.22",
    ),
    "cuDNN below the least": (
        lambda: host(transformer_engine=with_cudnn("9.11.0")),
        Weight.BREAKS,
        Aspect.LIBRARY,
        EVERY,
        "9.12",
    ),
    "cuDNN silent": (
        lambda: without_metadata(
            host(transformer_engine=look(TE, "2.20.2", libraries=()), torch=look("torch", libraries=()))
        ),
        Weight.UNKNOWN,
        Aspect.LIBRARY,
        EVERY,
        "cudnn",
    ),
    "two runtimes, TE that throws": (
        lambda: te("2.12.0", runtimes=TWO_RUNTIMES),
        Weight.BREAKS,
        Aspect.CUDA_RUNTIME,
        ("attention", "native_block"),
        "LD_LIBRARY_PATH",
    ),
    "two runtimes, TE that warns": (
        lambda: te("2.20.2", runtimes=TWO_RUNTIMES),
        Weight.RISK,
        Aspect.CUDA_RUNTIME,
        ("attention", "native_block"),
        "torch's",
    ),
    "FA3 brings a runtime": (
        lambda: host("2.12.0", flash_attn_interface=look("flash_attn_interface", runtimes=TWO_RUNTIMES)),
        Weight.RISK,
        Aspect.CUDA_RUNTIME,
        ("attention", "native_block"),
        "no process",
    ),
    "two cuDNNs": (
        lambda: te(
            "2.20.2",
            mapped={"libcudnn": (f"{SITE}/libcudnn.so.9",), "libcudnn_graph": ("/usr/lib/libcudnn_graph.so.9",)},
        ),
        Weight.RISK,
        Aspect.SECOND_COPY,
        ("attention", "native_block"),
        "CUDNN_HOME",
    ),
    "old driver": (lambda: with_path(host(), driver_cuda="12.8"), Weight.BREAKS, Aspect.DRIVER, EVERY, "driver"),
    "driver of the same major": (
        lambda: with_path(host(), torch_cuda="13.2"),
        Weight.NOTE,
        Aspect.DRIVER,
        (),
        "driver",
    ),
    "another GPU": (lambda: with_path(host(), capability="10.0"), Weight.UNKNOWN, Aspect.LOOK, EVERY, "h200"),
    "no GPU": (lambda: with_path(host(), gpu="", capability=""), Weight.UNKNOWN, Aspect.LOOK, EVERY, "cpu"),
    "another machine": (lambda: with_path(host(), machine="aarch64"), Weight.UNKNOWN, Aspect.LOOK, EVERY, "h200"),
    "reads tensors wrongly": (
        lambda: deep_gemm(behaviours=(REFUSED,)),
        Weight.BREAKS,
        Aspect.TORCH_ABI,
        ("expert_gemm",),
        "sgl-deep-gemm==0.1.3",
    ),
    "not asked how it reads": (
        lambda: deep_gemm(behaviours=(NOT_ASKED,)),
        Weight.UNKNOWN,
        Aspect.LOOK,
        ("expert_gemm",),
        "parity",
    ),
    "built for another torch": (
        lambda: deep_gemm(extensions=(extension(loaded=True, headers=OTHER_TORCH),)),
        Weight.BREAKS,
        Aspect.TORCH_ABI,
        ("expert_gemm",),
        "sgl-deep-gemm==0.1.3",
    ),
    "built for another torch, reads rightly": (
        lambda: deep_gemm(extensions=(extension(loaded=True, headers=OTHER_TORCH),), behaviours=(ANSWERED,)),
        Weight.NOTE,
        Aspect.TORCH_ABI,
        ("expert_gemm",),
        "built",
    ),
    "other headers, same layout": (
        lambda: deep_gemm(extensions=(extension(loaded=True, headers=Headers(15, ("c10/core/SymInt.h:88",))),)),
        Weight.RISK,
        Aspect.TORCH_ABI,
        ("expert_gemm",),
        "built",
    ),
    "symbol of another torch, lazy": (
        lambda: deep_gemm(extensions=(extension(loaded=True, wanted=(OF_TORCH,)),)),
        Weight.RISK,
        Aspect.TORCH_ABI,
        ("expert_gemm",),
        "built",
    ),
    "symbol of another torch, at import": (
        lambda: deep_gemm(failure=failure("undefined symbol"), extensions=(extension(wanted=(OF_TORCH,)),)),
        Weight.BREAKS,
        Aspect.TORCH_ABI,
        ("expert_gemm",),
        "built",
    ),
    "symbol of nobody": (
        lambda: deep_gemm(extensions=(extension(loaded=True, wanted=(Wanted("foo", "foo", "", lazy=True),)),)),
        Weight.RISK,
        Aspect.SYMBOL,
        ("expert_gemm",),
        "built",
    ),
    "symbol of a plugin that was not loaded": (
        lambda: deep_gemm(extensions=(extension(wanted=(Wanted("foo", "foo", "", lazy=False),)),)),
        Weight.NOTE,
        Aspect.SYMBOL,
        ("expert_gemm",),
        "built",
    ),
    "library of a plugin that was not loaded": (
        lambda: deep_gemm(extensions=(extension(not_found=("libcupti.so.13",)),)),
        Weight.NOTE,
        Aspect.LIBRARY,
        ("expert_gemm",),
        "libcupti.so.13",
    ),
    "library not found": (
        lambda: deep_gemm(failure=failure("cannot open"), extensions=(extension(not_found=("libtvm_ffi.so",)),)),
        Weight.BREAKS,
        Aspect.LIBRARY,
        ("expert_gemm",),
        "libtvm_ffi.so",
    ),
    "damaged file": (
        lambda: deep_gemm(failure=failure("x"), extensions=(extension(problem="the file is damaged"),)),
        Weight.BREAKS,
        Aspect.LIBRARY,
        ("expert_gemm",),
        "again",
    ),
    "another Python": (
        lambda: deep_gemm(
            extensions=(extension("_C.cpython-311-x86_64-linux-gnu.so", tag="cpython-311-x86_64-linux-gnu"),)
        ),
        Weight.BREAKS,
        Aspect.PYTHON_ABI,
        ("expert_gemm",),
        "pip",
    ),
    "another CUDA": (
        lambda: host(
            deep_gemm=look(
                "deep_gemm", "0.1.3", extensions=(Extension(file="/x/_C.so", loaded=True, needed=("libcudart.so.12",)),)
            )
        ),
        Weight.RISK,
        Aspect.CUDA_RUNTIME,
        ("expert_gemm",),
        "CUDA 13",
    ),
    "second copy": (
        lambda: deep_gemm(copies=("/home/me/deep_gemm/__init__.py",)),
        Weight.RISK,
        Aspect.SECOND_COPY,
        ("expert_gemm",),
        "PYTHONPATH",
    ),
    "two metadata": (
        lambda: with_distributions(host(), ("Triton", "3.5.0", "/other")),
        Weight.RISK,
        Aspect.METADATA,
        ("permute",),
        "uninstall",
    ),
    "wheel for another torch": (
        lambda: with_distributions(host(), ("flash-attn", "2.8.3+cu13torch2.8cxx11abitrue", SITE)),
        Weight.RISK,
        Aspect.METADATA,
        ("attention",),
        "flash-attn",
    ),
    "wheel for another CUDA": (
        lambda: with_distributions(host(), ("flash-attn", "2.8.3+cu12torch2.11", SITE)),
        Weight.RISK,
        Aspect.METADATA,
        ("attention",),
        "flash-attn",
    ),
    "wheel asks for another torch": (
        lambda: with_distributions(host(), ("xformers", "0.0.34", SITE, ("torch==2.10.0",))),
        Weight.RISK,
        Aspect.METADATA,
        ("attention",),
        "xformers",
    ),
    "wheel asks for another neighbour": (
        lambda: with_distributions(host(), ("deep-gemm", "1", SITE, ("triton==3.5.0",))),
        Weight.NOTE,
        Aspect.METADATA,
        (),
        "nothing",
    ),
    "FA4 without the CuTe DSL": (
        lambda: with_distributions(
            te("2.17.1", failure=failure("no cutlass"), libraries=LIBRARIES), ("flash-attn-4", "4.0.0b36", SITE)
        ),
        Weight.BREAKS,
        Aspect.VERSION,
        EVERY,
        "nvidia-cutlass-dsl",
    ),
    "old frontend": (
        lambda: with_distributions(host(), ("nvidia-cudnn-frontend", "1.20.0", SITE)),
        Weight.RISK,
        Aspect.VERSION,
        EVERY,
        "1.29.0",
    ),
    "a patched file": (
        lambda: te("2.20.2", record=Record(222, changed=("transformer_engine/pytorch/attention.py",))),
        Weight.RISK,
        Aspect.METADATA,
        EVERY,
        "again",
    ),
    "another release unpacked over it": (
        lambda: te("2.18.0", record=Record(200, changed=("a.py",) * 47, gone=("b.py",) * 2)),
        Weight.UNKNOWN,
        Aspect.METADATA,
        EVERY,
        "again",
    ),
    "metadata of another folder": (
        lambda: te("2.20.2", record=Record(elsewhere="/usr/lib/python3/dist-packages")),
        Weight.RISK,
        Aspect.METADATA,
        EVERY,
        "off the path",
    ),
    "not the release in production": (lambda: host("2.19.0"), Weight.NOTE, Aspect.VERSION, (), "2.20.2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_told_with_what_it_breaks(name: str, catalog: Catalog) -> None:
    make, weight, aspect, breaks, step = FAULTS[name]
    found = judge(make(), rows(catalog))
    assert any(
        (one.weight, one.aspect, one.breaks) == (weight, aspect, breaks) and step in one.next_step for one in found
    ), [(one.weight, one.aspect, one.breaks, one.next_step) for one in found]
    assert all(one.seen and one.wanted and one.how and one.next_step for one in found)


def test_the_worst_comes_first(catalog: Catalog) -> None:
    seen = with_path(host("2.14.1", deep_gemm=look("deep_gemm", copies=("/x",))), driver_cuda="12.8", capability="10.0")
    weights = [one.weight.rank for one in judge(seen, rows(catalog))]
    assert weights == sorted(weights)
    assert len(set(weights)) >= 3


def test_a_known_need_stands_for_its_missing_symbol(catalog: Catalog) -> None:
    """2.14.1 as it was seen: the symbol and the cuBLAS that lacks it are one finding, the import error another."""
    core = extension("libtransformer_engine.so", wanted=(OF_CUBLAS,))
    seen = te("2.14.1", failure=failure("undefined symbol: cublasLtGrouped..."), extensions=(core,))
    breaking = [one for one in judge(seen, rows(catalog)) if one.weight is Weight.BREAKS]
    assert [one.aspect for one in breaking] == [Aspect.IMPORT, Aspect.LIBRARY]
    assert "cuBLAS 13.1.0" in breaking[1].seen


def test_a_symbol_that_a_release_never_calls_is_a_note(catalog: Catalog) -> None:
    """2.20.2 on cuBLAS 13.1 works: its grouped GEMM asks for the version first."""
    lazy = Wanted(OF_CUBLAS.symbol, OF_CUBLAS.readable, "cuBLAS", lazy=True)
    found = judge(te("2.20.2", extensions=(extension(loaded=True, wanted=(lazy,)),)), rows(catalog))
    assert [one.weight for one in found] == [Weight.NOTE]


def test_a_package_that_the_target_has_no_use_for_breaks_nothing(catalog: Catalog) -> None:
    seen = host(deep_gemm=look("deep_gemm", ended="signal 11"), transformer_engine=PackageLook(TE, installed=False))
    found: tuple[Difference, ...] = judge(seen, rows(catalog, "cpu"))
    assert {one.weight for one in found} <= {Weight.NOTE}
    torn = (extension(not_found=("libfoo.so.1",), wanted=(OF_TORCH,)),)
    seen = deep_gemm(failure=failure("libfoo.so.1: cannot open"), extensions=torn, behaviours=(REFUSED, NOT_ASKED))
    assert Weight.BREAKS in {one.weight for one in judge(seen, rows(catalog))}
    assert {one.weight for one in judge(seen, rows(catalog, "cpu"))} == {Weight.NOTE}


def test_a_target_without_a_gpu_asks_nothing_of_the_driver_nor_of_cuda(catalog: Catalog) -> None:
    seen = with_path(te("2.12.0", runtimes=TWO_RUNTIMES), driver_cuda="12.8", ld_library_path="/usr/local/cuda-12")
    assert Weight.BREAKS in {one.weight for one in judge(seen, rows(catalog))}
    assert judge(seen, rows(catalog, "cpu")) == ()


def test_a_stack_that_is_asked_for_must_be_there(catalog: Catalog) -> None:
    for seen in (host("2.20.2"), host(transformer_engine=PackageLook(TE, installed=False))):
        found = judge(seen, rows(catalog, "cpu", "te2.12.0"))
        assert [(one.weight, one.breaks) for one in found if one.aspect is Aspect.VERSION] == [(Weight.BREAKS, EVERY)]
