"""A registry in this process, with an image of a few kilobytes: for what a real one does not do when it is asked to.

It speaks the parts of the distribution API that a bundle needs, and can be told to lie, to stop half way, or to know no
ranges. `test_bundle_real.py` does the same with a real registry.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OCI = "application/vnd.oci.image"


def digest_of(data: bytes) -> str:
    return f"sha256:{sha256(data).hexdigest()}"


@dataclass
class SmallRegistry:
    manifests: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    host: str = ""
    asked: list[str] = field(default_factory=list)
    stops_after: int = -1  # bytes of a blob
    busy: list[tuple[int, dict[str, str]]] = field(default_factory=list)  # refusals before it answers; 0 hangs up
    knows_ranges: bool = True

    def add_blob(self, data: bytes) -> dict[str, Any]:
        self.blobs[digest_of(data)] = data
        return {"digest": digest_of(data), "size": len(data)}

    def add_manifest(self, value: dict[str, Any], tag: str = "") -> dict[str, Any]:
        data = json.dumps(value).encode()
        for name in filter(None, (digest_of(data), tag)):
            self.manifests[name] = data
        return {"mediaType": value["mediaType"], "digest": digest_of(data), "size": len(data)}


def write_layer(files: dict[str, bytes]) -> bytes:
    room = io.BytesIO()
    with tarfile.open(fileobj=room, mode="w") as archive:
        for name, body in files.items():
            head = tarfile.TarInfo(name)
            head.size = len(body)
            if body.startswith(b"->"):
                head.type, head.linkname, head.size = tarfile.SYMTYPE, body[2:].decode(), 0
            archive.addfile(head, io.BytesIO(body))
    return gzip.compress(room.getvalue(), mtime=0)


def add_image(registry: SmallRegistry, layers: list[bytes], labels: dict[str, str], base: str = "") -> str:
    """An image and its provenance under one index, as buildx pushes them; the digest of the index."""
    config = {"architecture": "amd64", "os": "linux", "config": {"Labels": labels}, "rootfs": {"diff_ids": []}}
    image = registry.add_manifest({
        "schemaVersion": 2, "mediaType": f"{OCI}.manifest.v1+json",
        "config": {"mediaType": f"{OCI}.config.v1+json", **registry.add_blob(json.dumps(config).encode())},
        "layers": [{"mediaType": f"{OCI}.layer.v1.tar+gzip", **registry.add_blob(layer)} for layer in layers],
    })  # fmt: skip
    rows = [{**image, "platform": {"os": "linux", "architecture": "amd64"}}]
    if base:
        statement = {
            "_type": "https://in-toto.io/Statement/v0.1", "predicateType": "https://slsa.dev/provenance/v0.2",
            "subject": [{"name": "small", "digest": {"sha256": image["digest"][7:]}}],
            "predicate": {
                "builder": {"id": ""}, "buildType": "https://mobyproject.org/buildkit@v1",
                "materials": [{"uri": f"pkg:docker/base@1?digest={base}", "digest": {"sha256": base[7:]}}],
            },
        }  # fmt: skip
        layer = registry.add_blob(json.dumps(statement).encode())
        witness = registry.add_manifest({
            "schemaVersion": 2, "mediaType": f"{OCI}.manifest.v1+json",
            "config": {"mediaType": f"{OCI}.config.v1+json", **registry.add_blob(b"{}")},
            "layers": [{"mediaType": "application/vnd.in-toto+json", **layer,
                        "annotations": {"in-toto.io/predicate-type": statement["predicateType"]}}],
        })  # fmt: skip
        notes = {
            "vnd.docker.reference.digest": image["digest"],
            "vnd.docker.reference.type": "attestation-manifest",
        }
        rows.append({**witness, "annotations": notes, "platform": {"os": "unknown", "architecture": "unknown"}})
    index = {"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": rows}
    return str(registry.add_manifest(index)["digest"])


class Handler(BaseHTTPRequestHandler):
    registry: SmallRegistry

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.registry.asked.append(f"{self.command} {self.path}")
        if self.registry.busy:
            status, headers = self.registry.busy.pop(0)
            if status:
                self.answer(status, **headers)
            self.close_connection = True
            return
        kind, name = self.path.rsplit("/", 2)[1:]
        held = (self.registry.manifests if kind == "manifests" else self.registry.blobs).get(name)
        if held is None:
            self.answer(404)
        elif kind == "manifests":
            self.answer(200, held, Docker_Content_Digest=digest_of(held))
        else:
            self.give_blob(held)

    do_HEAD = do_GET  # noqa: N815  the name that http.server calls

    def give_blob(self, held: bytes) -> None:
        asked = self.headers.get("Range", "")
        start = int(asked[6:-1]) if asked and self.registry.knows_ranges else 0
        body = held[start:]
        if 0 <= self.registry.stops_after < len(body) and self.command == "GET":
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: self.registry.stops_after])
            self.wfile.flush()
            self.close_connection = True
            return
        self.answer(206 if start else 200, body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer(202, Location=f"{self.path}1?state=x")

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "/manifests/" in self.path:
            name = self.path.rpartition("/")[2]
            self.registry.manifests[name] = body
        else:
            name = self.path.rpartition("digest=")[2].replace("%3A", ":")
            if digest_of(body) != name:
                self.answer(400, b"digest invalid")
                return
            self.registry.blobs[name] = body
        self.answer(201)


@contextmanager
def served(registry: SmallRegistry) -> Iterator[SmallRegistry]:
    """The registry at a port of its own, as long as it is held."""
    handler = type("Served", (Handler,), {"registry": registry})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    registry.host = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
