"""The firewall tier: the bridge can be imported, and reports what is wrong, on any install of Transformer Engine.

One damaged install, one process, one outcome. The processes run in environments of their own, get a copy of the bridge,
and answer in JSON; this side imports neither torch, nor a vendor library, nor the bridge. No outcome depends on how
fast the host is: a limit only ends what never answers.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final

from pydantic import ValidationError

from ...catalog.bridge import BridgeModule
from ...diagnosis.installs import ImportFailure, explain_reason
from ...errors import WrongArguments
from ...evidence.values import Frozen
from ...process import Ended, Processes, Stopped, run_command
from .damage import PINNED, Damage, baseline_of, plan_firewall
from .install import (
    LIMIT_S,
    TE,
    CannotBuild,
    Install,
    InstallMode,
    Interpreter,
    WheelOf,
    build_stand_ins,
    lay_out_current,
    lay_out_wheels,
    link_the_rest,
    make_environment,
    read_current_release,
    read_interpreter,
)
from .result import FirewallCase, FirewallOutcome, FirewallResult

BRIDGE: Final = Path(__file__).resolve().parents[2] / "bridge"
_CHILD: Final = Path(__file__).with_name("child.py")
_PACKAGE: Final = "megacpp_validate.bridge"
_STEERING: Final = ("PYTHON", "MEGACPP_", "NVTE_", "VIRTUAL_ENV")  # variables that no process inherits
_NO_TORCH: Final = "ModuleNotFoundError: No module named 'torch'"


class Answer(Frozen):
    """What a process in the environment answered; `child.py` makes it.

    Attributes:
        imported: module of the bridge -> what importing it raised; empty if nothing.
        native_paths: module -> its NATIVE_PATH.
        available, reason: the verdict.
        failure: the facts of a failed import; None where none failed.
        missing: accessor that gives None -> its reason.
        problems: what is wrong whatever the install is like.
    """

    imported: dict[str, str]
    native_paths: dict[str, str]
    available: bool | None
    reason: str
    failure: ImportFailure | None
    missing: dict[str, str]
    problems: tuple[str, ...]


def run_firewall(  # noqa: PLR0913 - all but two are keywords with a default
    modules: Sequence[BridgeModule],
    wheels: WheelOf,
    *,
    tool: str,
    only: Collection[str] = (),
    install: InstallMode = "wheels",
    limit_s: float = LIMIT_S,
    jobs: int = 2,
    progress: Callable[[FirewallCase], None] = lambda _: None,
    bridge: Path = BRIDGE,
) -> FirewallResult:
    """Damage real installs, one process a case, and see whether the bridge stands.

    Args:
        modules: the bridge's modules, as `matrix/bridge.toml` has them.
        wheels: (distribution, version) -> path of its verified pure-Python wheel. What it raises for a release of
            Transformer Engine goes through; a case that needs another distribution is not run then.
        tool: name and version of this tool, for the record.
        only: ids of the cases; none for all.
        install: "wheels" lays out releases with stand-ins for their compiled parts, "current" the install of this
            interpreter.
        limit_s: seconds after which a process that has not answered is ended.
        jobs: cases at a time.
        progress: called with each case as it ends, from one thread at a time.
        bridge: folder of the bridge package; it is copied.

    Raises:
        WrongArguments: a name in `only` that is no case, or "current" where no whole install is.
    """
    plan = plan_firewall(only, install)
    interpreter = read_interpreter(max(limit_s, LIMIT_S))
    release = PINNED if install == "wheels" else read_current_release(interpreter)
    if not release:
        raise WrongArguments(
            "No whole install of Transformer Engine (sources, core, torch extension) is on the path of this "
            "interpreter. Next step: put one on PYTHONPATH, or take --install wheels."
        )
    if install == "wheels":
        for name in sorted({row.release or release for row in plan}):
            wheels(TE, name)
    with tempfile.TemporaryDirectory(prefix="firewall-") as folder:
        work = Path(folder).resolve()
        # The bridge as a training tree would take it: a copy of its folder under a package of the same name.
        package = work / "bridge" / _PACKAGE.partition(".")[0]
        for source, name in ((bridge, "bridge"), (bridge.with_name("native"), "native")):
            shutil.copytree(source, package / name, ignore=shutil.ignore_patterns("__pycache__"))
        (package / "__init__.py").touch()
        stand_ins, why_none = None, ""
        try:
            stand_ins = build_stand_ins(work / "stand-ins") if any(row.parts for row in plan) else None
        except CannotBuild as fault:
            why_none = str(fault)
        tier = _Tier(modules, wheels, interpreter, stand_ins, why_none, release, install, work, limit_s, progress)
        cases = tier.run(plan, jobs)
    return FirewallResult(tool=tool, python=platform.python_version(), torch=interpreter.torch or "none", cases=cases)


@dataclass(frozen=True)
class _Tier:
    """One run of the tier; `why_none` is why there are no stand-ins, `done` the cases that have ended, by id."""

    modules: Sequence[BridgeModule]
    wheels: WheelOf
    interpreter: Interpreter
    stand_ins: Path | None
    why_none: str
    release: str
    mode: InstallMode
    work: Path
    limit_s: float
    progress: Callable[[FirewallCase], None]
    processes: Processes = field(default_factory=Processes)
    done: dict[str, FirewallCase] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, plan: Sequence[Damage], jobs: int) -> tuple[FirewallCase, ...]:
        """Undamaged installs first, then the cases that need them; results in the order of the plan."""
        with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
            try:
                for baselines in (True, False):
                    list(pool.map(self._run_case, [row for row in plan if row.is_baseline is baselines]))
            except BaseException:  # an interrupt too: nothing may keep running behind it
                self.processes.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return tuple(self.done[row.id] for row in plan)

    def _run_case(self, row: Damage) -> None:
        started = time.monotonic()
        compiled = "none" if not row.parts else "real" if self.mode == "current" else "stand-in"
        folder = self.work / row.id
        found: dict[str, Any] = {"outcome": FirewallOutcome.NOT_RUN}
        if why := self._why_not(row):
            found["problems"] = (why,)
        else:
            try:
                found = self._observe(row, folder)
            except (CannotBuild, LookupError, OSError, Stopped) as fault:
                found["problems"] = (f"the install could not be laid out or damaged: {fault}",)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            found["seconds"] = round(time.monotonic() - started, 2)
        case = FirewallCase(
            case=row.id, damage=row.says, release=row.release or self.release, compiled=compiled, **found
        )  # fmt: skip
        with self.lock:
            self.done[row.id] = case
            self.progress(case)

    def _why_not(self, row: Damage) -> str:
        """Why a case would prove nothing here; empty where it can be run."""
        if not row.hides_torch and self.interpreter.problem:  # the bridge itself is made of torch
            return self.interpreter.problem
        if row.parts and self.mode == "wheels" and self.stand_ins is None:
            return self.why_none
        if row.extra is not None:
            try:
                self.wheels(*row.extra)
            except Exception as fault:  # whatever the supplier raises
                return f"{row.extra[0]} {row.extra[1]} could not be fetched: {fault}"
        baseline = self.done.get(baseline_of(row, self.mode)) if row.needs_baseline else None
        if baseline is not None and baseline.outcome is not FirewallOutcome.PASS:
            return f"the undamaged install of {baseline.release} is not available here: this case proves nothing"
        return ""

    def _observe(self, row: Damage, folder: Path) -> dict[str, Any]:
        """Lay out, damage, ask; returns the fields of the case that were observed."""
        python, site = make_environment(folder)
        real, release = self.mode == "current", row.release or self.release
        install = Install(release, folder, site, self.wheels, self.stand_ins, real=real)
        if real:
            lay_out_current(install, row.parts, self.interpreter)
        else:
            lay_out_wheels(install, row.parts)
        row.do(install)
        path = map(str, (self.work / "bridge", *link_the_rest(install, self.interpreter)))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_STEERING)}
        variables = {**inherited, "PYTHONPATH": os.pathsep.join(path), **install.variables}
        answer, ended = self._ask(python, folder, variables)
        problems = judge(row, self.modules, answer, ended)
        return {
            "outcome": FirewallOutcome.FAIL if problems else FirewallOutcome.PASS,
            "available": answer.available if answer else None,
            "reason": _choose_reason(row, answer).replace(str(folder), "ENVIRONMENT") if answer else "",
            "native_paths": _native_paths(self.modules, answer) if answer else {},
            "ended": ended.how,
            "problems": problems,
        }

    def _ask(self, python: Path, folder: Path, variables: Mapping[str, str]) -> tuple[Answer | None, Ended]:
        """Start the process of a case and read its answer, with the likely cause in it; None where it gave none."""
        target = folder / "answer.json"
        names = sorted(path.stem for path in (self.work / "bridge").glob("*/bridge/*.py") if path.stem != "__init__")
        command = [str(python), "-P", str(_CHILD), str(target), f"{self.limit_s * 0.7:g}", _PACKAGE, *names]
        ended = run_command(
            command, limit_s=self.limit_s, folder=folder, variables=variables, processes=self.processes
        )  # fmt: skip
        try:
            answer = Answer.model_validate_json(target.read_bytes())
        except (OSError, ValidationError):
            return None, ended
        if answer.failure is not None:  # while the damaged files are there: some rows look at them
            answer = answer.model_copy(update={"reason": explain_reason(answer.reason, answer.failure)})
        return answer, ended


# --- the judge ------------------------------------------------------------------------------------------------------


def judge(row: Damage, modules: Sequence[BridgeModule], answer: Answer | None, ended: Ended) -> tuple[str, ...]:
    """What is not as the row has it; empty on a pass."""
    if answer is None:
        return (f"the process gave no answer ({ended.how}): {ended.last_words}",)
    problems = [
        f"importing {name} raised {fault}"
        for name, fault in answer.imported.items()
        if fault and not (row.hides_torch and fault == _NO_TORCH and not name.endswith(".imports"))
    ]
    missing = set(answer.missing) if row.available and answer.available else set(row.missing)
    reason = _choose_reason(row, answer)
    wrong = (
        (answer.available is not row.available, f"is_te_available() is {answer.available}, not {row.available}"),
        (missing != set(row.missing), f"None comes from {sorted(missing)}, and should from {sorted(row.missing)}"),
        (reason and not row.reason, f"Transformer Engine is available and yet there is a reason: {reason}"),
    )
    problems += [*answer.problems, *(problem for is_wrong, problem in wrong if is_wrong)]
    problems += [f"the reason does not say {one!r}: {reason!r}" for one in row.reason if not re.search(one, reason)]
    if not row.hides_torch:
        named = _native_paths(modules, answer)
        problems += [
            f"{one.id} names the native path {named[one.id]!r}, the matrix {one.native!r}"
            for one in modules
            if not named[one.id] or named[one.id] != one.native
        ]
    return tuple(problems)


def _choose_reason(row: Damage, answer: Answer) -> str:
    """The reason that the case is about: of the missing entry where TE is available, else of the verdict."""
    if row.available and answer.available and row.missing and row.reason:
        return answer.missing.get(row.missing[0], "")
    return answer.reason


def _native_paths(modules: Sequence[BridgeModule], answer: Answer) -> dict[str, str]:
    """Bridge module -> the native path that it names; the import bridge has none, so the matrix does."""
    named = {module.id: answer.native_paths.get(PurePath(module.files[0]).stem, "") for module in modules}
    return named | {module.id: module.native for module in modules if module.id == "imports" and not named["imports"]}
