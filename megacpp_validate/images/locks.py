"""Locks: made by uv through `nox -s lock`, which is their one writer, and read and checked by whoever installs them.

The second line of a lock is the hash of its inputs, the third the hash of what is below: a lock that is older than the
matrix or was edited by hand is refused. pip and uv read it as it is. The index is the user's own, as uv is configured.
"""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..catalog.images import MACHINES, Base, Image, Images
from ..environments.fits import StackFit
from ..environments.plan import choose_names
from ..errors import Exit, NoEnvironment, WrongArguments
from ..evidence.receipt import write_whole
from ..evidence.values import Frozen, Result
from .tools import MIRROR, ImageRefused, RegistryUnreachable, call, read_digest, require_program, use_mirror

if TYPE_CHECKING:
    from .plan import ImageRows

_LIMIT_S: Final = 600.0
_CONTENT: Final = "# content: sha256:"
_INPUTS: Final = "# inputs: sha256:"
_PACKAGE: Final = re.compile(r"([A-Za-z0-9][\w.-]*)==([^\s;]+)((?:\s+--hash=sha256:[0-9a-f]{64})*)( *;.*)?")


# --- what a lock holds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LockedPackage:
    """A package in one version, and the SHA-256 of each file that it may come from."""

    version: str
    hashes: frozenset[str]


@dataclass(frozen=True)
class ImageLock:
    """A lock of an image: the SHA-256 of its bytes, and name -> what is locked."""

    hash: str
    packages: Mapping[str, LockedPackage]


def read_image_lock(file: Path, inputs: str = "") -> ImageLock:
    """A lock of an image.

    Args:
        inputs: hash of what it must have been made from; empty for anything.

    Raises:
        ImageRefused: it is missing, older than the matrix, or was edited by hand.
    """
    text = read_file(file)
    if why := why_stale(text, inputs):
        raise ImageRefused(f"the lock {file} is {why}. Next step: `{name_command(file.name)}`; commit what it writes.")
    return ImageLock(sha256(text.encode()).hexdigest(), dict(list_packages(text)))


def name_command(file: str) -> str:
    """The command that writes a lock."""
    _, other, te = file.removesuffix(".txt").partition("-te")
    return f"./nox -s lock -- --te {te}" if other else "./nox -s lock"


def read_file(file: Path) -> str:
    """The text of a file; empty where it is not there."""
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def list_packages(text: str) -> Iterator[tuple[str, LockedPackage]]:
    """Name and package of each line of a lock; another line is its own name, in no version."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            found = _PACKAGE.fullmatch(line.strip())
            hashes = found[3].replace("--hash=sha256:", "").split() if found else []
            name, version = (str(canonicalize_name(found[1])), found[2]) if found else (line, "")
            yield name, LockedPackage(version, frozenset(hashes))


def seal_lock(text: str) -> str:
    """The text with its third line: the hash of what is below."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(_CONTENT)]
    head, rest = "".join(lines[:2]), "".join(lines[2:])
    return f"{head}{_CONTENT}{sha256(rest.encode()).hexdigest()}\n{rest}"


def why_stale(text: str, inputs: str = "") -> str:
    """Why a lock has to be made anew; empty where it is as it was made, and from these inputs where they are given."""
    if not text:
        return "missing"
    if text != seal_lock(text):
        return "edited by hand (its text does not hash to its `# content:`)"
    return "" if not inputs or f"\n{_INPUTS}{inputs}\n" in text else "older than the matrix"


# --- digests of bases -------------------------------------------------------------------------------------------------


class PinNews(StrEnum):
    """What a registry says of the digest of a base."""

    VERIFIED = "verified"  # the tag has it
    CHANGED = "changed"  # refused: the tag has another one
    KEPT = "kept"  # no registry was asked, or none answers


class PinLine(Frozen):
    """The digest of a base, a row of matrix/images.toml.

    Attributes:
        before, after: digest of the matrix, and the one that the tag has.
        verified: day on which a registry confirmed the digest, as the matrix has it.
        how: why no registry answered.
        refusal: why nothing is written; empty where the digests are one.
    """

    base: str
    reference: str
    before: str
    after: str
    news: PinNews = PinNews.KEPT
    verified: str
    how: str = ""
    refusal: str = ""


