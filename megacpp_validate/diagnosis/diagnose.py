"""Diagnosis of one failure: what was raised and where, its signature, its cause, and whether the host is at fault.

The text of an exception counts before the frame that raised it, and the frame before the class of the exception. All
patterns are rows of `rows.py`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..evidence.receipt import FROM_OUTSIDE, Failure, Outcome, Receipt
from ..evidence.values import Cause
from . import rows
from .checks import CheckKind, FailedCheck, read_failed_checks

# Packages whose frames locate a fault. Not torch: whether a fault passes through `_call_impl` or the autograd engine
# depends on how the probe calls the layer.
_VENDORS: Final = (
    "transformer_engine", "transformer_engine_torch", "flash_attn", "flash_attn_interface", "flash_attn_3", "deep_gemm",
    "cutlass", "quack", "triton", "liger_kernel", "cudnn",
)  # fmt: skip
_FILE: Final = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')
_INSTALLED: Final = re.compile(r".*/(?:site|dist)-packages/(.+)")
_BELOW: Final = re.compile(rf"/((?:{'|'.join((*_VENDORS, 'megacpp_validate'))})/.+)")  # an overlay, or a checkout
_CAUSE_OF: Final = "The above exception was the direct cause of the following exception:"
_DURING: Final = "During handling of the above exception, another exception occurred:"
_LAST_LINE: Final = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$", re.MULTILINE)
_BY_SIGNAL: Final = re.compile(r"^(?:SIG[A-Z0-9]+|signal \d+|exit status -?\d+|no-receipt|timeout)$")
_SAID: Final = re.compile(
    r"cannot be used: (?P<kind>\w[\w.]*): (?P<text>.*?)(?: \(at (?P<at>[^()]+)\))?\. (?:Likely cause|Found|Next step):"
)
_ENDED: Final = re.compile(
    r"(?:ends the interpreter \((?P<how>[^)]*)\)|(?P<hangs>did not end within \S+ s: it hangs))"
    r"(?: in (?P<at>\S+?):\d+ \((?P<name>[^)]*)\))?"
)
_BEGINS: Final = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Exit|Missing|Interrupt)): (.*)", re.DOTALL)
_SHOWN: Final = 400  # characters of a signature's text


@dataclass(frozen=True)
class Raised:
    """What was raised, or how a process ended.

    Attributes:
        kind: exception class without its module, a signal, "exit status N", "timeout".
        text: unchanged.
        frame: innermost frame of vendor code or torch: "package/file.py in function"; empty for none.
        died: the process died; `text` is the end of its log.
        traceback: the whole traceback.
    """

    kind: str
    text: str
    frame: str = ""
    died: bool = False
    traceback: str = ""

    @property
    def vendor_frame(self) -> str:
        """The frame if it lies in a vendor package; empty otherwise."""
        return self.frame if _package(self.frame) in _VENDORS else ""

    @property
    def bridge(self) -> tuple[str, ...]:
        """Frames in the bridge, outermost first: "bridge/attention.py in forward"."""
        marks = (re.search(r"(?:^|/)(bridge/\w+\.py in .+)$", frame) for frame in _frames(self.traceback))
        return tuple(mark[1] for mark in marks if mark)

    @property
    def line(self) -> str:
        """Class and text in one line."""
        return " ".join(f"{self.kind}: {self.text}".split()) if self.text else self.kind


def read_raised(receipt: Receipt) -> Raised:
    """What a red receipt raised; read from its reason where it has no failure."""
    failure = receipt.failure
    if failure is not None:
        return _read_failure(failure, receipt.outcome)
    if said := _SAID.search(receipt.reason):
        return Raised(_bare(said["kind"]), said["text"], below_the_path(said["at"] or ""))
    if ended := _ENDED.search(receipt.reason):
        frame = f"{below_the_path(ended['at'])} in {ended['name']}" if ended["at"] else ""
        return Raised("timeout" if ended["hangs"] else ended["how"], ended[0], frame, died=True)
    if receipt.outcome is Outcome.TIMEOUT:
        return Raised("timeout", receipt.reason, died=True)
    begins = _BEGINS.match(receipt.reason)
    return Raised(_bare(begins[1]), begins[2]) if begins else Raised(receipt.outcome.value, receipt.reason)


def _read_failure(failure: Failure, outcome: Outcome) -> Raised:
    trace, kind = failure.traceback, _bare(failure.type)
    frame = below_the_path(failure.frame) or _innermost(trace)
    if outcome is Outcome.TIMEOUT or _BY_SIGNAL.match(failure.type):
        kind = "timeout" if outcome is Outcome.TIMEOUT else failure.type
        return Raised(kind, failure.message, frame, died=True, traceback=trace)
    first = _first_cause(trace)
    if first is None or (first[0], first[1].strip()) == (kind, failure.message.strip()):
        return Raised(kind, failure.message, frame, traceback=trace)
    return Raised(*first[:2], _innermost(first[2]), traceback=trace)


def _first_cause(trace: str) -> tuple[str, str, str] | None:
    """Class, text and block of the first exception of a chain; None without a chain.

    `raise X from Y` means that Y is the cause. An exception that was raised while another one was handled may be a
    second fault: then the first one counts only if a library or an accelerator raised it, whose errors are sticky.
    """
    pieces = re.split(f"({re.escape(_CAUSE_OF)}|{re.escape(_DURING)})", trace)
    chosen: tuple[str, str, str] | None = None
    for block, between in zip(pieces[-3::-2], pieces[-2::-2], strict=True):
        after = block.rpartition('  File "')[2]
        said = _LAST_LINE.search(after)
        text = after[said.start(2) :].strip() if said and said[2] is not None else ""
        if said is None or (between == _DURING and not (rows.CRASHES.search(text) or rows.said_by(text))):
            break
        chosen = _bare(said[1]), text, block
    return chosen


def below_the_path(frame: str) -> str:
    """A frame relative to its package and without the line: "package/file.py in function"."""
    file, _, function = frame.partition(" in ")
    file = re.sub(r":\d+$", "", file.strip())
    below = _INSTALLED.match(file) or _BELOW.search(file)
    shown = below[1] if below else file.rpartition("/")[2] if file.startswith("/") else file
    # The stand-in of the tests counts as the vendor.
    shown = re.sub(r"^megacpp_validate/", "", shown).removeprefix("tests/te_double/")
    return f"{shown} in {function}" if function and shown else shown


def _frames(trace: str) -> list[str]:
    """Frames of a traceback, outermost first; faulthandler writes the innermost first."""
    frames = [below_the_path(f"{found[1]} in {found[3]}") for found in _FILE.finditer(trace)]
    return frames[::-1] if "most recent call first" in trace else frames


def _innermost(trace: str) -> str:
    """The innermost frame of vendor code in a traceback, else the innermost one."""
    frames = _frames(trace)[::-1]
    of_vendors = (frame for frame in frames if _package(frame) in (*_VENDORS, "torch"))
    return next(of_vendors, next(iter(frames), ""))


def _package(frame: str) -> str:
    return re.split(r"[/.]", frame)[0]


def _bare(kind: str) -> str:
    return kind.rpartition(".")[2]


# --- signatures -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signature:
    """Identity of a failure, independent of module, installation, run and release.

    Attributes:
        what: exception class, signal, "timeout"; "fail" where checks failed and nothing was raised.
        frame: innermost frame of vendor code, relative to its package and without the line; empty for none.
        text: without paths, addresses, numbers, shapes, versions, process ids and cells. Names stay, because a missing
            symbol or keyword identifies a failure.
        checks: kinds of the failed checks, sorted, each once.
    """

    what: str
    frame: str = ""
    text: str = ""
    checks: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.checks:
            return f"{self.what}: {', '.join(self.checks)}"
        where = f" in {self.frame}" if self.frame else ""
        text = f": {self.text}" if self.text else ""
        return f"{self.what}{where}{text}"[:_SHOWN]


def sign(receipt: Receipt) -> Signature | None:
    """The signature of a receipt's failure; None for good receipts and `not-run`.

    A blocked receipt has the signature of the failure that its reason names.
    """
    if receipt.outcome.is_good or receipt.outcome is Outcome.NOT_RUN:
        return None
    if receipt.outcome is Outcome.FAIL:
        kinds = {check.shown for check in read_failed_checks(receipt)}
        return Signature("fail", checks=tuple(sorted(kinds)) or ("unknown",))
    raised = read_raised(receipt)
    if raised.died:  # the text is a log, which differs from run to run
        return Signature(raised.kind, raised.frame)
    return Signature(raised.kind, raised.vendor_frame, normalise(raised.text))


def is_same(one: Signature | None, other: Signature | None) -> bool:
    """Whether two failures are the same. Of checks: every kind of the later failure occurs in the earlier one."""
    if one is None or other is None:
        return False
    return set(other.checks) <= set(one.checks) if one.checks and other.checks else one == other


def normalise(text: str) -> str:
    """The words of a text that identify a failure: names of symbols, files and keywords, without numbers."""
    return " ".join(re.findall(r"(?<!\w)[^\W\d]\w*", rows.VARYING.sub(" ", text[:20_000])))


# --- causes -----------------------------------------------------------------------------------------------------------

# Raised outside of vendor code by the receiver of a wrong value: failed checks before it show the value.
_FOLLOWS: Final = frozenset(
    {"KeyError", "IndexError", "AttributeError", "AssertionError", "RuntimeError", "ValueError"}
)
_MISSING: Final = re.compile(
    r"unexpected keyword argument '(\w+)'|missing \d+ required (?:positional|keyword-only) arguments?: '(\w+)'|"
    r"(?<!'NoneType' object )(?<!'tuple' object )has no attribute '(\w+)'|"
    r"cannot import name '(\w+)'|entry point `(\w+)`|No module named '([\w.]+)'|"
    r"KeyError: '(\w+)'"
)


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a failure.

    Attributes:
        component: at fault below Transformer Engine; empty for none.
        missing: symbol, library, package, keyword or name that is missing or unknown; empty for none.
    """

    cause: Cause
    component: str = ""
    missing: str = ""


