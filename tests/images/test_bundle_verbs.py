"""The verbs of bundles and of the supply chain: their exit codes, and what they say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import matrix_folder, read_catalog
from megacpp_validate.cli.images.bundle_runs import read_size
from megacpp_validate.cli.images.image_rows import read_rows
from megacpp_validate.images.bundle.restore.door import main as restore
from megacpp_validate.images.contents import Contents
from megacpp_validate.images.licences import list_licences, write_licences
from megacpp_validate.images.plan import plan_images
from megacpp_validate.images.refusals import ImageRefused
from megacpp_validate.images.signature import LICENCES, SPDX
from megacpp_validate.jitcache.seal import check_sealed, is_sealed
from megacpp_validate.jitcache.transfer import export_cache
from tests.command_line import Run, make_run
from tests.images.small_bundle import write_sources
from tests.images.small_registry import SmallRegistry, add_image, served, write_layer
from tests.images.small_signer import Signer, attest
from tests.sealed_caches import make_sealed

ONE = Signer(0xCAFE)
BASE = f"sha256:{'b' * 64}"
LAYERS = [write_layer({"a": b"b"})]
SBOM = {
    "spdxVersion": "SPDX-2.3",
    "packages": [{"externalRefs": [{"referenceType": "purl", "referenceLocator": "pkg:deb/debian/libc6@2"}]}],
}
OPEN, CLOSED, WRONG, MISSING, NO_ENVIRONMENT, INFRASTRUCTURE = 0, 1, 2, 4, 5, 6


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("MEGACPP_BASE", "MEGACPP_REGISTRY_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MEGACPP_COSIGN", "MEGACPP_SYFT"):
        monkeypatch.setenv(name, "/nowhere/at/all")

    return make_run(capfd, monkeypatch)


@pytest.fixture
def registry() -> Iterator[SmallRegistry]:
    with served(SmallRegistry()) as one:
        yield one


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A matrix whose image of the CPU has two small wheels."""
    for name, value in write_sources(tmp_path / "sources").items():
        monkeypatch.setenv(name, value)
    root = tmp_path / "project"
    shutil.copytree(matrix_folder(), root / "matrix")
    lock = root / read_rows(read_catalog(), "cpu", None).image.lock
    lock.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "sources/lock.txt", lock)
    return root


def test_a_bundle_is_written_and_told(run: Run, registry: SmallRegistry, project: Path, tmp_path: Path) -> None:
    lock = project / read_rows(read_catalog(), "cpu", None).image.lock
    labels = {"org.megacpp.target": "cpu", "org.megacpp.lock.sha256": sha256(lock.read_bytes()).hexdigest()}
    digest = add_image(registry, LAYERS, labels, BASE)
    image = f"{registry.host}/small@{digest}"
    (tmp_path / "key.pub").write_text(ONE.key)
    make_sealed(tmp_path / "jit", "cpu")
    make_sealed(tmp_path / "jit", "sm_90a")
    words = ("bundle", "cpu", "--matrix", project / "matrix", "--image", image, "--jit", tmp_path / "jit")
    words += ("--out", tmp_path / "out", "--part-size", "1MiB", "--key", tmp_path / "key.pub")
    said = run(*words, "--format", "json")
    assert said.code == OPEN, said.err
    told = json.loads(said.out)
    assert told["schema_id"] == "megacpp-validate/bundle-written/1"
    assert {row["kind"]: row["files"] for row in told["kinds"]}["wheel"] == 2
    assert told["image"] == image
    assert set(told["absent"]) == {"signature", "SBOM"}
    assert "no syft" in told["absent"]["SBOM"]
    assert restore(["--bundle", str(tmp_path / "out"), "--id", told["id"], "--jit", str(tmp_path / "restored")]) == 0
    assert check_sealed(tmp_path / "restored/cpu").manifest.architecture == "cpu"
    assert is_sealed(tmp_path / "restored/cpu")
    assert not (tmp_path / "restored/sm_90a").exists()  # an image has caches of its own architecture alone
    again = run(*words)
    assert (again.code, "is there already" in again.err) == (WRONG, True)
    lock.write_text("# no wheels, so no pip\n")
    table = run("bundle", "cpu", "--matrix", project / "matrix", "--out", tmp_path / "bare")
    assert table.code == OPEN
    assert "no image: none was named" in table.out
    assert "not signed (--sign-key)" in table.out
    markdown = run("bundle", "cpu", "--matrix", project / "matrix", "--out", tmp_path / "md", "--format", "markdown")
    assert "| lock | 1 file | 23 B |" in markdown.out


