"""`nox -s lock`, the one writer of pins and locks: everything is made first, compared, and then written at once.

uv makes the locks; the index is the user's own, as uv or pip is configured.
"""

from __future__ import annotations

import json
import re
import sys
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
from ..evidence.values import Frozen
from ..evidence.whole_file import write_whole
from .locks import (
    EDITED,
    LockInputs,
    check_lock,
    gather_inputs,
    is_sealed,
    list_packages,
    parse_lock,
    read_image_lock,
    read_inputs,
    read_project,
    seal_lock,
)
from .pins import FILE, Pin, PinLine, PinNews, check_pins, pin_bases, render_pins
from .plan import BAKE_FILE, ImageRows, find_images
from .tools import ImageRefused, call, read_pip_settings, require_program

SESSIONS: Final = "sessions"
RELEASES: Final = "releases"

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
    """The answer: `refusals` are why nothing was written."""

    tool: str
    check: bool
    pins: tuple[PinLine, ...] = ()
    locks: tuple[LockLine, ...] = ()
    fits: tuple[StackFit, ...] = ()
    refusals: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def stale(self) -> bool:
        """Whether a file is not what the matrix says."""
        return any(line.stale for line in self.locks) or any(line.news is PinNews.MISSING for line in self.pins)

    @property
    def exit(self) -> Exit:
        """Closed where something is refused or stale, infrastructure where a base has no digest."""
        if self.refusals or (self.check and self.stale) or any(fit.refused for fit in self.fits):
            return Exit.CLOSED
        silent = any(line.news is PinNews.MISSING for line in self.pins)
        return Exit.INFRASTRUCTURE if silent else Exit.OPEN


@dataclass(frozen=True)
class LockOptions:
    """Arguments of the verb; `upgrade` has "*" for all, `only` is "pins", "locks" or empty."""

    targets: tuple[str, ...] = ()
    check: bool = False
    only: str = ""
    accept: frozenset[str] = frozenset()
    upgrade: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Context:
    """What every lock is made with."""

    rows: ImageRows
    project: Mapping[str, Any]
    options: LockOptions

    def read(self, name: str) -> str:
        """The text of a file of the project."""
        return read_file(self.rows.root / name)

    def lists(self) -> tuple[tuple[str, str, list[Any]], ...]:
        """The two locks that are of no image: name, file, and what they follow from."""
        images, catalog = self.rows.images, self.rows.catalog
        row, groups = images.sessions, self.project.get("dependency-groups", {})
        chosen = {group: groups.get(group) for group in row.groups}
        sessions = [row.python, row.groups, row.without, self.project["project"]["dependencies"], chosen]
        releases = [images.releases.distribution, *(stack.te for stack in catalog.stacks)]
        return (SESSIONS, row.lock, sessions), (RELEASES, images.releases.lock, releases)

    def render_bake(self) -> str:
        """The bake file; empty while a lock is older than the matrix, which is reported as that."""
        try:
            return self.rows.render_bake()
        except ImageRefused:
            return ""


def run_lock(rows: ImageRows, options: LockOptions, say: Callable[[str], None] = lambda _: None) -> LockResult:
    """Check, or make and write, pins and locks.

    Raises:
        ImageRefused: an argument, the matrix or the file of pins is wrong.
        NoEnvironment: uv is missing, or finds no solution.
        InfrastructureFailed: the index does not answer, or the disk is full.
        RegistryLies: a registry gives other bytes than the digest.
    """
    started = time.monotonic()
    chosen = find_images(rows.images, options.targets)
    known = {name for base in rows.images.base for name in (base.id, base.tag)}
    if unknown := sorted(options.accept - known):
        raise ImageRefused(
            f"--accept names {', '.join(unknown)}, and no base of matrix/images.toml has such a tag. Next step: choose "
            f"one of {', '.join(sorted(known))}."
        )
    if options.check and (options.accept or options.upgrade):
        raise ImageRefused("--check writes nothing, and takes neither --accept nor --upgrade. Next step: leave it out.")
    context = _Context(rows, read_project(rows.root), options)
    images = chosen if options.only != "pins" else ()
    result = _check(context, images) if options.check else _write(context, images, say)
    return result.model_copy(update={"seconds": round(time.monotonic() - started, 1)})


def _hash(inputs: list[Any]) -> str:
    return sha256(repr(inputs).encode()).hexdigest()


