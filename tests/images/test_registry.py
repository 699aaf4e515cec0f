"""A registry is asked what a tag is: what it answers is hashed, and every way in which it fails is told in words."""

from __future__ import annotations

import json
import socket
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
from lying_registry import LyingRegistry, digest_of, serve

from megacpp_validate.images.refusals import ImageRefused, RegistryLies, RegistryUnreachable
from megacpp_validate.images.registry import RegistryClient, plain_http

PLATFORMS = ("linux/amd64", "linux/arm64")


@pytest.fixture
def registry() -> Iterator[LyingRegistry]:
    with serve(LyingRegistry()) as one:
        yield one


@pytest.fixture
def client() -> RegistryClient:
    return RegistryClient({}, limit_s=2.0)


def test_an_index_is_named_with_its_platforms(registry: LyingRegistry, client: RegistryClient) -> None:
    index, platforms = registry.put_index("1")
    found = client.resolve(f"{registry.host}/team/base", "1", PLATFORMS)
    assert (found.index_digest, dict(found.platform_digests)) == (index, platforms)
    assert index not in platforms.values()
    # Each image was fetched, not only read of in the index.
    assert {f"/v2/team/base/manifests/{digest}" for digest in platforms.values()} <= {
        path for path, _ in registry.asked
    }


def test_an_image_of_one_platform_has_no_index(registry: LyingRegistry, client: RegistryClient) -> None:
    digest = registry.put_image("1", "arm64")
    found = client.resolve(f"{registry.host}/base", "1")
    assert (found.index_digest, dict(found.platform_digests)) == ("", {"linux/arm64": digest})


def test_what_a_caller_of_long_ago_gets_has_another_digest(registry: LyingRegistry, client: RegistryClient) -> None:
    digest = registry.put_image("1")
    client.resolve(f"{registry.host}/base", "1")
    assert all(headers["Accept"].count("application/vnd.") == 4 for path, headers in registry.asked)
    registry.manifests["old"] = json.dumps({"schemaVersion": 1}).encode()
    with pytest.raises(RegistryLies, match=r"old manifests alone.*Next step"):
        client.resolve(f"{registry.host}/base", "old")
    assert digest != digest_of(registry.manifests["old"])


def test_bytes_that_are_not_what_was_asked_for(registry: LyingRegistry, client: RegistryClient) -> None:
    _, platforms = registry.put_index("1")
    planted = registry.manifests[platforms["linux/arm64"]] + b" "
    registry.manifests[platforms["linux/arm64"]] = planted
    with pytest.raises(RegistryLies) as lie:
        client.resolve(f"{registry.host}/base", "1", PLATFORMS)
    assert platforms["linux/arm64"] in str(lie.value)
    assert digest_of(planted) in str(lie.value)
    assert "Next step" in str(lie.value)


def test_a_header_that_is_not_what_its_bytes_are(registry: LyingRegistry, client: RegistryClient) -> None:
    digest = registry.put_image("1")
    registry.says = digest_of(b"another image")
    with pytest.raises(RegistryLies) as lie:
        client.resolve(f"{registry.host}/base", "1")
    assert digest in str(lie.value)
    assert registry.says in str(lie.value)


def test_a_page_for_people_is_no_manifest(registry: LyingRegistry, client: RegistryClient) -> None:
    registry.manifests["1"] = b"<html>Please log in</html>"
    with pytest.raises(RegistryLies, match=r"Please log in.*login page.*Next step"):
        client.resolve(f"{registry.host}/base", "1")


def test_more_than_a_manifest_can_be(registry: LyingRegistry, client: RegistryClient) -> None:
    registry.manifests["1"] = b" " * (4 * 2**20 + 1)
    with pytest.raises(RegistryLies, match="more than 4 MiB"):
        client.resolve(f"{registry.host}/base", "1")


def test_a_tag_that_is_not_there(registry: LyingRegistry, client: RegistryClient) -> None:
    with pytest.raises(ImageRefused, match=r"has no base/26\.07-py3.*withdrawn.*Next step: choose a tag"):
        client.resolve(f"{registry.host}/base", "26.07-py3")


def test_a_platform_that_is_not_there(registry: LyingRegistry, client: RegistryClient) -> None:
    registry.put_image("1", "amd64")
    with pytest.raises(ImageRefused, match=r"no image for linux/arm64; it has linux/amd64.*Next step"):
        client.resolve(f"{registry.host}/base", "1", PLATFORMS)


def test_a_registry_that_is_down(client: RegistryClient) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RegistryUnreachable, match=rf"{host} does not answer.*refused.*it is down.*MIRROR"):
            client.resolve(f"{host}/base", "1")


@pytest.mark.parametrize("fault", ["waits", "drips"])
def test_a_registry_that_keeps_its_caller_waiting(registry: LyingRegistry, fault: str) -> None:
    registry.put_image("1")
    registry.waits_s, registry.drips = (2.0, False) if fault == "waits" else (0.0, True)
    started = time.monotonic()
    with pytest.raises(RegistryUnreachable, match="does not answer"):
        RegistryClient({}, limit_s=0.3).resolve(f"{registry.host}/base", "1")
    assert time.monotonic() - started < 1.5


@pytest.mark.parametrize(("code", "says"), [(403, "no right"), (429, "too many"), (503, "it is ill")])
def test_a_refusal_has_a_cause(registry: LyingRegistry, client: RegistryClient, code: int, says: str) -> None:
    registry.code = code
    with pytest.raises(RegistryUnreachable, match=rf"HTTP {code}.*Likely cause: .*{says}.*Next step"):
        client.resolve(f"{registry.host}/base", "1")


def test_a_token_is_fetched_where_the_registry_says(registry: LyingRegistry, client: RegistryClient) -> None:
    digest = registry.put_image("1")
    registry.token = "for pulling"
    found = client.resolve(f"{registry.host}/team/base", "1")
    assert dict(found.platform_digests) == {"linux/amd64": digest}
    tokens = [path for path, _ in registry.asked if path.startswith("/token")]
    assert tokens == ["/token?scope=repository%3Ateam%2Fbase%3Apull&service=small"]  # once, not for every answer


def test_a_login_is_the_one_that_docker_keeps(registry: LyingRegistry, tmp_path: Path) -> None:
    registry.put_image("1")
    registry.token, registry.login = "for pulling", b64encode(b"somebody:secret").decode()
    with pytest.raises(RegistryUnreachable, match=r"wants a login.*docker login"):
        RegistryClient({}).resolve(f"{registry.host}/base", "1")
    (tmp_path / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": registry.login}}}))
    registry.asked.clear()
    RegistryClient({"DOCKER_CONFIG": str(tmp_path)}).resolve(f"{registry.host}/base", "1")
    shown = [headers.get("Authorization", "") for path, headers in registry.asked if path.startswith("/v2/")]
    assert not any(text.startswith("Basic") for text in shown)  # the login goes to the token service alone


def test_a_name_without_tls_is_taken_from_this_machine_alone(client: RegistryClient) -> None:
    with pytest.raises(RegistryUnreachable, match=r"registry\.invalid"):
        client.resolve("registry.invalid/base", "1")
    assert not plain_http("registry.invalid", {})
    assert all(plain_http(host, {}) for host in ("127.0.0.1:5000", "localhost", "[::1]:1"))
    assert not any(plain_http(host, {}) for host in ("127.0.0.1.invalid", "localhost.invalid:80", "127.evil:1"))
    named = {"MEGACPP_REGISTRY_PLAIN_HTTP": "a.invalid, registry.invalid:80"}
    assert [plain_http(host, named) for host in ("registry.invalid:80", "registry.invalid")] == [True, False]
