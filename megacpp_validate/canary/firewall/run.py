"""The firewall tier: whatever is wrong with an install of Transformer Engine, the bridge stands.

One damaged install, one process, one outcome. The processes run in environments of their own, get a copy of
the bridge, and answer in JSON; this side imports neither torch, nor a vendor library, nor the bridge.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...process import Call, Ended, Processes, Stopped
from .damage import PINNED, Damage
from .elf import NotDamageable
from .install import (
    TE,
    Install,
    Interpreter,
    WheelOf,
    current_release,
    environment_of,
    lay_out_current,
    lay_out_wheels,
    link_the_rest,
    look_at_interpreter,
    make_environment,
)
from .judge import Answer, BridgeModule, judge, judge_end, native_paths, reason_of, where_it_was
from .plan import InstallMode, UnknownCase, baseline_of, is_baseline, plan_firewall
from .result import FirewallCase, FirewallOutcome, FirewallResult
from .standin_extension import CannotBuild, StandIns, build_stand_ins

BRIDGE = Path(__file__).resolve().parents[2] / "bridge"
_CHILD = Path(__file__).with_name("child.py")
_PACKAGE = "megacpp_validate.bridge"
_TRIAL = "MEGACPP_TE_TRIAL_SECONDS"
_HANG_LIMIT_S = 6.0  # what hangs does so before torch is imported: seconds, also on a slow machine
_TRIAL_S = 5.0


Distribution = tuple[str, str]
"""Name and version."""


@dataclass(frozen=True)
class _Bench:
    """What every case of a run shares."""

    modules: Sequence[BridgeModule]
    bridge: Path
    wheels: Mapping[Distribution, Path]
    lacking: Mapping[Distribution | None, str]
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
    limit_s: float = 120.0,
    jobs: int = 2,
    progress: Callable[[FirewallCase], None] | None = None,
    bridge: Path = BRIDGE,
) -> FirewallResult:
    """Damage real installs, one process a case, and see whether the bridge stands.

    Args:
        modules: the bridge's modules, as `matrix/bridge.toml` has them.
        wheels: (distribution, version) -> path of its verified pure-Python wheel. What it raises for a
            release of Transformer Engine goes through; for another distribution, the case that wants it is
            not run.
        tool: name and version of this tool, for the record.
        only: ids of the cases; none for all.
        install: "wheels" lays out releases with stand-ins for their compiled parts, "current" the install of
            this interpreter.
        limit_s: seconds that a process may take.
        jobs: cases at a time.
        progress: called with each case as it ends, from one thread at a time.
        bridge: folder of the bridge package; it is copied.

    Raises:
        UnknownCase: a name in `only` that is no case, or "current" where no whole install is.
    """
    plan = plan_firewall(only, install)
    interpreter = look_at_interpreter(limit_s)
    release = _release_of(interpreter, install)
    fetched, lacking = _fetch(plan, wheels, install)
    with tempfile.TemporaryDirectory(prefix="firewall-") as folder:
        work = Path(folder).resolve()
        _copy_bridge(bridge, work / "bridge")
        stand_ins, no_stand_ins = _build(work / "stand-ins", plan)
        bench = _Bench(
            modules=modules,
            bridge=bridge,
            wheels=fetched,
            lacking=lacking,
            interpreter=interpreter,
            stand_ins=stand_ins,
            no_stand_ins=no_stand_ins,
            release=release,
            mode=install,
            work=work,
            limit_s=limit_s,
        )
        cases = _run_all(plan, bench, jobs, progress)
    return FirewallResult(tool=tool, python=platform.python_version(), torch=interpreter.torch or "none", cases=cases)


def _run_all(
    plan: Sequence[Damage], bench: _Bench, jobs: int, progress: Callable[[FirewallCase], None] | None
) -> tuple[FirewallCase, ...]:
    """Undamaged installs first, then the cases that lean on them; results in the order of the plan."""
    done: dict[str, FirewallCase] = {}
    one_at_a_time = threading.Lock()

    def run(row: Damage) -> None:
        case = _run_case(row, bench, done)
        with one_at_a_time:
            done[row.id] = case
            if progress:
                progress(case)

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        try:
            for wave in (True, False):
                rows = [row for row in plan if is_baseline(row) is wave]
                rows.sort(key=lambda row: row.ends == "exit")  # the ones that wait for a limit need not come last
                futures: list[Future[None]] = [pool.submit(run, row) for row in rows]
                for future in futures:
                    future.result()
        except BaseException:  # an interrupt too: nothing may keep running behind it
            bench.processes.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tuple(done[row.id] for row in plan)


def _run_case(row: Damage, bench: _Bench, done: Mapping[str, FirewallCase]) -> FirewallCase:
    started = time.monotonic()
    compiled = "none" if not row.parts else "real" if bench.mode == "current" else "stand-in"
    case = FirewallCase(
        case=row.id,
        damage=row.says,
        release=row.release or bench.release,
        compiled=compiled,
        outcome=FirewallOutcome.NOT_RUN,
    )
    if why := _why_not(row, bench, done):
        return case.model_copy(update={"problems": (why,)})
    folder = bench.work / row.id
    try:
        observed = _observe(row, bench, folder)
    except (CannotBuild, NotDamageable, LookupError, OSError, Stopped) as fault:
        return case.model_copy(update={"problems": (f"the install could not be laid out or damaged: {fault}",)})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return case.model_copy(update={**observed, "seconds": round(time.monotonic() - started, 2)})


def _why_not(row: Damage, bench: _Bench, done: Mapping[str, FirewallCase]) -> str:
    """Why a case would prove nothing here; empty where it can be run."""
    if not row.hides_torch and bench.interpreter.problem:  # the bridge itself is made of torch
        return bench.interpreter.problem
    if row.parts and bench.mode == "wheels" and bench.stand_ins is None:
        return bench.no_stand_ins
    if row.extra in bench.lacking:
        return bench.lacking[row.extra]
    baseline = done.get(baseline_of(row, bench.mode)) if row.proves_nothing_alone else None
    if baseline is not None and not is_baseline(row) and baseline.outcome is not FirewallOutcome.PASS:
        return f"the undamaged install of {baseline.release} is not available here: this case proves nothing"
    return ""


def _observe(row: Damage, bench: _Bench, folder: Path) -> dict[str, Any]:
    """Lay out, damage, ask; returns the fields of the case that were observed."""
    python, site = make_environment(folder)
    real = bench.mode == "current"
    install = Install(row.release or bench.release, folder, site, bench.wheels, bench.stand_ins, real=real)
    if real:
        lay_out_current(install, row.parts, bench.interpreter)
    else:
        lay_out_wheels(install, row.parts)
    row.do(install)
    path = [bench.work / "bridge", *link_the_rest(install, bench.interpreter)]
    ask = _Asker(bench, python, folder, environment_of(install, path))
    if row.ends == "exit":
        answer, ended = ask(bench.limit_s)
        problems = judge(row, bench.modules, answer, ended)
        how = ended.how
    else:
        _, first = ask(min(bench.limit_s, _HANG_LIMIT_S))
        ask.variables[_TRIAL] = f"{min(bench.limit_s, _TRIAL_S):g}"
        answer, ended = ask(bench.limit_s)
        problems = (*judge_end(row, first), *judge(row, bench.modules, answer, ended))
        how = f"{first.how}{where_it_was(first)}; with {_TRIAL}={ask.variables[_TRIAL]}: {ended.how}"
    return {
        "outcome": FirewallOutcome.FAIL if problems else FirewallOutcome.PASS,
        "available": answer.available if answer else None,
        "reason": reason_of(row, answer).replace(str(folder), "ENVIRONMENT"),
        "native_paths": native_paths(bench.modules, answer) if answer else {},
        "ended": how.replace(str(folder), "ENVIRONMENT"),
        "problems": problems,
    }


@dataclass
class _Asker:
    """Starts the process of a case and reads its answer."""

    bench: _Bench
    python: Path
    folder: Path
    variables: dict[str, str]

    def __call__(self, limit_s: float) -> tuple[Answer | None, Ended]:
        target = self.folder / "answer.json"
        target.unlink(missing_ok=True)
        names = sorted(path.stem for path in self.bench.bridge.glob("*.py") if path.stem != "__init__")
        command = (str(self.python), "-P", str(_CHILD), str(target), f"{limit_s * 0.7:g}", _PACKAGE, *names)
        ended = self.bench.processes.run(
            Call(command, self.variables), folder=self.folder, limit_s=limit_s, log=self.folder / "words.txt"
        )
        try:
            return Answer.model_validate_json(target.read_bytes()), ended
        except (OSError, ValidationError):
            return None, ended


def _release_of(interpreter: Interpreter, mode: InstallMode) -> str:
    release = PINNED if mode == "wheels" else current_release(interpreter)
    if not release:
        raise UnknownCase(
            "no whole install of Transformer Engine (sources, core, torch extension) is on the path of this "
            "interpreter. Next step: put it on PYTHONPATH, or run the tier on wheels"
        )
    return release


def _fetch(
    plan: Sequence[Damage], wheels: WheelOf, mode: InstallMode
) -> tuple[dict[Distribution, Path], dict[Distribution | None, str]]:
    """Every wheel that the plan takes, before the first case and from one thread; and why some are lacking.

    Without a release of Transformer Engine there is no tier, so what that raises goes through; without another
    distribution there is one case less, which says so.
    """
    fetched: dict[Distribution, Path] = {}
    lacking: dict[Distribution | None, str] = {}
    if mode == "wheels":
        for release in sorted({row.release or PINNED for row in plan}):
            fetched[TE, release] = wheels(TE, release)
    for extra in sorted({row.extra for row in plan if row.extra}):
        try:
            fetched[extra] = wheels(*extra)
        except Exception as fault:  # whatever the supplier raises
            lacking[extra] = f"{extra[0]} {extra[1]} could not be fetched: {fault}"
    return fetched, lacking


def _copy_bridge(bridge: Path, target: Path) -> None:
    """The bridge as a training tree would take it: a copy of its folder under a package of the same name."""
    package = target / _PACKAGE.partition(".")[0]
    for folder in ("bridge", "native"):
        source = bridge if folder == "bridge" else bridge.with_name(folder)
        if source.is_dir():
            shutil.copytree(source, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").write_text("", encoding="utf-8")


def _build(folder: Path, plan: Sequence[Damage]) -> tuple[StandIns | None, str]:
    if not any(row.parts for row in plan):
        return None, "no case of this run has compiled parts"
    try:
        return build_stand_ins(folder), ""
    except CannotBuild as fault:
        return None, str(fault)
