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
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from ...catalog.bridge import BridgeModule, Catalog
from ...catalog.planted import Damage, read_damages
from ...diagnosis.installs import ImportFailure, explain_reason
from ...environments.plan import choose_names
from ...errors import ToolError
from ...evidence.receipt import Outcome
from ...evidence.values import Frozen, Result
from ...process import Ended, Processes, Stopped, run_command
from . import damage
from .damage import LIMIT_S, CannotBuild, Install, Interpreter, WheelOf

BRIDGE: Final = Path(__file__).resolve().parents[2] / "bridge"
_CHILD: Final = Path(__file__).with_name("child.py")
_PACKAGE: Final = "megacpp_validate.bridge"
_STEERING: Final = ("PYTHON", "MEGACPP_", "NVTE_", "VIRTUAL_ENV")  # variables that no process inherits
_NO_TORCH: Final = "ModuleNotFoundError: No module named 'torch'"


class FirewallCase(Frozen):
    """One damaged install and what the bridge made of it.

    Attributes:
        case: id, "undefined-symbol".
        damage: what was done to the install, in words.
        release: the Transformer Engine release whose wheel was laid out.
        compiled: "stand-in" (its compiled halves cannot load on this host) or "none".
        outcome: pass only if every bridge module imported, the verdict was the expected one and the reason says what
            the case must say.
        available: what `is_te_available()` answered; None if the process never answered.
        reason: `why_te_is_unavailable()`, or the missing entry's reason.
        native_paths: bridge module -> the native path that it names; empty where a problem was found.
        ended: "exit", "killed after N s" or "signal N": how the process ended.
        problems: what was not as expected; empty on a pass.
    """

    case: str
    damage: str
    release: str
    compiled: str
    outcome: Outcome
    available: bool | None = None
    reason: str = ""
    native_paths: dict[str, str] = Field(default_factory=dict)
    ended: str = ""
    seconds: float = 0.0
    problems: tuple[str, ...] = ()


class FirewallResult(Result):
    """The firewall tier's answer on one host."""

    schema_id: Literal["megacpp-validate/firewall/1"] = "megacpp-validate/firewall/1"
    python: str
    torch: str
    cases: tuple[FirewallCase, ...]

    @property
    def breaks(self) -> bool:
        """Whether a case ran and failed."""
        return any(case.outcome is Outcome.FAIL for case in self.cases)

    @property
    def lacks(self) -> bool:
        """Whether a case did not pass, or none ran."""
        return not self.cases or any(case.outcome is not Outcome.PASS for case in self.cases)


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


def plan_firewall(catalog: Catalog, only: Collection[str] = ()) -> tuple[Damage, ...]:
    """The cases of a run, undamaged installs first, with those that the others need.

    Raises:
        WrongArguments: no case has one of these names.
    """
    rows = {row.id: row for row in read_damages(catalog)}
    named = choose_names("firewall case", list(rows), tuple(only))
    chosen = {*named, *(rows[name].baseline for name in named)}
    return tuple(row for row in rows.values() if row.id in chosen)


def run_firewall(
    catalog: Catalog,
    wheels: WheelOf,
    *,
    only: Collection[str] = (),
    limit_s: float = LIMIT_S,
    jobs: int = 2,
    progress: Callable[[FirewallCase], None] = lambda _: None,
    bridge: Path = BRIDGE,
) -> FirewallResult:
    """Damage laid-out releases, one process a case, and see whether the bridge stands.

    Args:
        catalog: for the bridge's modules, and the release that most cases lay out.
        wheels: (version, distribution) -> path of its verified pure-Python wheel. What it raises for a release that is
            laid out goes through; a case that needs another distribution is not run then.
        only: ids of the cases; none for all.
        limit_s: seconds after which a process that has not answered is ended.
        jobs: cases at a time.
        progress: called with each case, from one thread.
        bridge: folder of the bridge package; it is copied.

    Raises:
        WrongArguments: a name in `only` that is no case.
    """
    plan = plan_firewall(catalog, only)
    interpreter = damage.read_interpreter(max(limit_s, LIMIT_S))
    for release in sorted({row.release for row in plan}):
        wheels(release, "transformer-engine")
    done: dict[str, FirewallCase] = {}
    with tempfile.TemporaryDirectory(prefix="firewall-") as folder, ThreadPoolExecutor(jobs) as pool:
        tier = _Tier(catalog.modules, wheels, interpreter, Path(folder).resolve(), limit_s, done)
        tier.prepare(bridge, compiles=any(row.parts for row in plan))
        try:
            for undamaged in (True, False):  # the others need them
                for case in pool.map(tier.run_case, [row for row in plan if (not row.reason) is undamaged]):
                    done[case.case] = case
                    progress(case)
        except BaseException:  # an interrupt too: nothing may keep running behind it
            tier.processes.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    cases = tuple(done[row.id] for row in plan)
    return FirewallResult(python=platform.python_version(), torch=interpreter.torch or "none", cases=cases)


