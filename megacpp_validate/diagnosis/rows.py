"""The table of failures: text, symbol or frame -> cause, component, next step, and where the failure was seen.

`COMPONENTS` lists the libraries and resources below Transformer Engine that can be at fault. `RULES` gives the class of
cause. `HOST_FAULTS` lists faults of the host, `JOB_ENDS` ends of Slurm jobs. To add a failure that was seen, add a row:
the first row that matches decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ..evidence.values import Cause

# No component: the core library of Transformer Engine itself comes from another build than its caller.
OWN: Final = ""
TORCH: Final = "torch"  # its Python side; its compiled side is "torch ABI"


@dataclass(frozen=True)
class Component:
    """A component. The owner of a symbol is stronger evidence than a word in a text; a frame is the weakest.

    Attributes:
        symbols: pattern of its symbols, sonames and Python packages; matched from the start.
        says: pattern of the texts of its exceptions.
        frames: pattern of its frames, "package/file.py in function"; matched from the start.
        loaded: its names in the packages and libraries of a receipt.
        package: its distribution; "{cuda}" stands for the CUDA major version, "{-cuda}" for a suffix before CUDA 13.
        advice: next step for any release, with names of `next_steps`; empty where the next step depends on versions.
        seen: source of the patterns.
    """

    name: str
    symbols: str = ""
    says: str = ""
    frames: str = ""
    loaded: tuple[str, ...] = ()
    package: str = ""
    advice: str = ""
    seen: str = ""


@dataclass(frozen=True)
class Rule:
    """A pattern of an exception in one line, "class: text".

    Attributes:
        component: at fault; empty for Transformer Engine itself.
        owned: the owner of the symbol, library or package in the first group is the component.
        seen: where the text was seen.
    """

    pattern: str
    cause: Cause
    component: str = OWN
    owned: bool = False
    seen: str = ""


@dataclass(frozen=True)
class HostFault:
    """A fault of the host: the same cell may pass a minute later, with any release."""

    pattern: str
    says: str
    seen: str


# The first match decides: texts of cuBLAS name CUDA too.
COMPONENTS: Final[tuple[Component, ...]] = (
    Component("second CUDA runtime", says=r"Multiple lib(?:cuda|nv|cu)\w* libraries found", loaded=("libcudart",),
              advice="leave one CUDA runtime: remove the second libcudart (on LD_LIBRARY_PATH, or in site-packages)",
              seen="TE 2.12.0 with libcudart.so.12 beside 13, H200, 2026-11-21"),
    Component("shared memory", says=r"(?:insufficient|out of) shared memory|shared memory segment /dev/shm",
              advice="give the process more of /dev/shm (docker run --shm-size or --ipc=host)",
              seen="torch/utils/data/_utils/signal_handling.py; NCCL, src/misc/shmutils.cc"),
    Component("cuDNN", symbols=r"_?(?:_ZNK?5)?(?:lib)?cudnn(?!_frontend)",
              says=r"cuDNN [Ee]rror|CUDNN_(?:STATUS|BACKEND|ATTR)\w*|libcudnn\w*\.so|\[cudnn_frontend\]|cuDNN version|"
              r"No valid (?:execution )?plans? (?:built|found)|unable to find an engine to execute|"
              r"cudnn[A-Z]\w*Error\b|cu[Dd][Nn][Nn] [Vv]ersion mismatch", loaded=("libcudnn",),
              package="nvidia-cudnn-cu{cuda}",
              seen="TE 2.17.1 with cuDNN 9.14 mapped, H200, 2026-11-21; transformer_engine/common/cudnn_utils.h"),
    Component("cuBLAS", symbols=r"_?(?:lib)?cublas(?:Lt|Mp)?",
              says=r"cu(?:BLAS|blas)(?:Lt|Mp)? [Ee]rror|CUBLAS_STATUS_\w+|libcublas\w*\.so|cublas\w+ failed|"
              r"cuBLAS version|Unable to find (?:any )?suitable (?:cuBLAS \w+ )?algorithm",
              loaded=("libcublas", "libcublasLt"), package="nvidia-cublas{-cuda}",
              seen="TE 2.14.1 with cuBLAS 13.1.0, H200, 2026-11-21; transformer_engine/common/util/logging.h"),
    Component("NCCL", symbols=r"_?(?:lib)?nccl",
              says=r"NCCL (?:[Ee]rror|WARN)|nccl\w+Error|ncclUnhandled|DistBackendError|libnccl\.so",
              loaded=("libnccl",), package="nvidia-nccl-cu{cuda}",
              seen="torch/csrc/distributed/c10d/NCCLUtils.hpp; transformer_engine/common/util/logging.h"),
    Component("NVRTC", symbols=r"(?:lib)?nvrtc", says=r"NVRTC [Ee]rror|NVRTC_ERROR_\w+|libnvrtc\S*\.so",
              loaded=("libnvrtc",), package="nvidia-cuda-nvrtc{-cuda}",
              seen="transformer_engine/common/util/rtc.cpp"),
    Component("nvJitLink", symbols=r"_*(?:lib)?nv[Jj]it[Ll]ink", says=r"nvJitLink [Ee]rror|libnvJitLink",
              package="nvidia-nvjitlink{-cuda}", seen="libcusparse.so.12: undefined symbol: __nvJitLink..."),
    Component("cuSPARSE", symbols=r"(?:lib)?cusparse", says=r"CUSPARSE_STATUS\w*|libcusparse",
              package="nvidia-cusparse{-cuda}", seen="torch/csrc, libcusparse.so"),
    Component("driver",
              symbols=r"libcuda\.so|libnvidia|cu(?:Init|Mem|Ctx|Device|Stream|Tensor|Multicast|Launch)[A-Z]",
              says=r"driver version is insufficient|CUDA driver (?:initialization|version)|CUDA unknown error|"
              r"CUDA_ERROR_\w*DRIVER\w*|unsupported toolchain|Found no NVIDIA driver|CUDA_ERROR_NO_DEVICE|"
              r"NVIDIA driver on your system is too old|nvidia-container-cli: |[Dd]river/library version mismatch|"
              r"Failed to initialize NVML|NVML_SUCCESS == |DeferredCudaCallError|driver shutting down|"
              r"libcuda\.so cannot found|no CUDA-capable device|No CUDA GPUs are available|"
              r"unsupported display driver|PTX JIT compiler library|forward compatibility was attempted|"
              r"CUDA-capable device\(s\) is/are busy", loaded=("driver",),
              advice="upgrade the NVIDIA driver ({driver} now), or use the build for an older CUDA",
              seen="cuda_runtime_api.h, cudaError_t; torch/csrc/cuda/Module.cpp"),
    Component("FP8 state of checkpoints", says=r"Refusing to load pickled",
              advice="set NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 to load checkpoints that you trust, or stay on the "
              "release that wrote them until the run has ended",
              seen="TE 2.16.1, 2.17.1, 2.19.0 and 2.20.2 with state of delayed scaling, H200, 2026-11-23; "
              "TransformerEngine/pull/1899"),
    Component("GPU memory",
              says=r"CUDA out of memory|CUDA [Ee]rror: out of memory|\[CUDA\]: out of memory|OutOfMemoryError|"
              r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAlloc|CUBLAS_STATUS_ALLOC_FAILED",
              advice="run fewer cells at a time on the GPU (lower --jobs); this failure says nothing about the "
              "release", seen="torch.OutOfMemoryError"),
    Component("GPU architecture",
              says=r"no kernel image is available|invalid device function|CUDA_ERROR_NO_BINARY_FOR_GPU|"
              r"cudaErrorNoKernelImageForDevice|named symbol not found",
              seen="cudaErrorNoKernelImageForDevice: an extension without code for this GPU"),
    Component("GPU hardware", says=r"uncorrectable ECC|NVLink error|fallen off the bus|cudaErrorECC",
              advice="run the cell on another GPU: this one reports a hardware fault (nvidia-smi -q, dmesg)",
              seen="cudaError_t"),
    Component("host limits",
              says=r"can't start new thread|\[Errno (?:11|23|24)\]|Too many open files|pthread_create failed",
              advice="raise the limits of this user (ulimit -u and -n, pids of the container or of the job)",
              seen="errno EAGAIN, ENFILE, EMFILE: processes, threads, files (ulimit, cgroup)"),
    Component("host memory", says=r"^MemoryError|std::bad_alloc|Cannot allocate memory|DefaultCPUAllocator",
              advice="run the cell with less beside it on this host (lower --jobs)",
              seen="CPython, libstdc++, c10/core/CPUAllocator.cpp"),
    Component("disk", says=r"No space left on device|Disk quota exceeded|Read-only file system",
              advice="give the process caches that it can write, with room in them (HOME, TMPDIR, TRITON_CACHE_DIR, "
              "TORCH_EXTENSIONS_DIR)", seen="errno: a JIT compiler's cache"),
    Component("file permissions", says=r"^PermissionError",
              advice="let the process read and write what it is refused: owner, mode, the groups of a device file, or "
              "HOME and TRITON_CACHE_DIR for a cache (`{line}`)", seen="CPython: a device file, a package, a cache"),
    Component("compiler",
              says=r"Failed to find (?:C compiler|Python\.h)|NVCC compilation failed|Ninja is required|(?:Command '\[|"
              r"directory: |No module named )'(?:[\w./-]*[/-])?(?:gcc|g\+\+|cc|c\+\+|clang|nvcc|ninja)(?:-\d+)?'|"
              r"\b(?:gcc|g\+\+|cc|c\+\+|clang(?:\+\+)?|nvcc|ninja|ptxas): (?:command )?not found|"
              r"CUDA_HOME (?:environment variable )?is not set",
              advice="install the compiler that is asked for: a JIT compiler builds with it at run time",
              seen="triton/runtime/build.py; torch/utils/cpp_extension.py; DeepGEMM csrc/jit/compiler.hpp"),
    Component("CuTe DSL", symbols=r"(?:nvidia[-_])?cutlass|quack|tvm_ffi",
              says=r"\bcutlass\.(?:cute|base_dsl)|DSLRuntimeError|nvidia-cutlass-dsl", frames=r"(?:cutlass|quack)/",
              loaded=("cutlass",), package="nvidia-cutlass-dsl",
              seen="TE 2.17.1 with flash-attn-4 and no CuTe DSL, H200, 2026-11-21"),
    Component("flash-attn", symbols=r"flash_attn|flash-attn|fa3_|libflash",
              says=r"flash_attn\w*\(\)|FlashAttention(?:[- ]?\d)? (?:cannot|only supports|requires|is not|m(?:ax|"
              r"in)imum version)|flash_attn_(?:varlen_|with_kvcache)?func", frames=r"flash_attn",
              loaded=("flash_attn", "flash_attn_interface", "flash_attn_3"), package="flash-attn",
              seen="bridge/flash_attention.py"),
    Component("DeepGEMM", symbols=r"deep_gemm|deep-gemm",
              says=r"deep_gemm|DeepGEMM|dim == \S+ or dim == |CUDA (?:driver|runtime) error \(csrc/",
              frames=r"deep_gemm/", loaded=("deep_gemm",), package="deep-gemm",
              seen="sgl-deep-gemm 0.1.7: loads and reads tensors wrongly, 2026-11-21; DeepGEMM/issues/359"),
    Component("triton", symbols=r"(?:lib)?triton|proton",
              says=r"Triton Error|\btriton\.(?:compiler|runtime|language|backends)|PTXASError|CompilationError|"
              r"OutOfResources|ptxas|PassManager::run failed|active drivers \(\[|working triton installation",
              frames=r"triton/", loaded=("triton",), package="triton",
              seen="triton/compiler/errors.py, triton/runtime/errors.py"),
    Component("cuDNN frontend", symbols=r"cudnn_frontend|cudnn\b", frames=r"cudnn/", loaded=("cudnn",),
              package="nvidia-cudnn-frontend", seen="probes/fingerprint.py"),
    Component("torch ABI",
              symbols=r"_?(?:_ZN?K?\d*(?:c10|2at|5torch|3c10|6caffe2)|THP|c10|aoti_|libtorch|libc10|_ZTI\w*torch)|\w*(?:3c10|"
              r"2at\d|5torch)",
              says=r"compiled (?:against|with) (?:a different|another) version of (?:Py)?[Tt]orch|"
              r"lib(?:torch|c10)\w*\.so",
              loaded=("torch",), package="torch", seen="sgl-deep-gemm 0.2.1: undefined symbol in c10, 2026-11-21"),
    Component("CUDA runtime", symbols=r"(?:lib)?cudart|_?_?cuda[A-Z]\w*|cuda[A-Z]",
              says=r"libcudart\S*\.so|detected CUDA version \S+ mismatches", loaded=("libcudart",),
              package="nvidia-cuda-runtime{-cuda}", seen="torch/utils/cpp_extension.py"),
    Component("Linux libraries", symbols=r"(?:GLIBC|GLIBCXX|CXXABI)_|_ZN?K?S[ast]",
              says=r"version [`'](?:GLIBC|GLIBCXX|CXXABI)_\S+' not found",
              advice="use a newer base image, or build the extension on this one",
              seen="diagnosis/installs.py; a symbol of libstdc++: NVIDIA/TransformerEngine/issues/611"),
    Component("Python", symbols=r"_?Py[A-Z_]", loaded=("python",), seen="diagnosis/installs.py"),
    Component("numpy", symbols=r"numpy", frames=r"numpy/", loaded=("numpy",), package="numpy",
              seen="numpy.core.multiarray failed to import: an extension built for another numpy"),
    Component("torchao", symbols=r"torchao", says=r"'torchao' object|torchao\.\w+|torchao version",
              frames=r"torchao/", loaded=("torchao",), package="torchao",
              seen="bridge/torchao.py; torch.ops.torchao"),
    Component("Liger kernel", symbols=r"liger_kernel", frames=r"liger_kernel/", loaded=("liger_kernel",),
              package="liger-kernel", seen="bridge/liger.py"),
)  # fmt: skip
OF_THE_HOST: Final = frozenset({"GPU hardware", "disk", "host limits", "host memory", "shared memory"})

# A missing symbol is a fault of the build (binary), although another version of the library cures it. An error that a
# library returns is a fault of the environment: both parts are intact and do not fit together.
RULES: Final[tuple[Rule, ...]] = (
    Rule(r"undefined symbol:? [`']?(\w+)", Cause.BINARY, owned=True, seen="TE 2.14.1; DeepGEMM 0.2.1"),
    Rule(r"[Cc]annot (?:import|load|find) symbol:? [`']?(\w+)", Cause.BINARY, owned=True, seen="ld.so"),
    Rule(r"([\w.+-]+\.so[\w.]*): cannot open shared object", Cause.ENVIRONMENT, owned=True, seen="ld.so"),
    Rule(r"([\w.+-]+\.so[\w.]*): (?:file too short|invalid ELF header|cannot read)", Cause.BINARY, owned=True,
         seen="ld.so"),
    Rule(r"failed to map segment from shared object", Cause.ENVIRONMENT, "file permissions",
         seen="ld.so: a folder mounted noexec"),
    Rule(r"version [`']((?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)' not found", Cause.BINARY, owned=True, seen="ld.so"),
    Rule(r"ldconfig -p \| grep '?(lib[\w.]+)", Cause.ENVIRONMENT, owned=True, seen="transformer_engine 2.8.0, NVRTC"),
    Rule(r"(\w+) shared object not found", Cause.ENVIRONMENT, owned=True, seen="transformer_engine/common/__init__.py"),
    Rule(r"[Cc]ould not find shared object file|package version mismatch\. Found|meta package installed", Cause.BINARY,
         seen="transformer_engine/common/__init__.py"),
    Rule(r"Multiple lib\w+ libraries found", Cause.ENVIRONMENT, "second CUDA runtime", seen="TE 2.12.0"),
    Rule(r"[Mm]odule was compiled against NumPy|numpy\.core\.multiarray failed to import|_ARRAY_API not found|"
         r"numpy\.\w+ size changed", Cause.BINARY, "numpy", seen="numpy"),
    Rule(r"Python version mismatch: module was compiled", Cause.BINARY, "Python", seen="pybind11.h"),
    Rule(r"does not define module export function|initialization of \w+ failed without raising|"
         r'type "\w+" is already registered!', Cause.BINARY, seen="CPython importdl.c; pybind11.h"),
    Rule(r"no kernel image is available|invalid device function|NO_BINARY_FOR_GPU", Cause.BINARY, "GPU architecture",
         seen="cudaError_t"),
    Rule(r"Torch not compiled with CUDA enabled", Cause.ENVIRONMENT, TORCH, seen="torch/cuda/__init__.py"),
    Rule(r"Refusing to load pickled", Cause.API, "FP8 state of checkpoints", seen="TE 2.17.1, pytorch/module/base.py"),
    Rule(r"dim == \S+ or dim == ", Cause.BINARY, "DeepGEMM", seen="sgl-deep-gemm 0.1.7"),
    # Whatever else the loader says of a library begins with its name.
    Rule(r"^(?:OSError|ImportError): (?:\S*/)?([\w.+-]+\.so[\w.]*): ", Cause.BINARY, owned=True,
         seen="glibc, elf/dl-load.c"),
)  # fmt: skip
# A missing module, or a missing name of a Python package.
PYTHON_RULES: Final = (
    r"No module named '([\w.]+)'", r"cannot import name '\w+' from (?:partially initialized module )?'([\w.]+)'",
    r"module '([\w.]+)' has no attribute",
)  # fmt: skip
# A release checks a version and reports the requirement: "requires cuDNN 9.12.0 or later, but ... is 9.1.0".
WANTS: Final = re.compile(
    r"(?:requires?|needs?|wants?|expects?|minimum|at least|only supported (?:with|by|on)|upgrade)\b[^.;]{0,60}?"
    r"\b(?P<name>cuDNN|cuBLAS(?:Lt)?|NCCL|(?:NVIDIA |CUDA )?driver|CUDA|PyTorch|torch|flash[-_ ]?attn|FlashAttention|"
    r"triton|numpy|Python)\b[^.;]{0,30}?\d+\.\d+",
    re.IGNORECASE,
)
WANTED: Final = {
    "cudnn": "cuDNN", "cublas": "cuBLAS", "cublaslt": "cuBLAS", "nccl": "NCCL", "driver": "driver",
    "nvidia driver": "driver", "cuda driver": "driver", "cuda": "CUDA runtime", "pytorch": TORCH, "torch": TORCH,
    "triton": "triton", "numpy": "numpy", "python": "Python",
}  # fmt: skip
# An OS error about a file or a process is no API break, unless the file is Transformer Engine's own.
SYSTEM: Final = re.compile(r"\[Errno \d+\](?!.*transformer_engine)")
# Exceptions of a call that does not match the API.
CALL_ERRORS: Final = frozenset({
    "TypeError", "AttributeError", "ImportError", "ModuleNotFoundError", "KeyError", "NameError", "AssertionError",
    "ValueError", "NotImplementedError", "IndexError", "VendorEntryMissing", "NoBackend", "DeprecationWarning",
    "WeightMismatch", "UnboundLocalError", "SyntaxError", "StopIteration", "LookupError", "FutureWarning",
})  # fmt: skip
CRASHES: Final = re.compile(
    r"illegal memory access|misaligned address|unspecified launch failure|illegal instruction|invalid program counter|"
    r"hardware stack error|device-side assert|kernel image is invalid|invalid configuration argument|"
    r"CUDA (?:driver |runtime )?[Ee]rror: |invalid resource handle|CUDA_ERROR_ILLEGAL|Segmentation fault|Bus error"
)

# Lasting faults (a full disk, a driver, a library) are not listed: blame gives their next step. A lost rank
# (ncclRemoteError, "Connection closed by peer", a watchdog) is not listed: the report of another rank has the cause.
# In doubt a text is not a fault of the host. Xid 13, 31, 43 and 45 are faults of the program.
HOST_FAULTS: Final[tuple[HostFault, ...]] = (
    HostFault(r"uncorrectable ECC|cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE",
              "the GPU's memory has an error that cannot be corrected",
              "github.com/vllm-project/vllm/issues/5222; nagadit/DeepFaceLab_Linux/issues/89"),
    HostFault(r"fallen off the bus|GPU is lost|Xid \(PCI:[^)]*\): (?:48|62|63|64|74|79|92|94|95|119|120|140)\b",
              "the GPU failed (nvidia-smi -q, dmesg)", "docs.nvidia.com/deploy/xid-errors"),
    HostFault(r"uncorrectable NVLink error|cudaErrorNvlinkUncorrectable|CUDA_ERROR_NVLINK_UNCORRECTABLE",
              "a link between GPUs failed", "CUDA Runtime API, cudaError_t 220"),
    HostFault(r"CUDA-capable device\(s\) is/are busy or unavailable|cudaErrorDevicesUnavailable",
              "another process has the GPU for itself", "CUDA Runtime API, cudaError_t 46"),
    HostFault(r"[Ee]rror(?: 802)?: system not yet initialized|cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY",
              "the GPU's fabric manager does not run",
              "CUDA Runtime API, cudaError_t 802; torch: huggingface/huggingface_hub/issues/4134"),
    HostFault(r"(?:cudaErrorMps|CUDA_ERROR_MPS_)(?!ClientTerminated|CLIENT_TERMINATED)\w+|"
              r"MPS client failed to connect|between the MPS server and the MPS client failed|MPS server is not ready",
              "the daemon that shares the GPU (MPS) does not answer", "CUDA Runtime API, cudaError_t 805 to 809"),
    HostFault(r"Failed to initialize NVML: (?:Unknown Error|GPU is lost)", "the container lost its GPUs",
              "github.com/NVIDIA/nvidia-container-toolkit/issues/1397"),
    HostFault(r"slurmstepd: error: .*(?:CANCELLED AT|oom[-_]kill|unable to add pids|Slurmd could not execve)|"
              r"srun: error: Node failure on", "the batch system ended the job",
              "github.com/labsyspharm/mcmicro/issues/163; nextflow-io/nextflow/issues/5932; "
              "Azure/cyclecloud-slurm/issues/388"),
    HostFault(r"NET/IB ?: .*async event ?: (?:port error|local catastrophic error|device fatal)",
              "a network adapter failed", "NCCL, src/transport/net_ib.cc; ibv_event_type_str"),
    # By the system's number, of an exception of Python over a file: the same words are a vendor's, too.
    HostFault(r"\b(?:OSError|BrokenPipeError|TimeoutError): \[Errno (?:5|107|108|110|112|116|121)\] [^:']*: '|"
              r"cannot (?:open shared object file|read file data): (?:Input/output error|Stale file handle)",
              "a file system failed",
              "errno EIO, ENOTCONN, ESHUTDOWN, ETIMEDOUT, EHOSTDOWN, ESTALE, EREMOTEIO: pytorch/pytorch/issues/173679; "
              "ServiceNow/Fast-LLM/issues/45; databricks/megablocks/issues/106"),
    HostFault(r"\bOSError: \[Errno 16\] [^:']*: '[^']*' -> '", "a file that another host holds open was not replaced",
              "errno EBUSY of a rename on NFS: github.com/pytorch/pytorch/issues/173679"),
)  # fmt: skip
# Faults of the program: beside a fault of the host in one text, the order of the two is unknown.
OF_THE_PROGRAM: Final = re.compile(
    r"illegal memory access|illegal instruction|misaligned address|device-side assert|\bSIG(?:SEGV|ABRT|BUS|FPE|ILL)\b|"
    r"exit status 13[245689]\b|Xid \(PCI:[^)]*\): (?:13|31|43|45)\b|\b(?:nan|inf)\b",
    re.IGNORECASE,
)
# Slurm states (squeue(1), JOB STATE CODES) that say nothing about the program: the job is submitted again.
JOB_ENDS: Final = {
    "NODE_FAIL": "node-fail: the node was lost",
    "PREEMPTED": "preempted: another job took its place",
    "CANCELLED": "cancelled: somebody cancelled the job",
    "TIMEOUT": "job-time-limit: the job's time limit, which is longer than the cell's, was reached",
    "DEADLINE": "deadline: the job's deadline passed",
    "BOOT_FAIL": "boot-fail: the node did not start",
    "OUT_OF_MEMORY": "out-of-memory: the job took more memory than it was given",
    "REVOKED": "revoked: another cluster has it",
}
# What differs between two occurrences of one failure although it is made of words; numbers count for nothing anyway.
VARYING: Final = re.compile(
    r"\x1b\[[0-9;]*m|https?://\S+|"
    # Boilerplate that torch adds to every asynchronous error, or to none, by build.
    r"Search for `\w+' in https?://\S+ for more information|"
    r"CUDA kernel errors might be asynchronously reported.*?(?:incorrect\.|$)|"
    r"For debugging consider passing CUDA_LAUNCH_BLOCKING|"
    r"Compile with `?TORCH_USE_CUDA_DSA`? to enable device-side assertions|"
    r"\b(?:te|native)[\w.+]*-(?:h200|b200|gb10|cpu)-\w+|"  # a cell
    r"(?:~|\.{1,2})?(?:/[^\s/:'\"(),;\[\]]+)*/|"  # the folders of a path
    r"\.(?:cpython|abi)[\w-]*|\bv?\d+(?:\.\d+){2,}[\w.+]*",  # a build, a version
    re.DOTALL,
)
_OWN_LIBRARY: Final = re.compile(r"nvte_|libtransformer_engine|\w*transformer_engine")
_BY_NAME: Final = {component.name: component for component in COMPONENTS}


def component_named(name: str) -> Component:
    """The row of a component; a row with only a name where the table has none."""
    return _BY_NAME.get(name) or Component(name, loaded=(name,))


def owner_of(symbol: str) -> str | None:
    """The component of a symbol, shared library or Python package; `OWN` for Transformer Engine, None if unknown."""
    if _OWN_LIBRARY.match(symbol):
        return OWN
    if symbol.partition(".")[0] == "torch":
        return TORCH
    return next((row.name for row in COMPONENTS if row.symbols and re.match(row.symbols, symbol)), None)


def said_by(text: str) -> str:
    """The component that the text of an exception names; empty for none."""
    return next((row.name for row in COMPONENTS if row.says and re.search(row.says, text)), "")


def framed_by(frame: str) -> str:
    """The component of a frame, "package/file.py in function"; empty for none."""
    return next((row.name for row in COMPONENTS if row.frames and re.match(row.frames, frame)), "")


def loaded_as(name: str) -> str:
    """The component of a package or library of a receipt; empty for none."""
    if name == "torch":
        return TORCH
    return next((row.name for row in COMPONENTS if name in row.loaded and row.name != "second CUDA runtime"), "")
