"""Stacks: which releases this host has or can be given, each made usable, and their cells run beside one another.

Whatever is wrong with one stack costs no other anything: it has a problem in words, and its cells are not run.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.version import Version

from ..catalog.bridge import BridgeModule, Catalog, ProbeCell
from ..catalog.bridge import Target as TargetRow
from ..errors import NoEnvironment, WrongArguments
from ..evidence.receipt import Receipt
from ..evidence.values import Frozen, read_version
from ..probes.order import TIMED, Order
from ..process import Processes
from .cell import Cell, own_folder
from .container import PINNED, open_image
from .fleet import Progress, Ran, Room, run_here
from .interpreter import (
    Facts,
    InterpreterEnvironment,
    hash_parts,
    host_interpreter,
    put_over,
    read_facts,
    require_torch,
)
from .plan import RunOptions, choose_canary_probes, limit_of, plan_blank, plan_row, why_not_here

VARIABLE: Final = "MEGACPP_OVERLAYS"
AGAIN: Final = "again"  # folder of the second run of the first stack
NO_FACTS: Final = Facts(
    python="", executable="", machine="", torch="", te="", te_folder="", gpu=None, why_no_gpu="it is unknown"
)
_NOWHERE: Final = InterpreterEnvironment((), {})
_PACKAGE: Final = "transformer_engine"
_EXTENSION: Final = "transformer_engine_torch"
_UNREADABLE: Final = f"the metadata of {_PACKAGE} there names no release; install it again"
_FORM: Final = "NAME=overlay:DIR[:DIR...], NAME=image:REPOSITORY@sha256:DIGEST or NAME=python:PATH"
Make = Callable[[], InterpreterEnvironment]  # makes a stack usable; raises `NoEnvironment`
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+]*")


# --- ways to make an environment --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """An environment that a person named.

    Attributes:
        name: what receipts and reports call it.
        way: "overlay", "image" or "python".
        value: folders, an image by digest, or an interpreter.
    """

    name: str
    way: str
    value: str


def read_spec(text: str) -> Spec:
    """What a person wrote, as a value.

    Raises:
        WrongArguments: it has another form.
    """
    name, _, rest = text.partition("=")
    way, _, value = rest.partition(":")
    pinned = way != "image" or PINNED.fullmatch(value)
    if not _NAME.fullmatch(name) or way not in ("overlay", "image", "python") or not value or not pinned:
        raise WrongArguments(
            f"{text!r} is not an environment. Next step: write {_FORM}; a name has letters, digits, '.', '_', '+'."
        )
    return Spec(name, way, value)


def make_environment(spec: Spec, variables: Mapping[str, str], host: Make) -> InterpreterEnvironment:
    """The environment that a person named.

    Args:
        variables: environment variables of the user.
        host: makes what an overlay stands on.

    Raises:
        NoEnvironment: it cannot be made.
    """
    if spec.way == "python":
        return host_interpreter(variables, spec.value)
    if spec.way == "image":
        return open_image(spec.value, variables)
    folders = [Path(folder) for folder in spec.value.split(os.pathsep) if folder]
    return put_over(host(), folders)


# --- releases of this host --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A place that has Transformer Engine, or was named as one.

    Attributes:
        release: public version, such as "2.20.2"; empty where it cannot be read.
        place: the folder, or the interpreter.
        environment: how it is used; None where it cannot be.
        reason: why it is not used; empty where it is.
    """

    release: str
    place: str
    environment: InterpreterEnvironment | None
    reason: str = ""


def find_environments(overlays: Sequence[Path], variables: Mapping[str, str], python: str = "") -> tuple[Found, ...]:
    """Every release that is usable here, oldest first; then what is not usable, each with its reason.

    A root is a site folder, or holds site folders: each with `transformer_engine` is a release, and all others with
    packages (FlashAttention, DeepGEMM, ...) stand behind every release, in the order of the roots and of their names.

    Args:
        overlays: roots; those of `MEGACPP_OVERLAYS` where none is given.
        variables: environment variables of the user.
        python: interpreter that they stand on; the host's where it is empty.

    Raises:
        NoEnvironment: there is no such interpreter, or it cannot be started.
    """
    named = [Path(entry) for entry in variables.get(VARIABLE, "").split(os.pathsep) if entry]
    host, every = host_interpreter(variables, python), list[Found]()
    releases, common = list[Path](), list[Path]()
    for root in dict.fromkeys(root.absolute() for root in overlays or named):
        inside = sorted(place for place in root.iterdir() if place.is_dir()) if root.is_dir() else []
        places = [root] if _is_site(root) else inside
        with_te = [place for place in places if (place / _PACKAGE).is_dir()]
        without = [place for place in places if place not in with_te and _is_site(place)]
        if not with_te and not without:
            every.append(Found("", str(root), None, "there are no packages, and no folders that hold some"))
        releases += with_te
        common += without
    overlaid = [_try_overlay(host, place, common) for place in releases]
    own = _read_release(host.about.path)
    mine = [] if own is None else [Found(own, host.shown, host if own else None, "" if own else _UNREADABLE)]
    every = [*overlaid, *mine, *every]
    # Of two places with one release the first counts.
    usable = {Version(found.release): found for found in reversed(every) if found.environment is not None}
    others = [found for found in every if found.environment is None]
    return (*(usable[version] for version in sorted(usable)), *others)


