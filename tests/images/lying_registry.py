"""A registry in this process that can be told to lie: about a digest, a tag, who may ask, and by silence."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OCI = "application/vnd.oci.image"
NEW_KINDS = 4  # kinds of manifest that a caller of today must name


def digest_of(data: bytes) -> str:
    return f"sha256:{sha256(data).hexdigest()}"


@dataclass
class LyingRegistry:
    """What it has, by tag and by digest; then how it misbehaves.

    Attributes:
        says: what its header calls every answer, instead of the truth.
        token: that it wants to see; it tells where to get one.
        login: that its token service wants to see.
        waits_s: before it answers.
        drips: a byte at a time.
        code: HTTP status of every answer; 0 for what is due.
        cut: bytes that are missing at the end of an answer.
        challenge: how it asks for a token, in its own spelling.
        kind: Content-Type of every answer; empty for none.
    """

    manifests: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    host: str = ""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    says: str = ""
    token: str = ""
    login: str = ""
    waits_s: float = 0.0
    drips: bool = False
    code: int = 0
    cut: int = 0
    challenge: str = 'Bearer realm="http://{host}/token",service="small"'
    kind: str = ""

    def put_image(self, tag: str, architecture: str = "amd64", salt: str = "") -> str:
        config = json.dumps({"os": "linux", "architecture": architecture, "salt": salt}).encode()
        self.blobs[digest_of(config)] = config
        body = {
            "schemaVersion": 2, "mediaType": f"{OCI}.manifest.v1+json", "layers": [],
            "config": {"mediaType": f"{OCI}.config.v1+json", "digest": digest_of(config), "size": len(config)},
        }  # fmt: skip
        return self._put(tag, body)

    def put_index(self, tag: str, salt: str = "") -> tuple[str, dict[str, str]]:
        platforms = {arch: self.put_image("", arch, salt) for arch in ("amd64", "arm64")}
        rows = [
            {"digest": digest, "size": 1, "platform": {"os": "linux", "architecture": arch}}
            for arch, digest in platforms.items()
        ]
        rows.append({"digest": digest_of(b""), "size": 1, "platform": {"os": "unknown", "architecture": "unknown"}})
        body = {"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": rows}
        return self._put(tag, body), {f"linux/{arch}": digest for arch, digest in platforms.items()}

    def put_rows(self, tag: str, *rows: Any) -> str:
        """An index of entries that may be none."""
        return self._put(tag, {"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": list(rows)})

    def _put(self, tag: str, body: dict[str, Any]) -> str:
        data = json.dumps(body).encode()
        for name in filter(None, (tag, digest_of(data))):
            self.manifests[name] = data
        return digest_of(data)


class _Handler(BaseHTTPRequestHandler):
    registry: LyingRegistry
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        kind = {"Content-Type": self.registry.kind} if self.registry.kind else {}
        for name, value in {"Content-Length": str(len(body)), **kind, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        for piece in [bytes([byte]) for byte in body] if self.registry.drips else [body]:
            time.sleep(0.02 * self.registry.drips)
            self.wfile.write(piece[: len(piece) - self.registry.cut])
        self.close_connection = self.close_connection or bool(self.registry.cut)

    def do_GET(self) -> None:
        one = self.registry
        one.asked.append((self.path, dict(self.headers)))
        time.sleep(one.waits_s)
        given = self.headers.get("Authorization", "")
        if self.path.startswith("/token"):
            right = not one.login or given == f"Basic {one.login}"
            self.answer(200 if right else 401, json.dumps({"token": one.token}).encode())
        elif one.code:
            self.answer(one.code, b"{}")
        elif one.token and given != f"Bearer {one.token}":
            self.answer(401, b"{}", WWW_Authenticate=one.challenge.format(host=one.host))
        else:
            self.give()

    def give(self) -> None:
        kind, name = self.path.rsplit("/", 2)[1:]
        held = (self.registry.manifests if kind == "manifests" else self.registry.blobs).get(name)
        if held is None:
            self.answer(404, b"{}")
            return
        told = self.headers.get("Accept", "").count("application/vnd.")
        if kind == "manifests" and told < NEW_KINDS:  # as a registry does for callers of long ago
            held = json.dumps({"schemaVersion": 1, "name": "small", "tag": name}).encode()
        self.answer(200, held, Docker_Content_Digest=self.registry.says or digest_of(held))


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Callers that are interrupted go without a word."""


@contextmanager
def serve(registry: LyingRegistry) -> Iterator[LyingRegistry]:
    handler = type("Handler", (_Handler,), {"registry": registry})
    server = _Server(("127.0.0.1", 0), handler)
    registry.host = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
