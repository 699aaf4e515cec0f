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
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar, overload

from .errors import BridgeError
from .failures import describe_fault, find_cut_short, place_in, read_failure

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
        found = vendor.load_entry(self.name, self._load)
        self._found = found
        return found


class Vendor:
    """One optional vendor library behind a firewall.

    Args:
        name: what people call the library.
        module: the module whose import is the proof. It is what the entry points come from, not the top-level
            package, whose import may succeed while this one fails.
        switch: environment variable that turns the library off; `<switch>_<PRESET>` does so for one preset.
        trial: environment variable with a number of seconds. Where it is set, the import is first tried in a
            process of its own, so that an import that hangs or aborts costs a verdict, not this process.
        explain: turns the exception of a failed import into words: what happened, and the next step.

    Attributes:
        failure: what a failed import raised, as `failures.read_failure` has it; None where none failed.
    """

    def __init__(
        self,
        name: str,
        *,
        module: str,
        switch: str,
        trial: str,
        explain: Callable[[BaseException], str],
    ) -> None:
        self.name: Final = name
        self.module: Final = module
        self.switch: Final = switch
        self.trial: Final = trial
        self.failure: dict[str, Any] | None = None
        self._explain = explain
        self._required: list[Entry[Any]] = []
        self._lock = threading.RLock()
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

    def switch_of(self, preset: str) -> str:
        """The environment variable that turns the library off for one preset."""
        return f"{self.switch}_{re.sub(r'[^A-Za-z0-9]+', '_', preset).strip('_').upper()}"

    @overload
    def entry(self, load: Callable[[], T]) -> Entry[T]: ...
    @overload
    def entry(self, *, required: bool) -> Callable[[Callable[[], T]], Entry[T]]: ...
    def entry(self, load: Callable[[], Any] | None = None, *, required: bool = False) -> Any:
        """Make an accessor of a function that imports one entry point and returns it.

        A library without one of its `required` entry points counts as unavailable; without any other, only
        that accessor gives None.
        """

        def make(function: Callable[[], Any]) -> Entry[Any]:
            made = Entry(self, function)
            if required:
                self._required.append(made)
            return made

        return make if load is None else make(load)

    def load_entry(self, name: str, load: Callable[[], T]) -> tuple[T | None, str]:
        """Import one entry point: (value, "") or (None, reason). Never raises for a fault of the library."""
        with self._lock:
            try:
                value = load()
                if value is None:
                    raise ImportError(f"{name} is None in this release")
                return value, ""
            except KeyboardInterrupt:
                raise
            except BaseException as fault:  # a broken install raises what it likes, SystemExit included
                return None, self._say_missing(name, fault)

    def _preset(self, preset: str) -> Verdict:
        verdict = self._presets.get(preset)
        if verdict is None:
            off = _read_switch(self.switch_of(preset))
            verdict = Verdict(False, off) if off else Verdict(self.is_available(), self.why_unavailable())
            if self._verdict is not None or off:
                self._presets[preset] = verdict
        return verdict

    def _decide(self) -> Verdict:
        with self._lock:
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

    def _say_missing(self, name: str, fault: BaseException) -> str:
        return (
            f"{self.name} is there, but its entry point `{name}` is not: {describe_fault(fault)}. "
            f"Likely cause: this release moved, renamed or never had it. "
            f"Next step: run the upgrade canary between a release that has it and this one."
        )

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
            return (
                f"the trial import of {self.name} could not be started: {fault}. Likely cause: this process "
                f"may not start others, or sys.executable ({sys.executable!r}) is no interpreter. Next step: "
                f"unset {self.trial}, or set {self.switch}=1."
            )
        if code == _ANSWERED:
            return ""  # whatever it raised is told better by the import in this process
        where = _innermost_frame(words, self.module.partition(".")[0])
        if code is None:
            return (
                f"importing {self.module} did not end within {seconds:g} s: it hangs{where}. Likely cause: "
                f"it waits for a device, a lock or a network that is not there. Next step: look at that "
                f"line, or set {self.switch}=1; where it is merely slow, raise {self.trial}."
            )
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return (
            f"importing {self.module} ends the interpreter ({how}){where}. Likely cause: a library built for "
            f"another torch, CUDA or processor. Next step: reinstall {self.name} for this stack, or "
            f"set {self.switch}=1."
        )


def _run_apart(command: list[str], environment: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """Exit status (None after `limit_s` seconds) and words of a process; its group is gone afterwards.

    Its words go to a file: whatever an import started could hold a pipe open after its parent was killed.
    """
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        words.seek(0)
        return code, words.read().decode(errors="replace")


def _read_seconds(variable: str) -> float:
    """The number of seconds that a variable asks for; 0 where it asks for nothing, 60 where it is odd."""
    asked = os.environ.get(variable, "").strip()
    if asked.lower() in _OFF:
        return 0.0
    try:
        seconds = float(asked)
    except ValueError:
        return _TRIAL_DEFAULT_S
    return seconds if 0 < seconds < threading.TIMEOUT_MAX else _TRIAL_DEFAULT_S


def _innermost_frame(words: str, package: str) -> str:
    """The innermost frame of a traceback by faulthandler, of the package itself if it has one there."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', words)
    chosen = next((frame for frame in frames if package in frame[0]), frames[0] if frames else None)
    return " in {}:{} ({})".format(*chosen) if chosen else ""


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