def diagnose(failure: Receipt | str) -> Diagnosis:
    """The cause of a red receipt, or of an exception as "class: text". Undefined for receipts that are not red."""
    if isinstance(failure, str):
        kind, _, text = failure.partition(": ")
        return _diagnose_raised(Raised(_bare(kind), text, died=bool(_BY_SIGNAL.match(kind))))
    checks = read_failed_checks(failure)
    if failure.outcome is Outcome.FAIL:
        return diagnose_checks(checks)
    raised = read_raised(failure)
    found = _diagnose_raised(raised)
    follows = raised.kind in _FOLLOWS and not raised.vendor_frame
    if checks and follows and found.cause is Cause.API and not found.component:
        seen = diagnose_checks(checks)
        return seen if seen.cause in (Cause.SILENT_FALLBACK, Cause.NUMERICS) else found
    return found


def diagnose_checks(checks: Sequence[FailedCheck]) -> Diagnosis:
    """The cause of failed checks where the probe itself raised nothing."""
    # Checks of FlashAttention and DeepGEMM carry their names.
    owners = {"fa3": "flash-attn", "fa4": "flash-attn", "deep_gemm": "DeepGEMM"}
    found = {next((owners[word] for word in check.name.split(".") if word in owners), "") for check in checks}
    component = found.pop() if len(found) == 1 else ""
    kinds = {check.kind for check in checks}
    if CheckKind.ENTRY in kinds:
        named = sorted({entry for check in checks if check.kind is CheckKind.ENTRY for entry in check.entries or ()})
        return Diagnosis(Cause.API, component, ", ".join(named))
    if raised := next((check.raised for check in checks if check.raised and check.kind is CheckKind.RAISED), ""):
        of_it = diagnose(raised)
        return of_it if of_it.component else replace(of_it, component=component)
    if CheckKind.BACKEND in kinds:
        return Diagnosis(Cause.SILENT_FALLBACK, component)
    if CheckKind.NUMBERS in kinds:
        # Every value is within bounds and differs from the requested recipe: another recipe ran.
        names = [check.name for check in checks if check.kind is CheckKind.NUMBERS]
        another = all(name.endswith((".applied", ".blocks")) for name in names)
        return Diagnosis(Cause.SILENT_FALLBACK if another else Cause.NUMERICS, component)
    return Diagnosis(Cause.PERFORMANCE if CheckKind.MEMORY in kinds else Cause.API, component)


