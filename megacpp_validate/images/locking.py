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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name

from ..catalog.bridge import Catalog, matrix_folder
from ..catalog.images import Image, Images
from ..errors import Exit, InfrastructureFailed, NoEnvironment
from ..evidence.values import Frozen
from ..evidence.whole_file import write_whole
from .fits import StackFit, judge_stacks, read_all_images, stack_of_image
from .locks import (
    EDITED,
    ImageLock,
    LockInputs,
    check_lock,
    gather_inputs,
    is_sealed,
    join_lines,
    parse_lock,
    read_image_lock,
    read_project,
    seal_lock,
)
from .pins import FILE, PinLine, Pinned, PinNews, check_claims, check_pins, pin_bases, read_pins, render_pins
from .plan import BAKE_FILE, find_images, render_committed_bake
from .tools import ImageRefused, call, read_pip_settings, require_program

SESSIONS: Final = "sessions"
RELEASES: Final = "releases"

_LIMIT_S: Final = 600.0
# What uv says of an index that it cannot ask (seen: uv 0.9 to 0.11).
_SILENT: Final = re.compile(r"Failed to fetch|error sending request|dns error|HTTP status|timed out|Could not connect")
_PIN: Final = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)(.*)")
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_SETTINGS: Final = {"index-url": "UV_DEFAULT_INDEX", "find-links": "UV_FIND_LINKS"}


class PackageLine(Frozen):
    """A package whose lock changes: versions, empty where absent; `files`: the same version comes from other files."""

    name: str
    before: str
    after: str
    files: bool = False


class LockLine(Frozen):
    """A lock: `stale` says why it has to be written, `packages` what changes in it."""

    target: str
    file: str
    stale: str
    count: int
    packages: tuple[PackageLine, ...] = ()


class LockResult(Frozen):
    """The answer: `refusals` say why nothing was written."""

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
        fresh = (PinNews.NEW, PinNews.CLAIMED, PinNews.MISSING)
        return any(line.stale for line in self.locks) or any(line.news in fresh for line in self.pins)

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
class _Made:
    """A lock as it would be now; `lock` is None where it has no hashes, as that of nox sessions has."""

    line: LockLine
    text: str
    lock: ImageLock | None = None
    refusal: str = ""


@dataclass(frozen=True)
class _Context:
    catalog: Catalog
    matrix: Path | None
    images: Images
    root: Path
    project: Mapping[str, Any]
    variables: Mapping[str, str]
    options: LockOptions

    @property
    def releases(self) -> tuple[str, ...]:
        """Releases of Transformer Engine in stacks.toml."""
        return tuple(stack.te for stack in self.catalog.stacks)

    def chosen(self) -> tuple[Image, ...]:
        return find_images(self.images, self.options.targets)

    def hash_sessions(self) -> str:
        """What the constraints of nox sessions follow from, as a hash."""
        row, project = self.images.sessions, self.project
        groups = {name: project.get("dependency-groups", {}).get(name) for name in row.groups}
        told = [row.python, row.groups, row.without, project["project"]["dependencies"], groups]
        return sha256(repr(told).encode()).hexdigest()

    def hash_releases(self) -> str:
        """What the lock of releases follows from, as a hash."""
        return sha256(repr([self.images.releases.distribution, *self.releases]).encode()).hexdigest()

    def judge(self, locks: Mapping[str, ImageLock]) -> tuple[StackFit, ...]:
        rows = [image for image in self.chosen() if image.te and image.target in locks]
        stacks = (stack_of_image(self.images, image, locks[image.target]) for image in rows)
        return judge_stacks(self.catalog, self.matrix, self.images, stacks)

    def render_bake(self) -> str:
        """The bake file; empty while a lock is older than the matrix, which is reported as that."""
        try:
            return render_committed_bake(self.images, read_pins(self.root / FILE), self.catalog.targets, self.root)
        except ImageRefused:
            return ""


