"""The firewall between a training stack and one vendor library.

Three rules keep a bridge alive across upgrades of the library behind it, and this module is their one home:

1. One re-export component names the library's symbols; everything else takes them from there
(`Vendor.entry`). 2. What cannot be used is None with a reason, never an exception at import; so each wrapper
has a native path. 3. Environment variables turn the library off: `<SWITCH>` altogether, `<SWITCH>_<PRESET>`
for one preset.

The verdict is reached once per process, at the first question, and kept with its reason.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

from .errors import BridgeError

# Longer texts are cut in the middle: the time of the diagnosis patterns grows with the square of the length. 100 kB, a
# compiler's log in an exception, took a minute.
LONGEST: Final = 3000
_MANY: Final = 16  # causes and contexts of one exception

SOURCES: Final = "transformer-engine"
CORES: Final = ("transformer-engine-cu12", "transformer-engine-cu13")
EXTENSION: Final = "transformer-engine-torch"

_LIBRARY: Final = re.compile(r"\.so(?:\.\d+)*$")  # not .so.debug: files of debug symbols are shorter on purpose
_MODULE_SUFFIXES: Final = (*EXTENSION_SUFFIXES, ".py", ".pyc")  # of files that Python imports in place of a package
_LOADED: Final = 1  # elf.h, PT_LOAD
_BESIDE: Final = ("", "lib", "wheel_lib")  # folders of a package that its libraries lie in


# --- what was raised --------------------------------------------------------------------------------------------------


def text_of(fault: BaseException) -> str:
    """The text of an exception in one printable line of bounded length; never raises."""
    try:
        text = str(fault)
    except KeyboardInterrupt:
        raise
    except BaseException:  # an odd exception may raise anything from its own __str__
        return "its text cannot be made"
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} [... {len(text) - LONGEST} characters ...] {text[-LONGEST // 2 :]}"
    line = " ".join(text.split())
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    return line or "no text"


def describe_fault(fault: BaseException) -> str:
    """Class and text of an exception, and of the first two that it was raised from."""
    causes = "".join(f" (from {type(one).__name__}: {text_of(one)})" for one in raised_from(fault)[1:3])
    return f"{type(fault).__name__}: {text_of(fault)}{causes}"


def raised_from(fault: BaseException) -> tuple[BaseException, ...]:
    """The exception and its explicit causes, the exception first."""
    found = [fault]
    while (cause := found[-1].__cause__) is not None and len(found) < _MANY:
        found.append(cause)
    return tuple(found)


def _handled(fault: BaseException) -> Iterator[BaseException]:
    """The exceptions that were being handled when an exception was raised; they may explain it."""
    one = fault.__context__ if not fault.__suppress_context__ else None
    for _ in range(_MANY):
        if one is None:
            return
        yield one
        one = one.__context__


def place_in(fault: BaseException, package: str) -> str:
    """ " (at FILE:LINE)" of the innermost frame of a package in a traceback; empty where there is none."""
    frames = traceback.extract_tb(fault.__traceback__)
    inside = [frame for frame in frames if f"{os.sep}{package}{os.sep}" in frame.filename]
    return f" (at {inside[-1].filename}:{inside[-1].lineno})" if inside else ""


def read_failure(fault: BaseException) -> dict[str, Any]:
    """What was raised, as a JSON object.

    Returns:
        "raised": the exception, then what it was raised from; "handled": what was being handled meanwhile. Of each one
        its classes (its own first), text, and, where it has them, the module or attribute it names, the file it is
        about, the system's error number, and the line.
    """
    return {
        "raised": [_read_fault(one) for one in raised_from(fault)],
        "handled": [_read_fault(one) for one in _handled(fault)],
    }


def _read_fault(fault: BaseException) -> dict[str, Any]:
    owner = getattr(fault, "obj", None) if isinstance(fault, AttributeError) else None
    name = getattr(fault, "name", None)
    root = sys.modules.get(name.partition(".")[0]) if isinstance(name, str) else None
    file = getattr(fault, "path", None) if isinstance(fault, ImportError) else getattr(fault, "filename", None)
    return {
        "kinds": [kind.__name__ for kind in type(fault).__mro__ if issubclass(kind, BaseException)],
        "text": text_of(fault),
        "name": name if isinstance(name, str) else "",
        "file": str(file or getattr(owner, "__file__", None) or ""),
        "number": getattr(fault, "errno", None) or 0 if isinstance(fault, OSError) else 0,
        "line": getattr(fault, "lineno", None) or 0,
        "owner": str(getattr(owner, "__name__", type(owner).__name__)) if owner is not None else "",
        "root_loaded": root is not None,
        "root_file": "" if root is None or hasattr(root, "__path__") else str(getattr(root, "__file__", None) or ""),
    }


# --- what of Transformer Engine is on the path ------------------------------------------------------------------------


class Install(NamedTuple):
    """What of Transformer Engine lies on `sys.path`: Python sources, core library and torch extension.

    versions: distribution name -> version, as the first match on the path has it.
    copies: every folder on the path that holds a `transformer_engine` package, and every file that is a module of
        that name, in the order of the path.
    has_core, has_extension: whether the compiled halves were found beside a copy.
    unreadable: distributions whose metadata is there and cannot be read.
    has_record: whether the metadata of the sources lists their files; True where there is no metadata.
    in_the_way: what has the name of the package on the path, and is neither a folder nor a module.
    """

    versions: dict[str, str]
    copies: tuple[str, ...]
    has_core: bool
    has_extension: bool
    unreadable: tuple[str, ...] = ()
    has_record: bool = True
    in_the_way: tuple[str, ...] = ()

    def describe(self) -> str:
        """The install in one line."""
        parts = [f"{name} {version}" for name, version in self.versions.items()] or ["no distribution"]
        parts += [f"{name} (its metadata cannot be read)" for name in self.unreadable]
        where = ", ".join(self.copies) or "no folder of sys.path"
        return f"{', '.join(parts)}; sources in {where}"


def look_for_te() -> Install:
    """What of Transformer Engine lies on the path of this process. Imports nothing, never raises."""
    versions: dict[str, str] = {}
    unreadable: list[str] = []
    has_record = True
    for name in (SOURCES, *CORES, EXTENSION):
        try:
            version = metadata.version(name)
            has_record &= name != SOURCES or metadata.files(name) is not None
        except metadata.PackageNotFoundError:
            continue
        except Exception:  # bytes that are no text, no permission, whatever a damaged disk leaves
            unreadable.append(name)
            continue
        if isinstance(version, str):  # None where METADATA is gone, whatever the annotation says
            versions[name] = version
        else:
            unreadable.append(name)
    copies: list[str] = []
    in_the_way: list[str] = []
    libraries: list[str] = []
    for entry in dict.fromkeys(sys.path):
        package = Path(entry or ".") / "transformer_engine"
        try:
            if not package.is_dir():
                modules = (package.with_name(f"{package.name}{suffix}") for suffix in _MODULE_SUFFIXES)
                copies += [str(file) for file in modules if file.is_file()]
                in_the_way += [str(package)] if os.path.lexists(package) else []
                continue
            copies.append(str(package))
            for folder in (package.parent, package, package / "wheel_lib"):
                libraries += [file.name for file in folder.glob("*transformer_engine*.so*")]
        except (OSError, ValueError):
            continue
    return Install(
        versions,
        tuple(copies),
        any(name.startswith("libtransformer_engine") for name in libraries),
        any(name.startswith("transformer_engine_torch") for name in libraries),
        tuple(unreadable),
        has_record,
        tuple(in_the_way),
    )


# --- libraries that are cut short -------------------------------------------------------------------------------------


def find_cut_short(root: str) -> str:
    """What the loader would say of the first library beside a package that is cut short; empty where none is.

    Args:
        root: name of the top-level package.
    """
    for file in _libraries_beside(root):
        with suppress(OSError):
            needs, size = bytes_needed(file), file.stat().st_size
            if needs > size:
                return f"{file}: file too short: {size} bytes of the {needs} that its header tells of"
    return ""


def bytes_needed(file: Path) -> int:
    """Bytes of a 64-bit shared library that the loader maps, by its ELF header; 0 where it is none or unreadable."""
    try:
        with file.open("rb") as opened:
            start = opened.read(64)
            if not start.startswith(b"\x7fELF\x02\x01"):
                return 0
            opened.seek(struct.unpack_from("<Q", start, 32)[0])
            size, number = struct.unpack_from("<HH", start, 54)
            table = opened.read(size * number)
            rows = [struct.unpack_from("<I4xQ16xQ", table, at) for at in range(0, len(table), size or 1)]
    except (OSError, OverflowError, ValueError, struct.error):
        return 0
    return max((offset + length for kind, offset, length in rows if kind == _LOADED), default=0)


def _libraries_beside(root: str) -> Iterator[Path]:
    """Shared libraries of the copy of a package that comes first on the path, and of the same name beside it."""
    for entry in sys.path:
        package = Path(entry or ".") / root
        with suppress(OSError):
            if not (package / "__init__.py").is_file():
                continue
            found = [file for folder in _BESIDE for file in (package / folder).glob("*.so*")]
            found += package.parent.glob(f"*{root}*.so*")
            yield from sorted(file for file in found if _LIBRARY.search(file.name))
            return


# --- one vendor library ----------------------------------------------------------------------------------------------

T = TypeVar("T")

_OFF: Final = frozenset({"", "0", "false", "no", "off"})
_ON: Final = frozenset({"1", "true", "yes", "on"})
_TRIAL_DEFAULT_S: Final = 60.0
_ANSWERED: Final = 86  # a status that no import ends with by accident; an import may well end with 0
_TRIAL: Final = f"""\
import faulthandler, importlib, os, signal, sys
faulthandler.enable()
faulthandler.dump_traceback_later(float(sys.argv[1]), exit=False)
signal.alarm(int(min(float(sys.argv[1]), 1e6) * 2) + 10)  # whoever would have killed it may have been killed
try:
    importlib.import_module(sys.argv[2])
