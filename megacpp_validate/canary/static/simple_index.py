"""Releases as a package index lists them: the simple API as JSON (PEP 691, 700) or HTML (PEP 503, 592).

The index, its certificates and who asks come from the user's own pip configuration, as pip itself says it.
"""

from __future__ import annotations

import ast
import base64
import http.client
import json
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit, urlunsplit

from packaging.tags import Tag
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from ..dynamic.watch_result import LONGEST_VERSION, Listed

DEFAULT: Final = "https://pypi.org/simple"
ACCEPT: Final = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_LIMIT_S: Final = 30.0
_LARGEST: Final = 64 << 20  # bytes; the page of a package with thousands of files has a few million
_PURE: Final = Tag("py3", "none", "any")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class IndexDown(RuntimeError):
    """The index does not answer, or not with a list of files; the text says which and what to do."""


@dataclass(frozen=True)
class IndexSettings:
    """Which indexes pip would ask, in order, and the file of certificates; empty for those of the system."""

    urls: tuple[str, ...]
    cert: str = ""

    @property
    def shown(self) -> str:
        """The addresses, without who asks."""
        return " ".join(map(hide_user, self.urls))


@dataclass(frozen=True)
class _File:
    name: str
    sha256: str
    yanked: str | None


def hide_user(url: str) -> str:
    """An address without name and password; of one that is none what follows the last of those, too."""
    try:
        parts = urlsplit(url)
    except ValueError:  # a bracket without its other half
        return url.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def read_index_settings() -> IndexSettings:
    """What pip is configured for, files and environment together.

    Raises:
        IndexDown: pip does not say, or is told to ask no index.
    """
    said: dict[str, dict[str, str]] = {}
    for line in _ask_pip().splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        try:
            said.setdefault(section, {})[name.replace("_", "-")] = str(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            continue
    # As pip itself: what is for all commands, then what is for this one, then the environment.
    merged = {**said.get("global", {}), **said.get("download", {}), **said.get(":env:", {})}
    if merged.get("no-index", "").lower() in {"1", "true", "yes", "on"}:
        raise IndexDown(
            "pip is configured to ask no index. Likely cause: no-index in its configuration. Next step: unset it for "
            "the watch, which has nothing else to ask."
        )
    urls = [merged.get("index-url", DEFAULT), *merged.get("extra-index-url", "").split()]
    return IndexSettings(tuple(dict.fromkeys(url.rstrip("/") for url in urls)), merged.get("cert", ""))


def _ask_pip() -> str:
    command = [sys.executable, "-m", "pip", "config", "list", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_LIMIT_S
        )  # fmt: skip
    except subprocess.TimeoutExpired as fault:
        raise IndexDown(_say_pip(f"`pip config list` was not done after {_LIMIT_S:g} s")) from fault
    if done.returncode:
        raise IndexDown(_say_pip(done.stderr.strip()[:300]))
    return done.stdout


def _say_pip(why: str) -> str:
    return (
        f"pip does not say which index it asks: {why}. Likely cause: a damaged pip configuration, or a home folder "
        "that does not answer. Next step: run `pip config debug`."
    )


def read_listed(distribution: str, settings: IndexSettings) -> tuple[Listed, ...]:
    """Every release that any of the indexes lists.

    Raises:
        IndexDown: one of them does not answer, answers something else than a list of files, or none has the package.
    """
    pages = [page for url in settings.urls if (page := _read_page(url, distribution, settings.cert)) is not None]
    files = [file for page in pages for file in page]
    listed = list_releases(distribution, files)
    if not listed:
        raise IndexDown(
            f"{settings.shown} lists no release of {distribution}. Likely cause: a mirror without it, or a page of "
            "something else. Next step: look at `pip config list`; nothing was changed."
        )
    return listed


def list_releases(distribution: str, files: Iterable[_File]) -> tuple[Listed, ...]:
    """Files put together by release; a release is yanked where all of its files are."""
    found: dict[Version, list[tuple[_File, Version, bool]]] = {}
    for file in files:
        try:
            if file.name.endswith(".whl"):
                name, named, _, tags = parse_wheel_filename(file.name)
                pure = _PURE in tags
            else:
                name, named = parse_sdist_filename(file.name)
                pure = False
        except (InvalidWheelFilename, InvalidSdistFilename, ValueError):
            continue  # signatures, installers, and names of before there was a rule
        # A name that could be no file's here, nor an argument: nobody would publish it in earnest.
        if name == distribution and len(str(named)) <= LONGEST_VERSION:
            found.setdefault(named, []).append((file, named, pure))  # 2.10 is 2.10.0
    rows = []
    for theirs in found.values():
        wheels = [file for file, _, pure in theirs if pure]
        standing = [file for file, _, _ in theirs if file.yanked is None]
        reasons = [file.yanked for file, _, _ in theirs if file.yanked]
        rows.append(
            Listed(
                # As its wheel says, whatever the order of a listing.
                version=max((pure, len(str(named)), str(named)) for _, named, pure in theirs)[2],
                has_wheel=any(file.yanked is None for file in wheels),
                wheel_sha256=wheels[0].sha256 if wheels else "",
                yanked=None if standing else next(iter(reasons), ""),
            )
        )
    return tuple(rows)


def _read_page(url: str, distribution: str, cert: str) -> list[_File] | None:
    """The files on an index; None where it has no such package."""
    try:
        kind, body = _fetch(f"{url}/{distribution}/", cert)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as fault:  # URLError and its kin are OSError
        why = getattr(fault, "reason", fault)
        raise IndexDown(
            f"{hide_user(url)} did not say which releases of {distribution} there are: {str(why)[:300]}. Likely cause: "
            "the package index cannot be reached from here, or is down. Next step: look at `pip config list`; nothing "
            "was changed, and the next run asks again."
        ) from fault
    try:
        return _read_json(body) if "json" in kind else _read_html(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise IndexDown(
            f"{hide_user(url)} answers for {distribution} what is no list of files ({kind or 'no type'}): "
            f"{str(fault)[:200]}. Likely cause: a proxy or a log-in page in place of the index. Next step: open that "
            "address in a browser; nothing was changed."
        ) from fault


def _fetch(address: str, cert: str) -> tuple[str, bytes]:
    """Content type and body; once again where nobody answered.

    Raises:
        FileNotFoundError: there is no such page.
        OSError, ValueError: nobody answers, or not with a page.
    """
    parts = urlsplit(address)
    if parts.scheme == "file":
        folder = Path(urllib.request.url2pathname(parts.path))
        return "text/html", (folder / "index.html").read_bytes()
    if parts.scheme not in {"http", "https"}:
        raise ValueError(f"{parts.scheme}: is no way to ask an index")
    headers = {"Accept": ACCEPT, "User-Agent": "megacpp-validate", "Cache-Control": "max-age=0"}
    request = urllib.request.Request(hide_user(address), headers=headers)  # noqa: S310 - the scheme is looked at above
    if parts.username:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        # For this host alone: whoever it redirects to is nobody's business.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")
    context = ssl.create_default_context(cafile=cert or None) if parts.scheme == "https" else None
    try:
        return _ask(request, context)
    except FileNotFoundError:
        raise
    except urllib.error.HTTPError as fault:
        if fault.code < 500:
            raise
    except (OSError, _NoHttp):
        pass
    return _ask(request, context)


class _NoHttp(ValueError):
    """An answer that is not HTTP."""


def _ask(request: urllib.request.Request, context: ssl.SSLContext | None) -> tuple[str, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=_LIMIT_S, context=context) as answer:  # noqa: S310
            body = answer.read(_LARGEST + 1)
            kind = answer.headers.get_content_type()
            length = answer.headers.get("Content-Length")
    except urllib.error.HTTPError as fault:
        fault.close()  # it is the answer, too, and holds its connection
        if fault.code in (404, 410):
            raise FileNotFoundError(request.full_url) from fault
        raise
    except http.client.HTTPException as fault:  # neither OSError nor ValueError
        raise _NoHttp(f"what it says is no HTTP: {type(fault).__name__}: {str(fault)[:200]}") from fault
    if len(body) > _LARGEST or (length is not None and length.isdigit() and int(length) > len(body)):
        raise ValueError(f"its answer has {length or 'more than 64 million'} bytes, and {len(body)} came")
    return kind, body


def _read_json(body: bytes) -> list[_File]:
    page: Any = json.loads(body)
    version = str(page["meta"]["api-version"])
    if version.partition(".")[0] != "1":
        raise ValueError(f"version {version} of the simple API, and 1 is known")
    return [_file_of(row) for row in page["files"]]


def _file_of(row: Mapping[str, Any]) -> _File:
    yanked = row.get("yanked")
    sha256 = str(row.get("hashes", {}).get("sha256", ""))
    # As pip reads it: a reason is a text that is not empty (PEP 691), or there is none and it is `true`.
    reason = None if not yanked else yanked if isinstance(yanked, str) else ""
    return _File(str(row["filename"]), sha256 if _SHA256.fullmatch(sha256) else "", reason)


def _read_html(body: bytes) -> list[_File]:
    page = _Anchors()
    try:
        page.feed(body.decode("utf-8", "strict"))
    except AssertionError as fault:  # by which html.parser refuses some broken declarations
        raise ValueError(f"it is no HTML: {fault}") from fault
    if not page.files:
        raise ValueError("there is no link to a file on the page")
    return page.files


class _Anchors(HTMLParser):
    """Links of a page, as PEP 503 has them: the file's name is the last part of the address."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[_File] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One link."""
        given = dict(attrs)
        if tag != "a" or not given.get("href"):
            return
        parts = urlsplit(given["href"] or "")
        name = unquote(parts.path.rpartition("/")[2])
        if name.endswith((".whl", ".tar.gz", ".zip")):
            sha256 = parts.fragment.removeprefix("sha256=")
            yanked = (given["data-yanked"] or "") if "data-yanked" in given else None
            self.files.append(_File(name, sha256 if _SHA256.fullmatch(sha256) else "", yanked))
