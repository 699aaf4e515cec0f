"""What of a red receipt is the host's: each text as it was seen, and none that a module may be to blame for."""

from __future__ import annotations

import pytest

from megacpp_validate.evidence.host_faults import find_host_fault
from megacpp_validate.evidence.receipt import Check, Failure, Outcome, Receipt

FULL = (
    "CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 139.80 GiB of which {free} is free. "
    "Process 20398 has {other} memory in use. Including non-PyTorch memory, this process has {own} memory in use. Of "
    "the allocated memory {own} is allocated by PyTorch, and 36.73 MiB is reserved by PyTorch but unallocated."
)
OF_THE_HOST = {
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered": "cannot be corrected",  # vllm 5222
    "RuntimeError: CUDA error: unspecified launch failure NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off "
    "the bus.": "GPU failed",
    "RuntimeError: NVRM: Xid (PCI:0000:3b:00): 48, Double Bit ECC Error": "GPU failed",
    "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution": "link",
    "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable": "another process",
    "RuntimeError: CUDA error: system not yet initialized": "fabric manager",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was "
    "a network error, NCCL version 2.28.9": "another rank",
    "SIGABRT: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580)": "in vain",
    "SIGKILL: nothing": "ended from outside",
    "exit status 137: nothing": "ended from outside",
    "exit status 1: slurmstepd: error: *** STEP 494583.0 ON node07 CANCELLED AT 2026-11-20T09:09:37 DUE TO TIME LIMIT":
        "batch system",
    "exit status 1: slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0.": "batch system",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:10895":
        "another rank",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error [10.0.0.2]:25266: Connection reset "
    "by peer": "another rank",
    "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (a)":
        "another rank",
    f"torch.OutOfMemoryError: {FULL.format(wanted='226.00 MiB', free='41.38 MiB', other='138.5 GiB', own='1.21 GiB')}":
        "other processes have",
    # torch before 2.2 writes "capacty"; in a container its own process has a number, and what it allocated tells.
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacty of 80.00 "
    "GiB of which 0 bytes is free. Process 7 has 3.00 GiB memory in use. Process 9 has 77.00 GiB memory in use. Of the "
    "allocated memory 2.50 GiB is allocated by PyTorch, and 1 MiB is reserved": "other processes have",
}  # fmt: skip
OF_THE_MODULE = (
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, Ch 00000008, MMU Fault",
    "RuntimeError: CUDA driver version is insufficient for CUDA runtime version",
    "OSError: [Errno 28] No space left on device",
    "RuntimeError: NCCL error in: x, unhandled system error",
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
