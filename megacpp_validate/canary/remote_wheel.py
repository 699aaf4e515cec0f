"""Shared libraries inside a wheel on the index, without the rest of the wheel: HTTP ranges, one member at a time."""

from __future__ import annotations

import http.client
import io
import os
import shutil
import ssl
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from urllib.error import URLError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from ..errors import NoEnvironment
from ..probes.doctor_elf import Elf, read_elf

_LIMIT_S = 120.0  # of one answer
_PART = 8 * 2**20  # bytes of one request


class _Ranges(io.RawIOBase):
    """A file behind an address, read in ranges."""

    def __init__(self, address: str) -> None:
        self._address, self._at = address, 0
        certificates = os.environ.get("PIP_CERT") or None  # the user's pip reaches the index with it
        self._tls = ssl.create_default_context(cafile=certificates)
        with self._ask(0, 0) as answer:
            size = str(answer.headers.get("Content-Range") or "").rpartition("/")[2]
        if not size.isdecimal():
            raise OSError("the index does not answer ranges")
        self._size = int(size)

    def _ask(self, first: int, last: int) -> http.client.HTTPResponse:
        request = Request(self._address, headers={"Range": f"bytes={first}-{last}"})  # noqa: S310 - pip named it
        answer: http.client.HTTPResponse = urlopen(request, timeout=_LIMIT_S, context=self._tls)  # noqa: S310
        return answer

    def seekable(self) -> bool:
        """Whether `seek` works."""
        return True

    def readable(self) -> bool:
        """Whether `read` works."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a byte."""
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def tell(self) -> int:
        """The byte that is read next."""
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read up to as many bytes as the buffer takes."""
        count = min(len(buffer), self._size - self._at)
        if count <= 0:
            return 0
        with self._ask(self._at, self._at + count - 1) as answer:
            data = answer.read(count)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _buffer(address: str) -> io.BufferedReader:
    return io.BufferedReader(_Ranges(address), _PART)


class RemoteWheel:
    """A wheel at an address; nothing of it is kept.

    Raises:
        NoEnvironment: at every use, where the index does not give it.
    """

    def __init__(self, address: str) -> None:
        self.name = PurePosixPath(address).name
        with _explained(self.name):
            local = address.startswith("file://")
            self._file = Path(unquote(urlsplit(address).path)).open("rb") if local else _buffer(address)  # noqa: SIM115
            try:
                self._zip = zipfile.ZipFile(self._file)
            except BaseException:
                self._file.close()
                raise

    def __enter__(self) -> RemoteWheel:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._zip.close()
        self._file.close()

    def libraries(self) -> dict[str, str]:
        """Name of each shared library -> its place in the wheel."""
        names = (PurePosixPath(name) for name in self._zip.namelist())
        return {place.name: str(place) for place in names if ".so" in place.suffixes}

    @contextmanager
    def open_library(self, place: str) -> Iterator[Elf]:
        """One shared library, in a file that is removed again."""
        with tempfile.TemporaryDirectory(prefix="megacpp-wheel-") as folder:
            copy = Path(folder, PurePosixPath(place).name)
            with _explained(self.name), self._zip.open(place) as member, copy.open("wb") as file:
                shutil.copyfileobj(member, file, 2**20)
            yield read_elf(copy)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (URLError, http.client.HTTPException, zipfile.BadZipFile, OSError) as fault:
        raise NoEnvironment(
            f"{name} cannot be read from the index: {fault}. Likely cause: a mirror without HTTP ranges, or a network "
            "that ended the transfer. Next step: run it again, or against another index (PIP_INDEX_URL)."
        ) from fault
