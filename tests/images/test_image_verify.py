"""Verifying an image: every check passes on what is as planned, and each fails on the fault that it is for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megacpp_validate.cli.app import app
from megacpp_validate.cli.images import image_verify_verbs
from megacpp_validate.images.contents import Contents, open_contents, read_place
from megacpp_validate.images.licences import list_licences, write_licences
from megacpp_validate.images.plan_result import ImagePlan
from megacpp_validate.images.refusals import ImageRefused, RegistryUnreachable
from megacpp_validate.images.registry_answers import wait_before
from megacpp_validate.images.sbom import Package
from megacpp_validate.images.signature import LICENCES, SPDX
from megacpp_validate.images.verify import Expected, Verified, verify_image
from megacpp_validate.images.verify_result import CheckOutcome, ImageVerdict
from megacpp_validate.report.markdown.image_verify import tell_image_verdict
from megacpp_validate.report.terminal.image_verify import render_image_verdict
from tests.images.small_registry import OCI, SmallRegistry, add_image, served, write_layer
from tests.images.small_signer import Signer, attest

ONE, OTHER = Signer(0xA11CE), Signer(0xB0B)
BASE = f"sha256:{'b' * 64}"
LABELS = {
    "org.megacpp.target": "cpu",
    "org.megacpp.lock.sha256": "1" * 64,
    "org.megacpp.pins.sha256": "2" * 64,
    "org.opencontainers.image.base.digest": BASE,
}
PLAN = ImagePlan(
    target="cpu", arch="", platform="linux/amd64", base="debian", reference=f"docker.io/debian:1@{BASE}", pulled="",
    verified="", unverified="", lock="", lock_hash="1" * 64, steps=(), sources=(), cache_arch="cpu", labels=LABELS,
)  # fmt: skip
LAYERS = [write_layer({"var/lib/dpkg/status": b"Package: libc6\nStatus: install ok installed\nVersion: 2\n"})]
PACKAGES = (Package("deb", "libc6", "2", ""), Package("pypi", "Torch", "2.13", "BSD-3-Clause"))
SBOM = {
    "spdxVersion": "SPDX-2.3",
    "packages": [
        {
            "name": one.name,
            "licenseDeclared": one.licence or "NOASSERTION",
            "externalRefs": [
                {"referenceType": "purl", "referenceLocator": f"pkg:{one.kind}/{one.name}@{one.version}?x"}
            ],
        }
        for one in PACKAGES
    ],
}


def about(*digests: str) -> dict[str, object]:
    """That SBOM as syft writes it: of an image that it names."""
    root = {
        "SPDXID": "SPDXRef-Image",
        "versionInfo": digests[0],
        "checksums": [{"algorithm": "SHA256", "checksumValue": one[7:]} for one in digests[1:]],
    }
    row = {"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": "SPDXRef-Image"}
    packages = SBOM["packages"]
    assert isinstance(packages, list)
    return {**SBOM, "packages": [root, *packages], "relationships": [row]}


@pytest.fixture
def registry() -> Iterator[SmallRegistry]:
    with served(SmallRegistry()) as one:
        yield one


def add_signed(registry: SmallRegistry, labels: dict[str, str] | None = None, base: str = BASE) -> str:
    """An image as it should be; its digest."""
    digest = add_image(registry, LAYERS, labels or LABELS, base)
    ONE.sign_image(registry, digest)
    signed = [ONE.envelope(SPDX, about(digest), digest), ONE.envelope(LICENCES, told(registry, digest), digest)]
    attest(registry, digest, signed)
    return digest


def told(registry: SmallRegistry, digest: str) -> object:
    """The licences of that image."""
    contents = Contents(registry.host, "small")
    return json.loads(write_licences(list_licences(contents, [row(registry, digest)], PACKAGES, {"deep-gemm": "c0"})))


def row(registry: SmallRegistry, digest: str) -> str:
    """The layer of an image."""
    image = json.loads(registry.manifests[digest])["manifests"][0]["digest"]
    return str(json.loads(registry.manifests[image])["layers"][0]["digest"])


def look(
    registry: SmallRegistry,
    digest: str,
    *,
    key: Signer | None = ONE,
    plan: ImagePlan | None = PLAN,
    deep: bool = False,
    locked: Mapping[str, str] | None = None,
) -> Verified:
    place = read_place(f"{registry.host}/small@{digest}")
    digests = frozenset({BASE} if plan else ())
    expected = Expected(
        plan, "" if plan else "no row", digests, key.key if key else "", Path("k.pub"), deep, locked or {}
    )
    return verify_image(place, open_contents(place), lambda _: expected, {"PATH": ""})


def failed(found: Verified, outcome: CheckOutcome = CheckOutcome.FAIL) -> dict[str, str]:
    return {check.name: check.says for check in found.checks if check.outcome is outcome}


def test_an_image_as_planned_passes_every_check(registry: SmallRegistry) -> None:
    found = look(registry, add_signed(registry), deep=True)
    assert {check.outcome for check in found.checks} == {CheckOutcome.PASS}, found.checks
    assert [check.name for check in found.checks] == [
        "digest", "layers", "label target", "label lock", "label pins", "label base", "platform", "signature", "sbom",
        "provenance", "base", "licences",
    ]  # fmt: skip
    assert found.target == "cpu"
    assert found.count_packages() == {"deb": 1, "pypi": 1, "source": 3}
    assert [one.name for one in found.licences if not one.known] == ["libc6"]


@pytest.mark.parametrize("label", LABELS)
def test_a_label_that_is_not_the_plans(label: str, registry: SmallRegistry) -> None:
    names = {"target": "label target", "sha256": "", "digest": "label base"}
    name = names[label.rpartition(".")[2]] or f"label {label.split('.')[2]}"
    assert list(failed(look(registry, add_signed(registry, {**LABELS, label: "other"})))) == [name]
    bare = {key: value for key, value in LABELS.items() if key != label}
    assert "is nothing, and the plan says" in failed(look(registry, add_signed(registry, bare)))[name]


def test_a_base_that_is_not_the_pinned_one(registry: SmallRegistry) -> None:
    said = failed(look(registry, add_signed(registry, base=f"sha256:{'c' * 64}")))
    assert list(said) == ["base"]
    assert f"sha256:{'c' * 64}" in said["base"]
    assert BASE in said["base"]


def test_an_image_without_provenance(registry: SmallRegistry) -> None:
    assert list(failed(look(registry, add_signed(registry, base="")))) == ["provenance", "base"]


def test_provenance_of_another_image(registry: SmallRegistry) -> None:
    digest = add_signed(registry)
    index = json.loads(registry.manifests[digest])
    index["manifests"][1]["annotations"]["vnd.docker.reference.digest"] = f"sha256:{'d' * 64}"
    other = registry.add_manifest(index)["digest"]
    assert "other images" in failed(look(registry, other))["provenance"]


def test_an_image_of_another_platform(registry: SmallRegistry) -> None:
    digest = add_signed(registry)
    said = failed(look(registry, digest, plan=ImagePlan(**{**vars(PLAN), "platform": "linux/arm64"})))
    assert said == {"platform": "it is for linux/amd64, and the plan says linux/arm64"}


def test_a_digest_that_is_not_there_or_lies(registry: SmallRegistry) -> None:
    digest = add_signed(registry)
    assert "has no manifest" in failed(look(registry, f"sha256:{'a' * 64}"))["digest"]
    registry.manifests[digest] += b"\n"
    assert f"for {digest}" in failed(look(registry, digest))["digest"]
    registry.manifests[digest] = b"[]"
    assert list(failed(look(registry, digest))) == ["digest"]


@pytest.mark.parametrize("config", [[], None, "text", {"config": "text"}, {"config": {"Labels": ["text"]}}])
def test_a_digest_of_something_else_than_an_image(registry: SmallRegistry, config: object) -> None:
    blob = registry.add_blob(json.dumps(config).encode())
    manifest = {"schemaVersion": 2, "mediaType": f"{OCI}.manifest.v1+json", "config": blob, "layers": []}
    said = failed(look(registry, registry.add_manifest(manifest)["digest"]))
    assert list(said) == ["digest"]
    assert "is no configuration of an image" in said["digest"]


def test_a_manifest_that_stands_alone(registry: SmallRegistry) -> None:
    """As `docker push` writes it, without an index: it has no place for provenance."""
    digest = str(json.loads(registry.manifests[add_signed(registry)])["manifests"][0]["digest"])
    said = failed(look(registry, digest))
    assert {"digest", "layers", "label lock", "platform"}.isdisjoint(said)
    assert said["provenance"] == "there is none beside the image"


def test_a_layer_that_is_gone_shorter_or_another(registry: SmallRegistry) -> None:
    digest = add_signed(registry)
    layer = row(registry, digest)
    whole = registry.blobs.pop(layer)
    assert failed(look(registry, digest)) == {"layers": f"{layer} is not there"}
    registry.blobs[layer] = whole[:-1]
    assert f"has {len(whole) - 1} bytes of {len(whole)}" in failed(look(registry, digest))["layers"]
    registry.blobs[layer] = whole[:-1] + b"x"
    assert failed(look(registry, digest)) == {}
    assert "has other bytes" in failed(look(registry, digest, deep=True))["layers"]


def test_an_image_that_nobody_or_somebody_else_signed(registry: SmallRegistry) -> None:
    digest = add_signed(registry)
    assert set(failed(look(registry, digest, key=OTHER))) == {"signature", "sbom", "licences"}
    OTHER.sign_image(registry, digest)
    assert set(failed(look(registry, digest))) == {"signature"}
    unsigned = add_image(registry, LAYERS, {**LABELS, "more": "1"}, BASE)
    assert set(failed(look(registry, unsigned))) == {"signature", "sbom", "licences"}


def test_what_was_attested_of_another_image(registry: SmallRegistry) -> None:
    digest, other = add_signed(registry), f"sha256:{'e' * 64}"
    attest(registry, digest, [ONE.envelope(SPDX, SBOM, other)])
    said = failed(look(registry, digest))
    assert f"about {other}" in said["sbom"]
    assert "nothing of the kind" in said["licences"]


def attest_sbom(registry: SmallRegistry, digest: str, sbom: dict[str, object]) -> None:
    told = {"packages": [{"kind": one.kind, "name": one.name.lower(), "version": "", "licences": [], "said_by": ""}
                         for one in PACKAGES]}  # fmt: skip
    attest(registry, digest, [ONE.envelope(SPDX, sbom, digest), ONE.envelope(LICENCES, told, digest)])


def test_an_sbom_of_another_image_is_none_of_this_one(registry: SmallRegistry) -> None:
    """Attested of this digest and signed, and about another: what `--sbom` was given by mistake."""
    digest, other = add_signed(registry), f"sha256:{'e' * 64}"
    manifest = json.loads(registry.manifests[digest])["manifests"][0]["digest"]
    for named in ((other,), (other, other)):
        attest_sbom(registry, digest, about(*named))
        assert failed(look(registry, digest)) == {
            "sbom": f"it was attested of this digest, and it says that it is about {other}, which is another image"
        }
    for own in ((digest,), (manifest,), (other, manifest)):
        attest_sbom(registry, digest, about(*own))
        assert failed(look(registry, digest)) == {}, own
    attest_sbom(registry, digest, {**about(digest), "relationships": [3]})
    assert set(failed(look(registry, digest))) == {"sbom"}


def test_an_sbom_that_names_no_image_is_held_to_the_lock(registry: SmallRegistry) -> None:
    digest = add_signed(registry)
    attest_sbom(registry, digest, dict(SBOM))
    assert failed(look(registry, digest, locked={"torch": "2.13"})) == {}
    said = failed(look(registry, digest, locked={"torch": "2.14", "numpy": "2"}))
    assert said["sbom"].endswith("it names no image, and of the locked packages it lacks numpy 2, torch 2.14")


def test_licences_are_held_to_the_sbom_that_was_signed(registry: SmallRegistry) -> None:
    digest = add_signed(registry)
    foreign = {**about(digest), "packages": []}
    envelopes = [registry.blobs[layer["digest"]] for layer in
                 json.loads(registry.manifests[f"{digest.replace(':', '-')}.att"])["layers"]]  # fmt: skip
    attest(registry, digest, [OTHER.envelope(SPDX, foreign, digest), *envelopes])
    assert failed(look(registry, digest)) == {}


def test_attestations_that_cannot_be_read_are_not_called_missing(registry: SmallRegistry) -> None:
    digest = add_signed(registry)
    layers = json.loads(registry.manifests[f"{digest.replace(':', '-')}.att"])["layers"]
    lost = registry.blobs.pop(layers[0]["digest"])
    found = look(registry, digest)
    assert f"names {layers[0]['digest']}, and has it not" in failed(found)["attestations"]
    assert set(failed(found)) == {"attestations"}
    assert set(failed(found, CheckOutcome.NOT_RUN)) == {"sbom", "licences"}
    registry.blobs[layers[0]["digest"]] = lost[:-1] + b" "
    assert set(failed(look(registry, digest))) == {"attestations"}


@pytest.mark.parametrize(
    "body", [b"\xff\xfe", b"null", b'{"payload": "e30=!", "payloadType": "x", "signatures": []}',
             b'{"payload": "/v8=", "payloadType": "x", "signatures": []}',
             b'{"payload": "e30=", "payloadType": "x", "signatures": [{"sig": 3}]}'],
)  # fmt: skip
def test_what_anybody_may_have_put_beside_an_image_is_told_as_that(registry: SmallRegistry, body: bytes) -> None:
    digest = add_signed(registry)
    attest(registry, digest, [body])
    said = failed(look(registry, digest))
    assert list(said) == ["attestations"]
    assert "cannot be read" in said["attestations"]


def test_a_configuration_that_is_gone_fails_the_image_and_not_the_registry(registry: SmallRegistry) -> None:
    digest = add_signed(registry)
    image = json.loads(registry.manifests[digest])["manifests"][0]["digest"]
    config = json.loads(registry.manifests[image])["config"]["digest"]
    del registry.blobs[config]
    assert f"has a manifest that names {config}, and has it not" in failed(look(registry, digest))["digest"]


def test_a_blob_that_is_cut_off_is_a_lost_connection_and_no_lie(registry: SmallRegistry) -> None:
    digest = add_signed(registry)
    registry.stops_after = 40
    with pytest.raises(RegistryUnreachable, match=r"ended after 40 of \d+ bytes.*connection was lost"):
        look(registry, digest)


def test_a_registry_that_is_busy_is_asked_again(registry: SmallRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    digest = add_signed(registry)
    registry.busy = [(429, {"Retry-After": "7"}), (503, {}), (0, {})]
    assert failed(look(registry, digest)) == {}
    assert waited == [7.0, 1.0, 2.0]
    contents = Contents(registry.host, "small")
    for status, headers, cause in (
        (429, {"Retry-After": "86400"}, "too many were asked for from here.*docker login"),
        (500, {}, "it is ill"),
        (403, {}, "the login has no right"),
    ):
        registry.busy, waited[:] = [(status, headers)] * 9, []
        with pytest.raises(RegistryUnreachable, match=rf"{status} to GET.*{cause}"):
            contents.manifest(digest)
        assert waited == []
    registry.busy = [(503, {})] * 9
    with pytest.raises(RegistryUnreachable, match=r"503 to GET manifests.*, 4 times\."):
        contents.manifest(digest)
    assert len(waited) == 3


def test_a_login_that_is_not_reached_is_not_the_registry(registry: SmallRegistry) -> None:
    registry.busy = [(401, {"WWW-Authenticate": 'bearer REALM="http://127.0.0.1:9/token", service=x'})]
    with pytest.raises(RegistryUnreachable, match=r"its login at http://127\.0\.0\.1:9/token does not answer: "):
        Contents(registry.host, "small").manifest(BASE)


@pytest.mark.parametrize(("asked", "wait"), [
    ("", 0.5), ("3", 3.0), ("Thu, 01 Jan 1970 00:00:09 GMT", 4.0), ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0), ("x", 0.5),
])  # fmt: skip
def test_when_to_come_back(asked: str, wait: float) -> None:
    assert wait_before(0, asked, now=5.0) == wait


def test_an_sbom_that_says_nothing_and_licences_that_miss_one(registry: SmallRegistry) -> None:
    digest = add_signed(registry)
    empty = {"spdxVersion": "SPDX-2.3", "packages": []}
    short = {"packages": [{"kind": "deb", "name": "libc6", "version": "2", "licences": ["unknown"], "said_by": ""}]}
    attest(registry, digest, [ONE.envelope(SPDX, SBOM, digest), ONE.envelope(LICENCES, short, digest)])
    assert failed(look(registry, digest)) == {"licences": "the SBOM has packages that are not listed: Torch"}
    attest(registry, digest, [ONE.envelope(SPDX, empty, digest), ONE.envelope(LICENCES, {}, digest)])
    assert set(failed(look(registry, digest))) == {"sbom", "licences"}
    licences = [ONE.envelope(LICENCES, one, digest) for one in (short, told(registry, digest))]
    attest(registry, digest, [*licences, ONE.envelope(SPDX, SBOM, digest), OTHER.envelope(SPDX, empty, digest)])
    assert failed(look(registry, digest)) == {}, "what this key attested last counts"


def test_what_could_not_be_asked_is_not_run_and_never_a_pass(registry: SmallRegistry) -> None:
    found = look(registry, add_signed(registry), key=None, plan=None)
    assert failed(found) == {}
    assert set(failed(found, CheckOutcome.NOT_RUN)) == {
        "label target", "label lock", "label pins", "label base", "signature", "sbom", "base", "licences",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["127.0.0.1:5000/a:1", "127.0.0.1:5000/a", f"a@sha256:{'a' * 64}", "a@sha256:1", ""])
def test_an_image_without_a_digest_or_a_registry_is_refused(name: str) -> None:
    with pytest.raises(ImageRefused, match=r"is refused.*HOST/REPOSITORY@sha256") as said:
        read_place(name)
    assert ("is no digest" in str(said.value)) == name.endswith("@sha256:1")


def test_a_registry_that_is_not_there() -> None:
    place = read_place(f"127.0.0.1:9/a@sha256:{'a' * 64}")
    with pytest.raises(RegistryUnreachable, match=r"127\.0\.0\.1:9 does not give.*Next step"):
        open_contents(place).manifest(place.digest)


def test_a_mirror_stands_in_for_every_registry_but_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACPP_REGISTRY_MIRROR", "mirror.example:5000/all")
    digest = f"sha256:{'a' * 64}"
    asked = [open_contents(read_place(f"{name}@{digest}")) for name in ("nvcr.io/nvidia/pytorch", "127.0.0.1:5000/a")]
    assert [(one.host, one.path) for one in asked] == [
        ("mirror.example:5000", "all/nvidia/pytorch"), ("127.0.0.1:5000", "a"),
    ]  # fmt: skip


def test_the_verdict_in_words(registry: SmallRegistry, capsys: pytest.CaptureFixture[str]) -> None:
    told: Callable[[Verified], ImageVerdict] = lambda found: ImageVerdict(  # noqa: E731
        tool="t", image="i", target="cpu", key="", checks=tuple(found.checks), packages=found.count_packages(),
        unknown_licences=("deb libc6",), seconds=1.0,
    )  # fmt: skip
    verdict = told(look(registry, add_signed(registry, {**LABELS, "org.megacpp.target": "h200"}), key=None))
    assert verdict.failed
    assert verdict.lacks
    assert ImageVerdict.model_validate_json(verdict.model_dump_json()) == verdict
    render_image_verdict(verdict, verbose=True)
    said = capsys.readouterr().out
    for words in ("label target fails", "signature not run", "failed: label target", "name the public key with --key"):
        assert words in said
    assert any("label target" in line and "✗" in line for line in tell_image_verdict(verdict))


def test_a_target_that_is_none_is_a_wrong_argument() -> None:
    assert image_verify_verbs.image_verify
    words = ["image-verify", f"127.0.0.1:1/small@{BASE}", "--target", "nonsense"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.stderr
    assert "there is no target 'nonsense'" in done.stderr
