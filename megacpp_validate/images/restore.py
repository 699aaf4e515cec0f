#!/usr/bin/env python3
"""Restore an offline bundle: every file is verified first, then loaded. Needs Python 3.9; no network, no package.

    python3 restore.py                              verify, and list what is inside
    ... --load                                      the image into the Docker Engine of this host
    ... --push 127.0.0.1:5000/repo                  the image and its signatures into a registry, through that engine
    ... --venv DIR --jit DIR --unpack DIR           the wheelhouse installed; the JIT caches; every file
    ... --key cosign.pub --id SHA256                refuse what this key has not signed (openssl), or another bundle

Exit codes: 0 done; 1 refused, nothing was installed; 2 wrong arguments; 5 the engine, registry, Python or folder does
not take it; 6 the disk; 130 interrupted. A folder that is not empty is refused; a restore that failed leaves none.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCHEMA = "megacpp-validate/bundle/2"
MANIFEST, SUMS, SIGNATURE = "bundle.json", "SHA256SUMS", "bundle.json.sig"
IMAGE = "image.tar"
_PLACE = r"[\w.-]+(:\d{1,5})?/[a-z0-9]+(?:(?:[._/]|__|-+)[a-z0-9]+)*"
_NAME, _DIGEST = re.compile(rf"{_PLACE}:[\w.-]+"), re.compile(r"sha256:[0-9a-f]{64}")
_COPY = "it was damaged on the way, or not copied whole. Next step: copy it again from where it was written"
_say = functools.partial(print, flush=True)


class Refused(Exception):
    """The bundle is not what was written; the text names the files."""

    code = 1


class NotTaken(Refused):
    """The engine, registry, interpreter or folder does not take the bundle."""

    code = 5


def refuse_faults(root: Path, faults: list[str]) -> None:
    """Raise Refused where there is a fault, with the names of the files."""
    if faults:
        listed = "\n  ".join([f"{root} is refused, with {len(faults)} faults:", *sorted(faults)[:20]])
        raise Refused(f"{listed}\nNothing was installed. Likely cause: {_COPY}.")


def hash_file(path: Path, copies: tuple[Path, ...] = ()) -> str:
    """The SHA-256 of a file, written to new files on the way; no link is followed."""
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open(path, "rb", 0, opener=lambda name, how: os.open(name, how | os.O_NOFOLLOW)))
        outs = [stack.enter_context(copy.open("xb")) for copy in copies]
        while data := source.read(1 << 18):
            digest.update(data)
            for out in outs:
                out.write(data)
    return digest.hexdigest()


def read_bundle(root: Path) -> dict[str, Any]:
    """The manifest, where the folder has each file of it in its size, and no other.

    Raises:
        Refused: the folder, the manifest or the list of sums is not as it was written.
    """
    try:
        text = (root / MANIFEST).read_bytes()
        lines = (root / SUMS).read_text("ascii").splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
        if sums.pop(MANIFEST, "") != hashlib.sha256(text).hexdigest():
            raise ValueError(f"{MANIFEST} does not hash to the sum in {SUMS}, so one of the two is damaged")
        bundle: dict[str, Any] = json.loads(text)
        files = _read_rows(bundle)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as fault:
        raise Refused(
            f"{root} is not a complete bundle: {fault!r}. Nothing was installed. Likely cause: {_COPY}."
        ) from fault
    listed = {name: row["sha256"] for name, row in files.items()}
    listed |= {SIGNATURE: sums[SIGNATURE]} if SIGNATURE in sums else {}
    bundle["sums"], known = listed, {*listed, MANIFEST, SUMS}
    differ = {name for name, _ in sums.items() ^ listed.items()}
    faults = [f"{name}: {SUMS} and {MANIFEST} differ, so one of the two is damaged" for name in differ]
    found = {path.relative_to(root).as_posix(): path.lstat() for path in root.rglob("*")}
    for name, status in found.items():
        if stat.S_ISDIR(status.st_mode):
            continue
        if not stat.S_ISREG(status.st_mode):
            faults.append(f"{name}: is a link or a device, not a regular file")
        elif name not in known:
            faults.append(f"{name}: does not belong to the bundle")
        elif name in files and status.st_size != files[name]["bytes"]:
            faults.append(f"{name}: has {status.st_size} bytes of {files[name]['bytes']}")
    refuse_faults(root, faults + [f"{name}: is missing" for name in known - found.keys()])
    return bundle


def _read_rows(bundle: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of the manifest by path; raises ValueError, or what a wrong shape raises."""
    if bundle["schema"] != SCHEMA:
        raise ValueError(f"{MANIFEST} is not of the schema {SCHEMA}: another release wrote it")
    files: dict[str, dict[str, Any]] = {}
    for row in bundle["files"]:
        name = row["path"]
        if not name.isprintable() or "\\" in name or {"", ".", ".."} & {*name.split("/")}:
            raise ValueError(f"the name {name!r} leads out of the bundle")
        if name in files or name in (MANIFEST, SUMS, SIGNATURE):
            raise ValueError(f"{name} is named twice")
        if not (row["bytes"] >= 0 and 0 <= row["mtime_ns"] < 1 << 63 and re.fullmatch("[0-9a-f]{64}", row["sha256"])):
            raise ValueError(f"{name} has a size, time or sum that cannot be")
        files[name] = row
    image = bundle["image"]
    named = [image, *image["signatures"]] if image else []
    if not all(_NAME.fullmatch(one["name"]) and _DIGEST.fullmatch(one["digest"]) for one in named):
        raise ValueError("the image has no name or no digest")
    if bool(image) != (IMAGE in files):
        raise ValueError(f"{IMAGE} and its digest do not belong together")
    texts = [bundle[name] for name in ("made", "target", "platform", "lock", "python")]
    if not all(isinstance(one, str) for one in [*texts, *bundle["wheels_absent"], *bundle["absent"].values()]):
        raise ValueError("a text is another kind of value")
    return files