def run_lock(
    catalog: Catalog, matrix: Path | None, options: LockOptions, variables: Mapping[str, str],
    tool: str, say: Callable[[str], None] = lambda _: None,
) -> LockResult:  # fmt: skip
    """Check, or make and write, pins and locks.

    Raises:
        ImageRefused: an argument, the matrix or the file of pins is wrong.
        NoEnvironment: uv is missing, or finds no solution.
        InfrastructureFailed: the index does not answer, or the disk is full.
        RegistryLies: a registry gives other bytes than the digest says.
    """
    started = time.monotonic()
    root, images = (matrix or matrix_folder()).absolute().parent, read_all_images(catalog, matrix)
    find_images(images, options.targets)
    known = {name for base in images.base for name in (base.id, base.tag)}
    if unknown := sorted(options.accept - known):
        raise ImageRefused(
            f"--accept names {', '.join(unknown)}, and no base of matrix/images.toml has such a tag. Next step: choose "
            f"of {', '.join(sorted(known))}."
        )
    if options.check and (options.accept or options.upgrade):
        raise ImageRefused("--check writes nothing, and takes neither --accept nor --upgrade. Next step: leave it out.")
    context = _Context(catalog, matrix, images, root, read_project(root), variables, options)
    result = _check(context, tool) if options.check else _write(context, tool, say)
    return result.model_copy(update={"seconds": round(time.monotonic() - started, 1)})


def _check(context: _Context, tool: str) -> LockResult:
    """Pins and locks, compared with the matrix; no registry and no index is asked."""
    only, root = context.options.only, context.root
    pins: tuple[PinLine, ...] = ()
    refusals: tuple[str, ...] = ()
    lines, found = list[LockLine](), dict[str, ImageLock]()
    if only != "locks":
        read = read_pins(root / FILE)
        pins, refusals = check_pins(context.images, read), check_claims(context.images, read)
    for image in context.chosen() if only != "pins" else ():
        try:
            lock = read_image_lock(root / image.lock)
            check_lock(lock, gather_inputs(context.images, image, context.project), root / image.lock)
            found[image.target] = lock
            lines.append(LockLine(target=image.target, file=image.lock, stale="", count=len(lock.packages)))
        except ImageRefused as refusal:
            lines.append(LockLine(target=image.target, file=image.lock, stale=str(refusal), count=0))
    if only != "pins":
        lines += [_check_list(context, name) for name in (SESSIONS, RELEASES)]
    bake, file = context.render_bake(), root / BAKE_FILE
    if bake and not (file.is_file() and file.read_bytes() == bake.encode()):
        refusals += (
            f"{BAKE_FILE} is not what the matrix, the pins and the locks say. Likely cause: somebody edited one of "
            "them. Next step: `nox -s lock` writes it anew; look at what it changes, and commit it.",
        )
    fits = context.judge(found)
    return LockResult(tool=tool, check=True, pins=pins, locks=tuple(lines), fits=fits, refusals=refusals)


def _check_list(context: _Context, name: str) -> LockLine:
    """The lock of sessions or of releases."""
    rows = context.images.sessions if name == SESSIONS else context.images.releases
    hashed = context.hash_sessions() if name == SESSIONS else context.hash_releases()
    what = "other groups of pyproject.toml" if name == SESSIONS else "other releases of stacks.toml"
    text = _read_text(context.root / rows.lock)
    stale = "" if _has_inputs(text, hashed) else f"it was made from {what}" if text else "it is not there"
    if not stale and is_sealed(text) is not True:
        stale = f"it {EDITED}"
    size = sum(bool(_PIN.match(line)) for line in text.splitlines())
    return LockLine(target=name, file=rows.lock, stale=stale, count=size)


