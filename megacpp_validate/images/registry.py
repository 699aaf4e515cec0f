"""A registry asked what a tag is: the distribution API v2, by manifests alone, and nothing is believed unhashed.

https://github.com/opencontainers/distribution-spec: a manifest is named by the SHA-256 of its bytes. A registry that is
not told which kinds of manifest its caller reads may answer with an old one, which has another digest: so all four are
named, always.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from .manifests import INDEXES, MANIFESTS, Document, NoJson, NoManifest, name_platform, read_document, read_object
from .refusals import ImageRefused, NotInRegistry, RegistryLies, RegistryUnreachable
from .registry_answers import explain_status, name_token, read_challenge
from .registry_login import find_login

PLAIN_HTTP: Final = "MEGACPP_REGISTRY_PLAIN_HTTP"

ACCEPT: Final = ", ".join((*INDEXES, *MANIFESTS))
MOST_BYTES: Final = 4 * 2**20  # of a manifest: what the specification lets a registry refuse to store
_LIMIT_S: Final = 20.0  # for one answer, from the connection to its last byte
HOSTS: Final = {"docker.io": "registry-1.docker.io"}
LOOPBACK: Final = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")


@dataclass(frozen=True)
class Resolved:
    """What a tag, or a digest, is.

    Attributes:
        index_digest: of the index over all platforms; empty where the registry has one image alone.
        platform_digests: platform ("linux/amd64") -> digest of the image for it; each of those was fetched and hashed.
        where: the registry that said so.
        document: what it gave for the tag: the index, or the manifest of the one image. Its hash is the digest.
    """

    index_digest: str
    platform_digests: Mapping[str, str]
    where: str
    document: str = ""


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
        host, path = split_repository(repository)
        raw = self._fetch(host, path, f"manifests/{reference}", reference if _is_digest(reference) else "")
        told, digest = _read(raw, host, path, reference), f"sha256:{sha256(raw).hexdigest()}"
        if told.is_index:
            found = Resolved(digest, self._look_below(host, path, told, platforms), host, raw.decode())
        else:
            found = Resolved("", {self._platform_of(host, path, told): digest}, host, raw.decode())
        if missing := [name for name in platforms if name not in found.platform_digests]:
            raise ImageRefused(
                f"{repository}:{reference} has no image for {', '.join(missing)}; it has "
                f"{', '.join(found.platform_digests) or 'none'}. Likely cause: another base was meant, or the mirror "
                "keeps one platform. Next step: choose a base that has it, or mirror all platforms."
            )
        return found

    def _look_below(self, host: str, path: str, index: Document, wanted: tuple[str, ...]) -> dict[str, str]:
        """The images of an index, each of them fetched where it is wanted, and asked where the index is silent."""
        found = dict(index.platforms)
        for name, digest in index.platforms.items():
            if name in (wanted or found):
                self._fetch(host, path, f"manifests/{digest}", digest)
        for digest in index.nameless:
            raw = self._fetch(host, path, f"manifests/{digest}", digest)
            below = _read(raw, host, path, digest)
            if not below.is_index:
                found.setdefault(self._platform_of(host, path, below), digest)
        return found

    def _platform_of(self, host: str, path: str, image: Document) -> str:
        """The platform of an image: its configuration says it."""
        raw = self._fetch(host, path, f"blobs/{image.config}", image.config)
        try:
            return name_platform(read_object(raw))
        except NoManifest as fault:
            raise RegistryLies(_strange(host, path, image.config, str(fault))) from fault

    def _fetch(self, host: str, path: str, what: str, digest: str) -> bytes:
        """The bytes of an answer, which hash to what was asked for, and to what the registry itself says.

        Raises:
            RegistryUnreachable: no answer, or a refusal.
            RegistryLies: they do not.
            NotInRegistry: there is nothing of that name.
        """
        scheme = "http" if plain_http(host, self.variables) else "https"
        url = f"{scheme}://{HOSTS.get(host, host)}/v2/{path}/{what}"
        raw, said = self._get(host, path, url)
        found = f"sha256:{sha256(raw).hexdigest()}"
        for source, wanted in (("was asked for", digest), ("says of its answer", said)):
            if not _names(wanted, raw):
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
        login = find_login(host, self.variables)
        kind, told = read_challenge(refusal.headers.get_all("WWW-Authenticate", []))
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
        request = urllib.request.Request(name_token(told["realm"], query))  # noqa: S310
        if login:
            request.add_unredirected_header("Authorization", f"Basic {login}")
        try:
            raw, _ = self._read(host, request)
        except urllib.error.HTTPError as fault:
            fault.close()
            raise RegistryUnreachable(_refused(host, path, fault)) from fault
        try:
            answer = read_object(raw)
        except NoManifest as fault:
            raise RegistryUnreachable(_for_people(host, str(fault))) from fault
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
                wanted = answer.headers.get("Content-Length", "")
                if wanted.isdecimal() and size < int(wanted):
                    raise http.client.IncompleteRead(b"".join(parts)[-20:], int(wanted) - size)
                if answer.headers.get_content_type() == "text/html":
                    raise RegistryUnreachable(_for_people(host, repr(b"".join(parts)[:60])))
                return b"".join(parts), answer.headers.get("Docker-Content-Digest", "")
        except (urllib.error.HTTPError, RegistryUnreachable, RegistryLies):
            raise
        except http.client.IncompleteRead as cut:
            raise RegistryUnreachable(
                f"the registry {host} does not answer to the end: {cut.expected} bytes are missing. Likely cause: the "
                "connection was lost, or a proxy on the way cuts it. Next step: try again."
            ) from cut
        except (OSError, http.client.HTTPException, ValueError) as fault:  # ValueError: led to what is no address
            reason = getattr(fault, "reason", fault)
            cause = "its certificate is not one that this machine trusts" if isinstance(reason, ssl.SSLError) else ""
            raise RegistryUnreachable(
                f"the registry {host} does not answer: {' '.join(str(reason).split())}. Likely cause: "
                f"{cause or 'it is down, or this network does not reach it'}. Next step: bring it up, or name a "
                "registry that has the same images with MEGACPP_REGISTRY_MIRROR=host[:port][/prefix]."
            ) from fault


def plain_http(host: str, variables: Mapping[str, str]) -> bool:
    """Whether a registry is asked without TLS: one on this machine, or one that is named for it."""
    return bool(LOOPBACK.fullmatch(host)) or host in variables.get(PLAIN_HTTP, "").replace(",", " ").split()


def split_repository(repository: str) -> tuple[str, str]:
    """Registry and path; Docker Hub's own images lie in its library."""
    host, _, path = repository.partition("/")
    return host, f"library/{path}" if host == "docker.io" and "/" not in path else path


