"""Keys, signatures, SBOM and licences of an image: made by cosign and syft, read with openssl, kept beside the image.

Form: the simple signing of cosign, and attestations in DSSE envelopes, both under tags of the image's digest
(https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md). No transparency log: it is on the Internet, and
would list every image. SBOM: SPDX 2.3 (https://spdx.github.io/spdx-spec/v2.3/).
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote

from packaging.utils import canonicalize_name

from ..errors import Exit, NoEnvironment
from ..evidence.strict_json import read_json
from ..evidence.values import Frozen
from .build import ImageOptions, ImageRows
from .plan import find_images
from .restore import is_signed
from .tools import (
    TARGET_LABEL,
    ImageRefused,
    NotInRegistry,
    Registry,
    RegistryLies,
    call,
    is_plain_http,
    read_tree,
    require_program,
    split_reference,
)

PASSWORD: Final = "COSIGN_PASSWORD"  # noqa: S105  the name of a variable
SPDX: Final = "https://spdx.dev/Document"
LICENCES: Final = "urn:megacpp-validate:licences:1"
UNKNOWN: Final = "unknown"
_KIND: Final = "cosign container image signature"
_SIGNATURE: Final = "dev.cosignproject.cosign/signature"
_SYFT_S: Final = 3600.0  # of an image of NVIDIA's it reads 40 GB
# What images build from source and no package's metadata names: licence, what its submodules bring, and the file that
# decides. CUTLASS and fmt were read in their licence files on 2026-11-22, the others in their packages' metadata.
_SOURCES: Final[Mapping[str, tuple[str, Mapping[str, str], str]]] = {
    "flash-attention-3": (
        "BSD-3-Clause",
        {"cutlass": "BSD-3-Clause"},
        "https://github.com/Dao-AILab/flash-attention/blob/main/LICENSE",
    ),
    "deep-gemm": (
        "MIT",
        {"cutlass": "BSD-3-Clause", "fmt": "MIT"},
        "https://github.com/deepseek-ai/DeepGEMM/blob/main/LICENSE",
    ),
    "transformer-engine": (
        "Apache-2.0",
        {"cudnn-frontend": "MIT", "cutlass": "BSD-3-Clause", "googletest": "BSD-3-Clause"},
        "https://github.com/NVIDIA/TransformerEngine/blob/main/LICENSE",
    ),
}


@dataclass(frozen=True)
class Package:
    """A package as the package URL of an SBOM names it, and its declared licence; empty where there is none."""

    kind: str
    name: str
    version: str
    licence: str


class Licensed(Frozen):
    """A package ("deb", "pypi", "source", ...) and its licences; `UNKNOWN` alone where nothing says them."""

    kind: str
    name: str
    version: str
    licences: tuple[str, ...]
    said_by: str


@dataclass(frozen=True)
class Statement:
    """An attestation: predicate type, digests that it is about, and whether the key signed it; None without a key."""

    kind: str
    subjects: tuple[str, ...]
    predicate: Any
    signed: bool | None


class KeysResult(Frozen):
    """A pair of keys that was made."""

    schema_id: Literal["megacpp-validate/image-keys/1"] = "megacpp-validate/image-keys/1"
    private: str
    public: str

    @property
    def exit(self) -> Exit:
        """It is there."""
        return Exit.OPEN


class SignResult(Frozen):
    """An image that was signed: how many packages its SBOM and its licences list, and how many licences are unknown."""

    schema_id: Literal["megacpp-validate/image-signed/1"] = "megacpp-validate/image-signed/1"
    image: str
    packages: int
    licences: int
    unknown: int

    @property
    def exit(self) -> Exit:
        """It is signed."""
        return Exit.OPEN


def make_keys(prefix: Path, variables: Mapping[str, str]) -> KeysResult:
    """A key pair of one's own: `PREFIX.key`, under the password of COSIGN_PASSWORD, and `PREFIX.pub`.

    Raises:
        NoEnvironment: cosign is missing, or fails.
        ImageRefused: a key is there already, or there is no password.
    """
    cosign = require_program("cosign", variables)
    pair = prefix.with_name(f"{prefix.name}.key"), prefix.with_name(f"{prefix.name}.pub")
    if there := [str(path) for path in pair if path.exists()]:
        raise ImageRefused(
            f"{' and '.join(there)} would be overwritten, and what that key signed could not be signed again. Next "
            "step: name another prefix, or move it away."
        )
    _require_password(variables)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    _cosign([cosign, "generate-key-pair", "--output-key-prefix", str(prefix.absolute())], variables)
    return KeysResult(private=str(pair[0]), public=str(pair[1]))


def sign_image(
    rows: ImageRows, image: str, key: Path, sbom: Path | None, target: str, say: Callable[[str], None]
) -> SignResult:
    """Read what is inside, attest it, and sign last: what is signed is whole.

    Args:
        sbom: in SPDX, in place of syft's.
        target: what the image is for; empty takes its label.

    Raises:
        ImageRefused: an argument is wrong, or the SBOM is of another image.
        NoEnvironment: cosign, oras or syft is missing, or fails.
        RegistryLies, RegistryUnreachable: as `tools.Registry.read_manifest`.
    """
    variables = rows.variables
    repository, digest = split_reference(image)
    prove_key(key, variables)  # a wrong argument is reported before minutes of work
    given = _read_file(sbom) if sbom else b""
    if not given:
        require_program("syft", variables)
    registry = Registry.open(repository, variables)
    tree = read_tree(registry, digest)
    target = target or tree.labels.get(TARGET_LABEL, "")
    if not target:
        raise ImageRefused(f"{image} has no label with its target. Next step: name it with --target.")
    row = find_images(rows.images, [target])[0]
    say("listing what is inside")
    text = given or make_sbom(registry, digest, row.platform, variables)
    packages = read_sbom(text)
    if why := compare_sbom(read_json(text), tree.names):
        raise ImageRefused(
            f"{sbom or 'the SBOM'} is not of {image}: {why}. Next step: leave --sbom out, and syft makes one."
        )
    listed = list_licences(packages, list_sources(rows, target))
    cosign = require_program("cosign", variables)
    plain = ["--allow-http-registry", "--allow-insecure-registry"] if registry.plain else []
    how, shown = ["--key", str(key), "--yes", *plain], f"{registry.repository}@{digest}"
    with tempfile.TemporaryDirectory(prefix="megacpp-sign-") as room:
        file = Path(room, "predicate.json")
        for kind, body in (("spdxjson", text), (LICENCES, write_licences(listed))):
            file.write_bytes(body)
            words = [*_offline(cosign, "attest", variables), *how, "--type", kind, "--predicate", str(file), shown]
            _cosign([cosign, "attest", *words], variables)
        _cosign([cosign, "sign", *_offline(cosign, "sign", variables), *how, shown], variables)
    unknown = sum(one.licences == (UNKNOWN,) for one in listed)
    return SignResult(image=image, packages=len(packages), licences=len(listed), unknown=unknown)


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as fault:
        raise ImageRefused(f"{file} cannot be read: {fault.strerror}. Next step: check the name.") from fault


def list_sources(rows: ImageRows, target: str) -> dict[str, str]:
    """What the image of a target builds from source -> commit; Transformer Engine too."""
    row = find_images(rows.images, [target])[0]
    built = {name: rows.images.find_source(name).commit for name in row.sources}
    return built | ({"transformer-engine": row.te} if row.te else {})


def sign_file(path: Path, key: Path, variables: Mapping[str, str]) -> str:
    """A signature over a file, in base64.

    Raises:
        NoEnvironment: cosign is missing, or fails.
        ImageRefused: no private key, or no password, or a wrong one.
    """
    cosign = require_program("cosign", variables)
    if not key.is_file() or b"PRIVATE KEY-----" not in key.read_bytes():
        raise ImageRefused(
            f"{key} is no private key. Likely cause: it is missing, the public one, or another file. Next step: name "
            f"the PREFIX.key that `nox -s image_keys` made."
        )
    _require_password(variables)
    words = [cosign, "sign-blob", *_offline(cosign, "sign-blob", variables), "--key", str(key), "--yes", str(path)]
    return _cosign(words, variables).strip()


def prove_key(key: Path, variables: Mapping[str, str], public: Path | None = None) -> None:
    """Sign a few bytes, before anything that takes long: the password is right, and `public` belongs to the key.

    Raises:
        NoEnvironment, ImageRefused: as `sign_file`; or the public key is of another pair.
    """
    with tempfile.TemporaryDirectory(prefix="megacpp-key-") as room:
        trial = Path(room, "trial")
        trial.write_bytes(b"a trial of a key, and nothing else\n")
        signature = sign_file(trial, key, variables)
        if public and not is_signed(trial, signature, public):
            raise ImageRefused(
                f"{public} does not verify what {key} signs. Likely cause: the two are of different pairs. Next step: "
                "name the PREFIX.pub and the PREFIX.key that `nox -s image_keys` made together."
            )


def read_public_key(path: Path, variables: Mapping[str, str]) -> str:
    """A public key in PEM.

    Raises:
        ImageRefused: it is none, or a private one.
        NoEnvironment: openssl is missing.
    """
    text = _read_file(path)
    done = call([require_program("openssl", variables), "pkey", "-pubin", "-noout", "-in", str(path)], variables)
    if done.code or b"PRIVATE" in text:
        raise ImageRefused(
            f"{path} is no public key. Likely cause: it is another file, or the private key. Next step: name the "
            "PREFIX.pub that `nox -s image_keys` made."
        )
    return text.decode(errors="replace")


def _offline(cosign: str, verb: str, variables: Mapping[str, str]) -> list[str]:
    """Flags with which cosign asks nobody else: version 3 has two more than version 2."""
    done = call([cosign, verb, "--help"], variables)
    newer = ["--use-signing-config=false", "--new-bundle-format=false"]
    return ["--tlog-upload=false", *(newer if "--use-signing-config" in done.words + done.errors else [])]


def _require_password(variables: Mapping[str, str]) -> None:
    if PASSWORD not in variables:
        raise ImageRefused(
            f"the variable {PASSWORD} is not set, and cosign would ask for it. Next step: set it to the password of "
            "the key; empty for a key without one."
        )


def _cosign(words: list[str], variables: Mapping[str, str]) -> str:
    done = call(words, variables, limit_s=600)
    if not done.code:
        return done.words
    if "decryption failed" in done.errors:  # of cosign 2 and 3
        raise ImageRefused(
            f"the password in {PASSWORD} does not open the key. Likely cause: it is of another key. Next step: set it "
            "to the password that the key was made with."
        )
    raise NoEnvironment(
        f"`cosign {words[1]}` failed: {done.last_words}. Likely cause: a registry that cannot be written, or a cosign "
        "that this tool does not know (it knows 2 and 3). Next step: mend that and run it again."
    )


def make_sbom(registry: Registry, digest: str, platform: str, variables: Mapping[str, str]) -> bytes:
    """The SBOM of an image in a registry, by syft, in SPDX.

    Raises:
        NoEnvironment: syft is missing, or fails.
    """
    syft = require_program("syft", variables)
    settings = {**variables, "SYFT_CHECK_FOR_APP_UPDATE": "false"}
    if is_plain_http(registry.repository, variables):
        settings["SYFT_REGISTRY_INSECURE_USE_HTTP"] = "true"
    source = f"registry:{registry.repository}@{digest}"
    words = [syft, "scan", "--quiet", "--platform", platform, source, "--output", "spdx-json"]
    done = call(words, settings, limit_s=_SYFT_S)
    if done.code:
        raise NoEnvironment(
            f"syft failed: {done.last_words}. Likely cause: the registry is not reached, or the disk for temporary "
            "files is full. Next step: mend that and run it again."
        )
    read_sbom(done.words.encode())
    return done.words.encode()


def read_sbom(text: bytes | Mapping[str, Any]) -> tuple[Package, ...]:
    """The packages of an SBOM.

    Raises:
        ImageRefused: it is no SPDX, or names no package.
    """
    try:
        body = read_json(text) if isinstance(text, bytes) else text
        version = str(body["spdxVersion"])
        found = tuple(package for row in body["packages"] for package in _read_package(row))
        if not found or not version.startswith("SPDX-2."):
            raise ValueError(f"{version} with {len(found)} packages")
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise ImageRefused(
            f"this is no SBOM in SPDX 2 that names packages: {fault!r}. Likely cause: another form, or it was cut off. "
            "Next step: make it with `nox -s image_sign`."
        ) from fault
    return found


def _read_package(row: Mapping[str, Any]) -> Iterator[Package]:
    for reference in row.get("externalRefs", ()):
        locator = str(reference.get("referenceLocator", ""))
        if reference.get("referenceType") == "purl" and locator.startswith("pkg:"):
            kind, _, rest = locator[4:].partition("?")[0].partition("/")
            name, _, version = rest.rpartition("@") if "@" in rest else (rest, "", "")
            said = (str(row.get(key, "")) for key in ("licenseDeclared", "licenseConcluded"))
            licence = next((one for one in said if one not in ("", "NOASSERTION", "NONE")), "")
            if kind != "oci":  # the image itself, which is no package in it
                yield Package(kind, unquote(name.rpartition("/")[2]), unquote(version), licence)
            return


def compare_sbom(body: Mapping[str, Any], image: Set[str]) -> str:
    """Why an SBOM is not of an image; empty where it may be.

    SPDX 2.3 names the image by a relationship or a list, of a package that stands for it; its digest is its checksum,
    its version, or that of its package URL (clauses 11.1, 7.10, 7.3 and 7.21).

    Args:
        image: digests of the image: of its index, its manifests and their configurations.
    """
    try:
        named = {str(one) for one in body.get("documentDescribes") or ()}
        rows = (row for row in body.get("relationships") or () if row.get("relationshipType") == "DESCRIBES")
        named |= {str(row.get("relatedSpdxElement")) for row in rows}
        about = {
            digest
            for row in body.get("packages") or ()
            if row.get("SPDXID") in named
            for digest in _list_digests(row)
            if digest.startswith("sha256:") and len(digest) == 71
        }
    except (AttributeError, TypeError) as fault:
        return f"its subject cannot be read: {fault}"
    if about & image:
        return ""
    return f"it is about {', '.join(sorted(about))}, which is another image" if about else "it names no image"


def _list_digests(row: Mapping[str, Any]) -> Iterator[str]:
    yield str(row.get("versionInfo", ""))
    for one in row.get("checksums") or ():
        yield f"{str(one.get('algorithm', '')).lower()}:{one.get('checksumValue', '')}"
    for one in row.get("externalRefs") or ():
        yield unquote(str(one.get("referenceLocator", "")).partition("?")[0].rpartition("@")[2])


def list_licences(packages: Iterable[Package], sources: Mapping[str, str]) -> tuple[Licensed, ...]:
    """Every package of an SBOM with the licence that syft found in its files, and what was built from source.

    Args:
        sources: row of images.toml -> commit that was built.
    """
    found: dict[tuple[str, str], Licensed] = {}
    for one in packages:
        name = canonical(one.kind, one.name)
        row = Licensed(
            kind=one.kind, name=name, version=one.version, licences=(one.licence or UNKNOWN,), said_by="SBOM"
        )
        found.setdefault((one.kind, name), row)
    for name, commit in sources.items():
        licence, brings, by = _SOURCES.get(name, (UNKNOWN, {}, "no record"))
        rows = {name: (commit, licence)} | {f"{name}/{one}": ("as its submodule", own) for one, own in brings.items()}
        for part, (version, own) in rows.items():
            found["source", part] = Licensed(kind="source", name=part, version=version, licences=(own,), said_by=by)
    return tuple(row for _, row in sorted(found.items()))


def canonical(kind: str, name: str) -> str:
    """A name as it is compared."""
    return str(canonicalize_name(name)) if kind == "pypi" else name


def write_licences(rows: Sequence[Licensed]) -> bytes:
    """As JSON, a package a row."""
    return (json.dumps({"packages": [row.model_dump() for row in rows]}, indent=1, sort_keys=True) + "\n").encode()


def read_licences(body: Any) -> tuple[Licensed, ...]:
    """What `write_licences` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        return tuple(Licensed.model_validate(row) for row in body["packages"])
    except (KeyError, TypeError) as fault:
        raise ValueError(f"it is no list of licences: {fault!r}") from fault