def read_pin(base: Base, variables: Mapping[str, str] | None = None) -> PinLine:
    """The digest of a base, compared with its registry where `variables` are given.

    Raises:
        ImageRefused: the registry does not have the tag.
    """
    name = f"{base.repository}:{base.tag}"
    line = PinLine(base=base.id, reference=name, before=base.digest, after=base.digest, verified=base.verified)
    if variables is None:
        return line
    try:
        now = read_digest(f"{use_mirror(base.repository, variables.get(MIRROR, ''))}:{base.tag}", variables)
    except RegistryUnreachable as fault:
        return line.model_copy(update={"how": str(fault)})
    if now == base.digest:
        return line.model_copy(update={"news": PinNews.VERIFIED})
    refusal = (
        f"{name} is another image now: {base.digest} is {now}. Likely cause: the tag was pushed again, or this is not "
        "the intended registry. Next step: find out what changed; then write the digest to the base "
        f"{base.id} of matrix/images.toml, and commit it."
    )
    return line.model_copy(update={"news": PinNews.CHANGED, "after": now, "refusal": refusal})


# --- what a lock is made from -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LockInputs:
    """What the lock of an image follows from.

    Attributes:
        platform: as uv names it ("x86_64-manylinux_2_39").
        provided: distribution of the base -> version, empty where unknown; without those that the lock replaces.
        over: distribution -> version of the base that the lock's version shadows.
        removed: distribution -> version of the base that the image removes.
        excluded: distributions whose files the base brings in another way.
        compiled: "name==version" of what is locked as its source release -> what it requires.
    """

    target: str
    base: str
    python: str
    platform: str
    requirements: tuple[str, ...]
    provided: Mapping[str, str]
    over: Mapping[str, str]
    removed: Mapping[str, str]
    excluded: tuple[str, ...]
    compiled: Mapping[str, tuple[str, ...]]

    @property
    def hash(self) -> str:
        """SHA-256 of all of it."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def asks(self) -> dict[str, str]:
        """Distribution of the base in an unknown version -> range that is asked of it by name."""
        texts = (*self.requirements, *(text for requires in self.compiled.values() for text in requires))
        ranges = {canonicalize_name(row.name): str(row.specifier) for row in map(Requirement, texts) if row.specifier}
        return {name: wanted for name, wanted in ranges.items() if self.provided.get(name) == ""}


def gather_inputs(images: Images, image: Image, root: Path) -> LockInputs:
    """What the lock of an image follows from: its rows, and the pyproject.toml of a checkout.

    Raises:
        ImageRefused: there is no pyproject.toml.
    """
    base, project = images.find_base(image.base), _read_project(root)
    wanted = [*project["project"]["dependencies"], *images.everywhere, *image.requirements]
    for group in image.groups:
        wanted += _read_group(project["dependency-groups"], group)
    lifted, removed = {row.name for row in image.over}, {row.name for row in image.removes}
    rows = base.distributions
    pinned = [row for row in images.compiled if image.pinned.get(row.name) == row.version]
    return LockInputs(
        target=image.target, base=base.id, python=base.python, requirements=tuple(sorted(_join_same(wanted))),
        platform=f"{MACHINES[image.platform]}-manylinux_{base.glibc.replace('.', '_')}",
        provided={name: version for name, version in rows.items() if name not in lifted | removed},
        over={name: version for name, version in rows.items() if name in lifted},
        removed={name: version for name, version in rows.items() if name in removed},
        excluded=tuple(sorted(base.stands_for)),
        compiled={f"{row.name}=={row.version}": tuple(row.requires) for row in pinned},
    )  # fmt: skip


def _read_project(root: Path) -> dict[str, Any]:
    if not (root / "pyproject.toml").is_file():
        raise ImageRefused(f"{root} has no pyproject.toml. Next step: run it in a checkout of the project.")
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def _read_group(groups: Mapping[str, Any], group: str) -> list[str]:
    found: list[str] = []
    for row in groups[group]:
        found += [row] if isinstance(row, str) else _read_group(groups, row["include-group"])
    return found


def _join_same(wanted: Iterable[str]) -> set[str]:
    """Each requirement once; one for a local build ("2.13.0+cpu") takes the place of the public one."""
    named = {text: canonicalize_name(Requirement(text).name) for text in wanted}
    local = {name for text, name in named.items() if "+" in text}
    return {text for text, name in named.items() if "+" in text or name not in local}


# --- the verb ---------------------------------------------------------------------------------------------------------


class LockLine(Frozen):
    """A lock: how many packages it has, and `stale`, why it has to be written."""

    target: str
    file: str
    stale: str
    count: int


class LockResult(Result):
    """The state of pins and locks; `refusals` are why nothing was written."""

    check: bool
    pins: tuple[PinLine, ...] = ()
    locks: tuple[LockLine, ...] = ()
    fits: tuple[StackFit, ...] = ()
    refusals: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    @property
    def exit(self) -> Exit:
        """Closed where something is refused, does not fit, or is stale and was only checked."""
        stale = self.check and any(line.stale for line in self.locks)
        return Exit.CLOSED if self.refusals or stale or any(fit.refused for fit in self.fits) else Exit.OPEN


@dataclass(frozen=True)
class _Lock:
    """A lock that must be there: its first line, the hash of its inputs, and what makes its body."""

    target: str
    file: str
    head: str
    inputs: str
    make: Callable[[set[str]], str]
    image: Image | None = None


def run_lock(
    rows: ImageRows, targets: tuple[str, ...] = (), upgrade: tuple[str, ...] = (), *, check: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> LockResult:  # fmt: skip
    """Check, or make and write, pins and locks; everything is made before anything is written.

    Args:
        targets: images whose locks are made; empty for all of them, the pins and the other locks.
        upgrade: names of packages to take anew, "all" for all.
        check: compare every lock that is committed, or those of a release, with the matrix; write nothing, and ask
            neither index nor registry.

    Raises:
        WrongArguments: a package is in no lock, or is to be taken anew by a check.
        ImageRefused: a target or the matrix is wrong, or a registry has no such tag.
        NoEnvironment: uv is missing, or makes no lock.
        OSError: the disk is full.
    """
    if check and upgrade:
        raise WrongArguments("--check writes nothing, so --upgrade has no effect. Next step: leave out one of the two.")
    upgrades = {str(canonicalize_name(name)) for name in upgrade}
    releases = ("", *rows.locked) if check and not rows.te else (rows.te,)
    locks = [lock for te in releases for lock in _list_locks(replace(rows, te=te), targets, check)]
    known = {line.partition("==")[0] for lock in locks for line in _list_kept(rows, lock.file, set()).splitlines()}
    choose_names("locked package", ["all", *sorted(known)], [*upgrades])
    lines, fits, texts = list[LockLine](), list[StackFit](), dict[str, str]()
    used = {image.base for image in rows.images.image if check or not targets}
    registry = None if check else rows.variables
    pins = tuple(read_pin(base, registry) for base in rows.images.base if base.id in used)
    for lock in locks:
        before = text = read_file(rows.root / lock.file)
        if not check:
            report(f"locking {lock.target}")
            head = f"# Generated by nox -s lock: {lock.head}; not to be edited\n{_INPUTS}{lock.inputs}\n"
            text = texts[lock.file] = seal_lock(head + lock.make(upgrades))
        stale = why_stale(before, lock.inputs) or ("" if before == text else "the index has changed")
        packages = dict(list_packages(text))
        lines.append(LockLine(target=lock.target, file=lock.file, stale=stale, count=len(packages)))
        if lock.image and lock.image.te and not (check and stale):
            fits.append(rows.judge(lock.image, ImageLock("", packages)))
    result = LockResult(
        check=check, pins=pins, locks=tuple(lines), fits=tuple(fits),
        refusals=tuple(pin.refusal for pin in pins if pin.refusal),
    )  # fmt: skip
    if check or result.exit is not Exit.OPEN:
        return result
    changed = [name for name, text in texts.items() if read_file(rows.root / name) != text]
    for name in changed:
        write_whole(rows.root / name, texts[name])
    return result.model_copy(update={"written": tuple(changed)})


def _list_locks(rows: ImageRows, targets: tuple[str, ...], check: bool) -> Iterator[_Lock]:
    """The locks of images that are named, or of all; to write some, those of sessions and releases are left alone."""
    for image in rows.find(targets):
        inputs = gather_inputs(rows.images, image, rows.root)
        head = f"{inputs.target}, Python {inputs.python}, {inputs.platform}, over {inputs.base}"
        yield _Lock(image.target, image.lock, head, inputs.hash, partial(_lock_image, rows, image, inputs), image)
    if rows.te or (targets and not check):
        return
    row, project = rows.images.sessions, _read_project(rows.root)
    chosen = {group: project["dependency-groups"].get(group) for group in row.groups}
    wanted = [row.python, row.groups, row.without, project["project"]["dependencies"], chosen]
    head = "the versions that nox sessions install, for every platform"
    yield _Lock("sessions", row.lock, head, _hash(wanted), partial(_lock_sessions, rows))
    name = rows.images.releases.distribution
    releases = [name, *(stack.te for stack in rows.catalog.stacks)]
    head = f"the wheel of every release of {name} in matrix/stacks.toml"
    yield _Lock("releases", rows.images.releases.lock, head, _hash(releases), partial(_lock_releases, rows))


def _hash(inputs: list[Any]) -> str:
    return sha256(repr(inputs).encode()).hexdigest()


# --- uv ---------------------------------------------------------------------------------------------------------------


def _lock_sessions(rows: ImageRows, upgrades: set[str]) -> str:
    row, project = rows.images.sessions, rows.root / "pyproject.toml"
    words = [
        *("--universal", "--python-version", row.python),
        *(word for group in row.groups for word in ("--group", f"{project}:{group}")),
        *(word for one in row.without for word in ("--no-emit-package", one)),
        str(project),
    ]
    return _compile(rows, words, {}, _list_kept(rows, row.lock, upgrades))


def _lock_releases(rows: ImageRows, _: set[str]) -> str:
    name, lines = rows.images.releases.distribution, list[str]()
    for stack in rows.catalog.stacks:  # one solution has one version of a distribution
        # Without its dependencies uv would read no file, and of a folder of wheels it would know no hash.
        words = ["--generate-hashes", "--python-version", "3.11", "--only-binary", ":all:", "wanted.in"]
        text = _compile(rows, words, {"wanted.in": f"{name}=={stack.te}\n"})
        hashes = [f"--hash=sha256:{one}" for one in sorted(dict(list_packages(text))[name].hashes)]
        lines.append(" ".join((f"{name}=={stack.te}", *hashes)))
    return "".join(f"{line}\n" for line in lines)


def _lock_image(rows: ImageRows, image: Image, inputs: LockInputs, upgrades: set[str]) -> str:
    """The packages of an image, every file with its hash.

    What the base provides takes part in the solution in its real version, as a wheel without contents.
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
        links = rows.variables.get("UV_FIND_LINKS") or ",".join(image.links)
        return _compile(rows, words, files, _list_kept(rows, image.lock, upgrades), f"{shelf},{links}".rstrip(","))


