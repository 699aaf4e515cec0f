"""Write an offline bundle: one folder with an image, its wheels, caches and evidence, which restores with no network.

Everything is written aside, read back whole, and only then renamed: what is killed is no bundle.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from ..catalog.images import MACHINES, Base, Image
from ..errors import Exit, InfrastructureFailed, NoEnvironment, ToolError
from ..evidence.values import Frozen
from ..jitcache.seal import check_sealed
from .locks import read_image_lock
from .plan import ImageRows, find_images
from .restore import IMAGE, MANIFEST, SCHEMA, SIGNATURE, SUMS, hash_file, read_bundle, verify
from .supply import (
    check_private_key,
    find_signature,
    make_sbom,
    read_attested_sbom,
    read_public_key,
    save_image,
    sign_file,
)
from .tools import (
    LOCK_LABEL,
    TARGET_LABEL,
    ImageRefused,
    RegistryLies,
    call,
    locate_image,
    read_image,
)

_RESTORE: Final = Path(__file__).with_name("restore.py")
_NAME: Final = "io.containerd.image.name"  # by which `docker load` names an image of an OCI layout
_TAGS: Final = {"sigs": ".sig", "atts": ".att"}  # kinds of `cosign save` -> end of the tag where cosign looks for them


class BundleResult(Frozen):
    """A bundle.

    Attributes:
        id: SHA-256 of its manifest, which its receiver compares.
        image: "REPOSITORY@sha256:..."; empty for none.
        signed_by: file of the key that signed it; empty for none.
        absent: what is not in it -> why.
        sizes: file or folder at the top of the bundle -> bytes.
        wheels_absent: packages of the lock that are built from source.
    """

    schema_id: Literal["megacpp-validate/bundle-written/2"] = "megacpp-validate/bundle-written/2"
    tool: str
    target: str
    folder: str
    id: str
    image: str
    signed_by: str
    sizes: dict[str, int]
    absent: dict[str, str]
    wheels_absent: tuple[str, ...]
    seconds: float

    @property
    def exit(self) -> Exit:
        """It is there, and was read back."""
        return Exit.OPEN


@dataclass(frozen=True)
class BundleOptions:
    """Arguments of the verb; None is what was not given."""

    target: str
    image: str | None
    out: Path
    jit: Path | None = None
    key: Path | None = None
    sign_key: Path | None = None


@dataclass
class _Contents:
    """Small files by name, what is absent and why, and the image as "REPOSITORY@DIGEST"."""

    shown: str = ""
    files: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def write_bundle(rows: ImageRows, options: BundleOptions, say: Callable[[str], None]) -> BundleResult:
    """Read what is known of the image, write the bundle, read it back.

    Raises:
        ImageRefused: an argument is wrong, the folder is there, the image is of another lock, or a wheel is absent.
        RegistryLies, RegistryUnreachable: the registry does not give the image.
        NoEnvironment: cosign is missing.
        InfrastructureFailed: the disk does not take it; nothing is left.
    """
    started, out = time.monotonic(), options.out
    image = find_images(rows.images, [options.target])[0]
    contents = _gather(rows, options, image)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as room:
            aside = Path(room, "bundle")
            manifest = _write(rows, options, image, contents, aside, say)
            aside.rename(out)
        os.sync()
    except OSError as fault:
        raise InfrastructureFailed(
            f"the bundle {out} cannot be written: {fault}. Nothing of it is left. Likely cause: the disk of "
            f"{out.parent} is full, or this user may not write there. Next step: make room, or name another folder "
            "(--out)."
        ) from fault
    sizes = Counter[str]()
    for row in manifest["files"]:
        sizes[row["path"].partition("/")[0]] += row["bytes"]
    return BundleResult(
        tool=rows.tool, target=options.target, folder=str(out), id=hash_file(out / MANIFEST), image=options.image or "",
        signed_by=str(options.sign_key or ""), absent=contents.absent, wheels_absent=manifest["wheels_absent"],
        sizes=dict(sizes), seconds=round(time.monotonic() - started, 1),
    )  # fmt: skip


def _gather(rows: ImageRows, options: BundleOptions, image: Image) -> _Contents:
    """Check the arguments before the gigabytes, and read the evidence beside the image."""
    found = _Contents()
    if options.out.exists():
        raise ImageRefused(
            f"{options.out} already exists. Next step: `python3 {options.out}/restore.py` shows whether it is a whole "
            "bundle; name another folder, or move this one away."
        )
    if options.key:
        found.files["cosign.pub"] = read_public_key(options.key)  # given away: never a private one
    if options.sign_key:
        check_private_key(options.sign_key, rows.variables, found.files.get("cosign.pub", ""))
    if options.jit is None:
        found.absent["JIT caches"] = "none were named (--jit FOLDER)"
    else:
        _check_caches(options.jit, image.cache_arch)
    if options.image is None:
        found.absent["image"] = "none was named (--image REPOSITORY@sha256:DIGEST)"
        return found
    found.shown = locate_image(options.image, rows.variables)
    pushed = read_image(found.shown, rows.variables)
    lock = sha256((rows.root / image.lock).read_bytes()).hexdigest()
    for label, value in {TARGET_LABEL: options.target, LOCK_LABEL: lock}.items():
        if (seen := pushed.labels.get(label)) != value:
            raise ImageRefused(
                f"the label {label} of {options.image} is {seen or 'absent'}, and the bundle would have {value}. "
                "Likely cause: it was built from another lock, for another target, or by something else than this "
                "project. Next step: build it again, and push it."
            )
    try:
        if options.key and (why := find_signature(found.shown, options.key, rows.variables)):
            found.absent["signature"] = why
        found.files["sbom.spdx.json"] = (
            _json(read_attested_sbom(found.shown, options.key, rows.variables))
            if options.key
            else make_sbom(found.shown, image.platform, rows.variables)
        )
    except (NoEnvironment, RegistryLies) as fault:
        found.absent["SBOM"] = str(fault)
    if pushed.provenance:
        found.files["provenance.json"] = _json(pushed.provenance)
    else:
        found.absent["provenance"] = "buildx put none beside the image"
    return found


def _check_caches(jit: Path, arch: str) -> None:
    """Refuse caches that are not sealed, damaged, or of another architecture than the image's."""
    try:
        architecture = check_sealed(jit / arch).manifest.architecture
        links = [path for path in (jit / arch).rglob("*") if path.is_symlink()]
        if architecture != arch or links:
            raise ValueError(f"they are of {architecture}, with links: {links[:3]}")
    except (ToolError, RuntimeError, ValueError, OSError) as fault:
        raise ImageRefused(
            f"{jit} has no JIT caches of {arch} that can be bundled: {fault}. Likely cause: another target was "
            "prewarmed, or the folder is an archive. Next step: name the root that `nox -s prewarm` sealed, or import "
            "the archive into one with `nox -s jit_cache -- import`."
        ) from fault


