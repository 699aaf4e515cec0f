"""One probe, run and judged: an order in, a receipt out, whatever a vendor library raises."""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final

from ..evidence.receipt import Failure, JitCompile, JitCompiles, Machine, Outcome, Receipt, Timing, cell_id
from ..jit import monitor
from .fingerprint import PACKAGES, read_libraries, read_machine, read_packages
from .order import TIMED, Order

if TYPE_CHECKING:
    from .bench import Bench
    from .speeds import Stopwatch

PROBES: Final = __package__ or "megacpp_validate.probes"
BRIDGE: Final = "megacpp_validate.bridge"
FIREWALL: Final = "imports"  # the bridge module, and the probe, that everything else stands on
IMAGE_DIGEST: Final = "MEGACPP_IMAGE_DIGEST"
_VENDORS: Final = PACKAGES.keys() - {"numpy"}
_LISTS: Final = ("checks", "backends", "quantizers", "compilers", "training")  # of a bench and of a receipt
_OF_THE_RUN: Final = ("outcome", "reason", "machine", "failure", "blocked_by", "timings")
_OF_THE_ORDER: Final = (
    "cell", "stack", "probe", "requested", "requested_because", "seed", "environment", "lock_hash", "commit", "tool",
)  # fmt: skip
_LONGEST_TEXT: Final = 20_000
_LONGEST_REASON: Final = 600


@dataclass
class _Run:
    """What the receipt will hold, as far as the probe came."""

    order: Order
    outcome: Outcome = Outcome.ERROR
    reason: str = ""
    failure: Failure | None = None
    blocked_by: str = ""
    bench: Bench | None = None
    timings: tuple[Timing, ...] = ()
    note: str = ""  # what there is to say of a pass
    lacking: str = ""  # what the probe or the stopwatch needs and is not here
    seconds: dict[str, float] = field(default_factory=dict)
    machine: Machine = field(default_factory=Machine)
    warm_up: dict[str, int] = field(default_factory=dict)  # what the probe compiled, by library
    watched_from: int | None = None
    late: tuple[monitor.Compile, ...] = ()  # what its last use of all compiled

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside, also where it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)

    @contextmanager
    def device(self, hold: Callable[[str], AbstractContextManager[bool]]) -> Iterator[bool]:
        """Hold the lock of the device in this way; the wait for it is a phase of its own."""
        if not self.order.turnstile:
            yield True
            return
        with ExitStack() as held:
            with self.phase("waiting"):
                is_held = held.enter_context(hold(self.order.turnstile))
            yield is_held

    def ended(self, outcome: Outcome, reason: str, failure: Failure | None = None) -> None:
        self.outcome, self.reason, self.failure = outcome, reason, failure

    def ended_by(self, outcome: Outcome, what: str, fault: BaseException) -> None:
        """Ended by an exception, whose class and text follow `what` in the reason."""
        failure = describe(fault)
        line = " ".join(f"{what}{failure.type}: {failure.message}".split())
        self.ended(outcome, line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} ...", failure)

    def stopped_by_te(self, reason: str) -> None:
        """Transformer Engine is requested and cannot be used: one cell carries that, the others are blocked by it."""
        if self.order.probe != FIREWALL:
            self.blocked_by = cell_id(self.order.stack, self.order.target.id, FIREWALL)
            return self.ended(Outcome.BLOCKED, f"blocked by {self.blocked_by}: {reason}")
        raised = re.search(r"cannot be used: (\w[\w.]*): (.*?)(?: \(at ([^()]+)\))?\. (?:Likely cause|Found):", reason)
        failure = Failure(raised[1], raised[2], _below_the_path(raised[3] or "")) if raised else None
        return self.ended(Outcome.IMPORT_ERROR, reason, failure)

    def judge(self) -> None:
        """The outcome from the checks."""
        checks = self.bench.checks if self.bench else []
        failed = [check.name for check in checks if not check.passed]
        if failed:
            listed = ", ".join(failed[:3]) + (", ..." if len(failed) > 3 else "")
            self.ended(Outcome.FAIL, f"{len(failed)} of {len(checks)} checks failed: {listed}")
        elif self.lacking:
            self.ended(Outcome.NOT_RUN, self.lacking)
        elif not checks:
            self.ended(Outcome.ERROR, "the probe checked nothing")
        elif self.bench and self.bench.unsupported:
            self.ended(Outcome.EXPECTED_UNSUPPORTED, self.bench.unsupported)
        else:
            self.ended(Outcome.PASS, self.note)


