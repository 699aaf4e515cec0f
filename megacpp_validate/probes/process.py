"""One probe, run and judged: an order in, a receipt out, whatever a vendor library raises."""

from __future__ import annotations

import importlib
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from ..evidence.receipt import Check, Failure, Machine, Outcome, Receipt, Timing, cell_id
from ..jit import monitor
from .fingerprint import read_libraries, read_machine, read_packages
from .jit_record import JitRecord
from .order import Order
from .turnstile import alone, computing

if TYPE_CHECKING:
    from .bench import Bench
    from .stopwatch import Stopwatch

PROBES: Final = __package__ or "megacpp_validate.probes"
BRIDGE: Final = "megacpp_validate.bridge"
FIREWALL: Final = "imports"  # the bridge module, and the probe, that everything else stands on
IMAGE_DIGEST: Final = "MEGACPP_IMAGE_DIGEST"
_VENDORS: Final = frozenset({
    "transformer_engine", "flash_attn", "flash_attn_interface", "flash_attn_3", "deep_gemm", "cutlass", "triton",
    "liger_kernel", "cudnn", "torch",
})  # fmt: skip
_LISTS: Final = ("checks", "backends", "quantizers", "compilers", "training")  # of a bench and of a receipt
_LONGEST_TEXT: Final = 20_000


@dataclass
class _Seen:
    """What the receipt will hold, as far as the probe came."""

    outcome: Outcome = Outcome.ERROR
    reason: str = ""
    failure: Failure | None = None
    blocked_by: str = ""
    bench: Bench | None = None
    timings: tuple[Timing, ...] = ()
    note: str = ""  # what there is to say of a pass
    lacking: str = ""  # what the probe needs and is not here
    seconds: dict[str, float] = field(default_factory=dict)
    jit: JitRecord = field(default_factory=JitRecord)
    machine: Machine = field(default_factory=Machine)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside, also where it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)

    @property
    def checks(self) -> list[Check]:
        """Of the bench, as far as the probe came."""
        return self.bench.checks if self.bench else []

    def ended(self, outcome: Outcome, reason: str, failure: Failure | None = None) -> None:
        self.outcome, self.reason, self.failure = outcome, reason, failure


def run_probe(order: Order) -> Receipt:
    """Run one probe in this process.

    Never raises but for `KeyboardInterrupt`: whatever else happens is an outcome.
    """
    seen = _Seen()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    begin = time.perf_counter()
    try:
        _run(order, seen)
    except KeyboardInterrupt:
        raise
    except BaseException as fault:  # SystemExit and what compiled code makes up, too
        failure = describe(fault)
        seen.ended(Outcome.ERROR, _one_line(f"{failure.type}: {failure.message}"), failure)
    seen.seconds["total"] = round(time.perf_counter() - begin, 3)
    return _receipt(order, seen, started)


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


def _run(order: Order, seen: _Seen) -> None:
    with seen.phase("import-torch"):
        import torch
    seen.jit.begin()
    seen.machine = read_machine(order.target.id != "cpu")  # before the probe: a GPU that has failed tells nothing more
    if reason := _why_not_here(order, torch):
        return seen.ended(Outcome.NOT_RUN, reason)
    with seen.phase("import-vendor"):
        if order.requested == "te" and order.needs_te and (reason := _why_te_is_missing()):
            return _stopped_by_te(order, reason, seen)
        for name in order.bridge_modules:
            try:
                importlib.import_module(f"{BRIDGE}.{name}")
            except Exception as fault:
                failure = describe(fault)
                reason = f"{BRIDGE}.{name} cannot be imported: {failure.type}: {failure.message}"
                return seen.ended(Outcome.IMPORT_ERROR, _one_line(reason), failure)
    module = importlib.import_module(f"{PROBES}.{order.code or order.probe}")
    with _in_turn(seen, order, computing):
        bench = seen.bench = _new_bench(order, torch)  # kept also where the probe raises half way
        seen.jit.ranks = bench.rank_jit
        if not order.only_times:
            _observe(order, module.probe, bench, seen, torch)
        stopwatch = _new_stopwatch(order, bench, seen, torch)
    if stopwatch is not None:
        _time(order, stopwatch, seen)
    if order.only_times and seen.note:
        return seen.ended(Outcome.NOT_RUN, seen.note)
    _judge(seen)
    last = getattr(module, "probe_last", None)
    if last is not None and not order.only_times:
        # What would spoil this process for the rest: libraries that do not live side by side.
        with _in_turn(seen, order, computing), seen.phase("last"):
            _work(last, bench, torch)
        _judge(seen)
    return None