def _check(context: _Context, images: Iterable[Image]) -> LockResult:
    """Pins and locks, compared with the matrix; no registry and no index is asked."""
    rows, only = context.rows, context.options.only
    lines, fits, pins = list[LockLine](), list[StackFit](), tuple[PinLine, ...]()
    if only != "locks":
        pins = check_pins(rows.images, rows.pins)
    for image in images:
        stale, count, file = "", 0, rows.root / image.lock
        try:
            lock = read_image_lock(file)
            check_lock(lock, gather_inputs(rows.images, image, context.project), file)
            count = len(lock.packages)
            fits += [rows.judge(image, lock)] if image.te else []
        except ImageRefused as refusal:
            stale = str(refusal)
        lines.append(LockLine(target=image.target, file=image.lock, stale=stale, count=count))
    for name, lock_file, inputs in context.lists() if only != "pins" else ():
        text = context.read(lock_file)
        stale = "" if read_inputs(text) == _hash(inputs) else "it is older than the matrix, or not there"
        stale = stale or ("" if is_sealed(text) else f"it {EDITED}")
        lines.append(LockLine(target=name, file=lock_file, stale=stale, count=sum(1 for _ in list_packages(text))))
    refusals = [line.refusal for line in pins]
    if (bake := context.render_bake()) and context.read(BAKE_FILE) != bake:
        refusals.append(
            f"{BAKE_FILE} is not what the matrix, the pins and the locks say. Likely cause: one of them was edited by "
            "hand. Next step: `nox -s lock` rewrites it; review the difference and commit it."
        )
    return LockResult(
        tool=rows.tool, check=True, pins=pins, locks=tuple(lines), fits=tuple(fits),
        refusals=tuple(filter(None, refusals)),
    )  # fmt: skip


def _write(context: _Context, images: Iterable[Image], say: Callable[[str], None]) -> LockResult:
    rows, options, root = context.rows, context.options, context.rows.root
    before, files, lines, fits = rows.pins, dict[str, str](), list[LockLine](), list[StackFit]()
    pins: tuple[tuple[Pin, PinLine], ...] = ()
    if options.only != "locks" and not options.targets:
        say("reading the digests of bases from registries")
        today = datetime.now(UTC).date().isoformat()
        pins = pin_bases(rows.images, before, today, options.accept, rows.variables)
    for image in images:
        say(f"locking the packages of {image.target}")
        inputs = gather_inputs(rows.images, image, context.project)
        files[image.lock] = _lock_image(inputs, image, context)
        lock = parse_lock(files[image.lock], root / image.lock)
        check_lock(lock, inputs, root / image.lock)
        fits += [rows.judge(image, lock)] if image.te else []
        lines.append(_compare(context, image.target, image.lock, files[image.lock]))
    for name, file, _ in context.lists() if options.only != "pins" and not options.targets else ():
        say(f"locking the {name} of nox and Transformer Engine")
        files[file] = _lock_sessions(context) if name == SESSIONS else _lock_releases(context)
        lines.append(_compare(context, name, file, files[file]))
    result = LockResult(
        tool=rows.tool, check=False, pins=tuple(line for _, line in pins), locks=tuple(lines), fits=tuple(fits),
        refusals=tuple(filter(None, [*(line.refusal for _, line in pins), *(one.refusal for one in lines)])),
    )  # fmt: skip
    if result.exit is Exit.CLOSED:
        return result
    if any(line.news is not PinNews.MISSING for _, line in pins):
        kept = {pin.base: pin for pin in before.pins if pin.base in {base.id for base in rows.images.base}}
        files[FILE] = render_pins(tuple((kept | {pin.base: pin for pin, _ in pins}).values()))
    written = write_changed(root, files)
    if bake := context.render_bake():
        written += write_changed(root, {BAKE_FILE: bake})
    return result.model_copy(update={"written": written})


def write_changed(root: Path, files: Mapping[str, str]) -> tuple[str, ...]:
    """Write files, each whole or not at all; those that changed.

    Raises:
        InfrastructureFailed: a file cannot be written.
    """
    changed = [name for name, text in files.items() if read_file(root / name) != text]
    try:
        for name in changed:
            write_whole(root / name, files[name])
    except OSError as fault:
        raise InfrastructureFailed(
            f"pins and locks cannot be written: {fault}. Likely cause: the disk is full, or {root / 'containers'} is "
            "not writable by this user. Next step: make room, or run it as its owner; the same command writes what is "
            "missing."
        ) from fault
    return tuple(changed)


