"""Signatures on P-256: those of cosign are taken, and nothing else is."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from megacpp_validate.images.bundle.archive import read_tree
from megacpp_validate.images.bundle.evidence_files import gather_evidence
from megacpp_validate.images.bundle.restore.p256 import _G, _N, _P, _add, _times, is_signed, read_key
from megacpp_validate.images.contents import Contents, read_place
from megacpp_validate.images.refusals import ImageRefused, RegistryLies
from megacpp_validate.images.signature import (
    LICENCES,
    SPDX,
    NoCosign,
    find_signature,
    make_keys,
    read_signatures,
    read_statements,
    sign_file,
    sign_image,
)
from tests.images.small_registry import SmallRegistry, add_image, served, write_layer
from tests.images.small_signer import Signer, attest, push, write_der

# Made by cosign 3.1.1 on 2026-11-22, over an image of nothing.
KEY = """-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE/lXQZzxdZ/1JnyeUgHO4uv1Y5AHF
UmQ1Hf9pf4UbTQp8J4HAcw/aEoLBRF/o6DbLxAhQ9/acbXjaaewnR5nqAQ==
-----END PUBLIC KEY-----
"""
PAYLOAD = (
    b'{"critical":{"identity":{"docker-reference":"127.0.0.1:5000/c7"},"image":{"docker-manifest-digest":"sha256:'
    b'645b1333bf230eed080685c85ae1a64c6dcf7d502f981d783c4ddfef759627e2"},"type":"cosign container image signature"}'
    b',"optional":null}'
)
SIGNATURE = "MEYCIQCpFDgGB9wvuxgrcow/e3MKq+Y+U12Kdrj6hXkmOUni7QIhAIuT1eM+enawRUG4DeaQWkidexALilnTISm/MVthDVZt"
ONE, OTHER = Signer(0xC0FFEE), Signer(0xBEEF)


def test_a_signature_of_cosign_is_taken() -> None:
    assert is_signed(PAYLOAD, SIGNATURE, KEY)
    assert is_signed(PAYLOAD, f"{SIGNATURE}\n", KEY)


def test_a_signature_over_other_bytes_or_by_another_key_is_not() -> None:
    assert not is_signed(PAYLOAD + b" ", SIGNATURE, KEY)
    assert not is_signed(PAYLOAD, SIGNATURE, ONE.key)


@pytest.mark.parametrize("place", [0, 1, 3, 5, 20, 40, 60, 71])
def test_one_bit_of_a_signature(place: int) -> None:
    raw = bytearray(base64.b64decode(SIGNATURE))
    raw[place] ^= 1
    assert not is_signed(PAYLOAD, base64.b64encode(raw).decode(), KEY)


@pytest.mark.parametrize(("r", "s"), [(0, 0), (0, 1), (1, 0), (_N, 1), (1, _N), (2**256 - 1, 5)])
def test_numbers_that_no_signature_has(r: int, s: int) -> None:
    """r = s = 0 was taken by others: CVE-2022-21449."""
    assert not is_signed(PAYLOAD, base64.b64encode(write_der(r, s)).decode(), KEY)


@pytest.mark.parametrize("text", ["", "x", "MEYC", base64.b64encode(write_der(1, 1) + b"0").decode(), "é"])
def test_what_is_no_signature(text: str) -> None:
    assert not is_signed(PAYLOAD, text, KEY)


@pytest.mark.parametrize(
    "text",
    ["", "x", KEY.replace("PUBLIC", "PRIVATE"), KEY.replace("AE/lXQ", "AE/lXR"), KEY.replace("MFkw", "MFow")],
)
def test_what_is_no_key(text: str) -> None:
    with pytest.raises(ValueError, match=r"no public key|no key of the curve|does not lie"):
        read_key(text)


def test_a_signer_of_the_tests_signs_as_cosign_does() -> None:
    assert is_signed(b"data", ONE.sign(b"data"), ONE.key)
    assert not is_signed(b"data", ONE.sign(b"data"), OTHER.key)


def test_a_signature_is_about_the_digest_that_it_names() -> None:
    with served(SmallRegistry()) as registry:
        digest = add_image(registry, [write_layer({"a": b"b"})], {})
        contents = Contents(registry.host, "small")
        assert find_signature(contents, digest, ONE.key) == "it has no signature"
        ONE.sign_image(registry, digest)
        assert find_signature(contents, digest, ONE.key) == ""
        assert "none of its 1 signatures is by this key" in find_signature(contents, digest, OTHER.key)
        ONE.sign_image(registry, digest, about=f"sha256:{'e' * 64}")
        assert f"about sha256:{'e' * 64}" in find_signature(contents, digest, ONE.key)
        ONE.sign_image(registry, digest, kind="something else")
        assert "is about" in find_signature(contents, digest, ONE.key)


def test_statements_and_who_signed_them() -> None:
    with served(SmallRegistry()) as registry:
        digest = add_image(registry, [write_layer({"a": b"b"})], {})
        contents = Contents(registry.host, "small")
        assert read_statements(contents, digest, ONE.key) == ()
        attest(registry, digest, [ONE.envelope(SPDX, {"a": 1}, digest), OTHER.envelope("x", {}, digest)])
        one, other = read_statements(contents, digest, ONE.key)
        assert (one.kind, one.subjects, one.predicate, one.signed) == (SPDX, (digest,), {"a": 1}, True)
        assert other.signed is False
        assert [row.signed for row in read_statements(contents, digest, "")] == [None, None]
        changed = ONE.envelope(SPDX, {"a": 1}, digest).replace(b'"payload": "ey', b'"payload": "fy')
        attest(registry, digest, [changed])
        with pytest.raises(RegistryLies, match=r"cannot be read.*Next step"):
            read_statements(contents, digest, ONE.key)


def test_a_bundle_holds_what_its_key_attested_and_nothing_of_others() -> None:
    """Whoever may push to a registry may attest there."""
    ours, theirs = ({"spdxVersion": "SPDX-2.3", "packages": [{"name": name}]} for name in ("ours", "theirs"))
    with served(SmallRegistry()) as registry:
        digest = add_image(registry, [write_layer({"a": b"b"})], {})
        place, contents = read_place(f"{registry.host}/small@{digest}"), Contents(registry.host, "small")
        pushed = [ONE.envelope(LICENCES, {"by": "us"}, digest), OTHER.envelope(LICENCES, {"by": "them"}, digest)]
        attest(registry, digest, [*pushed, OTHER.envelope(SPDX, theirs, digest)])
        OTHER.sign_image(registry, digest)
        tree = read_tree(contents, digest)
        found = gather_evidence(place, contents, tree, {}, lambda _: json.dumps(ours).encode(), ONE.key)
    assert json.loads(found.files["sbom.spdx.json"]) == ours
    assert json.loads(found.files["licences.json"]) == {"by": "us"}
    assert found.absent["signature"] == "none of its 1 signatures is by this key"


def test_what_lies_at_the_tag_and_is_no_signature() -> None:
    with served(SmallRegistry()) as registry:
        digest = add_image(registry, [write_layer({"a": b"b"})], {})
        registry.manifests[f"{digest.replace(':', '-')}.sig"] = b"<html>"
        with pytest.raises(RegistryLies, match="no manifest"):
            read_signatures(Contents(registry.host, "small"), digest)
        push(registry, f"{digest.replace(':', '-')}.sig", [(b"payload", {})])
        registry.blobs = dict.fromkeys(registry.blobs, b"other")
        with pytest.raises(RegistryLies, match="damaged there or on the way"):
            read_signatures(Contents(registry.host, "small"), digest)


def test_no_cosign_no_password_and_no_key_say_what_to_do(tmp_path: Path) -> None:
    place = read_place(f"127.0.0.1:1/a@sha256:{'a' * 64}")
    with pytest.raises(NoCosign, match=r"no cosign.*apt-get install cosign"):
        sign_image(place, tmp_path / "k", {"PATH": ""})
    with pytest.raises(NoCosign, match=r"no cosign at /nowhere/cosign"):
        make_keys(tmp_path / "k", {"PATH": "", "MEGACPP_COSIGN": "/nowhere/cosign"})
    told = {"PATH": os.environ["PATH"], "MEGACPP_COSIGN": "/bin/false"}
    with pytest.raises(ImageRefused, match=r"no key .*image_keys"):
        sign_file(tmp_path, tmp_path / "k.key", told)
    (tmp_path / "k.key").touch()
    with pytest.raises(ImageRefused, match=r"k.key is no private key"):
        sign_file(tmp_path, tmp_path / "k.key", told)
    (tmp_path / "k.key").write_text("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----")
    with pytest.raises(ImageRefused, match=r"COSIGN_PASSWORD is not set"):
        sign_file(tmp_path, tmp_path / "k.key", told)
    with pytest.raises(ImageRefused, match=r"k.key would be overwritten"):
        make_keys(tmp_path / "k", told)
    with pytest.raises(NoCosign, match=r"cosign sign-blob` failed \(1\)"):
        sign_file(tmp_path, tmp_path / "k.key", {**told, "COSIGN_PASSWORD": ""})


def test_multiples_of_a_point_are_sums_of_it() -> None:
    """Where formulas of a curve go wrong: nothing, the point itself, its opposite, and once around."""
    opposite = (_G[0], _P - _G[1])
    total = None
    for factor in range(20):
        assert _times(factor, _G) == total
        total = _add(total, _G)
    assert [_times(_N + step, _G) for step in (-1, 0, 1, 2)] == [opposite, None, _G, _add(_G, _G)]
    assert _times(_N - 5, opposite) == _times(5, _G)
