"""A bundle that was written: what is in it, and what is not."""

from __future__ import annotations

from typing import Literal

from ...evidence.values import Frozen


class BundleKind(Frozen):
    """The files of one kind.

    Attributes:
        kind: "image", "wheel", "jit", ...
        files: how many.
        parts: in how many pieces those lie that are larger than a part may be.
        bytes: of all of them.
    """

    kind: str
    files: int
    parts: int
    bytes: int


class BundleResult(Frozen):
    """A bundle.

    Attributes:
        folder: where it is.
        id: SHA-256 of its manifest: what its receiver compares.
        image: "REPOSITORY@sha256:..."; empty for none.
        signed_by: file of the key that signed it; empty for none.
        kinds: what is in it.
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
    def bytes(self) -> int:
        """Of all of it."""
        return sum(row.bytes for row in self.kinds)
