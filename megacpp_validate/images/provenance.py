"""Where an image comes from: the SLSA provenance that buildx puts beside it, read back from the index.

https://docs.docker.com/build/metadata/attestations/attestation-storage/: a manifest of attestations names the image
that it is about, and holds in-toto statements. Those of BuildKit are of SLSA 0.2 or 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..evidence.json_text import read_json
from .contents import Contents
from .refusals import RegistryLies
from .signature import Statement, read_statement

_SLSA: Final = "https://slsa.dev/provenance/"
_ABOUT: Final = "vnd.docker.reference.digest"


@dataclass(frozen=True)
class Provenance:
    """How an image was built.

    Attributes:
        subject: digest of the manifest that it is about.
        statement: all of it.
        materials: what it was built from: address -> digest ("sha256:..." or "sha1:...").
    """

    subject: str
    statement: Statement
    materials: Mapping[str, str]

    @property
    def images(self) -> dict[str, str]:
        """Of the materials those that are images: address -> digest."""
        return {uri: digest for uri, digest in self.materials.items() if uri.startswith(("pkg:docker/", "pkg:oci/"))}


def read_provenance(contents: Contents, body: Mapping[str, Any]) -> tuple[Provenance, ...]:
    """The provenance of every image under an index; none for a manifest that stands alone.

    Args:
        contents: repository.
        body: the index.

    Raises:
        RegistryUnreachable, RegistryLies: as `Contents.manifest`; or a statement cannot be read.
    """
    found = []
    for row in body.get("manifests", ()):
        about = (row.get("annotations") or {}).get(_ABOUT, "")
        if not about:
            continue
        try:
            for layer in read_json(contents.manifest(row["digest"]))["layers"]:
                if "in-toto" not in layer["mediaType"]:
                    continue
                statement = read_statement(read_json(contents.small_blob(layer["digest"])), None)
                if statement.kind.startswith(_SLSA):
                    found.append(Provenance(about, statement, dict(_read_materials(statement.predicate))))
        except RegistryLies:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as fault:
            raise RegistryLies(
                f"the provenance of {about} cannot be read: {fault!r}. Likely cause: it was made by another builder. "
                "Next step: build the image anew with `nox -s images`."
            ) from fault
    return tuple(found)


def _read_materials(predicate: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of SLSA 1 or of 0.2."""
    definition = predicate.get("buildDefinition", {})
    for row in definition.get("resolvedDependencies", predicate.get("materials", ())):
        for kind, value in row.get("digest", {}).items():
            yield str(row["uri"]), f"{kind}:{value}"
