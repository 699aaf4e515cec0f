"""What is inside a bundle, held to the folder: names, sizes, and that nothing is there that should not be."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

SCHEMA = "megacpp-validate/bundle/1"
MANIFEST, SUMS, SIGNATURE = "bundle.json", "SHA256SUMS", "bundle.json.sig"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MOST_LISTED = 64 << 20  # bytes of a list: a bundle of a hundred thousand files takes a third
MOST_FAULTS = 20  # that are told: a bundle on a dying disk has thousands


_NO_FILE = "is no plain file, but a link or a device"


class Refused(Exception):
    """The bundle is not what it says; the text names the files."""


def read_bundle(root: Path) -> dict[str, Any]:
    """The manifest: every name in it safe, and the folder with no file more, none less, none of another size.

    Raises:
        Refused: it is no bundle, or not a whole one; every fault by the name of its file.
        OSError: it cannot be read.
    """
    refuse_faults(root, [fault for name in (SUMS, MANIFEST) for fault in _find_no_list(root / name)])
    try:
        sums, text = (root / SUMS).read_bytes().decode("ascii"), (root / MANIFEST).read_bytes()
        listed = {path: digest for digest, path in (line.split("  ", 1) for line in sums.splitlines())}
        if listed.pop(MANIFEST, "") != hashlib.sha256(text).hexdigest():
            raise ValueError(f"{MANIFEST} has not the sha256 that {SUMS} says of it, so one of these two is damaged")
        bundle: dict[str, Any] = json.loads(text)
        if not isinstance(bundle, dict):
            raise ValueError(f"{MANIFEST} is not of this schema: it is no table")
        if bundle.get("schema") != SCHEMA:
            raise Refused(
                f"{root} has the schema {bundle.get('schema')!r}, and this reads {SCHEMA}. Nothing was installed. "
                "Likely cause: another release of the tool wrote it. Next step: call the restore.py that came with it."
            )
        _require_rows(bundle)
    except (FileNotFoundError, ValueError, RecursionError) as fault:
        raise Refused(
            f"{root} is no whole bundle: {fault}. Nothing was installed. Likely cause: {SUMS} or {MANIFEST} is damaged "
            "or missing: the writing was not finished, or not all was copied. Next step: copy both again."
        ) from fault
    stored = stored_files(bundle)
    seal = listed.pop(SIGNATURE, None)
    names = [*stored, *(row["path"] for row in bundle["files"])]
    faults = [f"{path!r}: the name leads out of the bundle" for path in {*names} if not is_safe(path)]
    faults += [f"{path}: is named twice" for path in {*names} if names.count(path) > (2 if path in stored else 1)]
    faults += [
        f"{path}: {SUMS} and {MANIFEST} do not say the same of it, so one of these two is damaged"
        for path in {*listed, *stored}
        if listed.get(path) != stored.get(path, {}).get("sha256")
    ]
    refuse_faults(root, faults or _compare_folder(root, stored, {MANIFEST, SUMS, *([SIGNATURE] if seal else [])}))
    if seal and hashlib.sha256((root / SIGNATURE).read_bytes()).hexdigest() != seal:
        refuse_faults(root, [f"{SIGNATURE}: its sha256 is not the one that {SUMS} says"])
    return bundle


def _find_no_list(path: Path) -> list[str]:
    """What is wrong with a list before it is opened: a pipe would keep its reader, and a device has no end."""
    try:
        kind = path.lstat()
    except FileNotFoundError:
        return []  # told with what it is for
    if not stat.S_ISREG(kind.st_mode):
        return [f"{path.name}: {_NO_FILE}"]
    return [f"{path.name}: has {kind.st_size} bytes, and no list has"] if kind.st_size > MOST_LISTED else []


def _require_rows(bundle: dict[str, Any]) -> None:
    """Refuse a manifest whose rows are not what is read of them below; raises ValueError."""
    kinds: dict[str, Any] = {
        "image": (dict, type(None)),
        "absent": dict,
        "wheels_absent": list,
        **dict.fromkeys(("made", "target", "platform", "lock", "python"), str),
    }
    row_kinds: dict[str, Any] = {"path": str, "kind": str, "bytes": int, "sha256": str, "mtime_ns": int, "parts": list}
    rows: Any = bundle.get("files")
    seen: list[Any] = rows if isinstance(rows, list) else [None]
    wrong = [name for name, kind in kinds.items() if not isinstance(bundle.get(name, 0), kind)]
    for row in seen:
        parts: list[Any] = row["parts"] if _has(row, row_kinds) and 0 <= row["mtime_ns"] < 1 << 63 else [None]
        if not all(_has(part, {"path": str, "bytes": int, "sha256": str}) and part["bytes"] >= 0 for part in parts):
            wrong.append(f"files: {str(row)[:80]}")
        elif parts and sum(part["bytes"] for part in parts) != row["bytes"]:
            wrong.append(f"files: {row['path']}, whose parts are not all of it")
    if not wrong:
        wrong = _find_wrong_values(bundle)
    if wrong:
        raise ValueError(f"{MANIFEST} is not of this schema: {', '.join(wrong[:3])}")


def _find_wrong_values(bundle: dict[str, Any]) -> list[str]:
    """What is of the right kind, and holds what nothing below can use."""
    image, lists = bundle["image"], {"wheels_absent": bundle["wheels_absent"], "absent": [*bundle["absent"].values()]}
    wrong = [name for name, values in lists.items() if not all(isinstance(value, str) for value in values)]
    archives = sum(row["kind"] == "image" for row in bundle["files"])
    if archives != (image is not None):
        wrong.append(f"image, of which there are {archives} archives")
    digests = [image.get("digest"), *configs] if image and isinstance(configs := image.get("configs"), list) else [None]
    named = image is None or (_has(image, {"name": str}) and ":" in image["name"] and image["name"][0].isalnum())
    if image is not None and not (named and all(_DIGEST.fullmatch(str(digest)) for digest in digests)):
        wrong.append(f"image: {str(image)[:80]}")
    return wrong


def _has(row: Any, kinds: dict[str, Any]) -> bool:
    return isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in kinds.items())


def stored_files(bundle: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every file as it lies there, by path: a large one is its parts."""
    return {one["path"]: one for row in bundle["files"] for one in (row["parts"] or [row])}