except BaseException:
    pass
os._exit({_ANSWERED})
"""


class VendorEntryMissing(BridgeError, RuntimeError):
    """An entry point was required that this process cannot use; the text says why and what to do."""


class Verdict(NamedTuple):
    """Whether something can be used, and in words why not (empty when it can)."""

    usable: bool
    reason: str


class Entry(Generic[T]):
    """One entry point of a vendor library, imported when it is first asked for and then kept."""

    def __init__(self, vendor: Vendor, load: Callable[[], T]) -> None:
        self.name: Final = load.__name__
        self.__doc__ = load.__doc__
        self._vendor = vendor
        self._load = load
        self._found: tuple[T | None, str] | None = None

    def __call__(self) -> T | None:
        """The entry point, or None where the library is off, absent, broken or has no such thing."""
        found = self._found
        return found[0] if found is not None else self._find()[0]

    def require(self) -> T:
        """The entry point; raises `VendorEntryMissing` with the reason where there is none."""
        value = self()
        if value is None:
            raise VendorEntryMissing(self.why_missing())
        return value

    def why_missing(self) -> str:
        """Why the entry point is None, in words to act on; empty where it is there."""
        return (self._found or self._find())[1]

    def _find(self) -> tuple[T | None, str]:
        vendor = self._vendor
        if not vendor.is_available():
            return None, vendor.why_unavailable()  # not kept: a question during the import comes back later
        with vendor.lock:
            try:
                value = self._load()
                if value is None:
                    raise ImportError(f"{self.name} is None in this release")
                self._found = value, ""
            except KeyboardInterrupt:
                raise
            except BaseException as fault:  # a broken install raises any class, SystemExit included
                reason = (
                    f"{vendor.name} has no usable entry point `{self.name}`: {describe_fault(fault)}. Likely "
                    "cause: this release moved, renamed or never had it. Next step: run the upgrade canary."
                )
                self._found = None, reason
        return self._found


class Vendor:
    """One optional vendor library behind a firewall.

    Args:
        name: what people call the library.
        module: the module whose import is the proof. It is what the entry points come from, not the top-level
            package, whose import may succeed while this one fails.
        switch: environment variable MEGACPP_DISABLE_X that turns the library off; `<switch>_<PRESET>` does so for one
            preset. Where MEGACPP_X_TRIAL_SECONDS has a number of seconds, the import is first tried in a process of its
            own, so that an import that hangs or aborts costs a verdict, not this process.
        explain: turns the exception of a failed import into words: what happened, and the next step.

    Attributes:
        failure: what a failed import raised, as `failures.read_failure` has it; None where none failed.
    """

    def __init__(self, name: str, *, module: str, switch: str, explain: Callable[[BaseException], str]) -> None:
        self.name: Final = name
        self.module: Final = module
        self.switch: Final = switch
        self.trial: Final = f"{switch.replace('DISABLE_', '', 1)}_TRIAL_SECONDS"
        self.failure: dict[str, Any] | None = None
        self._explain = explain
        self._required: list[Entry[Any]] = []
        self.lock: Final = threading.RLock()
        self._deciding = False
        self._verdict: Verdict | None = None
        self._presets: dict[str, Verdict] = {}

    def is_available(self) -> bool:
        """Whether the library can be used in this process. Decided once; afterwards an attribute read."""
        verdict = self._verdict
        return verdict.usable if verdict is not None else self._decide().usable

    def why_unavailable(self) -> str:
        """Why `is_available()` is False; empty where it is True."""
        return (self._verdict or self._decide()).reason

    def is_enabled_for(self, preset: str) -> bool:
        """Whether the library is available and not turned off for this preset alone."""
        return self._preset(preset).usable

    def why_disabled_for(self, preset: str) -> str:
        """Why `is_enabled_for(preset)` is False; empty where it is True."""
        return self._preset(preset).reason

    def entry(self, load: Callable[[], T]) -> Entry[T]:
        """Make an accessor of a function that imports one entry point and returns it, or gives None without it."""
        return Entry(self, load)

    def required_entry(self, load: Callable[[], T]) -> Entry[T]:
        """The same of an entry point without which the whole library counts as unavailable."""
        made = Entry(self, load)
        self._required.append(made)
        return made

    def attribute(self, name: str) -> Entry[Any]:
        """A required entry that is an attribute of `module`."""

        def load() -> Any:
            return getattr(importlib.import_module(self.module), name)

        load.__name__ = name
        return self.required_entry(load)

    def _preset(self, preset: str) -> Verdict:
        verdict = self._presets.get(preset)
        if verdict is None:
            off = _read_switch(f"{self.switch}_{re.sub(r'[^A-Za-z0-9]+', '_', preset).strip('_').upper()}")
            verdict = Verdict(False, off) if off else self._verdict or self._decide()
            if self._verdict is not None:
                self._presets[preset] = verdict
        return verdict

    def _decide(self) -> Verdict:
        with self.lock:
            if self._verdict is not None:
                return self._verdict
            if self._deciding:  # asked again by code that runs inside the library's own import
                return Verdict(False, f"{self.name} is still being imported")
            self._deciding = True
            try:
                self._verdict = self._try()
            finally:
                self._deciding = False
            return self._verdict

    def _try(self) -> Verdict:
        if off := _read_switch(self.switch):
            return Verdict(False, off)
        if cut_short := find_cut_short(self.module.partition(".")[0]):  # to import it would end this process
            return self._refuse(OSError(cut_short))
        if died := self._try_in_a_process():
            return Verdict(False, died)
        path, kept = sys.path, list(sys.path)
        try:
            importlib.import_module(self.module)
        except KeyboardInterrupt:
            raise
        except BaseException as fault:  # OSError, AssertionError, StopIteration ... and whatever comes next
            sys.path = path  # the native path goes on with what was there, whatever a broken import made of it
            sys.path[:] = kept
            return self._refuse(fault)
        for entry in self._required:
            try:
                entry._load()
            except KeyboardInterrupt:
                raise
            except BaseException as fault:
                # An emptied folder can be imported, as a namespace package: then this is the first sign.
                lost = f"{self.module} can be imported, its required entry point `{entry.name}` cannot"
                return Verdict(False, f"{lost}. {self._refuse(fault).reason}")
        return Verdict(True, "")

    def _refuse(self, fault: BaseException) -> Verdict:
        try:
            self.failure = read_failure(fault)
            return Verdict(False, self._explain(fault))
        except KeyboardInterrupt:
            raise
        except BaseException as second:  # an odd exception may raise anything from its own attributes
            reason = f"{describe_fault(fault)} (and the explanation of it failed: {describe_fault(second)})"
            return Verdict(False, reason)

    def _try_in_a_process(self) -> str:
        """What a trial import in another process did wrong; empty where it went well or none is asked for."""
        seconds = _read_seconds(self.trial)
        if not seconds:
            return ""
        # The same path as here and nothing before it: "-P" keeps the working folder out, "" stands for it.
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": path, self.trial: ""}
        command = [sys.executable, "-P", "-c", _TRIAL, str(seconds * 0.8), self.module]
        try:
            code, words = _run_apart(command, environment, seconds)
        except OSError as fault:
            return f"the trial import of {self.name} did not start: {fault}. Next step: unset {self.trial}."
        if code == _ANSWERED:
            return ""  # whatever it raised is described better by the import in this process
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', words)  # by faulthandler
        frames.sort(key=lambda frame: self.module.partition(".")[0] not in frame[0])  # those of the package first
        where = " in {}:{} ({})".format(*frames[0]) if frames else ""
        if code is None:
            return (
                f"importing {self.module} did not end within {seconds:g} s: it hangs{where}. Likely cause: it waits "
                f"for a device, a lock or a network. Next step: set {self.switch}=1, or raise {self.trial} where it is "
                "merely slow."
            )
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return (
            f"importing {self.module} ends the interpreter ({how}){where}. Likely cause: a library built for another "
            f"torch, CUDA or processor. Next step: reinstall {self.name} for this stack, or set {self.switch}=1."
        )


def _run_apart(command: list[str], environment: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """Exit status (None after `limit_s` seconds) and words of a process; its group is gone afterwards.

    Its words go to a file: whatever an import started could hold a pipe open after its parent was killed.
    """
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=words, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=limit_s)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        words.seek(0)
        return code, words.read().decode(errors="replace")


def _read_seconds(variable: str) -> float:
    """The limit of a trial import in seconds; 0 where the variable is unset or off, 60 where it is not a number."""
    asked = os.environ.get(variable, "").strip().lower()
    try:
        return 0.0 if asked in _OFF else float(asked)
    except ValueError:
        return _TRIAL_DEFAULT_S


def _read_switch(variable: str) -> str:
    """Why an environment variable turns something off; empty where it does not."""
    value = os.environ.get(variable, "").strip()
    if value.lower() in _OFF:
        return ""
    odd = "" if value.lower() in _ON else " (not a value this switch knows; taken as 1)"
    return f"turned off by {variable}={value}{odd}. Next step: unset {variable} to use it again."


def explain_plainly(
    name: str, install: str, look: Callable[[], str] = lambda: "", package: str = ""
) -> Callable[[BaseException], str]:
    """An `explain` of the facts: what was raised and where, what is on the path, and how the library is installed.

    Args:
        name: what people call the library.
        install: the command that installs it.
        look: what of the library is on the path, in words; empty for what is not known.
        package: name of the folder whose innermost frame is the place that raised; empty for no place.
    """

    def explain(fault: BaseException) -> str:
        missing = fault.name if isinstance(fault, ModuleNotFoundError) else None
        absent = f" (the Python package `{missing}` is not installed)" if missing else ""
        place = place_in(fault, package) if package else ""
        found = f" Found: {there}." if (there := look()) else ""
        said = f"{name} cannot be used: {describe_fault(fault)}{place}."
        return f"{said}{found} Next step: {install}, or stay native{absent}."

    return explain


TRITON: Final = Vendor(
    "Triton",
    module="triton",
    switch="MEGACPP_DISABLE_TRITON",
    explain=explain_plainly("Triton", "pip install the triton that this torch asks for"),
)