def _diagnose_raised(raised: Raised) -> Diagnosis:
    """The cause of an exception, or of the end of a process."""
    found = _find_row(raised)
    if found:
        return found
    frame, text = rows.framed_by(raised.vendor_frame), raised.text
    if rows.SYSTEM.match(text):
        return Diagnosis(Cause.ENVIRONMENT, frame)
    if raised.kind in rows.CALL_ERRORS:
        refuses = frame and raised.kind in ("ValueError", "AssertionError", "NotImplementedError")
        return Diagnosis(Cause.ENVIRONMENT if refuses else Cause.API, frame, _missing(raised))
    if rows.CRASHES.search(text):
        return Diagnosis(Cause.BINARY, rows.framed_by(raised.frame))
    if not raised.died:
        return Diagnosis(Cause.API, frame, _missing(raised))
    cause = Cause.BINARY
    if raised.kind == "timeout":  # only the duration is known
        cause = Cause.PERFORMANCE
    elif raised.kind in FROM_OUTSIDE or raised.kind in ("SIGXCPU", "no-receipt"):  # memory, a scheduler, a full disk
        cause = Cause.ENVIRONMENT
    return Diagnosis(cause, rows.framed_by(raised.frame))


def _find_row(raised: Raised) -> Diagnosis | None:
    """By the tables: an error of the loader, a missing Python name, an error of a library, a required version."""
    said = f"{raised.kind}: {raised.text}"
    for rule in rows.RULES:
        if found := re.search(rule.pattern, said):
            name = found[1] if found.re.groups else ""
            owner = rows.owner_of(name) if rule.owned else rule.component
            # A part of Transformer Engine itself is missing: nothing below it is at fault.
            own = rule.owned and owner == rows.OWN
            return Diagnosis(Cause.BINARY if own else rule.cause, owner or rows.OWN, name)
    if package := next((found[1] for rule in rows.PYTHON_RULES if (found := re.search(rule, raised.text))), None):
        if package.startswith("transformer_engine_torch"):  # sources and extension come from two builds
            return Diagnosis(Cause.BINARY, rows.OWN, _missing(raised))
        if re.match(r"transformer_engine(?:_cu\d+)?(?:\.|$)", package):
            return Diagnosis(Cause.API, rows.OWN, _missing(raised))
        return Diagnosis(Cause.ENVIRONMENT, rows.owner_of(package) or package.partition(".")[0], _missing(raised))
    if component := rows.said_by(said):
        return Diagnosis(Cause.API if raised.kind in ("TypeError", "AttributeError") else Cause.ENVIRONMENT, component)
    if needs := rows.WANTS.search(raised.text):
        return Diagnosis(Cause.ENVIRONMENT, rows.WANTED.get(needs["name"].lower(), "flash-attn"))
    return None


