"""The judgement of the doctor: nothing is said of a clean host, and each fault by itself is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.environments.doctor_rules import TE, Aspect, Weight
from megacpp_validate.evidence.doctor_look import Behaviour, Headers, PackageLook, Record, Wanted
from tests.environments.doctor_hosts import (
    SITE,
    TWO_RUNTIMES,
    Seen,
    extension,
    failure,
    host,
    judge,
    look,
    with_distributions,
    with_path,
)

SILENT = look(TE, "2.20.2", libraries=())
TWO_CUDNNS = {"libcudnn": (f"{SITE}/libcudnn.so.9",), "libcudnn_graph": ("/usr/lib/libcudnn_graph.so.9",)}
EVERY = ("imports", "attention", "linear_walker", "permute", "expert_gemm", "native_block", "layer_spec")
EXPERTS = ("expert_gemm",)
ATTENTION = ("attention", "native_block")
OF_TORCH = Wanted("_ZN3c1010ValueErrorC1E", "c10::ValueError::ValueError()", lazy=True)
OF_CUBLAS = Wanted("cublasLtGroupedMatrixLayoutInit_internal", "cublasLtGroupedMatrixLayoutInit", lazy=False)
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
    assert judge(catalog, host()) == ()


# What is planted; the weight and aspect, the modules that break, and a word of the next step.
# The replay (tests/replay/data/hosts.json) holds these and more; here one of each rule.
FAULTS: dict[str, tuple[Callable[[], Seen], str, tuple[str, ...], str]] = {
    "no TE": (lambda: host(transformer_engine=PackageLook(TE, installed=False)), "breaks missing", EVERY, "install"),
    "import aborts": (lambda: deep_gemm(ended="signal 6"), "breaks import", EXPERTS, "again"),
    "cuBLAS too old": (lambda: te("2.14.1"), "breaks library", EVERY, "nvidia-cublas>=13.2"),
    "two runtimes, TE that throws": (
        lambda: te("2.12.0", runtimes=TWO_RUNTIMES), "breaks CUDA runtime", ATTENTION, "LD_LIBRARY_PATH",
    ),
    "two cuDNNs": (
        lambda: te("2.20.2", mapped=TWO_CUDNNS),
        "risk second copy", ATTENTION, "CUDNN_HOME",
    ),
    "old driver": (lambda: with_path(host(), driver_cuda="12.8"), "breaks driver", EVERY, "driver"),
    "reads tensors wrongly": (
        lambda: deep_gemm(behaviours=(REFUSED,)), "breaks torch ABI", EXPERTS, "sgl-deep-gemm==0.1.3",
    ),
    "built for another torch": (
        lambda: deep_gemm(extensions=(extension(loaded=True, headers=OTHER_TORCH),)),
        "breaks torch ABI", EXPERTS, "sgl-deep-gemm==0.1.3",
    ),
    "symbol of another torch, at import": (
        lambda: deep_gemm(failure=failure("undefined symbol"), extensions=(extension(wanted=(OF_TORCH,)),)),
        "breaks torch ABI", EXPERTS, "built",
    ),
    "library not found": (
        lambda: deep_gemm(failure=failure("cannot open"), extensions=(extension(not_found=("libtvm_ffi.so",)),)),
        "breaks library", EXPERTS, "libtvm_ffi.so",
    ),
    "another Python": (
        lambda: deep_gemm(extensions=(extension("_C.cpython-311-x86_64.so", tag="cpython-311-x86_64"),)),
        "breaks Python ABI", EXPERTS, "pip",
    ),
    "another release unpacked over it": (
        lambda: te("2.18.0", record=Record(200, changed=("a.py",) * 47, gone=("b.py",) * 2)),
        "unknown metadata", EVERY, "again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_reported_with_what_it_breaks(name: str, catalog: Catalog) -> None:
    make, kind, breaks, step = FAULTS[name]
    found = [(f"{one.weight} {one.aspect}", one.breaks, one.next_step) for one in judge(catalog, make())]
    assert any(one[:2] == (kind, breaks) and step in one[2] for one in found), found


def test_a_known_need_stands_for_its_missing_symbol(catalog: Catalog) -> None:
    """2.14.1 as it was seen: the symbol and the cuBLAS that lacks it are one finding, the import error another."""
    core = extension("libtransformer_engine.so", wanted=(OF_CUBLAS,))
    seen = te("2.14.1", failure=failure("undefined symbol: cublasLtGrouped..."), extensions=(core,))
    breaking = [one for one in judge(catalog, seen) if one.weight is Weight.BREAKS]
    assert [one.aspect for one in breaking] == [Aspect.IMPORT, Aspect.LIBRARY]
    assert "cuBLAS 13.1.0" in breaking[1].seen


def test_a_symbol_that_a_release_never_calls_is_a_note(catalog: Catalog) -> None:
    """2.20.2 on cuBLAS 13.1 works: its grouped GEMM asks for the version first."""
    lazy = Wanted(OF_CUBLAS.symbol, OF_CUBLAS.readable, lazy=True)
    found = judge(catalog, te("2.20.2", extensions=(extension(loaded=True, wanted=(lazy,)),)))
    assert [one.weight for one in found] == [Weight.NOTE]


def test_a_package_that_the_target_has_no_use_for_breaks_nothing(catalog: Catalog) -> None:
    seen = host(deep_gemm=look("deep_gemm", ended="signal 11"), transformer_engine=PackageLook(TE, installed=False))
    found = judge(catalog, seen, "cpu")
    assert {one.weight for one in found} <= {Weight.NOTE}
    torn = (extension(not_found=("libfoo.so.1",), wanted=(OF_TORCH,)),)
    seen = deep_gemm(failure=failure("libfoo.so.1: cannot open"), extensions=torn, behaviours=(REFUSED, NOT_ASKED))
    assert Weight.BREAKS in {one.weight for one in judge(catalog, seen)}
    assert {one.weight for one in judge(catalog, seen, "cpu")} == {Weight.NOTE}


def test_a_stack_that_is_asked_for_must_be_there(catalog: Catalog) -> None:
    for seen in (host("2.20.2"), host(transformer_engine=PackageLook(TE, installed=False))):
        found = judge(catalog, seen, "cpu", "te2.12.0")
        assert [(one.weight, one.breaks) for one in found if one.aspect is Aspect.VERSION] == [(Weight.BREAKS, EVERY)]


@pytest.mark.parametrize(("half", "torch_cuda", "told"), [("cu12", "12.8", 0), ("cu13", "13.0", 1), ("", "12.8", 0)])
def test_the_core_library_for_cuda_12_has_no_grouped_layout(
    catalog: Catalog, half: str, torch_cuda: str, told: int
) -> None:
    seen = with_path(host("2.14.1", transformer_engine=look(TE, "2.14.1")), torch_cuda=torch_cuda)
    if half:
        seen = with_distributions(seen, (f"transformer-engine-{half}", "2.14.1", SITE))
    found = [one for one in judge(catalog, seen) if one.aspect is Aspect.LIBRARY and "cuBLAS" in one.wanted]
    assert len(found) == told
