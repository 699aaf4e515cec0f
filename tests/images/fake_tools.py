"""docker, oras and cosign as scripts over a folder that stands for registries: for what real ones do not do on request.

`python fake_tools.py NAME WORDS...` behaves as the program NAME, as far as images need it. FAKE_REGISTRY holds
REPOSITORY/manifests/TAG-OR-DIGEST and REPOSITORY/blobs/DIGEST; a file `down` in it makes every registry silent.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

OCI = "application/vnd.oci.image"


def digest_of(data: bytes) -> str:
    return f"sha256:{sha256(data).hexdigest()}"


@dataclass(frozen=True)
class FakeRegistry:
    """A repository in a folder."""

    root: Path
    repository: str

    @property
    def folder(self) -> Path:
        return self.root / self.repository.replace("/", "|")

    def put_manifest(self, value: Any, *tags: str) -> str:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        (self.folder / "manifests").mkdir(parents=True, exist_ok=True)
        for name in (digest_of(body), *tags):
            (self.folder / "manifests" / name).write_bytes(body)
        return digest_of(body)

    def put_blob(self, data: bytes) -> dict[str, Any]:
        (self.folder / "blobs").mkdir(parents=True, exist_ok=True)
        (self.folder / "blobs" / digest_of(data)).write_bytes(data)
        return {"digest": digest_of(data), "size": len(data)}

    def put_image(self, labels: dict[str, str], base: str = "", *layers: bytes, platform: str = "amd64") -> str:
        """An image and its provenance under one index, as buildx pushes them; the digest of the index."""
        config = {"architecture": platform, "os": "linux", "config": {"Labels": labels}}
        kind = f"{OCI}.manifest.v1+json"
        manifest = {
            "schemaVersion": 2, "mediaType": kind, "config": self.put_blob(json.dumps(config).encode()),
            "layers": [{"mediaType": "layer", **self.put_blob(layer)} for layer in layers or (b"layer",)],
        }  # fmt: skip
        image = self.put_manifest(manifest)
        rows: list[dict[str, Any]] = [{"digest": image, "platform": {"os": "linux", "architecture": platform}}]
        if base:
            statement = {
                "predicateType": "https://slsa.dev/provenance/v0.2", "subject": [{"digest": {"sha256": image[7:]}}],
                "predicate": {"materials": [{"uri": "pkg:docker/base@1", "digest": {"sha256": base[7:]}}]},
            }  # fmt: skip
            layer = {"mediaType": "application/vnd.in-toto+json", **self.put_blob(json.dumps(statement).encode())}
            witness = {"schemaVersion": 2, "mediaType": kind, "config": self.put_blob(b"{}"), "layers": [layer]}
            about = {"vnd.docker.reference.digest": image}
            unknown = {"os": "unknown", "architecture": "unknown"}
            rows.append({"digest": self.put_manifest(witness), "annotations": about, "platform": unknown})
        return self.put_manifest({"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": rows})

    def put_index(self, tag: str, salt: str = "") -> str:
        """An index over two platforms, whose images are there."""
        rows = []
        for name in ("amd64", "arm64"):
            config = self.put_blob(json.dumps({"os": "linux", "architecture": name, "salt": salt}).encode())
            image = self.put_manifest({"schemaVersion": 2, "config": config, "layers": []})
            rows.append({"digest": image, "platform": {"os": "linux", "architecture": name}})
        return self.put_manifest({"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": rows}, tag)

    def put_layers(self, tag: str, layers: list[tuple[bytes, dict[str, str]]]) -> None:
        rows = [{"mediaType": "x", **self.put_blob(body), "annotations": notes} for body, notes in layers]
        self.put_manifest({"schemaVersion": 2, "config": self.put_blob(b"{}"), "layers": rows}, tag)


@dataclass(frozen=True)
class Signer:
    """A key pair of openssl, in the forms of cosign."""

    folder: Path
    name: str

    @property
    def public(self) -> Path:
        return self.folder / f"{self.name}.pub"

    def make(self) -> Signer:
        key = str(self.folder / f"{self.name}.pem")
        run = lambda *words: subprocess.run(["openssl", *words], check=True, capture_output=True)  # noqa: E731
        run("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
        run("ec", "-in", key, "-pubout", "-out", str(self.public))
        return self

    def sign(self, data: bytes) -> str:
        words = ["openssl", "dgst", "-sha256", "-sign", str(self.folder / f"{self.name}.pem")]
        return base64.b64encode(subprocess.run(words, input=data, check=True, capture_output=True).stdout).decode()

    def sign_image(self, registry: FakeRegistry, digest: str, about: str = "") -> None:
        critical = {"image": {"docker-manifest-digest": about or digest}, "type": "cosign container image signature"}
        body = json.dumps({"critical": critical}).encode()
        note = {"dev.cosignproject.cosign/signature": self.sign(body)}
        registry.put_layers(f"{digest.replace(':', '-')}.sig", [(body, note)])

    def envelope(self, kind: str, predicate: Any, digest: str) -> bytes:
        body = json.dumps(
            {"predicateType": kind, "subject": [{"digest": {"sha256": digest[7:]}}], "predicate": predicate}
        ).encode()
        kind_of = "application/vnd.in-toto+json"
        signed = b"DSSEv1 %d %s %d %s" % (len(kind_of), kind_of.encode(), len(body), body)
        signatures = [{"sig": self.sign(signed)}]
        payload = base64.b64encode(body).decode()
        return json.dumps({"payloadType": kind_of, "payload": payload, "signatures": signatures}).encode()


def attest(registry: FakeRegistry, digest: str, *envelopes: bytes) -> None:
    registry.put_layers(f"{digest.replace(':', '-')}.att", [(body, {}) for body in envelopes])


def install(folder: Path, *names: str, **more: str) -> dict[str, str]:
    """Programs in a folder, and the variables with which they are found."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {Path(__file__)} {name} "$@"\n')
        program.chmod(0o755)
    own = {f"MEGACPP_{name.upper()}": str(folder / name) for name in names}
    absent = {f"MEGACPP_{name.upper()}": "/nowhere" for name in ("cosign", "syft") if name not in names}
    root = folder / "registry"
    root.mkdir(exist_ok=True)
    return {**own, **absent, "FAKE_REGISTRY": str(root), "PATH": f"{folder}:{os.environ['PATH']}", **more}


