"""Write an offline bundle: one folder with an image, its wheels, caches and evidence, which restores with no network.

Everything is written aside, read back whole, and only then renamed. What is killed is no bundle; the same command goes
on there: oras and pip keep what they fetched.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from filelock import FileLock, Timeout

from ..catalog.images import MACHINES, Base, Image
from ..errors import Exit, InfrastructureFailed, NoEnvironment, ToolError
from ..evidence.values import Frozen
from ..jitcache.seal import check_sealed
from ..jitcache.transfer import read_carried
from .build import ImageRows
from .locks import LockedPackage, read_image_lock
from .plan import find_images
from .restore import MANIFEST, SCHEMA, SIGNATURE, SUMS, hash_file, read_bundle, verify
from .supply import (
    LICENCES,
    SPDX,
    compare_sbom,
    find_signature,
    list_licences,
    list_sources,
    list_tags,
    make_sbom,
    prove_key,
    read_public_key,
    read_sbom,
    read_statements,
    sign_file,
    write_licences,
)
from .tools import (
    LOCK_LABEL,
    TARGET_LABEL,
    ImageRefused,
    ImageTree,
    Registry,
    RegistryLies,
    call,
    read_tree,
    split_reference,
)
from .verify import read_provenance

_RESTORE: Final = Path(__file__).with_name("restore.py")
_KINDS: Final = {
    "image": "image.tar", "wheel": "wheelhouse/", "jit": "jit/", "matrix": "matrix/", "signature": "signatures.tar",
    "sbom": "sbom.spdx.json", "provenance": "provenance.json", "licences": "licences.json", "lock": "lock.txt",
    "key": "cosign.pub", "restore": "restore.py", "words": "README.txt",
}  # fmt: skip
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?I?)B?", re.IGNORECASE)
_LEGACY: Final = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
_NAME: Final = "io.containerd.image.name"  # by which `docker load` names an image of an OCI layout
_REF: Final = "org.opencontainers.image.ref.name"
_README: Final = """\
An offline bundle for the target {target}, written by megacpp-validate.

    python3 restore.py            verifies every file, and lists what is inside
    python3 restore.py --help     lists what it can be loaded into

Without Python: `sha256sum -c SHA256SUMS`, then `cat image.tar* | docker load`.
"""


class BundleKind(Frozen):
    """The files of one kind, and in how many parts the large ones lie."""

    kind: str
    files: int
    parts: int
    bytes: int


class BundleResult(Frozen):
    """A bundle.

    Attributes:
        id: SHA-256 of its manifest, which its receiver compares.
        image: "REPOSITORY@sha256:..."; empty for none.
        signed_by: file of the key that signed it; empty for none.
        absent: what is not in it -> why.
        wheels_absent: packages of the lock that are built from source.
    """

    schema_id: Literal["megacpp-validate/bundle-written/1"] = "megacpp-validate/bundle-written/1"
    tool: str
    target: str
    folder: str
    id: str
    image: str
    signed_by: str
    part_bytes: int
    kinds: tuple[BundleKind, ...]
    absent: dict[str, str]
    wheels_absent: tuple[str, ...]
    seconds: float

    @property
    def exit(self) -> Exit:
        """It is there, and was read back."""
        return Exit.OPEN

    @property
    def bytes(self) -> int:
        """Of all of it."""
        return sum(row.bytes for row in self.kinds)


@dataclass(frozen=True)
class BundleOptions:
    """Arguments of the verb; None is what was not given."""

    target: str
    image: str | None
    out: Path
    part_size: str = "4GiB"
    jit: Path | None = None
    key: Path | None = None
    sign_key: Path | None = None


@dataclass
class _Contents:
    """What goes into a bundle beside the wheels: small files by name, and what is absent, and why."""

    registry: Registry | None = None
    tree: ImageTree | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def read_size(text: str) -> int:
    """Bytes, from "4GiB", "700MB" or "1000000".

    Raises:
        ImageRefused: it is no size, or too small for a part.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise ImageRefused(f"--part-size {text!r} is no size. Next step: write 4GiB, 700MB or a number of bytes.")
    size = int(float(found[1]) * _UNITS[found[2].upper()])
    if size < 1 << 20:
        raise ImageRefused(f"parts of {size} bytes are too small. Next step: use at least 1MiB.")
    return size


