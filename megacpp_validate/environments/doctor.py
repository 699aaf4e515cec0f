"""The doctor: what an interpreter loads, one process a vendor package, and whether that fits together.

And what --env names: an environment whose versions are read, and of which nothing is imported.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from ..catalog.bridge import Catalog
from ..catalog.images import Base, Needs
from ..errors import NoEnvironment, WrongArguments
from ..evidence.doctor_look import Behaviour, PackageLook, PathLook
from ..process import Ended, Processes
from .doctor_rules import NOT_STARTED, DoctorResult, Host, judge_host
from .fits import TE, Part, Stack, list_loaded, read_part, stack_of_words
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


# --- an environment as a person names it ------------------------------------------------------------------------------

_LIST: Final = (
    "import json; from importlib.metadata import distributions; "
    "print(json.dumps([[d.metadata['Name'], d.version] for d in distributions() if d.metadata['Name']][::-1]))"
)
_WAYS: Final = "cublas=13.1,cudnn=9.14, a `pip freeze` file, the JSON of doctor, an interpreter, or an NGC tag"


def read_given(
    texts: Iterable[str], needs: Needs, bases: Iterable[Base], variables: Mapping[str, str], target: str = ""
) -> Stack:
    """The environment that options name; of a component that two of them name, the later one counts.

    Args:
        bases: rows of images.toml, which NGC tags name.
        variables: environment variables of the user, for the interpreter.

    Raises:
        WrongArguments: a text names no environment, or a file of another kind.
    """
    found: dict[str, Part] = {}
    texts, bases = tuple(texts), tuple(bases)
    for text in texts:
        found |= {part.name: part for part in _read_one(text, needs, bases, variables)}
    return Stack(", ".join(texts), "", found, target)


def _read_one(text: str, needs: Needs, bases: tuple[Base, ...], variables: Mapping[str, str]) -> Iterable[Part]:
    tags = {name: base for base in bases for name in (base.id, base.tag, base.tag.removesuffix("-py3"))}
    place = Path(text) / "bin" / "python" if text and Path(text, "bin", "python").is_file() else Path(text or "/")
    if text in tags:
        base = tags[text]
        driver = {"driver": base.driver_least} if base.driver_least else {}
        rows = {"python": base.python, **base.provided, **driver}
        return [Part(name=name, version=version, brought_by=f"base {base.id}") for name, version in rows.items()]
    if place.is_file() and not os.access(place, os.X_OK):
        return _read_file(place)
    if "=" in text and not place.exists():
        words = [word for word in text.replace(",", " ").split() if word]
        return stack_of_words("1.0", words, needs).parts.values()
    if text and (place.is_file() or shutil.which(text, path=variables.get("PATH"))):
        return _read_interpreter(str(place) if place.is_file() else text, variables)
    known = ", ".join(base.tag for base in bases if base.distributions)
    raise WrongArguments(
        f"--env {text!r} names no environment. Likely cause: a typing error, or a folder without a virtual "
        f"environment. Next step: give {_WAYS} of the matrix ({known})."
    )


def _read_interpreter(python: str, variables: Mapping[str, str]) -> Iterator[Part]:
    """What is installed there, by metadata: no package is imported."""
    try:
        rows = host_interpreter(variables, python).ask("-c", _LIST)
    except NoEnvironment as fault:
        raise WrongArguments(f"--env: {fault}") from fault
    for name, version in rows:
        yield read_part(name, version, python)


def _read_file(file: Path) -> tuple[Part, ...]:
    """A `pip freeze`, or doctor's JSON.

    Raises:
        WrongArguments: it is neither.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("{"):
            result = DoctorResult.model_validate_json(text)
            return tuple(list_loaded(result.path, result.packages))
        return tuple(_read_freeze(file.name, text))
    except (OSError, ValueError) as fault:
        raise WrongArguments(
            f"--env {file}: {str(fault).splitlines()[0]}. Next step: write one with `python -m pip freeze > "
            "freeze.txt`, or with `megacpp-validate doctor --format json --output doctor.json`."
        ) from fault


def _read_freeze(by: str, text: str) -> Iterator[Part]:
    """Lines "name==version"; what was installed from a link has no version there.

    Raises:
        ValueError: there is no such line.
    """
    pinned = re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", text)
    if not pinned:
        raise ValueError("it pins no package")
    return (read_part(name, version, by) for name, version in pinned)