def run_probe(order: Order) -> Receipt:
    """Run one probe in this process.

    Never raises but for `KeyboardInterrupt`: whatever else happens is an outcome.
    """
    run = _Run(order)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with run.phase("total"):
        try:
            _run(order, run)
        except KeyboardInterrupt:
            raise
        except BaseException as fault:  # SystemExit and what compiled code makes up, too
            run.ended_by(Outcome.ERROR, "", fault)
    return _receipt(run, started)


def describe(fault: BaseException) -> Failure:
    """An exception as a receipt keeps it: class, text, the innermost frame of vendor code, and the whole traceback."""
    try:
        message = str(fault)
    except Exception:
        message = "its text cannot be made"
    kind = type(fault)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = "".join(traceback.format_exception(fault))
    return Failure(name, message[:_LONGEST_TEXT], _vendor_frame(fault.__traceback__), text[-_LONGEST_TEXT:])


def _run(order: Order, run: _Run) -> None:
    import torch

    # A process of one cell has its copy of the driver's cache by now (`probes.__main__`).
    monitor.start_compiling(private=False)
    run.watched_from = monitor.mark()
    run.machine = read_machine(order.target.id != "cpu")  # before the probe: a GPU that has failed tells nothing more
    if reason := _why_not_here(order, torch):
        return run.ended(Outcome.NOT_RUN, reason)
    if order.requested == "te" and order.needs_te:
        te = importlib.import_module(f"{BRIDGE}.{FIREWALL}")
        if not te.is_te_available():
            return run.stopped_by_te(str(te.why_te_is_unavailable()))
    for name in order.bridge_modules:
        try:
            importlib.import_module(f"{BRIDGE}.{name}")
        except Exception as fault:
            return run.ended_by(Outcome.IMPORT_ERROR, f"{BRIDGE}.{name} cannot be imported: ", fault)
    module = importlib.import_module(f"{PROBES}.{order.code or order.probe}")
    with run.device(computing):
        bench = run.bench = _new_bench(order, torch)  # kept also where the probe raises half way
        if not order.only_times:
            _observe(module.probe, bench, run, torch)
        stopwatch = _new_stopwatch(bench, run, torch)
    if stopwatch is not None:
        _time_alone(stopwatch, run)
    run.judge()
    last = getattr(module, "probe_last", None)
    if last is not None and not order.only_times:
        # What would spoil this process for the rest: libraries that do not live side by side.
        with run.device(computing):
            _work(last, bench, torch)
        run.judge()
    return None


def _observe(probe: Any, bench: Bench, run: _Run, torch: Any) -> None:
    """Run the probe and judge what it saw; then run its smallest cases twice more."""
    from .bench import CannotRun

    before = monitor.mark()
    try:
        with run.phase("probe"):
            _work(probe, bench, torch)
    except CannotRun as lacking:
        run.lacking = str(lacking)
    finally:
        run.warm_up = dict(sorted(Counter(one.library for one in monitor.compiles_since(before)).items()))
    run.judge()
    if bench.device == "cuda" and run.outcome is Outcome.PASS and not (run.order.quick or run.order.once):
        _use_again(probe, bench, run, torch)


def _time_alone(stopwatch: Stopwatch, run: _Run) -> None:
    with run.device(alone) as is_alone:
        if is_alone:
            with run.phase("speed"):
                run.timings = stopwatch.run()
            return
    waited, behind = f"{run.seconds['waiting']:g} s", run.order.turnstile
    run.note = f"not timed: others still computed on the device after {waited} behind {behind}"
    run.lacking = run.note if run.order.only_times else run.lacking


