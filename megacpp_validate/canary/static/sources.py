"""Release sources: the pure-Python wheel, fetched by the user's own pip, kept by hash.

pip is asked to do the fetching because it knows the user's index, mirrors, proxies and certificates. What it
delivers is moved into the cache in one step and checked against its hash at every use.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path

import platformdirs
from packaging.utils import canonicalize_name
from packaging.version import Version

from ...errors import NoEnvironment, writing_to
from ...process import Ended, run_command
from ..package_index import UnknownRelease, is_version, nearest, say_unreachable, sort_versions
from .findings import ReleaseSource
from .library import TE, Library
from .release import Release

FETCH_LIMIT_S = 90.0
# Wheels of NVIDIA's libraries name nearly every glibc up to 2.39; one that is left out would hide its release.
LINUX = (
    "--only-binary=:all:", "--implementation", "cp", "--python-version", "3.12",
    *(word for minor in range(5, 45) for word in ("--platform", f"manylinux_2_{minor}_x86_64")),
    "--platform", "manylinux1_x86_64", "--platform", "manylinux2014_x86_64", "--platform", "any",
)  # fmt: skip
CACHE_VARIABLE = "MEGACPP_CACHE_DIR"


class SourceUnavailable(NoEnvironment):
    """The sources of a release cannot be had; the text says what was wanted, why not, and what to do."""


class Sources:
    """Fetches and keeps release sources.

    Args:
        cache: folder for wheels and for what was read from them; None is the user's cache folder, or the one
            that MEGACPP_CACHE_DIR names.
        library: whose releases.
    """

    def __init__(self, cache: Path | None = None, library: Library = TE) -> None:
        self.library = library
        named = os.environ.get(CACHE_VARIABLE, "")
        self.cache = cache or (Path(named) if named else Path(platformdirs.user_cache_dir("megacpp-validate")))

    def release(self, version: str) -> Release:
        """The sources of one release, ready to be looked up.

        Raises:
            UnknownRelease: the index has no such release.
            SourceUnavailable: the wheel cannot be fetched, or holds no package.
        """
        if not is_version(version) and Path(version).is_dir():  # ./2.9.0 is a folder, 2.9.0 a release
            return self._from_folder(Path(version))
        wheel = self.wheel(version)
        source = ReleaseSource(version=version, wheel=wheel.name, sha256=wheel.parent.name)
        return Release(source, wheel, self.cache / "trees", self.library)

    def wheel(self, version: str, distribution: str = "") -> Path:
        """The verified wheel of a release of the library, or of another distribution, for Linux on x86_64."""
        distribution = distribution or self.library.distributions[0]
        return self._kept(version, distribution) or self._fetch(version, distribution)

    def versions(self) -> list[str]:
        """Every release on the index, oldest first.

        Raises:
            SourceUnavailable: the index does not answer.
        """
        listed, said = self._list(self.library.distributions[0])
        if not listed:
            raise SourceUnavailable(say_unreachable(f"the list of {self.library.title} releases", said))
        return listed

    def list_releases(self, distribution: str) -> list[str]:
        """Releases of a distribution that have a wheel for Linux on x86_64, oldest first; none where it has none."""
        return self._list(distribution)[0]

    def download(self, version: str, distribution: str, folder: Path, limit_s: float = 0.0) -> Path:
        """Download the wheel of a release for Linux on x86_64 into a folder.

        Raises:
            SourceUnavailable, UnknownRelease: the index has none, or does not answer.
        """
        done = self._pip(
            "download", "-vv", "--no-deps", *LINUX, "--ignore-requires-python", "--no-cache-dir", "--dest", str(folder),
            f"{distribution}=={version}", what=f"{distribution} {version}", limit_s=limit_s or FETCH_LIMIT_S,
        )  # fmt: skip
        wheels = list(folder.glob("*.whl"))
        if done.code or not wheels:
            raise self._explain(version, distribution, done)
        return wheels[0]

    def _list(self, distribution: str) -> tuple[list[str], str]:
        """Releases on the index, oldest first, and what pip said beside them."""
        command = ("index", "versions", distribution, "--ignore-requires-python", *LINUX)
        done = self._pip(*command, what="the releases", limit_s=FETCH_LIMIT_S)
        match = None if done.code else re.search(r"Available versions: (.+)", done.words)
        return sort_versions(match[1].split(",")) if match else [], done.errors

    def _from_folder(self, folder: Path) -> Release:
        """A folder that holds the package: a source tree, an unpacked wheel or `site-packages`."""
        root = self.library.roots[0]
        place = folder / root.replace(".", "/")
        if not (place / "__init__.py").is_file() and not place.with_suffix(".py").is_file():
            raise SourceUnavailable(
                f"{folder} holds no {root}. Likely cause: the path names the package itself, not the folder above "
                f"it. Next step: give the folder in which `{self.library.package}/` lies."
            )
        named = (path.stem.rpartition("-") for path in folder.glob("*-*.dist-info"))
        found = (version for name, _, version in named if canonicalize_name(name) in self.library.distributions)
        source = ReleaseSource(version=next(found, str(folder)), wheel=str(folder), sha256="")
        return Release(source, folder, library=self.library)

    # --- the cache ----------------------------------------------------------------------------------------

    def _kept(self, version: str, distribution: str) -> Path | None:
        """A wheel from the cache that still has the hash it was stored with; a damaged one is dropped."""
        wheels = (self.cache / "wheels" / f"{distribution}-{version}").glob("*/*-*-*.whl")
        same = (wheel for wheel in wheels if Version(wheel.name.split("-")[1]) == Version(version))
        return next((wheel for wheel in same if _sha256(wheel) == wheel.parent.name), None)

    def _fetch(self, version: str, distribution: str) -> Path:
        if not is_version(version):
            raise UnknownRelease(
                f"{version!r} is not a release: neither a version such as 2.17.1 nor a folder that holds "
                f"{self.library.package}/. Next step: `--list` shows the releases on the index."
            )
        with writing_to(self.cache, "wheels", CACHE_VARIABLE):
            self.cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.cache, prefix="fetch-") as name:
                wheel = self.download(version, distribution, Path(name))
                place = self.cache / "wheels" / f"{distribution}-{version}" / _sha256(wheel) / wheel.name
                place.parent.mkdir(parents=True, exist_ok=True)
                return wheel.replace(place)

    # --- pip ----------------------------------------------------------------------------------------------

    def _pip(self, *arguments: str, what: str, limit_s: float) -> Ended:
        command = [sys.executable, "-m", "pip", *arguments]
        command += ["--disable-pip-version-check", "--no-input", "--retries", "1"]
        ended = run_command(command, limit_s=limit_s, apart=True)
        if ended.code is None:
            raise SourceUnavailable(
                f"{what} was not there after {limit_s:.0f} s. Likely cause: the package index does not answer "
                "from here. Next step: look at `pip config list`, or run again where the index can be reached."
            )
        return ended

    def _explain(self, version: str, distribution: str, done: Ended) -> Exception:
        offered = re.search(r"from versions: ([^)]*)\)", done.errors)
        names = [n.strip() for n in (offered[1].split(",") if offered else []) if n.strip() not in {"", "none"}]
        if not names:
            remarks = [line for line in done.words.splitlines() if "Could not fetch URL" in line]  # at -vv only
            return SourceUnavailable(say_unreachable(f"{distribution} {version}", "\n".join([*remarks, done.errors])))
        near = ", ".join(nearest(version, names))
        return UnknownRelease(
            f"there is no wheel of {distribution} {version} on the index. Nearest: {near}. Next step: choose one of "
            "them; `--list` shows all."
        )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
