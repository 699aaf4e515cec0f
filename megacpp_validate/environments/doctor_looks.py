"""The looks of the doctor, taken: one process at the path, and one for each vendor package, side by side."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from ..evidence.doctor_look import Behaviour, PackageLook, PathLook
from ..process import Ended, Processes
from .doctor import NOT_STARTED
from .doctor_seen import Seen
from .environment import Environment, NoEnvironment

_MODULE: Final = "megacpp_validate.probes.doctor"
_PATH: Final = TypeAdapter(PathLook)
_PACKAGE: Final = TypeAdapter(PackageLook)
_LAST_WORDS: Final = 400  # characters


@dataclass(frozen=True)
class Limits:
    """How long one look may take, and how many are taken at a time."""

    seconds: float
    jobs: int


def take_looks(environment: Environment, packages: Sequence[str], limits: Limits, processes: Processes) -> Seen:
    """Look at an interpreter.

    Raises:
        NoEnvironment: it cannot be started, or is too old to tell anything.
    """
    with tempfile.TemporaryDirectory(prefix="megacpp-doctor-") as scratch:
        folder = Path(scratch)

        def look(name: str) -> PackageLook:
            return _look_at_package(environment, name, folder, limits, processes)

        with ThreadPoolExecutor(max_workers=max(1, limits.jobs)) as pool:
            try:
                path = pool.submit(_look_at_path, environment, folder, limits, processes)
                found = pool.map(look, packages)
                return Seen(path.result(), tuple(found))
            except BaseException:  # an interrupt too: nothing may keep running behind it
                processes.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _look_at_path(environment: Environment, folder: Path, limits: Limits, processes: Processes) -> PathLook:
    answer = folder / "path.json"
    try:
        ended = _run(environment, "path", answer, limits, processes)
    except OSError as fault:
        raise NoEnvironment(
            f"{environment.shown} cannot be started: {fault.strerror or fault}. Likely cause: it is no interpreter, or "
            "one for another machine. Next step: give another with --python."
        ) from fault
    try:
        return _PATH.validate_json(answer.read_bytes())
    except OSError as fault:
        raise NoEnvironment(
            f"{environment.shown} does not tell what it has ({ended.how}). It said: {_last_words(ended)}. Likely "
            "cause: a Python older than 3.11, or a damaged one. Next step: give another with --python."
        ) from fault
    except ValidationError as fault:
        raise NoEnvironment(
            f"{environment.shown} answers in another form. Likely cause: it finds another megacpp-validate first. Next "
            "step: take that off its path, or upgrade it."
        ) from fault


def _look_at_package(
    environment: Environment, name: str, folder: Path, limits: Limits, processes: Processes
) -> PackageLook:
    """One package; where its process left no answer, how it ended is what was seen."""
    answer = folder / f"{name}.json"
    try:
        ended = _run(environment, name, answer, limits, processes)
    except OSError as fault:
        return PackageLook(name, installed=True, ended=f"{NOT_STARTED}: {fault}")
    how = ended.how if ended.code is None or ended.code < 0 else f"exit status {ended.code}"
    try:
        look = _PACKAGE.validate_json(answer.read_bytes())
        if ended.code == 0:
            return look
        # It answered what it imported, and ended at a call: that is what was seen of the call.
        died = Behaviour(
            f"a call of {name}", "small tensor", f"{how}: {_last_words(ended)}", None if ended.code is None else False
        )
        return replace(look, behaviours=(*look.behaviours, died))
    except (OSError, ValidationError):
        return PackageLook(name, installed=True, ended=how, words=_last_words(ended), seconds=round(ended.seconds, 3))


def _run(environment: Environment, what: str, answer: Path, limits: Limits, processes: Processes) -> Ended:
    own = answer.with_suffix("")
    own.mkdir()  # a working folder of its own: what lies where the tool was started must not be imported
    call = environment.call(_MODULE, what, str(answer), shares=(answer.parent,))
    return processes.run(call, folder=own, limit_s=limits.seconds, log=answer.with_suffix(".log"), ask_where=True)


def _last_words(ended: Ended) -> str:
    """The end of what it wrote; the innermost frame first, where it says one."""
    lines = [" ".join(line.split()) for line in ended.words.splitlines() if line.strip()]
    fatal = next(
        (index for index, line in enumerate(lines) if line.startswith(("Fatal Python error", "Current thread"))), None
    )
    told = lines[-3:] if fatal is None else lines[fatal : fatal + 4]
    return " | ".join(told)[-_LAST_WORDS:] or "nothing"
