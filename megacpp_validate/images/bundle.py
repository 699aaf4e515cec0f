"""Write an offline bundle: one folder with an image, its wheels, caches and evidence, which restores with no network.

Everything is written aside, read back whole, and only then renamed: what is killed is no bundle.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from .. import TOOL
from ..catalog.images import Image
from ..errors import InfrastructureFailed, writing_to
from ..evidence.values import Result
from ..jitcache.cache import export_cache
from . import tools
from .plan import ImageRows
from .restore import CACHES, IMAGE, MANIFEST, SCHEMA, SIGNATURE, SUMS, hash_file, verify
from .supply import check_sbom, check_signature, read_public_key, require_cosign, run_cosign

_RESTORE: Final = Path(__file__).with_name("restore.py")
_NAME: Final = "io.containerd.image.name"  # by which `docker load` names an image of an OCI layout
_TAGS: Final = {"sigs": ".sig", "atts": ".att"}  # kinds of `cosign save` -> end of the tag where cosign looks for them


class BundleResult(Result):
    """A bundle.

    Attributes:
        id: SHA-256 of its SHA256SUMS, which its receiver compares.
        image: "REPOSITORY@sha256:..."; empty for none.
        signed_by: file of the key that signed it; empty for none.
        absent: what is not in it -> why.
        sizes: file or folder at the top of the bundle -> bytes.
    """

    schema_id: Literal["megacpp-validate/bundle-written/4"] = "megacpp-validate/bundle-written/4"
    target: str
    folder: str
    id: str
    image: str
    signed_by: str
    sizes: dict[str, int]
    absent: dict[str, str]


@dataclass(frozen=True)
class BundleOptions:
    """Arguments of the verb; None is what was not given."""

    target: str
    image: str | None
    out: Path
    jit: Path | None = None
    key: Path | None = None
    sign_key: Path | None = None


def write_bundle(rows: ImageRows, options: BundleOptions, report: Callable[[str], None]) -> BundleResult:
    """Read what is known of the image, write the bundle, read it back.

    Raises:
        ImageRefused: an argument is wrong, the folder is there, the image is of another lock, or a wheel is absent.
        RegistryLies, RegistryUnreachable: the registry does not give the image.
        ToolError: as `jitcache.cache.export_cache`.
        NoEnvironment: cosign is missing.
        OSError: the disk is full; nothing is left.
    """
    out = options.out
    image = rows.find([options.target])[0]
    files, absent = _gather(rows, options, image)
    with writing_to(out.parent, "the bundle", "--out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as room:
            aside = Path(room, "bundle")
            _write(rows, options, image, files, absent, aside, report)
            report("hashing, and reading it back")
            write_sums(aside)
            if options.sign_key:
                _sign(rows, options, aside)
            verify(aside)
            aside.rename(out)
        os.sync()
    sizes = Counter[str]()
    for path in (path for path in out.rglob("*") if path.is_file()):
        sizes[path.relative_to(out).parts[0]] += path.stat().st_size
    return BundleResult(
        target=options.target, folder=str(out), id=hash_file(out / SUMS), image=options.image or "",
        signed_by=str(options.sign_key or ""), absent=absent, sizes=dict(sizes),
    )  # fmt: skip


def _sign(rows: ImageRows, options: BundleOptions, aside: Path) -> None:
    """Sign the sums of a bundle.

    Raises:
        ImageRefused: the public key in the bundle is of another pair.
        NoEnvironment: cosign is missing, or cannot sign with the key.
    """
    signature = require_cosign(rows.variables, "sign-blob", "--key", str(options.sign_key), str(aside / SUMS))
    (aside / SIGNATURE).write_text(signature.strip() + "\n", encoding="utf-8")


def _gather(rows: ImageRows, options: BundleOptions, image: Image) -> tuple[dict[str, str], dict[str, str]]:
    """Check the arguments before the gigabytes, and read the evidence beside the image: name -> text; absent -> why."""
    files, absent = dict[str, str](), dict[str, str]()
    if options.out.exists():
        raise tools.ImageRefused(
            f"{options.out} already exists. Next step: name another folder, or move that folder away."
        )
    if options.key:
        files["cosign.pub"] = read_public_key(options.key)  # given away: never a private one
    if options.jit is None:
        absent["JIT caches"] = "none were named (--jit FOLDER)"
    if options.image is None:
        absent["image"] = "none was named (--image REPOSITORY@sha256:DIGEST)"
        return files, absent
    shown = tools.locate_image(options.image, rows.variables)
    pushed = tools.read_image(shown, rows.variables)
    lock = sha256((rows.root / image.lock).read_bytes()).hexdigest()
    for label, value in {tools.TARGET_LABEL: options.target, tools.LOCK_LABEL: lock}.items():
        if (seen := pushed.labels.get(label)) != value:
            raise tools.ImageRefused(
                f"the label {label} of {options.image} is {seen or 'absent'}, and the bundle would have {value}. "
                "Likely cause: the image has another lock or target. Next step: build the image again."
            )
    if pushed.provenance:
        files["provenance.json"] = _json(pushed.provenance)
    else:
        absent["provenance"] = "buildx put none beside the image"
    if options.key is None:
        absent["SBOM"] = "no key was named (--key)"
        return files, absent
    if why := check_signature(shown, options.key, rows.variables):
        absent["signature"] = why
    why, sbom = check_sbom(shown, options.key, rows.variables)
    if why:
        absent["SBOM"] = why
    else:
        files["sbom.spdx.json"] = _json(sbom)
    return files, absent


def _write(
    rows: ImageRows, options: BundleOptions, image: Image, files: dict[str, str], absent: dict[str, str], aside: Path,
    report: Callable[[str], None],
) -> None:  # fmt: skip
    """Write everything but the sums aside."""
    aside.mkdir()
    lock = rows.root / image.lock
    if options.jit is not None:
        export_cache(options.jit / image.cache_arch, aside / CACHES)
    described = None
    if options.image:
        report("fetching the image")
        shown = tools.locate_image(options.image, rows.variables)
        described = _write_image(shown, options.target, aside, rows.variables)
        if not described["signatures"]:
            absent.setdefault("signature", "the image is not signed")
    shutil.copyfile(lock, aside / "lock.txt")
    shutil.copytree(rows.root / "matrix", aside / "matrix", ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    shutil.copyfile(_RESTORE, aside / "restore.py")
    manifest = {
        "schema": SCHEMA, "tool": TOOL, "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": options.target, "platform": image.platform, "image": described,
        "lock": sha256(lock.read_bytes()).hexdigest(), "absent": absent,
    }  # fmt: skip
    for name, text in {**files, MANIFEST: _json(manifest)}.items():
        (aside / name).write_text(text, encoding="utf-8")


def write_sums(root: Path) -> None:
    """Write the SHA-256 of every file of a folder, in the form of `sha256sum`."""
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    (root / SUMS).write_text("".join(f"{hash_file(root / name)}  {name}\n" for name in names), encoding="ascii")


def _write_image(shown: str, target: str, aside: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """The OCI archive of the image with its signatures, which `docker load` takes: names and digests in it.

    Raises:
        RegistryLies: a blob is absent, or has other bytes.
        InfrastructureFailed: the disk is full.
    """
    layout, (repository, digest) = aside / "layout", shown.split("@")
    done = run_cosign(variables, "save", "--dir", str(layout), image=shown)
    if done.code:
        raise (InfrastructureFailed if "no space left" in done.errors else tools.RegistryLies)(
            f"{shown} cannot be fetched: {done.last_words}. Likely cause: the registry lost or damaged a part of it, "
            "or the disk is full. Next step: push the image again, or make room."
        )
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
    return {**rows[0], "signatures": rows[1:]}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
