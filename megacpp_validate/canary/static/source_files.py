"""The Python files of one release, in a wheel or in a folder, read as Python itself would read them."""

from __future__ import annotations

import ast
import io
import sys
import tempfile
import tokenize
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

PACKAGE = "transformer_engine"


class SourceFiles:
    """The files of a release by their paths relative to the wheel's root.

    Args:
        wheel: the wheel, or a folder that holds the package.
    """

    def __init__(self, wheel: Path) -> None:
        self._wheel = wheel

    @cached_property
    def names(self) -> list[str]:
        """Every Python file of the package."""
        if not self._wheel.is_dir():
            return sorted(name for name in self._packed if name.startswith(f"{PACKAGE}/"))
        below = (path for path in (self._wheel / PACKAGE).rglob("*.py") if path.is_file())
        return sorted(path.relative_to(self._wheel).as_posix() for path in below)

    @cached_property
    def _packed(self) -> dict[str, bytes]:
        """The files of a wheel: some 4 MB, read at once, because opening it for each takes longer."""
        with zipfile.ZipFile(self._wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}

    def _raw(self, name: str) -> bytes:
        return (self._wheel / name).read_bytes() if self._wheel.is_dir() else self._packed[name]

    def text(self, name: str) -> str:
        """The text of a file.

        Raises:
            SyntaxError, ValueError: its bytes are no text in the encoding that it says.
        """
        return decoded(self._raw(name))

    @contextmanager
    def laid_out(self) -> Iterator[Path]:
        """A folder with these files and nothing else, in UTF-8."""
        with tempfile.TemporaryDirectory(prefix="megacpp-te-") as folder:
            root = Path(folder).resolve()
            for name in self.names:
                _write(root / name, self._raw(name))
            yield root


def decoded(raw: bytes) -> str:
    """A source file's bytes as text: by its byte order mark or its coding line, else as UTF-8.

    Raises:
        SyntaxError, ValueError: they are no text in that encoding.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding)


def why_not_loaded(wheel: str, folder: Path, roots: Sequence[str], fault: Exception) -> str:
    """Why the sources of a release, laid out in a folder, could not be loaded, in words to act on."""
    cause = "damaged sources"
    for root in reversed(roots):
        file = folder / root.replace(".", "/") / "__init__.py"
        try:
            ast.parse(decoded(file.read_bytes()))
        except FileNotFoundError:
            cause = f"an empty placeholder release: it holds no {root}"
        except (SyntaxError, ValueError, OSError) as wrong:
            newer = f"a newer Python than {sys.version_info.major}.{sys.version_info.minor}"
            cause = f"{file.relative_to(folder)} has an edit that is not finished, or code for {newer}: {wrong}"
    return f"{wheel} cannot be read: {fault}. Likely cause: {cause}. Next step: choose another release."


def _write(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        raw.decode("ascii")
    except UnicodeDecodeError:
        with suppress(SyntaxError, ValueError):  # whoever reads it will say so
            raw = decoded(raw).encode()
    path.write_bytes(raw)
