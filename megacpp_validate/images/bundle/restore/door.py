"""Restore an offline bundle: everything is verified first, then loaded. Needs Python 3.9 and nothing else; no network.

    python3 restore.py                              verify, and say what is inside
    python3 restore.py --load                       the image into the Docker Engine of this host
    python3 restore.py --push 127.0.0.1:5000/repo   the image and its signatures into a registry
    python3 restore.py --venv DIR                   the wheelhouse into a virtual environment
    python3 restore.py --jit DIR                    the JIT caches into a folder
    python3 restore.py --unpack DIR                 everything as whole files, parts joined
    ... --key cosign.pub --id SHA256                refuse what this key has not signed, or any other bundle than this

Exit codes: 0 done; 1 refused: damaged, incomplete, not signed by that key, or not that bundle, and nothing was
installed; 2 wrong arguments; 5 what it is to be loaded into does not take it; 6 the disk or the machine; 130
interrupted. Any of these can be run again: what is there already is left as it is, and what was half
written is made anew.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from .engines import fill_venv, find_docker, find_image, is_venv_filled, load_image, push_image
from .folders import NoRoom, NotTaken, make_folder, staged
from .listing import MANIFEST, SIGNATURE, Refused, read_bundle, stored_files
from .p256 import is_signed, read_key
from .reading import verify

# what http.client and the distribution API take: HOST[:PORT]/REPOSITORY, the repository in lower case
_PLACE = re.compile(
    r"(?:[\w-]{1,63}(?:\.[\w-]{1,63})*|\[[0-9a-fA-F:.]+\])(?::(\d{1,5}))?/[a-z0-9]+(?:(?:[._/]|__|-+)[a-z0-9]+)*",
    re.ASCII,
)
_SHA256 = re.compile(r"(sha256:)?[0-9a-fA-F]{64}")
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str] | None = None) -> int:
    """Verify, then load what was asked for; the exit code."""
    asked = _read_arguments(arguments)
    try:
        return _restore(asked)
    except Refused as fault:
        return _tell(str(fault), 1)
    except NotTaken as fault:
        return _tell(str(fault), 5)
    except NoRoom as fault:
        return _tell(str(fault), 6)
    except OSError as fault:
        causes = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "the disk is full")
        causes |= dict.fromkeys((errno.EACCES, errno.EPERM), "it is somebody else's, or may not be read")
        cause = causes.get(fault.errno or 0, "the disk is damaged")
        return _tell(f"given up: {fault}. Likely cause: {cause}. Next step: mend that and run this again.", 6)
    except KeyboardInterrupt:
        return _tell("interrupted; run it again, and it starts where nothing is half done", 130)


def _read_arguments(arguments: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--bundle", type=_path, default=Path(__file__).absolute().parent, help="the folder; else where this file lies")
    add("--load", action="store_true", help="docker load")
    add("--push", type=_repository, metavar="HOST/REPOSITORY", help="into a registry, digests as they are")
    add("--venv", type=_path, help="install the wheelhouse into a new virtual environment")
    add("--python", default=sys.executable, help="the interpreter for that")
    add("--jit", type=_path, help="put the JIT caches here; MEGACPP_JIT_ROOT is then this folder")
    add("--unpack", type=_path, help="put everything here, as whole files")
    add("--key", type=_key, help="public key that must have signed the bundle")
    add("--id", type=_id, help="sha256 of bundle.json, as the writer said it")
    add("--jobs", type=_count, default=min(16, 2 * (os.cpu_count() or 1)), help="threads")
    asked = parser.parse_args(arguments)
    if not asked.bundle.is_dir():
        parser.error(f"there is no folder {asked.bundle}: --bundle names that of a bundle")
    if clash := _find_clash({name: getattr(asked, name) for name in ("bundle", "unpack", "jit", "venv")}):
        parser.error(clash)
    return asked


def _path(text: str) -> Path:
    """A name; an empty one, of a variable without a value, would be the folder that this was started in."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return Path(text)


def _key(text: str) -> Path:
    path = _path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no {path}: it names the PEM file cosign.pub")
    try:
        read_key(path.read_text("ascii"))
    except (OSError, ValueError) as fault:
        raise argparse.ArgumentTypeError(f"{path} is no key that can be used: {fault}") from fault
    return path


def _id(text: str) -> str:
    if not _SHA256.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no sha256, which has 64 digits of 0 to 9 and a to f")
    return text[-64:].lower()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text[:9]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return min(int(text[:9]), 256)


def _repository(text: str) -> str:
    place = _PLACE.fullmatch(text)
    if place is None or int(place[1] or 1) not in range(1, 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} names no repository: HOST[:PORT]/REPOSITORY")
    return text


