"""An image is what its digest, the plan and a key say, or a check fails: against a registry that can be told to lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.images.plan import ImageRows
from megacpp_validate.images.supply import ImageVerdict, sign_image, verify_image
from megacpp_validate.images.tools import RegistryUnreachable
from tests.command_line import make_run
from tests.images.fake_tools import FakeRegistry, install, make_key

BASE = f"sha256:{'b' * 64}"
OWN_BASE = f"docker.io/library/debian@{BASE}"
ZEROS = f"sha256:{'0' * 64}"


class Site:
    """A registry with an image as the plan of the cpu target says, signed and attested by a key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = install(
            folder / "bin", "docker", "cosign", "syft", COSIGN_PASSWORD="right", FAKE_SBOM=str(folder / "sbom.json")
        )
        self.rows = ImageRows(read_catalog(), self.variables)
        plan = self.rows.plan("cpu", OWN_BASE)
        self.labels = dict(plan.labels)
        (folder / "sbom.json").write_text(json.dumps({"spdxVersion": "SPDX-2.3"}))
        self.registry = FakeRegistry(Path(self.variables["FAKE_REGISTRY"]), "127.0.0.1:5000/s")
        self.key, self.other = make_key(folder, "one"), make_key(folder, "other")
        self.put()

    def put(self, labels: dict[str, str] | None = None, base: str = BASE) -> None:
        """Push an image, and sign it by the first key."""
        self.digest = self.registry.put_image(self.labels if labels is None else labels, base)
        self.image = f"{self.registry.repository}@{self.digest}"
        self.sign()

    def sign(self, key: Path | None = None) -> None:
        sign_image(self.rows, self.image, key or self.key, lambda _: None)

    def verify(self, key: Path | None = None, base: str = OWN_BASE, **more: Any) -> ImageVerdict:
        return verify_image(self.rows, self.image, key or self.folder / "one.pub", base=base, **more)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    return made


def failed(verdict: ImageVerdict, outcome: Outcome = Outcome.FAIL) -> list[str]:
    return [check.name for check in verdict.checks if check.outcome is outcome]


def test_an_image_as_it_should_be(site: Site) -> None:
    verdict = site.verify()
    assert ({check.outcome for check in verdict.checks}, verdict.exit) == ({Outcome.PASS}, 0), verdict
    nobody = verify_image(site.rows, site.image, None, base=OWN_BASE)
    assert (failed(nobody, Outcome.NOT_RUN), nobody.exit) == (["signature", "sbom"], 4)
    assert failed(site.verify(base="")) == ["labels", "base"]
    assert "labels" in failed(site.verify(target="h200"))
    (site.folder / "bin" / "cosign").unlink()
    site.rows.variables["PATH"] = str(site.folder / "bin")  # type: ignore[index]
    without = site.verify()
    assert (failed(without, Outcome.NOT_RUN), without.exit) == (["signature", "sbom"], 4)
    assert "cosign is missing" in without.checks[-1].says


def test_another_key_signed_it(site: Site) -> None:
    assert failed(site.verify(site.folder / "other.pub")) == ["signature", "sbom"]
    site.sign(site.other)  # a second signer takes nothing of the first away
    assert failed(site.verify()) == failed(site.verify(site.folder / "other.pub")) == []


def test_what_a_registry_lost_or_damaged(site: Site) -> None:
    (site.registry.folder / "manifests" / site.digest).write_bytes(b"{}")
    assert failed(site.verify()) == ["digest"]
    (site.registry.folder / "manifests" / site.digest).unlink()
    assert failed(site.verify()) == ["digest"]
    (site.registry.root / "down").touch()
    with pytest.raises(RegistryUnreachable, match="connection refused"):
        site.verify()


@pytest.mark.parametrize(
    ("labels", "base", "fails"),
    [({"org.megacpp.lock.sha256": "0" * 64}, BASE, ["labels"]), ({}, "", ["provenance", "base"]),
     ({}, f"sha256:{'c' * 64}", ["base"])],
)  # fmt: skip
def test_labels_and_provenance(site: Site, labels: dict[str, str], base: str, fails: list[str]) -> None:
    site.put(site.labels | labels, base)
    assert failed(site.verify()) == fails


def test_wrong_arguments(
    site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, key = make_run(capfd, monkeypatch), site.folder / "one.pub"
    (tmp_path / "none").write_text("no key")
    for words, code, text in (
        (("image-verify", f"{site.registry.repository}:1"), 2, "has no digest"),
        (("image-verify", site.image, "--key", tmp_path / "none"), 2, "is not a public key"),
        (("image-verify", site.image, "--key", site.key), 2, "is not a public key"),
        (("image-verify", site.image, "--target", "h100"), 2, "no image for 'h100'"),
        (("image-sign", site.image, "--key", tmp_path / "none"), 5, "another file than a private key"),
    ):
        said = run(*words)
        assert (said.code, text in said.err) == (code, True), said
    assert run("image-verify", site.image, "--base", OWN_BASE, "--key", key, "--format", "json").code == 0
    assert "SBOM attested, image signed" in run("image-sign", site.image, "--key", site.key).out
    for password in ("wrong", ""):
        monkeypatch.setenv("COSIGN_PASSWORD", password)
        said = run("image-sign", site.image, "--key", site.key)
        assert (said.code, "the password of the key in COSIGN_PASSWORD" in said.err) == (5, True), said
