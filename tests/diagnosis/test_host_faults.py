"""What of a red receipt is the host's: each text as it was seen, and none that a module may be to blame for."""

from __future__ import annotations

import pytest

from megacpp_validate.diagnosis.diagnose import find_host_fault
from megacpp_validate.evidence.receipt import Check, Failure, Outcome, Receipt

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
    "RuntimeError: CUDA error: unspecified launch failure NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off "
    "the bus.": "GPU failed",
    "RuntimeError: NVRM: Xid (PCI:0000:3b:00): 48, Double Bit ECC Error": "GPU failed",
    "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution": "link",
    "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable": "another process",
    "RuntimeError: CUDA error: system not yet initialized": "fabric manager",
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized": "fabric manager",
    "torch.AcceleratorError: CUDA error: MPS client failed to connect to the MPS control daemon": "MPS",
    "torch.AcceleratorError: CUDA error: the remote procedural call between the MPS server and the MPS client failed\n"
    "Search for `cudaErrorMpsRpcFailure'": "MPS",
    "RuntimeError: Failed to initialize NVML: Unknown Error": "lost its GPUs",
    "exit status 1: slurmstepd: error: unable to add pids to '/sys/fs/cgroup/slurm' | Slurmd could not execve job":
        "batch system",
    "exit status 1: srun: error: Node failure on gpu-12": "batch system",
    "DistBackendError: NCCL error in: x, unhandled system error\nNET/IB : mlx5_3:1 Got async event : port error":
        "network adapter",
    "OSError: [Errno 116] Stale file handle: '/root/.triton/cache/c7f1a/_permute_kernel.json'": "file system failed",
    "OSError: [Errno 5] Input/output error: '/lustre/env/transformer_engine/pytorch/rope.py'": "file system failed",
    "BrokenPipeError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/a.cubin'": "file system",
    "OSError: [Errno 107] Transport endpoint is not connected: '/gpfs/env/torch'": "file system failed",
    "TimeoutError: [Errno 110] Connection timed out: '/nfs/env/torch/__init__.py'": "file system failed",
    "ImportError: /nfs/a/transformer_engine_torch.so: cannot open shared object file: Stale file handle":
        "file system failed",
    "OSError: [Errno 16] Device or resource busy: '/c/tmp.pid_12/cuda_utils.so' -> '/c/cuda_utils.so'": "not replaced",
    "SIGKILL: nothing": "ended from outside",
    "exit status 137: nothing": "ended from outside",
    "exit status 1: slurmstepd: error: *** STEP 494583.0 ON node07 CANCELLED AT 2026-11-20T09:09:37 DUE TO TIME LIMIT":
        "batch system",
    "exit status 1: slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0.": "batch system",
    f"torch.OutOfMemoryError: {FULL.format(wanted='226.00 MiB', free='41.38 MiB', other='138.5 GiB', own='1.21 GiB')}":
        "other processes have",
    "smoke: " + RANKS.format(how="SIGKILL", said="nothing"): "a rank was ended from outside, by SIGKILL",
    "smoke: " + RANKS.format(how="exit status 1", said="CUDA error: uncorrectable ECC error encountered"): "corrected",
}  # fmt: skip
OF_THE_MODULE = (
    # Who lost a rank, or waited for it, does not know what made it go.
    LOST,
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was "
    "a network error, NCCL version 2.28.9",
    "SIGABRT: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580)",
    "smoke: " + RANKS.format(how="exit status 1", said="CUDA error: an illegal memory access was encountered"),
    "smoke: " + RANKS.format(how="exit status 1", said="RuntimeError: the split does not fit"),
    "smoke: " + RANKS.format(how="SIGSEGV", said="nothing"),
    "smoke: " + RANKS.replace("rank 1.", "not to be told from the records.").format(how="SIGKILL", said="nothing"),
    "RuntimeError: loss nan on rank 1; CUDA error: uncorrectable ECC error encountered",
    # In a container its own process has a number: what it holds beside torch's allocator nobody can tell.
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.20 GiB "
    "of which 0.50 GiB is free. Process 9 has 78.70 GiB memory in use. Of the allocated memory 20.00 GiB is allocated "
    "by PyTorch, and 58.00 GiB is reserved by PyTorch but unallocated.",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, Ch 00000008, MMU Fault",
    "RuntimeError: CUDA driver version is insufficient for CUDA runtime version",
    "OSError: [Errno 28] No space left on device",
    "RuntimeError: NCCL error in: x, unhandled system error",
    # A connection is another process; a text without the system's number and a file may be anybody's.
    "OSError: [Errno 107] Transport endpoint is not connected", "TimeoutError: [Errno 110] Connection timed out",
    "ConnectionError: Stale file handle: 'x'",
    "RuntimeError: cache: Input/output error", "OSError: [Errno 2] No such file or directory: '/c/kernel.cubin'",
    "OSError: /s/libtransformer_engine.so: cannot open shared object file: No such file or directory",
    "OSError: [Errno 16] Device or resource busy: '/dev/nvidia0'",
    "torch.AcceleratorError: CUDA error: the MPS client has been terminated. cudaErrorMpsClientTerminated",
    "RuntimeError: Failed to initialize NVML: Driver/library version mismatch",
    "exit status 1: slurmstepd: error: execve(): python: No such file or directory",
    "DistBackendError: NCCL error in: x\nNET/IB: Got completion from peer 1<2> with status=IBV_WC_RETRY_EXC_ERR(12)",
    "torch.AcceleratorError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
    "SIGSEGV: nothing", "SIGABRT: terminate called", "exit status 1: nothing", "exit status 139: nothing",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    # It has most of the card itself; and it would not fit if it were alone.
    f"torch.OutOfMemoryError: {FULL.format(wanted='96.00 GiB', free='12.40 GiB', other='0.1 GiB', own='127.38 GiB')}",
    f"torch.OutOfMemoryError: {FULL.format(wanted='130.0 GiB', free='70.00 GiB', other='50.0 GiB', own='19.80 GiB')}",
)  # fmt: skip


