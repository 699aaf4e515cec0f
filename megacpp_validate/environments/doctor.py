"""The doctor: what an interpreter loads, one process a vendor package, and whether that fits together."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from ..catalog.bridge import Catalog
from ..catalog.images import Needs
from ..errors import NoEnvironment
from ..evidence.doctor_look import Behaviour, PackageLook, PathLook
from ..process import Ended, Processes
from .doctor_rules import NOT_STARTED, TE, DoctorResult, Host, judge_host
from .interpreter import InterpreterEnvironment, host_interpreter, put_over
from .plan import RunOptions, choose_rows, find_arch, find_target

_MODULE: Final = "megacpp_validate.probes.doctor"
_PATH: Final = TypeAdapter(PathLook)
_PACKAGE: Final = TypeAdapter(PackageLook)


@dataclass(frozen=True)
class DoctorOptions(RunOptions):
    """What to check.

    Attributes:
        stack: row of `matrix/stacks.toml` that is wanted; none where it is empty.
    """

    stack: str = ""


def run_doctor(catalog: Catalog, needs: Needs, options: DoctorOptions) -> DoctorResult:
    """Look at an interpreter and compare it with the matrix.

    Raises:
        WrongArguments: the matrix has no such target or stack, or none for the GPU.
        NoEnvironment: the interpreter cannot be used, or has no stack.
    """
    started = time.monotonic()
    named = find_target(catalog, options.target) if options.target else None
    stack = choose_rows("stack", catalog.stacks, [options.stack])[0] if options.stack else None
    environment = host_interpreter(os.environ, options.python)
    if options.overlays:
        environment = put_over(environment, options.overlays)
    path, packages = take_looks(environment, [row.id for row in needs.package], options)
    if not path.torch and not any(look.installed or look.ended for look in packages if look.package in ("torch", TE)):
        raise NoEnvironment(
            f"there is no stack to check: {environment.shown} ({environment.because}) has neither torch nor "
            "Transformer Engine. Likely cause: this is a laptop, or the tool's own environment. Next step: name the "
            "interpreter of the stack with --python PATH, or its site folders with --overlays."
        )
    # Compared with no row, an unknown GPU would pass for a clean host.
    arch = f"sm_{path.capability.replace('.', '')}"
    target = named or (find_arch(catalog, path.gpu, arch, "") if path.gpu else find_target(catalog, "cpu"))
    modules = tuple(module.id for module in catalog.modules)
    return DoctorResult(
        interpreter=f"{environment.shown} ({environment.because})",
        target=target.id,
        stack=f"{(stack or catalog.pinned).id} ({'requested' if stack else 'pinned'})",
        path=path,
        packages=packages,
        differences=judge_host(Host(path, packages, modules, target, stack, catalog.pinned, needs)),
        seconds=round(time.monotonic() - started, 1),
    )


def take_looks(
    environment: InterpreterEnvironment, names: Sequence[str], options: DoctorOptions
) -> tuple[PathLook, tuple[PackageLook, ...]]:
    """What an interpreter would find, and each package as loaded.

    Raises:
        NoEnvironment: it cannot be started, or does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="megacpp-doctor-") as name:
        scratch, processes = Path(name), Processes()

        def run(what: str) -> Ended:
            (scratch / what).mkdir()  # its own working folder: what lies where the tool was started is not imported
            call = environment.call(_MODULE, what, f"{scratch / what}.json")
            log = scratch / f"{what}.log"
            return processes.run(call, folder=scratch / what, limit_s=options.limit_s, log=log, ask_where=True)

        def look_at_package(package: str) -> PackageLook:
            try:
                ended = run(package)
            except OSError as fault:
                return PackageLook(package, installed=True, ended=f"{NOT_STARTED}: {fault}")
            return _read_package(package, ended, Path(f"{scratch / package}.json"))

        _ = environment.about  # raises here where it is no Python
        run("path")
        path = _PATH.validate_json((scratch / "path.json").read_bytes())
        with ThreadPoolExecutor(max_workers=max(1, options.jobs)) as pool:
            try:
                return path, tuple(pool.map(look_at_package, names))
            except BaseException:  # an interrupt too: nothing may keep running behind it
                processes.stop()
                raise


def _read_package(name: str, ended: Ended, answer: Path) -> PackageLook:
    """One package; where its process left no answer, how the process ended is what was seen."""
    how = ended.how if ended.code is None or ended.code < 0 else f"exit status {ended.code}"
    words = f"{ended.last_words}{f' in {ended.frame}' if ended.frame else ''}"
    try:
        look = _PACKAGE.validate_json(answer.read_bytes())
    except (OSError, ValidationError):
        return PackageLook(name, installed=True, ended=how, words=words, seconds=round(ended.seconds, 3))
    if ended.code == 0:
        return look
    # The answer has the import: the process ended at a call.
    right = None if ended.code is None else False
    died = Behaviour(f"a call of {name}", "small tensor", f"{how}: {words}", right)
    return replace(look, behaviours=(*look.behaviours, died))
