"""What lies below Transformer Engine and can be at fault instead of it: data, and where each pattern was seen.

Three kinds of evidence, told apart because a word in a text is weaker than the owner of a symbol: the name of a symbol
or library that the loader misses, what an exception says of itself, and the frame it comes from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# No component: the core library of Transformer Engine itself, of another build than what asks it.
OWN: Final = ""


@dataclass(frozen=True)
class Component:
    """One component.

    Attributes:
        name: as people call it.
        symbols: pattern of a symbol, soname or Python package that is its own; matched from the start.
        says: pattern of what an exception of it says.
        frames: pattern of its frames, "package/file.py in function"; matched from the start.
        loaded: names in a receipt's packages and libraries.
        package: distribution that brings it, "{cuda}" for the major version of CUDA; empty where none does.
        seen: where the patterns come from.
    """

    name: str
    symbols: str = ""
    says: str = ""
    frames: str = ""
    loaded: tuple[str, ...] = ()
    package: str = ""
    seen: str = ""


# First match wins: a text of cuBLAS names CUDA, too.
COMPONENTS: Final[tuple[Component, ...]] = (
    Component(
        "second CUDA runtime",
        says=r"Multiple lib(?:cuda|nv|cu)\w* libraries found",
        loaded=("libcudart",),
        seen="TE 2.12.0 with libcudart.so.12 beside 13, H200, 2026-11-21",
    ),
    # Before NCCL, which asks for it, and before a crash: a worker that finds it full gets SIGBUS. Of a GPU it is none.
    Component("shared memory", says=r"(?:insufficient|out of) shared memory|shared memory segment /dev/shm",
              seen="torch/utils/data/_utils/signal_handling.py; NCCL, src/misc/shmutils.cc"),
    Component(
        "cuDNN",
        symbols=r"_?(?:_ZNK?5)?(?:lib)?cudnn(?!_frontend)",
        says=r"cuDNN [Ee]rror|CUDNN_(?:STATUS|BACKEND|ATTR)\w*|libcudnn\w*\.so|\[cudnn_frontend\]|cuDNN version|"
        r"No valid (?:execution )?plans? (?:built|found)|"
        r"unable to find an engine to execute|cudnn[A-Z]\w*Error\b|cu[Dd][Nn][Nn] [Vv]ersion mismatch",
        loaded=("libcudnn",),
        package="nvidia-cudnn-cu{cuda}",
        seen="TE 2.17.1 with cuDNN 9.14 mapped, H200, 2026-11-21; transformer_engine/common/cudnn_utils.h",
    ),
    Component(
        "cuBLAS",
        symbols=r"_?(?:lib)?cublas(?:Lt|Mp)?",
        says=r"cu(?:BLAS|blas)(?:Lt|Mp)? [Ee]rror|CUBLAS_STATUS_\w+|libcublas\w*\.so|cublas\w+ failed|cuBLAS version|"
        r"Unable to find (?:any )?suitable (?:cuBLAS \w+ )?algorithm",
        loaded=("libcublas", "libcublasLt"),
        package="nvidia-cublas{-cuda}",
        seen="TE 2.14.1 with cuBLAS 13.1.0, H200, 2026-11-21; transformer_engine/common/util/logging.h",
    ),
    Component(
        "NCCL",
        symbols=r"_?(?:lib)?nccl",
        says=r"NCCL (?:[Ee]rror|WARN)|nccl\w+Error|ncclUnhandled|DistBackendError|libnccl\.so",
        loaded=("libnccl",),
        package="nvidia-nccl-cu{cuda}",
        seen="torch/csrc/distributed/c10d/NCCLUtils.hpp; transformer_engine/common/util/logging.h",
    ),
    Component("NVSHMEM", r"(?:lib)?nvshmem", r"NVSHMEM [Ee]rror|libnvshmem", package="nvidia-nvshmem-cu{cuda}",
              seen="bridge/te_reasons.py"),
    Component("NVRTC", r"(?:lib)?nvrtc", r"NVRTC [Ee]rror|NVRTC_ERROR_\w+|libnvrtc\S*\.so", loaded=("libnvrtc",),
              package="nvidia-cuda-nvrtc{-cuda}", seen="transformer_engine/common/util/rtc.cpp"),
    Component("nvJitLink", r"_*(?:lib)?nv[Jj]it[Ll]ink", r"nvJitLink [Ee]rror|libnvJitLink",
              package="nvidia-nvjitlink{-cuda}", seen="libcusparse.so.12: undefined symbol: __nvJitLink..."),
    Component("cuSPARSE", r"(?:lib)?cusparse", r"CUSPARSE_STATUS\w*|libcusparse", package="nvidia-cusparse{-cuda}",
              seen="torch/csrc, libcusparse.so"),
    Component("cuSOLVER", r"(?:lib)?cusolver", r"CUSOLVER_STATUS\w*|libcusolver", package="nvidia-cusolver{-cuda}",
              seen="bridge/te_reasons.py"),
    Component(
        "driver",
        symbols=r"libcuda\.so|libnvidia|cu(?:Init|Mem|Ctx|Device|Stream|Tensor|Multicast|Launch)[A-Z]",
        says=r"driver version is insufficient|CUDA driver (?:initialization|version)|CUDA unknown error|"
        r"CUDA_ERROR_\w*DRIVER\w*|unsupported toolchain|Found no NVIDIA driver|CUDA_ERROR_NO_DEVICE|"
        r"NVIDIA driver on your system is too old|nvidia-container-cli: |[Dd]river/library version mismatch|"
        r"Failed to initialize NVML|NVML_SUCCESS == |DeferredCudaCallError|driver shutting down|"
        r"libcuda\.so cannot found|"
        r"no CUDA-capable device|No CUDA GPUs are available|unsupported display driver|PTX JIT compiler library|"
        r"forward compatibility was attempted|CUDA-capable device\(s\) is/are busy",
        loaded=("driver",),
        seen="cuda_runtime_api.h, cudaError_t; torch/csrc/cuda/Module.cpp",
    ),
    Component("GPU memory", says=r"CUDA out of memory|CUDA [Ee]rror: out of memory|\[CUDA\]: out of memory|"
              r"OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAlloc"
              r"|CUBLAS_STATUS_ALLOC_FAILED", seen="torch.OutOfMemoryError"),
    Component("GPU architecture", says=r"no kernel image is available|invalid device function|"
              r"CUDA_ERROR_NO_BINARY_FOR_GPU|cudaErrorNoKernelImageForDevice|named symbol not found",
              seen="cudaErrorNoKernelImageForDevice: an extension without code for this GPU"),
    Component("GPU hardware", says=r"uncorrectable ECC|NVLink error|fallen off the bus|cudaErrorECC",
              seen="cudaError_t"),
    Component("host limits",
              says=r"can't start new thread|\[Errno (?:11|23|24)\]|Too many open files|pthread_create failed",
              seen="errno EAGAIN, ENFILE, EMFILE: processes, threads, files (ulimit, cgroup)"),
    Component("host memory", says=r"^MemoryError|std::bad_alloc|Cannot allocate memory|DefaultCPUAllocator",
              seen="CPython, libstdc++, c10/core/CPUAllocator.cpp"),
    Component("disk", says=r"No space left on device|Disk quota exceeded|Read-only file system",
              seen="errno: a JIT compiler's cache"),
    Component("file permissions", says=r"^PermissionError", seen="CPython: a device file, a package, a cache"),
    Component("compiler", says=r"Failed to find (?:C compiler|Python\.h)|NVCC compilation failed|Ninja is required|"
              r"(?:Command '\[|directory: |No module named )'(?:[\w./-]*[/-])?"
              r"(?:gcc|g\+\+|cc|c\+\+|clang|nvcc|ninja)(?:-\d+)?'|"
              r"\b(?:gcc|g\+\+|cc|c\+\+|clang(?:\+\+)?|nvcc|ninja|ptxas): (?:command )?not found|"
              r"CUDA_HOME (?:environment variable )?is not set",
              seen="triton/runtime/build.py; torch/utils/cpp_extension.py; DeepGEMM csrc/jit/compiler.hpp"),
    Component("CuTe DSL", r"(?:nvidia[-_])?cutlass|quack|tvm_ffi", r"\bcutlass\.(?:cute|base_dsl)|DSLRuntimeError|"
              r"nvidia-cutlass-dsl", r"(?:cutlass|quack)/", ("cutlass",), "nvidia-cutlass-dsl",
              seen="TE 2.17.1 with flash-attn-4 and no CuTe DSL, H200, 2026-11-21"),
    Component("flash-attn", r"flash_attn|flash-attn|fa3_|libflash", r"flash_attn\w*\(\)|"
              r"FlashAttention(?:[- ]?\d)? (?:cannot|only supports|requires|is not|m(?:ax|in)imum version)|"
              r"flash_attn_(?:varlen_|with_kvcache)?func", r"flash_attn", ("flash_attn", "flash_attn_interface",
              "flash_attn_3"), "flash-attn", seen="bridge/flash_attention.py"),
    Component("DeepGEMM", r"deep_gemm|deep-gemm", r"deep_gemm|DeepGEMM|dim == \S+ or dim == |"
              r"CUDA (?:driver|runtime) error \(csrc/", r"deep_gemm/", ("deep_gemm",), "deep-gemm",
              seen="sgl-deep-gemm 0.1.7: loads and reads tensors wrongly, 2026-11-21; DeepGEMM/issues/359"),
    Component("triton", r"(?:lib)?triton|proton", r"Triton Error|\btriton\.(?:compiler|runtime|language|backends)|"
              r"PTXASError|CompilationError|OutOfResources|ptxas|PassManager::run failed|"
              r"active drivers \(\[|working triton installation", r"triton/", ("triton",), "triton",
              seen="triton/compiler/errors.py, triton/runtime/errors.py"),
    Component("cuDNN frontend", r"cudnn_frontend|cudnn\b", frames=r"cudnn/", loaded=("cudnn",),
              package="nvidia-cudnn-frontend", seen="probes/fingerprint.py"),
    Component("torch ABI", r"_?(?:_ZN?K?\d*(?:c10|2at|5torch|3c10|6caffe2)|c10|aoti_|libtorch|libc10|_ZTI\w*torch)|"
              r"\w*(?:3c10|2at\d|5torch)", r"compiled (?:against|with) (?:a different|another) version of "
              r"(?:Py)?[Tt]orch|lib(?:torch|c10)\w*\.so", loaded=("torch",), package="torch",
              seen="sgl-deep-gemm 0.2.1: undefined symbol in c10, 2026-11-21"),
    Component("CUDA runtime", r"(?:lib)?cudart|_?_?cuda[A-Z]\w*|cuda[A-Z]",
              r"libcudart\S*\.so|detected CUDA version \S+ mismatches", loaded=("libcudart",),
              package="nvidia-cuda-runtime{-cuda}", seen="bridge/te_reasons.py; torch/utils/cpp_extension.py"),
    Component("Linux libraries", r"(?:GLIBC|GLIBCXX|CXXABI)_|_ZN?K?S[ast]",
              r"version [`'](?:GLIBC|GLIBCXX|CXXABI)_\S+' not found",
              seen="bridge/te_reasons.py; a symbol of libstdc++: NVIDIA/TransformerEngine/issues/611"),
    Component("Python", r"_?Py[A-Z_]", loaded=("python",), seen="bridge/te_reasons.py"),
    Component("numpy", r"numpy", frames=r"numpy/", loaded=("numpy",), package="numpy",
              seen="numpy.core.multiarray failed to import: an extension built for another numpy"),
    Component("torchao", r"torchao", r"'torchao' object|torchao\.\w+|torchao version", r"torchao/", ("torchao",),
              "torchao", seen="bridge/torchao.py; torch.ops.torchao"),
    Component("Liger kernel", r"liger_kernel", frames=r"liger_kernel/", loaded=("liger_kernel",),
              package="liger-kernel", seen="bridge/liger.py"),
)  # fmt: skip
OF_THE_HOST: Final = frozenset({"GPU hardware", "disk", "host limits", "host memory", "shared memory"})
TORCH: Final = "torch"  # its Python side, where that has changed; its compiled side is "torch ABI"
_OWN_LIBRARY: Final = re.compile(r"nvte_|libtransformer_engine|\w*transformer_engine")
_BY_NAME: Final = {component.name: component for component in COMPONENTS}


def component_named(name: str) -> Component | None:
    """The row of a component; None for one that has none."""
    return _BY_NAME.get(name)


def owner_of(symbol: str) -> str | None:
    """Whose a symbol, shared library or Python package is; `OWN` where it is Transformer Engine's; None if unknown."""
    if _OWN_LIBRARY.match(symbol):
        return OWN
    if symbol.partition(".")[0] == "torch":
        return TORCH
    return next((row.name for row in COMPONENTS if row.symbols and re.match(row.symbols, symbol)), None)


def said_by(text: str) -> str:
    """The component that an exception's own text names; empty where there is none."""
    return next((row.name for row in COMPONENTS if row.says and re.search(row.says, text)), "")


def framed_by(frame: str) -> str:
    """The component that a frame, "package/file.py in function", lies in; empty where it is none of them."""
    return next((row.name for row in COMPONENTS if row.frames and re.match(row.frames, frame)), "")


def loaded_as(name: str) -> str:
    """The component that a package or library of a receipt is; empty where it is none of them."""
    if name == "torch":
        return TORCH
    return next((row.name for row in COMPONENTS if name in row.loaded and row.name != "second CUDA runtime"), "")