def _list_kept(rows: ImageRows, file: str, upgrades: set[str]) -> str:
    """Versions of the lock that is there, else of the pinned release's, which uv keeps where they still fit."""
    text = read_file(rows.root / file) or read_file(rows.root / file.replace(f"-te{rows.te}", ""))
    kept = [row for row in list_packages(text) if not upgrades & {row[0], "all"}]
    return "".join(f"{name}=={package.version}\n" for name, package in kept)


def _write_stub(shelf: Path, name: str, version: str) -> None:
    """A wheel without contents, by which the resolver knows what a base has."""
    stem = f"{canonicalize_name(name).replace('-', '_')}-{version}"
    with zipfile.ZipFile(shelf / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def _compile(rows: ImageRows, words: list[str], files: Mapping[str, str], kept: str = "", links: str = "") -> str:
    """Run `uv pip compile` in a folder of its own, and return the lock without a head.

    Args:
        files: name -> text, put into that folder.
        kept: versions to keep where they fit.
        links: pages and folders of wheels; empty for the user's own.

    Raises:
        NoEnvironment: uv is missing, or makes no lock.
    """
    uv = require_program("uv", rows.variables)
    # An interpreter is nothing that uv shall fetch; what is locked has no need of one.
    variables = {**rows.variables, "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    if links:
        variables["UV_FIND_LINKS"] = links
    with tempfile.TemporaryDirectory(prefix="megacpp-lock-") as folder:
        for file, text in {**files, "out.txt": kept}.items():
            Path(folder, file).write_text(text, encoding="utf-8")
        command = [uv, "pip", "compile", "--quiet", "--directory", folder, "--no-header", "--no-annotate"]
        done = call([*command, "--output-file", f"{folder}/out.txt", *words], variables, limit_s=_LIMIT_S)
        if done.code:
            raise NoEnvironment(
                f"uv makes no lock: {done.errors.strip()[-2000:]}. Likely cause: the index does not answer, or no "
                "release of it fits what matrix/images.toml and the base ask for. Next step: read uv's words; behind a "
                "mirror set UV_DEFAULT_INDEX, with a folder of wheels UV_FIND_LINKS."
            )
        return Path(folder, "out.txt").read_text(encoding="utf-8")