def _write(context: _Context, tool: str, say: Callable[[str], None]) -> LockResult:
    options, root = context.options, context.root
    before, made, pins = read_pins(root / FILE), list[_Made](), tuple[Pinned, ...]()
    if options.only != "locks" and not options.targets:
        say("asking registries for the digests of bases")
        today = datetime.now(UTC).date().isoformat()
        pins = pin_bases(context.images, before, today, options.accept, context.variables)
    if options.only != "pins":
        for image in context.chosen():
            say(f"locking the packages of {image.target}")
            made.append(_make_image_lock(context, image))
        if not options.targets:
            say("locking the packages of nox sessions and the releases of Transformer Engine")
            made += [_make_sessions_lock(context), _make_releases_lock(context)]
    result = LockResult(
        tool=tool,
        check=False,
        pins=tuple(one.line for one in pins),
        locks=tuple(one.line for one in made),
        fits=context.judge({one.line.target: one.lock for one in made if one.lock is not None}),
        refusals=tuple(filter(None, [*(pin.refusal for pin in pins), *(lock.refusal for lock in made)])),
    )
    if result.exit is Exit.CLOSED:
        return result
    files = {one.line.file: one.text for one in made}
    if any(one.line.news is not PinNews.MISSING for one in pins):
        kept = {one.pin.base: one.pin for one in pins}
        rows = {pin.base: pin for pin in before.pins if pin.base in {base.id for base in context.images.base}}
        files[FILE] = render_pins(tuple((rows | kept).values()))
    written = write_together(root, files)
    if bake := context.render_bake():
        written += write_together(root, {BAKE_FILE: bake})
    return result.model_copy(update={"written": written})


def write_together(root: Path, files: Mapping[str, str]) -> tuple[str, ...]:
    """Write files that belong together: each whole or not at all; where one fails, those before it are put back.

    Returns:
        those that changed.

    Raises:
        InfrastructureFailed: a file cannot be written; what was there is there still.
    """
    before = {name: (root / name).read_bytes() if (root / name).is_file() else None for name in files}
    changed = [name for name, text in files.items() if before[name] != text.encode()]
    try:
        for name in changed:
            write_whole(root / name, files[name])
    except OSError as fault:
        for name in changed:
            old = before[name]
            if old is None and (root / name).is_file():
                (root / name).unlink()
            elif old is not None and (root / name).read_bytes() != old:
                write_whole(root / name, old.decode())
        raise InfrastructureFailed(
            f"pins and locks cannot be written: {fault}. Likely cause: the disk is full, or {root / 'containers'} is "
            "not yours. Next step: make room, or run it as its owner. What was there is there still."
        ) from fault
    return tuple(changed)


def _make_image_lock(context: _Context, image: Image) -> _Made:
    inputs, file = gather_inputs(context.images, image, context.project), context.root / image.lock
    before = _read_text(file)
    text = seal_lock(_compile_image(inputs, before, image.links, context))
    lock = parse_lock(text, file)
    check_lock(lock, inputs, file)
    return _describe_lock(context, image.target, image.lock, (before, text), lock)


def _make_sessions_lock(context: _Context) -> _Made:
    row, hashed = context.images.sessions, context.hash_sessions()
    before, project = _read_text(context.root / row.lock), context.root / "pyproject.toml"
    words = [
        *("--universal", "--python-version", row.python),
        *(word for group in row.groups for word in ("--group", f"{project}:{group}")),
        *(word for one in row.without for word in ("--no-emit-package", one)),
        str(project),
    ]
    # pip's folder of wheels has local builds for this machine's platform, and these are for every one.
    own = {key: value for key, value in _ask_pip(context.variables).items() if key != "UV_FIND_LINKS"}
    head = "# Generated by nox -s lock: the versions that nox sessions install, for every platform; not to be edited\n"
    with tempfile.TemporaryDirectory(prefix="megacpp-lock-") as name:
        body = _compile(
            Path(name), words, before, {**own, **context.variables}, context, "the constraints of nox sessions"
        )
    text = seal_lock(f"{head}# inputs: sha256:{hashed}\n{body}")
    made = _describe_lock(context, SESSIONS, row.lock, (before, text), None)
    return _Made(made.line, text)


