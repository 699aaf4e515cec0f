"""An image as an OCI archive: which bytes it is made of, and where each blob lies, known before the first is fetched.

https://github.com/opencontainers/image-spec/blob/main/image-layout.md in a tar. The blobs are those of the registry,
byte for byte, so every digest stays what it is. `manifest.json` is for engines that do not keep images by their digest.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...evidence.json_text import read_json
from ..contents import Contents
from ..manifests import INDEXES
from ..refusals import RegistryLies

FILE: Final = "image.tar"
_BLOCK: Final = tarfile.BLOCKSIZE
_DEPTH: Final = 3  # an index of indexes of manifests is more than anyone builds


@dataclass(frozen=True)
class Blob:
    """A piece of an image.

    Attributes:
        digest: its content's.
        size: bytes.
        body: its content where it is known already: manifests, and what is fetched for them.
    """

    digest: str
    size: int
    body: bytes | None = None


@dataclass(frozen=True)
class ImageTree:
    """All that a digest leads to.

    Attributes:
        digest, kind: of what was asked for, and its media type.
        blobs: each once; manifests first.
        images: of what can be run: digest of the configuration -> digests of its layers.
        runs: digests of the manifests of these.
    """

    digest: str
    kind: str
    blobs: tuple[Blob, ...]
    images: Mapping[str, tuple[str, ...]]
    runs: frozenset[str]

    @property
    def size(self) -> int:
        """Bytes of all blobs."""
        return sum(blob.size for blob in self.blobs)

    @property
    def names(self) -> frozenset[str]:
        """Every digest by which it may be named: of the index, of its images, and of their configurations."""
        return frozenset({self.digest, *self.runs, *self.images})

    def find(self, digest: str) -> Blob:
        """A blob by its digest."""
        return next(blob for blob in self.blobs if blob.digest == digest)


def read_tree(contents: Contents, digest: str) -> ImageTree:
    """What a digest leads to: the manifests are fetched, the layers are not.

    Raises:
        RegistryUnreachable, RegistryLies: as `Contents.manifest`; or a manifest is none.
    """
    blobs: dict[str, Blob] = {}
    images: dict[str, dict[str, tuple[str, ...]]] = {}
    kind = _walk(contents, digest, blobs, images, _DEPTH)
    ordered = sorted(blobs.values(), key=lambda blob: blob.body is None)
    found = {config: layers for row in images.values() for config, layers in row.items()}
    return ImageTree(digest, kind, tuple(ordered), found, frozenset(images))


def _walk(
    contents: Contents, digest: str, blobs: dict[str, Blob], images: dict[str, dict[str, tuple[str, ...]]], depth: int
) -> str:
    body = contents.manifest(digest)
    blobs[digest] = Blob(digest, len(body), body)
    try:
        manifest: dict[str, Any] = read_json(body)
        kind = str(manifest.get("mediaType") or "application/vnd.oci.image.manifest.v1+json")
        if kind in INDEXES or "manifests" in manifest:
            if not depth:
                raise ValueError("indexes lead to indexes")
            for child in manifest["manifests"]:
                _walk(contents, child["digest"], blobs, images, depth - 1)
            return kind
        rows = [manifest["config"], *manifest["layers"]]
        for row in rows:
            blobs.setdefault(row["digest"], Blob(row["digest"], int(row["size"])))
        if all("in-toto" not in row["mediaType"] for row in manifest["layers"]):
            images[digest] = {manifest["config"]["digest"]: tuple(row["digest"] for row in manifest["layers"])}
    except (ValueError, KeyError, TypeError) as fault:
        raise RegistryLies(
            f"{contents.host}/{contents.path}@{digest} is no manifest of an image: {fault!r}. Likely cause: it is of "
            "another kind, or of the first schema. Next step: build and push it again with buildx."
        ) from fault
    return kind


@dataclass(frozen=True)
class Segment:
    """Bytes that follow each other in the archive: known ones, or those of a blob."""

    size: int
    body: bytes | None
    digest: str = ""


def plan_archive(tree: ImageTree, name: str) -> tuple[Segment, ...]:
    """The archive as it will be, byte for byte: the same for the same image and name.

    Args:
        tree: what is in it.
        name: "REPOSITORY:TAG" that an engine shall give it.
    """
    top = {
        "mediaType": tree.kind,
        "digest": tree.digest,
        "size": tree.find(tree.digest).size,
        "annotations": {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        },
    }
    index = {"schemaVersion": 2, "mediaType": INDEXES[0], "manifests": [top]}
    # Of several platforms an engine that reads this takes the first; it knows no attestations.
    docker = [
        {"Config": _path(config), "RepoTags": [name], "Layers": [_path(layer) for layer in layers]}
        for config, layers in list(tree.images.items())[:1]
    ]
    files = [("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'), ("index.json", _json(index))]
    files += [("manifest.json", _json(docker))]
    segments = [piece for path, body in files for piece in _member(path, Segment(len(body), body))]
    for blob in tree.blobs:
        segments += _member(_path(blob.digest), Segment(blob.size, blob.body, blob.digest))
    return (*segments, Segment(2 * _BLOCK, bytes(2 * _BLOCK)))


def _member(path: str, content: Segment) -> Iterator[Segment]:
    head = tarfile.TarInfo(path)
    head.size, head.mode = content.size, 0o644
    text = head.tobuf(tarfile.GNU_FORMAT)  # it has sizes beyond 8 GiB, and every engine reads it
    yield Segment(len(text), text)
    yield content
    if rest := -content.size % _BLOCK:
        yield Segment(rest, bytes(rest))


def _path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
