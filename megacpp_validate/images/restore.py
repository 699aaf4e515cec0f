#!/usr/bin/env python3
"""Restore an offline bundle: everything is verified first, then loaded. Needs Python 3.9; no network, no package.

    python3 restore.py                              verify, and list what is inside
    ... --load                                      the image into the Docker Engine of this host
    ... --push 127.0.0.1:5000/repo                  the image and its signatures into a registry, through that engine
    ... --venv DIR --jit DIR --unpack DIR           the wheelhouse installed; the JIT caches; everything as whole files
    ... --key cosign.pub --id SHA256                refuse what this key has not signed (openssl), or another bundle

Exit codes: 0 done; 1 refused, nothing was installed; 2 wrong arguments; 5 the engine, registry, Python or folder does
not take it; 6 the disk; 130 interrupted. Run it again after any: what is restored stays, what was half written goes.
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

SCHEMA = "megacpp-validate/bundle/1"
MANIFEST, SUMS, SIGNATURE = "bundle.json", "SHA256SUMS", "bundle.json.sig"
CHUNK = 1 << 18
_PLACE = r"[\w.-]+(:\d{1,5})?/[a-z0-9]+(?:(?:[._/]|__|-+)[a-z0-9]+)*"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_COPY = "it was damaged on the way, or not copied whole. Next step: copy it again from where it was written"
_say = functools.partial(print, flush=True)


class Refused(Exception):
    """The bundle is not what it says; the text names the files."""

    code = 1


class NotTaken(Refused):
    """What the bundle is to be restored into does not take it."""

    code = 5


def refuse_faults(root: Path, faults: list[str]) -> None:
    """Raise Refused where there is a fault, with the names of the files."""
    if faults:
        listed = "\n  ".join([f"{root} is refused, with {len(faults)} faults:", *sorted(faults)[:20]])
        raise Refused(f"{listed}\nNothing was installed. Likely cause: {_COPY}.")


def read_bundle(root: Path) -> dict[str, Any]:
    """The manifest: every name safe, the folder with no file more, none less, none of another size."""
    try:
        text = (root / MANIFEST).read_bytes()
        lines = (line.split("  ", 1) for line in (root / SUMS).read_bytes().decode("ascii").splitlines())
        sums = {path: digest for digest, path in lines}
        if sums.pop(MANIFEST, "") != hashlib.sha256(text).hexdigest():
            raise ValueError(f"{MANIFEST} has not the sha256 that {SUMS} says of it, so one of the two is damaged")
        bundle: dict[str, Any] = json.loads(text)
        _require_schema(bundle)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError) as fault:
        raise Refused(f"{root} is no whole bundle: {fault!r}. Nothing was installed. Likely cause: {_COPY}.") from fault
    stored, seal = stored_files(bundle), sums.pop(SIGNATURE, "")
    names = [*stored, *(row["path"] for row in bundle["files"])]
    out = (path for path in {*names} if not path.isprintable() or "\\" in path or {"", ".", ".."} & {*path.split("/")})
    faults = [f"{path!r}: the name leads out of the bundle" for path in out]
    faults += [f"{path}: is named twice" for path in {*names} if names.count(path) > (2 if path in stored else 1)]
    faults += [
        f"{path}: {SUMS} and {MANIFEST} differ, so one of the two is damaged"
        for path in {*sums, *stored}
        if sums.get(path) != stored.get(path, {}).get("sha256")
    ]
    own = {MANIFEST, SUMS, *([SIGNATURE] if seal else [])}
    found = {path.relative_to(root).as_posix(): path.lstat() for path in root.rglob("*")}
    files = {path: kind for path, kind in found.items() if not stat.S_ISDIR(kind.st_mode)}
    for path, kind in files.items() if not faults else ():
        if not stat.S_ISREG(kind.st_mode):
            faults.append(f"{path}: is no plain file, but a link or a device")
        elif path not in stored and path not in own:
            faults.append(f"{path}: does not belong to the bundle")
        elif path in stored and kind.st_size != stored[path]["bytes"]:
            faults.append(f"{path}: has {kind.st_size} bytes of {stored[path]['bytes']}")
    refuse_faults(root, faults + [f"{path}: is missing" for path in {*stored, *own} - files.keys()])
    if seal and hash_file(root / SIGNATURE) != seal:
        refuse_faults(root, [f"{SIGNATURE}: its sha256 is not the one in {SUMS}"])
    return bundle


def _require_schema(bundle: Any) -> None:
    """Raise ValueError, or what a wrong shape raises, where a manifest is not of the schema."""
    if not isinstance(bundle, dict) or bundle.get("schema") != SCHEMA:
        raise ValueError(f"{MANIFEST} is not of the schema {SCHEMA}: another release wrote it")
    texts = [bundle[name] for name in ("made", "target", "platform", "lock", "python")]
    texts += [*bundle["wheels_absent"], *bundle["absent"].values()]
    for row in bundle["files"]:
        parts = row["parts"] or [row]
        texts += [row["path"], row["kind"], *(one[name] for one in parts for name in ("path", "sha256"))]
        sizes = [one["bytes"] for one in parts]
        if min(sizes) < 0 or sum(sizes) != row["bytes"] or not isinstance(row["bytes"] + row["mtime_ns"], int):
            raise ValueError(f"{row['path']}, whose parts are not all of it")
        if not 0 <= row["mtime_ns"] < 1 << 63:
            raise ValueError(f"{row['path']}, whose time is none")
    image = bundle["image"]
    digests = [image["digest"], *image["configs"], *(row["digest"] for row in image["signatures"])] if image else []
    named = image is None or (":" in image["name"] and image["name"][0].isalnum())
    archives = sum(row["kind"] == "image" for row in bundle["files"])
    if not named or archives != (image is not None) or not all(_DIGEST.fullmatch(one) for one in digests):
        raise ValueError(f"image {str(image)[:80]}, of which there are {archives} archives")
    if not all(isinstance(one, str) for one in texts):
        raise ValueError("a text is another kind of value")


def stored_files(bundle: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every file as it lies there, by path: a large one is its parts."""
    return {one["path"]: one for row in bundle["files"] for one in (row["parts"] or [row])}


