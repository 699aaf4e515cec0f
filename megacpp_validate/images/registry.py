"""A registry asked what a tag is: the distribution API v2, by manifests alone, and nothing is believed unhashed.

https://github.com/opencontainers/distribution-spec: a manifest is named by the SHA-256 of its bytes. A registry that is
not told which kinds of manifest its caller reads may answer with an old one, which has another digest: so all four are
named, always.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

from .refusals import ImageRefused, NotInRegistry, RegistryLies, RegistryUnreachable
from .registry_login import find_login

PLAIN_HTTP: Final = "MEGACPP_REGISTRY_PLAIN_HTTP"

INDEXES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
ACCEPT: Final = ", ".join((*INDEXES, *MANIFESTS))
MOST_BYTES: Final = 4 * 2**20  # of a manifest: what the specification lets a registry refuse to store
_LIMIT_S: Final = 20.0  # for one answer, from the connection to its last byte
_HOSTS: Final = {"docker.io": "registry-1.docker.io"}
LOOPBACK: Final = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")
_PARAMETER: Final = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Resolved:
    """What a tag, or a digest, is.

    Attributes:
        index_digest: of the index over all platforms; empty where the registry has one image alone.
        platform_digests: platform ("linux/amd64") -> digest of the image for it; each of those was fetched and hashed.
        where: the registry that said so.
    """

    index_digest: str
    platform_digests: Mapping[str, str]
    where: str


@dataclass
class RegistryClient:
    """A caller of registries.

    Attributes:
        variables: of the environment: where logins lie, and hosts that are asked without TLS.
        limit_s: seconds that one answer may take.
    """

    variables: Mapping[str, str]
    limit_s: float = _LIMIT_S
    _tokens: dict[str, str] = field(default_factory=dict)

    def resolve(self, repository: str, reference: str, platforms: tuple[str, ...] = ()) -> Resolved:
        """What a tag or a digest is now.

        Args:
            repository: "registry.example:5000/team/image".
            reference: a tag, or "sha256:...".
            platforms: that must be there; each is fetched too. All that are there without any.

        Raises:
            RegistryUnreachable: no answer, or a refusal.
            RegistryLies: what came is not what its digest says.
            NotInRegistry: there is no such tag.
            ImageRefused: there is no image for one of the platforms.
        """
        host, path = _split(repository)
        body, digest = self._manifest(host, path, reference)
        kind = str(body.get("mediaType", ""))
        if "manifests" not in body:
            platform = self._platform_of(host, path, body)
            found = Resolved("", {platform: digest}, host)
        elif kind in ("", *INDEXES):
            found = Resolved(digest, self._read_index(host, path, body, platforms), host)
        else:
            raise RegistryLies(_strange(host, path, reference, f"a manifest of the kind {kind!r}"))
        if missing := [name for name in platforms if name not in found.platform_digests]:
            raise ImageRefused(
                f"{repository}:{reference} has no image for {', '.join(missing)}; it has "
                f"{', '.join(found.platform_digests) or 'none'}. Likely cause: another base was meant, or the mirror "
                "keeps one platform. Next step: choose a base that has it, or mirror all platforms."
            )
        return found

    def _read_index(self, host: str, path: str, body: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, str]:
        found: dict[str, str] = {}
        for row in body["manifests"]:
            platform = row.get("platform", {})
            name = f"{platform.get('os', '')}/{platform.get('architecture', '')}"
            if name.startswith("unknown/") or name in found:  # attestations, and variants of a later rank
                continue
            found[name] = str(row.get("digest", ""))
        for name, digest in found.items():
            if name in (wanted or found):
                self._manifest(host, path, digest)
        return found

    def _platform_of(self, host: str, path: str, body: dict[str, Any]) -> str:
        """The platform of an image that stands alone: its configuration says it."""
        digest = str(body.get("config", {}).get("digest", ""))
        if str(body.get("mediaType", "")) not in ("", *MANIFESTS) or not digest.startswith("sha256:"):
            raise RegistryLies(_strange(host, path, "manifest", f"one of the kind {body.get('mediaType')!r}"))
        raw = self._fetch(host, path, f"blobs/{digest}", digest)
        told = _read_json(raw, host, path, digest)
        return f"{told.get('os', '')}/{told.get('architecture', '')}"

    def _manifest(self, host: str, path: str, reference: str) -> tuple[dict[str, Any], str]:
        raw = self._fetch(host, path, f"manifests/{reference}", reference if reference.startswith("sha256:") else "")
        return _read_json(raw, host, path, reference), f"sha256:{sha256(raw).hexdigest()}"

    def _fetch(self, host: str, path: str, what: str, digest: str) -> bytes:
        """The bytes of an answer, which hash to what was asked for, and to what the registry itself says.

        Raises:
            RegistryUnreachable: no answer, or a refusal.
            RegistryLies: they do not.
            NotInRegistry: there is nothing of that name.
        """
        scheme = "http" if plain_http(host, self.variables) else "https"
        url = f"{scheme}://{_HOSTS.get(host, host)}/v2/{path}/{what}"
        raw, said = self._get(host, path, url)
        found = f"sha256:{sha256(raw).hexdigest()}"
        for source, wanted in (("was asked for", digest), ("says of its answer", said)):
            if wanted and wanted != found:
                raise RegistryLies(
                    f"{host} answered for {path}/{what} with bytes that hash to {found}; what it {source} is {wanted}. "
                    "Likely cause: a proxy on the way that rewrites answers, a damaged registry, or somebody between. "
                    "Next step: do not build from it; ask another mirror, and tell whoever runs this one."
                )
        return raw

    def _get(self, host: str, path: str, url: str) -> tuple[bytes, str]:
        for attempt in range(2):
            request = urllib.request.Request(url, headers={"Accept": ACCEPT})  # noqa: S310
            if token := self._tokens.get(f"{host}/{path}"):
                request.add_unredirected_header("Authorization", token)
            try:
                return self._read(host, request)
            except urllib.error.HTTPError as refusal:
                refusal.close()
                if refusal.code == 404:
                    raise NotInRegistry(
                        f"{host} has no {path}/{url.rpartition('/')[2]}. Likely cause: the tag was withdrawn or never "
                        "pushed there, or the name has a typing error. Next step: choose a tag that is there, in "
                        "matrix/images.toml."
                    ) from refusal
                if refusal.code != 401 or attempt:
                    raise RegistryUnreachable(_refused(host, path, refusal)) from refusal
                self._tokens[f"{host}/{path}"] = self._authorize(host, path, refusal)
        raise AssertionError("the second attempt returns or raises")

    def _authorize(self, host: str, path: str, refusal: urllib.error.HTTPError) -> str:
        """What a registry wants to see: a token of its own service, or the login itself."""
        asked = refusal.headers.get("WWW-Authenticate", "")
        login = find_login(host, self.variables)
        kind, told = asked.partition(" ")[0].lower(), dict(_PARAMETER.findall(asked))
        if kind == "basic" and login:
            return f"Basic {login}"
        if kind != "bearer" or not told.get("realm"):
            raise RegistryUnreachable(_refused(host, path, refusal)) from refusal
        if not told["realm"].startswith("https://") and not plain_http(host, self.variables):
            raise RegistryLies(
                f"{host} sends its callers to {told['realm']} for a token, without TLS. Likely cause: somebody between "
                "you and it. Next step: do not log in there."
            )
        query = {"scope": f"repository:{path}:pull"} | ({"service": told["service"]} if told.get("service") else {})
        more = "&" if "?" in told["realm"] else "?"
        request = urllib.request.Request(f"{told['realm']}{more}{urllib.parse.urlencode(query)}")  # noqa: S310
        if login:
            request.add_unredirected_header("Authorization", f"Basic {login}")
        try:
            raw, _ = self._read(host, request)
        except urllib.error.HTTPError as fault:
            fault.close()
            raise RegistryUnreachable(_refused(host, path, fault)) from fault
        answer = _read_json(raw, host, path, "a token")
        return f"Bearer {answer.get('token') or answer.get('access_token') or ''}"

    def _read(self, host: str, request: urllib.request.Request) -> tuple[bytes, str]:
        """An answer within the time and the size that it may have, and the digest that its header gives."""
        until = time.monotonic() + self.limit_s
        direct = [urllib.request.ProxyHandler({})] if LOOPBACK.fullmatch(host) else []
        opener = urllib.request.build_opener(*direct)
        try:
            with opener.open(request, timeout=self.limit_s) as answer:
                parts, size = [], 0
                while part := answer.read1(2**16):
                    parts.append(part)
                    size += len(part)
                    if size > MOST_BYTES:
                        raise RegistryLies(
                            f"{host} answers with more than {MOST_BYTES >> 20} MiB where a manifest belongs. Likely "
                            "cause: it is no registry. Next step: check the address."
                        )
                    if time.monotonic() > until:
                        raise TimeoutError(f"no whole answer within {self.limit_s:g} s")
                return b"".join(parts), answer.headers.get("Docker-Content-Digest", "")
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException) as fault:
            reason = getattr(fault, "reason", fault)
            cause = "its certificate is not one that this machine trusts" if isinstance(reason, ssl.SSLError) else ""
            raise RegistryUnreachable(
                f"the registry {host} does not answer: {reason}. Likely cause: "
                f"{cause or 'it is down, or this network does not reach it'}. Next step: bring it up, or name a "
                "registry that has the same images with MEGACPP_REGISTRY_MIRROR=host[:port][/prefix]."
            ) from fault


def plain_http(host: str, variables: Mapping[str, str]) -> bool:
    """Whether a registry is asked without TLS: one on this machine, or one that is named for it."""
    return bool(LOOPBACK.fullmatch(host)) or host in variables.get(PLAIN_HTTP, "").replace(",", " ").split()


def _split(repository: str) -> tuple[str, str]:
    """Registry and path; Docker Hub's own images lie in its library."""
    host, _, path = repository.partition("/")
    return host, f"library/{path}" if host == "docker.io" and "/" not in path else path


def _read_json(raw: bytes, host: str, path: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("schemaVersion", 2) != 2:
        raise RegistryLies(_strange(host, path, what, repr(raw[:60])))
    return found


def _strange(host: str, path: str, reference: str, what: str) -> str:
    return (
        f"{host} answers for {path} {reference} with {what}, which is no manifest that this tool reads. Likely cause: "
        "a login page or a proxy on the way, or a registry that has old manifests alone. Next step: open "
        f"/v2/{path}/manifests/ there by hand, or ask another mirror."
    )


def _refused(host: str, path: str, refusal: urllib.error.HTTPError) -> str:
    causes = {
        401: ("it wants a login", f"`docker login {host}`, or name a mirror that wants none"),
        403: ("the login has no right to it", f"`docker login {host}` as somebody who has, or name a mirror"),
        429: ("too many were asked for from here", "wait, or `docker login`, or name a mirror"),
    }
    cause, step = causes.get(refusal.code, ("it is ill", "try again later, or name a mirror"))
    return (
        f"the registry {host} refuses {path}: HTTP {refusal.code} {refusal.reason}. Likely cause: {cause}. Next step: "
        f"{step} with MEGACPP_REGISTRY_MIRROR=host[:port][/prefix]."
    )
