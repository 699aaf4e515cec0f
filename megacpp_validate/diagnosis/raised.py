"""What a red receipt raised: the first cause of a chain, and the frames that tell whose it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ..evidence.receipt import Failure, Outcome, Receipt

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
