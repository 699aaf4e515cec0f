"""Faults planted in a store of receipts that is good throughout, by name: each changes the files of the store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from .receipts import (
    COMMIT,
    FAILED,
    IMAGE,
    LOCK,
    OTHER_COMMIT,
    PROBES,
    STACK,
    TARGET,
    Receipt,
    backend,
    check,
    fill,
    good,
    jit,
    library,
    machine,
    package,
    part,
    place,
    put,
    raised,
    red,
    sealed,
)

Plant = Callable[[Path], object]
CELL: Final = f"{STACK}-{TARGET}-attention"
LATE: Final = {
    "library": "triton",
    "kernel": "permute_kernel",
    "shape": "[64]",
    "seconds": 0.1,
    "when": "after",
    "rank": 1,
}
CUDNN: Final = ("/env/libcudnn.so.9", "/usr/lib/libcudnn.so.9.1.0")


def golden(probe: str, **changes: Any) -> Receipt:
    """A receipt of a golden image."""
    return good(probe, **({"image_digest": IMAGE, "lock_hash": LOCK} | changes))


def write(*receipts: Receipt, run: str = "run") -> Plant:
    """Put receipts into a run."""
    return lambda store: put(store, *receipts, run=run)


def attention(**changes: Any) -> Plant:
    """The receipt of attention, changed."""
    return write(good("attention", **changes))


def edit(old: str, new: str) -> Plant:
    """The file of attention, one text in it replaced."""

    def deed(store: Path) -> None:
        path = place(store, "attention")
        text = path.read_text()
        if old not in text:
            raise KeyError(old)
        path.write_text(text.replace(old, new, 1))

    return deed


def truncate(store: Path) -> None:
    """Half of a file."""
    text = place(store, "attention").read_text()
    place(store, "attention").write_text(text[: len(text) // 2])


def truncate_beside(store: Path) -> None:
    """A damaged file in another run."""
    put(store, good("attention"), run="other")
    path = place(store, "attention", "other")
    path.write_text(path.read_text()[:-40])


def link(store: Path) -> None:
    """A link in place of a file."""
    path = place(store, "attention")
    path.rename(store.parent / path.name)
    path.symlink_to(store.parent / path.name)


def link_out(store: Path) -> None:
    """A newer run that lies elsewhere."""
    put(store.parent / "elsewhere", red("attention", hours=0.5))
    (store / "nightly").symlink_to(store.parent / "elsewhere")


def another_cell(store: Path) -> None:
    """The observations of one cell under another name, every name in it changed."""
    text = place(store, "attention").read_text().replace("h200-attention", "h200-permute")
    place(store, "permute").write_text(text.replace('"probe": "attention"', '"probe": "permute"'))


def rejuvenated(store: Path) -> None:
    """A receipt of last month beside a copy of it with another day."""
    put(store, good("attention", hours=24 * 40), run="last-month")
    old = good("attention", hours=24 * 40)
    put(store, old | {"started": good("attention", hours=0.5)["started"]}, run="today")


def another_stack(store: Path) -> None:
    """The observations of the release before under the name of this one."""
    old = good("attention", stack="te2.12.0", hours=3.0)
    put(store, old, run="before")
    put(store, good("attention") | {"seconds": old["seconds"]})


def twice(store: Path) -> None:
    """A good outcome behind a bad one."""
    text = place(store, "attention").read_text().replace('"outcome": "pass"', '"outcome": "fail"')
    place(store, "attention").write_text(text.replace('\n  "backends": ', '\n  "outcome": "pass",\n  "backends": ', 1))


def host(text: str, probe: str = "permute") -> Plant:
    """A fault of the host in one cell."""
    return write(raised(probe, text))


def mon_and_tue(store: Path) -> None:
    """A red run of several modules, older than the green one."""
    put(store, raised("attention", "RuntimeError: x", hours=5.0), good("imports", hours=5.0), run="mon")
    put(store, raised("layer_spec", "RuntimeError: x", hours=6.0), run="sun")


def blocked_by_host(store: Path) -> None:
    """The import met a fault of the host, and blocks all others."""
    put(store, raised("imports", "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"))
    by = f"{STACK}-{TARGET}-imports"
    put(store, *(red(one, outcome="blocked", blocked_by=by, checks=[]) for one in PROBES[1:]))


OOM: Final = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 1.00 GiB is free. Including non-PyTorch memory, this process has {} memory in use."
)
TEXTS: Final = (  # as a host, a vendor or a launcher writes them
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    "SIGKILL: nothing",
    "SIGSEGV: nothing",
    "SIGABRT: nothing",
    "exit status 137: nothing",
    "exit status 139: nothing",
    "exit status 143: nothing",
    "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    "RuntimeError: NVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen off the bus",
    "RuntimeError: NVRM: Xid (PCI:0000:b3:00): 31",
    "RuntimeError: uncorrectable NVLink error detected during the execution",
    "RuntimeError: Failed to initialize NVML: Unknown Error",
    "RuntimeError: slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026 ***",
    "RuntimeError: MPS client failed to connect to the MPS control daemon",
    "RuntimeError: NET/IB : mlx5_0: async event : port error",
    "OSError: [Errno 116] Stale file handle: '/nfs/x'",
    "OSError: [Errno 5] Input/output error: '/x'",
    "OSError: [Errno 28] No space left on device",
    "OSError: [Errno 16] Device busy: '/a' -> '/b'",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: ECC: uncorrectable ECC error; device-side assert triggered",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "torch.distributed.DistBackendError: NCCL error: unhandled system error, ncclRemoteError",
    "RuntimeError: rank 1 ended by SIGKILL",
    OOM.format("130.00 GiB"),
    OOM.format("2.00 GiB"),
    "MemoryError: ",
    "TimeoutError: [Errno 110] Connection timed out: '/x'",
    "RuntimeError: out of bounds by 3 nan",
)
RETRIES: Final = (
    "fail: permute.bf16 out of bounds",
    "relative error 0.3, tolerance 0.1",
    "the loss was NaN",
    "ImportError: undefined symbol: foo",
    "node-fail: the node was lost (node n3)",
    "rendezvous: connection refused",
    "no-receipt: the job left no receipt; its last words: UserWarning: version mismatch",
)

PLANTS: Final[dict[str, Plant]] = {
    "nothing": lambda store: None,
    "removed": lambda store: place(store, "attention").unlink(),
    "all removed": lambda store: [place(store, probe).unlink() for probe in PROBES[1:]],
    "truncated": truncate,
    "truncated beside": truncate_beside,
    "empty file": lambda store: place(store, "attention").write_text(""),
    "no JSON": lambda store: place(store, "attention").write_text("{"),
    "a list": lambda store: place(store, "attention").write_text("[]"),
    "nested too deep": lambda store: place(store, "attention").write_text("[" * 100_000),
    "a later schema": attention(schema_id="megacpp-validate/receipt/9"),
    "NaN": edit("0.001", "NaN"),
    "infinity": edit("0.001", "Infinity"),
    "a number edited": edit("0.001", "0.5"),
    "a key twice": twice,
    "a link": link,
    "a folder that leads out": link_out,
    "another name": lambda store: shutil.copy(place(store, "attention"), place(store, "permute")),
    "a red one as (1)": lambda store: (store / "run" / f"{CELL} (1).json").write_text(
        sealed(red("attention", hours=0.5))
    ),
    "no environment": lambda store: fill(store, environment=""),
    "another cell": another_cell,
    "a new day": rejuvenated,
    "another stack's": another_stack,
    "edited beside": write(good("attention", reason="edited"), run="other"),
    "the future": attention(hours=-1),
    "the future beside": write(good("attention", hours=-1), run="other"),
    "no time": attention(started=""),
    "no zone": attention(started="2026-11-22T11:00:00"),
    "stale": attention(hours=24 * 31),
    "just not stale": attention(hours=24 * 29),
    "an old schema": attention(schema_id="megacpp-validate/receipt/1"),
    "native": attention(requested="native", backends=[]),
    "another release": attention(packages=[package("2.17.1", "/env")]),
    "no release": attention(packages=[]),
    "another GPU": attention(machine=machine(gpu="GB10", capability="12.1")),
    "no GPU": attention(machine=machine(gpu="", capability="")),
    "another card": write(good("permute", machine=machine(gpu="NVIDIA H100 80GB HBM3"), hours=2)),
    "another driver": write(good("permute", machine=machine(driver="570.2"), hours=2)),
    "another torch": write(good("permute", machine=machine(torch="2.10.0"), hours=2)),
    "another node": write(good("permute", machine=machine(host="node18"), hours=2)),
    "another commit": attention(commit=OTHER_COMMIT),
    "no commit": attention(commit=""),
    "dirty": attention(commit=f"{COMMIT}-dirty"),
    "another environment": attention(environment="f" * 64),
    "not run": attention(outcome="not-run", reason="no GPU here", checks=[]),
    "unwatched": attention(jit=jit(unwatched={"cuda": "no hook"})),
    "unwatched cudnn": attention(jit=jit(unwatched={"cudnn": "before CUDA 12.9"})),
    "only timed": attention(seconds={"speed": 1.0, "total": 9.0}),
    "failed": write(red("attention")),
    "failed after a good one": write(red("attention", hours=0.5), run="newer"),
    "all failed": write(*(red(probe) for probe in PROBES)),
    "import failed": write(raised("imports", "OSError: libcublas.so.13: cannot open shared object file")),
    "unsupported": attention(outcome="expected-unsupported", reason="no kernel"),
    "timed out": attention(outcome="timeout", reason="too long"),
    "comes and goes": write(red("attention", hours=2.0), run="older"),
    "comes and goes in another environment": write(red("attention", hours=2.0, environment="f" * 64), run="older"),
    "comes and goes of another commit": write(red("attention", hours=2.0, commit=OTHER_COMMIT), run="older"),
    "a red run of many": mon_and_tue,
    "good before": write(good("attention", hours=9.0), run="older"),
    "others beside": write(red("attention", stack="te2.17.1"), red("attention", target="b200"), run="others"),
    "a red cell that is not required": write(red("fp8_delayed"), run="other"),
    "a foreign file": lambda store: (store / "notes.json").write_text('{"schema_id": "megacpp-validate/upgrade/1"}'),
    "a hostile name": write(red("attention", stack="<script>", cell="<script>-h200-attention"), run="hostile"),
    "compiled": attention(jit=jit(after={"triton": 2})),
    "compiled, and a negative count": attention(jit=jit(after={"triton": 5, "other": -5})),
    "compiled by a rank": attention(jit=jit(compiled=[LATE])),
    "two files": attention(libraries=[library("libcudnn", "9.1.0, 9.2.0", *CUDNN)]),
    "two files of one version": attention(
        libraries=[
            library(
                "libcudnn",
                "9.14.0",
                "/env/nvidia/cudnn/lib/libcudnn.so.9",
                "/usr/lib/x86_64-linux-gnu/libcudnn.so.9.14.0",
            )
        ]
    ),
    "two files in all": lambda store: fill(
        store, libraries=[library("libnccl", "2.28.9", "/a/libnccl.so.2", "/b/libnccl.so.2")]
    ),
    "two packages": attention(packages=[package("2.20.2", "/env/te", "/other/te")]),
    "a package twice": attention(packages=[package("2.20.2", "/a/x.py"), package("2.20.2", "/b/x.py")]),
    "fallback": attention(backends=[backend("attention.fa3", "fa3", "sdpa", "sdpa")]),
    "fallback that is known": attention(
        backends=[backend("attention.bf16", "te", "te", "te"), backend("attention.fa4", "fa4", "")]
    ),
    "a part fell back": attention(backends=[backend("attention.x", "te", "te", "sdpa", "te")]),
    "native beside another": attention(backends=[backend("attention.x", "te", "te", "te", "sdpa", "native")]),
    "a slow kernel": write(
        good("native_block", backends=[backend("native_block.bf16.gqa4", "te", "te", "te", "unfused")])
    ),
    "a claim that is not so": attention(backends=[backend("attention.x", "fa3", "fa3", "sdpa")]),
    "no path": attention(checks=[check("x.backend", passed=True)], backends=[]),
    "a bound that lets zeros pass": attention(checks=[check("x", part("relative-error", 0.1, 1.0))]),
    "good over a failure": attention(
        failure={"type": "RuntimeError", "message": "cuDNN Error", "frame": "", "traceback": ""}
    ),
    "good over a failed check": attention(checks=[FAILED]),
    "bad over good checks": attention(outcome="fail", reason="no"),
    "a check that contradicts its part": attention(checks=[{**FAILED, "passed": True}]),
    "blocked by the import": write(
        red("attention", outcome="blocked", blocked_by=f"{STACK}-{TARGET}-imports", checks=[])
    ),
    "blocked by a host's fault": blocked_by_host,
    "an older host's fault": write(raised("attention", TEXTS[0], hours=2.0), run="earlier"),
    "an older host's fault beside a wrong number": write(
        raised("attention", TEXTS[0], hours=2.0, checks=[FAILED]), run="earlier"
    ),
    **{f"retry {text}": write(good("permute", retries=[text])) for text in RETRIES},
    **{f"raised {number} {text[:60]}": host(text) for number, text in enumerate(TEXTS)},
}