def _write(
    rows: ImageRows, options: BundleOptions, image: Image, contents: _Contents, aside: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Write everything aside, and read it back; the manifest."""
    aside.mkdir()
    lock, base = rows.root / image.lock, rows.images.find_base(image.base)
    described = None
    if contents.shown:
        say("fetching the image")
        described = _write_image(contents, options.target, aside, rows.variables)
    say("fetching the wheels")
    absent = fetch_wheels(
        lock, {row.name for row in rows.images.compiled}, base, image, aside / "wheelhouse", rows.variables
    )
    shutil.copyfile(lock, aside / "lock.txt")
    shutil.copytree(rows.root / "matrix", aside / "matrix", ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    if options.jit is not None:
        _copy_caches(options.jit / image.cache_arch, aside / "jit" / image.cache_arch)
    for name, text in contents.files.items():
        (aside / name).write_text(text, encoding="utf-8")
    shutil.copyfile(_RESTORE, aside / "restore.py")
    say("hashing, and reading it back")
    manifest = {
        "schema": SCHEMA, "tool": rows.tool, "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": options.target, "platform": image.platform, "python": base.python, "image": described,
        "lock": sha256(lock.read_bytes()).hexdigest(), "wheels_absent": absent, "absent": contents.absent,
        "files": list_files(aside),
    }  # fmt: skip
    key = options.sign_key
    write_lists(aside, manifest, (lambda file: sign_file(file, key, rows.variables)) if key else None)
    verify(aside, read_bundle(aside), {})
    return manifest


def _write_image(contents: _Contents, target: str, aside: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """The OCI archive of the image with its signatures, which `docker load` takes: names and digests in it."""
    layout, (repository, digest) = aside / "layout", contents.shown.split("@")
    save_image(contents.shown, layout, variables)
    index = json.loads((layout / "index.json").read_bytes())
    rows = []
    for row in index["manifests"]:
        end = _TAGS.get(row["annotations"]["kind"].rpartition("/")[2], "")
        tag = f"{digest.replace(':', '-')}{end}" if end else f"{target}-{digest[7:19]}"
        row["annotations"] = {_NAME: f"{repository}:{tag}", "org.opencontainers.image.ref.name": tag}
        rows.append({"name": f"{repository}:{tag}", "digest": row["digest"]})
    (layout / "index.json").write_text(json.dumps(index))
    with tarfile.open(aside / IMAGE, "w") as archive:
        archive.add(layout, ".")
    shutil.rmtree(layout)
    if len(rows) == 1:
        contents.absent.setdefault("signature", "the image is not signed")
    return {**rows[0], "signatures": rows[1:]}


def list_platforms(glibc: str, machine: str) -> list[str]:
    """Platform tags of wheels that run on a glibc ("2.39") and machine; pip itself adds those before manylinux2014."""
    newest = int(glibc.partition(".")[2])
    found = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, 4, -1)]
    return [*found, f"manylinux2014_{machine}", f"linux_{machine}"]


def fetch_wheels(
    lock: Path, compiled: set[str], base: Base, image: Image, folder: Path, variables: Mapping[str, str]
) -> list[str]:
    """Fetch the wheels of a lock, each by its hashes, for the Python and the glibc of the image's base.

    Args:
        compiled: packages that are locked as their source release, which the image compiles.

    Returns:
        Those of them that are in the lock: the bundle has no wheel of them.

    Raises:
        ImageRefused: the lock cannot be read, or the index does not give what it lists.
    """
    packages = read_image_lock(lock).packages
    folder.mkdir()
    absent = sorted(compiled & packages.keys())
    wanted = [
        " ".join((f"{name}=={row.version}", *(f"--hash=sha256:{one}" for one in sorted(row.hashes))))
        for name, row in packages.items()
        if name not in absent
    ]
    version = base.python.replace(".", "")
    platforms = list_platforms(base.glibc, MACHINES[image.platform])
    with tempfile.TemporaryDirectory(prefix="megacpp-wheels-") as room:
        file = Path(room, "lock.txt")
        file.write_text("\n".join(wanted) + "\n", encoding="utf-8")
        words = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"),
            *("--require-hashes", "--no-deps", "--only-binary", ":all:", "--implementation", "cp"),
            *("--python-version", version, "--abi", f"cp{version}", "--abi", "abi3", "--abi", "none"),
            *(word for name in platforms for word in ("--platform", name)),
            *("--dest", str(folder), "--requirement", str(file)),
        ]
        done = call(words, variables, limit_s=7200) if wanted else None
    if done and done.code:
        raise ImageRefused(
            f"the wheels of {lock} cannot be fetched: {done.last_words[-900:]}. Likely cause: the index is not "
            "reached, has no wheel of a package, or gives another file than the lock lists. Next step: `pip config "
            "list` shows which index it is; where hashes differ, do not use what it gives, and run `nox -s lock`."
        )
    return absent


def _copy_caches(source: Path, target: Path) -> None:
    """Files and their times, and no modes: a sealed cache is read-only, and this folder is written to."""
    for path in source.rglob("*"):
        if path.is_file() and "locks" not in path.relative_to(source).parts:
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
            times = path.stat()
            os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))


def list_files(root: Path) -> list[dict[str, Any]]:
    """Every file under a folder with its size and hash; of JIT caches also the time, which ninja compares."""
    found = []
    for place in sorted(path for path in root.rglob("*") if path.is_file()):
        path, status = place.relative_to(root).as_posix(), place.stat()
        time_ns = status.st_mtime_ns if path.startswith("jit/") else 0
        found.append({"path": path, "bytes": status.st_size, "sha256": hash_file(place), "mtime_ns": time_ns})
    return found


def write_lists(root: Path, manifest: Mapping[str, Any], sign: Callable[[Path], str] | None) -> None:
    """Write the manifest, its signature where somebody signs, and last the sums, without which it is no bundle."""
    (root / MANIFEST).write_text(_json(manifest), encoding="utf-8")
    if sign:
        (root / SIGNATURE).write_text(sign(root / MANIFEST) + "\n", encoding="utf-8")
    sums = {row["path"]: row["sha256"] for row in manifest["files"]}
    sums |= {name: hash_file(root / name) for name in (MANIFEST, SIGNATURE) if (root / name).is_file()}
    os.sync()
    (root / SUMS).write_text("".join(f"{digest}  {path}\n" for path, digest in sorted(sums.items())), encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
