"""What a registry holds, by digest: manifests and blobs through the distribution API, each hashed on the way.

https://github.com/opencontainers/distribution-spec/blob/main/spec.md. A registry on this host speaks HTTP, every other
HTTPS, as Docker takes it to. Where a registry wants a token, it is asked for one, with the login that `docker login`
left where there is one.
"""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

from ..evidence.json_text import read_json
from .plan import MIRROR, show_through
from .refusals import ImageRefused, RegistryLies, RegistryUnreachable
from .registry import ACCEPT, HOSTS, LOOPBACK, MOST_BYTES, plain_http, split_repository
from .registry_answers import LONGEST_WAIT_S, TRANSIENT, explain_status, name_token, read_challenge, wait_before
from .registry_login import find_login

_REFERENCE: Final = re.compile(
    r"(?P<host>[a-z0-9.-]+(:\d+)?)/(?P<path>[a-z0-9._/-]+?)(:[\w.-]+)?@(?P<digest>sha256:[0-9a-f]{64})"
)
_CHUNK: Final = 1 << 20
_WAITS_S: Final = 60.0  # for the next bytes; and for all of a manifest
_MOST_SMALL: Final = 512 * 2**20  # bytes: an SBOM of one of NVIDIA's bases lists a hundred thousand files
_ATTEMPTS: Final = 4  # where a registry is busy or hangs up; never where it answers
_PATIENCE: Final = "it does not run, or is not reached from here", "open its /v2/ by hand"
_TO_PEOPLE: Final = "a login page, or a proxy on the way", "open the address in a browser, or name a mirror"


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
        name, _, digest = reference.partition("@")
        if not digest:
            why = "it has no digest, so it may be another tomorrow"
        elif not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            why = f"{digest!r} is no digest, which is sha256: and 64 digits of 0 to 9 and a to f"
        else:
            why = f"{name!r} names no repository of a registry"
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
        with self._ask("GET", f"manifests/{name}", {"Accept": ACCEPT}, (200, 404)) as answer:
            if answer.status == 404:
                return None
            if answer.headers.get_content_type() == "text/html":
                raise self._unreachable("it answers with a page for people", _TO_PEOPLE)
            body, until = bytearray(), time.monotonic() + _WAITS_S
            for data in self._read(answer, name, answer.read1):
                body += data
                if len(body) > MOST_BYTES:
                    break  # what is cut off has another digest than was asked for
                if time.monotonic() > until:
                    raise self._unreachable(f"no whole answer for {name} within {_WAITS_S:g} s", _PATIENCE)
            return bytes(body)

    def size_of(self, digest: str) -> int | None:
        """Bytes of a blob, -1 where the registry does not say; None where it has it not."""
        with self._ask("HEAD", f"blobs/{digest}", {}, (200, 404)) as answer:
            told = answer.headers.get("Content-Length") or ""
            return (int(told) if told.isdecimal() else -1) if answer.status == 200 else None

    def blob(self, digest: str, start: int = 0) -> Iterator[bytes]:
        """The bytes of a blob from an offset on; whoever reads them hashes them.

        Raises:
            RegistryUnreachable: no answer, or a refusal, or it stopped half way.
            RegistryLies: it has a manifest that names this blob, and not the blob.
        """
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._ask("GET", f"blobs/{digest}", headers, (200, 206, 404)) as answer:
            if answer.status == 404:
                raise RegistryLies(
                    f"{self.host}/{self.path} has a manifest that names {digest}, and has it not. Likely cause: the "
                    "registry has lost it or cleaned it away, or the push was not finished. Next step: push the image "
                    "and its signatures again."
                )
            skip = start if answer.status == 200 else 0  # one that knows no ranges gives all
            for data in self._read(answer, digest, answer.read):
                yield data[skip:] if skip else data
                skip = max(0, skip - len(data))

    def small_blob(self, digest: str) -> bytes:
        """A whole blob, held to its digest.

        Raises:
            RegistryUnreachable, RegistryLies: as for a manifest.
        """
        body = bytearray()
        for data in self.blob(digest):
            body += data
            if len(body) > _MOST_SMALL:
                raise RegistryLies(
                    f"{self.host}/{self.path} gives more than {_MOST_SMALL >> 20} MiB for {digest}, which is no layer. "
                    "Likely cause: it is no image of this project. Next step: do not use it."
                )
        require_digest(digest, f"sha256:{sha256(body).hexdigest()}", f"{self.host}/{self.path}")
        return bytes(body)

    def _read(self, answer: Any, what: str, read: Callable[[int], bytes]) -> Iterator[bytes]:
        """The body of an answer, to the end that it was announced with: http.client ends in silence where it is cut."""
        size, wanted = 0, answer.headers.get("Content-Length") or ""
        try:
            while data := read(_CHUNK):
                size += len(data)
                yield data
        except (OSError, http.client.HTTPException) as fault:
            raise self._unreachable(str(fault) or type(fault).__name__, _PATIENCE) from fault
        if wanted.isdecimal() and size < int(wanted):
            raise self.stopped(what, size, int(wanted))

    def _ask(self, verb: str, what: str, headers: Mapping[str, str], wanted: tuple[int, ...]) -> Any:
        """An open answer of one of these statuses; a registry that is busy is asked again, one that refuses is not."""
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                answer = self._ask_once(verb, what, headers, wanted)
            except (http.client.RemoteDisconnected, ConnectionResetError) as fault:
                if last:
                    raise self._unreachable(f"it hung up, {_ATTEMPTS} times", _PATIENCE) from fault
                time.sleep(wait_before(attempt, "", time.time()))
                continue
            if answer.status in wanted:
                return answer
            answer.close()
            wait = wait_before(attempt, answer.headers.get("Retry-After", ""), time.time())
            if answer.status not in TRANSIENT or last or wait > LONGEST_WAIT_S:
                break
            time.sleep(wait)
        times = f", {attempt + 1} times" if attempt else ""
        later = f"; it asks to wait {wait:.0f} s" if wait > LONGEST_WAIT_S else ""
        raise self._unreachable(
            f"{answer.status} to {verb} {what}: {answer.reason}{times}{later}", explain_status(self.host, answer.status)
        )

    def _ask_once(self, verb: str, what: str, headers: Mapping[str, str], wanted: tuple[int, ...]) -> Any:
        """An open answer; a login is made where it is wanted, and a redirection to where blobs are stored followed."""
        answer: Any = None
        for again in (False, True):
            url = f"{self._scheme}://{HOSTS.get(self.host, self.host)}/v2/{self.path}/{what}"
            request = urllib.request.Request(url, method=verb)  # noqa: S310
            for name, value in headers.items():
                request.add_header(name, value)
            if self._login:  # not for a store that a registry leads to: its links are signed
                request.add_unredirected_header("Authorization", self._login)
            answer = self._open(request)
            if answer.status in wanted or answer.status != 401 or again:
                break
            answer.close()
            self._login = self._log_in(answer.headers.get_all("WWW-Authenticate", []))
        return answer

    @property
    def _scheme(self) -> str:
        return "http" if plain_http(self.host, os.environ) else "https"

    def _open(self, request: urllib.request.Request, who: str = "") -> Any:
        direct = [urllib.request.ProxyHandler({})] if LOOPBACK.fullmatch(self.host) else []
        try:
            return urllib.request.build_opener(*direct).open(request, timeout=_WAITS_S)
        except urllib.error.HTTPError as refusal:
            return refusal  # an answer too: its status says what it is
        except (OSError, http.client.HTTPException, ValueError) as fault:  # ValueError: led to what is no address
            reason = getattr(fault, "reason", fault)
            for one in (fault, reason):
                if isinstance(one, http.client.RemoteDisconnected | ConnectionResetError):
                    raise one from fault
            raise self._unreachable(f"{who}{str(reason) or type(fault).__name__}", _PATIENCE) from fault

    def _log_in(self, challenges: list[str]) -> str:
        """What to say to a registry that wants a login: a token of its service, or the login itself."""
        kind, said = read_challenge(challenges)
        basic = find_login(self.host, os.environ)
        if kind == "basic" and basic:
            return f"Basic {basic}"
        realm = said.get("realm", "")
        if kind != "bearer" or not realm.startswith(f"{self._scheme}://"):
            raise self._unreachable("401: Unauthorized", explain_status(self.host, 401))
        wanted: dict[str, str] = {key: said[key] for key in ("service", "scope") if key in said}
        request = urllib.request.Request(name_token(realm, wanted))  # noqa: S310
        if basic:
            request.add_unredirected_header("Authorization", f"Basic {basic}")
        with self._open(request, f"its login at {realm} does not answer: ") as answer:
            try:
                found: dict[str, Any] = read_json(answer.read(MOST_BYTES))
                return f"Bearer {found.get('token') or found['access_token']}"
            except (ValueError, KeyError, AttributeError) as fault:
                cause = explain_status(self.host, answer.status if answer.status >= 400 else 0)
                raise self._unreachable(f"its login at {realm} answers {answer.status}", cause) from fault

    def stopped(self, digest: str, size: int, wanted: int) -> RegistryUnreachable:
        """What to raise where a blob ends before its end."""
        return self._unreachable(
            f"{digest} ended after {size} of {wanted} bytes",
            ("the connection was lost, or a proxy on the way cuts it", "the same command again"),
        )

    def _unreachable(self, why: str, cause_and_step: tuple[str, str]) -> RegistryUnreachable:
        cause, step = cause_and_step
        return RegistryUnreachable(
            f"the registry {self.host} does not give what is asked of {self.path}: {why}. Likely cause: {cause}. Next "
            f"step: {step}."
        )


def open_contents(place: Place) -> Contents:
    """The repository of an image, or that of the registry which stands in for every other; not for one on this host.

    Raises:
        ImageRefused: the setting that names it is none.
    """
    mirror = os.environ.get(MIRROR, "")
    if LOOPBACK.fullmatch(place.host) or place.repository.startswith(f"{mirror.rstrip('/')}/"):
        mirror = ""
    return Contents(*split_repository(show_through(place.repository, mirror)))


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
