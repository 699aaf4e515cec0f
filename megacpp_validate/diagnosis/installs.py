"""Why Transformer Engine could not be imported: the rows that turn the facts of a failed import into a likely cause.

The bridge keeps the facts (`te_import_failure()` of its module `imports`): what was raised and from what, and which of
the three parts (Python sources, core library, torch extension) lie on the path. TE's own messages name the symptom; the
cause is often in which parts are there, of which release, and where. Rows that look at a file do so on this host: where
the environment lies elsewhere they match nothing, and the rows below them count.

`ROWS` holds what depends on the installation; the first row that matches has the answer. What the exception alone says
(a missing symbol, library or package, a driver that is too old) is in the table of failures, `rows.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

from ..evidence.values import Cause, Frozen
from .diagnose import diagnose
from .next_steps import TE_TITLE, advise

SOURCES: Final = "transformer-engine"
CORES: Final = ("transformer-engine-cu12", "transformer-engine-cu13")
EXTENSION: Final = "transformer-engine-torch"

INSTALL: Final = 'pip install --no-build-isolation "transformer-engine[pytorch]==VERSION"'
REINSTALL: Final = f"reinstall: uninstall all parts, then {INSTALL}"
UNINSTALL: Final = f"uninstall all of them, then {INSTALL}"


class Fault(Frozen, extra="ignore"):
    """One exception of a failed import.

    Attributes:
        kinds: its class, then the classes that one derives from.
        text: in one line.
        name: the module or attribute that it names; empty for none.
        file: the file that it is about; empty for none.
        line: of a syntax error; 0 for none.
    """

    kinds: tuple[str, ...]
    text: str
    name: str = ""
    file: str = ""
    line: int = 0

    def is_a(self, *kinds: type[BaseException]) -> bool:
        """Whether it is of one of these built-in classes."""
        return any(kind.__name__ in self.kinds for kind in kinds)


class Install(Frozen, extra="ignore"):
    """What of Transformer Engine lay on the path of the process; `bridge/vendor.py` has the attributes."""

    versions: dict[str, str]
    copies: tuple[str, ...]
    has_core: bool
    has_extension: bool
    unreadable: tuple[str, ...] = ()
    has_record: bool = True

    @property
    def core(self) -> str | None:
        """Name of the installed core library's distribution."""
        return next((name for name in CORES if name in self.versions), None)


class ImportFailure(Frozen):
    """The facts of a failed import, as the bridge writes them."""

    raised: tuple[Fault, ...]
    handled: tuple[Fault, ...] = ()
    install: Install


Words = Mapping[str, object]
Match = Callable[[Fault, Install], Words | None]


class Row(NamedTuple):
    """One cause: what it matches, and what is said of it with the words that the match found.

    Attributes:
        matches: a pattern of the exception's text, whose named groups are the words, or a function that returns the
            words, None where the row does not match.
        likely, next_step: with the words as {names}.
    """

    matches: str | Match
    likely: str
    next_step: str


def explain_reason(reason: str, failure: ImportFailure) -> str:
    """A reason of the bridge with the likely cause and the next step of a failed import in it."""
    install = failure.install
    unknown = (
        "an install that this project has not seen yet",
        f"read the exception above, compare with a clean install: {INSTALL}",
    )
    likely, step = _find(failure.raised, install) or _find(failure.handled, install) or unknown
    step = step.replace("VERSION", install.versions.get(SOURCES, "VERSION").partition("+")[0])
    said, _, rest = reason.rpartition(" Found: ")
    found = rest.partition(". Next step: ")[0]
    return f"{said} Likely cause: {likely}. Next step: {step}. Found: {found}."


def _find(faults: tuple[Fault, ...], install: Install) -> tuple[str, str] | None:
    """Likely cause and next step of the first row that matches any of the exceptions."""
    for row, fault in product(ROWS, faults):
        if callable(row.matches):
            words = row.matches(fault, install)
        else:
            found = re.search(row.matches, fault.text)
            words = found.groupdict() if found else None
        if words is not None:
            return row.likely.format_map(words), row.next_step.format_map(words)
    return None


# --- files that cannot be used ----------------------------------------------------------------------------------------


def _leftovers(fault: Fault, install: Install) -> Words | None:
    missing = fault.name if fault.is_a(ModuleNotFoundError) else ""
    if missing == EXTENSION.replace("-", "_") or not install.copies:
        return None
    inner = [Path(install.copies[0], *parts, "__init__.py") for parts in ((), ("pytorch",), ("common",))]
    of_te = missing.startswith("transformer_engine")
    if not of_te and all(file.is_file() for file in inner):
        return None
    return {"folder": install.copies[0], "what": f"its module {missing}" if of_te else "its sources"}


# --- modules, names and metadata --------------------------------------------------------------------------------------


def _other_module(fault: Fault, _: Install) -> dict[str, str] | None:
    """A missing module that is none of Transformer Engine's."""
    if not fault.is_a(ModuleNotFoundError) or not fault.name or fault.name.startswith("transformer_engine"):
        return None
    return {"missing": fault.name.partition(".")[0]}


def _two_copies(_: Fault, install: Install) -> Words | None:
    first, *others = install.copies or ("",)
    return {"first": first, "hidden": ", ".join(others)} if others else None