def test_a_bundle_that_cannot_be(run: Run, registry: SmallRegistry, project: Path, tmp_path: Path) -> None:
    words = ("bundle", "cpu", "--matrix", project / "matrix", "--out", tmp_path / "out")
    digest = add_image(registry, LAYERS, {"org.megacpp.target": "h200"}, BASE)
    folder, _ = make_sealed(tmp_path / "sealed", "sm_90a")
    export_cache(folder, tmp_path / "other.tar")
    cases = [
        (("--image", f"{registry.host}/small@{digest}"), WRONG, "says org.megacpp.target=h200"),
        (("--image", f"{registry.host}/small:1"), WRONG, "has no digest"),
        (("--image", ""), WRONG, "has no digest"),  # a variable without a value is not a bundle without an image
        (("--out", project / "matrix/targets.toml/out"), WRONG, "targets.toml is a file"),
        (("--out", "/proc/out"), WRONG, "cannot be written"),
        (("--image", f"127.0.0.1:9/small@{digest}"), INFRASTRUCTURE, "Connection refused"),
        (("--image", f"{registry.host}/small@sha256:{'0' * 64}"), CLOSED, "has no manifest"),
        (("--jit", tmp_path / "sealed"), WRONG, "no JIT caches of cpu that can be bundled (it has sm_90a)"),
        (("--jit", tmp_path / "other.tar"), WRONG, "holds the JIT caches of sm_90a, and the image is for cpu"),
        (("--jit", tmp_path / "sources/jit"), WRONG, "no JIT caches of cpu that can be bundled (it has cpu)"),
        (("--part-size", "a lot"), WRONG, "is no size"),
        (("--part-size", "1"), WRONG, "too small"),
        (("--jit", tmp_path / "nowhere"), WRONG, "there is no"),
        (("--key", project / "matrix/targets.toml"), WRONG, "is no public key"),
        (("--sign-key", project / "matrix/targets.toml"), NO_ENVIRONMENT, "no cosign at /nowhere/at/all"),
    ]
    for more, code, text in cases:
        said = run(*words, *more)
        assert (said.code, text in said.err) == (code, True), (more, said)
        assert not (tmp_path / "out").exists()
    assert run("bundle", "no-such-target").code == WRONG


COSIGN = """#!/bin/sh
if [ "$2" = --help ]; then exit 0; fi
if [ "$COSIGN_PASSWORD" != right ]; then echo 'reading key: decrypt: encrypted: decryption failed' >&2; exit 1; fi
echo SIGNATURE
"""


