"""The search for the first bad release, from what a person writes to the answer: axes, environments, conditions."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Final

from packaging.version import InvalidVersion, Version

from ... import TOOL
from ...catalog.bridge import BridgeModule, Catalog
from ...catalog.file import PACKAGE_ROOT, matrix_folder
from ...diagnosis.blame import read_order
from ...diagnosis.diagnose import find_host_fault
from ...diagnosis.rows import component_named
from ...environments.cell import Cell
from ...environments.chosen import Means, resolve_environment
from ...environments.environment import Environment, NoEnvironment
from ...environments.facts import read_facts, require_torch
from ...environments.fleet import Fleet
from ...environments.installed import find_environments
from ...environments.interpreter import InterpreterEnvironment, put_over, read_commit
from ...environments.plan import find_target, plan_blank, plan_parity, why_not_here
from ...environments.restart import FolderTaken, find_done, own_folder
from ...environments.schedule import Need, Room, count_cores, plan_jobs
from ...errors import EvidenceMissing, WrongArguments, writing_to
from ...evidence.receipt import Library, Outcome, Package, Receipt
from ...process import Processes
from .search import TE, Answer, Axis, BisectResult, Judge, NotBuilt, Progress, Search, Verdict

Make = Callable[[Mapping[str, str]], Environment]
"""Makes the environment of a point; raises `NoEnvironment`."""
Observe = Callable[[Environment, Mapping[str, str], Sequence[str], int], Sequence[Receipt]]
"""Runs some probes in an environment, of a point, in its run 0, 1, ..."""

# How receipts name what an axis changes; an axis without a row is taken to be what its folder is said to hold.
_LOADED_AS: Final[dict[str, tuple[str, ...]]] = {
    "te": ("transformer_engine",), "torch": ("torch",), "cudnn": ("libcudnn",), "cublas": ("libcublas",),
    "cudart": ("libcudart",), "nccl": ("libnccl",), "triton": ("triton",), "deep-gemm": ("deep_gemm",),
    "flash-attn": ("flash_attn", "flash_attn_3", "flash_attn_interface"),
}  # fmt: skip
_OF_MACHINE: Final = ("GPU memory", "GPU hardware", "host memory", "disk")  # what fails whichever release is there


class ProbeJudge:
    """Runs the probe of a module, and of all that it stands on, in the environment of each point."""

    def __init__(self, module: str, modules: Sequence[BridgeModule], make: Make, observe: Observe) -> None:
        below = read_order(modules).below[module]
        self.module, self.make, self.observe = module, make, observe
        self.below = tuple(row.id for row in modules if row.id in below)
        self._made: dict[tuple[str, ...], Environment] = {}

    def identify(self, choices: Mapping[str, str]) -> str:
        """Make the environment; its identity."""
        try:
            environment = self._made[tuple(choices.values())] = self.make(choices)
            return environment.identity
        except NoEnvironment as fault:
            raise NotBuilt(str(fault)) from fault

    def judge(self, choices: Mapping[str, str], run: int) -> Answer:
        """What the receipts of one run say."""
        environment = self._made[tuple(choices.values())]
        try:
            receipts = self.observe(environment, choices, (*self.below, self.module), run)
        except NoEnvironment as fault:
            raise NotBuilt(str(fault)) from fault
        return judge_receipts(self.module, self.below, receipts, choices)


def judge_receipts(
    module: str, below: Sequence[str], receipts: Sequence[Receipt], choices: Mapping[str, str]
) -> Answer:
    """What one run says about a module, and not about what it stands on.

    Where another module's failure keeps it from running at all, or something else was loaded than the point is to have,
    nothing is known about it. A module that ran and is red is bad, whoever is to blame.
    """

    def unknown(reason: str, *, lasting: bool = True) -> Answer:
        return Answer(verdict=Verdict.CANNOT_TELL, reason=reason, lasting=lasting)

    by_probe = {receipt.probe: receipt for receipt in receipts}
    own = by_probe.get(module)
    if own is None or own.outcome is Outcome.NOT_RUN:
        return unknown(f"{module} did not run: {own.reason if own else 'there is no receipt'}", lasting=False)
    if own.requested != "te":
        return unknown(f"{module} ran without Transformer Engine: {own.requested_because or own.requested}")
    if other := "; ".join(filter(None, (_find_other(own, axis, value) for axis, value in choices.items()))):
        return unknown(other)
    if own.outcome.is_good:
        return Answer(verdict=Verdict.GOOD, reason=own.outcome.value)
    if trouble := find_machine_trouble(own):
        return unknown(f"the machine failed ({trouble}): {own.reason}", lasting=False)
    red = [name for name in below if name in by_probe and not by_probe[name].outcome.is_good]
    if own.outcome is Outcome.BLOCKED or (own.outcome is Outcome.IMPORT_ERROR and red):
        blocker = next((r for r in receipts if r.cell == own.blocked_by), by_probe[red[0]] if red else None)
        by = f"{blocker.probe}, which is {blocker.outcome.value}: {blocker.reason}" if blocker else own.reason
        return unknown(f"blocked by {by}")
    also = f"; {', '.join(red)}, which it stands on, red too" if red else ""
    return Answer(verdict=Verdict.BAD, reason=f"{own.outcome.value}{also}: {own.reason}")


def find_machine_trouble(receipt: Receipt) -> str:
    """What of the machine ended a probe; empty where nothing did."""
    if fault := find_host_fault(receipt):
        return fault
    if receipt.failure is None or receipt.outcome is not Outcome.ERROR:
        return ""
    text = f"{receipt.failure.type}: {receipt.failure.message}"
    return next((name for name in _OF_MACHINE if re.search(component_named(name).says, text)), "")


def _find_other(receipt: Receipt, axis: str, wanted: str) -> str:
    """What was loaded in place of the version that a point is to have; empty where it was that, or is not known."""
    names = _LOADED_AS.get(axis, ())
    loaded: tuple[Library | Package, ...] = (*receipt.libraries, *receipt.packages)
    several = (re.split(r",\s*", entry.version) for entry in loaded if entry.name in names)
    versions = sorted({version for some in several for version in some if version})
    taken = [version for version in versions if _is_same(version, wanted)]
    # Two copies of a shared library: nobody knows which one computes. Two packages are two backends, as FA2 and FA3.
    if not versions or (taken and (len(versions) == 1 or not names[0].startswith("lib"))):
        return ""
    return f"{axis} {wanted} was to be loaded, and {' and '.join(versions)} was: the process took another folder"


def _is_same(one: str, other: str) -> bool:
    """Whether one version is the other, or its beginning: 9.14.0 and 9.14.0.64 are one cuDNN."""
    pairs = zip(*(re.split(r"[.\-_]", version.partition("+")[0]) for version in (one, other)), strict=False)
    return all(left == right for left, right in pairs)


_FORM: Final = "NAME=VALUE:DIR,VALUE:DIR, from the good end to the bad one; VALUE: with no folder is what the host has"
# torch's own RPATH comes before LD_LIBRARY_PATH, so that another cuDNN or cuBLAS is taken only if it is there first.
_LIBRARY_OF: Final = {
    "cudnn": re.compile(r"libcudnn\w*\.so\.\d+"),
    "cublas": re.compile(r"libcublas(Lt)?\.so\.\d+"),
    "cudart": re.compile(r"libcudart\.so\.\d+"),
    "nccl": re.compile(r"libnccl\.so\.\d+"),
}
_DECIDING: Final = ("bridge", "canary", "diagnosis", "environments", "evidence", "jit", "native", "probes", "training")


@dataclass(frozen=True)
class BisectOptions:
    """What is searched.

    Attributes:
        good, bad: releases of Transformer Engine.
        static: judge by sources; else by probes on `target`.
        axes: NAME=VALUE:DIR,VALUE:DIR each.
        flaky, error, patience: see `search.Search`.
        seed: of the first run of a point; each further one has the next.
        limit_s: seconds that one probe may take.
        answers: folder.
        matrix: folder of the matrix files; the project's own where it is None.
    """

    good: str
    bad: str
    module: str
    static: bool
    target: str = ""
    overlays: tuple[Path, ...] = ()
    python: str = ""
    axes: tuple[str, ...] = ()
    flaky: float = 0.0
    error: float = 0.01
    patience: int = 8
    seed: int = 0
    limit_s: float = 300.0
    answers: Path = Path(".megacpp/bisect")
    matrix: Path | None = None


def run_bisect(catalog: Catalog, options: BisectOptions, progress: Progress = lambda *_: None) -> BisectResult:
    """Search.

    Raises:
        WrongArguments: no such module, target, release or axis; or nothing changes between the ends.
        NoEnvironment: there is no interpreter, or sources cannot be read.
        EvidenceMissing: this machine is none of the target.
        OSError: an answer cannot be kept.
    """
    known = [row.id for row in catalog.modules]
    if options.module not in known:
        raise WrongArguments(
            f"there is no bridge module {options.module!r}. Next step: choose one of {', '.join(known)}."
        )
    if options.static:
        for name, given in (("--axis", options.axes), ("--target", options.target), ("--flaky", options.flaky)):
            if given:
                raise WrongArguments(f"{name} belongs to the gpu tier. Next step: leave it out, or add --tier gpu.")
        try:
            from .bisect_static import open_sources
        except ImportError as fault:  # a GPU host need not have griffe
            raise NoEnvironment(
                f"the static tier cannot read sources here: {fault}. Likely cause: this interpreter has no griffe. "
                "Next step: run it where griffe is installed, or add --tier gpu."
            ) from fault
        versions, judge = open_sources(catalog, options.module, options.good, options.bad)
        return _search(options, (order_releases(versions, options.good, options.bad),), judge, progress)
    if not options.target:
        targets = ", ".join(row.id for row in catalog.targets)
        raise WrongArguments(f"the gpu tier needs a target. Next step: add --target, one of {targets}.")
    processes = Processes()
    try:
        return _search_stacks(catalog, options, progress, processes)
    except BaseException:  # an interrupt too: nothing may keep running behind it
        processes.stop()
        raise


def _search_stacks(catalog: Catalog, options: BisectOptions, progress: Progress, processes: Processes) -> BisectResult:
    """The search on a GPU host: every point is an environment, judged by its probes."""
    specs = read_axes(options.axes)
    target = find_target(catalog, options.target)
    means = Means(os.environ, options.python)
    found = find_environments(options.overlays, os.environ, options.python)
    usable = [one.release for one in found if one.environment is not None]
    usable += [row.te for row in catalog.stacks if row.lock or row.image]
    te = order_releases(_list_releases() or usable, options.good, options.bad, usable)
    receipts = options.answers.absolute() / "receipts"
    commit = read_commit()

    def make(choices: Mapping[str, str]) -> Environment:
        environment = resolve_environment(choices[TE], found, catalog.stacks, means)
        return put_axes(environment, {axis.name: folders[choices[axis.name]] for axis, folders in specs})

    def observe(
        environment: Environment, choices: Mapping[str, str], probes: Sequence[str], run: int
    ) -> Sequence[Receipt]:
        facts = read_facts(environment, processes)
        if reason := why_not_here(target, facts):
            raise EvidenceMissing(reason)
        require_torch(facts)
        blank = plan_blank(target, facts, means.variables, seed=options.seed + run, tool=TOOL, commit=commit)
        folder = receipts / name_folder(choices) / f"{run}-within-{options.limit_s:g}s"  # a longer limit runs anew
        folder.mkdir(parents=True, exist_ok=True)
        cells = [
            Cell(environment, replace(order, environment=environment.identity), folder, options.limit_s)
            for order in plan_parity(catalog, blank, probes)
        ]
        for cell in cells:
            done = find_done(cell.order, cell.place)
            if done is not None and find_machine_trouble(done):  # says nothing of the release
                cell.forget()
        fleet = Fleet(Room(plan_jobs(count_cores())), fresh=False)
        return [receipt for receipt, _ in fleet.run([(cell, Need(0.0, 0.0)) for cell in cells], processes)]

    judge = ProbeJudge(options.module, catalog.modules, make, observe)
    try:
        with own_folder(receipts):
            return _search(options, (te, *(axis for axis, _ in specs)), judge, progress)
    except FolderTaken as fault:
        raise FolderTaken(str(fault).replace("--receipts", "--answers")) from fault


def _search(options: BisectOptions, axes: tuple[Axis, ...], judge: Judge, progress: Progress) -> BisectResult:
    if all(len(axis.values) == 1 for axis in axes):
        raise WrongArguments(
            f"GOOD and BAD are both {options.good}, and no --axis changes: there is nothing to search. Next step: give "
            "two releases."
        )
    tier = "static" if options.static else "gpu"
    beside = options.good if options.static else f"{options.target} {options.seed} {options.limit_s:g}"
    question = {
        "tool": TOOL, "tier": tier, "module": options.module, "code": _digest_code(options.matrix), "beside": beside,
    }  # fmt: skip
    search = Search(question, axes, judge, options.answers, options.flaky, options.error, options.patience, progress)
    with writing_to(options.answers, "answers", "--answers"):
        return search.run()


def read_axes(texts: Sequence[str]) -> tuple[tuple[Axis, dict[str, Path | None]], ...]:
    """Every axis that was written, with a folder a value; None where the host's own is meant.

    Raises:
        WrongArguments: one has another form, no two values, a name or a value twice, or a folder that does not exist.
    """
    found: list[tuple[Axis, dict[str, Path | None]]] = []
    for text in texts:
        name, _, rest = text.partition("=")
        pairs = [part.partition(":") for part in rest.split(",")]
        folders = {value: Path(folder) if folder else None for value, _, folder in pairs}
        whole = all(value and colon for value, colon, _ in pairs) and 1 < len(pairs) == len(folders)
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or name in {TE, *(axis.name for axis, _ in found)} or not whole:
            raise WrongArguments(f"{text!r} is no axis, or is given twice. Next step: write {_FORM}.")
        if missing := [str(folder) for folder in folders.values() if folder is not None and not folder.is_dir()]:
            raise WrongArguments(f"--axis {name}: there is no folder {', '.join(missing)}. Next step: write {_FORM}.")
        found.append((Axis(name=name, values=tuple(folders)), folders))
    return tuple(found)


def order_releases(known: Sequence[str], good: str, bad: str, usable: Sequence[str] | None = None) -> Axis:
    """Transformer Engine as an axis: every release from GOOD to BAD, and which of them have no environment here.

    Args:
        known: every release.
        good, bad: the ends, in either order of age.
        usable: those that there is an environment for; None for all.

    Raises:
        WrongArguments: GOOD or BAD is no version.
    """
    by_version = {_version(name): name for name in (*known, *(usable or ()), good, bad)}  # 2.9 and 2.9.0 are one
    ends = _version(good), _version(bad)
    between = sorted((one for one in by_version if min(ends) <= one <= max(ends)), reverse=ends[0] > ends[1])
    there = set(by_version) if usable is None else {_version(name) for name in usable}
    absent = tuple(by_version[version] for version in between[1:-1] if version not in there)
    return Axis(name=TE, values=tuple(by_version[version] for version in between), absent=absent)


def put_axes(environment: Environment, folders: Mapping[str, Path | None]) -> Environment:
    """An environment with the folder of each axis before its own; libraries are preloaded.

    Raises:
        NoEnvironment: it is a container, which takes no folder.
    """
    given = {name: folder for name, folder in folders.items() if folder is not None}
    if not given:
        return environment
    if not isinstance(environment, InterpreterEnvironment):
        raise NoEnvironment(
            f"{environment.shown} is a container, which takes no folder of --axis. Next step: give the release as an "
            "overlay or a lock."
        )
    over = put_over(environment, [*given.values(), *environment.folders])
    libraries = [
        str(file.absolute())
        for name, folder in given.items()
        if (pattern := _LIBRARY_OF.get(name)) is not None
        for file in sorted(folder.rglob("lib*.so.*"))
        if pattern.fullmatch(file.name)
    ]
    if not libraries:
        return over
    preload = ":".join([*libraries, *over.variables.get("LD_PRELOAD", "").split()])
    return replace(over, variables={**over.variables, "LD_PRELOAD": preload})


def name_folder(choices: Mapping[str, str]) -> str:
    """A folder name for a point: readable, and unlike that of any other."""
    text = "\n".join(f"{name}={value}" for name, value in choices.items())
    shown = re.sub(r"[^A-Za-z0-9.+-]", "_", "-".join(choices.values()))[:60]
    return f"{shown}-{sha256(text.encode()).hexdigest()[:8]}"


def _list_releases() -> list[str]:
    try:
        from .bisect_static import list_releases
    except ImportError:  # a GPU host need not have what reads sources
        return []
    return list_releases()


def _digest_code(matrix: Path | None) -> str:
    """A hash of the code and the matrix that decide an answer."""
    digest = sha256()
    for folder in (*(PACKAGE_ROOT / room for room in _DECIDING), matrix or matrix_folder()):
        for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.toml"))):
            digest.update(f"{folder.name}/{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> Version:
    try:
        return Version(name)
    except InvalidVersion as fault:
        raise WrongArguments(f"{name!r} is no release. Next step: give versions such as 2.17.1.") from fault
