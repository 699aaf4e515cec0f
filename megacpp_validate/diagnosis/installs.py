"""Why Transformer Engine could not be imported: the rows that turn the facts of a failed import into a likely cause.

The bridge keeps the facts (`te_import_failure()` of its module `imports`): what was raised and from what, and which of
the three parts (Python sources, core library, torch extension) lie on the path. TE's own messages name the symptom; the
cause is often in which parts are there, of which release, and where. Rows that look at a file do so on this host: where
the environment lies elsewhere they match nothing, and the rows below them count.

`ROWS` holds what depends on the installation; the first row that matches has the answer. What the exception alone says
(a missing symbol, library or package, a driver that is too old) is in the table of failures, `rows.py`.
"""

from __future__ import annotations

import errno
import os
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
RENAME: Final = "rename that file, or run from another folder (python -c 'import sys; print(sys.path)' shows the order)"


class Fault(Frozen):
    """One exception of a failed import.

    Attributes:
        kinds: its class, then the classes that one derives from.
        text: in one line.
        name: the module or attribute that it names; empty for none.
        file: the file that it is about; empty for none.
        number: the system's error number; 0 for none.
        line: of a syntax error; 0 for none.
        owner: name of what lacks the attribute; empty for none.
        root_loaded, root_file: whether the top-level module of `name` was loaded, and its file where it is no package.
    """

    kinds: tuple[str, ...]
    text: str
    name: str = ""
    file: str = ""
    number: int = 0
    line: int = 0
    owner: str = ""
    root_loaded: bool = False
    root_file: str = ""

    def is_a(self, *kinds: type[BaseException]) -> bool:
        """Whether it is of one of these built-in classes."""
        return any(kind.__name__ in self.kinds for kind in kinds)


class Install(Frozen):
    """What of Transformer Engine lay on the path of the process; `bridge/vendor.py` has the attributes."""

    versions: dict[str, str]
    copies: tuple[str, ...]
    has_core: bool
    has_extension: bool
    unreadable: tuple[str, ...] = ()
    has_record: bool = True
    in_the_way: tuple[str, ...] = ()

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


# What the loader puts before the system's own words (glibc, elf/dl-load.c).
_LOADER: Final = re.compile(r"(\S+): (?:cannot open shared object file|cannot read file data)[^:]*: (.+)")


def _system(fault: Fault, _: Install) -> Words | None:
    """The system refuses a file that is there, by the number of its error or in the words of the loader."""
    absent, found = os.strerror(errno.ENOENT), _LOADER.search(fault.text)
    if fault.is_a(OSError) and fault.number not in (0, errno.ENOENT):
        return {"file": fault.file or "a file of it", "error": os.strerror(fault.number)}
    gone = found and found[2].startswith(absent) and not Path(found[1]).is_file()  # not one of another architecture
    return {"file": found[1], "error": found[2]} if found and not gone and fault.is_a(OSError, ImportError) else None


def _shadowed(_: Fault, install: Install) -> Words | None:
    if not install.copies or not Path(install.copies[0]).is_file():
        return None
    first, *others = install.copies
    return {"file": first, "hides": f" and hides {', '.join(others)}" if others else ""}


def _leftovers(fault: Fault, install: Install) -> Words | None:
    missing = fault.name if fault.is_a(ModuleNotFoundError) else ""
    if missing == EXTENSION.replace("-", "_") or not install.copies:
        return None
    inner = [Path(install.copies[0], *parts, "__init__.py") for parts in ((), ("pytorch",), ("common",))]
    of_te = missing.startswith("transformer_engine")
    if not of_te and all(file.is_file() for file in inner):
        return None
    return {"folder": install.copies[0], "what": f"its module {missing}" if of_te else "its sources"}


def _damaged_source(fault: Fault, _: Install) -> Words | None:
    if not fault.is_a(SyntaxError):
        return None
    line = f" (line {fault.line})" if fault.line else ""
    return {"file": f"{fault.file or 'a source file'} is damaged{line}"}


def _emptied(fault: Fault, _: Install) -> Words | None:
    """A source file without a byte in it, from which a name is wanted."""
    file = Path(fault.file)
    empty = "transformer_engine" in file.parts and file.is_file() and not file.stat().st_size
    return {"file": fault.file} if empty and fault.is_a(ImportError, AttributeError) else None


# --- modules, names and metadata --------------------------------------------------------------------------------------


def _module_hidden(fault: Fault, install: Install) -> Words | None:
    words = _other_module(fault, install)
    return {**words, "file": fault.root_file} if words and fault.root_file and fault.name != words["missing"] else None


def _module_gone(fault: Fault, install: Install) -> Words | None:
    words = _other_module(fault, install)
    return {**words, "name": fault.name} if words and fault.root_loaded and fault.name != words["missing"] else None


def _other_module(fault: Fault, _: Install) -> dict[str, str] | None:
    """A missing module that is none of Transformer Engine's."""
    if not fault.is_a(ModuleNotFoundError) or not fault.name or fault.name.startswith("transformer_engine"):
        return None
    return {"missing": fault.name.partition(".")[0]}


def _flash_attention_4(fault: Fault, _: Install) -> Words | None:
    of_it = fault.is_a(ImportError) and fault.name.partition(".")[0] in {"cutlass", "quack", "tvm_ffi"}
    return {"name": fault.name} if of_it else None


