"""Why files of Transformer Engine that are there cannot be used: rights, file systems, processors, names in the way."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from typing import Final, NamedTuple

from .fault_text import text_of
from .shared_objects import read_header
from .te_install import SOURCES, Install

INSTALL: Final = 'pip install --no-build-isolation "transformer-engine[pytorch]==VERSION"'
RENAME: Final = "rename that file, or run from another folder (python -c 'import sys; print(sys.path)' tells)"
REINSTALL: Final = f"reinstall: uninstall all parts, then {INSTALL}"


def _numbers(*names: str) -> tuple[int, ...]:
    """Of the errors that this system has: not every one has all."""
    return tuple(getattr(errno, name) for name in names if hasattr(errno, name))


_NO_RIGHT: Final = _numbers("EACCES", "EPERM")
_AWAY: Final = _numbers("EIO", "ESTALE", "ENOTCONN", "ESHUTDOWN", "EREMOTEIO", "ETIMEDOUT", "EHOSTDOWN")
_FULL: Final = _numbers("ENOSPC", "EDQUOT")
_TOO_MANY: Final = _numbers("EMFILE", "ENFILE")
_ALL: Final = (*_NO_RIGHT, *_AWAY, *_FULL, *_TOO_MANY, errno.ELOOP)
# What the loader puts before the system's own words (glibc, elf/dl-load.c).
_LOADER: Final = re.compile(r"(\S+): (?:cannot open shared object file|cannot read file data)[^:]*: ")


class Cause(NamedTuple):
    """The likely cause of a failed import and the next step."""

    likely: str
    next_step: str


def cannot_be_read(fault: BaseException, install: Install) -> Cause | None:
    """The system refuses a file, by the number of its error or in the words of the loader."""
    number, file = _system_error(fault)
    if not number and _lacks_module(fault) and (closed := _find_closed(install)):
        number, file = errno.EACCES, closed
    what = file or "a file of it"
    if number in _NO_RIGHT:
        return Cause(
            f"{what} may not be used by this user (permission denied)",
            "give this user the rights on it and on every folder above it, or install into a folder of its own",
        )
    if number in _AWAY:
        return Cause(
            f"the file system that {what} lies on fails ({os.strerror(number)}); of the install nothing is known",
            "look at that mount (dmesg, its server), and import again",
        )
    if number in _FULL:
        return Cause(f"there is no space for {what} ({os.strerror(number)})", "make room, and import again")
    if number in _TOO_MANY:
        return Cause(f"no more files may be open ({os.strerror(number)})", "raise the limit (ulimit -n), import again")
    if number == errno.ELOOP:
        return Cause(f"{what} is a link that leads to itself", f"remove it, then {INSTALL}")
    return None


def _system_error(fault: BaseException) -> tuple[int, str]:
    """Number of an error of the system and the file that it is about; 0 where it is none of those told here."""
    if isinstance(fault, OSError) and fault.errno in _ALL:
        return int(fault.errno), str(fault.filename or "")
    text = text_of(fault)
    if isinstance(fault, (OSError, ImportError)) and (found := _LOADER.search(text)):
        return next((one for one in _ALL if text[found.end() :].startswith(os.strerror(one))), 0), found[1]
    return 0, ""


def _lacks_module(fault: BaseException) -> bool:
    return isinstance(fault, ModuleNotFoundError) and (fault.name or "").startswith("transformer_engine")


def _find_closed(install: Install) -> str:
    """The first copy, or its folder of modules for torch, where this user may not look into it."""
    folders = [place for copy in install.copies[:1] for place in (Path(copy), Path(copy, "pytorch"))]
    return next((str(one) for one in folders if one.is_dir() and not os.access(one, os.R_OK | os.X_OK)), "")


def of_another_machine(fault: BaseException, _: Install) -> Cause | None:
    """A library for another processor: of one that it is told by its path the loader says that there is none."""
    found = re.search(r"(/\S*\.so[\w.]*): (?:cannot open shared object file|wrong ELF class)", text_of(fault))
    header = read_header(Path(found[1])) if found else None
    if found is None or header is None:
        return None
    own = os.uname().machine, 64 if sys.maxsize > 2**32 else 32
    if (header.machine, header.bits) == own:
        return None
    built, here = (f"{bits}-bit {machine}" for machine, bits in ((header.machine, header.bits), own))
    return Cause(f"{found[1]} was built for {built}, and this Python runs on {here}", REINSTALL)


def no_extension(fault: BaseException, _: Install) -> Cause | None:
    """A library that Python can load, and that is no extension module of this Python."""
    said = re.search(
        r"does not define module export function|initialization of \w+ failed without raising|"
        r"Python version mismatch|is already registered!",
        text_of(fault),
    )
    if said is None:
        return None
    twice = "already registered" in said[0]
    why = "it is loaded twice, from two builds" if twice else "it was built for another Python, or is damaged"
    return Cause(f"the torch extension is none of this process: {why}", REINSTALL)


def emptied(fault: BaseException, _: Install) -> Cause | None:
    """A source file without a byte in it, from which a name is wanted."""
    file = fault.path if isinstance(fault, ImportError) else getattr(getattr(fault, "obj", None), "__file__", None)
    if not file or "transformer_engine" not in Path(file).parts:
        return None
    try:
        is_empty = Path(file).stat().st_size == 0
    except OSError:
        return None
    return Cause(f"{file} is empty, as a full disk or a copy cut short leaves it", REINSTALL) if is_empty else None


def with_null_bytes(install: Install) -> str:
    """The first source file that holds zeros, which Python refuses without saying which it is; empty if none does."""
    try:
        files = (file for copy in install.copies[:1] for file in sorted(Path(copy).rglob("*.py")))
        return next((str(file) for file in files if b"\0" in file.read_bytes()), "")
    except OSError:
        return ""


def of_another_numpy(fault: BaseException, _: Install) -> Cause | None:
    """A compiled module that was made for another numpy than the one that is here."""
    if not re.search(r"numpy\.\w+ size changed|compiled using NumPy|numpy\.core\.multiarray failed", text_of(fault)):
        return None
    return Cause(
        "a compiled module was built for another numpy than the one that is here",
        "install the numpy that it was built for (numpy<2, as a rule), or reinstall the package of that module",
    )


def older_driver(fault: BaseException, _: Install) -> Cause | None:
    """A driver that does not know the CUDA that is here."""
    if not re.search(r"driver version is insufficient|NVIDIA driver on your system is too old", text_of(fault)):
        return None
    return Cause(
        "the NVIDIA driver is older than what this CUDA runtime needs",
        "update the driver, or install torch and Transformer Engine for the CUDA that nvidia-smi names",
    )


def shadowed(_: BaseException, install: Install) -> Cause | None:
    """A module of the same name that comes first on the path."""
    if not install.copies or not Path(install.copies[0]).is_file():
        return None
    first, *others = install.copies
    hides = f" and hides {', '.join(others)}" if others else ""
    return Cause(
        f"the file {first} has the name of the package, comes first on the path{hides}",
        RENAME,
    )


def no_folder(fault: BaseException, install: Install) -> Cause | None:
    """Where the package should be lies a broken link, or a file."""
    if not _lacks_module(fault) or install.copies:
        return None
    for entry in sys.path:
        place = Path(entry or ".") / "transformer_engine"
        if os.path.lexists(place):
            what = "a link that leads nowhere" if place.is_symlink() else "no folder"
            return Cause(f"{place} is {what}", f"remove it, then {INSTALL}")
    return None


def no_metadata(fault: BaseException, install: Install) -> Cause | None:
    """Sources without the metadata that they look for."""
    asked = re.search(r"Could not find `?transformer.engine`?\.?$|No package metadata was found", text_of(fault))
    if asked is None or SOURCES in install.versions or not install.copies:
        return None
    return Cause(
        f"the sources in {install.copies[0]} have no metadata (dist-info) beside them, which this release reads while "
        "it is imported: copied by hand, or half uninstalled",
        REINSTALL,
    )
