"""A package index of a few small wheels, and servers that misbehave as real ones do."""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import threading
import zipfile
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

UNREACHABLE = "http://127.0.0.1:9/simple"
PACKAGE = {
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch/__init__.py": "class Linear:\n    def __init__(self, size): ...\n",
    "transformer_engine/common/__init__.py": "",
    "transformer_engine/common/recipe/__init__.py": "",
}
LINEAR = """
class Linear:
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device='cuda', eps=1e-5, name=None): ...
"""
BROKEN = LINEAR.replace("in_features", "width", 1)
BRIDGED = {  # six releases, from 2.11.0 on without a keyword that the bridge passes
    f"2.{minor}.0": PACKAGE | {"transformer_engine/pytorch/__init__.py": BROKEN if minor >= 11 else LINEAR}
    for minor in range(8, 14)
}


def use_index(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let pip know of this index alone; whatever the machine has configured is out of sight."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", url)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def write_wheel(
    page: Path, version: str, files: Mapping[str, str | bytes] = PACKAGE, name: str = "transformer_engine",
    platform: str = "any",
) -> Path:  # fmt: skip
    """A wheel that holds `files`, and the page of the index that lists all wheels of the folder."""
    page.mkdir(parents=True, exist_ok=True)
    stem, tag = f"{name}-{version}", f"py3-none-{platform}"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        "RECORD": "",
    }
    wheel = page / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for place, content in {**files, **{f"{stem}.dist-info/{key}": text for key, text in about.items()}}.items():
            archive.writestr(zipfile.ZipInfo(place), content)
    links = (f'<a href="{one.name}">{one.name}</a>\n' for one in sorted(page.glob("*.whl")))
    (page / "index.html").write_text("".join(links))
    return wheel


def write_index(folder: Path, wheels: Mapping[str, Mapping[str, str]]) -> str:
    """An index of version -> files, on disk; its address."""
    for version, files in wheels.items():
        write_wheel(folder / "simple" / "transformer-engine", version, files)
    return (folder / "simple").as_uri()


class _Quiet(BaseHTTPRequestHandler):
    """Answers, and logs nothing."""

    def answer(self, status: int, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        pass


@contextlib.contextmanager
def serve(answers: Mapping[str, tuple[int, str, bytes]]) -> Iterator[str]:
    """A server that gives (status, content type, body) by how the path ends; 404 otherwise."""

    class Handler(_Quiet):
        def do_GET(self) -> None:
            found = (answer for end, answer in answers.items() if self.path.endswith(end))
            self.answer(*next(found, (404, "text/html", b"no")))

    with _served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}/simple"


@contextlib.contextmanager
def serve_nothing() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/simple"


@contextlib.contextmanager
def _served(server: socketserver.TCPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