def find_signature(registry: Registry, digest: str, key: Path) -> str:
    """Empty where one of the signatures of an image is by this key, over this digest; else what is there instead.

    Raises:
        RegistryUnreachable, RegistryLies: as `tools.Registry.read_manifest`.
    """
    layers, why = _read_layers(registry, digest, "sig"), ""
    for layer in layers:
        payload = registry.read_blob(layer["digest"])
        if not _is_signed(payload, str((layer.get("annotations") or {}).get(_SIGNATURE, "")), key):
            continue
        critical = read_json(payload).get("critical", {})
        about = critical.get("image", {}).get("docker-manifest-digest")
        if about == digest and critical.get("type") == _KIND:
            return ""
        why = f"a signature by this key is about {about}, and not about this image"
    return why or (f"none of its {len(layers)} signatures is by this key" if layers else "it has no signature")


def read_statements(registry: Registry, digest: str, key: Path | None) -> tuple[Statement, ...]:
    """What was attested of an image.

    Args:
        key: public key; None: signatures are not checked.

    Raises:
        RegistryUnreachable, RegistryLies: as `tools.Registry.read_manifest`; or an attestation cannot be read.
    """
    found = []
    for layer in _read_layers(registry, digest, "att"):
        try:
            envelope = read_json(registry.read_blob(layer["digest"]))
            payload = base64.b64decode(envelope["payload"], validate=True)
            kind = str(envelope["payloadType"]).encode()
            # https://github.com/secure-systems-lab/dsse/blob/master/protocol.md
            signed_bytes = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
            signed = any(_is_signed(signed_bytes, one["sig"], key) for one in envelope["signatures"]) if key else None
            found.append(read_statement(read_json(payload), signed=signed))
        except (KeyError, TypeError, AttributeError, ValueError) as fault:
            raise _unreadable(f"an attestation of {digest}", fault) from fault
    return tuple(found)


