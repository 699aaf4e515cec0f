"""A registry is asked what a tag is: what it answers is hashed, and every way in which it fails is told in words."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, Request

import pytest

from megacpp_validate.images.contents import Contents, open_contents, read_place
from megacpp_validate.images.refusals import ImageRefused, RegistryLies, RegistryUnreachable
from megacpp_validate.images.registry import RegistryClient, plain_http
from megacpp_validate.images.registry_answers import name_token, read_challenge
from megacpp_validate.images.registry_login import find_login
from tests.images.lying_registry import LyingRegistry, digest_of, serve

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
    with pytest.raises(RegistryUnreachable, match=r"Please log in.*login page.*Next step"):
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


@pytest.mark.parametrize(
    ("logins", "kept"),
    [
        ({"registry.invalid": {"auth": "QQ=="}}, "QQ=="),
        ({"https://registry.invalid/v2/": {"auth": "QQ=="}}, "QQ=="),
        ({"https://registry.invalid.example/": {"auth": "QQ=="}}, ""),
        ({"registry.invalid": {"auth": None}}, ""),
        ({"registry.invalid": None}, ""),
        (None, ""),
    ],
)
def test_a_login_in_every_spelling_that_docker_keeps(tmp_path: Path, logins: object, kept: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auths": logins}))
    assert find_login("registry.invalid", {"DOCKER_CONFIG": str(tmp_path)}) == kept


def test_the_service_that_hands_out_tokens_goes_before_a_login() -> None:
    basic, bearer = 'Basic realm="x"', 'Bearer realm="https://one.invalid/token?account=x"'
    assert read_challenge([basic, bearer]) == ("bearer", {"realm": "https://one.invalid/token?account=x"})
    assert read_challenge([basic])[0] == "basic"
    assert read_challenge([]) == ("", {})
    assert name_token("https://one.invalid/token?account=x", {"scope": "y"}).endswith("/token?account=x&scope=y")


def test_docker_hub_is_asked_where_its_interface_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def stop(_: Contents, request: Request, __: str = "") -> None:
        asked.append(request.full_url)
        raise RegistryUnreachable("enough")

    monkeypatch.setattr(Contents, "_open", stop)
    monkeypatch.delenv("MEGACPP_REGISTRY_MIRROR", raising=False)
    for name in ("docker.io/team/cpu", "docker.io/debian"):
        with pytest.raises(RegistryUnreachable, match="enough"):
            open_contents(read_place(f"{name}@sha256:{'1' * 64}")).manifest("1")
    hub = "https://registry-1.docker.io/v2"
    assert asked == [f"{hub}/team/cpu/manifests/1", f"{hub}/library/debian/manifests/1"]


def test_a_way_that_leads_to_no_address_is_a_registry_that_is_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    def lead_astray(*_: object, **__: object) -> None:
        urlsplit("http://[bad/")

    monkeypatch.setattr(OpenerDirector, "open", lead_astray)
    with pytest.raises(RegistryUnreachable, match="Invalid IPv6 URL"):
        RegistryClient({}).resolve("127.0.0.1:1/a", "1")
    with pytest.raises(RegistryUnreachable, match="Invalid IPv6 URL"):
        Contents("127.0.0.1:1", "a").manifest("1")


def test_a_name_without_tls_is_taken_from_this_machine_alone(client: RegistryClient) -> None:
    with pytest.raises(RegistryUnreachable, match=r"registry\.invalid"):
        client.resolve("registry.invalid/base", "1")
    assert not plain_http("registry.invalid", {})
    assert all(plain_http(host, {}) for host in ("127.0.0.1:5000", "localhost", "[::1]:1"))
    assert not any(plain_http(host, {}) for host in ("127.0.0.1.invalid", "localhost.invalid:80", "127.evil:1"))
    named = {"MEGACPP_REGISTRY_PLAIN_HTTP": "a.invalid, registry.invalid:80"}
    assert [plain_http(host, named) for host in ("registry.invalid:80", "registry.invalid")] == [True, False]


ENTRY = {"digest": "sha256:" + "1" * 64, "size": 1}
LINUX = {"os": "linux", "architecture": "amd64"}


@pytest.mark.parametrize(
    "row",
    [
        "text", 3, None, {}, {"size": 1, "platform": LINUX}, {"digest": "sha256:xyz", "platform": LINUX},
        {"digest": None, "platform": LINUX}, {"digest": ["sha256:" + "1" * 64], "platform": LINUX},
    ],
)  # fmt: skip
def test_an_entry_of_an_index_that_is_none(registry: LyingRegistry, client: RegistryClient, row: object) -> None:
    """Such an entry was taken for an image without a digest, and pinned as verified."""
    registry.put_rows("1", {"digest": registry.put_image(""), "platform": {**LINUX, "architecture": "arm64"}}, row)
    with pytest.raises(RegistryLies, match=r"has no digest.*Next step"):
        client.resolve(f"{registry.host}/base", "1", PLATFORMS)


@pytest.mark.parametrize("body", [{"manifests": {}}, {"config": "x"}, {"config": {"digest": 3}}, {"config": None}, {}])
def test_a_document_of_another_shape(registry: LyingRegistry, client: RegistryClient, body: dict[str, object]) -> None:
    registry.manifests["1"] = json.dumps({"schemaVersion": 2, **body}).encode()
    with pytest.raises(RegistryLies, match=r"no manifest that this tool reads.*Next step"):
        client.resolve(f"{registry.host}/base", "1")


def test_the_plain_platform_goes_before_its_variants(registry: LyingRegistry, client: RegistryClient) -> None:
    plain, later = registry.put_image("", salt="plain"), registry.put_image("", salt="v3")
    arm, old = registry.put_image("", "arm64", "v8"), registry.put_image("", "arm64", "v9")
    rows = [
        {"digest": later, "platform": {**LINUX, "variant": "v3"}}, {"digest": plain, "platform": LINUX},
        {"digest": old, "platform": {**LINUX, "architecture": "arm64", "variant": "v9"}},
        {"digest": arm, "platform": {**LINUX, "architecture": "arm64", "variant": "v8"}},
    ]  # fmt: skip
    for turned in (rows, rows[::-1]):
        registry.put_rows("1", *turned)
        found = client.resolve(f"{registry.host}/base", "1", PLATFORMS)
        assert dict(found.platform_digests) == {"linux/amd64": plain, "linux/arm64": arm}


def test_an_index_that_names_no_platform_is_asked_below(registry: LyingRegistry, client: RegistryClient) -> None:
    digests = {f"linux/{arch}": registry.put_image("", arch) for arch in ("amd64", "arm64")}
    index = registry.put_rows("1", *({"digest": one, "platform": None} for one in digests.values()))
    found = client.resolve(f"{registry.host}/base", "1", PLATFORMS)
    assert (found.index_digest, dict(found.platform_digests)) == (index, digests)


def test_an_answer_that_is_cut_is_a_lost_connection(registry: LyingRegistry, client: RegistryClient) -> None:
    registry.put_image("1")
    registry.cut = 9
    with pytest.raises(RegistryUnreachable, match=r"9 bytes are missing.*connection was lost"):
        client.resolve(f"{registry.host}/base", "1")


def test_a_page_of_html_is_none_of_a_registry(registry: LyingRegistry, client: RegistryClient) -> None:
    registry.put_image("1")
    registry.kind = "text/html; charset=utf-8"
    with pytest.raises(RegistryUnreachable, match=r"does not answer as a registry does.*login page"):
        client.resolve(f"{registry.host}/base", "1")


@pytest.mark.parametrize(
    "challenge",
    ['bearer REALM="http://{host}/token", Service="small"', "Bearer realm=http://{host}/token, service=small"],
)
def test_a_token_is_asked_for_in_any_spelling(registry: LyingRegistry, client: RegistryClient, challenge: str) -> None:
    registry.put_image("1")
    registry.token, registry.challenge = "for pulling", challenge
    assert client.resolve(f"{registry.host}/base", "1").platform_digests
    assert registry.asked[1][0].endswith("&service=small")


def test_a_header_in_another_hash_is_held_too(registry: LyingRegistry, client: RegistryClient) -> None:
    digest = registry.put_image("1")
    right = hashlib.sha512(registry.manifests["1"]).hexdigest()
    index = registry.put_rows("index", {"digest": digest, "platform": LINUX})
    for name, said, other in (
        ("1", f"sha512:{right}", "blobs"),
        ("index", index.upper().replace("SHA", "sha"), digest),
    ):
        registry.says = said
        with pytest.raises(RegistryLies, match=rf"answered for base/\S*{other}"):  # what came first was right
            client.resolve(f"{registry.host}/base", name)