def write_bundle(rows: ImageRows, options: BundleOptions, say: Callable[[str], None]) -> BundleResult:
    """Read what is known of the image, write the bundle, read it back.

    Raises:
        ImageRefused: an argument is wrong, the folder is there, the image is of another lock, or a wheel is absent.
        RegistryLies, RegistryUnreachable: the image cannot be had.
        NoEnvironment: oras, cosign or openssl is missing.
        InfrastructureFailed: the disk does not take it; what was written stays aside and is no bundle.
    """
    started, out = time.monotonic(), options.out
    image, part_bytes = find_images(rows.images, [options.target])[0], read_size(options.part_size)
    public = _check_arguments(rows, options, image)
    contents = _gather(rows, options, image)
    if options.key:
        contents.files["cosign.pub"] = public.encode()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = out.with_name(f".{out.name}.writing")
        with FileLock(f"{aside}.lock", timeout=0):
            manifest = _write(rows, options, image, contents, aside, part_bytes, say)
            aside.rename(out)
        Path(f"{aside}.lock").unlink(missing_ok=True)
        os.sync()
    except Timeout as fault:
        raise ImageRefused(f"another process writes {out} now. Next step: wait, or name another folder.") from fault
    except OSError as fault:
        raise InfrastructureFailed(
            f"the bundle stopped: {fault}. Nothing of it can be taken for a bundle. Likely cause: the disk of "
            f"{out.parent} is full, or that folder is not yours. Next step: make room and run it again, it goes on "
            f"where it was; or remove {out.parent / f'.{out.name}.writing'}."
        ) from fault
    return BundleResult(
        tool=rows.tool, target=options.target, folder=str(out), id=hash_file(out / MANIFEST), image=options.image or "",
        signed_by=str(options.sign_key or ""), part_bytes=part_bytes, kinds=_count(manifest["files"]),
        absent=contents.absent, wheels_absent=manifest["wheels_absent"], seconds=round(time.monotonic() - started, 1),
    )  # fmt: skip


