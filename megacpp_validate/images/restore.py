#!/usr/bin/env python3
"""Restore an offline bundle: every file is verified first, then loaded. Needs Python 3.9; no network, no package.

    python3 restore.py                              verify, and list what is inside
    ... --load                                      the image into the Docker Engine of this host
    ... --push 127.0.0.1:5000/repo                  the image and its signatures into a registry, through that engine
    ... --jit DIR                                   the JIT caches unpacked
    ... --key cosign.pub --id SHA256                refuse what this key has not signed (openssl), or another bundle

Exit codes: 0 done; 1 refused, nothing was installed; 2 wrong arguments; 5 the engine, registry or folder does not
take it; 6 the disk; 130 interrupted. A folder that exists is refused; a restore that failed leaves none.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SCHEMA = "megacpp-validate/bundle/4"
MANIFEST, SUMS, SIGNATURE = "bundle.json", "SHA256SUMS", "SHA256SUMS.sig"
IMAGE, CACHES = "image.tar", "jit.tar"
_COPY = "a damaged or incomplete copy. Next step: copy the bundle again from where it was written"


class Refused(Exception):
    """The bundle is not what was written; the text names the files."""

    code = 1


class NotTaken(Refused):
    """The engine, registry or folder does not take the bundle."""

    code = 5


def hash_file(path: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb", 0) as stream:
        while data := stream.read(1 << 22):  # large: after each part, threads wait for one another
            digest.update(data)
    return digest.hexdigest()


def verify(root: Path) -> dict[str, Any]:
    """The manifest of a bundle whose folder has every file of SHA256SUMS with its hash, and no other file.

    Raises:
        Refused: with the name of each file that is not as it was written.
    """
    try:
        sums = {line[66:]: line[:64] for line in (root / SUMS).read_text("ascii").splitlines()}
    except (OSError, ValueError) as fault:
        raise Refused(f"{root} is not a complete bundle: {fault!r}. Likely cause: {_COPY}.") from fault
    found = {
        path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_symlink() or not path.is_dir()
    }
    plain = {name for name, path in found.items() if path.is_file() and not path.is_symlink()}
    faults = [f"{name}: is a link or a device, not a regular file" for name in found.keys() - plain]
    faults += [f"{name}: does not belong to the bundle" for name in plain - sums.keys() - {SUMS, SIGNATURE}]
    faults += [f"{name}: is missing" for name in {*sums, MANIFEST} - (sums.keys() & plain)]
    names = sorted(sums.keys() & plain, key=lambda name: -found[name].stat().st_size)
    with ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1))) as pool:
        hashes = dict(zip(names, pool.map(lambda name: hash_file(found[name]), names)))  # noqa: B905 - Python 3.9
    faults += [f"{name}: does not hash to its sum in {SUMS}" for name in names if hashes[name] != sums[name]]
    if faults:
        listed = "\n  ".join([f"{root} is refused, with {len(faults)} faults:", *sorted(faults)[:20]])
        raise Refused(f"{listed}\nLikely cause: {_COPY}.")
    bundle: dict[str, Any] = json.loads((root / MANIFEST).read_bytes())
    if bundle["schema"] != SCHEMA:
        raise Refused(f"{root} was written by another release: {bundle['schema']}. Next step: use its own restore.py.")
    return bundle


def is_signed(data: Path, signature: Path, key: Path) -> bool:
    """Whether a file with a signature in base64 is by a public key in PEM over a file, as openssl reports."""
    try:
        decoded = base64.b64decode(signature.read_text("ascii"))
    except (OSError, ValueError):  # no file, or no base64
        return False
    words = ["openssl", "dgst", "-sha256", "-verify", str(key), "-signature", "/dev/stdin", str(data)]
    return subprocess.run(words, input=decoded, capture_output=True, check=False).returncode == 0


def _unpack(caches: Path, folder: Path) -> Path:
    # Not yet verified: only regular files and folders are made, inside of the folder, and nothing is decompressed.
    with tarfile.TarFile(caches, copybufsize=1 << 18) as archive:
        for member in archive:
            place = Path(os.path.normpath(folder / member.name))
            if member.isfile() and folder in place.parents:
                place.parent.mkdir(parents=True, exist_ok=True)
                archive.makefile(member, place)
                os.utime(place, (member.mtime, member.mtime))
                place.chmod(0o444)
            elif not member.isdir():
                raise Refused(f"{CACHES} has a member that is not a file inside of it: {member.name}.")
    for inner, _, _ in os.walk(folder):
        Path(inner).chmod(0o755)
    return folder


@contextlib.contextmanager
def unpack_caches(root: Path, folder: Path) -> Iterator[None]:
    """Unpack the sealed JIT caches aside while the block verifies them, and rename them after the block.

    Files are read-only and have their times. Nothing stays where the block raises.

    Raises:
        Refused: it is no archive, or a member is not a file inside of it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".jit.", dir=folder.parent) as aside, ThreadPoolExecutor(1) as pool:
        unpacked = pool.submit(_unpack, root / CACHES, Path(aside, "jit"))
        yield
        try:
            unpacked.result().rename(folder)
        except tarfile.TarError as fault:
            raise Refused(f"{CACHES} is not a tar archive: {fault}.") from fault


