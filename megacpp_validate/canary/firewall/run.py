"""The firewall tier: whatever is wrong with an install of Transformer Engine, the bridge can be imported and says why.

One damaged install, one process, one outcome. The processes run in environments of their own, get a copy of the bridge,
and answer in JSON; this side imports neither torch, nor a vendor library, nor the bridge. No outcome depends on how
fast the host is: a row that hangs on purpose says so itself by a file, and a limit only ends what never answers.
"""

from __future__ import annotations

import math
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

from pydantic import BaseModel, ConfigDict, ValidationError

from ...catalog.bridge import BridgeModule
from ...errors import WrongArguments
from ...process import Ended, Processes, Stopped, run_command
from .damage import PINNED, Damage, NotDamageable, baseline_of, plan_firewall
from .install import (
    LIMIT_S,
    TE,
    CannotBuild,
    Install,
    InstallMode,
    Interpreter,
    StandIns,
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
_TRIAL: Final = "MEGACPP_TE_TRIAL_SECONDS"
_MARK: Final = "MEGACPP_FIREWALL_MARK"  # the file that the hanging core library makes; standin/core.c reads it, too
_LEAST_TRIAL_S: Final = 5.0
_TRIAL_RATIO: Final = 4.0  # of the time that the import took up to the place where it hangs
_STEERING: Final = ("PYTHON", "MEGACPP_", "NVTE_", "VIRTUAL_ENV")  # variables that no process inherits
_NO_TORCH: Final = "ModuleNotFoundError: No module named 'torch'"


class Answer(BaseModel):
    """What a process in the environment answered; `child.py` makes it.

    Attributes:
        imported: module of the bridge -> what importing it raised; empty if nothing.
        imported_early: Transformer Engine was imported before anybody asked for it.
        native_paths: module -> its NATIVE_PATH.
        top_level: `import transformer_engine` itself succeeded.
        available, reason: the verdict.
        decided_twice: the second question got another answer.
        missing: accessor that gives None -> its reason.
        problems: where an accessor contradicts itself.
        raised: what one of the questions raised.
    """

    model_config = ConfigDict(frozen=True)

    imported: dict[str, str]
    imported_early: bool
    native_paths: dict[str, str]
    top_level: bool
    available: bool | None = None
    reason: str = ""
    decided_twice: bool = False
    missing: dict[str, str] = {}
    problems: tuple[str, ...] = ()
    raised: str = ""


@dataclass(frozen=True)
class _Shared:
    """What every case of a run shares; `lacking` says why a wheel could not be fetched."""

    modules: Sequence[BridgeModule]
    bridge: Path
    wheels: Mapping[tuple[str, str], Path]
    lacking: Mapping[tuple[str, str] | None, str]
    interpreter: Interpreter
    stand_ins: StandIns | None
    no_stand_ins: str
    release: str
    mode: InstallMode
    work: Path
    limit_s: float
    processes: Processes = field(default_factory=Processes)


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
    fetched, lacking = _fetch(plan, wheels, install)
    with tempfile.TemporaryDirectory(prefix="firewall-") as folder:
        work = Path(folder).resolve()
        _copy_bridge(bridge, work / "bridge")
        stand_ins, why_none = None, "no case of this run has compiled parts"
        try:
            if any(row.parts for row in plan):
                stand_ins = build_stand_ins(work / "stand-ins")
        except CannotBuild as fault:
            why_none = str(fault)
        shared = _Shared(
            modules, bridge, fetched, lacking, interpreter, stand_ins, why_none, release, install, work, limit_s
        )  # fmt: skip
        cases = _run_all(plan, shared, jobs, progress)
    return FirewallResult(tool=tool, python=platform.python_version(), torch=interpreter.torch or "none", cases=cases)


def _fetch(
    plan: Sequence[Damage], wheels: WheelOf, mode: InstallMode
) -> tuple[dict[tuple[str, str], Path], dict[tuple[str, str] | None, str]]:
    """Every wheel that the plan takes, before the first case; and why those of other distributions are lacking."""
    releases = sorted({row.release or PINNED for row in plan}) if mode == "wheels" else []
    fetched = {(TE, release): wheels(TE, release) for release in releases}
    lacking: dict[tuple[str, str] | None, str] = {}
    for extra in sorted({row.extra for row in plan if row.extra}):
        try:
            fetched[extra] = wheels(*extra)
        except Exception as fault:  # whatever the supplier raises
            lacking[extra] = f"{extra[0]} {extra[1]} could not be fetched: {fault}"
    return fetched, lacking


def _copy_bridge(bridge: Path, target: Path) -> None:
    """The bridge as a training tree would take it: a copy of its folder under a package of the same name."""
    package = target / _PACKAGE.partition(".")[0]
    for source in (bridge, bridge.with_name("native")):
        shutil.copytree(source, package / ("bridge" if source == bridge else "native"),
                        ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    (package / "__init__.py").touch()


def _run_all(
    plan: Sequence[Damage], shared: _Shared, jobs: int, progress: Callable[[FirewallCase], None]
) -> tuple[FirewallCase, ...]:
    """Undamaged installs first, then the cases that need them; results in the order of the plan."""
    done: dict[str, FirewallCase] = {}
    lock = threading.Lock()

    def run(row: Damage) -> None:
        case = _run_case(row, shared, done)
        with lock:
            done[row.id] = case
            progress(case)

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        try:
            for baselines in (True, False):
                list(pool.map(run, [row for row in plan if row.is_baseline is baselines]))
        except BaseException:  # an interrupt too: nothing may keep running behind it
            shared.processes.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tuple(done[row.id] for row in plan)


def _run_case(row: Damage, shared: _Shared, done: Mapping[str, FirewallCase]) -> FirewallCase:
    started = time.monotonic()
    case = FirewallCase(
        case=row.id,
        damage=row.says,
        release=row.release or shared.release,
        compiled="none" if not row.parts else "real" if shared.mode == "current" else "stand-in",
        outcome=FirewallOutcome.NOT_RUN,
    )
    if why := _why_not(row, shared, done):
        return case.model_copy(update={"problems": (why,)})
    folder = shared.work / row.id
    try:
        observed = _observe(row, shared, folder)
    except (CannotBuild, NotDamageable, LookupError, OSError, Stopped) as fault:
        return case.model_copy(update={"problems": (f"the install could not be laid out or damaged: {fault}",)})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return case.model_copy(update={**observed, "seconds": round(time.monotonic() - started, 2)})


def _why_not(row: Damage, shared: _Shared, done: Mapping[str, FirewallCase]) -> str:
    """Why a case would prove nothing here; empty where it can be run."""
    if not row.hides_torch and shared.interpreter.problem:  # the bridge itself is made of torch
        return shared.interpreter.problem
    if row.parts and shared.mode == "wheels" and shared.stand_ins is None:
        return shared.no_stand_ins
    if row.extra in shared.lacking:
        return shared.lacking[row.extra]
    baseline = done.get(baseline_of(row, shared.mode)) if row.needs_baseline and not row.is_baseline else None
    if baseline is not None and baseline.outcome is not FirewallOutcome.PASS:
        return f"the undamaged install of {baseline.release} is not available here: this case proves nothing"
    return ""


def _observe(row: Damage, shared: _Shared, folder: Path) -> dict[str, Any]:
    """Lay out, damage, ask; returns the fields of the case that were observed."""
    python, site = make_environment(folder)
    real = shared.mode == "current"
    install = Install(row.release or shared.release, folder, site, shared.wheels, shared.stand_ins, real=real)
    if real:
        lay_out_current(install, row.parts, shared.interpreter)
    else:
        lay_out_wheels(install, row.parts)
    row.do(install)
    path = map(str, (shared.work / "bridge", *link_the_rest(install, shared.interpreter)))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_STEERING)}
    variables = {**inherited, "PYTHONPATH": os.pathsep.join(path), **install.variables}
    problems: tuple[str, ...] = ()
    how = ""
    if row.ends != "exit":  # without a trial import it takes the process with it, and this side says where
        mark = folder / "hangs"
        _, first = _ask(shared, python, folder, {**variables, _MARK: str(mark)})
        hangs, at = mark.exists(), _find_place(first)
        problems = _judge_end(row, first, at, hangs=hangs)
        trial = max(_LEAST_TRIAL_S, _TRIAL_RATIO * first.seconds)
        variables[_TRIAL] = str(math.ceil(min(trial, shared.limit_s / 2)))
        how = f"{'hangs' if hangs else first.how}{at}; with {_TRIAL}: "
    answer, ended = _ask(shared, python, folder, variables)
    problems += _judge(row, shared.modules, answer, ended)
    reason = _choose_reason(row, answer) if answer else ""
    return {
        "outcome": FirewallOutcome.FAIL if problems else FirewallOutcome.PASS,
        "available": answer.available if answer else None,
        "reason": reason.replace(str(folder), "ENVIRONMENT"),
        "native_paths": _native_paths(shared.modules, answer) if answer else {},
        "ended": (how + ended.how).replace(str(folder), "ENVIRONMENT"),
        "problems": problems,
    }


