"""The class of cause of one red receipt, and the component below Transformer Engine that is at fault, if one is.

Rules in order, as data where they are patterns: the first with an answer has it. What the exception says of itself
comes before where it was raised, and that before what its class is commonly raised for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ...evidence.receipt import FROM_OUTSIDE, Outcome, Receipt
from ...evidence.values import Cause
from .components import OWN, TORCH, framed_by, owner_of, said_by
from .failed_checks import CheckKind, FailedCheck, read_failed_checks
from .raised import Raised, read_raised


@dataclass(frozen=True)
class Diagnosis:
    """The class of a failure's cause.

    Attributes:
        component: what is at fault below Transformer Engine; empty where nothing is.
        missing: the symbol, library, package, keyword or name that is missing or not known; empty where none is.
    """

    cause: Cause
    component: str = ""
    missing: str = ""


@dataclass(frozen=True)
class Rule:
    """A pattern of what was raised.

    Attributes:
        pattern: searched in "class: text".
        cause: of it.
        owned: the first group is a symbol, library or package, and its owner is the component.
        component: where it is not `owned`.
        seen: where it comes from.
    """

    pattern: str
    cause: Cause
    owned: bool = False
    component: str | None = None
    seen: str = ""


# A symbol that a compiled part wants and does not find is a fault of how that part was built (binary), although another
# version of the library would cure it: the library itself does what it says. A library that answers with an error is
# one of the environment: each part is whole, and the two do not fit.
_LOADER: Final[tuple[Rule, ...]] = (
    Rule(r"undefined symbol:? [`']?(\w+)", Cause.BINARY, owned=True, seen="TE 2.14.1; DeepGEMM 0.2.1"),
    Rule(r"symbol lookup error.*?: [`']?(\w+)", Cause.BINARY, owned=True, seen="ld.so"),
    Rule(r"[Cc]annot (?:import|load|find) symbol:? [`']?(\w+)", Cause.BINARY, owned=True, seen="ld.so"),
    Rule(r"([\w.+-]+\.so[\w.]*): cannot open shared object", Cause.ENVIRONMENT, owned=True, seen="ld.so"),
    Rule(r"([\w.+-]+\.so[\w.]*): (?:file too short|invalid ELF header|cannot read)", Cause.BINARY, owned=True,
         seen="ld.so"),
    Rule(r"failed to map segment from shared object", Cause.ENVIRONMENT, component="file permissions",
         seen="ld.so: a folder mounted noexec"),
    Rule(r"version [`']((?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)' not found", Cause.BINARY, owned=True, seen="ld.so"),
    Rule(r"(\w+) shared object not found", Cause.ENVIRONMENT, owned=True, seen="transformer_engine/common/__init__.py"),
    Rule(r"[Cc]ould not find shared object file|package version mismatch\. Found|meta package installed", Cause.BINARY,
         seen="transformer_engine/common/__init__.py"),
    Rule(r"Multiple lib\w+ libraries found", Cause.ENVIRONMENT, component="second CUDA runtime", seen="TE 2.12.0"),
    Rule(r"[Mm]odule was compiled against NumPy|numpy\.core\.multiarray failed to import|_ARRAY_API not found|"
         r"numpy\.\w+ size changed", Cause.BINARY, component="numpy", seen="numpy"),
    Rule(r"Python version mismatch: module was compiled", Cause.BINARY, component="Python", seen="pybind11.h"),
    Rule(r"does not define module export function|initialization of \w+ failed without raising|"
         r'type "\w+" is already registered!', Cause.BINARY, seen="CPython importdl.c; pybind11.h"),
    Rule(r"no kernel image is available|invalid device function|NO_BINARY_FOR_GPU", Cause.BINARY,
         component="GPU architecture", seen="cudaError_t"),
    Rule(r"Torch not compiled with CUDA enabled", Cause.ENVIRONMENT, component=TORCH, seen="torch/cuda/__init__.py"),
    # Before any text that names a file: TE says so where its Python and its library are of two builds.
    Rule(r"dim == \S+ or dim == ", Cause.BINARY, component="DeepGEMM", seen="sgl-deep-gemm 0.1.7"),
    Rule(r"Illegal instruction", Cause.BINARY, seen="SIGILL"),
    # Whatever else the loader says of a library begins with its name.
    Rule(r"^(?:OSError|ImportError): (?:\S*/)?([\w.+-]+\.so[\w.]*): ", Cause.BINARY, owned=True,
         seen="glibc, elf/dl-load.c"),
)  # fmt: skip
_PYTHON: Final[tuple[Rule, ...]] = (
    Rule(r"No module named '([\w.]+)'", Cause.ENVIRONMENT, owned=True, seen="ModuleNotFoundError"),
    Rule(r"cannot import name '\w+' from (?:partially initialized module )?'([\w.]+)'", Cause.ENVIRONMENT, owned=True,
         seen="ImportError"),
    Rule(r"module '([\w.]+)' has no attribute", Cause.ENVIRONMENT, owned=True, seen="AttributeError"),
)  # fmt: skip
# A release that looks at a version and says what it needs: "requires cuDNN 9.12.0 or later, but ... is 9.1.0".
_WANTS: Final = re.compile(
    r"(?:requires?|needs?|wants?|expects?|minimum|at least|only supported (?:with|by|on)|upgrade)\b[^.;]{0,60}?"
    r"\b(?P<name>cuDNN|cuBLAS(?:Lt)?|NCCL|(?:NVIDIA |CUDA )?driver|CUDA|PyTorch|torch|flash[-_ ]?attn|FlashAttention|"
    r"triton|numpy|Python)\b[^.;]{0,30}?\d+\.\d+",
    re.IGNORECASE,
)
_WANTED: Final = {
    "cudnn": "cuDNN", "cublas": "cuBLAS", "cublaslt": "cuBLAS", "nccl": "NCCL", "driver": "driver",
    "nvidia driver": "driver", "cuda driver": "driver", "cuda": "CUDA runtime", "pytorch": TORCH, "torch": TORCH,
    "triton": "triton", "numpy": "numpy", "python": "Python",
}  # fmt: skip
_TE: Final = re.compile(r"transformer_engine(?:_cu\d+)?(?:\.|$)")
_EXTENSION: Final = re.compile(r"transformer_engine_torch")
_API: Final = frozenset({
    "TypeError", "AttributeError", "ImportError", "ModuleNotFoundError", "KeyError", "NameError", "AssertionError",
    "ValueError", "NotImplementedError", "IndexError", "VendorEntryMissing", "NoBackend", "DeprecationWarning",
    "WeightMismatch", "UnboundLocalError", "SyntaxError", "StopIteration", "LookupError", "FutureWarning",
})  # fmt: skip
# Raised by who was handed something wrong, outside of vendor code: where checks failed before it, they saw what.
_FOLLOWS: Final = frozenset(
    {"KeyError", "IndexError", "AttributeError", "AssertionError", "RuntimeError", "ValueError"}
)
_CRASHES: Final = re.compile(
    r"illegal memory access|misaligned address|unspecified launch failure|illegal instruction|invalid program counter|"
    r"hardware stack error|device-side assert|kernel image is invalid|invalid configuration argument|"
    r"CUDA (?:driver |runtime )?[Ee]rror: |invalid resource handle|CUDA_ERROR_ILLEGAL|Segmentation fault|Bus error"
)
# An error of the system over a file or a process is none of a call, unless the file is Transformer Engine's own.
_SYSTEM: Final = re.compile(r"\[Errno \d+\](?!.*transformer_engine)")
_MISSING: Final = re.compile(
    r"unexpected keyword argument '(\w+)'|missing \d+ required (?:positional|keyword-only) arguments?: '(\w+)'|"
    r"(?<!'NoneType' object )(?<!'tuple' object )has no attribute '(\w+)'|"
    r"cannot import name '(\w+)'|entry point `(\w+)`|No module named '([\w.]+)'|"
    r"KeyError: '(\w+)'"
)


def diagnose(receipt: Receipt) -> Diagnosis:
    """The class of cause of a red receipt; of one that is not red it says nothing of use."""
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
    """The class of cause of what was raised."""
    rules: tuple[Callable[[Raised], Diagnosis | None], ...] = (
        _by_loader, _by_python, _by_component, _by_version, _by_system, _by_argument, _by_crash, _by_end,
    )  # fmt: skip
    found = next((answer for rule in rules if (answer := rule(raised)) is not None), None)
    return found or Diagnosis(Cause.API, framed_by(raised.vendor_frame), _missing(raised))


def diagnose_checks(checks: Sequence[FailedCheck]) -> Diagnosis:
    """The class of cause of checks that failed, nothing having been raised beside them."""
    component = _of_names(checks)
    kinds = {check.kind for check in checks}
    if CheckKind.ENTRY in kinds:
        named = sorted({entry for check in checks if check.kind is CheckKind.ENTRY for entry in check.entries or ()})
        return Diagnosis(Cause.API, component, ", ".join(named))
    if raised := next((check.raised for check in checks if check.raised and check.kind is CheckKind.RAISED), ""):
        kind, _, text = raised.partition(": ")
        found = diagnose_raised(Raised(kind, text))
        return found if found.component else Diagnosis(found.cause, component, found.missing)
    if CheckKind.BACKEND in kinds:
        return Diagnosis(Cause.SILENT_FALLBACK, component)
    if CheckKind.NUMBERS in kinds:
        return Diagnosis(Cause.SILENT_FALLBACK if _is_another_recipe(checks) else Cause.NUMERICS, component)
    if CheckKind.MEMORY in kinds:
        return Diagnosis(Cause.PERFORMANCE, component)
    return Diagnosis(Cause.API, component)


def _is_another_recipe(checks: Sequence[FailedCheck]) -> bool:
    """Every value is in bounds, and is not that of the recipe that was asked for: another one ran."""
    numbers = [check.name for check in checks if check.kind is CheckKind.NUMBERS]
    return bool(numbers) and all(name.endswith((".applied", ".blocks")) for name in numbers)


def _of_names(checks: Sequence[FailedCheck]) -> str:
    """The component that every failed check is about: FlashAttention and DeepGEMM have checks of their own."""
    owners = {"fa3": "flash-attn", "fa4": "flash-attn", "deep_gemm": "DeepGEMM"}
    found = {next((owners[w] for w in check.name.split(".") if w in owners), "") for check in checks}
    return found.pop() if len(found) == 1 else ""


def _by_loader(raised: Raised) -> Diagnosis | None:
    said = f"{raised.kind}: {raised.text}"
    return next((_of_rule(rule, found) for rule in _LOADER if (found := re.search(rule.pattern, said))), None)


def _of_rule(rule: Rule, found: re.Match[str]) -> Diagnosis:
    name = found[1] if found.re.groups else ""
    if rule.owned:
        owner = owner_of(name)
        # A part of Transformer Engine itself that is not there: nothing around it is at fault.
        return Diagnosis(Cause.BINARY if owner == OWN else rule.cause, owner or OWN, name)
    return Diagnosis(rule.cause, rule.component or OWN, name)


def _by_component(raised: Raised) -> Diagnosis | None:
    """A library that answers with an error."""
    if component := said_by(f"{raised.kind}: {raised.text}"):
        return Diagnosis(Cause.API if raised.kind in ("TypeError", "AttributeError") else Cause.ENVIRONMENT, component)
    return None


def _by_version(raised: Raised) -> Diagnosis | None:
    """A release that says which version of something it needs."""
    if (found := _WANTS.search(raised.text)) is None:
        return None
    return Diagnosis(Cause.ENVIRONMENT, _WANTED.get(found["name"].lower(), "flash-attn"))


def _by_python(raised: Raised) -> Diagnosis | None:
    """A module or name of a Python package that is not there."""
    for rule in _PYTHON:
        found = re.search(rule.pattern, raised.text)
        if found is None:
            continue
        if _EXTENSION.match(found[1]):  # the sources and the compiled extension are of two builds
            return Diagnosis(Cause.BINARY, OWN, _missing(raised))
        if _TE.match(found[1]):
            return Diagnosis(Cause.API, OWN, _missing(raised))
        return Diagnosis(rule.cause, owner_of(found[1]) or found[1].partition(".")[0], _missing(raised))
    return None


def _by_system(raised: Raised) -> Diagnosis | None:
    """An error of the system, by its number."""
    found = _SYSTEM.match(raised.text)
    return Diagnosis(Cause.ENVIRONMENT, framed_by(raised.vendor_frame)) if found else None


def _by_argument(raised: Raised) -> Diagnosis | None:
    if raised.kind not in _API:
        return None
    component = framed_by(raised.vendor_frame)
    refuses = component and raised.kind in ("ValueError", "AssertionError", "NotImplementedError")
    return Diagnosis(Cause.ENVIRONMENT if refuses else Cause.API, component, _missing(raised))


def _by_crash(raised: Raised) -> Diagnosis | None:
    return Diagnosis(Cause.BINARY, framed_by(raised.frame)) if _CRASHES.search(raised.text) else None


def _by_end(raised: Raised) -> Diagnosis | None:
    """A process that ended by itself, or had to be."""
    if not raised.died:
        return None
    component = framed_by(raised.frame)
    if raised.kind == "timeout":  # nothing is known to be wrong but that it takes too long
        return Diagnosis(Cause.PERFORMANCE, component)
    if raised.kind in FROM_OUTSIDE or raised.kind in ("SIGXCPU", "no-receipt"):
        return Diagnosis(Cause.ENVIRONMENT, component)  # ended from outside: memory, a scheduler, a full disk
    return Diagnosis(Cause.BINARY, component)


def _missing(raised: Raised) -> str:
    found = _MISSING.search(f"{raised.kind}: {raised.text}")
    return next((group for group in found.groups() if group), "") if found else ""


__all__ = ["TORCH", "Diagnosis", "Rule", "diagnose", "diagnose_checks", "diagnose_raised"]
