"""Signatures of an image by a key of one's own: made with cosign, kept beside the image, and read with no network.

Form: the simple signing of cosign, and attestations in DSSE envelopes, both under tags of the image's digest
(https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md). No transparency log: it is on the Internet, and
would know of every image. cosign 2 takes that for a flag; cosign 3 wants its two new ways turned off besides.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..evidence.json_text import read_json
from .bundle.restore.p256 import is_signed, read_key
from .contents import Contents, Place
from .refusals import ImageRefused, RegistryLies
from .registry import plain_http

COSIGN: Final = "MEGACPP_COSIGN"
PASSWORD: Final = "COSIGN_PASSWORD"  # noqa: S105  the name of a variable
SPDX: Final = "https://spdx.dev/Document"
LICENCES: Final = "urn:megacpp-validate:licences:1"
_KIND: Final = "cosign container image signature"
_SIGNATURE: Final = "dev.cosignproject.cosign/signature"
_LIMIT_S: Final = 600.0
_TRIAL: Final = b"a trial of a key, and nothing else\n"


class NoCosign(OSError):
    """There is no cosign, or it failed; the text has the next step."""


@dataclass(frozen=True)
class Statement:
    """What somebody attests of an image.

    Attributes:
        kind: predicate type.
        subjects: digests that it is about.
        predicate: what is said of them.
        signed: whether it is signed by the key that was given; None where none was.
    """

    kind: str
    subjects: tuple[str, ...]
    predicate: Any
    signed: bool | None


def find_cosign(variables: Mapping[str, str]) -> str:
    """The program; empty where there is none."""
    return shutil.which(variables.get(COSIGN) or "cosign", path=variables.get("PATH")) or ""


def require_cosign(variables: Mapping[str, str]) -> str:
    """The program.

    Raises:
        NoCosign: there is none.
    """
    found = find_cosign(variables)
    if not found:
        raise NoCosign(
            f"there is no cosign{' at ' + variables[COSIGN] if variables.get(COSIGN) else ''}, which signs images. "
            "Likely cause: it is not installed, or not on PATH. Next step: `apt-get install cosign` on Debian 13 or "
            f"newer, or name its file in {COSIGN}."
        )
    return found


def make_keys(prefix: Path, variables: Mapping[str, str]) -> tuple[Path, Path]:
    """A key pair of one's own: `PREFIX.key`, under the password of the variable COSIGN_PASSWORD, and `PREFIX.pub`.

    Raises:
        NoCosign: there is none, or it failed.
        ImageRefused: one is there already, or there is no password.
    """
    cosign = require_cosign(variables)
    pair = prefix.with_name(f"{prefix.name}.key"), prefix.with_name(f"{prefix.name}.pub")
    if there := [str(path) for path in pair if path.exists()]:
        raise ImageRefused(
            f"{' and '.join(there)} would be overwritten, and what that key has signed could not be signed again. Next "
            "step: name another prefix, or move it away."
        )
    _require_password(variables)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    _run([cosign, "generate-key-pair", "--output-key-prefix", str(prefix.absolute())], variables)
    return pair


def sign_image(place: Place, key: Path, variables: Mapping[str, str]) -> None:
    """Sign an image by its digest; the signature goes to its own registry.

    Raises:
        NoCosign: there is none, or it failed.
        ImageRefused: no key, or no password for it.
    """
    cosign = require_cosign(variables)
    _require_key(key, variables)
    _run([cosign, "sign", *_offline(cosign, "sign", variables), *_how(place, key), place.shown], variables)


def attest(place: Place, kind: str, predicate: Path, key: Path, variables: Mapping[str, str]) -> None:
    """Say something of an image by its digest, signed; beside what was said before, which may be another signer's.

    Raises:
        NoCosign: there is none, or it failed.
        ImageRefused: no key, or no password for it.
    """
    cosign = require_cosign(variables)
    _require_key(key, variables)
    words = [cosign, "attest", *_offline(cosign, "attest", variables), *_how(place, key)]
    _run([*words, "--type", kind, "--predicate", str(predicate), place.shown], variables)


def sign_file(path: Path, key: Path, variables: Mapping[str, str]) -> str:
    """A signature over a file, in base64.

    Raises:
        NoCosign: there is none, or it failed.
        ImageRefused: no key, or no password for it.
    """
    cosign = require_cosign(variables)
    _require_key(key, variables)
    how = _offline(cosign, "sign-blob", variables)
    return _run([cosign, "sign-blob", *how, "--key", str(key), "--yes", str(path)], variables).strip()


def prove_key(key: Path, variables: Mapping[str, str], public: str = "") -> None:
    """Sign a few bytes with a key, before anything that takes long: by it its password is right, and it is that key.

    Args:
        public: public key in PEM that must be the other half of it; empty for none.

    Raises:
        NoCosign: there is none, or it failed.
        ImageRefused: it is no private key, its password is another, or the public key is not its own.
    """
    with tempfile.TemporaryDirectory(prefix="megacpp-key-") as room:
        trial = Path(room, "trial")
        trial.write_bytes(_TRIAL)
        signature = sign_file(trial, key, variables)
    if public and not is_signed(_TRIAL, signature, public):
        raise ImageRefused(
            f"what {key} signs, the public key that was named does not verify. Likely cause: the two are of different "
            "pairs. Next step: name the PREFIX.pub and the PREFIX.key that `nox -s image_keys` made together."
        )


def read_public_key(path: Path) -> str:
    """A public key in PEM.

    Raises:
        ImageRefused: it is none, or a private one.
    """
    try:
        text = path.read_text(encoding="ascii")
        read_key(text)
    except (OSError, ValueError) as fault:
        raise ImageRefused(
            f"{path} is no public key: {fault}. Likely cause: it is another file, or the private key. Next step: name "
            "the PREFIX.pub that `nox -s image_keys` made."
        ) from fault
    return text


def cosign_verifies(place: Place, key: Path, variables: Mapping[str, str]) -> str:
    """Empty where cosign takes the signature of an image as that of a key; else what it says."""
    words = [require_cosign(variables), "verify", "--key", str(key), "--insecure-ignore-tlog=true", *_plain(place)]
    try:
        _run([*words, place.shown], variables)
    except NoCosign as fault:
        return str(fault)
    return ""


def read_signatures(contents: Contents, digest: str) -> tuple[tuple[bytes, str], ...]:
    """What was signed and the signature in base64, for every signature of an image.

    Raises:
        RegistryUnreachable, RegistryLies: as `Contents.manifest`.
    """
    return tuple(
        (contents.small_blob(layer["digest"]), str((layer.get("annotations") or {}).get(_SIGNATURE, "")))
        for layer in _read_layers(contents, digest, "sig")
    )


def find_signature(contents: Contents, digest: str, key: str) -> str:
    """Empty where one of the signatures of an image is by this key, over this digest; else what is there instead.

    Args:
        contents, digest: repository and image.
        key: public key in PEM.

    Raises:
        RegistryUnreachable, RegistryLies: as `Contents.manifest`.
        ValueError: the key is none.
    """
    found = read_signatures(contents, digest)
    why = "it has no signature" if not found else f"none of its {len(found)} signatures is by this key"
    for payload, signature in found:
        if not is_signed(payload, signature, key):
            continue
        critical = read_json(payload).get("critical", {})
        about = critical.get("image", {}).get("docker-manifest-digest")
        if about == digest and critical.get("type") == _KIND:
            return ""
        why = f"a signature by this key is about {about}, and not about this image"
    return why


def read_statements(contents: Contents, digest: str, key: str) -> tuple[Statement, ...]:
    """What was attested of an image with a signature.

    Args:
        contents, digest: repository and image.
        key: public key in PEM; empty: signatures are not looked at.

    Raises:
        RegistryUnreachable, RegistryLies: as `Contents.manifest`; or an attestation cannot be read.
        ValueError: the key is none.
    """
    found = []
    if key:
        read_key(key)
    for layer in _read_layers(contents, digest, "att"):
        try:
            envelope = read_json(contents.small_blob(layer["digest"]))
            payload = base64.b64decode(envelope["payload"], validate=True)
            kind = str(envelope["payloadType"]).encode()
            # https://github.com/secure-systems-lab/dsse/blob/master/protocol.md
            signed_bytes = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
            signed = any(is_signed(signed_bytes, one["sig"], key) for one in envelope["signatures"]) if key else None
            found.append(read_statement(read_json(payload), signed))
        except RegistryLies:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as fault:  # no base64 and no text are ValueErrors too
            raise RegistryLies(
                f"an attestation of {digest} cannot be read: {fault!r}. Likely cause: it is of another tool. Next "
                "step: sign the image anew with `nox -s image_sign`."
            ) from fault
    return tuple(found)


def read_statement(body: Mapping[str, Any], signed: bool | None) -> Statement:
    """An in-toto statement; raises KeyError or TypeError where it is none."""
    subjects = tuple(f"sha256:{row['digest']['sha256']}" for row in body["subject"])
    return Statement(str(body["predicateType"]), subjects, body["predicate"], signed)


def list_tags(digest: str) -> tuple[str, str]:
    """The tags under which the signatures and the attestations of an image lie."""
    bare = digest.replace(":", "-")
    return f"{bare}.sig", f"{bare}.att"


def _read_layers(contents: Contents, digest: str, suffix: str) -> list[dict[str, Any]]:
    raw = contents.tagged(f"{digest.replace(':', '-')}.{suffix}")
    if raw is None:
        return []
    try:
        layers: list[dict[str, Any]] = read_json(raw)["layers"]
    except (ValueError, KeyError, TypeError) as fault:
        raise RegistryLies(
            f"what lies at the tag of the signatures of {digest} is no manifest: {fault!r}. Likely cause: it is of "
            "another tool. Next step: sign the image anew with `nox -s image_sign`."
        ) from fault
    return layers


def _offline(cosign: str, verb: str, variables: Mapping[str, str]) -> list[str]:
    """Flags with which this cosign asks nobody else: version 3 has two more than version 2."""
    said = _run([cosign, verb, "--help"], variables)
    newer = ["--use-signing-config=false", "--new-bundle-format=false"] if "--use-signing-config" in said else []
    return ["--tlog-upload=false", *newer]


def _how(place: Place, key: Path) -> list[str]:
    return ["--key", str(key), "--yes", *_plain(place)]


def _plain(place: Place) -> list[str]:
    return ["--allow-http-registry", "--allow-insecure-registry"] if plain_http(place.host, os.environ) else []


def _require_key(key: Path, variables: Mapping[str, str]) -> None:
    if not key.is_file():
        raise ImageRefused(
            f"there is no key {key}. Next step: `nox -s image_keys -- {key.with_suffix('')}` makes a pair."
        )
    if b"PRIVATE KEY-----" not in key.read_bytes():
        raise ImageRefused(
            f"{key} is no private key. Likely cause: it is the public one, or another file. Next step: name the "
            "PREFIX.key that `nox -s image_keys` made."
        )
    _require_password(variables)


def _require_password(variables: Mapping[str, str]) -> None:
    if PASSWORD not in variables:
        raise ImageRefused(
            f"the variable {PASSWORD} is not set, and cosign would ask for it. Next step: set it to the password of "
            "the key; empty for a key without one."
        )


def _run(words: list[str], variables: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            words,
            env=dict(variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL,  # nobody answers a question
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise NoCosign(f"{words[0]} cannot be run: {fault}. Next step: look at it by hand.") from fault
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip() and "deprecated" not in line]
        if "decryption failed" in done.stderr:  # of cosign 2 and 3
            raise ImageRefused(
                f"the password in {PASSWORD} does not open the key. Likely cause: it is of another key, or was cut. "
                "Next step: set it to the password that the key was made with."
            )
        raise NoCosign(
            f"`cosign {words[1]}` failed ({done.returncode}): {' | '.join(said)[-600:]}. Likely cause: another "
            "password or key, a registry that cannot be written, or a cosign that this tool does not know (it knows 2 "
            "and 3). Next step: mend that and run it again."
        )
    return done.stdout