@dataclass
class _Tier:
    """One run of the tier.

    Attributes:
        done: the cases that have ended, by id.
        stand_ins: folder of the compiled parts; None where `why_none` says why.
    """

    modules: Sequence[BridgeModule]
    wheels: WheelOf
    interpreter: Interpreter
    work: Path
    limit_s: float
    done: Mapping[str, FirewallCase]
    stand_ins: Path | None = None
    why_none: str = ""
    processes: Processes = field(default_factory=Processes)

    def prepare(self, bridge: Path, *, compiles: bool) -> None:
        """Copy the bridge as a training tree would, to a package of the same name, and build the stand-ins."""
        package = self.work / "bridge" / _PACKAGE.partition(".")[0]
        for source, name in ((bridge, "bridge"), (bridge.with_name("native"), "native")):
            shutil.copytree(source, package / name, ignore=shutil.ignore_patterns("__pycache__"))
        (package / "__init__.py").touch()
        try:
            self.stand_ins = damage.build_stand_ins(self.work / "stand-ins") if compiles else None
        except CannotBuild as fault:
            self.why_none = str(fault)

    def run_case(self, row: Damage) -> FirewallCase:
        """Run one case in an environment of its own, which is removed afterwards."""
        started, folder = time.monotonic(), self.work / row.id
        found: dict[str, Any] = {"outcome": Outcome.NOT_RUN}
        if why := self._why_not(row):
            found["problems"] = (why,)
        else:
            try:
                found = self._observe(row, folder)
            except (ToolError, CannotBuild, LookupError, OSError, Stopped) as fault:
                found["problems"] = (f"the install could not be laid out or damaged: {fault}",)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        return FirewallCase(
            case=row.id, damage=row.says, release=row.release, compiled="stand-in" if row.parts else "none",
            seconds=round(time.monotonic() - started, 2), **found,
        )  # fmt: skip

    def _why_not(self, row: Damage) -> str:
        """Why a case would prove nothing here; empty where it can be run."""
        if not row.hides_torch and self.interpreter.problem:  # the bridge itself is made of torch
            return self.interpreter.problem
        if row.parts and self.stand_ins is None:
            return self.why_none
        if row.baseline and self.done[row.baseline].outcome is not Outcome.PASS:
            return f"{row.baseline} is not available here: this case proves nothing"
        return ""

    def _observe(self, row: Damage, folder: Path) -> dict[str, Any]:
        """Lay out, damage, start the process of the case; returns the fields of the case that were observed."""
        python, site = damage.make_environment(folder)
        install = Install(row.release, folder, site, self.wheels, self.stand_ins)
        damage.lay_out(install, row.parts)
        if row.do:
            action, *words = row.do
            damage.ACTIONS[action](install, *words)
        path = map(str, (self.work / "bridge", *damage.link_the_rest(install, self.interpreter)))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_STEERING)}
        variables = {**inherited, "PYTHONPATH": os.pathsep.join(path), **install.variables}
        answer, ended = self._ask(python, folder, variables)
        problems = judge(row, self.modules, answer, ended)
        return {
            "outcome": Outcome.FAIL if problems else Outcome.PASS,
            "available": answer.available if answer else None,
            "reason": _choose_reason(row, answer).replace(str(folder), "ENVIRONMENT") if answer else "",
            "native_paths": {one.id: one.native for one in self.modules} if answer and not problems else {},
            "ended": ended.how,
            "problems": problems,
        }

    def _ask(self, python: Path, folder: Path, variables: Mapping[str, str]) -> tuple[Answer | None, Ended]:
        """Start the process of a case and read its answer, with the likely cause in it; None where it gave none."""
        target = folder / "answer.json"
        names = sorted(path.stem for path in (self.work / "bridge").glob("*/bridge/*.py") if path.stem != "__init__")
        command = [str(python), "-P", str(_CHILD), str(target), f"{self.limit_s * 0.7:g}", _PACKAGE, *names]
        ended = run_command(command, limit_s=self.limit_s, folder=folder, variables=variables, processes=self.processes)
        try:
            answer = Answer.model_validate_json(target.read_bytes())
        except (OSError, ValidationError):
            return None, ended
        if answer.failure is not None:  # while the damaged files are there: some rows look at them
            answer = answer.model_copy(update={"reason": explain_reason(answer.reason, answer.failure)})
        return answer, ended


def judge(row: Damage, modules: Sequence[BridgeModule], answer: Answer | None, ended: Ended) -> tuple[str, ...]:
    """What is not as the row has it; empty on a pass."""
    if answer is None:
        return (f"the process gave no answer ({ended.how}): {ended.last_words}",)
    problems = [
        f"importing {name} raised {fault}"
        for name, fault in answer.imported.items()
        if fault and not (row.hides_torch and fault == _NO_TORCH and not name.endswith(".imports"))
    ]
    problems += answer.problems
    if answer.available is not row.available:
        problems.append(f"is_te_available() is {answer.available}, not {row.available}")
    elif row.available and {*answer.missing} != {*row.missing}:
        problems.append(f"None comes from {sorted(answer.missing)}, and should from {sorted(row.missing)}")
    reason = _choose_reason(row, answer)
    if reason and not row.reason:
        problems.append(f"Transformer Engine is available and yet there is a reason: {reason}")
    problems += [f"the reason does not say {one!r}: {reason!r}" for one in row.reason if not re.search(one, reason)]
    for one in () if row.hides_torch else modules:
        named = answer.native_paths.get(PurePath(one.files[0]).stem, "")
        if named != one.native and one.id != "imports":  # the import bridge has no native path
            problems.append(f"{one.id} names the native path {named!r}, the matrix {one.native!r}")
    return tuple(problems)


def _choose_reason(row: Damage, answer: Answer) -> str:
    """The reason that the case is about: of the missing entry where TE is available, else of the verdict."""
    if row.available and answer.available and row.missing and row.reason:
        return answer.missing.get(row.missing[0], "")
    return answer.reason