def hash_file(path: Path, copies: tuple[tuple[Path, int], ...] = (), start: int = 0, size: int = 1 << 63) -> str:
    """The sha256 of a file, or of a piece of it, written to an offset of others on the way; no link is followed."""
    digest, at = hashlib.sha256(), 0
    outs = [(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644), offset) for to, offset in copies]
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", 0) as source:
            source.seek(start)
            while data := source.read(min(CHUNK, size - at)):
                digest.update(data)
                for out, offset in outs:
                    if os.pwrite(out, data, offset + at) != len(data):
                        raise OSError(28, "No space left on device", str(path))
                at += len(data)
    finally:
        for out, _ in outs:
            os.close(out)
    return digest.hexdigest()


def verify(root: Path, bundle: dict[str, Any], jobs: int, copies: dict[str, list[tuple[Path, int]]]) -> None:
    """Hash every file, several at a time, and copy what is wanted elsewhere on the way: one reading serves both."""

    def check(row: dict[str, Any]) -> list[str]:
        path = row["path"]
        same = hash_file(root / path, tuple(copies.get(path, ()))) == row["sha256"]
        return [] if same else [f"{path}: its sha256 is not the one in {MANIFEST}: a bit or more is another"]

    rows = sorted(stored_files(bundle).values(), key=lambda row: -row["bytes"])
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        refuse_faults(root, [fault for faults in pool.map(check, rows) for fault in faults])
    finally:
        pool.shutdown(cancel_futures=True)


def install(root: Path, bundle: dict[str, Any], jobs: int, wanted: dict[Path, str]) -> None:
    """Verify the bundle, and put parts of it into folders: written aside, renamed when all of the bundle is right.

    Args:
        wanted: folder -> prefix of what goes there, "" for everything. A folder that holds just that already stays.
    """
    copies: dict[str, list[tuple[Path, int]]] = {}
    asides: dict[Path, Path] = {}
    try:
        for folder, prefix in wanted.items():
            rows = {row["path"][len(prefix) :]: row for row in bundle["files"] if row["path"].startswith(prefix)}
            if not rows:
                raise NotTaken(f"the bundle has nothing under {prefix!r} for {folder}: leave that option out.")
            if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
                _require_same(folder, rows)
                continue
            aside = asides[folder] = folder.with_name(f".{folder.name}.restoring")
            shutil.rmtree(aside, ignore_errors=True)  # of a restore that was killed
            aside.mkdir(parents=True)
            for name, row in rows.items():
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                start = 0
                for one in row["parts"] or [row]:
                    copies.setdefault(one["path"], []).append((aside / name, start))
                    start += one["bytes"]
        verify(root, bundle, jobs, copies)
        for folder, aside in asides.items():
            _close_caches(aside, bundle, wanted[folder])
        os.sync()  # a name without its contents is what a power cut leaves
        for folder, aside in asides.items():
            if folder.exists():
                folder.rmdir()
            aside.rename(folder)
    finally:
        for aside in asides.values():
            shutil.rmtree(aside, ignore_errors=True)