def _read_release(folders: Sequence[Path]) -> str | None:
    """The public version of the Transformer Engine that is found first in some folders.

    None where there is none; empty where its metadata is damaged.
    """
    for one in metadata.distributions(name=_PACKAGE, path=list(map(str, folders))):
        version = read_version(one.version or "")
        return version.public if version else ""
    return None


def _is_site(folder: Path) -> bool:
    """Whether packages lie in a folder itself: one that a packer keeps its archives in is none."""
    return any(next(folder.glob(pattern), None) for pattern in ("*.dist-info", "*/__init__.py", "*.pth"))


def _try_overlay(host: InterpreterEnvironment, place: Path, common: Sequence[Path]) -> Found:
    release, reason = _read_release([place]) or "", ""
    # Of the torch extension, for which Python it is built.
    built = [*place.glob(f"{_EXTENSION}.*so"), *place.glob(f"{_PACKAGE}/wheel_lib/{_EXTENSION}.*so")]
    suffixes = {file.name.removeprefix(_EXTENSION) for file in built}
    if not release:
        reason = _UNREADABLE
    elif suffixes and not suffixes & {host.about.suffix, ".abi3.so", ".so"}:
        reason = f"its torch extension is built for {', '.join(sorted(suffixes))}, and {host.shown} loads "
        reason += f"{host.about.suffix}. Next step: give the Python that it was built for with --python"
    if reason:
        return Found(release, str(place), None, reason)
    because = f"Transformer Engine {release} of {place}"
    if common:
        because += f", with {', '.join(folder.name for folder in common)} of {common[0].parent}"
    try:
        return Found(release, str(place), put_over(host, (place, *common), because))
    except NoEnvironment as fault:
        return Found("", str(place), None, str(fault))


def resolve_environment(release: str, found: Sequence[Found]) -> InterpreterEnvironment:
    """The environment of a release that the host has; an overlay comes before the interpreter's own.

    Args:
        release: of Transformer Engine.
        found: what the host has, from `find_environments`.

    Raises:
        NoEnvironment: nothing provides it.
    """
    for place in found:
        if place.environment is not None and is_same_release(place.release, release):
            return place.environment
    usable = ", ".join(place.release for place in found if place.environment is not None) or "no release"
    # A folder of this very release that cannot be used is the likely answer.
    broken = [f"{place.place}: {place.reason}" for place in found if place.environment is None and place.reason]
    also = f" Not usable: {'; '.join(broken)}." if broken else ""
    raise NoEnvironment(
        f"there is no environment with Transformer Engine {release}; this host has {usable}.{also} Likely cause: "
        f"the release is not installed here. Next step: `pip install --target DIR/te-{release}` and give DIR with "
        f"--overlays or {VARIABLE}, or write {_FORM}."
    )


def is_same_release(one: str, other: str) -> bool:
    """Whether two texts name one release: 2.12 is 2.12.0, and a build of one is that one."""
    versions = [read_version(text) for text in (one, other)]
    public = {Version(version.public) for version in versions if version is not None}
    return None not in versions and len(public) == 1


