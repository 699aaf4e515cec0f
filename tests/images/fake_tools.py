"""docker, cosign and syft as scripts over a folder that stands for registries: for what real ones do not do on request.

`python fake_tools.py NAME WORDS...` behaves as the program NAME, as far as images need it. FAKE_REGISTRY holds
REPOSITORY/manifests/TAG-OR-DIGEST and REPOSITORY/blobs/DIGEST; a file `down` in it makes every registry silent.
tests/images/test_real.py runs the same features with the real programs.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
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

    def put_image(self, labels: dict[str, str], base: str = "", *layers: bytes) -> str:
        """An image and its provenance under one index, as buildx pushes them; the digest of the index."""
        config = {"architecture": "amd64", "os": "linux", "config": {"Labels": labels}}
        rows = [self.put_blob(layer) for layer in layers or (b"layer",)]
        manifest = {"schemaVersion": 2, "config": self.put_blob(json.dumps(config).encode()), "layers": rows}
        materials = [{"uri": "pkg:docker/base@1", "digest": {"sha256": base[7:]}}]
        index = {"schemaVersion": 2, "manifests": [{"digest": self.put_manifest(manifest)}]}
        return self.put_manifest(index | ({"provenance": {"SLSA": {"materials": materials}}} if base else {}))

    def put_index(self, tag: str, salt: str = "") -> str:
        """An index over two platforms, whose images are there."""
        rows = []
        for name in ("amd64", "arm64"):
            config = self.put_blob(json.dumps({"os": "linux", "architecture": name, "salt": salt}).encode())
            image = self.put_manifest({"schemaVersion": 2, "config": config, "layers": []})
            rows.append({"digest": image, "platform": {"os": "linux", "architecture": name}})
        return self.put_manifest({"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": rows}, tag)


def make_key(folder: Path, name: str) -> Path:
    """`NAME.key` and `NAME.pub`, of openssl; the private one looks like cosign's."""
    run = lambda *words: subprocess.run(["openssl", *words], check=True, capture_output=True)  # noqa: E731
    run("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(folder / f"{name}.pem"))
    run("ec", "-in", str(folder / f"{name}.pem"), "-pubout", "-out", str(folder / f"{name}.pub"))
    (folder / f"{name}.key").write_text("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n")
    return folder / f"{name}.key"


def install(folder: Path, *names: str, **more: str) -> dict[str, str]:
    """Programs in a folder, and the variables with which they are found."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {Path(__file__)} {name} "$@"\n')
        program.chmod(0o755)
    root = folder / "registry"
    root.mkdir(exist_ok=True)
    return {"FAKE_REGISTRY": str(root), "PATH": f"{folder}:{os.environ['PATH']}", **more}


def find(reference: str, kind: str = "manifests") -> Path:
    repository, _, name = reference.rpartition("@" if "@" in reference else ":")
    root = Path(os.environ["FAKE_REGISTRY"])
    place = root / repository.replace("/", "|") / kind / name
    if (root / "down").exists():
        sys.exit(f"ERROR: failed to do request: dial tcp {repository}: connection refused")
    if not place.exists():
        sys.exit(f"ERROR: {reference}: not found")
    return place


def run_docker(words: list[str]) -> None:
    if words[:3] != ["buildx", "imagetools", "inspect"]:
        sys.exit("Cannot connect to the Docker daemon")
    body, digest = find(words[-1]).read_bytes(), words[-1].partition("@")[2]
    if digest not in ("", digest_of(body)):
        sys.exit(f"ERROR: unexpected digest {digest_of(body)}")
    if ".Manifest.Digest" in words[4]:
        sys.stdout.write(json.dumps(digest_of(body)) + "\n")
        return
    top, repository = json.loads(body), words[-1].rpartition("@")[0]
    row = json.loads(find(f"{repository}@{top['manifests'][0]['digest']}").read_bytes()) if "manifests" in top else top
    image = json.loads(find(f"{repository}@{row['config']['digest']}", "blobs").read_bytes())
    sys.stdout.write(json.dumps({"image": image, "provenance": top.get("provenance", {})}) + "\n")


def run_cosign(words: list[str]) -> None:
    given = {
        name: Path(words[words.index(f"--{name}") + 1]) for name in ("key", "predicate", "dir") if f"--{name}" in words
    }
    verb, root = words[0], Path(os.environ["FAKE_REGISTRY"])
    kept = f"{root / words[-1].rpartition(':')[2]}.{given['key'].stem}" if "key" in given else ""
    if "--help" in words:
        return
    if not verb.startswith("verify") and verb != "save" and os.environ.get("COSIGN_PASSWORD") != "right":
        sys.exit("reading key: decrypt: encrypted: decryption failed")
    if verb in ("sign", "attest") and "PRIVATE KEY" not in given["key"].read_text():
        sys.exit("reading key: no such key")
    if verb == "sign-blob":
        sign = ["openssl", "dgst", "-sha256", "-sign", str(given["key"].with_suffix(".pem")), words[-1]]
        sys.stdout.write(base64.b64encode(subprocess.run(sign, check=True, capture_output=True).stdout).decode() + "\n")
    elif verb == "sign":
        Path(f"{kept}.sig").touch()
    elif verb == "attest":
        Path(f"{kept}.att").write_bytes(given["predicate"].read_bytes())
    elif verb == "verify" and not Path(f"{kept}.sig").exists():
        sys.exit("Error: no matching signatures")
    elif verb == "verify-attestation":
        if not Path(f"{kept}.att").exists():
            sys.exit("Error: no matching attestations")
        statement = {"predicate": json.loads(Path(f"{kept}.att").read_text())}
        sys.stdout.write(json.dumps({"payload": base64.b64encode(json.dumps(statement).encode()).decode()}) + "\n")
    elif verb == "save":
        save(words[-1], given["dir"])


def run_syft(words: list[str]) -> None:
    """The SBOM that lies in FAKE_SBOM."""
    sys.stdout.write(Path(os.environ["FAKE_SBOM"]).read_text())


def save(reference: str, layout: Path) -> None:
    blobs, repository = layout / "blobs/sha256", reference.rpartition("@")[0]
    blobs.mkdir(parents=True)

    def take(digest: str, kind: str) -> bytes:
        body = find(f"{repository}@{digest}", kind).read_bytes()
        if digest_of(body) != digest:
            sys.exit("Error: error verifying sha256 checksum")
        (blobs / digest[7:]).write_bytes(body)
        return body

    top = json.loads(take(reference.partition("@")[2], "manifests"))
    manifest = json.loads(take(top["manifests"][0]["digest"], "manifests"))
    for row in (manifest["config"], *manifest["layers"]):
        take(row["digest"], "blobs")
    kinds = {reference.partition("@")[2]: "imageIndex"}
    if any(Path(os.environ["FAKE_REGISTRY"]).glob("*.sig")):
        kinds[digest_of(b"signature")] = "sigs"
    rows = [
        {"digest": digest, "annotations": {"kind": f"dev.cosignproject.cosign/{kind}"}}
        for digest, kind in kinds.items()
    ]
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": rows}))
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')


if __name__ == "__main__":
    {"docker": run_docker, "cosign": run_cosign, "syft": run_syft}[sys.argv[1]](sys.argv[2:])