def _check_arguments(rows: ImageRows, options: BundleOptions, image: Image) -> str:
    """Report whatever is wrong with the arguments before the gigabytes; the text of the public key."""
    if options.out.exists():
        raise ImageRefused(
            f"{options.out} is there already. Next step: `python3 {options.out}/restore.py` says whether it is a whole "
            "bundle; name another folder, or move this one away."
        )
    nearest = next(path for path in options.out.absolute().parents if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as fault:
        if fault.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise ImageRefused(
                f"{options.out} cannot be written: {fault}. Next step: give --out another folder."
            ) from fault
    for path in filter(None, (options.jit, options.key, options.sign_key)):
        if not path.exists():
            raise ImageRefused(f"there is no {path}. Next step: check the name.")
    if options.jit:
        _check_caches(options.jit, image.cache_arch)
    public = read_public_key(options.key, rows.variables) if options.key else ""  # given away: never a private one
    if options.sign_key:
        prove_key(options.sign_key, rows.variables, options.key)
    return public


def _check_caches(jit: Path, arch: str) -> None:
    """Refuse caches that are not sealed, damaged, or of another architecture than the image's."""
    try:
        manifest = check_sealed(jit / arch).manifest if jit.is_dir() else read_carried(jit)[0]
    except (ToolError, RuntimeError, ValueError, OSError) as fault:
        raise ImageRefused(f"{jit} has no JIT caches of {arch} that can be bundled: {fault}") from fault
    if manifest.architecture != arch:
        raise ImageRefused(
            f"{jit} holds the JIT caches of {manifest.architecture}, and the image is for {arch}. Likely cause: "
            "another target was prewarmed. Next step: name the root that has a folder of this architecture."
        )


def _gather(rows: ImageRows, options: BundleOptions, image: Image) -> _Contents:
    """The image's manifests and the evidence beside it; an image of another target or lock is refused."""
    if options.image is None:
        absent = {"image": "none was named (--image REPOSITORY@sha256:DIGEST)"}
        return _Contents(absent=absent | ({} if options.jit else {"JIT caches": "none were named (--jit FOLDER)"}))
    repository, digest = split_reference(options.image)
    registry = Registry.open(repository, rows.variables)
    tree = read_tree(registry, digest)
    found = _Contents(registry, tree)
    lock = sha256((rows.root / image.lock).read_bytes()).hexdigest()
    for label, value in {TARGET_LABEL: options.target, LOCK_LABEL: lock}.items():
        if tree.labels.get(label) != value:
            said = f"says {label}={tree.labels[label]}" if label in tree.labels else f"has no label {label}"
            raise ImageRefused(
                f"the image {digest} {said}, and the bundle would have {value}. Likely cause: it was built from "
                "another lock, for another target, or by something else than this project. Next step: build it "
                "anew, and push it."
            )
    if options.key and (why := find_signature(registry, digest, options.key)):
        found.absent["signature"] = why
    statements = read_statements(
        registry, digest, options.key
    )  # what others attested is left aside where there is a key
    attested = {one.kind: one.predicate for one in statements if digest in one.subjects and one.signed is not False}
    try:
        if SPDX in attested and (why := compare_sbom(attested[SPDX], tree.names)):
            raise RegistryLies(
                f"the SBOM that was attested of {options.image} is of another image: {why}. Likely cause: `image_sign "
                "--sbom` was given that of another image. Next step: sign it anew with `nox -s image_sign`."
            )
        sbom = (
            _json(attested[SPDX]) if SPDX in attested else make_sbom(registry, digest, image.platform, rows.variables)
        )
        found.files["sbom.spdx.json"] = sbom
    except NoEnvironment as fault:
        sbom = b""
        found.absent["SBOM"] = f"none was attested of the image{' by this key' if options.key else ''}, and {fault}"
    made = list_licences(read_sbom(sbom) if sbom else (), list_sources(rows, options.target))
    found.files["licences.json"] = _json(attested[LICENCES]) if LICENCES in attested else write_licences(made)
    provenance = [
        {"subject": subject, "kind": row.kind, "predicate": row.predicate}
        for subject, row in read_provenance(registry, tree).items()
    ]
    found.files |= {"provenance.json": _json(provenance)} if provenance else {}
    found.absent |= {} if provenance else {"provenance": "buildx put none beside the image"}
    found.absent |= {} if options.jit else {"JIT caches": "none were named (--jit FOLDER)"}
    return found


def _write(
    rows: ImageRows, options: BundleOptions, image: Image, contents: _Contents, aside: Path, part_bytes: int,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Write everything aside, and read it back; the manifest."""
    tree, lock = contents.tree, rows.root / image.lock
    note = f"{options.image} {options.target}"
    if aside.is_dir() and (aside / ".order").is_file() and (aside / ".order").read_text() == note:
        for path in aside.iterdir():  # of one that was killed, layers and wheels stay
            if path.name not in ("layout", "wheelhouse", ".order"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(exist_ok=True)
    (aside / ".order").write_text(note)
    described = None
    if contents.registry and tree:
        say(f"fetching the image, {sum(tree.blobs.values()) / 1e9:.2f} GB")
        described = _write_image(contents, contents.registry, tree, options.target, aside)
    say("fetching the wheels")
    compiled = {row.name for row in rows.images.compiled}
    absent = fetch_wheels(
        lock, compiled, rows.images.find_base(image.base), image, aside / "wheelhouse", rows.variables
    )
    shutil.copyfile(lock, aside / "lock.txt")
    shutil.copytree(rows.root / "matrix", aside / "matrix", ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    if options.jit is not None:
        _copy_caches(options.jit, image.cache_arch, aside / "jit")
    for name, body in contents.files.items():
        (aside / name).write_bytes(body)
    shutil.copyfile(_RESTORE, aside / "restore.py")
    (aside / "README.txt").write_text(_README.format(target=options.target), encoding="utf-8")
    (aside / ".order").unlink()
    say("hashing, and reading it back")
    manifest = {
        "schema": SCHEMA, "tool": rows.tool, "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": options.target, "platform": image.platform, "python": rows.images.find_base(image.base).python,
        "image": described, "lock": sha256(lock.read_bytes()).hexdigest(), "part_bytes": part_bytes,
        "wheels_absent": absent, "absent": contents.absent, "files": list_files(aside, part_bytes),
    }  # fmt: skip
    key = options.sign_key
    write_lists(aside, manifest, (lambda file: sign_file(file, key, rows.variables)) if key else None)
    verify(aside, read_bundle(aside), 2 * (os.cpu_count() or 1), {})
    return manifest


def _write_image(contents: _Contents, registry: Registry, tree: ImageTree, target: str, aside: Path) -> dict[str, Any]:
    """The OCI archive of the image, and the OCI layout of its signatures; every digest as the registry has it."""
    layout, name = aside / "layout", f"{registry.repository}:{target}-{tree.digest[7:19]}"
    tag = name.rpartition(":")[2]
    if not registry.copy(tree.digest, layout, tag):
        raise RegistryLies(f"{registry.repository} lost {tree.digest}. Next step: push the image again.")
    index = json.loads((layout / "index.json").read_bytes())
    notes = {_NAME: name, _REF: tag}
    index["manifests"] = [row | {"annotations": notes} for row in index["manifests"] if row["digest"] == tree.digest]
    (layout / "index.json").write_text(json.dumps(index))
    manifests = [json.loads(_blob(layout, digest).read_bytes()) for digest in list(tree.configs)[:1]]
    rows = [  # for engines that do not keep images by their digest; of several platforms they take the first
        {
            "Config": _blob(Path(), one["config"]["digest"]).as_posix(),
            "RepoTags": [name],
            "Layers": [_blob(Path(), layer["digest"]).as_posix() for layer in one["layers"]],
        }
        for one in manifests
    ]
    (layout / "manifest.json").write_text(json.dumps(rows))
    _write_archive(layout, aside / "image.tar")
    tags = [one for one in list_tags(tree.digest) if registry.copy(one, layout, one)]
    signatures = [{"name": f"{registry.repository}:{one}", "digest": ""} for one in tags]
    if signatures:
        index = json.loads((layout / "index.json").read_bytes())
        tagged = {row["annotations"].get(_REF): row for row in index["manifests"] if row.get("annotations")}
        for signed in signatures:
            row = tagged[signed["name"].rpartition(":")[2]]
            row["annotations"] |= {_NAME: signed["name"]}
            signed["digest"] = row["digest"]
        index["manifests"] = list(tagged.values())
        (layout / "index.json").write_text(json.dumps(index))
        _write_archive(layout, aside / "signatures.tar")
    else:
        contents.absent.setdefault("signature", "nobody has signed the image")
    configs = [one["digest"] for one in (manifest["config"] for manifest in manifests)]
    return {"name": name, "digest": tree.digest, "configs": configs, "signatures": signatures}


def _write_archive(layout: Path, file: Path) -> None:
    """A layout as one file, and the layout removed: for `docker load`, and for `oras cp --from-oci-layout`."""
    with tarfile.open(file, "w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(layout.rglob("*")):
            if path.is_file() and "ingest" not in path.relative_to(layout).parts:
                archive.add(path, path.relative_to(layout).as_posix(), filter=_plain)
    shutil.rmtree(layout)


def _blob(folder: Path, digest: str) -> Path:
    return folder / "blobs" / digest.replace(":", "/")


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member whose bytes do not depend on when and as whom it was written."""
    info.mtime = info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o644
    return info


def list_platforms(glibc: str, machine: str) -> list[str]:
    """Platform tags of wheels that run on a glibc ("2.39") and machine, newest first: pip takes each by its name."""
    found = []
    for minor in range(int(glibc.partition(".")[2]), 4, -1):
        found += [f"manylinux_2_{minor}_{machine}"] + ([f"{_LEGACY[minor]}_{machine}"] if minor in _LEGACY else [])
    return [*found, f"linux_{machine}"]


def fetch_wheels(
    lock: Path, compiled: set[str], base: Base, image: Image, folder: Path, variables: Mapping[str, str]
) -> list[str]:
    """Fetch the wheels of a lock, each by its hashes, for the Python and the glibc of the image's base.

    Args:
        compiled: packages that are locked as their source release, which the image compiles.

    Returns:
        Those of them that are in the lock: the bundle has no wheel of them.

    Raises:
        ImageRefused: the lock cannot be read, or the index does not give what it says.
    """
    packages: Mapping[str, LockedPackage] = read_image_lock(lock).packages
    folder.mkdir(parents=True, exist_ok=True)
    absent = sorted(compiled & packages.keys())
    wanted = [
        " ".join((f"{name}=={row.version}", *(f"--hash=sha256:{one}" for one in sorted(row.hashes))))
        for name, row in packages.items()
        if name not in absent
    ]
    version, platforms = base.python.replace(".", ""), list_platforms(base.glibc, MACHINES[image.platform])
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
            "reached, has no wheel of a package, or gives another file than the lock says. Next step: `pip "
            "config list` "
            "shows which index it is; where hashes differ, do not use what it gives, and run `nox -s lock`."
        )
    known = {one for row in packages.values() for one in row.hashes}
    for path in folder.iterdir():  # of another lock, or of a pip that was killed
        if hash_file(path) not in known:
            path.unlink()
    return absent


def _copy_caches(source: Path, arch: str, target: Path) -> None:
    """Files and their times, and no modes: a sealed cache is read-only, and this folder is written to."""
    folder = source / arch if source.is_dir() else source
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
        if path.is_symlink():
            raise ImageRefused(
                f"{path} is a link, which no bundle holds: it leads elsewhere there. Next step: export the caches with "
                "`nox -s jit_cache -- export`, and bundle what that writes."
            )
        place = target / path.relative_to(source if source.is_dir() else source.parent)
        if path.is_file() and "locks" not in path.relative_to(source.parent).parts:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
            times = path.stat()
            os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))