def _read(raw: bytes, host: str, path: str, reference: str) -> Document:
    try:
        return read_document(raw)
    except NoJson as fault:
        raise RegistryUnreachable(_for_people(host, str(fault))) from fault
    except NoManifest as fault:
        raise RegistryLies(_strange(host, path, reference, str(fault))) from fault


def _is_digest(reference: str) -> bool:
    return reference.startswith("sha256:")


def _names(wanted: str, raw: bytes) -> bool:
    """Whether a digest is that of some bytes; one of a kind that nobody here reckons says nothing."""
    kind, _, told = wanted.partition(":")
    if kind not in ("sha256", "sha512"):
        return True
    return hashlib.new(kind, raw).hexdigest() == told.lower()


def _for_people(host: str, seen: str) -> str:
    return (
        f"{host} does not answer as a registry does, but with {seen}. Likely cause: a login page or a proxy on the "
        "way. Next step: open the address in a browser, or name another mirror with MEGACPP_REGISTRY_MIRROR."
    )


def _strange(host: str, path: str, reference: str, what: str) -> str:
    return (
        f"{host} answers for {path} {reference} with {what}, which is no manifest that this tool reads. Likely cause: "
        "a proxy on the way, a damaged registry, or one that has old manifests alone. Next step: open "
        f"/v2/{path}/manifests/ there by hand, or ask another mirror."
    )


def _refused(host: str, path: str, refusal: urllib.error.HTTPError) -> str:
    cause, step = explain_status(host, refusal.code)
    reason = " ".join(str(refusal.reason).split())
    return (
        f"the registry {host} refuses {path}: HTTP {refusal.code} {reason}. Likely cause: {cause}. Next step: {step}, "
        "or name a mirror with MEGACPP_REGISTRY_MIRROR=host[:port][/prefix]."
    )


__all__ = (
    "ACCEPT",
    "INDEXES",
    "LOOPBACK",
    "MANIFESTS",
    "MOST_BYTES",
    "PLAIN_HTTP",
    "RegistryClient",
    "Resolved",
    "plain_http",
)
