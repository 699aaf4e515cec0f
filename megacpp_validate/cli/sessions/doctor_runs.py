"""The verb of the doctor: what it runs, and the exit code of each answer."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Final

import typer

from ...catalog.bridge import Catalog, Stack, Target
from ...catalog.needs import Needs
from ...environments.doctor import judge
from ...environments.doctor_looks import Limits, take_looks
from ...environments.doctor_result import DoctorResult
from ...environments.doctor_seen import Rows, Seen
from ...environments.environment import NoEnvironment
from ...environments.interpreter import host_interpreter, put_over
from ...environments.plan import UnknownTarget, find_target
from ...process import Processes
from ..app import TOOL, Exit, Format, errors, foreseen

_TELLING: Final = "megacpp_validate.cli.telling"


@dataclass(frozen=True)
class Asked:
    """The arguments; an empty target is that of the GPU which is there, an empty stack none."""

    python: str
    overlays: tuple[Path, ...]
    target: str
    stack: str
    limit_s: float
    jobs: int


@foreseen({UnknownTarget: Exit.WRONG_ARGUMENTS, NoEnvironment: Exit.NO_ENVIRONMENT})
def run_doctor(
    catalog: Catalog, needs: Needs, asked: Asked, fmt: Format, output: Path | None, *, verbose: bool
) -> None:
    """Look, judge, tell; closed where something breaks, and not open where something could not be looked at."""
    if asked.target:
        find_target(catalog, asked.target)
    stack = _find_stack(catalog, asked.stack)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megacpp-door-") as door:
        environment = host_interpreter(os.environ, Path(door), asked.python)
        if asked.overlays:
            environment = put_over(environment, asked.overlays)
        packages = [row.id for row in needs.package]
        Thread(target=import_module, args=(_TELLING,), daemon=True).start()  # while others work: it reads every form
        with errors.status(f"importing {len(packages)} packages, a process each"):
            seen = take_looks(environment, packages, Limits(asked.limit_s, asked.jobs), Processes())
    target = _choose_target(catalog, asked.target, seen)
    rows = Rows(tuple(module.id for module in catalog.modules), target, stack, catalog.pinned, needs)
    result = DoctorResult(
        tool=TOOL,
        interpreter=f"{environment.shown} ({environment.because})",
        target=target.id,
        stack=f"{(stack or catalog.pinned).id} ({'asked for' if stack else 'pinned'})",
        path=seen.path,
        packages=seen.packages,
        differences=judge(seen, rows),
        seconds=round(time.monotonic() - started, 1),
    )
    from ..telling import tell

    tell(result, fmt, output, verbose=verbose)
    if result.breaks:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.EVIDENCE_MISSING if result.lacks else Exit.OPEN)


def _find_stack(catalog: Catalog, name: str) -> Stack | None:
    if not name:
        return None
    known = {stack.id: stack for stack in catalog.stacks}
    if name not in known:
        raise UnknownTarget(f"there is no stack {name!r}. Next step: choose one of {', '.join(known)}.")
    return known[name]


def _choose_target(catalog: Catalog, name: str, seen: Seen) -> Target:
    """What is asked for; else the target of the GPU that is there; else the one without.

    Raises:
        UnknownTarget: the matrix has no row for that GPU; held against none it would be told as clean.
    """
    if name or not seen.path.gpu:
        return find_target(catalog, name or "cpu")
    arch = f"sm_{seen.path.capability.replace('.', '')}"
    known = [target for target in catalog.targets if target.arch]
    for target in known:
        if target.arch == arch:
            return target
    raise UnknownTarget(
        f"the matrix has no target for {seen.path.gpu} ({arch}). Next step: name one with --target, of "
        f"{', '.join(target.id for target in known)} or cpu, or add a row to matrix/targets.toml."
    )