def read_file(file: Path) -> str:
    """The text of a file; empty where it is not there."""
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _compare(context: _Context, target: str, file: str, text: str) -> LockLine:
    """Whether a lock changes, and why it must not be written.

    In the same version a file that was locked must not be gone: somebody put another in its place. What more the index
    has is no difference. A lock that was edited proves nothing.
    """
    before, taken = context.read(file), _read_upgrades(context.options)
    stale = "" if before == text else "the matrix, pyproject.toml or the index has something else now"
    if not is_sealed(before):
        stale = f"it {EDITED}" if before else "it was not there"
    new: dict[tuple[str, str], frozenset[str]] = {}
    for name, package in list_packages(text):
        new[name, package.version] = new.get((name, package.version), frozenset()) | package.hashes
    lost = [
        f"{name} {package.version} (sha256 {', '.join(sorted(one[:12] for one in gone))})"
        for name, package in (list_packages(before) if is_sealed(before) else ())
        if not taken & {name, "*"} and (gone := package.hashes - new.get((name, package.version), package.hashes))
    ]
    refusal = (
        f"{file}: the index no longer has files of {', '.join(lost)}, which are locked in the same version. Likely "
        "cause: another index than the lock was made from, or a file on the index was replaced. Next step: use the "
        "index that the lock was made from; find out what changed, then `nox -s lock -- --upgrade "
        f"{lost[0].split()[0]}`, and commit it."
        if lost
        else ""
    )
    return LockLine(
        target=target, file=file, stale=stale, count=sum(1 for _ in list_packages(text)), refusal=refusal
    )  # fmt: skip


def _read_upgrades(options: LockOptions) -> set[str]:
    return {name if name == "*" else str(canonicalize_name(name)) for name in options.upgrade}


def _finish(head: str, inputs: str, body: str) -> str:
    """A lock: its first line, the hash of its inputs, the hash of its content, and its body."""
    return seal_lock(f"# Generated by nox -s lock: {head}; not to be edited\n# inputs: sha256:{inputs}\n{body}")


def _lock_sessions(context: _Context) -> str:
    (_, _, inputs), _ = context.lists()
    row, project = context.rows.images.sessions, context.rows.root / "pyproject.toml"
    words = [
        *("--universal", "--python-version", row.python),
        *(word for group in row.groups for word in ("--group", f"{project}:{group}")),
        *(word for one in row.without for word in ("--no-emit-package", one)),
        str(project),
    ]
    # pip's folder of wheels has local builds for this machine's platform, and these are for every one.
    own = {"UV_FIND_LINKS": context.rows.variables.get("UV_FIND_LINKS", "")}
    body = _compile(words, {}, context.read(row.lock), own, context, "the constraints of nox sessions")
    head = "the versions that nox sessions install, for every platform"
    return _finish(head, _hash(inputs), body)


def _lock_releases(context: _Context) -> str:
    _, (_, _, inputs) = context.lists()
    (name, *releases), lines = inputs, list[str]()
    for release in releases:  # one solution has one version of a distribution
        # Without its dependencies uv would read no file, and of a folder of wheels it would know no hash.
        words = ["--generate-hashes", "--python-version", "3.11", "--only-binary", ":all:", "wanted.in"]
        wanted = {"wanted.in": f"{name}=={release}\n"}
        text = _compile(words, wanted, "", {}, context, f"the lock of {name} {release}")
        hashes = {one for found, package in list_packages(text) if found == name for one in package.hashes}
        if not hashes:
            raise ImageRefused(
                f"the index gives no hash for {name} {release}. Likely cause: it has no wheel of it. Next step: take "
                "it out of matrix/stacks.toml, or name an index that has it with UV_DEFAULT_INDEX."
            )
        lines.append(" ".join((f"{name}=={release}", *(f"--hash=sha256:{one}" for one in sorted(hashes)))))
    head = f"the wheel of every release of {name} in matrix/stacks.toml"
    return _finish(head, _hash(inputs), "".join(f"{line}\n" for line in lines))