def _missing(raised: Raised) -> str:
    found = _MISSING.search(f"{raised.kind}: {raised.text}")
    return next((group for group in found.groups() if group), "") if found else ""


# --- faults of the host -----------------------------------------------------------------------------------------------

# In the report of all ranks by the launcher (training/parallel/launch.py).
_AT_FAULT: Final = re.compile(r"At fault: rank (\d+(?:, \d+)*)\.")
_KILLED: Final = re.compile(r"^rank \d+ ended by (SIG(?:HUP|INT|KILL|TERM)|exit status (?:129|130|137|143))\b")
# Exit status of a shell or a container engine for a signal: 128 and its number (SIGHUP, SIGINT, SIGKILL, SIGTERM). A
# segmentation fault (139) does not come from outside.
_BY_NUMBER: Final = frozenset({"exit status 129", "exit status 130", "exit status 137", "exit status 143"})
NO_SPACE: Final = os.strerror(errno.ENOSPC)
NOT_STARTED: Final = "the process could not be started"  # as `environments.cell` reports it


def find_host_fault(receipt: Receipt) -> str:
    """The host fault that made a receipt red; empty where the receipt is good or red for another reason.

    Such a receipt is no evidence. Every failed check of it must show a host fault too.
    """
    outcome, failure = receipt.outcome, receipt.failure
    if outcome.is_good or outcome in (Outcome.NOT_RUN, Outcome.BLOCKED, Outcome.TIMEOUT):
        return ""
    found = [_read_host_fault(check.detail) for check in receipt.checks if not check.passed]
    if outcome is not Outcome.FAIL:
        if failure is not None and failure.type in FROM_OUTSIDE | _BY_NUMBER:
            found.append(f"its process was ended from outside, by {failure.type}")
        else:
            found.append(_read_host_fault(f"{failure.type}: {failure.message}" if failure else receipt.reason))
    return found[-1] if found and all(found) else ""