def _why_not_here(order: Order, torch: Any) -> str:
    """Why this machine is none of the order's target; empty where it is one."""
    target = order.target
    if target.id == "cpu":
        return ""
    if not torch.cuda.is_available():
        return f"target {target.id} wants {target.arch}, and torch {torch.__version__} sees no CUDA device here"
    found = "sm_{}{}".format(*torch.cuda.get_device_capability())
    if target.arch and found != target.arch:
        return f"target {target.id} wants {target.arch}, and this GPU ({torch.cuda.get_device_name()}) is {found}"
    return ""


def _new_bench(order: Order, torch: Any) -> Bench:
    from .bench import Bench

    torch.manual_seed(order.seed)  # weights that a layer makes for itself
    return Bench(order)


def _use_again(probe: Any, first: Bench, run: _Run, torch: Any) -> None:
    """Run the smallest cases twice more: nothing may break on second use, and the last run should compile nothing.

    A whole second run would double the time of a session; the smallest cases take every path.
    """
    problems: list[str] = []
    for _ in range(2):
        moment = monitor.mark()
        bench = _new_bench(replace(run.order, quick=True), torch)
        try:
            _work(probe, bench, torch)
        except Exception as fault:
            problems.append(f"{type(fault).__name__}: {fault}")
            break
        problems += [check.name for check in bench.checks if not check.passed]
    run.late = monitor.compiles_since(moment)  # of this use alone: what is timed later has other shapes
    first.check("second-use", not problems, "; ".join(dict.fromkeys(problems)) or "as the first")
    run.judge()


def _new_stopwatch(bench: Bench, run: _Run, torch: Any) -> Stopwatch | None:
    """The module's uses, each made and run for the first times; None where nothing is to be timed.

    A module that is wrong is not timed: nobody asks how fast.
    """
    order = run.order
    if order.probe not in TIMED or not (order.only_times or (order.times and run.outcome is Outcome.PASS)):
        return None
    from . import speeds

    try:
        stopwatch = speeds.Stopwatch(bench)
        _work(lambda _: speeds.add_uses(stopwatch), bench, torch)
        return stopwatch
    except Exception as fault:  # the receipt is earned already: this is a check that failed
        bench.check("speed.ran", False, f"{type(fault).__name__}: {fault}"[:2000])
    return None


def _work(probe: Any, bench: Bench, torch: Any) -> None:
    """Run a probe, so that what vendors' layers made can be told from what torch made."""
    from .observe import marking_vendor_layers

    with marking_vendor_layers():
        probe(bench)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a kernel's fault belongs to the probe that launched it


def _receipt(run: _Run, started: str) -> Receipt:
    order, gpu = run.order, "torch" in sys.modules and run.order.target.id != "cpu"
    kept: dict[str, Any] = {name: tuple(getattr(run.bench, name, ())) for name in _LISTS}
    kept |= {name: getattr(order, name) for name in _OF_THE_ORDER}
    kept |= {name: getattr(run, name) for name in _OF_THE_RUN}
    return Receipt(
        **kept,
        target=order.target.id,
        packages=read_packages(),
        libraries=read_libraries() if gpu else (),
        jit=_jit(run),
        started=started,
        seconds=dict(run.seconds),
        peak_memory_mib=_peak_memory_mib(gpu),
        image_digest=os.environ.get(IMAGE_DIGEST, order.image_digest),
    )


def _jit(run: _Run) -> JitCompiles:
    """What was compiled just in time: by this process, and by the ranks of training runs that it started."""
    every = () if run.watched_from is None else monitor.compiles_since(run.watched_from)
    own = monitor.describe_jit()  # after the last look at the driver's cache, which may have to be reported
    late, ranks = set(map(id, run.late)), run.bench.rank_jit if run.bench else None
    rows = [
        JitCompile(one.library, one.kernel, one.shape, one.seconds, "after" if id(one) in late else "warm-up")
        for one in every
    ]
    hits, unwatched = Counter(own["hits"]), own["unwatched"]
    if ranks is not None:
        rows, hits, unwatched = [*rows, *ranks.compiled], hits + ranks.hits, ranks.unwatched | unwatched
    return JitCompiles(
        warm_up=run.warm_up,
        after=dict(sorted(Counter(one.library for one in run.late).items())),
        compiled=tuple(rows),
        hits=dict(sorted(hits.items())),
        unwatched=unwatched,
        **{name: own[name] for name in ("root", "arch", "mode")},
    )