def _make_releases_lock(context: _Context) -> _Made:
    row, lines = context.images.releases, list[str]()
    own = {**_ask_pip(context.variables), **context.variables}
    for release in context.releases:  # one solution has one version of a distribution
        with tempfile.TemporaryDirectory(prefix="megacpp-lock-") as name:
            Path(name, "wanted.in").write_text(f"{row.distribution}=={release}\n", encoding="utf-8")
            # Without its dependencies uv would read no file, and of a folder of wheels it would know no hash.
            words = ["--generate-hashes", "--python-version", "3.11", "--only-binary", ":all:", "wanted.in"]
            text = _compile(Path(name), words, "", own, context, f"the lock of {row.distribution} {release}")
        lines += [line for _, line in join_lines(text) if line.startswith(f"{row.distribution}=={release} --hash=")]
    if missing := sorted(set(context.releases) - {line.split()[0].partition("==")[2] for line in lines}):
        raise ImageRefused(
            f"the index gives no hash for {row.distribution} {', '.join(missing)}. Likely cause: it has no wheel of "
            "it. Next step: take it out of matrix/stacks.toml, or name an index that has it with UV_DEFAULT_INDEX."
        )
    hashed, before = context.hash_releases(), _read_text(context.root / row.lock)
    head = f"# Generated by nox -s lock: the wheel of every release of {row.distribution} in matrix/stacks.toml; "
    body = "".join(f"{line}\n" for line in lines)
    text = seal_lock(f"{head}not to be edited\n# inputs: sha256:{hashed}\n{body}")
    made = _describe_lock(context, RELEASES, row.lock, (before, text), None)
    return _Made(made.line.model_copy(update={"count": len(context.releases)}), text, None, made.refusal)


def _describe_lock(context: _Context, target: str, file: str, texts: tuple[str, str], lock: ImageLock | None) -> _Made:
    """What changes between the two texts of a lock, and why it must not be written."""
    before, after = texts
    sealed, stale = is_sealed(before), ""
    if not before:
        stale = "it was not there"
    elif sealed is False:
        stale = f"it {EDITED}"
    elif before != after:
        stale = "the matrix, pyproject.toml or the index has something else now"
    old, new = _list_packages(before), _list_packages(after)
    lines = compare_packages(old, new)
    line = LockLine(target=target, file=file, stale=stale, count=len(new), packages=lines)
    # In the same version a file that was locked must not be gone: somebody put another in its place. What more the
    # index has is no difference. A lock that was edited, or never sealed, proves nothing.
    taken = {name if name == "*" else str(canonicalize_name(name)) for name in context.options.upgrade}
    lost = {
        one.name: old[one.name][1] - new[one.name][1]
        for one in lines
        if one.files and one.name not in taken and old[one.name][1] - new[one.name][1]
    }
    if not lost or not sealed or "*" in taken:
        return _Made(line, after, lock)
    words = [f"{name} {old[name][0]} (sha256 {', '.join(sorted(one[:12] for one in lost[name]))})" for name in lost]
    refusal = (
        f"{file}: the index no longer has files of {', '.join(words)}, which are locked in the same version. Likely "
        "cause: another index than the lock was made from, or somebody replaced a file. Next step: ask the index that "
        f"the lock was made from; find out what changed, then `nox -s lock -- --upgrade {min(lost)}`, and commit it."
    )
    return _Made(line, after, lock, refusal)


def compare_packages(
    before: Mapping[str, tuple[str, frozenset[str]]], after: Mapping[str, tuple[str, frozenset[str]]]
) -> tuple[PackageLine, ...]:
    """What changes between two locks: name -> version and hashes of each."""
    none, found = ("", frozenset[str]()), []
    for name in sorted({*before, *after}):
        old, new = before.get(name, none), after.get(name, none)
        if old != new:
            found.append(PackageLine(name=name, before=old[0], after=new[0], files=old[0] == new[0]))
    return tuple(found)