def _lock_image(inputs: LockInputs, image: Image, context: _Context) -> str:
    """The text of an image's lock, every file with its hash.

    Versions of the lock that is there are kept where they still fit. Its hashes are not: they come from the index each
    time, so that a wrong one does not live on. What is provided takes part in the solution in its real version, as a
    wheel without contents, so that what does not fit it is found here.
    """
    known = {name: version for name, version in inputs.provided.items() if version}
    absent = sorted({*inputs.excluded, *(name for name, version in inputs.provided.items() if not version)})
    metadata = [(*pinned.split("=="), list(requires)) for pinned, requires in inputs.compiled.items()]
    # An index has some of what a base provides in the same version, and its requirements are the base's business.
    metadata += [(name, version, []) for name, version in known.items()]
    rows = (
        f"[[dependency-metadata]]\nname = {json.dumps(a)}\nversion = {json.dumps(b)}\nrequires-dist = {json.dumps(c)}\n"
        for a, b, c in metadata
    )
    wanted = [*inputs.requirements, *(f"{name}=={version}" for name, version in known.items())]
    files = {"wanted.in": "\n".join(wanted), "absent.txt": "\n".join(absent), "uv.toml": "\n".join(rows)}
    words = [
        *("--generate-hashes", "--python-version", inputs.python, "--python-platform", inputs.platform),
        *("--excludes", "absent.txt", "--only-binary", ":all:"),
        *(word for one in inputs.compiled for word in ("--no-binary", one.partition("==")[0])),
        *(word for one in known for word in ("--no-emit-package", one)),
        "wanted.in",
    ]
    body = _compile(words, files, context.read(image.lock), {}, context, f"the lock of {inputs.target}", known, image)
    notes = {
        "provided by the base, not installed": inputs.provided,
        "over the base's": inputs.over,
        "taken out of the base": inputs.removed,
    }
    for title, found in reversed(notes.items()):
        if found:
            shown = (f"{name} {version or '(version not known)'}" for name, version in sorted(found.items()))
            body = f"# {title}: {', '.join(shown)}\n{body}"
    head = f"{inputs.target}, Python {inputs.python}, {inputs.platform}, over {inputs.base}"
    return _finish(head, inputs.hash, body)


def _compile(  # noqa: PLR0917 - what one run of uv takes
    words: list[str], files: Mapping[str, str], before: str, own: Mapping[str, str], context: _Context, what: str,
    stubs: Mapping[str, str] | None = None, image: Image | None = None,
) -> str:  # fmt: skip
    """Run `uv pip compile` in a folder of its own, and return the lock without a head.

    Args:
        files: name -> text, put into that folder.
        before: text of the lock that is there, whose versions are kept.
        own: variables in place of the caller's.
        stubs: distribution -> version that the resolver must take for given.

    Raises:
        NoEnvironment: uv is missing, or finds no solution.
        InfrastructureFailed: the index does not answer.
    """
    given = context.rows.variables
    upgrades, uv = _read_upgrades(context.options), require_program("uv", given)
    variables = {**_ask_pip(given), **given, **own}
    with tempfile.TemporaryDirectory(prefix="megacpp-lock-") as name:
        folder = Path(name)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        for distribution, version in (stubs or {}).items():
            _write_stub(folder, distribution, version)
        if image:
            links = variables.get("UV_FIND_LINKS") or ",".join(image.links)
            variables["UV_FIND_LINKS"] = ",".join(filter(None, (name, links)))
        kept = [(one, package.version) for one, package in list_packages(before) if not upgrades & {one, "*"}]
        (folder / "out.txt").write_text("".join(f"{one}=={version}\n" for one, version in kept), encoding="utf-8")
        command = [uv, "pip", "compile", "--quiet", "--directory", name, "--no-header", "--no-annotate"]
        # An interpreter is nothing that uv shall fetch unasked; what is locked has no need of one.
        settings = {**variables, "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
        done = call([*command, "--output-file", str(folder / "out.txt"), *words], settings, limit_s=_LIMIT_S)
        if done.code:
            raise (InfrastructureFailed if _SILENT.search(done.errors) else NoEnvironment)(
                f"uv cannot make {what}: {done.errors.strip()[-2000:]}. Likely cause: the index does not answer, or "
                "no release of it fits what matrix/images.toml and the base ask for. Next step: read uv's words; "
                "behind a mirror set UV_DEFAULT_INDEX, with a folder of wheels UV_FIND_LINKS; change the row that uv "
                "names."
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
    """Index and wheel folders that pip is configured with, as uv's variables, where uv has none itself."""
    index = variables.get("UV_DEFAULT_INDEX") or variables.get("UV_INDEX_URL")
    given = {"UV_DEFAULT_INDEX": index, "UV_FIND_LINKS": variables.get("UV_FIND_LINKS")}
    wanted = {name: variable for name, variable in _SETTINGS.items() if not given[variable]}
    done = call([sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"], variables)
    found = read_pip_settings(done.words) if wanted and not done.code else {}
    return {variable: ",".join(found[name]) for name, variable in wanted.items() if found.get(name)}