def _observe(order: Order, probe: Any, bench: Bench, seen: _Seen, torch: Any) -> None:
    """Run the probe and judge what it saw."""
    from .bench import CannotRun

    before = monitor.count_compiles()
    try:
        with seen.phase("probe"):
            _work(probe, bench, torch)
    except CannotRun as lacking:
        seen.lacking = str(lacking)
    finally:
        seen.jit.warm_up = monitor.compiled_since(before)
    _judge(seen)
    if bench.device == "cuda" and seen.outcome is Outcome.PASS and not (order.quick or order.once):
        with seen.phase("second-use"):
            _use_again(order, probe, seen, torch)


def _why_not_here(order: Order, torch: Any) -> str:
    """Why this machine is none of the order's target; empty where it is one."""
    target = order.target
    if target.id == "cpu":
        return ""
    if not torch.cuda.is_available():
        return f"target {target.id} wants {target.arch}, and torch {torch.__version__} sees no CUDA device here"
    major, minor = torch.cuda.get_device_capability()
    found = f"sm_{major}{minor}"
    if target.arch and found != target.arch:
        return f"target {target.id} wants {target.arch}, and this GPU ({torch.cuda.get_device_name()}) is {found}"
    return ""


def _why_te_is_missing() -> str:
    te = importlib.import_module(f"{BRIDGE}.{FIREWALL}")
    return "" if te.is_te_available() else str(te.why_te_is_unavailable())


def _stopped_by_te(order: Order, reason: str, seen: _Seen) -> None:
    """Transformer Engine is requested and cannot be used: one cell carries that, the others are blocked by it."""
    if order.probe == FIREWALL:
        raised = re.search(r"cannot be used: (\w[\w.]*): (.*?)(?: \(at ([^()]+)\))?\. (?:Likely cause|Found):", reason)
        failure = Failure(raised[1], raised[2], _below_the_path(raised[3] or "")) if raised else None
        seen.ended(Outcome.IMPORT_ERROR, reason, failure)
        return
    seen.blocked_by = cell_id(order.stack, order.target.id, FIREWALL)
    seen.ended(Outcome.BLOCKED, f"blocked by {seen.blocked_by}: {reason}")


def _new_bench(order: Order, torch: Any) -> Bench:
    from .bench import Bench

    random.seed(order.seed)
    torch.manual_seed(order.seed)  # weights that a layer makes for itself
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(order.seed % 2**32)
    return Bench(order)


def _judge(seen: _Seen) -> None:
    """The outcome from the checks."""
    failed = [check.name for check in seen.checks if not check.passed]
    if failed:
        listed = ", ".join(failed[:3]) + (", ..." if len(failed) > 3 else "")
        return seen.ended(Outcome.FAIL, f"{len(failed)} of {len(seen.checks)} checks failed: {listed}")
    if seen.lacking:
        return seen.ended(Outcome.NOT_RUN, seen.lacking)
    if not seen.checks:
        return seen.ended(Outcome.ERROR, "the probe checked nothing")
    if seen.bench is not None and seen.bench.unsupported:
        return seen.ended(Outcome.EXPECTED_UNSUPPORTED, seen.bench.unsupported)
    return seen.ended(Outcome.PASS, seen.note)


def _use_again(order: Order, probe: Any, seen: _Seen, torch: Any) -> None:
    """Run the smallest cases twice more: nothing may break on second use, and the last run should compile nothing.

    A whole second run would double the time of a session; the smallest cases take every path.
    """
    problems: list[str] = []
    for _ in range(2):
        moment = monitor.mark()
        bench = _new_bench(replace(order, quick=True), torch)
        try:
            _work(probe, bench, torch)
        except Exception as fault:
            problems.append(f"{type(fault).__name__}: {fault}")
            break
        problems += [check.name for check in bench.checks if not check.passed]
    seen.jit.late = monitor.compiles_since(moment)  # of this use alone: what is timed later has other shapes
    seen.checks.append(Check("second-use", not problems, detail="; ".join(dict.fromkeys(problems)) or "as the first"))
    _judge(seen)