def test_a_bundle_gives_no_private_key_away(
    run: Run, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is laid in is read first; and the one that signs is tried first, held to the one that is laid in."""
    cosign, private, public = tmp_path / "cosign", tmp_path / "k.key", tmp_path / "k.pub"
    trial = b"a trial of a key, and nothing else\n"
    cosign.write_text(COSIGN.replace("SIGNATURE", ONE.sign(trial)))
    cosign.chmod(0o755)
    monkeypatch.setenv("MEGACPP_COSIGN", str(cosign))
    private.write_text(
        "-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\neyJr\n-----END ENCRYPTED SIGSTORE PRIVATE KEY-----\n"
    )
    public.write_text(ONE.key)
    (tmp_path / "other.pub").write_text(Signer(0xBEEF).key)
    words = ("bundle", "cpu", "--matrix", project / "matrix", "--out", tmp_path / "out")
    for password, more, text in (
        ("right", ("--key", private), "is no public key"),
        ("right", ("--sign-key", public), "is no private key"),
        ("wrong", ("--sign-key", private), "does not open the key"),
        ("right", ("--sign-key", private, "--key", tmp_path / "other.pub"), "the public key that was named does not"),
    ):
        monkeypatch.setenv("COSIGN_PASSWORD", password)
        said = run(*words, *more)
        assert (said.code, text in said.err) == (WRONG, True), (more, said)
        assert not (tmp_path / "out").exists()
    assert run(*words, "--sign-key", private, "--key", public).code == OPEN
    assert (tmp_path / "out/cosign.pub").read_text() == ONE.key


def test_an_image_without_labels_is_not_bundled(
    run: Run, registry: SmallRegistry, project: Path, tmp_path: Path
) -> None:
    for labels, lacking in (({}, "org.megacpp.target"), ({"org.megacpp.target": "cpu"}, "org.megacpp.lock.sha256")):
        image = f"{registry.host}/small@{add_image(registry, LAYERS, labels, BASE)}"
        said = run("bundle", "cpu", "--matrix", project / "matrix", "--out", tmp_path / "out", "--image", image)
        assert (said.code, f"has no label {lacking}" in said.err) == (WRONG, True), said


def test_what_is_no_image_is_not_bundled(run: Run, registry: SmallRegistry, project: Path, tmp_path: Path) -> None:
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": registry.add_blob(b"[]"), "layers": []}
    image = f"{registry.host}/small@{registry.add_manifest(manifest)['digest']}"
    said = run("bundle", "cpu", "--matrix", project / "matrix", "--out", tmp_path / "out", "--image", image)
    assert (said.code, "is no configuration of an image" in said.err) == (WRONG, True), said


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("700MB", 700 * 10**6), ("1.5k", 1500), ("12", 12), ("64 MiB", 64 << 20)]
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4TiB", "1e9", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ImageRefused, match="is no size"):
        read_size(text)


def test_an_image_is_verified_against_the_plan_of_the_matrix(run: Run, registry: SmallRegistry, tmp_path: Path) -> None:
    rows = read_rows(read_catalog(), "cpu", None)
    base = f"docker.io/library/debian@{BASE}"
    plan = plan_images(rows.images, rows.read_pins(), [rows.target], root=rows.root, own_base=base)[0]
    digest = add_image(registry, LAYERS, dict(plan.labels), BASE)
    listed = list_licences(Contents(registry.host, "s"), (), (), {"libc6": ""})
    told = json.loads(write_licences(listed).replace(b'"source"', b'"deb"'))
    image = {"SPDXID": "image", "versionInfo": digest}
    sbom = {**SBOM, "documentDescribes": ["image"], "packages": [image, *SBOM["packages"]]}
    attest(registry, digest, [ONE.envelope(SPDX, sbom, digest), ONE.envelope(LICENCES, told, digest)])
    ONE.sign_image(registry, digest)
    (tmp_path / "key.pub").write_text(ONE.key)
    words = ("image-verify", f"{registry.host}/s@{digest}", "--base", base)
    signed = run(*words, "--key", tmp_path / "key.pub", "--format", "json")
    assert signed.code == OPEN, signed
    assert {check["outcome"] for check in json.loads(signed.out)["checks"]} == {"pass"}
    nobody = run(*words)
    assert nobody.code == MISSING
    assert "not run, so nobody knows: signature, sbom, licences" in nobody.out
    pinned = run("image-verify", f"{registry.host}/s@{digest}", "--key", tmp_path / "key.pub")
    assert pinned.code == CLOSED
    assert "failed: label base, base" in pinned.out
    other = run(*words, "--target", "h200")
    assert other.code == CLOSED
    assert "label target" in other.out
    assert "| ✓ passes | digest |" in run(*words, "--format", "markdown").out


def test_what_cannot_be_verified_or_signed(run: Run, registry: SmallRegistry, tmp_path: Path) -> None:
    digest = add_image(registry, LAYERS, {}, BASE)
    image = f"{registry.host}/s@{digest}"
    assert run("image-verify", f"{registry.host}/s:latest").code == WRONG
    assert run("image-verify", f"127.0.0.1:9/s@{digest}").code == INFRASTRUCTURE
    (tmp_path / "key").write_text("no key")
    said = run("image-verify", image, "--key", tmp_path / "key")
    assert (said.code, "is no public key" in said.err) == (WRONG, True)
    bare = run("image-verify", image)
    assert bare.code == CLOSED
    assert "no label says its target" in bare.out
    for verb in (("image-sign", image, "--key", tmp_path / "key"), ("image-keys", tmp_path / "mine")):
        said = run(*verb)
        assert (said.code, "apt-get install cosign" in said.err) == (NO_ENVIRONMENT, True)
