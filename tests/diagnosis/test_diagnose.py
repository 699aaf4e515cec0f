"""The class of cause and the component of what was raised, or of the checks that failed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.canary.static.project import Source
from megacpp_validate.diagnosis.checks import USES, entries_in
from megacpp_validate.diagnosis.diagnose import diagnose, find_host_fault, normalise, read_raised, sign
from megacpp_validate.evidence.receipt import Check, Failure, Outcome, Part, Receipt
from megacpp_validate.evidence.values import Cause
from tests.diagnosis.planted import KNOWN, MODULES, cannot_import, dies, fails, falls_back, good, keyword, raises

RAISED: dict[str, tuple[Cause, str]] = {
    "TypeError: DotProductAttention.forward() got an unexpected keyword argument 'mask'": (Cause.API, ""),
    "ImportError: cannot import name 'moe_permute' from 'transformer_engine.pytorch' (/x/__init__.py)": (Cause.API, ""),
    "AttributeError: module 'transformer_engine_torch' has no attribute 'fused_attn_fwd'": (Cause.BINARY, ""),
    "OSError: /x/libtransformer_engine.so: undefined symbol: cudnnBackendX": (Cause.BINARY, "cuDNN"),
    "ImportError: /lib/libc.so.6: version `GLIBC_2.38' not found": (Cause.BINARY, "Linux libraries"),
    "ImportError: dynamic module does not define module export function (PyInit_transformer_engine_torch)":
        (Cause.BINARY, ""),
    "ImportError: Python version mismatch: module was compiled for Python 3.10, but the interpreter is 3.12.3":
        (Cause.BINARY, "Python"),
    "RuntimeError: Found empty `transformer-engine` meta package installed. Install it": (Cause.BINARY, ""),
    "RuntimeError: /TE/common/util/cuda_driver.cpp:57 in function f: CUDA Error: peer access": (Cause.BINARY, ""),
    "RuntimeError: GET was unable to find an engine to execute this computation": (Cause.ENVIRONMENT, "cuDNN"),
    "TritonMissing: Cannot find a working triton installation.": (Cause.ENVIRONMENT, "triton"),
    "RuntimeError: can't start new thread": (Cause.ENVIRONMENT, "host limits"),
    "RuntimeError: DataLoader worker (pid 325) is killed by signal: Bus error. It is possible that its "
    "workers are out of shared memory.":
        (Cause.ENVIRONMENT, "shared memory"),
    "FileNotFoundError: [Errno 2] No such file or directory: '/sbin/ldconfig'": (Cause.ENVIRONMENT, ""),
    "FileNotFoundError: [Errno 2] No such file or directory: '/s/transformer_engine/VERSION.txt'": (Cause.API, ""),
    "AttributeError: '_OpNamespace' 'torchao' object has no attribute 'swizzle_scaled_mm'": (Cause.API, "torchao"),
    "OSError: libcudnn_graph.so.9: cannot open shared object file: No such file": (Cause.ENVIRONMENT, "cuDNN"),
    "OSError: libtransformer_engine.so: cannot open shared object file: No such file": (Cause.BINARY, ""),
    "RuntimeError: Multiple libcudart libraries found: libcudart.so.12 and libcudart.so.13":
        (Cause.ENVIRONMENT, "second CUDA runtime"),
    "RuntimeError: /TE/gemm/cublaslt_gemm.cu:9 in function f: cuBLAS Error: no": (Cause.ENVIRONMENT, "cuBLAS"),
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": (Cause.ENVIRONMENT, "GPU memory"),
    "RuntimeError: CUDA error: no kernel image is available for execution on the device":
        (Cause.BINARY, "GPU architecture"),
    "ModuleNotFoundError: No module named 'flash_attn_interface'": (Cause.ENVIRONMENT, "flash-attn"),
    "ModuleNotFoundError: No module named 'onnxscript'": (Cause.ENVIRONMENT, "onnxscript"),
    "TypeError: flash_attn_func() got an unexpected keyword argument 'softcap'": (Cause.API, "flash-attn"),
    "AttributeError: module 'torch.library' has no attribute 'custom_op'": (Cause.ENVIRONMENT, "torch"),
    "RuntimeError: Assertion error (csrc/utils/layout.hpp:12): dim == 2 or dim == 3": (Cause.BINARY, "DeepGEMM"),
    "RuntimeError: NVRTC Error: NVRTC_ERROR_COMPILATION": (Cause.ENVIRONMENT, "NVRTC"),
    "AssertionError: FP8 grouped GEMM needs CUDA 12.9 or later": (Cause.ENVIRONMENT, "CUDA runtime"),
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered": (Cause.ENVIRONMENT, "GPU hardware"),
    "OSError: [Errno 28] No space left on device": (Cause.ENVIRONMENT, "disk"),
    "PermissionError: [Errno 13] Permission denied: '/root/.triton/cache'": (Cause.ENVIRONMENT, "file permissions"),
    "ImportError: /x/transformer_engine_torch.so: failed to map segment from shared object":
        (Cause.ENVIRONMENT, "file permissions"),
    "RuntimeError: CUDA driver error (csrc/apis/../jit/handle.hpp:141): 200 (CUDA_ERROR_INVALID_IMAGE, "
    "device kernel image is invalid)":
        (Cause.ENVIRONMENT, "DeepGEMM"),
}  # fmt: skip


@pytest.mark.parametrize(("said", "wanted"), RAISED.items(), ids=[said[:60] for said in RAISED])
def test_what_was_raised(said: str, wanted: tuple[Cause, str]) -> None:
    kind, _, text = said.partition(": ")
    found = diagnose(raises("attention", kind, text))
    assert (found.cause, found.component) == wanted


ENDED = {
    "SIGSEGV": Cause.BINARY, "SIGILL": Cause.BINARY, "SIGABRT": Cause.BINARY, "SIGKILL": Cause.ENVIRONMENT,
    "timeout": Cause.PERFORMANCE, "exit status 1": Cause.BINARY, "no-receipt": Cause.ENVIRONMENT,
}  # fmt: skip


@pytest.mark.parametrize(("signal", "cause"), ENDED.items(), ids=ENDED)
def test_how_a_process_ended(signal: str, cause: Cause) -> None:
    assert diagnose(dies("attention", signal, "a.py")).cause is cause


def test_the_frame_tells_where_the_text_does_not() -> None:
    assert diagnose(raises("attention", "RuntimeError", "boom", "deep_gemm/jit.py:3 in build")).component == "DeepGEMM"
    assert diagnose(raises("attention", "ValueError", "no", "flash_attn/a.py:3 in b")).component == "flash-attn"
    refused = raises("permute", "ValueError", "type fp8e4nv not supported", "triton/language/semantic.py:3 in cast")
    assert (diagnose(refused).cause, diagnose(refused).component) == (Cause.ENVIRONMENT, "triton")


def failed(probe: str, name: str, detail: str = "", *parts: str) -> Receipt:
    check = Check(name, False, tuple(Part(part, 1.0, 0.1, False, "") for part in parts), detail)
    return replace(fails(probe), checks=(check,))


CHECKS: dict[str, tuple[Receipt, Cause, str]] = {
    "bounds": (fails("attention", "bf16.gqa4.forward"), Cause.NUMERICS, ""),
    "nan": (failed("permute", "bf16.top2.rows", "", "finite"), Cause.NUMERICS, ""),
    "shape": (failed("permute", "bf16.top2.rows", "shape (1, 2) instead of (2, 1)"), Cause.NUMERICS, ""),
    "amax": (failed("imports", "amax.step1.input.history", "seen 1, wanted 2"), Cause.NUMERICS, ""),
    "backend": (falls_back("attention", "attention.bf16.gqa4"), Cause.SILENT_FALLBACK, ""),
    "layers": (failed("native_block", "bf16.a.layers", "not seen: LayerNormMLP"), Cause.SILENT_FALLBACK, ""),
    "high-precision": (failed("expert_gemm", "fp8.delayed.a.forward.rounded", "error 0.1"), Cause.SILENT_FALLBACK, ""),
    "not-low": (failed("imports", "fp8.delayed.forward.applied", "", "same-values", "low-precision-ran"),
                Cause.SILENT_FALLBACK, ""),
    "another-recipe": (failed("imports", "fp8.block.forward.applied", "", "same-values"), Cause.SILENT_FALLBACK, ""),
    "scope": (failed("imports", "scope.delayed.on", "wanted te, seen Float8CurrentScaling"), Cause.SILENT_FALLBACK, ""),
    "entry": (failed("imports", "accessor.rmsnorm", "no such entry point"), Cause.API, ""),
    "refused": (failed("attention", "refuses.dtype", "nothing was raised; WrongDtype was expected"), Cause.API, ""),
    "raised": (failed("attention", "refuses.dtype", "RuntimeError instead of WrongDtype: cuDNN Error: x"),
               Cause.ENVIRONMENT, "cuDNN"),
    "second-use": (failed("attention", "second-use", "TypeError: f() got an unexpected keyword 'a'"), Cause.API, ""),
    "flash-attn": (fails("attention", "fa3.bf16.gqa4.forward"), Cause.NUMERICS, "flash-attn"),
    "deep-gemm": (fails("expert_gemm", "deep_gemm.all-busy.forward"), Cause.NUMERICS, "DeepGEMM"),
}  # fmt: skip


@pytest.mark.parametrize(("receipt", "cause", "component"), CHECKS.values(), ids=CHECKS)
def test_what_failed(receipt: Receipt, cause: Cause, component: str) -> None:
    assert receipt.outcome is Outcome.FAIL
    found = diagnose(receipt)
    assert (found.cause, found.component) == (cause, component)


NOT_A_NUMBER = {
    "of-a-part": Check("fp8.delayed.forward.applied", False, (Part("low-precision-ran", None, 0.02, False, ""),)),
    "in-words": Check("fp8.delayed.all-busy.forward.rounded", False, detail="relative error nan; half of the recipe's"),
}


@pytest.mark.parametrize("check", NOT_A_NUMBER.values(), ids=NOT_A_NUMBER)
def test_nan_is_wrong_numbers_whatever_was_asked_of_it(check: Check) -> None:
    forward = Check("fp8.delayed.forward", False, (Part("finite", 16.0, 0.0, False, ""),))
    assert diagnose(replace(fails("expert_gemm"), checks=(forward, check))).cause is Cause.NUMERICS


def test_entries_are_those_of_the_bridges_call_sites(bridge_source: Source) -> None:
    texts = {file.shown: file.path.read_text() for file in bridge_source.project.files.values()}
    accessors = set(re.findall(r"@TE\.(?:required_)?entry\ndef (\w+)", texts.pop("imports.py")))
    for module in MODULES:
        files = [text for shown, text in texts.items() if bridge_source.rows[shown] == module]
        used = {name for text in files for name in re.findall(r"\bte\.(\w+)", text)} & accessors
        padding = {"fp8_padding", "fp8_unpadding"} if module == "expert_gemm" else set()  # through bridge/permute.py
        assert set(USES[module]) == used | padding, module


@pytest.mark.parametrize("module", MODULES)
def test_a_text_that_names_a_class_of_te_tells_the_entry_point(module: str) -> None:
    name = KNOWN[module][0]
    assert entries_in(f"{name}.__init__() got an unexpected keyword argument 'a'", USES[module])


# --- faults of the host

FULL = (
    "CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 139.80 GiB of which {free} is free. "
    "Process 20398 has {other} memory in use. Including non-PyTorch memory, this process has {own} memory in use. Of "
    "the allocated memory {own} is allocated by PyTorch, and 36.73 MiB is reserved by PyTorch but unallocated."
)
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2913"
# As training/parallel/launch.py tells of two ranks of gloo, one of which was made to raise, or to end by a signal.
RANKS = (
    "a rank died, and the others were ended. At fault: rank 1.\n"
    f"rank 0 ended by exit status 1; last collective: all_reduce; {LOST}\n"
    "rank 1 ended by {how}; last collective: none; {said}\n"
    "rank 1 said last (rank1.log): Traceback\n{said}"
)
OF_THE_HOST = {
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered": "cannot be corrected",  # vllm 5222
    "RuntimeError: NVRM: Xid (PCI:0000:3b:00): 48, Double Bit ECC Error": "GPU failed",
    "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable": "another process",
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized": "fabric manager",
    "torch.AcceleratorError: CUDA error: the remote procedural call between the MPS server and the MPS client failed\n"
    "Search for `cudaErrorMpsRpcFailure'": "MPS",
    "exit status 1: slurmstepd: error: unable to add pids to '/sys/fs/cgroup/slurm' | Slurmd could not execve job":
        "batch system",
    "DistBackendError: NCCL error in: x, unhandled system error\nNET/IB : mlx5_3:1 Got async event : port error":
        "network adapter",
    "OSError: [Errno 5] Input/output error: '/lustre/env/transformer_engine/pytorch/rope.py'": "file system failed",
    "OSError: [Errno 107] Transport endpoint is not connected: '/gpfs/env/torch'": "file system failed",
    "ImportError: /nfs/a/transformer_engine_torch.so: cannot open shared object file: Stale file handle":
        "file system failed",
    "SIGKILL: nothing": "ended from outside",
    "exit status 1: slurmstepd: error: *** STEP 494583.0 ON node07 CANCELLED AT 2026-11-20T09:09:37 DUE TO TIME LIMIT":
        "batch system",
    f"torch.OutOfMemoryError: {FULL.format(wanted='226.00 MiB', free='41.38 MiB', other='138.5 GiB', own='1.21 GiB')}":
        "other processes have",
    "smoke: " + RANKS.format(how="SIGKILL", said="nothing"): "a rank was ended from outside, by SIGKILL",
    "smoke: " + RANKS.format(how="exit status 1", said="CUDA error: uncorrectable ECC error encountered"): "corrected",
}  # fmt: skip
OF_THE_MODULE = (
    "RuntimeError: loss nan on rank 1; CUDA error: uncorrectable ECC error encountered",
    # Who lost a rank, or waited for it, does not know what made it go.
    LOST,
    "SIGABRT: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580)",
    "smoke: " + RANKS.format(how="exit status 1", said="RuntimeError: the split does not fit"),
    "smoke: " + RANKS.replace("rank 1.", "not to be told from the records.").format(how="SIGKILL", said="nothing"),
    # In a container its own process has a number: what it holds beside torch's allocator nobody can tell.
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.20 GiB "
    "of which 0.50 GiB is free. Process 9 has 78.70 GiB memory in use. Of the allocated memory 20.00 GiB is allocated "
    "by PyTorch, and 58.00 GiB is reserved by PyTorch but unallocated.",
    "RuntimeError: NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, Ch 00000008, MMU Fault",
    "OSError: [Errno 28] No space left on device",
    # A connection is another process; a text without the system's number and a file may be anybody's.
    "OSError: [Errno 107] Transport endpoint is not connected", "TimeoutError: [Errno 110] Connection timed out",
    "ConnectionError: Stale file handle: 'x'",
    "RuntimeError: cache: Input/output error", "OSError: [Errno 2] No such file or directory: '/c/kernel.cubin'",
    "OSError: [Errno 16] Device or resource busy: '/dev/nvidia0'",
    "RuntimeError: Failed to initialize NVML: Driver/library version mismatch",
    "DistBackendError: NCCL error in: x\nNET/IB: Got completion from peer 1<2> with status=IBV_WC_RETRY_EXC_ERR(12)",
    "SIGSEGV: nothing", "SIGABRT: terminate called", "exit status 1: nothing", "exit status 139: nothing",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    # It has most of the card itself; and it would not fit if it were alone.
    f"torch.OutOfMemoryError: {FULL.format(wanted='96.00 GiB', free='12.40 GiB', other='0.1 GiB', own='127.38 GiB')}",
    f"torch.OutOfMemoryError: {FULL.format(wanted='130.0 GiB', free='70.00 GiB', other='50.0 GiB', own='19.80 GiB')}",
)  # fmt: skip


def of_host(said: str, outcome: Outcome = Outcome.ERROR, checks: tuple[Check, ...] = ()) -> Receipt:
    kind, _, text = said.partition(": ")
    made = Receipt("te1-h200-permute", "te1", "h200", "permute", outcome, said, "te", checks=checks)
    return made if outcome is Outcome.FAIL else Receipt(**(vars(made) | {"failure": Failure(kind, text)}))


@pytest.mark.parametrize(("said", "wanted"), OF_THE_HOST.items(), ids=[said[:50] for said in OF_THE_HOST])
def test_a_fault_of_the_host_is_reported(said: str, wanted: str) -> None:
    assert wanted in find_host_fault(of_host(said))


@pytest.mark.parametrize("said", OF_THE_MODULE, ids=[said[:50] for said in OF_THE_MODULE])
def test_what_a_module_or_a_library_may_be_to_blame_for_is_none(said: str) -> None:
    assert find_host_fault(of_host(said)) == ""


def test_of_checks_every_failed_one_must_be_of_the_host() -> None:
    ecc = Check("speed.ran", False, detail="AcceleratorError: CUDA error: uncorrectable ECC error encountered")
    wrong, right = Check("bf16.forward", False), Check("bf16.forward", True)
    assert find_host_fault(of_host("1 check failed", Outcome.FAIL, (right, ecc)))
    assert not find_host_fault(of_host("2 checks failed", Outcome.FAIL, (wrong, ecc)))
    assert not find_host_fault(of_host("SIGKILL: nothing", checks=(wrong,)))


@pytest.mark.parametrize("outcome", [Outcome.PASS, Outcome.NOT_RUN, Outcome.BLOCKED, Outcome.TIMEOUT])
def test_what_is_not_red_by_itself_met_nothing(outcome: Outcome) -> None:
    assert find_host_fault(of_host("SIGKILL: nothing", outcome)) == ""


# --- signatures

ONE = {
    "numbers": ("index 2 of dimension 0 with size 2", "index 7 of dimension 1 with size 3"),
    "shapes": ("shape torch.Size([80, 48]) and [2, 3]", "shape torch.Size([160, 48]) and [2, 3, 4]"),
    "addresses": ("<A object at 0x7f01>", "<A object at 0x9bcd>"),
    "paths": ("/tmp/a/te-2.1.0/lib.so: file too short", "/opt/b/lib.so: file too short"),
    "lines": ("/TE/common/a.cu:934 in function f: b", "/TE/other/common/a.cu:12 in function f: b"),
    "sonames": ("libcublasLt.so.13: x", "libcublasLt.so.12: x"),
    "versions": ("needs 2.11.0+cu130", "needs 2.13.1"),
    "floats": ("off by 1.5e-3", "off by 0.25"),
    "cells": ("blocked by te2.14.1-h200-imports", "blocked by te2.17.1+x-b200-attention"),
    "boilerplate": (
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported at "
        "some other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing "
        "CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n",
        "CUDA error: an illegal memory access was encountered",
    ),
}  # fmt: skip
TWO = {
    "symbols": ("undefined symbol: cublasLtA", "undefined symbol: cublasLtB"),
    "keywords": ("f() got an unexpected keyword argument 'a'", "f() got an unexpected keyword argument 'b'"),
    "kernels": ("a.cu:1 in function f: x", "b.cu:1 in function f: x"),
    "types": ("expected e4m3", "expected e5m2"),
    "architectures": ("built for sm_90", "built for sm_100"),
    "libraries": ("/a/libcudnn.so.9: x", "/a/libnccl.so.2: x"),
}


@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_normalising_removes_what_differs_between_runs_and_keeps_what_identifies(name: str) -> None:
    one, other = (ONE | TWO)[name]
    assert (normalise(one) == normalise(other)) is (name in ONE)


@given(st.one_of(st.text(max_size=60), st.text(alphabet="a/.:0x[1, ](s)oN", max_size=60)))
@settings(max_examples=200, deadline=None)
def test_normalising_again_changes_nothing(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


def test_one_failure_in_two_modules_has_one_signature() -> None:
    one, other = (raises(module, *keyword("native_block")) for module in ("native_block", "layer_spec"))
    assert one.failure != other.failure
    assert sign(one) == sign(other)
    assert sign(one) != sign(raises("native_block", *keyword("attention")))


def test_the_frame_of_vendor_code_counts_and_torchs_does_not() -> None:
    def signed(frame: str) -> str:
        return str(sign(raises("attention", "RuntimeError", "x", frame)))

    assert signed("transformer_engine/a.py:3 in f") == signed("/tmp/te-9/transformer_engine/a.py:77 in f")
    assert signed("transformer_engine/a.py:3 in f") != signed("transformer_engine/b.py:3 in f")
    assert signed("torch/nn/modules/module.py:1 in _call_impl") == signed("megacpp_validate/bridge/a.py:1 in forward")


def test_a_death_is_its_signal_and_frame() -> None:
    assert str(sign(dies("attention", "SIGSEGV", "a.py"))) == "SIGSEGV in transformer_engine/a.py in run"
    assert sign(dies("attention", "SIGSEGV", "a.py")) == sign(dies("native_block", "SIGSEGV", "a.py"))  # other words
    assert sign(dies("attention", "SIGSEGV", "a.py")) != sign(dies("attention", "SIGABRT", "a.py"))
    assert sign(dies("attention", "timeout", "a.py")) != sign(dies("attention", "SIGABRT", "a.py"))
    inner, outer = (f'  File "/x/transformer_engine/{name}.py", line 1 in {name}\n' for name in ("inner", "outer"))
    dump = Failure("SIGSEGV", "", "", f"Current thread 0x1 (most recent call first):\n{inner}{outer}")
    assert (
        read_raised(replace(dies("attention", "SIGSEGV"), failure=dump)).frame == "transformer_engine/inner.py in inner"
    )


def test_checks_are_signed_by_kind_and_not_by_count() -> None:
    assert sign(fails("attention", "bf16.a.forward")) == sign(fails("attention", "bf16.b.forward", "bf16.c.d.forward"))
    assert sign(good("attention")) is None


def chained(between: str, first: str, last: str) -> Receipt:
    vendor = '  File "/x/transformer_engine/a.py", line 1, in f\n    g()\n'
    trace = f"Traceback (most recent call last):\n{vendor}{first}\n\n{between}\n\nTraceback (most recent call last):\n"
    kind, _, text = last.partition(": ")
    made = raises("attention", kind, text)
    return replace(
        made, failure=Failure(kind, text, "torch/a.py:1 in b", f'{trace}  File "/y.py", line 2, in h\n{last}\n')
    )


CAUSE = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"


@pytest.mark.parametrize(("receipt", "wanted"), [
    (chained(CAUSE, "cudnn.Error: CUDNN_STATUS_A", "RuntimeError: wrapped"), ("Error", "CUDNN_STATUS_A")),
    (chained(DURING, "RuntimeError: CUDA error: illegal", "KeyError: 'a'"), ("RuntimeError", "CUDA error: illegal")),
    (chained(DURING, "KeyError: 'tried first'", "TypeError: then"), ("TypeError", "then")),
])  # fmt: skip
def test_the_first_cause_of_a_chain(receipt: Receipt, wanted: tuple[str, str]) -> None:
    raised = read_raised(receipt)
    assert (raised.kind, raised.text) == wanted


def test_a_blocked_cell_has_the_signature_of_what_blocks_it() -> None:
    source = cannot_import()
    reason = f"blocked by te2-h200-imports: {source.reason}"
    by_reason = replace(source, outcome=Outcome.BLOCKED, failure=None, reason=reason)
    assert sign(by_reason) == sign(source)


def test_an_import_that_ends_the_interpreter_is_a_death() -> None:
    reason = (
        "importing transformer_engine.pytorch ends the interpreter (signal 11) in /a/transformer_engine/b.py:3 (load)."
    )
    raised = read_raised(replace(cannot_import(), failure=None, reason=reason))
    assert (raised.kind, raised.frame, raised.died) == ("signal 11", "transformer_engine/b.py in load", True)
