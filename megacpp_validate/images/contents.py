"""What a registry holds, by digest: manifests and blobs through the distribution API, each hashed on the way.

https://github.com/opencontainers/distribution-spec/blob/main/spec.md. A registry on this host speaks HTTP, every other
HTTPS, as Docker takes it to. Where a registry wants a token, it is asked for one, with the login that `docker login`
left where there is one.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

from .plan import MIRROR, show_through
from .refusals import ImageRefused, RegistryLies, RegistryUnreachable
from .registry import ACCEPT, LOOPBACK, MOST_BYTES, plain_http
from .registry_login import find_login

_REFERENCE: Final = re.compile(
    r"(?P<host>[a-z0-9.-]+(:\d+)?)/(?P<path>[a-z0-9._/-]+?)(:[\w.-]+)?@(?P<digest>sha256:[0-9a-f]{64})"
)
_CHUNK: Final = 1 << 20
_WAITS_S: Final = 60.0


@dataclass(frozen=True)
class Place:
    """A repository of a registry, and a digest in it."""

    host: str
    path: str
    digest: str

    @property
    def repository(self) -> str:
        """Registry and path, without a digest."""
        return f"{self.host}/{self.path}"

    @property
    def shown(self) -> str:
        """As everyone writes it."""
        return f"{self.repository}@{self.digest}"


def read_place(reference: str) -> Place:
    """`HOST[:PORT]/PATH@sha256:DIGEST`, taken apart.

    Raises:
        ImageRefused: it has no digest, or no registry.
    """
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        why = "it names no registry" if "@sha256:" in reference else "it has no digest, so it may be another tomorrow"
        raise ImageRefused(
            f"the image {reference!r} is refused: {why}. Next step: give it as HOST/REPOSITORY@sha256:DIGEST; `docker "
            f"buildx imagetools inspect {reference.partition('@')[0] or 'NAME'}` says the digest."
        )
    return Place(found["host"], found["path"], found["digest"])


@dataclass
class Contents:
    """A repository, read by digest.

    Attributes:
        host, path: as in `Place`.
    """

    host: str
    path: str
    _login: str = field(default="", repr=False)

    def place(self, digest: str) -> Place:
        """Where it is read: the registry itself, or what stands in for it."""
        return Place(self.host, self.path, digest)

    def manifest(self, digest: str) -> bytes:
        """The bytes of a manifest or an index.

        Raises:
            RegistryUnreachable: no answer, or a refusal.
            RegistryLies: other bytes than the digest says.
        """
        body = self.tagged(digest)
        if body is None:
            raise RegistryLies(
                f"{self.host}/{self.path} has no manifest {digest}. Likely cause: it was never pushed there, or was "
                "removed. Next step: push the image, and give the digest that the push said."
            )
        require_digest(digest, f"sha256:{sha256(body).hexdigest()}", f"{self.host}/{self.path}")
        return body

    def tagged(self, name: str) -> bytes | None:
        """The bytes of a manifest by tag or digest, as the registry gives them; None where it has none."""
        answer = self._ask("GET", f"manifests/{name}", {"Accept": ACCEPT}, (200, 404))
        with answer:
            body = answer.read(MOST_BYTES + 1)
            return body if answer.status == 200 else None

    def size_of(self, digest: str) -> int | None:
        """Bytes of a blob; None where the registry has it not."""
        with self._ask("HEAD", f"blobs/{digest}", {}, (200, 404)) as answer:
            return int(answer.headers.get("Content-Length") or -1) if answer.status == 200 else None

    def blob(self, digest: str, start: int = 0) -> Iterator[bytes]:
        """The bytes of a blob from an offset on; whoever reads them hashes them.

        Raises:
            RegistryUnreachable: no answer, or a refusal, or it stopped half way.
        """
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._ask("GET", f"blobs/{digest}", headers, (200, 206)) as answer:
            skip = start if answer.status == 200 else 0  # one that knows no ranges gives all
            try:
                while data := answer.read(_CHUNK):
                    yield data[skip:] if skip else data
                    skip = max(0, skip - len(data))
            except (OSError, http.client.HTTPException) as fault:
                raise self._unreachable(str(fault) or type(fault).__name__) from fault

    def small_blob(self, digest: str) -> bytes:
        """A whole blob, held to its digest.

        Raises:
            RegistryUnreachable, RegistryLies: as for a manifest.
        """
        body = b"".join(self.blob(digest))
        require_digest(digest, f"sha256:{sha256(body).hexdigest()}", f"{self.host}/{self.path}")
        return body

    def _ask(self, verb: str, what: str, headers: Mapping[str, str], wanted: tuple[int, ...]) -> Any:
        """An open answer; a login is made where it is wanted, and a redirection to where blobs are stored followed."""
        for again in (False, True):
            request = urllib.request.Request(f"{self._scheme}://{self.host}/v2/{self.path}/{what}", method=verb)  # noqa: S310
            for name, value in headers.items():
                request.add_header(name, value)
            if self._login:  # not for a store that a registry leads to: its links are signed
                request.add_unredirected_header("Authorization", self._login)
            answer = self._open(request)
            if answer.status in wanted:
                return answer
            answer.close()
            if answer.status != 401 or again:
                break
            self._login = self._log_in(answer.headers.get("WWW-Authenticate", ""))
        why = {401: "it wants a login", 403: "it may not be read", 404: "it has no such thing"}
        raise self._unreachable(f"{answer.status} to {verb} {what}: {why.get(answer.status, answer.reason)}")

    @property
    def _scheme(self) -> str:
        return "http" if plain_http(self.host, os.environ) else "https"

    def _open(self, request: urllib.request.Request) -> Any:
        direct = [urllib.request.ProxyHandler({})] if LOOPBACK.fullmatch(self.host) else []
        try:
            return urllib.request.build_opener(*direct).open(request, timeout=_WAITS_S)
        except urllib.error.HTTPError as refusal:
            return refusal  # an answer too: its status says what it is
        except (OSError, http.client.HTTPException) as fault:
            raise self._unreachable(str(getattr(fault, "reason", fault)) or type(fault).__name__) from fault

    def _log_in(self, challenge: str) -> str:
        """What to say to a registry that wants a login: a token of its service, or the login itself."""
        kind, _, rest = challenge.partition(" ")
        basic = find_login(self.host, os.environ)
        if kind.lower() == "basic" and basic:
            return f"Basic {basic}"
        said = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        realm = said.get("realm", "")
        if kind.lower() != "bearer" or not realm.startswith(f"{self._scheme}://"):
            raise self._unreachable("401: it wants a login")
        query = urllib.parse.urlencode({key: said[key] for key in ("service", "scope") if key in said})
        request = urllib.request.Request(f"{realm}?{query}")  # noqa: S310
        if basic:
            request.add_unredirected_header("Authorization", f"Basic {basic}")
        with self._open(request) as answer:
            try:
                found: dict[str, Any] = json.loads(answer.read(MOST_BYTES))
                return f"Bearer {found.get('token') or found['access_token']}"
            except (ValueError, KeyError, AttributeError) as fault:
                raise self._unreachable(f"its login at {realm} answers {answer.status}") from fault

    def stopped(self, digest: str, size: int, wanted: int) -> RegistryUnreachable:
        """What to raise where a blob ends before its end."""
        return self._unreachable(f"{digest} ended after {size} of {wanted} bytes")

    def _unreachable(self, why: str) -> RegistryUnreachable:
        return RegistryUnreachable(
            f"the registry {self.host} does not give what is asked of {self.path}: {why}. Likely cause: it does not "
            "run, is not reached from here, or wants a login. Next step: open its /v2/ by hand; `docker login "
            f"{self.host}` where it wants one."
        )


def open_contents(place: Place) -> Contents:
    """The repository of an image, or that of the registry which stands in for every other; not for one on this host.

    Raises:
        ImageRefused: the setting that names it is none.
    """
    mirror = os.environ.get(MIRROR, "")
    if LOOPBACK.fullmatch(place.host) or place.repository.startswith(f"{mirror.rstrip('/')}/"):
        mirror = ""
    host, _, path = show_through(place.repository, mirror).partition("/")
    return Contents(host, path)


def require_digest(wanted: str, found: str, where: str) -> None:
    """Refuse bytes that are not what their digest says.

    Raises:
        RegistryLies: they are not.
    """
    if wanted != found:
        raise RegistryLies(
            f"{where} gives {found} for {wanted}. Likely cause: it was damaged there or on the way, or somebody put "
            "another thing in its place. Next step: do not use it; ask who runs that registry, or take a mirror."
        )
