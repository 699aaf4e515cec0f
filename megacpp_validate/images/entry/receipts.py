"""Where the receipts of a container go, and as whom they are written: whoever mounts a folder owns what is in it."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from .refusals import INFRASTRUCTURE, NO_ENVIRONMENT, WRONG_ARGUMENTS, ImageFacts, Refusal

MOUNT: Final = Path("/receipts")
SCHEMA: Final = "megacpp-validate/image-run/1"


@dataclass(frozen=True)
class Place:
    """Where receipts go; `mounted` is whether they outlive the container."""

    folder: Path
    mounted: bool


def become_owner(folder: Path) -> str:
    """As root, become whoever owns a mounted folder, so that what is written there is theirs; says what was done.

    A container that may not change its user stays what it is.
    """
    try:
        owner = folder.stat()
        if os.geteuid() != 0 or owner.st_uid == 0 or not os.path.ismount(folder):
            return ""
        os.setgroups([])
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)
    except OSError:
        return ""
    return f"running as {owner.st_uid}:{owner.st_gid}, who owns {folder}"


def refuse_no_room() -> Refusal | None:
    """Why nothing runs here where no temporary file can be made; None where one can. Compilers and verbs need them."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as fault:
        return say_no_room(fault)
    return None


def say_no_room(fault: OSError) -> Refusal:
    """What to do where a container has no folder for temporary files, or a full one."""
    return Refusal(
        f"this container has no room for temporary files: {fault.strerror or fault}. Likely cause: its root is "
        "read-only and nothing is mounted at /tmp, or /tmp is full. Next step: `docker run --read-only --tmpfs /tmp "
        "...`; of more memory where it is full.",
        NO_ENVIRONMENT,
    )


def say_closed_caches(fault: OSError) -> Refusal:
    """What to do where JIT caches were mounted that this user may not read: all of them would be compiled anew."""
    return Refusal(
        f"the JIT caches cannot be read: {fault.strerror}: {fault.filename}. Likely cause: the mounted folder is "
        f"closed to {os.geteuid()}:{os.getegid()}, as whom this container runs. Next step: `chmod -R a+rX` of that "
        "folder, or `docker run --user` as whom it belongs to.",
        NO_ENVIRONMENT,
    )


def choose_place(mount: Path = MOUNT, unmounted: Path | None = None) -> Place | Refusal:
    """The mounted folder; a folder of the container where nothing is mounted; a refusal where it cannot be written.

    Args:
        unmounted: that folder; None for one among the temporary files, which `refuse_no_room` has asked for.
    """
    mounted = os.path.ismount(mount)
    folder = mount if mounted else unmounted or Path(tempfile.gettempdir()) / "receipts"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as fault:
        return _say_unwritable(folder, fault)
    return Place(folder, mounted)


def clear_way(place: Place, session: str, *, result: bool) -> Refusal | None:
    """Take away what an earlier run of a session said, so that one that is killed does not leave another's word.

    Args:
        result: this run writes what it says to a file, and not its record alone.
    """
    for file in (record_file(place, session), *([result_file(place, session)] if result else [])):
        try:
            file.unlink(missing_ok=True)
        except OSError as fault:
            return Refusal(
                f"{file} of an earlier run cannot be taken away: {fault.strerror or fault}. Likely cause: it is a "
                "folder, or somebody else's. Next step: move it away, or mount another folder.",
                WRONG_ARGUMENTS,
            )
    return None


def record_file(place: Place, session: str) -> Path:
    """What was run, in which image, and how it ended."""
    return place.folder / f"{session}.run.json"


def result_file(place: Place, session: str) -> Path:
    """What a session says that leaves no receipts."""
    return place.folder / f"{session}.json"


def _say_unwritable(folder: Path, fault: OSError) -> Refusal:
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refusal(
            f"receipts cannot be written to {folder}: {fault.strerror}. Likely cause: its disk is full. Next step: "
            "make room, or mount a folder of another disk.",
            INFRASTRUCTURE,
        )
    us, whose, how = f"{os.geteuid()}:{os.getegid()}", "$(id -u):$(id -g)", ""
    if fault.errno == errno.EROFS:
        cause, whose, how = "it is mounted read-only", us, ", without `:ro`"
    else:
        with suppress(OSError):
            owner = folder.stat()
            whose = f"{owner.st_uid}:{owner.st_gid}"
        cause = f"it belongs to {whose}, and this container runs as {us}"
    return Refusal(
        f"receipts cannot be written to {folder}: {fault.strerror or fault}. Likely cause: {cause}. Next step: "
        f'`docker run --user {whose} -v "$PWD/receipts:{MOUNT}" ...`{how}, with a folder that this user can write.',
        WRONG_ARGUMENTS,
    )


@dataclass(frozen=True)
class Run:
    """What was run in the container, and how it ended."""

    session: str
    arguments: tuple[str, ...]
    image: ImageFacts
    user: str
    driver: str
    gpus: tuple[str, ...]
    started: str
    seconds: float
    exit_code: int


def write_run(place: Place, run: Run) -> None:
    """Write the record of a run beside its receipts, aside and renamed.

    Raises:
        OSError: it cannot be written.
    """
    record: Mapping[str, object] = {"schema_id": SCHEMA, **asdict(run)}
    file = record_file(place, run.session)
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