def verify(root: Path, bundle: dict[str, Any], copies: dict[str, tuple[Path, ...]]) -> None:
    """Hash every file, several at a time, and copy some of them on the way: one reading serves both.

    Args:
        copies: path in the bundle -> new files that get its bytes.

    Raises:
        Refused: with the name of each file that is not as it was written.
    """

    def check(name: str) -> bool:
        return hash_file(root / name, copies.get(name, ())) == str(bundle["sums"][name])

    names = sorted(bundle["sums"], key=lambda name: -(root / name).stat().st_size)
    with concurrent.futures.ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1))) as pool:
        try:
            held = list(pool.map(check, names))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    wrong = [name for name, holds in zip(names, held) if not holds]  # noqa: B905 - Python 3.9
    refuse_faults(root, [f"{name}: does not hash to the sum in {MANIFEST}: a bit or more is another" for name in wrong])


def install(root: Path, bundle: dict[str, Any], wanted: dict[Path, str]) -> None:
    """Verify the bundle, and copy parts of it: written aside, renamed when every file of the bundle is right.

    Args:
        wanted: folder that is empty or absent -> prefix of what goes there, "" for everything.
    """
    copies: dict[str, tuple[Path, ...]] = {}
    asides: dict[Path, Path] = {}
    try:
        for folder, prefix in wanted.items():
            rows = [row for row in bundle["files"] if row["path"].startswith(prefix)]
            if not rows:
                raise NotTaken(f"the bundle has nothing under {prefix!r} for {folder}: leave that option out.")
            _require_empty(folder)
            folder.parent.mkdir(parents=True, exist_ok=True)
            aside = asides[folder] = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            for row in rows:
                copy = aside / row["path"][len(prefix) :]
                copy.parent.mkdir(parents=True, exist_ok=True)
                copies[row["path"]] = (*copies.get(row["path"], ()), copy)
        verify(root, bundle, copies)
        for row in bundle["files"]:
            for copy in copies.get(row["path"], ()) if row["mtime_ns"] else ():
                os.utime(copy, ns=(row["mtime_ns"], row["mtime_ns"]))  # ninja compares the times of JIT caches
                copy.chmod(0o444)  # and sealed caches are read-only, for every user of a container
        os.sync()  # a name without its contents is what a power cut leaves
        for folder, aside in asides.items():
            for place in (aside, *(path for path in aside.rglob("*") if path.is_dir())):
                place.chmod(0o755)
            if folder.exists():
                folder.rmdir()
            aside.rename(folder)
    finally:
        for aside in asides.values():
            shutil.rmtree(aside, ignore_errors=True)


def _require_empty(folder: Path) -> None:
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise NotTaken(f"{folder} already exists. Nothing was installed. Next step: name another folder, or move it.")