def red(said: str, outcome: Outcome = Outcome.ERROR, checks: tuple[Check, ...] = ()) -> Receipt:
    kind, _, text = said.partition(": ")
    made = Receipt("te1-h200-permute", "te1", "h200", "permute", outcome, said, "te", checks=checks)
    return made if outcome is Outcome.FAIL else Receipt(**(vars(made) | {"failure": Failure(kind, text)}))


@pytest.mark.parametrize(("said", "wanted"), OF_THE_HOST.items(), ids=[said[:50] for said in OF_THE_HOST])
def test_a_fault_of_the_host_is_told(said: str, wanted: str) -> None:
    assert wanted in find_host_fault(red(said))


@pytest.mark.parametrize("said", OF_THE_MODULE, ids=[said[:50] for said in OF_THE_MODULE])
def test_what_a_module_or_a_library_may_be_to_blame_for_is_none(said: str) -> None:
    assert find_host_fault(red(said)) == ""


def test_of_checks_every_failed_one_must_be_of_the_host() -> None:
    ecc = Check("speed.ran", False, detail="AcceleratorError: CUDA error: uncorrectable ECC error encountered")
    wrong, right = Check("bf16.forward", False), Check("bf16.forward", True)
    assert find_host_fault(red("1 check failed", Outcome.FAIL, (right, ecc)))
    assert not find_host_fault(red("2 checks failed", Outcome.FAIL, (wrong, ecc)))
    assert not find_host_fault(red("SIGKILL: nothing", checks=(wrong,)))


@pytest.mark.parametrize("outcome", [Outcome.PASS, Outcome.NOT_RUN, Outcome.BLOCKED, Outcome.TIMEOUT])
def test_what_is_not_red_by_itself_met_nothing(outcome: Outcome) -> None:
    assert find_host_fault(red("SIGKILL: nothing", outcome)) == ""
