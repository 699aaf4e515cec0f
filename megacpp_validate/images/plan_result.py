"""What is to be built: one image, from which digests. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ImagePlan:
    """An image that is to be built.

    Attributes:
        target: row of targets.toml.
        arch: of its GPU ("sm_90"); empty for none.
        platform: "linux/amd64" or "linux/arm64".
        base: row of images.toml; "own" where the caller named one.
        reference: of the base, by its own registry's name: "repository:tag@sha256:...".
        pulled: what is pulled: the same, or the mirror that stands in for the registry.
        verified: day on which a registry gave that digest ("2026-11-22"); empty where none has yet.
        unverified: why it is not verified; empty where it is.
        lock: file with the hash of every package, relative to the project.
        lock_hash: SHA-256 of its bytes.
        steps: scripts in containers/steps, in their order.
        sources: rows of images.toml that are built from a commit.
        arguments: build arguments of the Dockerfile.
        labels: labels of the image.
        cache_arch: name of its folder of JIT caches.
    """

    target: str
    arch: str
    platform: str
    base: str
    reference: str
    pulled: str
    verified: str
    unverified: str
    lock: str
    lock_hash: str
    steps: tuple[str, ...]
    sources: tuple[str, ...]
    cache_arch: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
