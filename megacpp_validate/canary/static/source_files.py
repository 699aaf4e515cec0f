"""The Python files of one release, in a wheel or in a folder, read as Python itself would read them."""

from __future__ import annotations

import ast
import io
import re
import tempfile
import tokenize
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

_IMPORT = re.compile(r"^\s*(?:from\s+([.\w]+)\s+)?import\s+(\([^)]*|(?:\\\n|[^\n])*)", re.MULTILINE)


class SourceFiles:
    """The files of a release by their paths relative to the wheel's root.

    Args:
        wheel: the wheel, or a folder that holds the package.
        package: its name; of a single module, too.
    """

    def __init__(self, wheel: Path, package: str) -> None:
        self._wheel, self._package = wheel, package

    @cached_property
    def names(self) -> list[str]:
        """Every Python file of the package."""
        if not self._wheel.is_dir():
            return sorted(self._packed)
        below = (self._wheel / self._package).rglob("*.py")
        files = (path for path in (self._wheel / f"{self._package}.py", *below) if path.is_file())
        return sorted(path.relative_to(self._wheel).as_posix() for path in files)

    @cached_property
    def _packed(self) -> dict[str, bytes]:
        """The files of a wheel: some 4 MB, read at once, because opening it for each takes longer."""
        with zipfile.ZipFile(self._wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            return {name: archive.read(name) for name in names if name[:-3].partition("/")[0] == self._package}

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
                place, raw = root / name, self._raw(name)
                place.parent.mkdir(parents=True, exist_ok=True)
                with suppress(SyntaxError, ValueError):  # whoever reads it will say so
                    raw = decoded(raw).encode()
                place.write_bytes(raw)
            yield root


def decoded(raw: bytes) -> str:
    """A source file's bytes as text: by its byte order mark or its coding line, else as UTF-8.

    Raises:
        SyntaxError, ValueError: they are no text in that encoding.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding)


def imports_in(text: str, package: str) -> set[str]:
    """Modules that a file of a package imports anywhere, and what it takes from them, by their dotted names."""
    found = set[str]()
    for module, names in _IMPORT.findall(text):
        level, own = len(module) - len(module.lstrip(".")), package.split(".")
        base = [*own[: len(own) + 1 - level], module.lstrip(".")] if level else [module]
        named = re.findall(r"[\w.*]+", re.sub(r"#.*|\bas\s+\w+", "", names))
        found |= {".".join(filter(None, (*base, name))) for name in ("", *named)}
    return found - {""}


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
            cause = f"{file.relative_to(folder)} has an edit that is not finished, or code for a newer Python: {wrong}"
    return f"{wheel} cannot be read: {fault}. Likely cause: {cause}. Next step: choose another release."
