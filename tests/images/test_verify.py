"""An image is what its digest, the plan and a key say, or a check fails: against a registry that can be told to lie."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.errors import NoEnvironment
from megacpp_validate.images.plan import plan_images
from megacpp_validate.images.supply import LICENCES, SPDX, list_licences, make_keys, read_sbom, rows_of, write_licences
from megacpp_validate.images.tools import ImageRefused, RegistryUnreachable
from megacpp_validate.images.verify import CheckOutcome, ImageVerdict, VerifyOptions, verify_image
from tests.command_line import make_run
from tests.images.fake_tools import FakeRegistry, Signer, attest, install

BASE = f"sha256:{'b' * 64}"
OWN_BASE = f"docker.io/library/debian@{BASE}"
PURL = {"referenceType": "purl", "referenceLocator": "pkg:deb/debian/libc6@2?arch=amd64"}


class Site:
    """A registry with an image as the plan of the cpu target says, signed and attested by a key."""

    def __init__(self, folder: Path) -> None:
        self.variables = install(folder / "bin", "docker", "oras")
        self.rows = rows_of(None, "a test", self.variables)
        target = [row for row in self.rows.catalog.targets if row.id == "cpu"]
        plan = plan_images(self.rows.images, self.rows.pins, target, root=self.rows.root, own_base=OWN_BASE)[0]
        self.labels = dict(plan.labels)
        self.registry = FakeRegistry(Path(self.variables["FAKE_REGISTRY"]), "127.0.0.1:5000/s")
        self.digest = self.registry.put_image(self.labels, BASE)
        self.one, self.other = Signer(folder, "one").make(), Signer(folder, "other").make()
        self.sign()

    def sbom(self, **more: Any) -> dict[str, Any]:
        image = {"SPDXID": "image", "versionInfo": self.digest}
        packages = [image, {"externalRefs": [PURL]}]
        return {"spdxVersion": "SPDX-2.3", "documentDescribes": ["image"], "packages": packages, **more}

    def sign(self, signer: Signer | None = None, sbom: dict[str, Any] | None = None, about: str = "") -> None:
        by, body = signer or self.one, sbom or self.sbom()
        listed = json.loads(write_licences(list_licences(read_sbom(self.sbom()), {})))
        by.sign_image(self.registry, self.digest, about)
        rows = [(SPDX, body), (LICENCES, listed)]
        attest(self.registry, self.digest, *(by.envelope(kind, one, about or self.digest) for kind, one in rows))

    def verify(self, **more: Any) -> ImageVerdict:
        options = VerifyOptions(f"{self.registry.repository}@{self.digest}", self.one.public, "", OWN_BASE)
        return verify_image(self.rows, replace(options, **more))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    return made


def failed(verdict: ImageVerdict, outcome: CheckOutcome = CheckOutcome.FAIL) -> list[str]:
    return [check.name for check in verdict.checks if check.outcome is outcome]


def test_an_image_as_it_should_be(site: Site) -> None:
    verdict = site.verify(deep=True)
    assert ({check.outcome for check in verdict.checks}, verdict.exit) == ({CheckOutcome.PASS}, 0), verdict
    assert (verdict.packages, verdict.unknown_licences) == ({"deb": 1}, ("deb libc6",))
    nobody = site.verify(key=None)
    assert (failed(nobody, CheckOutcome.NOT_RUN), nobody.exit) == (["signature", "sbom", "licences"], 4)
    assert failed(site.verify(base="")) == ["label base", "base"]
    assert "label target" in failed(site.verify(target="h200"))


def test_another_key_and_the_signature_of_another_image(site: Site) -> None:
    assert failed(site.verify(key=site.other.public)) == ["signature", "sbom", "licences"]
    site.sign(about=f"sha256:{'0' * 64}")
    verdict = site.verify()
    assert failed(verdict) == ["signature", "sbom", "licences"]
    assert "and not about this image" in verdict.checks[failed(verdict).index("signature") + 7].says
    site.sign(site.other)
    assert failed(site.verify()) == ["signature", "sbom", "licences"]


def test_an_sbom_of_another_image(site: Site) -> None:
    other = {"SPDXID": "image", "versionInfo": f"sha256:{'0' * 64}"}
    for body, why in (
        (site.sbom(packages=[other, {"externalRefs": [PURL]}]), "another image"),
        (site.sbom(documentDescribes=[]), "names no image"),
        ({"spdxVersion": "SPDX-2.3", "packages": []}, "no SBOM"),
        (site.sbom(packages=[{"SPDXID": "image", "versionInfo": site.digest},
                             {"externalRefs": [{**PURL, "referenceLocator": "pkg:deb/debian/evil@1"}]}]), ""),
    ):  # fmt: skip
        site.sign(sbom=body)
        verdict = site.verify()
        assert failed(verdict) == ["sbom" if why else "licences"]
        assert any(why in check.says for check in verdict.checks)


def test_what_a_registry_lost_or_damaged(site: Site) -> None:
    layer = next(path for path in (site.registry.folder / "blobs").iterdir() if path.read_bytes() == b"layer")
    layer.write_bytes(b"LAYER")
    assert failed(site.verify()) == []
    assert failed(site.verify(deep=True)) == ["layers"]
    layer.write_bytes(b"short")
    layer.unlink()
    assert failed(site.verify()) == ["layers"]
    (site.registry.folder / "manifests" / site.digest).write_bytes(b"{}")
    assert failed(site.verify()) == ["digest"]
    (site.registry.folder / "manifests" / site.digest).unlink()
    assert failed(site.verify()) == ["digest"]
    (site.registry.root / "down").touch()
    with pytest.raises(RegistryUnreachable, match="connection refused"):
        site.verify()


def test_labels_and_provenance(site: Site) -> None:
    site.digest = site.registry.put_image({**site.labels, "org.megacpp.lock.sha256": "0" * 64}, BASE)
    site.sign()
    assert failed(site.verify()) == ["label lock"]
    site.digest = site.registry.put_image(site.labels)
    site.sign()
    assert failed(site.verify()) == ["provenance", "base"]
    site.digest = site.registry.put_image(site.labels, f"sha256:{'c' * 64}")
    site.sign()
    assert failed(site.verify()) == ["base"]
    site.digest = site.registry.put_image({}, BASE)
    site.sign()
    assert failed(site.verify(), CheckOutcome.NOT_RUN)[:4] == ["label target", "label lock", "label pins", "label base"]


def test_wrong_arguments(
    site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(capfd, monkeypatch)
    image = f"{site.registry.repository}@{site.digest}"
    (tmp_path / "none").write_text("no key")
    for words, code, text in (
        (("image-verify", f"{site.registry.repository}:1"), 2, "has no digest"),
        (("image-verify", image, "--key", tmp_path / "none"), 2, "is no public key"),
        (("image-verify", image, "--target", "h100"), 2, "no image for h100"),
        (("image-sign", image, "--key", tmp_path / "none"), 5, "cosign is missing"),
        (("image-keys", tmp_path / "mine"), 5, "apt-get install cosign"),
    ):
        said = run(*words)
        assert (said.code, text in said.err) == (code, True), said
    assert run("image-verify", image, "--base", OWN_BASE, "--key", site.one.public, "--format", "json").code == 0
    (tmp_path / "k.key").touch()
    with pytest.raises(NoEnvironment):
        make_keys(tmp_path / "k", site.variables)
    with pytest.raises(ImageRefused, match="would be overwritten"):
        make_keys(tmp_path / "k", install(tmp_path / "more", "cosign"))


def test_licences_and_sources() -> None:
    rows = {"externalRefs": [PURL], "licenseDeclared": "LGPL-2.1"}
    packages = read_sbom({"spdxVersion": "SPDX-2.3", "packages": [rows]})
    found = {(row.kind, row.name): row.licences for row in list_licences(packages, {"deep-gemm": "c", "strange": "d"})}
    assert found["deb", "libc6"] == ("LGPL-2.1",)
    assert found["source", "deep-gemm"] == ("MIT",)
    assert found["source", "deep-gemm/fmt"] == ("MIT",)
    assert found["source", "strange"] == ("unknown",)