def _ask(shared: _Shared, python: Path, folder: Path, variables: dict[str, str]) -> tuple[Answer | None, Ended]:
    """Start the process of a case and read its answer; None where it gave none."""
    target = folder / "answer.json"
    target.unlink(missing_ok=True)
    names = sorted(path.stem for path in shared.bridge.glob("*.py") if path.stem != "__init__")
    command = [str(python), "-P", str(_CHILD), str(target), f"{shared.limit_s * 0.7:g}", _PACKAGE, *names]
    ended = run_command(
        command, limit_s=shared.limit_s, folder=folder, variables=variables, processes=shared.processes
    )  # fmt: skip
    try:
        return Answer.model_validate_json(target.read_bytes()), ended
    except (OSError, ValidationError):
        return None, ended


# --- the judge ------------------------------------------------------------------------------------------------------


def _judge(row: Damage, modules: Sequence[BridgeModule], answer: Answer | None, ended: Ended) -> tuple[str, ...]:
    """What was not as the case asks for; empty on a pass."""
    if answer is None:
        return (f"the process gave no answer ({ended.how}){_find_place(ended)}: {_last_line(ended)}",)
    problems = [
        f"importing {name} raised {fault}"
        for name, fault in answer.imported.items()
        if fault and not (row.hides_torch and fault == _NO_TORCH and not name.endswith(".imports"))
    ]
    missing = set(answer.missing) if row.available and answer.available else set(row.missing)
    wrong_verdict = (
        (answer.imported_early, "importing the bridge imported transformer_engine"),
        (answer.available is not row.available, f"is_te_available() is {answer.available}, not {row.available}"),
        (answer.decided_twice, "is_te_available() gave two answers in one process"),
        (missing != set(row.missing), f"None comes from {sorted(missing)}, and should from {sorted(row.missing)}"),
        (row.top_level not in (None, answer.top_level), f"`import transformer_engine`: {answer.top_level}"),
    )
    if answer.raised:
        problems.append(f"asking the bridge raised {answer.raised}")
    else:
        problems += [*(says for is_wrong, says in wrong_verdict if is_wrong), *answer.problems]
    reason = _choose_reason(row, answer)
    if reason and not row.reason:
        problems.append(f"Transformer Engine is available and yet there is a reason: {reason}")
    problems += [f"the reason does not say {one!r}: {reason!r}" for one in row.reason if not re.search(one, reason)]
    if not row.hides_torch:
        named = _native_paths(modules, answer)
        problems += [
            f"{one.id} names the native path {named[one.id]!r}, the matrix {one.native!r}"
            for one in modules
            if not named[one.id] or named[one.id] != one.native
        ]
    return tuple(problems)