def is_safe(path: str) -> bool:
    """Whether a name stays inside the folder that it is put in."""
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & {*path.split("/")}


def _compare_folder(root: Path, stored: dict[str, dict[str, Any]], own: set[str]) -> list[str]:
    faults, found, odd = [], set(), set()
    for place, folders, files in os.walk(root, onerror=_raise):
        for name in [*files, *folders]:
            path, kind = Path(place, name).relative_to(root).as_posix(), Path(place, name).lstat()
            if stat.S_ISDIR(kind.st_mode):
                if path in stored or path in own:
                    faults.append(f"{path}: is a folder, and should be a file")
                    odd.add(path)
                continue
            found.add(path)
            if not stat.S_ISREG(kind.st_mode):
                faults.append(f"{path}: {_NO_FILE}")
                odd.add(path)
            elif path not in stored and path not in own:
                faults.append(f"{path}: does not belong to the bundle")
            elif path in stored and kind.st_size != stored[path]["bytes"]:
                faults.append(f"{path}: has {kind.st_size} bytes of {stored[path]['bytes']}")
    missing = (path for path in {*stored, *own} if path not in found)
    return faults + [f"{path}: is missing" for path in missing if not odd & {path, *map(str, Path(path).parents)}]


def _raise(fault: OSError) -> None:
    """A folder that cannot be read is no folder without files."""
    raise fault


def refuse_faults(root: Path, faults: list[str]) -> None:
    """Refuse a bundle with faults, by the names of the files.

    Raises:
        Refused: there is a fault.
    """
    if faults:
        more = [f"and {len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
        told = "\n  ".join([f"{root} is refused:", *sorted(faults)[:MOST_FAULTS], *more])
        raise Refused(
            f"{told}\nNothing was installed. Likely cause: it was damaged on the way, or not copied whole. Next step: "
            "copy these files again from where the bundle was written."
        )