def _find_clash(folders: dict[str, Path | None]) -> str:
    """Two folders of which one is the other or lies in it: what is put into one would be taken for the other's."""
    places = {name: folder.resolve() for name, folder in folders.items() if folder}
    for name, place in places.items():
        for other, outer in places.items():
            if name != other and (place == outer or outer in place.parents):
                return f"--{name} {place} is the folder of --{other}, or lies in it: name another one"
    return ""


def _restore(asked: Any) -> int:
    root: Path = asked.bundle
    bundle = read_bundle(root)
    name = sha256((root / MANIFEST).read_bytes()).hexdigest()
    _hold_to_caller(root, name, asked)
    _ask_takers(bundle, asked, name)
    rows = stored_files(bundle).values()
    total = sum(row["bytes"] for row in rows)
    _say(f"verifying {len(rows)} files, {total / 1e9:.2f} GB")
    started = time.monotonic()
    wanted = {asked.unpack: "", asked.jit: "jit/"}
    with tempfile.TemporaryDirectory(prefix=".wheels-", dir=_find_parent(asked.venv)) as room:
        joined = Path(room, "joined") if asked.venv and _has_wheels_in_parts(bundle) else None
        wanted[joined] = "wheelhouse/"
        named = {folder.resolve(): prefix for folder, prefix in wanted.items() if folder}
        with staged(bundle, named) as copies:
            verify(root, bundle, asked.jobs, copies)
        took = max(time.monotonic() - started, 1e-9)
        _say(f"all {len(rows)} files are as they were written: {took:.1f} s, {total / took / 1e6:.0f} MB/s")
        for folder in filter(None, (asked.unpack, asked.jit)):
            _say(f"restored to {folder}")
        if asked.load:
            _say(load_image(root, bundle))
        if asked.push:
            _say(push_image(root, bundle, asked.push))
        if asked.venv:
            _say(fill_venv(root, bundle, asked.venv.absolute(), asked.python, joined, name))
    _say_contents(bundle, name)
    _say(f"  {_say_signer(root, asked.key)}")
    return 0


def _say_signer(root: Path, key: Path | None) -> str:
    if key is None:
        return "who signed it was not asked (--key cosign.pub)"
    if root.resolve() in key.resolve().parents:
        return f"signed by {key}; that key came with the bundle, so nobody knows whose it is"
    return f"signed by {key}"


def _hold_to_caller(root: Path, name: str, asked: Any) -> None:
    """What only the caller can know: which bundle it should be, and whose."""
    if asked.id and asked.id != name:
        raise Refused(
            f"{root} is the bundle {name}, and not {asked.id}. Nothing was installed. Next step: copy that one."
        )
    if asked.key is None:
        return
    signature = (root / SIGNATURE).read_text("ascii", "replace") if (root / SIGNATURE).is_file() else ""
    signed = bool(signature) and is_signed((root / MANIFEST).read_bytes(), signature, asked.key.read_text("ascii"))
    if not signed:
        why = (
            f"{SIGNATURE} is not a signature of {asked.key} over {MANIFEST}" if signature else f"it has no {SIGNATURE}"
        )
        raise Refused(
            f"{root} is not signed by {asked.key}: {why}. Nothing was installed. Likely cause: it is of somebody else, "
            "or was changed by somebody. Next step: ask its writer which key it was signed with."
        )


def _ask_takers(bundle: dict[str, Any], asked: Any, name: str) -> None:
    """What is to take the bundle, before gigabytes are read and folders are there that stay."""
    if asked.load or asked.push:
        find_image(bundle)
    if asked.load:
        find_docker()
    if asked.venv:
        is_venv_filled(bundle, asked.venv.absolute(), asked.python, name)


def _has_wheels_in_parts(bundle: dict[str, Any]) -> bool:
    return any(row["kind"] == "wheel" and row["parts"] for row in bundle["files"])


def _find_parent(folder: Path | None) -> str | None:
    """Where a large wheel may be joined: on the disk that it goes to."""
    if folder is None:
        return None
    parent = folder.absolute().parent
    make_folder(parent, folder)
    return str(parent)


def _say_contents(bundle: dict[str, Any], name: str) -> None:
    _say(f"bundle {name}")
    _say(f"  target {bundle['target']}, {bundle['platform']}, lock {bundle['lock'][:12]}, made {bundle['made']}")
    if bundle["image"]:
        _say(f"  image {bundle['image']['name']}@{bundle['image']['digest']}")
    for what, why in bundle["absent"].items():
        _say(f"  no {what}: {why}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _tell(text: str, code: int) -> int:
    sys.stderr.write(f"restore: {text}\n")
    return code


def _hear(number: int) -> None:
    """A signal that ends a process ends this one as an interrupt does, with what it has written; nohup's stays unheard.

    The first of them alone: a terminal that closes sends two.
    """

    def interrupt(*_: object) -> None:
        for one in _ENDING:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    if signal.getsignal(number) is signal.SIG_DFL:
        signal.signal(number, interrupt)


if __name__ == "__main__":
    for _number in _ENDING:
        _hear(_number)
    sys.exit(main())
