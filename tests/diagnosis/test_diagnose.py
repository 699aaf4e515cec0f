"""The class of cause and the component of what was raised, or of the checks that failed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp_validate.canary.static.surface import Surface
from megacpp_validate.diagnosis.checks import USES, entries_in
from megacpp_validate.diagnosis.diagnose import diagnose
from megacpp_validate.diagnosis.rows import COMPONENTS
from megacpp_validate.evidence.receipt import Check, Outcome, Part, Receipt
from megacpp_validate.evidence.values import Cause
from tests.diagnosis.planted import KNOWN, MODULES, dies, fails, falls_back, raises

RAISED: dict[str, tuple[Cause, str]] = {
    "TypeError: DotProductAttention.forward() got an unexpected keyword argument 'mask'": (Cause.API, ""),
    "TypeError: LayerNormMLP.__init__() missing 1 required positional argument: 'ffn'": (Cause.API, ""),
    "AttributeError: module 'transformer_engine.pytorch' has no attribute 'Linear'": (Cause.API, ""),
    "AttributeError: 'Linear' object has no attribute 'fp8_meta'": (Cause.API, ""),
    "ImportError: cannot import name 'moe_permute' from 'transformer_engine.pytorch' (/x/__init__.py)": (Cause.API, ""),
    "VendorEntryMissing: Transformer Engine is there, but its entry point `rmsnorm` is not": (Cause.API, ""),
    "KeyError: 'scaling_fwd'": (Cause.API, ""),
    "AssertionError: only padding masks": (Cause.API, ""),
    "AttributeError: module 'transformer_engine_torch' has no attribute 'fused_attn_fwd'": (Cause.BINARY, ""),
    "OSError: /x/libtransformer_engine.so: undefined symbol: cublasLtGroupedX, version libcublasLt.so.13":
        (Cause.BINARY, "cuBLAS"),
    "OSError: /x/libtransformer_engine.so: undefined symbol: cudnnBackendX": (Cause.BINARY, "cuDNN"),
    "ImportError: /x/transformer_engine_torch.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE":
        (Cause.BINARY, "torch ABI"),
    "ImportError: /x/deep_gemm_cpp.so: undefined symbol: _ZNK3c106SymInt19guard_int": (Cause.BINARY, "torch ABI"),
    "ImportError: /x/a.so: undefined symbol: _ZN2at4_ops5emptyE": (Cause.BINARY, "torch ABI"),
    "ImportError: /x/transformer_engine_torch.so: undefined symbol: nvte_fused_attn_fwd": (Cause.BINARY, ""),
    "ImportError: /x/a.so: undefined symbol: ncclCommWindowRegister": (Cause.BINARY, "NCCL"),
    "ImportError: /x/a.so: undefined symbol: cudaGetDriverEntryPointByVersion": (Cause.BINARY, "CUDA runtime"),
    "ImportError: /x/a.so: undefined symbol: cuTensorMapEncodeTiled": (Cause.BINARY, "driver"),
    "ImportError: /x/a.so: undefined symbol: PyObject_X": (Cause.BINARY, "Python"),
    "ImportError: /lib/libc.so.6: version `GLIBC_2.38' not found": (Cause.BINARY, "Linux libraries"),
    "ImportError: /x/libcusparse.so.12: undefined symbol: __nvJitLinkGetErrorLogSize_12_9, version libnvJitLink.so.12":
        (Cause.BINARY, "nvJitLink"),
    "OSError: /x/libtransformer_engine.so: wrong ELF class: ELFCLASS32": (Cause.BINARY, ""),
    "ImportError: /lib/libgomp.so.1: cannot allocate memory in static TLS block": (Cause.BINARY, ""),
    "ImportError: /x/a.so: ELF load command address/offset not properly aligned": (Cause.BINARY, ""),
    "ImportError: dynamic module does not define module export function (PyInit_transformer_engine_torch)":
        (Cause.BINARY, ""),
    'ImportError: generic_type: type "DType" is already registered!': (Cause.BINARY, ""),
    "ImportError: Python version mismatch: module was compiled for Python 3.10, but the interpreter is 3.12.3":
        (Cause.BINARY, "Python"),
    "ValueError: numpy.dtype size changed, may indicate binary incompatibility.": (Cause.BINARY, "numpy"),
    "RuntimeError: Found empty `transformer-engine` meta package installed. Install it": (Cause.BINARY, ""),
    "RuntimeError: /TE/common/util/cuda_driver.cpp:57 in function f: CUDA Error: peer access": (Cause.BINARY, ""),
    "torch.cuda.DeferredCudaCallError: CUDA call failed lazily at initialization with error: device < num_gpus":
        (Cause.ENVIRONMENT, "driver"),
    "exit status 125: nvidia-container-cli: initialization error: nvml error: driver/library version mismatch: unknown":
        (Cause.ENVIRONMENT, "driver"),
    "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp": (Cause.ENVIRONMENT, "driver"),
    "RuntimeError: GET was unable to find an engine to execute this computation": (Cause.ENVIRONMENT, "cuDNN"),
    "TritonMissing: Cannot find a working triton installation.": (Cause.ENVIRONMENT, "triton"),
    "AssertionError: Torch not compiled with CUDA enabled": (Cause.ENVIRONMENT, "torch"),
    "RuntimeError: can't start new thread": (Cause.ENVIRONMENT, "host limits"),
    "BlockingIOError: [Errno 11] Resource temporarily unavailable": (Cause.ENVIRONMENT, "host limits"),
    "RuntimeError: DataLoader worker (pid 325) is killed by signal: Bus error. It is possible that its workers "
    "are out of shared memory.": (Cause.ENVIRONMENT, "shared memory"),
    "DistBackendError: NCCL error in: x\nError while creating shared memory segment /dev/shm/nccl-x: No space left":
        (Cause.ENVIRONMENT, "shared memory"),
    "OutOfResources: out of resource: shared memory, Required: 294912, Hardware limit: 232448":
        (Cause.ENVIRONMENT, "triton"),
    "InductorError: CppCompileError: C++ compile error\n/bin/sh: 1: g++: not found": (Cause.ENVIRONMENT, "compiler"),
    "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.":
        (Cause.ENVIRONMENT, "compiler"),
    "FileNotFoundError: [Errno 2] No such file or directory: '/sbin/ldconfig'": (Cause.ENVIRONMENT, ""),
    "FileNotFoundError: [Errno 2] No such file or directory: '/s/transformer_engine/VERSION.txt'": (Cause.API, ""),
    "AssertionError: FlashAttention maximum version 2.5.8 is supported.": (Cause.ENVIRONMENT, "flash-attn"),
    "AttributeError: '_OpNamespace' 'torchao' object has no attribute 'swizzle_scaled_mm'": (Cause.API, "torchao"),
    "OSError: libcudnn_graph.so.9: cannot open shared object file: No such file": (Cause.ENVIRONMENT, "cuDNN"),
    "ImportError: libcuda.so.1: cannot open shared object file": (Cause.ENVIRONMENT, "driver"),
    "ImportError: libcudart.so.12: cannot open shared object file": (Cause.ENVIRONMENT, "CUDA runtime"),
    "ImportError: libc10.so: cannot open shared object file": (Cause.ENVIRONMENT, "torch ABI"),
    "RuntimeError: Multiple libcudart libraries found: libcudart.so.12 and libcudart.so.13":
        (Cause.ENVIRONMENT, "second CUDA runtime"),
    "RuntimeError: /TE/fused_attn/a.cu:9 in function f: cuDNN Error: No valid plans, CUDNN_STATUS_NOT_SUPPORTED":
        (Cause.ENVIRONMENT, "cuDNN"),
    "RuntimeError: /TE/gemm/cublaslt_gemm.cu:9 in function f: cuBLAS Error: no": (Cause.ENVIRONMENT, "cuBLAS"),
    "RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasX`": (Cause.ENVIRONMENT, "cuBLAS"),
    "torch.distributed.DistBackendError: NCCL error in: x, unhandled system error": (Cause.ENVIRONMENT, "NCCL"),
    "RuntimeError: CUDA driver version is insufficient for CUDA runtime version": (Cause.ENVIRONMENT, "driver"),
    "RuntimeError: the provided PTX was compiled with an unsupported toolchain.": (Cause.ENVIRONMENT, "driver"),
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": (Cause.ENVIRONMENT, "GPU memory"),
    "RuntimeError: CUDA error: no kernel image is available for execution on the device":
        (Cause.BINARY, "GPU architecture"),
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered": (Cause.BINARY, ""),
    "ModuleNotFoundError: No module named 'cutlass'": (Cause.ENVIRONMENT, "CuTe DSL"),
    "ModuleNotFoundError: No module named 'flash_attn_interface'": (Cause.ENVIRONMENT, "flash-attn"),
    "ModuleNotFoundError: No module named 'onnxscript'": (Cause.ENVIRONMENT, "onnxscript"),
    "ModuleNotFoundError: No module named 'transformer_engine.pytorch.fp8'": (Cause.API, ""),
    "TypeError: flash_attn_func() got an unexpected keyword argument 'softcap'": (Cause.API, "flash-attn"),
    "AttributeError: module 'torch.library' has no attribute 'custom_op'": (Cause.ENVIRONMENT, "torch"),
    "AttributeError: module 'triton.language' has no attribute 'make_tensor_descriptor'": (Cause.ENVIRONMENT, "triton"),
    "triton.compiler.errors.CompilationError: at 12:4": (Cause.ENVIRONMENT, "triton"),
    "RuntimeError: Triton Error [CUDA]: device kernel image is invalid": (Cause.ENVIRONMENT, "triton"),
    "RuntimeError: Assertion error (csrc/utils/layout.hpp:12): dim == 2 or dim == 3": (Cause.BINARY, "DeepGEMM"),
    "RuntimeError: /TE/common/a.cu:3 in function f: Assertion failed: rows % 16 == 0": (Cause.API, ""),
    "RuntimeError: NVRTC Error: NVRTC_ERROR_COMPILATION": (Cause.ENVIRONMENT, "NVRTC"),
    # A release that looks at a version: seen with a planted minimum on an H200, 2026-11-21, and in TE's sources.
    "RuntimeError: Transformer Engine requires cuDNN 9.99.0 or later, but the cuDNN runtime is 9.14.0.": (
        Cause.ENVIRONMENT, "cuDNN"),
    "AssertionError: FP8 grouped GEMM needs CUDA 12.9 or later": (Cause.ENVIRONMENT, "CUDA runtime"),
    "ImportError: Transformer Engine requires flash-attn >= 2.1.1": (Cause.ENVIRONMENT, "flash-attn"),
    "RuntimeError: requires PyTorch 2.12 or newer": (Cause.ENVIRONMENT, "torch"),
    # As torch, cuDNN, Triton and TE write them.
    "torch.AcceleratorError: CUDA error: out of memory": (Cause.ENVIRONMENT, "GPU memory"),
    "RuntimeError: Triton Error [CUDA]: out of memory": (Cause.ENVIRONMENT, "GPU memory"),
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered": (Cause.ENVIRONMENT, "GPU hardware"),
    "RuntimeError: CUDA error: device-side assert triggered": (Cause.BINARY, ""),
    "RuntimeError: /TE/common/transpose/cast.cu:50 in function f: CUDA Error: invalid argument": (Cause.BINARY, ""),
    "RuntimeError: No CUDA GPUs are available": (Cause.ENVIRONMENT, "driver"),
    "RuntimeError: Error 803: system has unsupported display driver / cuda driver combination":
        (Cause.ENVIRONMENT, "driver"),
    "cudnn._compiled_module.cudnnGraphNotSupportedError: No valid engine configs for Matmul":
        (Cause.ENVIRONMENT, "cuDNN"),
    "RuntimeError: cuDNN version mismatch: compiled against 9.20.0 but found runtime version 9.14.0":
        (Cause.ENVIRONMENT, "cuDNN"),
    "RuntimeError: Invalid handle. Cannot load symbol cudnnCreate": (Cause.BINARY, "cuDNN"),
    "RuntimeError: libcudnn_engines_precompiled.so.9: undefined symbol: _ZN5cudnn7backend4Node":
        (Cause.BINARY, "cuDNN"),
    "RuntimeError: /TE/gemm/cublaslt_gemm.cu:7 in function g: Unable to find any suitable algorithms":
        (Cause.ENVIRONMENT, "cuBLAS"),
    "RuntimeError: PassManager::run failed": (Cause.ENVIRONMENT, "triton"),
    "RuntimeError: 0 active drivers ([]). There should only be one.": (Cause.ENVIRONMENT, "triton"),
    "RuntimeError: Failed to find C compiler. Please specify via CC": (Cause.ENVIRONMENT, "compiler"),
    "subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/x/main.c']' returned non-zero exit status 1.":
        (Cause.ENVIRONMENT, "compiler"),
    "OSError: [Errno 28] No space left on device": (Cause.ENVIRONMENT, "disk"),
    "PermissionError: [Errno 13] Permission denied: '/root/.triton/cache'": (
        Cause.ENVIRONMENT, "file permissions",
    ),
    "MemoryError: ": (Cause.ENVIRONMENT, "host memory"),
    "RuntimeError: FlashAttention only supports Ampere GPUs or newer.": (Cause.ENVIRONMENT, "flash-attn"),
    "OSError: /x/libtransformer_engine.so: cannot open shared object file: No such file": (Cause.BINARY, ""),
    "AssertionError: TransformerEngine package version mismatch. Found transformer_engine v2.20.2":
        (Cause.BINARY, ""),
    # As written in issues of those who met them.
    "ImportError: /x/transformer_engine_torch.so: failed to map segment from shared object": (
        Cause.ENVIRONMENT, "file permissions"),
    "OSError: /x/libtransformer_engine.so: undefined symbol: _ZNKSt10filesystem4path12has_filenameEv":  # TE 611
        (Cause.BINARY, "Linux libraries"),
    "ImportError: /x/a.so: undefined symbol: _ZNSt6vectorIN2at6TensorESaIS1_EE": (Cause.BINARY, "torch ABI"),
    "RuntimeError: CUDA driver error (csrc/apis/../jit/handle.hpp:141): 200 (CUDA_ERROR_INVALID_IMAGE, device kernel "
    "image is invalid)": (Cause.ENVIRONMENT, "DeepGEMM"),  # DeepGEMM 359
    "RuntimeError: CUDA driver error (csrc/apis/../jit_kernels/impls/runtime_utils.hpp:143): 1 "
    "(CUDA_ERROR_INVALID_VALUE, invalid argument)": (Cause.ENVIRONMENT, "DeepGEMM"),
    "RuntimeError: CUDA driver error (csrc/apis/../jit/handle.hpp:9): 803 (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, no)":
        (Cause.ENVIRONMENT, "driver"),
    "RuntimeError: CUDA driver error: invalid argument": (Cause.BINARY, ""),  # triton 7967: the driver only says so
    "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing":
        (Cause.ENVIRONMENT, "driver"),  # pytorch 49327
    "RuntimeError: The detected CUDA version (12.8) mismatches the version that was used to compile PyTorch (13.0).":
        (Cause.ENVIRONMENT, "CUDA runtime"),
    "ImportError: /x/transformer_engine_torch.cpython-312-x86_64-linux-gnu.so: cannot open shared object file: No such "
    "file": (Cause.BINARY, ""),
    "torch._inductor.exc.InductorError: CalledProcessError: Command '['/usr/bin/x86_64-linux-gnu-gcc-12', '/tmp/a.c']' "
    "returned non-zero exit status 1.": (Cause.ENVIRONMENT, "compiler"),  # ComfyUI-WanVideoWrapper 1168
    "ValueError: FP8 execution requires 2D input matrices with height divisible by 8": (Cause.API, ""),
    "AssertionError: requires a torch.Tensor of 2 dimensions": (Cause.API, ""),
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


def test_every_component_says_where_its_patterns_come_from() -> None:
    assert all(row.seen and (row.symbols or row.says or row.frames) for row in COMPONENTS)
    assert len({row.name for row in COMPONENTS}) == len(COMPONENTS)


def test_entries_are_those_of_the_bridges_call_sites(surface: Surface) -> None:
    for module in MODULES:
        derived = {use.accessor for use in surface.uses if use.module == module}
        padding = {"fp8_padding", "fp8_unpadding"} if module == "expert_gemm" else set()  # through bridge/permute.py
        assert set(USES[module]) == derived | padding, module


@pytest.mark.parametrize("module", MODULES)
def test_a_text_that_names_a_class_of_te_tells_the_entry_point(module: str) -> None:
    name = KNOWN[module][0]
    assert entries_in(f"{name}.__init__() got an unexpected keyword argument 'a'", USES[module])


def test_a_check_that_tells_why_a_package_cannot_be_used_has_the_class_of_that() -> None:
    """FlashAttention 3 built for another CUDA, as in Dao-AILab/flash-attention/issues/631."""
    said = "FlashAttention 3 cannot be used: ImportError: libcudart.so.12: cannot open shared object file: No such file"
    red = replace(fails("attention", "x"), checks=(Check("fa3.present", False, detail=said),))
    assert (diagnose(red).cause, diagnose(red).component) == (Cause.ENVIRONMENT, "CUDA runtime")