def find_retry_fault(receipt: Receipt) -> str:
    """The infrastructure fault of a receipt, as "name: what happened"; empty where the receipt is evidence."""
    if receipt.failure is not None and receipt.failure.type in FROM_OUTSIDE:
        return f"killed: its process was ended from outside, by {receipt.failure.type}"
    for fault, words in (("disk-full", NO_SPACE), ("not-started", NOT_STARTED)):
        if receipt.outcome is Outcome.NOT_RUN and words in receipt.reason:
            return f"{fault}: {receipt.reason}"
    return ""


def _read_host_fault(text: str) -> str:
    """The host fault that "class: text" names; empty for none, and where it also names a fault of the program."""
    if named := _AT_FAULT.search(text):  # the other ranks only lost contact
        ranks = named[1].replace(", ", "|")
        ended = re.findall(rf"^rank (?:{ranks}) (?:was ended|ended by) .*$", text, re.MULTILINE)
        said = re.findall(rf"^rank (?:{ranks}) said last .*", text, re.MULTILINE | re.DOTALL)
        text = "\n".join([*ended, *said])
    if rows.OF_THE_PROGRAM.search(text):
        return ""
    if killed := _KILLED.search(text):
        return f"a rank was ended from outside, by {killed[1]}"
    return next((row.says for row in rows.HOST_FAULTS if re.search(row.pattern, text)), "") or _find_full_gpu(text)


_MIB: Final = {"bytes": 2.0**-20, "KiB": 2.0**-10, "MiB": 1.0, "GiB": 2.0**10}


def _find_full_gpu(text: str) -> str:
    """Other processes hold more GPU memory than this process, which would fit if it ran alone.

    Reads the text of c10/cuda/CUDACachingAllocator.cpp. In a container the text may list this process by number, like
    the others: then its memory beside torch's allocator is unknown, and the answer is empty.
    """
    words = ("Tried to allocate ", r"total capaci?ty of ", "of which ", "this process has ")
    found = [re.search(rf"{word}(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)", text) for word in words]
    sizes = [float(one[1]) * _MIB[one[2]] for one in found if one]
    if "out of memory" not in text or len(sizes) < len(words):
        return ""
    needed, total, free, own = sizes
    others = total - free - own
    full = others > own and own + needed <= total
    return f"other processes have {others / 1024:.1f} of the GPU's {total / 1024:.1f} GiB" if full else ""
