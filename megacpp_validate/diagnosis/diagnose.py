"""What a failure means: its class of cause, the component below Transformer Engine at fault, and what to do.

What the exception says of itself comes before where it was raised, and that before what its class is commonly raised
for. All patterns stand in `rows.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..evidence.receipt import FROM_OUTSIDE, Failure, Outcome, Receipt
from ..evidence.values import Cause
from .checks import CheckKind, FailedCheck, read_failed_checks
from .host_faults import find_host_fault, find_retry_fault, read_host_fault
from .rows import (
    CALL_ERRORS,
    CRASHES,
    OWN,
    PYTHON_RULES,
    RULES,
    SYSTEM,
    TORCH,
    WANTED,
    WANTS,
    component_named,
    framed_by,
    owner_of,
    said_by,
)

# Packages whose frame says where a fault lies. Not torch: a fault of any layer passes through its `_call_impl` and its
# autograd engine, or does not, by how the probe calls it.
VENDORS: Final = (
    "transformer_engine", "transformer_engine_torch", "flash_attn", "flash_attn_interface", "flash_attn_3", "deep_gemm",
    "cutlass", "quack", "triton", "liger_kernel", "cudnn",
)  # fmt: skip
_FILE: Final = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')
_INSTALLED: Final = re.compile(r".*/(?:site|dist)-packages/(.+)")
_BELOW: Final = re.compile(rf"/((?:{'|'.join((*VENDORS, 'megacpp_validate'))})/.+)")  # an overlay, or a checkout
_CAUSE_OF: Final = "The above exception was the direct cause of the following exception:"
_DURING: Final = "During handling of the above exception, another exception occurred:"
_LAST_LINE: Final = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$", re.MULTILINE)
# An accelerator's error is sticky: whatever is done after it, cleaning up included, raises it or another one.
_ACCELERATOR: Final = re.compile(
    r"cu(?:DNN|BLAS(?:Lt)?) Error|CUDNN_STATUS|CUBLAS_STATUS|CUDA (?:[Ee]rror|driver)|NCCL|nccl\w+Error|"
    r"AcceleratorError|cuda\w*Error|undefined symbol|OutOfMemoryError"
)
BY_SIGNAL: Final = re.compile(r"^(?:SIG[A-Z0-9]+|signal \d+|exit status -?\d+|no-receipt)$")
_SAID: Final = re.compile(
    r"cannot be used: (?P<kind>\w[\w.]*): (?P<text>.*?)(?: \(at (?P<at>[^()]+)\))?\. Likely cause:"
)
_ENDED: Final = re.compile(
    r"(?:ends the interpreter \((?P<how>[^)]*)\)|(?P<hangs>did not end within \S+ s: it hangs))"
    r"(?: in (?P<at>\S+?):\d+ \((?P<name>[^)]*)\))?"
)


@dataclass(frozen=True)
class Raised:
    """What was raised, or how a process ended.

    Attributes:
        kind: exception class without its module, a signal, "exit status N", "timeout".
        text: as it came.
        frame: innermost frame of vendor code, torch's too: "package/file.py in function"; empty where there is none.
        died: it is how a process ended, and its text its last words.
        bridge: frames in the bridge, outermost first: "bridge/attention.py in forward".
        traceback: whole.
    """

    kind: str
    text: str
    frame: str = ""
    died: bool = False
    bridge: tuple[str, ...] = ()
    traceback: str = ""

    @property
    def vendor_frame(self) -> str:
        """The frame, where it is one that tells whose fault it is."""
        return self.frame if re.split(r"[/.]", self.frame)[0] in VENDORS else ""

    @property
    def frame_of_te(self) -> str:
        """The innermost frame but those of torch, where it is Transformer Engine's; empty where it is not.

        A call of the bridge that no longer fits ends in the bridge, or below it in torch's own `_call_impl`.
        """
        frames = [(below_the_path(found[1]), found[3]) for found in _FILE.finditer(self.traceback)]
        own = [f"{file} in {function}" for file, function in frames if not file.startswith("torch/")]
        return own[-1] if own and own[-1].startswith("transformer_engine/") else ""

    @property
    def line(self) -> str:
        """In one line."""
        return " ".join(f"{self.kind}: {self.text}".split()) if self.text else self.kind


def read_raised(receipt: Receipt) -> Raised:
    """What a red receipt raised; where it keeps no failure, what its reason tells."""
    failure = receipt.failure
    if failure is not None:
        return _of_failure(failure, receipt.outcome)
    if said := _SAID.search(receipt.reason):
        return Raised(_bare(said["kind"]), said["text"], below_the_path(said["at"] or ""))
    if ended := _ENDED.search(receipt.reason):
        frame = f"{below_the_path(ended['at'])} in {ended['name']}" if ended["at"] else ""
        return Raised("timeout" if ended["hangs"] else ended["how"], ended[0], frame, died=True)
    kind, text = _split(receipt.reason)
    if receipt.outcome is Outcome.TIMEOUT:
        return Raised("timeout", receipt.reason, died=True)
    return Raised(kind or receipt.outcome.value, text)


def _of_failure(failure: Failure, outcome: Outcome) -> Raised:
    frame, trace = below_the_path(failure.frame), failure.traceback
    if outcome is Outcome.TIMEOUT or BY_SIGNAL.match(failure.type) or failure.type == "timeout":
        kind = "timeout" if outcome is Outcome.TIMEOUT else failure.type
        return Raised(
            kind, failure.message, frame or _innermost(trace), died=True, bridge=_bridge(trace), traceback=trace
        )
    kind, text = _bare(failure.type), failure.message
    first = _first_cause(trace)
    if first is not None and (first[0], first[1].strip()) != (kind, text.strip()):
        kind, text, block = first
        return Raised(kind, text, _innermost(block), bridge=_bridge(block) or _bridge(trace), traceback=trace)
    return Raised(kind, text, frame or _innermost(trace), bridge=_bridge(trace), traceback=trace)


def _first_cause(trace: str) -> tuple[str, str, str] | None:
    """Class, text and block of what a chain began with; None where it is no chain, or began with something else.

    `raise X from Y` means that Y is the cause. An exception that came up while another was handled may be a second
    fault: there the first one counts only if it is an accelerator's.
    """
    pieces = re.split(f"({re.escape(_CAUSE_OF)}|{re.escape(_DURING)})", trace)
    chosen: tuple[str, str, str] | None = None
    for index in range(len(pieces) - 3, -1, -2):
        said = _end_of(pieces[index])
        if said is None:
            break
        if pieces[index + 1] == _DURING and not _ACCELERATOR.search(f"{said[0]}: {said[1]}"):
            break
        chosen = (*said, pieces[index])
    return chosen


def _end_of(block: str) -> tuple[str, str] | None:
    """Class and text that a block of a traceback ends with."""
    _, _, after = block.rpartition('  File "')
    found = None
    for line in _LAST_LINE.finditer(after):
        found = line
        break
    if found is None:
        return None
    text = after[found.start(2) :] if found[2] is not None else ""
    return _bare(found[1]), text.strip()


def below_the_path(frame: str) -> str:
    """A frame from its package on and without the line: "package/file.py in function"."""
    file, _, function = frame.partition(" in ")
    file = re.sub(r":\d+$", "", file.strip())
    below = _INSTALLED.match(file) or _BELOW.search(file)
    shown = below[1] if below else file.rpartition("/")[2] if file.startswith("/") else file
    shown = re.sub(r"^megacpp_validate/", "", shown)
    shown = re.sub(r"^selftest/te_double/", "", shown)  # the double stands for the vendor
    return f"{shown} in {function}" if function and shown else shown


def _innermost(trace: str) -> str:
    """The innermost frame of vendor code in a traceback; as faulthandler writes it, the innermost comes first."""
    frames = [(below_the_path(found[1]), found[3]) for found in _FILE.finditer(trace)]
    if "most recent call first" in trace:
        frames.reverse()
    for file, function in reversed(frames):
        if re.split(r"[/.]", file)[0] in (*VENDORS, "torch"):
            return f"{file} in {function}"
    return f"{frames[-1][0]} in {frames[-1][1]}" if frames else ""


def _bridge(trace: str) -> tuple[str, ...]:
    frames = [(found[1], found[3]) for found in _FILE.finditer(trace)]
    if "most recent call first" in trace:
        frames.reverse()
    marks = (re.search(r"(?:^|/)(bridge/\w+\.py)$", file) for file, _ in frames)
    return tuple(f"{mark[1]} in {name}" for mark, (_, name) in zip(marks, frames, strict=True) if mark)


def _bare(kind: str) -> str:
    return kind.rpartition(".")[2]


def _split(reason: str) -> tuple[str, str]:
    """Class and text where a reason begins with an exception."""
    found = re.match(r"([A-Za-z_][\w.]*(?:Error|Exception|Exit|Missing|Interrupt)): (.*)", reason, re.DOTALL)
    return (_bare(found[1]), found[2]) if found else ("", reason)


_TE: Final = re.compile(r"transformer_engine(?:_cu\d+)?(?:\.|$)")
# Raised by who was handed something wrong, outside of vendor code: where checks failed before it, they saw what.
_FOLLOWS: Final = frozenset(
    {"KeyError", "IndexError", "AttributeError", "AssertionError", "RuntimeError", "ValueError"}
)
_MISSING: Final = re.compile(
    r"unexpected keyword argument '(\w+)'|missing \d+ required (?:positional|keyword-only) arguments?: '(\w+)'|"
    r"(?<!'NoneType' object )(?<!'tuple' object )has no attribute '(\w+)'|"
    r"cannot import name '(\w+)'|entry point `(\w+)`|No module named '([\w.]+)'|"
    r"KeyError: '(\w+)'"
)
_ADVICE: Final = {
    Cause.ENVIRONMENT: "install the version of the component that this release needs",
    Cause.BINARY: "reinstall or rebuild the compiled parts for this stack as one",
    Cause.API: "adapt the call of the bridge, or stay on the release before",
    Cause.NUMERICS: "stay on the release before, or take the native path until the check is in its bounds again",
    Cause.SILENT_FALLBACK: "mend what the requested backend was passed over for",
    Cause.PERFORMANCE: "run the cell alone with a longer limit, to tell slow from hung",
    Cause.BOUNDARY: "turn features off one by one in both releases (`nox -s ablate`)",
}


@dataclass(frozen=True)
class Diagnosis:
    """What a failure means.

    Attributes:
        component: at fault below Transformer Engine; empty where none is.
        missing: the symbol, library, package, keyword or name that is missing or unknown; empty where none is.
        seen: where the row comes from; empty where no row but a general rule has the answer.
        of_the_host: the host did it: the failure says nothing of the release.
        retry: an infrastructure fault: the cell may be run again.
    """

    cause: Cause
    component: str = ""
    missing: str = ""
    seen: str = ""
    of_the_host: bool = False
    retry: bool = False

    @property
    def step(self) -> str:
        """Identifier of the next step: the class of cause, and the component where its advice is its own."""
        own = component_named(self.component).advice if self.component else ""
        return f"{self.cause.value}/{self.component.lower().replace(' ', '-')}" if own else self.cause.value

    @property
    def next_step(self) -> str:
        """What to do, as far as the failure alone shows it; `next_steps.next_step` knows versions and releases, too."""
        return (component_named(self.component).advice if self.component else "") or _ADVICE[self.cause]


def diagnose(failure: Receipt | str) -> Diagnosis:
    """What a red receipt, or an exception as "class: text", means. Of a receipt that is not red, nothing of use."""
    if isinstance(failure, str):
        kind, _, text = failure.partition(": ")
        raised = Raised(kind, text, died=bool(BY_SIGNAL.match(kind)) or kind == "timeout")
        return replace(diagnose_raised(raised), of_the_host=bool(read_host_fault(failure)))
    retry = find_retry_fault(failure) is not None
    return replace(diagnose_receipt(failure), of_the_host=bool(find_host_fault(failure)), retry=retry)


def diagnose_receipt(receipt: Receipt) -> Diagnosis:
    """The cause of a red receipt, whoever brought it about."""
    if receipt.outcome is Outcome.FAIL:
        return diagnose_checks(read_failed_checks(receipt))
    raised = read_raised(receipt)
    found = diagnose_raised(raised)
    if found.cause is Cause.API and not found.component and may_follow(raised):
        checks = read_failed_checks(receipt)
        seen = diagnose_checks(checks) if checks else found
        return seen if seen.cause in (Cause.SILENT_FALLBACK, Cause.NUMERICS) else found
    return found


def may_follow(raised: Raised) -> bool:
    """Whether it is what checks that failed before it lead to: raised outside of vendor code, over a value."""
    return raised.kind in _FOLLOWS and not raised.vendor_frame


def diagnose_raised(raised: Raised) -> Diagnosis:
    """The cause of an exception, or of how a process ended."""
    found = _by_rule(raised) or _by_python(raised) or _by_component(raised)
    if found:
        return found
    frame, text = framed_by(raised.vendor_frame), raised.text
    if SYSTEM.match(text):
        return Diagnosis(Cause.ENVIRONMENT, frame)
    if raised.kind in CALL_ERRORS:
        refuses = frame and raised.kind in ("ValueError", "AssertionError", "NotImplementedError")
        return Diagnosis(Cause.ENVIRONMENT if refuses else Cause.API, frame, _missing(raised))
    if CRASHES.search(text):
        return Diagnosis(Cause.BINARY, framed_by(raised.frame))
    if raised.died:
        return Diagnosis(_cause_of_end(raised.kind), framed_by(raised.frame))
    return Diagnosis(Cause.API, frame, _missing(raised))


def diagnose_checks(checks: Sequence[FailedCheck]) -> Diagnosis:
    """The cause of checks that failed, where nothing was raised beside them."""
    component = _owner_of_checks(checks)
    kinds = {check.kind for check in checks}
    if CheckKind.ENTRY in kinds:
        named = sorted({entry for check in checks if check.kind is CheckKind.ENTRY for entry in check.entries or ()})
        return Diagnosis(Cause.API, component, ", ".join(named))
    if raised := next((check.raised for check in checks if check.raised and check.kind is CheckKind.RAISED), ""):
        kind, _, text = raised.partition(": ")
        found = diagnose_raised(Raised(kind, text))
        return found if found.component else replace(found, component=component)
    if CheckKind.BACKEND in kinds:
        return Diagnosis(Cause.SILENT_FALLBACK, component)
    if CheckKind.NUMBERS in kinds:
        # Every value is in bounds, and is not that of the recipe that was asked for: another recipe ran.
        names = [check.name for check in checks if check.kind is CheckKind.NUMBERS]
        another = all(name.endswith((".applied", ".blocks")) for name in names)
        return Diagnosis(Cause.SILENT_FALLBACK if another else Cause.NUMERICS, component)
    return Diagnosis(Cause.PERFORMANCE if CheckKind.MEMORY in kinds else Cause.API, component)


def _owner_of_checks(checks: Sequence[FailedCheck]) -> str:
    """The component that every failed check is about: FlashAttention and DeepGEMM have checks of their own."""
    owners = {"fa3": "flash-attn", "fa4": "flash-attn", "deep_gemm": "DeepGEMM"}
    found = {next((owners[w] for w in check.name.split(".") if w in owners), "") for check in checks}
    return found.pop() if len(found) == 1 else ""


def _by_rule(raised: Raised) -> Diagnosis | None:
    said = f"{raised.kind}: {raised.text}"
    for rule in RULES:
        if (found := re.search(rule.pattern, said)) is None:
            continue
        name = found[1] if found.re.groups else ""
        if not rule.owned:
            return Diagnosis(rule.cause, rule.component, name, rule.seen)
        owner = owner_of(name)
        # A part of Transformer Engine itself that is missing: nothing around it is at fault.
        return Diagnosis(Cause.BINARY if owner == OWN else rule.cause, owner or OWN, name, rule.seen)
    return None


def _by_python(raised: Raised) -> Diagnosis | None:
    """A module or name of a Python package that is missing."""
    package = next((found[1] for rule in PYTHON_RULES if (found := re.search(rule, raised.text))), None)
    if package is None:
        return None
    if package.startswith("transformer_engine_torch"):  # the sources and the compiled extension are of two builds
        return Diagnosis(Cause.BINARY, OWN, _missing(raised))
    if _TE.match(package):
        return Diagnosis(Cause.API, OWN, _missing(raised))
    return Diagnosis(Cause.ENVIRONMENT, owner_of(package) or package.partition(".")[0], _missing(raised))


def _by_component(raised: Raised) -> Diagnosis | None:
    """A library that answers with an error, or a release that says which version of a library it needs."""
    if component := said_by(f"{raised.kind}: {raised.text}"):
        cause = Cause.API if raised.kind in ("TypeError", "AttributeError") else Cause.ENVIRONMENT
        return Diagnosis(cause, component, seen=component_named(component).seen)
    if (found := WANTS.search(raised.text)) is None:
        return None
    return Diagnosis(Cause.ENVIRONMENT, WANTED.get(found["name"].lower(), "flash-attn"))


def _cause_of_end(kind: str) -> Cause:
    """Of a process that ended by itself, or had to be ended."""
    if kind == "timeout":  # all that is known is that the cell takes too long
        return Cause.PERFORMANCE
    outside = kind in FROM_OUTSIDE or kind in ("SIGXCPU", "no-receipt")  # memory, a scheduler, a full disk
    return Cause.ENVIRONMENT if outside else Cause.BINARY


def _missing(raised: Raised) -> str:
    found = _MISSING.search(f"{raised.kind}: {raised.text}")
    return next((group for group in found.groups() if group), "") if found else ""


__all__ = ["TORCH", "Diagnosis", "diagnose", "diagnose_checks", "diagnose_raised", "diagnose_receipt", "may_follow"]
