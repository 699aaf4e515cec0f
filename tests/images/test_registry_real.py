"""The client beside a registry as people run it, and beside the engine's own word."""

from __future__ import annotations

import http.client
import json
import os
import secrets
from contextlib import closing
from email.message import Message
from hashlib import sha256

import pytest

from megacpp_validate.images.registry import RegistryClient

HOST = os.environ.get("MEGACPP_TEST_REGISTRY", "127.0.0.1:5000")
OCI = "application/vnd.oci.image"


def send(method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Message, bytes]:
    with closing(http.client.HTTPConnection(HOST, timeout=10)) as call:
        call.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = call.getresponse()
        return answer.status, answer.headers, answer.read()


@pytest.fixture(scope="module")
def host() -> str:
    try:
        ready = send("GET", "/v2/")[0] == 200
    except OSError:
        ready = False
    if not ready:
        pytest.skip(f"not-run: no registry at {HOST} (MEGACPP_TEST_REGISTRY names another)")
    return HOST


def put_blob(repository: str, data: bytes) -> str:
    digest = f"sha256:{sha256(data).hexdigest()}"
    where = send("POST", f"/v2/{repository}/blobs/uploads/")[1]["Location"].split(HOST, 1)[-1]
    assert send("PUT", f"{where}&digest={digest}", data)[0] == 201
    return digest


def put_manifest(repository: str, reference: str, value: dict[str, object]) -> str:
    data = json.dumps(value).encode()
    code, told, said = send(
        "PUT", f"/v2/{repository}/manifests/{reference}", data, Content_Type=str(value["mediaType"])
    )
    assert code == 201, said
    return told["Docker-Content-Digest"]


def test_an_index_that_was_pushed(host: str) -> None:
    repository = f"megacpp-test/{secrets.token_hex(4)}"
    digests = {}
    for arch in ("amd64", "arm64"):
        config = json.dumps(
            {"os": "linux", "architecture": arch, "rootfs": {"type": "layers", "diff_ids": []}}
        ).encode()
        place = {"mediaType": f"{OCI}.config.v1+json", "digest": put_blob(repository, config), "size": len(config)}
        image = {"schemaVersion": 2, "mediaType": f"{OCI}.manifest.v1+json", "config": place, "layers": []}
        digests[f"linux/{arch}"] = put_manifest(repository, arch, image)
    rows = []
    for platform, digest in digests.items():
        system, arch = platform.split("/")
        size = len(send("GET", f"/v2/{repository}/manifests/{digest}", Accept=f"{OCI}.manifest.v1+json")[2])
        place = {"os": system, "architecture": arch}
        rows.append({"mediaType": f"{OCI}.manifest.v1+json", "digest": digest, "size": size, "platform": place})
    index = {"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": rows}
    digest = put_manifest(repository, "1", index)
    found = RegistryClient(os.environ).resolve(f"{host}/{repository}", "1", ("linux/amd64", "linux/arm64"))
    assert (found.index_digest, dict(found.platform_digests)) == (digest, digests)
    # A digest is asked for as well as a tag.
    assert RegistryClient(os.environ).resolve(f"{host}/{repository}", digests["linux/arm64"]).platform_digests == {
        "linux/arm64": digests["linux/arm64"]
    }