def _run(words: list[str], cause: str, variables: dict[str, str] | None = None) -> str:
    try:
        return subprocess.run(words, env=variables, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as fault:
        said = (getattr(fault, "stderr", "") or str(fault)).strip()[-800:]
        step = "correct that, then run it again"
        raise NotTaken(f"`{' '.join(words)}` failed: {said}. Likely cause: {cause}. Next step: {step}.") from fault


def _docker(*words: str) -> str:
    return _run(
        ["docker", *words],
        "no Docker Engine is installed or running here, this user may not access it, or its disk is full",
    )


def load_image(root: Path, bundle: dict[str, Any], place: str) -> str:
    """Load the image and its signatures into the engine of this host, and push them where a repository is named.

    Raises:
        NotTaken: the engine or the registry does not have the digests of the bundle.
    """
    image, store = (
        bundle["image"],
        "Likely cause: an engine without the containerd image store. Next step: switch it on",
    )
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


def fill_venv(root: Path, venv: Path, python: str) -> None:
    """Make a virtual environment, and install the wheelhouse: no index, every hash that of the lock.

    Raises:
        NotTaken: Python or pip fails; the folder is removed.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))}
    variables = {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    how = [
        "--no-index",
        "--find-links",
        str(root / "wheelhouse"),
        "--require-hashes",
        "--no-deps",
        "--no-cache-dir",
        "--quiet",
    ]
    install_all = [str(venv / "bin/python"), "-m", "pip", "install", *how, "--requirement", str(root / "lock.txt")]
    try:
        _run([python, "-m", "venv", str(venv)], "Debian has venv in a package of its own, python3-venv", variables)
        _run(install_all, "a wheel is for another machine than this", variables)
    except BaseException:
        shutil.rmtree(venv, ignore_errors=True)
        raise


def _require_python(bundle: dict[str, Any], venv: Path, python: str) -> None:
    """Refuse, before gigabytes are read, what `fill_venv` cannot do."""
    _require_empty(venv)
    if absent := ", ".join(sorted(bundle["wheels_absent"])):
        raise NotTaken(f"the bundle has no wheel of {absent}: only the image has them. Next step: use --load.")
    script = 'import sys; print("%d.%d" % sys.version_info[:2])'
    if (found := _run([python, "-c", script], "--python names no Python").strip()) != bundle["python"]:
        raise NotTaken(f"{python} is Python {found}, the wheels are for {bundle['python']}. Next step: name --python.")


def is_signed(data: Path, signature: str, key: Path) -> bool:
    """Whether a signature in base64 is by a public key in PEM over a file, as openssl reports."""
    with tempfile.NamedTemporaryFile() as file, contextlib.suppress(ValueError):  # no base64
        file.write(base64.b64decode(signature))
        file.flush()
        words = ["openssl", "dgst", "-sha256", "-verify", str(key), "-signature", file.name, str(data)]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    return False


def _require_signer(root: Path, key: Path) -> None:
    if shutil.which("openssl") is None:
        raise NotTaken("openssl, which checks the signature, is missing. Next step: install it.")
    text = (root / SIGNATURE).read_text("ascii", "replace") if (root / SIGNATURE).is_file() else ""
    if not is_signed(root / MANIFEST, text, key):
        why = f"{SIGNATURE} is not a signature of {key}" if text else f"it has no {SIGNATURE}"
        raise Refused(f"{root} is not signed by {key}: {why}. Nothing was installed. Next step: ask its writer.")


def main(arguments: list[str] | None = None) -> int:
    """Verify, then load what the arguments name; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path(__file__).absolute().parent, help="else this file's folder")
    for name in ("unpack", "jit", "venv", "key"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--id", help="SHA-256 of its manifest")
    parser.add_argument("--push", help="HOST:PORT/REPOSITORY")
    parser.add_argument("--python", default=sys.executable, help="the interpreter for --venv")
    given = parser.parse_args(arguments)
    places = [one.resolve() for one in (given.bundle, given.unpack, given.jit, given.venv) if one]
    for wrong, why in (
        ("" in (sys.argv[1:] if arguments is None else arguments), "an option is empty"),
        (given.id and not re.fullmatch("(sha256:)?[0-9a-fA-F]{64}", given.id), f"--id {given.id} is no SHA-256"),
        (given.push and not re.fullmatch(_PLACE, given.push), f"--push {given.push} is no repository"),
        (not given.bundle.is_dir(), f"there is no folder {given.bundle}"),
        (given.key and not (given.key.is_file() and b"BEGIN PUBLIC KEY" in given.key.read_bytes()), "no public key"),
        (any(places.count(one) > 1 or {*one.parents} & {*places} for one in places), "a folder lies in another one"),
    ):
        if wrong:
            parser.error(why)
    try:
        _restore(given, given.bundle)
    except Refused as fault:
        text, code = str(fault), fault.code
    except OSError as fault:
        text, code = f"{fault}. Likely cause: the disk is full or damaged, or not yours. Next step: correct that.", 6
    except KeyboardInterrupt:
        text, code = "interrupted; nothing is half done. Next step: run it again", 130
    else:
        return 0
    sys.stderr.write(f"restore: {text}\n")
    return code


def _restore(given: argparse.Namespace, root: Path) -> None:
    bundle, name = read_bundle(root), hash_file(root / MANIFEST)
    if given.id and given.id[-64:].lower() != name:
        raise Refused(f"{root} is the bundle {name}, and not {given.id}. Nothing was installed. Copy that one.")
    if given.key:
        _require_signer(root, given.key)
    if given.load or given.push:
        if not bundle["image"]:
            raise NotTaken("the bundle holds no image. Next step: leave --load and --push out.")
        _docker("version")
    venv = given.venv.absolute() if given.venv else None
    if venv:
        _require_python(bundle, venv, given.python)
    wanted = {one.resolve(): prefix for one, prefix in ((given.unpack, ""), (given.jit, "jit/")) if one}
    _say(f"verifying {len(bundle['sums'])} files")
    install(root, bundle, wanted)
    if given.load or given.push:
        _say(load_image(root, bundle, given.push or ""))
    if venv:
        fill_venv(root, venv, given.python)
    image = f"image {bundle['image']['name']}@{bundle['image']['digest']}" if bundle["image"] else "no image"
    _say(f"bundle {name}\n  target {bundle['target']}, {bundle['platform']}, made {bundle['made']}\n  {image}")
    _say("".join(f"  no {what}: {why}\n" for what, why in bundle["absent"].items()), end="")
    _say(f"  every file is as it was written; {'signed by the key' if given.key else 'signature not checked (--key)'}")


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not nohup's
            signal.signal(number, signal.default_int_handler)
    sys.exit(main())