def _docker(*words: str) -> str:
    try:
        return subprocess.run(["docker", *words], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as fault:
        said = (getattr(fault, "stderr", "") or str(fault)).strip()[-800:]
        raise NotTaken(
            f"`docker {' '.join(words)}` failed: {said}. Likely cause: no Docker Engine runs here, this user may not "
            "access it, or its disk is full. Next step: correct that, then run the command again."
        ) from fault


def load_image(root: Path, bundle: dict[str, Any], place: str) -> str:
    """Load the image and its signatures into the engine of this host, and push them where a repository is named.

    Raises:
        NotTaken: the engine or the registry does not have the digests of the bundle.
    """
    image, store = bundle["image"], "Next step: switch on the containerd image store of the engine"
    _docker("load", "--input", str(root / IMAGE))
    found = _docker("image", "inspect", "--format", "{{.Id}}", image["name"]).strip()
    if found != image["digest"]:
        raise NotTaken(f"the engine has {found} as {image['name']}, and not {image['digest']}. {store}.")
    for row in (image, *image["signatures"]) if place else ():
        name = f"{place}:{row['name'].rpartition(':')[2]}"
        _docker("tag", row["name"], name)
        if f"digest: {row['digest']}" not in (said := _docker("push", name)):
            raise NotTaken(f"{name} is not {row['digest']}: {said[-300:].strip()}. {store}.")
    return f"pushed {place}@{found} with its signatures" if place else f"loaded {image['name']} ({found})"


def _require_parts(given: argparse.Namespace, bundle: dict[str, Any]) -> None:
    """Refuse, before anything is installed, what cannot be."""
    if given.jit and os.path.lexists(given.jit):
        raise NotTaken("the folder exists already: name another.")
    if given.jit and not (given.bundle / CACHES).is_file():
        raise NotTaken("the bundle has no JIT caches: leave --jit out.")
    if (given.load or given.push) and not bundle["image"]:
        raise NotTaken("the bundle has no image: leave --load and --push out.")


def _restore(given: argparse.Namespace) -> None:
    root, name = given.bundle, hash_file(given.bundle / SUMS) if (given.bundle / SUMS).is_file() else "none"
    if given.id and given.id[-64:].lower() != name:
        raise Refused(f"{root} is the bundle {name}, and not {given.id}.")
    if given.key and not is_signed(root / SUMS, root / SIGNATURE, given.key):
        raise Refused(f"{root} is not signed by {given.key}: {SIGNATURE} is missing, or by another key.")
    with unpack_caches(root, given.jit.absolute()) if given.jit else contextlib.nullcontext():
        bundle = verify(root)
        _require_parts(given, bundle)
        if given.load or given.push:
            sys.stdout.write(f"{load_image(root, bundle, given.push or '')}\n")
    image = f"image {bundle['image']['name']}@{bundle['image']['digest']}" if bundle["image"] else "no image"
    sys.stdout.write(f"bundle {name}\n  target {bundle['target']}, {bundle['platform']}, made {bundle['made']}\n")
    sys.stdout.write("".join(f"  no {what}: {why}\n" for what, why in bundle["absent"].items()))
    sys.stdout.write(f"  {image}\n  all files intact; {'signed' if given.key else 'signature not checked (--key)'}\n")


def main(arguments: list[str] | None = None) -> int:
    """Verify, then load what the arguments name; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path(__file__).absolute().parent, help="else this file's folder")
    for name in ("jit", "key"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--id", help="SHA-256 of its SHA256SUMS")
    parser.add_argument("--push", help="HOST:PORT/REPOSITORY")
    given = parser.parse_args(arguments)
    if "" in (sys.argv[1:] if arguments is None else arguments):
        parser.error("an option is empty")
    is_key = given.key and given.key.is_file() and b"BEGIN PUBLIC KEY" in given.key.read_bytes()
    if given.key and not (is_key and shutil.which("openssl")):
        parser.error("--key needs a public key and openssl")
    try:
        _restore(given)
        return 0
    except Refused as fault:
        text, code = f"{fault} Nothing was installed." if fault.code == 1 else str(fault), fault.code
    except OSError as fault:
        text, code = f"{fault}. Likely cause: the disk is full or damaged, or not yours. Next step: correct that.", 6
    except KeyboardInterrupt:
        text, code = "interrupted; nothing is half done. Next step: run the command again", 130
    sys.stderr.write(f"restore: {text}\n")
    return code


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not nohup's
            signal.signal(number, signal.default_int_handler)
    sys.exit(main())
