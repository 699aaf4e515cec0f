"""`nox -s lock`, the one writer of pins and locks: everything is made first, compared, and then written at once.

uv makes the locks; the index is the user's own, as uv or pip is configured.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name

from ..catalog.images import Image
from ..environments.fits import StackFit
from ..errors import Exit, InfrastructureFailed, NoEnvironment
from ..evidence.receipt import write_whole
from ..evidence.values import Frozen
from . import locks
from .pins import FILE, PinLine, PinNews, check_pins, pin_bases
from .plan import BAKE_FILE, ImageRows, find_images
from .tools import ImageRefused, call, read_pip_settings, require_program

_LIMIT_S: Final = 600.0
# What uv says of an index that does not answer (seen: uv 0.9 to 0.11).
_SILENT: Final = re.compile(r"Failed to fetch|error sending request|dns error|HTTP status|timed out|Could not connect")
_SETTINGS: Final = {"index-url": "UV_DEFAULT_INDEX", "find-links": "UV_FIND_LINKS"}


class LockLine(Frozen):
    """A lock: `stale` is why it has to be written, `refusal` why it must not be."""

    target: str
    file: str
    stale: str
    count: int
    refusal: str = ""


class LockResult(Frozen):
    """The state of pins and locks; `refusals` are why nothing was written."""

    tool: str
    check: bool
    pins: tuple[PinLine, ...] = ()
    locks: tuple[LockLine, ...] = ()
    fits: tuple[StackFit, ...] = ()
    refusals: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def exit(self) -> Exit:
        """Closed where something is refused or stale, infrastructure where a base has no digest."""
        missing = any(line.news is PinNews.MISSING for line in self.pins)
        stale = self.check and (missing or any(line.stale for line in self.locks))
        if self.refusals or stale or any(fit.refused for fit in self.fits):
            return Exit.CLOSED
        return Exit.INFRASTRUCTURE if missing else Exit.OPEN


@dataclass(frozen=True)
class LockOptions:
    """Arguments of the verb; `upgrade` has "*" for all."""

    targets: tuple[str, ...] = ()
    check: bool = False
    accept: frozenset[str] = frozenset()
    upgrade: tuple[str, ...] = ()

    @property
    def upgrades(self) -> set[str]:
        """Names of packages to take anew, as an index spells them."""
        return {name if name == "*" else str(canonicalize_name(name)) for name in self.upgrade}


def run_lock(rows: ImageRows, options: LockOptions, report: Callable[[str], None] = lambda _: None) -> LockResult:
    """Check, or make and write, pins and locks.

    Raises:
        ImageRefused: an argument, the matrix or the file of pins is wrong.
        NoEnvironment: uv is missing, or finds no solution.
        InfrastructureFailed: the index does not answer.
        OSError: the disk is full.
        RegistryLies: a registry returns no image index.
    """
    started = time.monotonic()
    images = find_images(rows.images, options.targets)
    if options.check and (options.accept or options.upgrade):
        raise ImageRefused("--check takes neither --accept nor --upgrade. Next step: leave it out.")
    result = _check(rows, images) if options.check else _write(rows, options, images, report)
    return result.model_copy(update={"seconds": round(time.monotonic() - started, 1)})


def _list_others(rows: ImageRows) -> dict[str, tuple[str, list[Any]]]:
    """The two locks that are of no image: name -> file, and what it follows from."""
    row, project = rows.images.sessions, locks.read_project(rows.root)
    groups = project.get("dependency-groups", {})
    chosen = {group: groups.get(group) for group in row.groups}
    sessions = [row.python, row.groups, row.without, project["project"]["dependencies"], chosen]
    releases = [rows.images.releases.distribution, *(stack.te for stack in rows.catalog.stacks)]
    return {"sessions": (row.lock, sessions), "releases": (rows.images.releases.lock, releases)}


def _hash(inputs: list[Any]) -> str:
    return sha256(repr(inputs).encode()).hexdigest()


def _render_bake(rows: ImageRows) -> str:
    """The bake file; empty while a lock is older than the matrix, which is reported as that."""
    try:
        return rows.render_bake()
    except ImageRefused:
        return ""


def _check(rows: ImageRows, images: Iterable[Image]) -> LockResult:
    """Pins and locks, compared with the matrix; no registry and no index is read."""
    lines, fits, project = list[LockLine](), list[StackFit](), locks.read_project(rows.root)
    for image in images:
        stale, count, file = "", 0, rows.root / image.lock
        try:
            lock = locks.read_image_lock(file)
            locks.check_lock(lock, locks.gather_inputs(rows.images, image, project), file)
            count = len(lock.packages)
            fits += [rows.judge(image, lock)] if image.te else []
        except ImageRefused as refusal:
            stale = str(refusal)
        lines.append(LockLine(target=image.target, file=image.lock, stale=stale, count=count))
    for name, (lock_file, inputs) in _list_others(rows).items():
        text = read_file(rows.root / lock_file)
        stale = "" if locks.read_inputs(text) == _hash(inputs) else "is older than the matrix, or missing"
        stale = stale or ("" if locks.is_sealed(text) else locks.EDITED)
        lines.append(
            LockLine(target=name, file=lock_file, stale=stale, count=sum(1 for _ in locks.list_packages(text)))
        )
    refusals = []
    if (bake := _render_bake(rows)) and read_file(rows.root / BAKE_FILE) != bake:
        refusals.append(
            f"{BAKE_FILE} does not match the matrix, the pins and the locks. Likely cause: one of them was edited by "
            "hand. Next step: `nox -s lock` rewrites it; review the difference and commit it."
        )
    pins = check_pins(rows.images, rows.pins)
    return LockResult(
        tool=rows.tool, check=True, pins=pins, locks=tuple(lines), fits=tuple(fits), refusals=tuple(refusals)
    )


def _write(rows: ImageRows, options: LockOptions, images: Iterable[Image], report: Callable[[str], None]) -> LockResult:
    files, lines, fits = dict[str, str](), list[LockLine](), list[StackFit]()
    pins: tuple[PinLine, ...] = ()
    if not options.targets:
        report("reading the digests of bases from registries")
        today = datetime.now(UTC).date().isoformat()
        kept, pins = pin_bases(rows.images, rows.pins, today, options.accept, rows.variables)
        files[FILE] = kept.render()
    for image in images:
        report(f"locking the packages of {image.target}")
        inputs = locks.gather_inputs(rows.images, image, locks.read_project(rows.root))
        files[image.lock] = _lock_image(rows, options, inputs, image)
        lock = locks.parse_lock(files[image.lock], rows.root / image.lock)
        locks.check_lock(lock, inputs, rows.root / image.lock)
        fits += [rows.judge(image, lock)] if image.te else []
        lines.append(_compare(rows, options, image.target, image.lock, files[image.lock]))
    for name, (file, wanted) in _list_others(rows).items() if not options.targets else ():
        report(f"locking {name}")
        files[file] = (_lock_sessions if name == "sessions" else _lock_releases)(rows, options, wanted)
        lines.append(_compare(rows, options, name, file, files[file]))
    refusals = tuple(filter(None, [*(pin.refusal for pin in pins), *(line.refusal for line in lines)]))
    result = LockResult(tool=rows.tool, check=False, pins=pins, locks=tuple(lines), fits=tuple(fits), refusals=refusals)
    if result.exit is not Exit.OPEN:
        return result
    written = write_changed(rows.root, files)
    if bake := _render_bake(rows):
        written += write_changed(rows.root, {BAKE_FILE: bake})
    return result.model_copy(update={"written": written})


def write_changed(root: Path, files: Mapping[str, str]) -> tuple[str, ...]:
    """Write files, each whole or not at all; the names of those that changed. Raises `OSError`."""
    changed = [name for name, text in files.items() if read_file(root / name) != text]
    for name in changed:
        write_whole(root / name, files[name])
    return tuple(changed)


def read_file(file: Path) -> str:
    """The text of a file; empty where it is not there."""
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _compare(rows: ImageRows, options: LockOptions, target: str, file: str, text: str) -> LockLine:
    """Whether a lock changes, and why it must not be written.

    A file that was locked must still exist in the same version: else somebody replaced it.
    """
    before, new = read_file(rows.root / file), dict(locks.list_packages(text))
    stale = "" if before == text else "the matrix, pyproject.toml or the index has changed"
    lost = [
        f"{name} {package.version}"
        for name, package in (locks.list_packages(before) if locks.is_sealed(before) else ())
        if not options.upgrades & {name, "*"} and new.get(name, package).version == package.version
        and package.hashes - new.get(name, package).hashes
    ]  # fmt: skip
    refusal = (
        f"{file}: the index no longer has files of {', '.join(lost)}, which are locked in the same version. Likely "
        "cause: another index than the lock was made from, or a file on the index was replaced. Next step: use the "
        f"index that the lock was made from, or `nox -s lock -- --upgrade {lost[0].split()[0]}`, and commit it."
        if lost
        else ""
    )
    return LockLine(target=target, file=file, stale=stale, count=len(new), refusal=refusal)


def _finish(head: str, inputs: str, body: str) -> str:
    """A lock: its first line, the hash of its inputs, the hash of its content, and its body."""
    return locks.seal_lock(f"# Generated by nox -s lock: {head}; not to be edited\n# inputs: sha256:{inputs}\n{body}")


def _lock_sessions(rows: ImageRows, options: LockOptions, inputs: list[Any]) -> str:
    row, project = rows.images.sessions, rows.root / "pyproject.toml"
    words = [
        *("--universal", "--python-version", row.python),
        *(word for group in row.groups for word in ("--group", f"{project}:{group}")),
        *(word for one in row.without for word in ("--no-emit-package", one)),
        str(project),
    ]
    # pip's folder of wheels has local builds for this machine's platform, and these are for every one.
    own = {"UV_FIND_LINKS": rows.variables.get("UV_FIND_LINKS", "")}
    body = _compile(rows, options, words, {}, read_file(rows.root / row.lock), own)
    return _finish("the versions that nox sessions install, for every platform", _hash(inputs), body)


def _lock_releases(rows: ImageRows, options: LockOptions, inputs: list[Any]) -> str:
    (name, *releases), lines = inputs, list[str]()
    for release in releases:  # one solution has one version of a distribution
        # Without its dependencies uv would read no file, and of a folder of wheels it would know no hash.
        words = ["--generate-hashes", "--python-version", "3.11", "--only-binary", ":all:", "wanted.in"]
        text = _compile(rows, options, words, {"wanted.in": f"{name}=={release}\n"})
        hashes = [f"--hash=sha256:{one}" for one in sorted(dict(locks.list_packages(text))[name].hashes)]
        lines.append(" ".join((f"{name}=={release}", *hashes)))
    head = f"the wheel of every release of {name} in matrix/stacks.toml"
    return _finish(head, _hash(inputs), "".join(f"{line}\n" for line in lines))


def _lock_image(rows: ImageRows, options: LockOptions, inputs: locks.LockInputs, image: Image) -> str:
    """The text of an image's lock, every file with its hash.

    Versions of the lock that is there are kept where they still fit; hashes come from the index each time. What the
    base provides takes part in the solution in its real version, as a wheel without contents.
    """
    known = {name: version for name, version in inputs.provided.items() if version}
    absent = sorted({*inputs.excluded, *(name for name, version in inputs.provided.items() if not version)})
    metadata = [(*pinned.split("=="), list(requires)) for pinned, requires in inputs.compiled.items()]
    # An index has some of what a base provides in the same version, and its requirements are the base's business.
    metadata += [(name, version, []) for name, version in known.items()]
    tables = (
        f"[[dependency-metadata]]\nname = {json.dumps(a)}\nversion = {json.dumps(b)}\nrequires-dist = {json.dumps(c)}\n"
        for a, b, c in metadata
    )
    wanted = [*inputs.requirements, *(f"{name}=={version}" for name, version in known.items())]
    files = {"wanted.in": "\n".join(wanted), "absent.txt": "\n".join(absent), "uv.toml": "\n".join(tables)}
    words = [
        *("--generate-hashes", "--python-version", inputs.python, "--python-platform", inputs.platform),
        *("--excludes", "absent.txt", "--only-binary", ":all:"),
        *(word for one in inputs.compiled for word in ("--no-binary", one.partition("==")[0])),
        *(word for one in known for word in ("--no-emit-package", one)),
        "wanted.in",
    ]
    with tempfile.TemporaryDirectory(prefix="megacpp-stubs-") as shelf:
        for name, version in known.items():
            _write_stub(Path(shelf), name, version)
        given = rows.variables.get("UV_FIND_LINKS") or _ask_pip(rows.variables).get("UV_FIND_LINKS")
        own = {"UV_FIND_LINKS": ",".join(filter(None, (shelf, given or ",".join(image.links))))}
        body = _compile(rows, options, words, files, read_file(rows.root / image.lock), own)
    head = f"{inputs.target}, Python {inputs.python}, {inputs.platform}, over {inputs.base}"
    return _finish(head, inputs.hash, body)


def _compile(
    rows: ImageRows, options: LockOptions, words: list[str], files: Mapping[str, str], before: str = "",
    own: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Run `uv pip compile` in a folder of its own, and return the lock without a head.

    Args:
        files: name -> text, put into that folder.
        before: text of the lock that is there, whose versions are kept.
        own: variables in place of the caller's.

    Raises:
        NoEnvironment: uv is missing, or finds no solution.
        InfrastructureFailed: the index does not answer.
    """
    uv, upgrades = require_program("uv", rows.variables), options.upgrades
    # An interpreter is nothing that uv shall fetch; what is locked has no need of one.
    fixed = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    variables = {**_ask_pip(rows.variables), **rows.variables, **(own or {}), **fixed}
    with tempfile.TemporaryDirectory(prefix="megacpp-lock-") as name:
        folder = Path(name)
        kept = [(one, package.version) for one, package in locks.list_packages(before) if not upgrades & {one, "*"}]
        texts = {**files, "out.txt": "".join(f"{one}=={version}\n" for one, version in kept)}
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
        command = [uv, "pip", "compile", "--quiet", "--directory", name, "--no-header", "--no-annotate"]
        done = call([*command, "--output-file", str(folder / "out.txt"), *words], variables, limit_s=_LIMIT_S)
        if done.code:
            raise (InfrastructureFailed if _SILENT.search(done.errors) else NoEnvironment)(
                f"uv finds no lock: {done.errors.strip()[-2000:]}. Likely cause: the index does not answer, or no "
                "release of it fits what matrix/images.toml and the base ask for. Next step: read uv's words; behind a "
                "mirror set UV_DEFAULT_INDEX, with a folder of wheels UV_FIND_LINKS."
            )
        return (folder / "out.txt").read_text(encoding="utf-8")


def _write_stub(shelf: Path, name: str, version: str) -> None:
    """A wheel without contents, by which the resolver knows what a base has."""
    stem = f"{canonicalize_name(name).replace('-', '_')}-{version}"
    with zipfile.ZipFile(shelf / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def _ask_pip(variables: Mapping[str, str]) -> dict[str, str]:
    """Index and wheel folders of pip as uv's variables, where uv has none itself."""
    wanted = {name: variable for name, variable in _SETTINGS.items() if not variables.get(variable)}
    found = read_pip_settings(variables) if wanted else {}
    return {variable: ",".join(found[name]) for name, variable in wanted.items() if found.get(name)}
