"""`docker run IMAGE SESSION [ARGUMENTS]`: `python -m megacpp_validate.images.entry`."""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from .caches import CachesClosed, make_room
from .child import INTERRUPTED, run_child, run_command
from .machine import NOTHING, read_machine
from .receipts import (
    MOUNT,
    Place,
    Run,
    become_owner,
    choose_place,
    clear_way,
    refuse_no_room,
    result_file,
    say_closed_caches,
    say_no_room,
    write_run,
)
from .refusals import INFRASTRUCTURE, WRONG_ARGUMENTS, ImageFacts, Refusal, read_image, refuse_session
from .sessions import SESSIONS, Leaves, Needs, Session, find_session

_PYTHON: Final = (sys.executable, "-P", "-m")
_MODULE: Final = "megacpp_validate.images.entry"
_CLI: Final = "megacpp_validate.cli"
_HELP: Final = ("--help", "-h", "help")
_HEALTH: Final = "--health"


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; the exit code is the verb's own, or that of the class of what stands in the way."""
    image = read_image(os.environ)
    name, *rest = arguments or ["--help"]
    if name in _HELP:
        sys.stdout.write(_say_help(image))
        return 0
    if name == _HEALTH:
        return _look_after_health(image)
    session = find_session(name)
    if session is not None:
        return _run_session(session, tuple(rest), image)
    if shutil.which(name):  # an image must run what it is given: other tools start their processes in it
        variables = _find_room()
        if isinstance(variables, Refusal):
            return _refuse(variables)
        return _hand_over([name, *rest], variables)
    return _refuse(
        Refusal(
            f"there is no session {name!r}, and no command of that name. Next step: choose of "
            f"{', '.join(row.name for row in _sessions_of(image))}; or `megacpp --help`.",
            WRONG_ARGUMENTS,
        )
    )


def _run_session(session: Session, arguments: tuple[str, ...], image: ImageFacts) -> int:
    machine = NOTHING if session.needs is Needs.NOTHING else read_machine()
    if refusal := refuse_session(session, image, machine):
        return _refuse(refusal)
    if said := become_owner(MOUNT):
        _say(said)
    if refusal := refuse_no_room():
        return _refuse(refusal)
    variables = dict(os.environ) if session.copies_caches else _find_room()
    if isinstance(variables, Refusal):
        return _refuse(variables)
    place = choose_place()
    if isinstance(place, Refusal):
        return _refuse(place)
    if not place.mounted and session.leaves is Leaves.RECEIPTS:
        _say(
            f"nothing is mounted at {MOUNT}: receipts go to {place.folder} and end with the container. Next step, to "
            f'keep them: `docker run --user "$(id -u):$(id -g)" -v "$PWD/receipts:{MOUNT}" ...`'
        )
    if not {"--help", "-h"}.isdisjoint(arguments):  # a question, and no run: what an earlier one said stays
        return run_child([*_PYTHON, _CLI, session.verb[0], "--help"], variables)
    if refusal := clear_way(place, session.name, result=_keeps(session, arguments, place)):
        return _refuse(refusal)
    started, clock = datetime.now(UTC), time.monotonic()
    code = _start(session, arguments, image, place, variables)
    run = Run(
        session=session.name,
        arguments=arguments,
        image=image,
        user=f"{os.geteuid()}:{os.getegid()}",
        driver=machine.driver,
        gpus=tuple(f"{gpu.name} ({gpu.arch})" for gpu in machine.gpus),
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - clock, 2),
        exit_code=code,
    )
    try:
        write_run(place, run)
    except OSError as fault:
        _say(
            f"the record of this run cannot be written to {place.folder}: {fault.strerror or fault}. Likely cause: its "
            "disk is full, or it was taken away meanwhile. Next step: make room, or mount another folder."
        )
        return code or INFRASTRUCTURE  # a run that nobody can show later is none that went well
    return code