def read_statement(body: Mapping[str, Any], *, signed: bool | None = None) -> Statement:
    """An in-toto statement; raises KeyError or TypeError where it is none."""
    subjects = tuple(f"sha256:{row['digest']['sha256']}" for row in body["subject"])
    return Statement(str(body["predicateType"]), subjects, body["predicate"], signed)


def list_tags(digest: str) -> tuple[str, str]:
    """The tags under which the signatures and the attestations of an image lie."""
    bare = digest.replace(":", "-")
    return f"{bare}.sig", f"{bare}.att"


def _is_signed(data: bytes, signature: str, key: Path) -> bool:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return is_signed(Path(file.name), signature, key)


def _read_layers(registry: Registry, digest: str, suffix: str) -> list[dict[str, Any]]:
    try:
        layers: list[dict[str, Any]] = read_json(registry.read_manifest(f"{digest.replace(':', '-')}.{suffix}"))[
            "layers"
        ]
    except NotInRegistry:
        return []
    except (ValueError, KeyError, TypeError) as fault:
        raise _unreadable(f"the list of signatures of {digest}", fault) from fault
    return layers


def _unreadable(what: str, fault: Exception) -> RegistryLies:
    return RegistryLies(
        f"{what} cannot be read: {fault!r}. Likely cause: another tool made it. Next step: sign the image anew with "
        "`nox -s image_sign`."
    )


def rows_of(matrix: Path | None, tool: str, variables: Mapping[str, str]) -> ImageRows:
    """The matrix, for the verbs of the supply chain."""
    return ImageRows(ImageOptions(matrix=matrix), tool, variables)
