"""Where the receipts of a container go, and as whom they are written: whoever mounts a folder owns what is in it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from .refusals import WRONG_ARGUMENTS, ImageFacts, Refusal

MOUNT: Final = Path("/receipts")
UNMOUNTED: Final = Path(tempfile.gettempdir()) / "receipts"
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


def choose_place(mount: Path = MOUNT, unmounted: Path = UNMOUNTED) -> Place | Refusal:
    """The mounted folder; a folder of the container where nothing is mounted; a refusal where it cannot be written."""
    mounted = os.path.ismount(mount)
    folder = mount if mounted else unmounted
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
