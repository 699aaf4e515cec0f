"""Faults of the host in a receipt: what ended a probe from outside of it says nothing of the module that it looked at.

A GPU whose memory fails, a card that another process has, a process that somebody kills: the same cell may hold a
minute later, in every release. So a receipt that met one is no evidence, of a breakage or of anything else. What lasts
until somebody mends it (a full disk, a driver, a library) is none of these: blame says what to do.

Nor is a rank that was lost, or waited for in vain (ncclRemoteError, "Connection closed by peer", a watchdog): that is
what the ranks say that did not crash, whatever ended the other one. In doubt it is no fault of the host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ..evidence.receipt import FROM_OUTSIDE, Outcome, Receipt


@dataclass(frozen=True)
class HostFault:
    """A pattern of what a fault of the host raises.

    Attributes:
        pattern: searched in "class: text".
        says: what it is.
        seen: where such a text was seen.
    """

    pattern: str
    says: str
    seen: str


# Xid: 13, 31, 43 and 45 are what a program does itself, and are not here.
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
# What a program does itself: in one text with a fault of the host, nobody knows which came first.
_OF_THE_PROGRAM: Final = re.compile(
    r"illegal memory access|illegal instruction|misaligned address|device-side assert|\bSIG(?:SEGV|ABRT|BUS|FPE|ILL)\b|"
    r"exit status 13[245689]\b|Xid \(PCI:[^)]*\): (?:13|31|43|45)\b|\b(?:nan|inf)\b",
    re.IGNORECASE,
)
# As the launcher of ranks tells of a run (training/parallel/launch.py): all of them, and which one is at fault.
_AT_FAULT: Final = re.compile(r"At fault: rank (\d+(?:, \d+)*)\.")
_KILLED: Final = re.compile(r"^rank \d+ ended by (SIG(?:HUP|INT|KILL|TERM)|exit status (?:129|130|137|143))\b")
# What a shell or a container engine makes of a process that a signal ended: 128 and its number (SIGHUP, SIGINT,
# SIGKILL, SIGTERM). 139 is a segmentation fault, which is none.
_BY_NUMBER: Final = frozenset({"exit status 129", "exit status 130", "exit status 137", "exit status 143"})
_SIZE: Final = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
_MIB: Final = {"bytes": 2.0**-20, "KiB": 2.0**-10, "MiB": 1.0, "GiB": 2.0**10}


def find_host_fault(receipt: Receipt) -> str:
    """The fault of the host that a red receipt is red for; empty where it is good, or red for anything else.

    Checks that failed before count for themselves: where one of them is of no such fault, the receipt is not either.
    """
    outcome, failure = receipt.outcome, receipt.failure
    if outcome.is_good or outcome in (Outcome.NOT_RUN, Outcome.BLOCKED, Outcome.TIMEOUT):
        return ""
    found = [_read(check.detail) for check in receipt.checks if not check.passed]
    if outcome is not Outcome.FAIL:
        if failure is not None and failure.type in FROM_OUTSIDE | _BY_NUMBER:
            found.append(f"its process was ended from outside, by {failure.type}")
        else:
            found.append(_read(f"{failure.type}: {failure.message}" if failure else receipt.reason))
    return found[-1] if found and all(found) else ""


def _read(text: str) -> str:
    text = _of_the_accused(text)
    if _OF_THE_PROGRAM.search(text):
        return ""
    if killed := _KILLED.search(text):
        return f"a rank was ended from outside, by {killed[1]}"
    known = next((row.says for row in HOST_FAULTS if re.search(row.pattern, text)), "")
    return known or _find_full_gpu(text)


def _of_the_accused(text: str) -> str:
    """Of a run of many ranks what is said of those at fault: the others only lost them."""
    named = _AT_FAULT.search(text)
    if named is None:
        return text
    ranks = named[1].replace(", ", "|")
    ended = re.findall(rf"^rank (?:{ranks}) (?:was ended|ended by) .*$", text, re.MULTILINE)
    said = re.search(rf"^rank (?:{ranks}) said last .*", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*ended, *([said[0]] if said else [])])


def _find_full_gpu(text: str) -> str:
    """Other processes have the GPU's memory: more of it than this one, which would fit if it were alone.

    As torch writes it (c10/cuda/CUDACachingAllocator.cpp). In a container its own process may be listed by a number,
    like the others: what it has beside torch's allocator is not known then, and nobody else is accused.
    """
    if "out of memory" not in text:
        return ""
    sizes = ("Tried to allocate ", r"total capaci?ty of ", "of which ", "this process has ")
    wanted, total, free, own = (_size(rf"{words}{_SIZE}", text) for words in sizes)
    if wanted is None or total is None or free is None or own is None:
        return ""
    others = total - free - own
    if others > own and own + wanted <= total:
        return f"other processes have {others / 1024:.1f} of the GPU's {total / 1024:.1f} GiB"
    return ""


def _size(pattern: str, text: str) -> float | None:
    """MiB."""
    found = re.search(pattern, text)
    return float(found[1]) * _MIB[found[2]] if found else None