def find(reference: str, kind: str) -> Path:
    repository, _, name = reference.rpartition("@" if "@" in reference else ":")
    root = Path(os.environ["FAKE_REGISTRY"])
    place = root / repository.replace("/", "|") / kind / name
    if (root / "down").exists():
        sys.exit(f"ERROR: failed to do request: dial tcp {repository}: connection refused")
    if not place.exists():
        sys.exit(f"ERROR: {reference}: not found")
    return place


def run_docker(words: list[str]) -> None:
    if words[:4] == ["buildx", "imagetools", "inspect", "--raw"]:
        sys.stdout.buffer.write(find(words[4], "manifests").read_bytes())
    else:
        sys.exit("Cannot connect to the Docker daemon")


def run_oras(words: list[str]) -> None:
    words = [word for word in words if word not in ("--plain-http", "--from-plain-http", "--no-tty")]
    if words[:3] == ["blob", "fetch", "--output"]:
        body = find(words[4], "blobs").read_bytes()
        if digest_of(body) != words[4].partition("@")[2]:
            sys.exit("Error: mismatched digest")
        Path(words[3]).write_bytes(body)
    elif words[:3] == ["blob", "fetch", "--descriptor"]:
        sys.stdout.write(json.dumps({"size": find(words[3], "blobs").stat().st_size}))
    elif words[:2] == ["cp", "--to-oci-layout"]:
        copy(words[2], Path(words[3].rpartition(":")[0]), words[3].rpartition(":")[2])


def copy(source: str, layout: Path, tag: str) -> None:
    blobs = layout / "blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    repository = source.rpartition("@" if "@" in source else ":")[0]

    def take(digest: str, kind: str) -> bytes:
        body = find(f"{repository}@{digest}", kind).read_bytes()
        if digest_of(body) != digest:
            sys.exit("Error: mismatched digest")
        (blobs / digest[7:]).write_bytes(body)
        return body

    def walk(digest: str) -> None:
        manifest = json.loads(take(digest, "manifests"))
        for row in manifest.get("manifests", ()):
            walk(row["digest"])
        for row in (manifest["config"], *manifest["layers"]) if "layers" in manifest else ():
            take(row["digest"], "blobs")

    top = digest_of(find(source, "manifests").read_bytes())
    walk(top)
    file = layout / "index.json"
    index = json.loads(file.read_text()) if file.exists() else {"schemaVersion": 2, "manifests": []}
    index["manifests"].append({"digest": top, "annotations": {"org.opencontainers.image.ref.name": tag}})
    file.write_text(json.dumps(index))
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')


def run_cosign(words: list[str]) -> None:
    if "--help" in words:
        return
    if os.environ.get("COSIGN_PASSWORD") != "right":
        sys.exit("reading key: decrypt: encrypted: decryption failed")
    if words[0] == "sign-blob":
        key = Path(words[words.index("--key") + 1])
        signer = Signer(key.parent, key.stem)
        sys.stdout.write(signer.sign(Path(words[-1]).read_bytes()) + "\n")


PROGRAMS: dict[str, Callable[[list[str]], None]] = {"docker": run_docker, "oras": run_oras, "cosign": run_cosign}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2:])

__all__ = ["FakeRegistry", "Signer", "attest", "digest_of", "install"]