def _list_packages(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> version, or versions where there are several, and the hashes of their files."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for _, line in join_lines(text):
        if pinned := _PIN.match(line):
            name = str(canonicalize_name(pinned[1]))
            versions, hashes = found.get(name, ("", frozenset()))
            joined = ", ".join(sorted({pinned[2], *filter(None, versions.split(", "))}))
            found[name] = joined, hashes | set(_HASH.findall(line))
    return found


def _has_inputs(text: str, hashed: str) -> bool:
    return f"\n# inputs: sha256:{hashed}\n" in text


def _read_text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _compile_image(inputs: LockInputs, before: str, links: Sequence[str], context: _Context) -> str:
    """The text of an image's lock, every file with its hash.

    Versions of the lock that is there are kept where they still fit. Its hashes are not: they come from the index each
    time, so that a wrong one does not live on.
    """
    with tempfile.TemporaryDirectory(prefix="megacpp-lock-") as name:
        folder = Path(name)
        known = {name: version for name, version in inputs.provided.items() if version}
        for distribution, version in known.items():
            _write_stub(folder, distribution, version)
        # What is provided takes part in the solution in its real version, so that what does not fit it is found here.
        wanted = [*inputs.requirements, *(f"{name}=={version}" for name, version in known.items())]
        absent = sorted({*inputs.excluded, *(name for name, version in inputs.provided.items() if not version)})
        (folder / "wanted.in").write_text("".join(f"{line}\n" for line in wanted), encoding="utf-8")
        (folder / "absent.txt").write_text("".join(f"{line}\n" for line in absent), encoding="utf-8")
        told = [(*pinned.split("=="), list(requires)) for pinned, requires in inputs.compiled.items()]
        # An index has some of what a base provides in the same version, and its requirements are the base's business.
        told += [(name, version, []) for name, version in known.items()]
        rows = (
            f"[[dependency-metadata]]\nname = {json.dumps(a)}\nversion = {json.dumps(b)}\n"
            f"requires-dist = {json.dumps(c)}\n"
            for a, b, c in told
        )
        (folder / "uv.toml").write_text("\n".join(rows), encoding="utf-8")
        own = {**_ask_pip(context.variables), **context.variables}
        own["UV_FIND_LINKS"] = ",".join([str(folder), *filter(None, [own.get("UV_FIND_LINKS") or ",".join(links)])])
        words = [
            *("--generate-hashes", "--python-version", inputs.python, "--python-platform", inputs.platform),
            *("--excludes", "absent.txt", "--only-binary", ":all:"),
            *(word for one in inputs.compiled for word in ("--no-binary", one.partition("==")[0])),
            *(word for one in known for word in ("--no-emit-package", one)),
            "wanted.in",
        ]
        body = _compile(folder, words, before, own, context, f"the lock of {inputs.target}")
    head = [
        f"# Generated by nox -s lock: {inputs.target}, Python {inputs.python}, {inputs.platform}, over {inputs.base}; "
        "not to be edited",
        f"# inputs: sha256:{inputs.hash}",
    ]
    for title, rows_of in (
        ("provided by the base, not installed", inputs.provided),
        ("over the base's", inputs.over),
        ("taken out of the base", inputs.removed),
    ):
        if rows_of:
            shown = (f"{name} {version or '(version not known)'}" for name, version in sorted(rows_of.items()))
            head.append(f"# {title}: {', '.join(shown)}")
    return "\n".join(head) + f"\n{body}"


def _compile(
    folder: Path, words: Sequence[str], before: str, variables: Mapping[str, str], context: _Context, what: str
) -> str:
    """Run `uv pip compile`.

    Raises:
        NoEnvironment: uv is missing, or finds no solution.
        InfrastructureFailed: the index does not answer.
    """
    out, upgrade = folder / "out.txt", context.options.upgrade
    chosen = {name if name == "*" else str(canonicalize_name(name)) for name in upgrade}
    pins = [match for line in before.splitlines() if (match := _PIN.match(line)) and "*" not in chosen]
    kept = (f"{one[1]}=={one[2]}\n" for one in pins if canonicalize_name(one[1]) not in chosen)
    out.write_text("".join(kept), encoding="utf-8")
    command = [require_program("uv", variables), "pip", "compile", "--quiet", "--directory", str(folder)]
    # An interpreter is nothing that uv shall fetch unasked; what is locked has no need of one.
    settings = {**variables, "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    done = call(
        [*command, "--no-header", "--no-annotate", "--output-file", str(out), *words], settings, limit_s=_LIMIT_S
    )
    if done.code:
        raise (InfrastructureFailed if _SILENT.search(done.errors) else NoEnvironment)(
            f"uv cannot make {what}: {done.errors.strip()[-2000:]}. Likely cause: the index does not answer, or "
            "no release of it fits what matrix/images.toml and the base ask for. Next step: read uv's words; behind a "
            "mirror set UV_DEFAULT_INDEX, with a folder of wheels UV_FIND_LINKS; change the row that uv names."
        )
    return out.read_text(encoding="utf-8")


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