def _require_same(folder: Path, rows: dict[str, dict[str, Any]]) -> None:
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    wrong = found ^ rows.keys()
    for name in found & rows.keys():
        start, same = 0, (folder / name).stat().st_size == rows[name]["bytes"]
        for one in rows[name]["parts"] or [rows[name]]:
            same = same and hash_file(folder / name, (), start, one["bytes"]) == one["sha256"]
            start += one["bytes"]
        wrong |= set() if same else {name}
    if wrong:
        raise NotTaken(
            f"{folder} is there, and is not what the bundle holds: {', '.join(sorted(wrong)[:3])}. Nothing was "
            "installed. Likely cause: somebody used it since. Next step: name another folder, or move it away."
        )


def _close_caches(aside: Path, bundle: dict[str, Any], prefix: str) -> None:
    """Caches get their times, which ninja compares, and are sealed again: read-only, for every user of a container."""
    rows = [row for row in bundle["files"] if row["kind"] == "jit" and row["path"].startswith(prefix)]
    for row in sorted(rows, key=lambda row: row["path"].endswith(("/manifest.json", "/manifest.sha256"))):
        place = aside / row["path"][len(prefix) :]
        os.utime(place, ns=(row["mtime_ns"], row["mtime_ns"]))
        place.chmod(0o444)
        for folder in place.relative_to(aside).parents:
            if prefix or folder != Path():
                (aside / folder).chmod(stat.S_IMODE((aside / folder).stat().st_mode) | 0o555)