def list_files(root: Path, most: int) -> list[dict[str, Any]]:
    """Every file under a folder with its size and hash; those over `most` bytes are cut into parts."""
    found = []
    for place in sorted(path for path in root.rglob("*") if path.is_file()):
        path, status = place.relative_to(root).as_posix(), place.stat()
        kind = next(
            kind for kind, start in _KINDS.items() if path == start or (start[-1] == "/" and path.startswith(start))
        )
        parts = [
            {"path": one.relative_to(root).as_posix(), "bytes": one.stat().st_size, "sha256": hash_file(one)}
            for one in (_cut(place, status.st_size, most) if status.st_size > most else ())
        ]
        found.append(
            {
                "path": path, "kind": kind, "bytes": status.st_size, "sha256": "" if parts else hash_file(place),
                "parts": parts, "mtime_ns": status.st_mtime_ns if kind == "jit" else 0,
            }
        )  # fmt: skip
    return found


def _cut(place: Path, size: int, most: int) -> list[Path]:
    """A file as parts, cut from its end: the disk never holds more than one of them twice."""
    cut = []
    for number in range(-(-size // most) - 1, -1, -1):
        part = place.with_name(f"{place.name}.part{number:04d}")
        with place.open("r+b") as source, part.open("wb") as target:
            source.seek(number * most)
            shutil.copyfileobj(source, target, 1 << 20)
            source.truncate(number * most)
        cut.append(part)
    place.unlink()
    return cut[::-1]


def write_lists(root: Path, manifest: Mapping[str, Any], sign: Callable[[Path], str] | None) -> None:
    """Write the manifest, its signature where somebody signs, and last the sums, without which it is no bundle."""
    (root / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if sign:
        (root / SIGNATURE).write_text(sign(root / MANIFEST) + "\n", encoding="utf-8")
    sums = {one["path"]: one["sha256"] for row in manifest["files"] for one in (row["parts"] or [row])}
    sums |= {name: hash_file(root / name) for name in (MANIFEST, SIGNATURE) if (root / name).is_file()}
    os.sync()
    (root / SUMS).write_text("".join(f"{digest}  {path}\n" for path, digest in sorted(sums.items())), encoding="utf-8")


def _count(files: list[dict[str, Any]]) -> tuple[BundleKind, ...]:
    kinds = dict.fromkeys(row["kind"] for row in files)
    own = {kind: [row for row in files if row["kind"] == kind] for kind in kinds}
    return tuple(
        BundleKind(
            kind=kind,
            files=len(rows),
            parts=sum(len(row["parts"]) for row in rows),
            bytes=sum(row["bytes"] for row in rows),
        )
        for kind, rows in own.items()
    )


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
