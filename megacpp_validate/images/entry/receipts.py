"""Where the receipts of a container go, and as whom they are written: whoever mounts a folder owns what is in it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from .refusals import NO_ENVIRONMENT, WRONG_ARGUMENTS, ImageFacts, Refusal

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


def _say_unwritable(folder: Path, fault: OSError) -> Refusal:
    try:
        owner = folder.stat()
        whose = f"{owner.st_uid}:{owner.st_gid}"
    except OSError:
        whose = "$(id -u):$(id -g)"
    us = f"{os.geteuid()}:{os.getegid()}"
    cause = (
        f"it belongs to {whose}, and this container runs as {us}"
        if whose != us
        else "it is mounted read-only, or the disk is full"
    )
    return Refusal(
        f"receipts cannot be written to {folder}: {fault.strerror or fault}. Likely cause: {cause}. Next step: "
        f'`docker run --user {whose} -v "$PWD/receipts:{MOUNT}" ...`, with a folder that this user can write.',
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
    file = place.folder / f"{run.session}.run.json"
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
