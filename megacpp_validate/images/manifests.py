"""What a registry's documents say: an index over platforms, or the manifest of one image. Pure, and believes no shape.

https://github.com/opencontainers/image-spec: a platform is optional in an index, and so is its variant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from ..evidence.json_text import read_json

INDEXES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_FIRST: Final = ("", "v8")  # variants that a platform without one means: linux/arm64 is v8


class NoManifest(ValueError):
    """A document is no index and no manifest of today; the text says what it is instead."""


class NoJson(NoManifest):
    """It is not even JSON."""


@dataclass(frozen=True)
class Document:
    """An index, or a manifest.

    Attributes:
        platforms: of an index: platform ("linux/amd64") -> digest of the image for it.
        nameless: of an index: digests of images whose platform it does not say.
        config: of a manifest: digest of the configuration, which says its platform.
    """

    platforms: dict[str, str]
    nameless: tuple[str, ...] = ()
    config: str = ""

    @property
    def is_index(self) -> bool:
        """Whether it is an index over platforms."""
        return not self.config


def read_document(raw: bytes) -> Document:
    """A document as typed values.

    Raises:
        NoManifest: it is none, an old one, or one of its entries is none.
    """
    body = read_object(raw)
    kind = body.get("mediaType") or ""
    if "manifests" in body:
        if kind not in ("", *INDEXES):
            raise NoManifest(f"a manifest of the kind {kind!r}")
        return _read_index(body["manifests"])
    config = body.get("config")
    digest = config.get("digest") if isinstance(config, dict) else None
    if kind not in ("", *MANIFESTS) or not _is_digest(digest):
        raise NoManifest(f"one of the kind {kind!r}" if kind not in ("", *MANIFESTS) else "one without a configuration")
    return Document({}, config=str(digest))


def read_object(raw: bytes) -> dict[str, Any]:
    """A JSON object of the second schema.

    Raises:
        NoManifest: it is none.
    """
    try:
        body = read_json(raw.decode())
    except ValueError as fault:
        raise NoJson(repr(raw[:60])) from fault
    if not isinstance(body, dict) or body.get("schemaVersion", 2) != 2:
        raise NoManifest(repr(raw[:60]))
    return body


def name_platform(told: dict[str, Any]) -> str:
    """A platform as people write it."""
    return f"{told.get('os', '')}/{told.get('architecture', '')}"


def _read_index(rows: Any) -> Document:
    if not isinstance(rows, list):
        raise NoManifest("an index without a list of manifests")
    found: dict[str, tuple[int, str]] = {}
    nameless: list[str] = []
    for row in rows:
        digest = row.get("digest") if isinstance(row, dict) else None
        if not _is_digest(digest):
            raise NoManifest(f"an index, one entry of which has no digest: {row!r:.80}")
        platform = row.get("platform")
        if not isinstance(platform, dict):
            nameless.append(str(digest))
            continue
        name, variant = name_platform(platform), platform.get("variant") or ""
        rank = _FIRST.index(variant) if variant in _FIRST else len(_FIRST)
        if not name.startswith("unknown/") and rank < found.get(name, (len(_FIRST) + 1, ""))[0]:
            found[name] = (rank, str(digest))
    return Document({name: digest for name, (_, digest) in found.items()}, tuple(nameless))


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and bool(_DIGEST.fullmatch(text))