def _two_builds(fault: Fault, _: Install) -> Words | None:
    found = re.search(r"Multiple files found: \[(.+?)\](?!\w)", fault.text)
    return {"files": re.sub(r"PosixPath\('(.+?)'\)", r"\1", found[1])} if found else None


# --- libraries and parts ----------------------------------------------------------------------------------------------


def _known(fault: Fault, _: Install) -> Words | None:
    """What the table of failures says of the exception alone."""
    said = f"{fault.kinds[0]}: {fault.text}"
    step, found = advise(said, TE_TITLE, "the installed torch", "", ""), diagnose(said)
    if not step or fault.is_a(ModuleNotFoundError):
        return None
    component = found.component.removesuffix(" ABI") or "build"
    likely = f"Transformer Engine was built for another {component}"
    if found.cause is Cause.ENVIRONMENT:
        likely = f"{component} does not fit or is not installed"
    return {"likely": f"{likely}{f' ({found.missing} is missing)' if found.missing else ''}", "step": step}


def _parts_missing(_: Fault, install: Install) -> Words | None:
    """Compiled parts that are neither installed nor beside a copy."""
    parts = {
        "core library (transformer_engine_cu12 or _cu13)": install.has_core or install.core is not None,
        "torch extension (transformer_engine_torch)": install.has_extension or EXTENSION in install.versions,
    }
    missing = [name for name, here in parts.items() if not here]
    return {"missing": " and no ".join(missing)} if missing else None


def _different_releases(_: Fault, install: Install) -> Words | None:
    listed = ", ".join(f"{name} {version}" for name, version in install.versions.items())
    return {"listed": listed} if len(set(install.versions.values())) > 1 else None


def _library_gone(_: Fault, install: Install) -> Words | None:
    gone = [name for name, here in ((install.core, install.has_core), (EXTENSION, install.has_extension)) if not here]
    return {"gone": " and ".join(map(str, gone))} if gone else None


def _when(*kinds: type[BaseException], install: Callable[[Install], object] = lambda _: True) -> Match:
    """An exception of one of these classes over such an install."""

    def match(fault: Fault, found: Install) -> Words | None:
        words = {"unreadable": ", ".join(found.unreadable), "file": fault.file, "line": fault.line}
        return words if fault.is_a(*kinds) and install(found) else None

    return match


def _absent(fault: Fault, install: Install) -> Words | None:
    absent = fault.is_a(ModuleNotFoundError) and fault.name == "transformer_engine" and not install.copies
    return {} if absent else None


# What the exception itself says comes before what lies on the path.
ROWS: Final = (
    Row(_absent, "Transformer Engine is not installed in this interpreter", f"{INSTALL}, or stay native"),
    Row(_when(SystemExit), "code that runs while it is imported ends the program, which a library must not do",
        "look at the line named above; a plugin or a patched file does that rather than a release"),
    Row(_leftovers, "the folder {folder} lacks {what}: leftovers of an uninstall, or a damaged install",
        f"remove that folder, then {INSTALL}"),
    Row(_when(SyntaxError), "{file} is damaged (line {line}): cut short, edited, or written for a newer Python",
        REINSTALL),
    Row(r"(?P<file>\S+?\.so[\w.]*): (?P<what>file too short|invalid ELF header|cannot read file data)",
        "{file} is damaged ({what}), as a full disk or a broken copy leaves it", REINSTALL),
    Row(r"No module named '(?P<name>(?:cutlass|quack|tvm_ffi)\b[^']*)'",
        "flash-attn-4 is installed without the CuTe DSL (`{name}` is missing), and this release of Transformer Engine "
        "imports it as soon as it sees it",
        "pip install nvidia-cutlass-dsl quack-kernels, or pip uninstall flash-attn-4"),
    Row(_other_module, "Transformer Engine needs the Python package `{missing}`", "pip install {missing}"),
    Row(_when(BaseException, install=lambda install: install.unreadable),
        "the metadata of {unreadable} cannot be read: damaged, or deleted", REINSTALL),
    Row(_when(TypeError, install=lambda install: not install.has_record),
        f"the metadata of {SOURCES} has no list of files (RECORD), which this release reads while it is imported: not "
        "installed by pip, or damaged", REINSTALL),
    Row(_two_copies,
        "a second copy of Transformer Engine: {first} comes first on the path and hides {hidden}; sources of one are "
        "loaded with libraries or metadata of the other",
        "remove one of them, or run from another folder (python -c 'import sys; print(sys.path)' shows the order)"),
    Row(_two_builds, "the libraries of two builds lie beside each other: {files}",
        "remove the one of the older build"),
    Row(r"cannot import name '(?P<name>\w+)' from (?:partially initialized module )?"
        r"'(?P<owner>transformer_engine\.[\w.]+)'", "this release moved, renamed or never had `{owner}.{name}`",
        "run the upgrade canary between a release that has it and this one"),
    Row(_known, "{likely}", "{step}"),
    Row(_different_releases,
        "the parts of Transformer Engine are of different releases ({listed}); a +local suffix counts", UNINSTALL),
    Row(_parts_missing, "Transformer Engine is incomplete: no {missing}", INSTALL),
    Row(_library_gone, "{gone} is installed, and its library file is not there", REINSTALL),
)  # fmt: skip
