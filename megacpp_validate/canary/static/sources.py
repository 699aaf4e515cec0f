"""Release sources: the pure-Python wheel, fetched by the user's own pip, kept by hash.

pip is asked to do the fetching because it knows the user's index, mirrors, proxies and certificates. What it
delivers is moved into the cache in one step and checked against its hash at every use.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import platformdirs
from packaging.version import InvalidVersion, Version

from ...errors import NoEnvironment, WrongArguments
from ...evidence.receipt import write_whole
from ...process import Ended, run_command
from .findings import ReleaseSource
from .release import ROOTS, Release

DISTRIBUTION = "transformer-engine"
FETCH_LIMIT_S = 90.0
# Wheels of NVIDIA's libraries name nearly every glibc up to 2.39; one that is left out would hide its release.
LINUX = (
    "--only-binary=:all:", "--implementation", "cp", "--python-version", "3.12",
    *(word for minor in range(5, 45) for word in ("--platform", f"manylinux_2_{minor}_x86_64")),
    "--platform", "manylinux1_x86_64", "--platform", "manylinux2014_x86_64", "--platform", "any",
)  # fmt: skip
CACHE_VARIABLE = "MEGACPP_CACHE_DIR"
_NO_ANSWER = re.compile(
    r"connection|timed? ?out|name resolution|unreachable|refused|ssl|proxy|temporary failure|max retries|"
    r"file or directory|\b40[137]\b|\b50\d\b",
    re.IGNORECASE,
)
_NO_PACKAGE = re.compile(r"wheel .* is invalid|not a zip|has inconsistent|do not match the hash", re.IGNORECASE)


class SourceUnavailable(NoEnvironment):
    """The sources of a release cannot be had; the text says what was wanted, why not, and what to do."""


class UnknownRelease(WrongArguments):
    """There is no such release on the index; the text names the nearest ones."""


class Sources:
    """Fetches and keeps release sources.

    Args:
        cache: folder for wheels and for what was read from them; None is the user's cache folder, or the one
            that MEGACPP_CACHE_DIR names.
    """

    def __init__(self, cache: Path | None = None) -> None:
        named = os.environ.get(CACHE_VARIABLE, "")
        self.cache = cache or (Path(named) if named else Path(platformdirs.user_cache_dir("megacpp-validate")))
        self._listed: list[str] | None = None

    def release(self, version: str) -> Release:
        """The sources of one release, ready to be looked up.

        Raises:
            UnknownRelease: the index has no such release.
            SourceUnavailable: the wheel cannot be fetched, or holds no package.
        """
        if not _is_version(version) and Path(version).is_dir():  # ./2.9.0 is a folder, 2.9.0 a release
            return self._from_folder(Path(version))
        wheel, sha256 = self._kept(version) or self._fetch(version)
        source = ReleaseSource(version=version, wheel=wheel.name, sha256=sha256)
        return Release(source, wheel, self.cache / "trees")

    def wheel(self, version: str, distribution: str = DISTRIBUTION) -> Path:
        """The verified pure-Python wheel of a release of Transformer Engine, or of another distribution."""
        return (self._kept(version, distribution) or self._fetch(version, distribution))[0]

    def versions(self) -> list[str]:
        """Every release on the index, oldest first.

        Raises:
            SourceUnavailable: the index does not answer.
        """
        if self._listed is None:
            # What has no wheel that is read here (a source distribution alone) cannot be judged.
            listed, said = self._list("--only-binary=:all:")
            if not listed:
                raise SourceUnavailable(_say_unreachable("the list of Transformer Engine releases", said))
            self._listed = listed
        return self._listed

    def list_releases(self, distribution: str) -> list[str]:
        """Releases of a distribution that have a wheel for Linux on x86_64, oldest first; none where it has none."""
        return self._list(*LINUX, distribution=distribution)[0]

    def find_address(self, distribution: str, version: str) -> str:
        """Where the index has the wheel of a release for Linux on x86_64.

        Raises:
            SourceUnavailable, UnknownRelease: the index has none, or does not answer.
        """
        with tempfile.TemporaryDirectory(prefix="megacpp-wheel-") as folder:
            report = Path(folder, "report.json")
            done = self._pip(
                "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", str(report), *LINUX,
                "--target", str(Path(folder, "none")), f"{distribution}=={version}", what=f"{distribution} {version}",
            )  # fmt: skip
            try:
                (row,) = json.loads(report.read_text(encoding="utf-8"))["install"]
                return str(row["download_info"]["url"])
            except (OSError, ValueError, KeyError, TypeError) as fault:
                raise self._explain(version, distribution, done) from fault

    def _list(self, *options: str, distribution: str = DISTRIBUTION) -> tuple[list[str], str]:
        """Releases on the index, oldest first, and what pip said beside them."""
        asked = ("index", "versions", distribution, "--ignore-requires-python", *options)
        done = self._pip(*asked, what="the list of releases")
        match = None if done.code else re.search(r"Available versions: (.+)", done.words)
        return sort_versions(match[1].split(",")) if match else [], done.errors

    def _from_folder(self, folder: Path) -> Release:
        """A folder that holds `transformer_engine/`: a source tree or an unpacked wheel."""
        if not (folder / ROOTS[0].replace(".", "/") / "__init__.py").is_file():
            raise SourceUnavailable(
                f"{folder} holds no {ROOTS[0]}. Likely cause: the path names the package itself, not the folder above "
                "it. Next step: give the folder in which `transformer_engine/` lies."
            )
        source = ReleaseSource(version=str(folder), wheel="a folder", sha256="")
        return Release(source, folder)

    # --- the cache ----------------------------------------------------------------------------------------

    def _kept(self, version: str, distribution: str = DISTRIBUTION) -> tuple[Path, str] | None:
        """A wheel from the cache that still has the hash it was stored with; a damaged one is dropped."""
        record = self._record(version, distribution)
        try:
            told = json.loads(record.read_text(encoding="utf-8"))
            name, sha256 = str(told["wheel"]), str(told["sha256"])
            wheel = self.cache / "wheels" / sha256 / name
            if Path(name).name == name and Version(name.split("-")[1]) == Version(version) and _sha256(wheel) == sha256:
                return wheel, sha256
        except (OSError, ValueError, LookupError, TypeError):
            pass
        return None

    def _record(self, version: str, distribution: str) -> Path:
        return self.cache / "releases" / f"{distribution}-{version}.json"

    def _fetch(self, version: str, distribution: str = DISTRIBUTION) -> tuple[Path, str]:
        if not _is_version(version):
            raise UnknownRelease(
                f"{version!r} is not a release: neither a version such as 2.17.1 nor a folder that holds "
                "transformer_engine/. Next step: `--list` shows the releases on the index."
            )
        try:
            return self._fetch_and_keep(version, distribution)
        except OSError as fault:
            raise SourceUnavailable(
                f"the cache folder {self.cache} cannot be written: {fault.strerror or fault}. Likely cause: it belongs "
                f"to another user, or the disk is full or read-only. Next step: set {CACHE_VARIABLE} to a folder of "
                "yours."
            ) from fault

    def _fetch_and_keep(self, version: str, distribution: str) -> tuple[Path, str]:
        self.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.cache, prefix="fetch-") as name:
            folder = Path(name)
            done = self._pip(
                "download", "-vv", "--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--no-cache-dir",
                "--dest", str(folder), f"{distribution}=={version}", what=f"{distribution} {version}",
            )  # fmt: skip
            wheels = list(folder.glob("*.whl"))
            if done.code or not wheels:
                raise self._explain(version, distribution, done)
            wheel, sha256 = wheels[0], _sha256(wheels[0])
            place = self.cache / "wheels" / sha256 / wheel.name
            place.parent.mkdir(parents=True, exist_ok=True)
            wheel.replace(place)
        write_whole(self._record(version, distribution), json.dumps({"sha256": sha256, "wheel": place.name}))
        return place, sha256

    # --- pip ----------------------------------------------------------------------------------------------

    def _pip(self, *arguments: str, what: str) -> Ended:
        command = [sys.executable, "-m", "pip", *arguments]
        command += ["--disable-pip-version-check", "--no-input", "--retries", "1"]
        ended = run_command(command, limit_s=FETCH_LIMIT_S, apart=True)
        if ended.code is None:
            raise SourceUnavailable(
                f"{what} was not there after {FETCH_LIMIT_S:.0f} s. Likely cause: the package index does not answer "
                "from here. Next step: look at `pip config list`, or run again where the index can be reached."
            )
        return ended

    def _explain(self, version: str, distribution: str, done: Ended) -> Exception:
        offered = re.search(r"from versions: ([^)]*)\)", done.errors)
        names = [n.strip() for n in (offered[1].split(",") if offered else []) if n.strip() not in {"", "none"}]
        if not names:
            remarks = [line for line in done.words.splitlines() if "Could not fetch URL" in line]  # at -vv only
            return SourceUnavailable(_say_unreachable(f"{distribution} {version}", "\n".join([*remarks, done.errors])))
        near = ", ".join(nearest(version, names))
        return UnknownRelease(
            f"there is no wheel of {distribution} {version} on the index. Nearest: {near}. Next step: choose one of "
            "them; `--list` shows all."
        )


def sort_versions(names: Sequence[str]) -> list[str]:
    """Version names, oldest first; what is no version is left out."""
    known: list[tuple[Version, str]] = []
    for name in names:
        try:
            known.append((Version(name.strip()), name.strip()))
        except InvalidVersion:
            continue
    return [name for _, name in sorted(known)]


def nearest(version: str, names: Sequence[str]) -> list[str]:
    """Up to four releases around the requested one."""
    ordered = sort_versions(names)
    try:
        wanted = Version(version)
    except InvalidVersion:
        return list(reversed(ordered))[:4]
    below = [name for name in ordered if Version(name) < wanted][-2:]
    above = [name for name in ordered if Version(name) > wanted][:2]
    return [*below, *above]


def _is_version(name: str) -> bool:
    return bool(sort_versions([name]))


def _say_unreachable(what: str, said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    unanswered = [line for line in lines if _NO_ANSWER.search(line)]
    if any(_NO_PACKAGE.search(line) for line in errors):
        cause = "a mirror or proxy that serves an error page in place of the wheel"
    elif unanswered:
        cause = "the package index cannot be reached from here"
    else:
        cause = "the index has no such package"
    first = (errors or unanswered or lines or ["nothing"])[0][:300]
    return (
        f"{what} could not be fetched. pip said: {first} Likely cause: {cause}. Next step: look at `pip config list`; "
        "what was fetched before is still in the cache and works offline."
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