def _judge_end(row: Damage, ended: Ended, place: str, *, hangs: bool) -> tuple[str, ...]:
    """Whether a process that simply imports the install ended as the damage has it."""
    if hangs is not (row.ends == "hang") or not ended.how.startswith("signal"):
        return (f"the plain process ended otherwise than by the damage ({ended.how}): {_last_line(ended)}",)
    return () if place else ("nothing says where the process was when it ended",)


def _choose_reason(row: Damage, answer: Answer) -> str:
    """The reason that the case is about: of the missing entry where TE is available, else of the verdict."""
    if row.available and answer.available and row.missing and row.reason:
        return answer.missing.get(row.missing[0], "")
    return answer.reason


def _native_paths(modules: Sequence[BridgeModule], answer: Answer) -> dict[str, str]:
    """Bridge module -> the native path that it names; the import bridge has none, so the matrix does."""
    named = answer.native_paths
    return {row.id: named.get(PurePath(row.files[0]).stem) or (row.native if row.id == "imports" else "")
            for row in modules}  # fmt: skip


def _find_place(ended: Ended) -> str:
    """Where a process was when it hung or died, by TE's innermost frame; empty if none was written."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', ended.words)
    vendor = [frame for frame in frames if "transformer_engine" in frame[0]]
    return " at {}:{} ({})".format(*vendor[0]) if vendor else ""


def _last_line(ended: Ended) -> str:
    lines = [line.strip() for line in ended.words.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it wrote nothing"