# --- stacks made usable -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """A stack, as far as it came.

    Attributes:
        name: its id; empty for that of the release that it has.
        environment: has no interpreter where it could not be made usable.
        problem: why it is not run; empty where it is.
    """

    name: str
    environment: InterpreterEnvironment = _NOWHERE
    facts: Facts = NO_FACTS
    problem: str = ""

    @property
    def shown(self) -> str:
        """Where it comes from and what it has; empty where it could not be made usable."""
        facts, environment = self.facts, self.environment
        te = f"Transformer Engine {facts.te}" if facts.te else "no Transformer Engine"
        versions = f"Python {facts.python}, torch {facts.torch or 'none'}, {te}"
        return f"{environment.shown} ({environment.because}): {versions}" if environment.python else ""

    def on(self, target: TargetRow) -> Stack:
        """The same stack, with a problem where this machine is none of the target."""
        return replace(self, problem=self.problem or why_not_here(target, self.facts))


def prepare_stack(name: str, make: Make, variables: Mapping[str, str], processes: Processes) -> Stack:
    """Make a stack usable and read what it has; `variables` are those of the user."""
    try:
        environment = make()
        facts = read_facts(environment, processes)
        require_torch(facts)
        _ = environment.identity  # raises here where the environment cannot be read
    except NoEnvironment as fault:
        return Stack(name, InterpreterEnvironment((), variables), problem=str(fault))
    return Stack(name, environment, facts)


# --- their cells ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackOptions(RunOptions):
    """What is run on every stack, and how.

    Attributes:
        times: whether modules are timed, and the first stack a second time, for the noise of the card.
        room: what all cells together may take at a time.
        progress: called with what becomes of each cell.
    """

    times: bool
    room: Room
    progress: Progress = lambda _: None


class StackRun(Frozen):
    """One stack of a run, for the report.

    Attributes:
        environment: where it comes from.
        folder: of its receipts.
        ran, reused: cells that this run started, and cells whose receipts it found.
        problem: why it could not be made usable; empty where it could.
    """

    stack: str
    environment: str
    folder: str
    ran: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class RanStack:
    """What one stack's cells ended in.

    Attributes:
        run: for the report.
        receipts: by probe; `not-run` with the reason where the stack has a problem.
        again: of the second run, by probe; empty where there was none.
    """

    run: StackRun
    receipts: Mapping[str, Receipt]
    again: Mapping[str, Receipt] = field(default_factory=dict)


def plan_cells(
    stack: Stack,
    target: TargetRow,
    rows: Sequence[BridgeModule | ProbeCell],
    folder: Path,
    *,
    seed: int,
    limit_s: float,
) -> list[Cell]:
    """The cells of a stack on a target, with the stack's problem.

    Their receipts are answers on an environment, and on the row of the matrix that they are judged by.
    """
    environment = stack.environment
    blank = plan_blank(target, stack.facts, environment.variables, seed=seed)
    identity = "" if stack.problem else hash_parts((environment.identity, repr(blank.target)))
    blank = replace(blank, stack=stack.name or blank.stack, environment=identity)
    return [
        Cell(environment, plan_row(blank, row), folder, limit_of(row, limit_s), row.seconds, problem=stack.problem)
        for row in rows
    ]


def run_stacks(
    catalog: Catalog, target: TargetRow, stacks: Sequence[Stack], options: StackOptions, processes: Processes
) -> tuple[RanStack, ...]:
    """Run every cell of every stack that is missing, side by side; modules of the first a second time, where timed.

    Args:
        catalog, target: what the cells are planned by.
        stacks: as `prepare_stack` gave them.
        options: what is run on each, and how.
        processes: that the cells' processes are among.

    Raises:
        WrongArguments: there is no such probe, or the folder cannot be written.
        InfrastructureFailed: another run writes its receipts there.
        OSError: the disk is full.
    """
    rows = choose_canary_probes(catalog, options.probes)
    stacks = [stack.on(target) for stack in stacks]
    cells: list[Cell] = []
    with own_folder(options.receipts), tempfile.TemporaryDirectory(prefix="megacpp-device-") as lock:
        device = str(Path(lock, "device")) if target.arch else ""
        for stack in stacks:
            is_first, folder = all(cell.problem for cell in cells), options.receipts / stack.name
            planned = plan_cells(stack, target, rows, folder, seed=options.seed, limit_s=options.limit_s)
            for cell in planned:
                times = options.times and cell.order.probe in TIMED
                cells.append(replace(cell, order=replace(cell.order, times=times, turnstile=device)))
            for cell in cells[-len(planned) :] if is_first and not stack.problem else ():
                if cell.order.times:
                    again = replace(cell.order, only_times=True)
                    cells.append(replace(cell, order=again, folder=folder / AGAIN, seconds=cell.seconds / 2))
        ran = run_here(cells, options.room, processes, fresh=options.fresh, progress=options.progress)
    found = list(zip((cell.order for cell in cells), ran, strict=True))
    return tuple(_collect(stack, options.receipts, found) for stack in stacks)


def _collect(stack: Stack, folder: Path, found: Sequence[tuple[Order, Ran]]) -> RanStack:
    mine = [(order, ran) for order, ran in found if order.stack == stack.name]
    receipts = {order.probe: ran.receipt for order, ran in mine if not order.only_times}
    again = {order.probe: ran.receipt for order, ran in mine if order.only_times}
    names = [(f"{AGAIN}/{order.cell}" if order.only_times else order.cell, ran.reused) for order, ran in mine]
    names = [] if stack.problem else names
    run = StackRun(
        stack=stack.name, environment=stack.shown, folder="" if stack.problem else str(folder / stack.name),
        ran=tuple(name for name, old in names if not old), reused=tuple(name for name, old in names if old),
        problem=stack.problem,
    )  # fmt: skip
    return RanStack(run, receipts, again)
