"""What is known of an image, put beside it: signatures, SBOM, provenance and licences, each as it was found or made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

from ...evidence.json_text import read_json
from ..contents import Contents, Place
from ..licences import list_licences, write_licences
from ..provenance import read_provenance
from ..refusals import RegistryLies
from ..sbom import NoSyft, compare_sbom, read_sbom
from ..signature import LICENCES, SPDX, find_signature, list_tags, read_statements
from .archive import ImageTree

_OCI: Final = "application/vnd.oci.image"


@dataclass
class EvidenceFiles:
    """Small files of a bundle.

    Attributes:
        files: by their name in it.
        absent: what is not there -> why.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def gather_evidence(
    place: Place,
    contents: Contents,
    tree: ImageTree,
    sources: Mapping[str, str],
    make_sbom: Callable[[Place], bytes],
    key: str = "",
) -> EvidenceFiles:
    """What a registry keeps beside an image; what it does not keep is made, and what cannot be made is told.

    Args:
        place, contents, tree: the image, where it is read, and what it is made of.
        sources: row of images.toml -> commit that was built.
        make_sbom: makes one where none was attested.
        key: public key in PEM: what others attested is left aside, since anybody may who can push; empty for none.

    Raises:
        RegistryUnreachable, RegistryLies: as `Contents.manifest`.
    """
    found = EvidenceFiles()
    _copy_signatures(place, contents, found)
    if key and (why := find_signature(contents, place.digest, key)):
        found.absent.setdefault("signature", why)
    statements = read_statements(contents, place.digest, key)
    attested = {
        one.kind: one.predicate for one in statements if place.digest in one.subjects and (one.signed or not key)
    }
    try:
        if SPDX in attested:
            _require_own(place, tree, attested[SPDX])
        sbom = _json(attested[SPDX]) if SPDX in attested else make_sbom(contents.place(place.digest))
        found.files["sbom.spdx.json"] = sbom
    except NoSyft as fault:
        sbom = b""
        found.absent["SBOM"] = f"none was attested of the image{' by this key' if key else ''}, and {fault}"
    if LICENCES in attested:
        found.files["licences.json"] = _json(attested[LICENCES])
    else:
        layers = next(iter(tree.images.values()), ())
        rows = list_licences(contents, layers, read_sbom(sbom) if sbom else (), sources)
        found.files["licences.json"] = write_licences(rows)
    provenance = read_provenance(contents, read_json(tree.find(tree.digest).body or b"{}"))
    if provenance:
        told = [
            {"subject": one.subject, "kind": one.statement.kind, "predicate": one.statement.predicate}
            for one in provenance
        ]
        found.files["provenance.json"] = _json(told)
    else:
        found.absent["provenance"] = "buildx put none beside the image"
    return found


def _require_own(place: Place, tree: ImageTree, sbom: Any) -> None:
    """Refuse what was attested of this image and is about another.

    Raises:
        RegistryLies: it is.
    """
    if why := compare_sbom(sbom, read_sbom(sbom), tree.names, {}):
        raise RegistryLies(
            f"the SBOM that was attested of {place.shown} is not its own: {why}. Likely cause: `image_sign --sbom` was "
            "given that of another image. Next step: sign it anew with `nox -s image_sign`."
        )


def _copy_signatures(place: Place, contents: Contents, found: EvidenceFiles) -> None:
    """As an OCI layout of their own, each under its tag: so a registry that they are pushed to has them as this one."""
    rows = []
    for tag in list_tags(place.digest):
        raw = contents.tagged(tag)
        if raw is None:
            continue
        manifest: dict[str, Any] = read_json(raw)
        digest = f"sha256:{sha256(raw).hexdigest()}"
        held = {digest: raw}
        for blob in (manifest["config"], *manifest["layers"]):
            held[blob["digest"]] = contents.small_blob(blob["digest"])
        found.files.update({f"signatures/blobs/{name.replace(':', '/')}": body for name, body in held.items()})
        kind = manifest.get("mediaType", f"{_OCI}.manifest.v1+json")
        notes = {"org.opencontainers.image.ref.name": tag}
        rows.append({"mediaType": kind, "digest": digest, "size": len(raw), "annotations": notes})
    if rows:
        index = {"schemaVersion": 2, "mediaType": f"{_OCI}.index.v1+json", "manifests": rows}
        found.files["signatures/index.json"] = _json(index)
        found.files["signatures/oci-layout"] = b'{"imageLayoutVersion":"1.0.0"}'
    else:
        found.absent["signature"] = "nobody has signed the image"


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