def _no_metadata(fault: Fault, install: Install) -> Words | None:
    wanted = re.search(r"Could not find `?transformer.engine`?\.?$|No package metadata was found", fault.text)
    if wanted is None or SOURCES in install.versions or not install.copies:
        return None
    return {"folder": install.copies[0]}


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


def _when(*kinds: type[BaseException], text: str = "", install: Callable[[Install], bool] = lambda _: True) -> Match:
    """An exception of one of these classes, whose text matches, over such an install."""

    def match(fault: Fault, found: Install) -> Words | None:
        holds = (not kinds or fault.is_a(*kinds)) and re.search(text, fault.text) and install(found)
        return {"unreadable": ", ".join(found.unreadable)} if holds else None

    return match


def _absent(fault: Fault, install: Install) -> Words | None:
    absent = fault.is_a(ModuleNotFoundError) and fault.name == "transformer_engine" and not install.copies
    return {} if absent else None


# What the exception itself says comes before what lies on the path.
ROWS: Final = (
    Row(_absent, "Transformer Engine is not installed in this interpreter", f"{INSTALL}, or stay native"),
    Row(_when(SystemExit), "code that runs while it is imported ends the program, which a library must not do",
        "look at the line named above; a plugin or a patched file does that rather than a release"),
    Row(_system, "{file} is there, and the system refuses it ({error})",
        "give this user the rights on it, make room on its disk, look at its mount (dmesg), or raise `ulimit -n`: "
        "whichever that error names; `No such file` of a file that is there means another architecture: reinstall"),
    Row(_shadowed, "the file {file} has the name of the package, comes first on the path{hides}", RENAME),
    Row(_leftovers, "the folder {folder} lacks {what}: leftovers of an uninstall, or a damaged install",
        f"remove that folder, then {INSTALL}"),
    Row(_damaged_source, "{file}: cut short, edited, or written for a newer Python", REINSTALL),
    Row(_when(EOFError, ValueError, text=r"marshal|null bytes"), "a source or compiled Python file is damaged",
        f"remove its __pycache__ folders, or {REINSTALL}"),
    Row(r"(?P<file>\S+?\.so[\w.]*): (?P<what>file too short|invalid ELF header|cannot read file data)",
        "{file} is damaged ({what}), as a full disk or a broken copy leaves it", REINSTALL),
    Row(r"is already registered!|does not define module export function|initialization of \w+ failed without raising|"
        r"Python version mismatch",
        "the torch extension was built for another Python or is damaged, or two builds of it are loaded", REINSTALL),
    Row(_emptied, "{file} is empty, as a full disk or a copy cut short leaves it", REINSTALL),
    Row(_flash_attention_4,
        "flash-attn-4 is installed without the CuTe DSL (`{name}` is missing), and this release of Transformer Engine "
        "imports it as soon as it sees it",
        "pip install nvidia-cutlass-dsl quack-kernels, or pip uninstall flash-attn-4"),
    Row(_module_hidden, "the file {file} has the name of the package `{missing}` and hides it", RENAME),
    Row(_module_gone, "this `{missing}` has no module {name}", "use the {missing} that this release was made for"),
    Row(_other_module, "Transformer Engine needs the Python package `{missing}`", "pip install {missing}"),
    Row(_when(install=lambda install: bool(install.unreadable)),
        "the metadata of {unreadable} cannot be read: damaged, or deleted", REINSTALL),
    Row(_no_metadata,
        "the sources in {folder} have no metadata (dist-info) beside them, which this release reads while it is "
        "imported: copied by hand, or half uninstalled", REINSTALL),
    Row(_when(TypeError, install=lambda install: not install.has_record),
        f"the metadata of {SOURCES} has no list of files (RECORD), which this release reads while it is imported: not "
        "installed by pip, or damaged", REINSTALL),
    Row(_two_copies,
        "a second copy of Transformer Engine: {first} comes first on the path and hides {hidden}; sources of one are "
        "loaded with libraries or metadata of the other",
        "remove one of them, or run from another folder (python -c 'import sys; print(sys.path)' shows the order)"),
    Row(_two_builds, "the libraries of two builds lie beside each other: {files}",
        "remove the one of the older build"),
    *(Row(pattern, "this release moved, renamed or never had `{owner}.{name}`",
          "run the upgrade canary between a release that has it and this one")
      for pattern in (r"cannot import name '(?P<name>\w+)' from (?:partially initialized module )?"
                      r"'(?P<owner>transformer_engine\.[\w.]+)'",
                      r"module '(?P<owner>transformer_engine\.[\w.]+)' has no attribute '(?P<name>\w+)'")),
    *(Row(pattern, "{what} is older than {version}, the least this release takes",
          "upgrade {what} to {version} or later")
      for pattern in (r"[Mm]inimum (?P<what>\S+) version (?P<version>[\d.]*\d) required",
                      r"requires (?P<what>\w+) (?P<version>[\d.]*\d) or later",
                      r"(?P<what>\w+) (?:version )?>=? ?(?P<version>[\d.]*\d)")),
    Row(_known, "{likely}", "{step}"),
    Row(_different_releases,
        "the parts of Transformer Engine are of different releases ({listed}); a +local suffix counts", UNINSTALL),
    Row(_parts_missing, "Transformer Engine is incomplete: no {missing}", INSTALL),
    Row(_library_gone, "{gone} is installed, and its library file is not there", REINSTALL),
)  # fmt: skip