def _hand_over(words: list[str], variables: dict[str, str]) -> int:
    """Become another command; process 1 starts it instead, since it must hear `docker stop` and wait for orphans."""
    try:
        if os.getpid() == 1:
            return run_command(words, variables)
        os.execvpe(words[0], words, variables)  # noqa: S606 - a list of words, no shell
    except OSError as fault:
        return _refuse(
            Refusal(
                f"{words[0]} cannot be started: {fault.strerror or fault}. Likely cause: it is a script without an "
                "interpreter's name, or made for another machine. Next step: name the program that runs it.",
                WRONG_ARGUMENTS,
            )
        )


def _find_room() -> dict[str, str] | Refusal:
    try:
        return make_room(os.environ)
    except CachesClosed as fault:
        return say_closed_caches(fault)
    except OSError as fault:
        return say_no_room(fault)


def _start(
    session: Session, arguments: tuple[str, ...], image: ImageFacts, place: Place, variables: dict[str, str]
) -> int:
    verb, *always = session.verb
    if session.names_target and "--target" not in " ".join(arguments).replace("=", " ").split():
        always += ["--target", image.target]
    if session.leaves is Leaves.RECEIPTS and "--receipts" not in _name_options(arguments):
        always += ["--receipts", str(place.folder / session.name)]
    result = result_file(place, session.name)
    keeps = _keeps(session, arguments, place)
    if keeps:
        always += ["--format", "json", "--output", str(result)]
    code = run_child([*_PYTHON, _CLI, verb, *always, *arguments], variables)
    if keeps and result.is_file():
        run_child([*_PYTHON, f"{_CLI}.result_again", str(result)], variables)
    return code


def _keeps(session: Session, arguments: tuple[str, ...], place: Place) -> bool:
    """Whether what it says is written to a file of the mounted folder."""
    told = _name_options(arguments)
    return session.leaves is Leaves.RESULT and place.mounted and told.isdisjoint({"--format", "--output", "--list"})


def _name_options(arguments: tuple[str, ...]) -> set[str]:
    return {word.partition("=")[0] for word in arguments}


def _look_after_health(image: ImageFacts) -> int:
    """Healthy while a session runs, whose own exit code says more; else what the doctor says.

    A look at every library beside a session would take the cores that it times itself on.
    """
    if running := _running_session():
        sys.stdout.write(f"the session {running} runs\n")
        return 0
    code = run_child([*_PYTHON, _CLI, "doctor", "--target", image.target], os.environ)
    return 1 if code else 0


def _running_session() -> str:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if _MODULE in words:
            after = words[words.index(_MODULE) + 1 :]
            if after and find_session(after[0]):
                return after[0]
    return ""


def _sessions_of(image: ImageFacts) -> list[Session]:
    everything = replace(image, driver_least="")
    fits = []
    for session in SESSIONS:
        refusal = refuse_session(session, everything, NOTHING)
        if refusal is None or refusal.code != WRONG_ARGUMENTS:
            fits.append(session)
    return fits


def _say_help(image: ImageFacts) -> str:
    lines = [
        f"{image.name}, for the target {image.target}{f' ({image.arch})' if image.arch else ''}.",
        "",
        f'docker run --rm {"--gpus all " if image.arch else ""}--user "$(id -u):$(id -g)" '
        f'-v "$PWD/receipts:{MOUNT}" IMAGE SESSION [ARGUMENTS]',
        "",
        *(f"  {session.name:14} {session.says}" for session in _sessions_of(image)),
        "",
        "Any other command of the image is run as it is: `python`, `sh`, `megacpp-validate`.",
    ]
    return "\n".join(lines) + "\n"


def _refuse(refusal: Refusal) -> int:
    _say(refusal.words)
    return refusal.code


def _say(words: str) -> None:
    sys.stderr.write(f"megacpp: {words}\n")


def _main(arguments: Sequence[str]) -> int:
    """A fault of this entry point itself is none of a release: Python would end with 1, which says that one broke."""
    try:
        return main(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as fault:
        traceback.print_exc()
        return _refuse(Refusal(f"unforeseen: {type(fault).__name__}: {fault}", INFRASTRUCTURE))


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