def _run(words: list[str], cause: str, variables: dict[str, str] | None = None) -> str:
    try:
        return subprocess.run(words, env=variables, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as fault:
        said = (getattr(fault, "stderr", "") or str(fault)).strip()[-800:]
        raise NotTaken(
            f"`{' '.join(words)}` failed: {said}. Likely cause: {cause}. Next step: mend that, run it again."
        ) from fault


def _docker(*words: str) -> str:
    return _run(["docker", *words], "no Docker Engine is installed or runs here, it is not yours, or its disk is full")


def load_image(root: Path, bundle: dict[str, Any]) -> str:
    """Give the archive to `docker load`, and ask the engine for the digest of what it has now. Raises NotTaken."""
    image, row = bundle["image"], next(row for row in bundle["files"] if row["kind"] == "image")
    with subprocess.Popen(["docker", "load"], stdin=subprocess.PIPE, stdout=2) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its own words say why
            for one in row["parts"] or [row]:
                with (root / one["path"]).open("rb") as part:
                    shutil.copyfileobj(part, process.stdin, CHUNK)
    found = _docker("image", "inspect", "--format", "{{.Id}}", image["name"]).strip()
    if found not in (image["digest"], *image["configs"]):  # without the containerd store, the id is that of the config
        raise NotTaken(f"the engine has {found} as {image['name']}, and not {image['digest']}. Next step: remove that.")
    return f"loaded {image['name']} ({found})"


def push_image(root: Path, bundle: dict[str, Any], place: str) -> str:
    """Push the image, and its signatures beside it, through the engine: every digest as it is. Raises NotTaken."""
    load_image(root, bundle)
    image = bundle["image"]
    if image["signatures"]:
        _docker("load", "--input", str(root / "signatures.tar"))
    for row in (image, *image["signatures"]):
        name = f"{place}:{row['name'].rpartition(':')[2]}"
        _docker("tag", row["name"], name)
        if f"digest: {row['digest']}" not in (said := _docker("push", name)):
            raise NotTaken(
                f"{name} is not {row['digest']}: {said[-300:].strip()}. Likely cause: an engine without the containerd "
                "image store. Next step: switch it on, or `oras cp --from-oci-layout` of the archives."
            )
    return f"pushed {place}@{image['digest']} with {len(image['signatures'])} lists of signatures"


def fill_venv(root: Path, bundle: dict[str, Any], venv: Path, python: str, wheels: Path | None, name: str) -> str:
    """Make a virtual environment, and install the wheelhouse: no index, every hash that of the lock.

    Args:
        wheels: folder with the wheels whole; None: only say whether it can be done.
        name: of the bundle; an environment that was finished from it is left as it is.
    """
    note, begun = venv / "restored-from.json", venv / ".restoring"
    if note.is_file() and note.read_bytes() == json.dumps({"bundle": name}).encode():
        return f"{venv} has the wheels of this bundle already"
    if os.path.lexists(venv) and not begun.exists() and (not venv.is_dir() or any(venv.iterdir())):
        raise NotTaken(f"{venv} is there and was not made from this bundle. Next step: name another folder.")
    if absent := ", ".join(sorted(bundle["wheels_absent"])):
        raise NotTaken(f"the bundle has no wheel of {absent}: only the image has them. Next step: use --load.")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))}
    variables = {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    script = 'import sys; print("%d.%d" % sys.version_info[:2])'
    if (found := _run([python, "-c", script], "--python names no Python", variables).strip()) != bundle["python"]:
        raise NotTaken(f"{python} is Python {found}, the wheels are for {bundle['python']}. Next step: name --python.")
    if wheels is None:
        return ""
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir(parents=True)
    begun.touch()
    _run([python, "-m", "venv", str(venv)], "Debian has venv in a package of its own, python3-venv", variables)
    how = ["--no-index", "--find-links", str(wheels), "--require-hashes", "--no-deps", "--no-cache-dir", "--quiet"]
    words = [str(venv / "bin/python"), "-m", "pip", "install", *how, "--requirement", str(root / "lock.txt")]
    _run(words, "a wheel is for another machine than this", variables)
    note.write_text(json.dumps({"bundle": name}))
    begun.unlink()
    return f"installed the wheelhouse into {venv}"


def is_signed(data: Path, signature: str, key: Path) -> bool:
    """Whether a signature in base64 is by a public key in PEM over a file, as openssl says."""
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
    """Verify, then load what was asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", default=str(Path(__file__).absolute().parent), help="else this file's folder")
    for name in ("unpack", "jit", "venv", "key", "id", "push"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--python", default=sys.executable, help="the interpreter for --venv")
    parser.add_argument("--jobs", type=int, default=min(16, 2 * (os.cpu_count() or 1)), help="threads")
    given = parser.parse_args(arguments)
    if "" in vars(given).values():  # a variable without a value would ask nothing
        parser.error("an option is empty")
    for name, form in (("id", "(sha256:)?[0-9a-fA-F]{64}"), ("push", _PLACE)):
        if getattr(given, name) and not re.fullmatch(form, getattr(given, name)):
            parser.error(f"--{name} {getattr(given, name)} is not of the form {form}")
    for name in ("bundle", "unpack", "jit", "venv", "key"):
        setattr(given, name, Path(getattr(given, name)) if getattr(given, name) else None)
    if not given.bundle.is_dir() or given.jobs < 1:
        parser.error(f"there is no folder {given.bundle}, or --jobs is below 1")
    if given.key and (not given.key.is_file() or b"BEGIN PUBLIC KEY" not in given.key.read_bytes()):
        parser.error(f"{given.key} is no public key, as cosign.pub is")
    places = [one.resolve() for one in (given.bundle, given.unpack, given.jit, given.venv) if one]
    if any(places.count(one) > 1 or {*one.parents} & {*places} for one in places):
        parser.error("one of the folders is another one, or lies in it")
    try:
        return _restore(given)
    except Refused as fault:
        text, code = str(fault), fault.code
    except OSError as fault:
        text, code = f"{fault}. Likely cause: the disk is full or damaged, or not yours. Next step: mend that.", 6
    except KeyboardInterrupt:
        text, code = "interrupted; run it again, and it starts where nothing is half done", 130
    sys.stderr.write(f"restore: {text}\n")
    return code


def _restore(given: Any) -> int:
    root, bundle = given.bundle, read_bundle(given.bundle)
    name, rows = hash_file(root / MANIFEST), stored_files(bundle)
    if given.id and given.id[-64:].lower() != name:
        raise Refused(f"{root} is the bundle {name}, and not {given.id}. Nothing was installed. Copy that one.")
    if given.key:
        _require_signer(root, given.key)
    if (given.load or given.push) and not bundle["image"]:
        raise NotTaken("the bundle holds no image. Next step: leave --load and --push out.")
    venv = given.venv.absolute() if given.venv else None
    if venv:
        fill_venv(root, bundle, venv, given.python, None, name)  # before gigabytes are read
    if given.load or given.push:
        _docker("version")
    wanted = {one.resolve(): prefix for one, prefix in ((given.unpack, ""), (given.jit, "jit/")) if one}
    _say(f"verifying {len(rows)} files")
    disk = venv.parent if venv and venv.parent.is_dir() else None
    with tempfile.TemporaryDirectory(prefix=".wheels-", dir=disk) as room:
        wheels = Path(room, "wheels").resolve()
        install(root, bundle, given.jobs, {**wanted, **({wheels: "wheelhouse/"} if venv else {})})
        _say("\n".join([f"all {len(rows)} files are as they were written", *(f"restored to {one}" for one in wanted)]))
        if given.load or given.push:
            _say(push_image(root, bundle, given.push) if given.push else load_image(root, bundle))
        if venv:
            _say(fill_venv(root, bundle, venv, given.python, wheels, name))
    image = f"image {bundle['image']['name']}@{bundle['image']['digest']}" if bundle["image"] else "no image"
    _say(f"bundle {name}\n  target {bundle['target']}, {bundle['platform']}, made {bundle['made']}\n  {image}")
    _say("".join(f"  no {what}: {why}\n" for what, why in bundle["absent"].items()), end="")
    _say(f"  signature: {'by that key, if it came another way' if given.key else 'not checked (--key cosign.pub)'}")
    return 0


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not nohup's
            signal.signal(number, signal.default_int_handler)
    sys.exit(main())
