"""What is said of a bundle."""

from __future__ import annotations

from typing import Final

from ...images.bundle.result import BundleKind, BundleResult
from ..summaries import count

_NAMES: Final = {
    "image": "image, an OCI archive", "wheel": "wheelhouse", "jit": "JIT caches", "matrix": "matrix", "lock": "lock",
    "signature": "signatures of the image", "sbom": "SBOM, SPDX", "provenance": "provenance, SLSA",
    "licences": "licences", "key": "public key", "restore": "restore command", "words": "how to restore",
}  # fmt: skip


def name_kind(row: BundleKind) -> str:
    """What a kind of file is called."""
    return _NAMES.get(row.kind, row.kind)


def say_size(size: int) -> str:
    """Bytes, in the unit that fits."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def say_kind(row: BundleKind) -> str:
    """Files, and in how many parts the large ones lie."""
    in_parts = f" in {count(row.parts, 'part')}" if row.parts else ""
    return f"{count(row.files, 'file')}{in_parts}"


def summarize_bundle(result: BundleResult) -> str:
    """The answer in a sentence."""
    files = sum(row.files for row in result.kinds)
    whose = f"signed by {result.signed_by}" if result.signed_by else "not signed (--sign-key)"
    return (
        f"{result.folder}: {count(files, 'file')}, {say_size(result.bytes)}, {whose}; read back whole. "
        f"Its id is {result.id}: say it to whoever restores it (`python3 restore.py --id`)."
    )


def say_absent(result: BundleResult) -> list[str]:
    """What is not in it, and why."""
    lines = [f"no {what}: {why}" for what, why in result.absent.items()]
    if result.wheels_absent:
        lines.append(f"no wheel of {', '.join(result.wheels_absent)}: built from source; the image has them")
    return lines
