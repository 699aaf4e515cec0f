"""Signatures in the form of cosign, made with the integers that check them. What cosign itself makes and takes is held
to the same reader in `test_bundle_real.py`.
"""

from __future__ import annotations

import base64
import json
from functools import lru_cache
from hashlib import sha256
from typing import Any

from megacpp_validate.images.bundle.restore import p256
from tests.images.small_registry import OCI, SmallRegistry


@lru_cache
def sign(secret: int, data: bytes) -> str:
    """The same signature for the same bytes, so it is computed once."""
    hashed = int.from_bytes(sha256(data).digest(), "big")
    nonce = hashed ^ secret  # of a test key nobody learns anything
    point = p256._times(nonce % p256._N, p256._G)
    assert point is not None
    r = point[0] % p256._N
    s = (hashed + r * secret) * pow(nonce, -1, p256._N) % p256._N
    return base64.b64encode(write_der(r, s)).decode()


class Signer:
    def __init__(self, secret: int) -> None:
        self.secret = secret
        point = p256._times(secret, p256._G)
        assert point is not None
        der = p256._KEY_HEAD + b"".join(part.to_bytes(32, "big") for part in point)
        lines = base64.b64encode(der).decode()
        self.key = f"-----BEGIN PUBLIC KEY-----\n{lines[:64]}\n{lines[64:]}\n-----END PUBLIC KEY-----\n"

    def sign(self, data: bytes) -> str:
        return sign(self.secret, data)

    def sign_image(self, registry: SmallRegistry, digest: str, about: str = "", kind: str = "") -> None:
        critical = {
            "identity": {"docker-reference": "small"},
            "image": {"docker-manifest-digest": about or digest},
            "type": kind or "cosign container image signature",
        }
        payload = json.dumps({"critical": critical, "optional": None}).encode()
        notes = {"dev.cosignproject.cosign/signature": self.sign(payload)}
        push(registry, f"{digest.replace(':', '-')}.sig", [(payload, notes)])

    def envelope(self, kind: str, predicate: Any, digest: str) -> bytes:
        body = json.dumps({
            "_type": "https://in-toto.io/Statement/v0.1", "predicateType": kind, "predicate": predicate,
            "subject": [{"name": "small", "digest": {"sha256": digest[7:]}}],
        }).encode()  # fmt: skip
        payload_type = "application/vnd.in-toto+json"
        signed = b"DSSEv1 %d %s %d %s" % (len(payload_type), payload_type.encode(), len(body), body)
        return json.dumps({
            "payloadType": payload_type, "payload": base64.b64encode(body).decode(),
            "signatures": [{"keyid": "", "sig": self.sign(signed)}],
        }).encode()  # fmt: skip


def attest(registry: SmallRegistry, digest: str, envelopes: list[bytes]) -> None:
    push(registry, f"{digest.replace(':', '-')}.att", [(one, {}) for one in envelopes])


def push(registry: SmallRegistry, tag: str, layers: list[tuple[bytes, dict[str, str]]]) -> None:
    registry.add_manifest(
        {
            "schemaVersion": 2, "mediaType": f"{OCI}.manifest.v1+json",
            "config": {"mediaType": f"{OCI}.config.v1+json", **registry.add_blob(b"{}")},
            "layers": [
                {"mediaType": "application/x", **registry.add_blob(body), "annotations": notes}
                for body, notes in layers
            ],
        },
        tag,
    )  # fmt: skip


def write_der(*values: int) -> bytes:
    body = b""
    for value in values:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "big")
        body += bytes([2, len(raw)]) + raw
    return bytes([0x30, len(body)]) + body