def _peak_memory_mib(gpu: bool) -> float:
    """What torch's allocator held on the GPU at most; resident memory of the process where there is none."""
    torch = sys.modules["torch"] if gpu else None
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return round(float(torch.cuda.max_memory_allocated()) / 2**20, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def _vendor_frame(trace: TracebackType | None) -> str:
    """The innermost frame of vendor code, else the innermost of all: "file:line in function"."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith("<frozen ")]
    shown = [(_below_the_path(frame.filename), frame) for frame in reversed(frames)]
    of_vendors = (row for row in shown if Path(row[0]).parts and Path(row[0]).parts[0].removesuffix(".py") in _VENDORS)
    found = next(of_vendors, shown[0] if shown else None)
    return f"{found[0]}:{found[1].lineno} in {found[1].name}" if found else ""


def _below_the_path(file: str) -> str:
    """A source file from its package on: where that is installed says nothing about a fault."""
    entries = [entry for entry in sys.path if entry and file.startswith(entry.rstrip(os.sep) + os.sep)]
    return file[len(max(entries, key=len).rstrip(os.sep)) + 1 :] if entries else file


# --- the lock of a device ---------------------------------------------------------------------------------------------
#
# Who may use a device now: any number of processes that compute side by side, or one that times, alone.
# Two files are locked: the room, and the door before it. Whoever computes goes through the door and locks the room
# shared; whoever times keeps the door locked while it waits for the room, so that newcomers wait behind it and it is
# not starved (the turnstile solution of the readers and writers problem, A. Downey, The Little Book of Semaphores, 2nd
# ed., 4.2.3). The locks are those of fcntl(2), which belong to a process: the kernel takes them back from one that was
# killed, and a forked child, such as a compile worker, does not hold them on.

DOOR: Final = ".door"
# Longer than anybody holds the room who is not stuck: a probe that compiles computes for a minute, and some thirty
# others time for a second and a half each. Who is stuck is killed by the time limit of its own cell, not of this one.
PATIENCE_S: Final = 120.0
_POLL_S: Final = 0.01


def computing(path: str, patience_s: float = PATIENCE_S) -> AbstractContextManager[bool]:
    """Hold the room together with others that compute.

    Args:
        path: of the room, in a local folder; its door is beside it.
        patience_s: after that many seconds of waiting, go on without the lock.

    Returns:
        Whether the room is held. To go on without it spoils nobody's numbers, at worst somebody's times.

    Raises:
        OSError: a file cannot be opened or locked.
    """
    return _held(path, fcntl.LOCK_SH, patience_s)


def alone(path: str, patience_s: float = PATIENCE_S) -> AbstractContextManager[bool]:
    """Hold the room against everybody else; newcomers wait at the door from now on.

    Args:
        path: as of `computing`.
        patience_s: after that many seconds of waiting, give up.

    Returns:
        Whether the room is held. Without it nothing may be timed.

    Raises:
        OSError: a file cannot be opened or locked.
    """
    return _held(path, fcntl.LOCK_EX, patience_s)


@contextmanager
def _held(path: str, how: int, patience_s: float) -> Iterator[bool]:
    deadline = time.monotonic() + patience_s
    with Path(path + DOOR).open("a+") as door, Path(path).open("a+") as room:
        held = _take(door, fcntl.LOCK_EX, deadline) and _take(room, how, deadline)
        if how == fcntl.LOCK_SH:
            fcntl.lockf(door, fcntl.LOCK_UN)
        yield held


def _take(file: IO[Any], how: int, deadline: float) -> bool:
    """Lock one file; False where it was not to be had before the deadline (of time.monotonic)."""
    while True:
        try:
            fcntl.lockf(file, how | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # what a lock of another process gives, by platform
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True
