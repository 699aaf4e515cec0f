"""The doctor: what an interpreter loads, one process a vendor package, and whether that fits together."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from .. import TOOL
from ..catalog.bridge import Catalog, Target
from ..catalog.needs import Needs
from ..evidence.doctor_look import Behaviour, PackageLook, PathLook
from ..process import Ended, Processes
from .doctor_result import DoctorResult
from .doctor_rules import NOT_STARTED, TE, Host, judge_host
from .environment import Environment, NoEnvironment
from .interpreter import host_interpreter, put_over
from .plan import UnknownTarget, find_target

_MODULE: Final = "megacpp_validate.probes.doctor"
_PATH: Final = TypeAdapter(PathLook)
_PACKAGE: Final = TypeAdapter(PackageLook)
_LAST_WORDS: Final = 400  # characters
Run = Callable[[str], tuple[Path, Ended]]


@dataclass(frozen=True)
class DoctorOptions:
    """What to check.

    Attributes:
        python: interpreter; the host's where it is empty.
        overlays: site folders put before its own.
        target: row of `matrix/targets.toml`; that of the GPU where it is empty.
        stack: row of `matrix/stacks.toml` that is wanted; none where it is empty.
        limit_s: seconds that one import may take.
        jobs: imports at a time.
    """

    python: str = ""
    overlays: tuple[Path, ...] = ()
    target: str = ""
    stack: str = ""
    limit_s: float = 180.0
    jobs: int = 4


def run_doctor(catalog: Catalog, needs: Needs, options: DoctorOptions, variables: Mapping[str, str]) -> DoctorResult:
    """Look at an interpreter and compare it with the matrix.

    Args:
        variables: environment variables of the user.

    Raises:
        UnknownTarget: the matrix has no such target or stack, or none for the GPU.
        NoEnvironment: the interpreter cannot be used, or has no stack.
    """
    started = time.monotonic()
    if options.target:
        find_target(catalog, options.target)
    stacks = {stack.id: stack for stack in catalog.stacks}
    if options.stack and options.stack not in stacks:
        raise UnknownTarget(f"there is no stack {options.stack!r}. Next step: choose one of {', '.join(stacks)}.")
    stack = stacks.get(options.stack)
    environment = host_interpreter(variables, options.python)
    if options.overlays:
        environment = put_over(environment, options.overlays)
    path, packages = take_looks(environment, [row.id for row in needs.package], options, Processes())
    if not path.torch and not any(look.installed or look.ended for look in packages if look.package in ("torch", TE)):
        raise NoEnvironment(
            f"there is no stack to check: {environment.shown} ({environment.because}) has neither torch nor "
            "Transformer Engine. Likely cause: this is a laptop, or the tool's own environment. Next step: name the "
            "interpreter of the stack with --python PATH, or its site folders with --overlays."
        )
    target = _choose_target(catalog, options.target, path)
    modules = tuple(module.id for module in catalog.modules)
    return DoctorResult(
        tool=TOOL,
        interpreter=f"{environment.shown} ({environment.because})",
        target=target.id,
        stack=f"{(stack or catalog.pinned).id} ({'requested' if stack else 'pinned'})",
        path=path,
        packages=packages,
        differences=judge_host(Host(path, packages, modules, target, stack, catalog.pinned, needs)),
        seconds=round(time.monotonic() - started, 1),
    )


def _choose_target(catalog: Catalog, name: str, path: PathLook) -> Target:
    """The named target, else that of the GPU, else the one without a GPU."""
    if name or not path.gpu:
        return find_target(catalog, name or "cpu")
    arch = f"sm_{path.capability.replace('.', '')}"
    known = [target for target in catalog.targets if target.arch]
    for target in known:
        if target.arch == arch:
            return target
    raise UnknownTarget(  # compared with no row it would pass for a clean host
        f"the matrix has no target for {path.gpu} ({arch}). Next step: name one with --target, of "
        f"{', '.join(target.id for target in known)} or cpu, or add a row to matrix/targets.toml."
    )


def take_looks(
    environment: Environment, names: Sequence[str], options: DoctorOptions, processes: Processes
) -> tuple[PathLook, tuple[PackageLook, ...]]:
    """What an interpreter would find, and each package as loaded.

    Raises:
        NoEnvironment: it cannot be started, or does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="megacpp-doctor-") as name:
        scratch = Path(name)

        def run(what: str) -> tuple[Path, Ended]:
            own, answer = scratch / what, scratch / f"{what}.json"
            own.mkdir()  # a working folder of its own: what lies where the tool was started must not be imported
            call = environment.call(_MODULE, what, str(answer), shares=(scratch,))
            log = scratch / f"{what}.log"
            return answer, processes.run(call, folder=own, limit_s=options.limit_s, log=log, ask_where=True)

        with ThreadPoolExecutor(max_workers=max(1, options.jobs)) as pool:
            try:
                path = pool.submit(_look_at_path, environment.shown, run)
                found = pool.map(lambda name: _look_at_package(name, run), names)
                return path.result(), tuple(found)
            except BaseException:  # an interrupt too: nothing may keep running behind it
                processes.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _look_at_path(shown: str, run: Run) -> PathLook:
    try:
        answer, ended = run("path")
        if answer.is_file():
            return _PATH.validate_json(answer.read_bytes())
        what = f"does not answer ({ended.how}). Its last output: {_last_words(ended)}"
        cause = "a Python older than 3.11, or a damaged one"
    except OSError as fault:
        what = f"cannot be started: {fault.strerror or fault}"
        cause = "this is not an interpreter, or is one for another machine"
    except ValidationError:
        what, cause = "answers in another form", "another megacpp-validate comes first on its path"
    raise NoEnvironment(f"{shown} {what}. Likely cause: {cause}. Next step: give another interpreter with --python.")


def _look_at_package(name: str, run: Run) -> PackageLook:
    """One package; where its process left no answer, how it ended is what was seen."""
    try:
        answer, ended = run(name)
    except OSError as fault:
        return PackageLook(name, installed=True, ended=f"{NOT_STARTED}: {fault}")
    how = ended.how if ended.code is None or ended.code < 0 else f"exit status {ended.code}"
    try:
        look = _PACKAGE.validate_json(answer.read_bytes())
    except (OSError, ValidationError):
        return PackageLook(name, installed=True, ended=how, words=_last_words(ended), seconds=round(ended.seconds, 3))
    if ended.code == 0:
        return look
    # It answered what it imported, and ended at a call: that is what was seen of the call.
    right = None if ended.code is None else False
    died = Behaviour(f"a call of {name}", "small tensor", f"{how}: {_last_words(ended)}", right)
    return replace(look, behaviours=(*look.behaviours, died))


def _last_words(ended: Ended) -> str:
    """The end of its output; where Python names the innermost frame, from there."""
    lines = [" ".join(line.split()) for line in ended.words.splitlines() if line.strip()]
    starts = (at for at, line in enumerate(lines) if line.startswith(("Fatal Python error", "Current thread")))
    start = next(starts, None)
    shown = lines[-3:] if start is None else lines[start : start + 4]
    return " | ".join(shown)[-_LAST_WORDS:] or "nothing"