def _new_stopwatch(order: Order, bench: Bench, seen: _Seen, torch: Any) -> Stopwatch | None:
    """The module's uses, each made and run for the first times; None where nothing is to be timed.

    A module that is wrong is not timed: nobody asks how fast.
    """
    if not (order.only_times or (order.times and seen.outcome is Outcome.PASS)):
        return None
    from . import speeds

    if (speed := speeds.speed_of(order.probe)) is None:
        return None
    with seen.phase("speed-warm-up"):
        try:
            from .stopwatch import Stopwatch

            stopwatch = Stopwatch(bench)
            _work(lambda _: speed(stopwatch), bench, torch)
        except Exception as fault:  # the receipt is earned already: this is a check that failed
            bench.check("speed.ran", False, f"{type(fault).__name__}: {fault}"[:2000])
            return None
    return stopwatch


def _time(order: Order, stopwatch: Stopwatch, seen: _Seen) -> None:
    """Time what was made ready, alone on the device."""
    with _in_turn(seen, order, alone) as is_alone:
        if is_alone:
            with seen.phase("speed"):
                seen.timings = stopwatch.run()
        else:
            waited = f"{seen.seconds['waiting']:g} s"
            seen.note = f"not timed: others still computed on the device after {waited} behind {order.turnstile}"


@contextmanager
def _in_turn(seen: _Seen, order: Order, hold: Callable[[str], AbstractContextManager[bool]]) -> Iterator[bool]:
    """Hold the turnstile in this way; the time that it takes to get there is a phase of its own."""
    if not order.turnstile:
        yield True
        return
    with ExitStack() as turn:
        with seen.phase("waiting"):
            held = turn.enter_context(hold(order.turnstile))
        yield held


def _work(probe: Any, bench: Bench, torch: Any) -> None:
    """Run a probe, so that what vendors' layers made can be told from what torch made."""
    from .observe import marking_vendor_layers

    with marking_vendor_layers():
        probe(bench)
    _synchronize(torch)


def _synchronize(torch: Any) -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a kernel's fault belongs to the probe that launched it


def _receipt(order: Order, seen: _Seen, started: str) -> Receipt:
    gpu = "torch" in sys.modules and order.target.id != "cpu"
    lists: dict[str, Any] = {name: tuple(getattr(seen.bench, name, ())) for name in _LISTS}
    return Receipt(
        cell=order.cell,
        stack=order.stack,
        target=order.target.id,
        probe=order.probe,
        outcome=seen.outcome,
        reason=seen.reason,
        requested=order.requested,
        requested_because=order.requested_because,
        **lists,
        packages=read_packages(),
        libraries=read_libraries() if gpu else (),
        machine=seen.machine,
        jit=seen.jit.receipt(),
        failure=seen.failure,
        blocked_by=seen.blocked_by,
        seed=order.seed,
        started=started,
        seconds=dict(seen.seconds),
        peak_memory_mib=_peak_memory_mib(gpu),
        timings=seen.timings,
        environment=order.environment,
        image_digest=os.environ.get(IMAGE_DIGEST, order.image_digest),
        lock_hash=order.lock_hash,
        commit=order.commit,
        tool=order.tool,
    )


def _peak_memory_mib(gpu: bool) -> float:
    """What torch's allocator held on the GPU at most; resident memory of the process where there is none."""
    if gpu:
        import torch

        if torch.cuda.is_available() and torch.cuda.is_initialized():
            return round(float(torch.cuda.max_memory_allocated()) / 2**20, 1)
    import resource

    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def _vendor_frame(trace: TracebackType | None) -> str:
    """The innermost frame of vendor code, else the innermost of all: "file:line in function"."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith("<frozen ")]
    for frame in reversed(frames):
        file = _below_the_path(frame.filename)
        if Path(file).parts[:1] and Path(file).parts[0].removesuffix(".py") in _VENDORS:
            return f"{file}:{frame.lineno} in {frame.name}"
    return f"{_below_the_path(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def _below_the_path(file: str) -> str:
    """A source file from its package on: where that is installed says nothing about a fault."""
    entries = [entry for entry in sys.path if entry and file.startswith(entry.rstrip(os.sep) + os.sep)]
    return file[len(max(entries, key=len).rstrip(os.sep)) + 1 :] if entries else file


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 600 else f"{line[:600]} ..."
