"""An environment as a person names it: words, a `pip freeze`, doctor's JSON, an interpreter, or an NGC tag."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import ValidationError

from ..catalog.images import Base
from ..catalog.needs import Needs
from ..errors import WrongArguments
from ..evidence.values import read_version
from .doctor_result import DoctorResult
from .environment import NoEnvironment
from .fits import CORE, LIBRARIES, Part, Stack, stack_of_words
from .interpreter import host_interpreter

_LIST: Final = (
    "import json; from importlib.metadata import distributions; "
    "print(json.dumps([[d.metadata['Name'], d.version] for d in distributions() if d.metadata['Name']][::-1]))"
)
_WAYS: Final = "cublas=13.1,cudnn=9.14, a `pip freeze` file, the JSON of doctor, an interpreter, or an NGC tag"
_MOST_BYTES: Final = 2**26  # doctor's JSON of an H200 host is 2 MB


@dataclass(frozen=True)
class Given:
    """What is known of an environment.

    Attributes:
        shown: what the caller named.
        parts: by name, as in `Stack`.
        target: row of targets.toml; empty where unknown.
    """

    shown: str
    parts: Mapping[str, Part]
    target: str = ""

    def with_release(self, te: str) -> Stack:
        """The same environment after a release of Transformer Engine is installed; what is not named is unknown."""
        core = {name: part.model_copy(update={"version": te}) for name, part in self.parts.items() if name in CORE}
        return Stack("given", te, {**self.parts, **core}, whole=False, target=self.target)


def read_given(
    texts: Iterable[str], needs: Needs, bases: Iterable[Base], variables: Mapping[str, str], target: str = ""
) -> Given:
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
    return Given(", ".join(texts), found, target)


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
        rows, _ = host_interpreter(variables, python).ask(_LIST, cause="it is no Python")
    except NoEnvironment as fault:
        raise WrongArguments(f"--env: {fault}") from fault
    for name, version in rows:
        yield _part(name, version, python)


def _read_file(file: Path) -> Iterable[Part]:
    """A `pip freeze`, or doctor's JSON.

    Raises:
        WrongArguments: it is neither.
    """
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError("the file is too large for either")
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as fault:
        raise _not_read(file, f"it cannot be read: {fault}") from fault
    if not text.lstrip().startswith(("{", "[")):
        return _read_freeze(file, text)
    try:
        if isinstance(data := json.loads(text), dict) and str(data.get("schema_id", "")).endswith("/doctor/1"):
            return tuple(_read_doctor(DoctorResult.model_validate_json(text)))
        raise _not_read(file, "it is JSON, and not of doctor")
    except (ValueError, RecursionError, ValidationError) as fault:
        raise _not_read(file, f"its JSON is damaged: {str(fault).splitlines()[0]}") from fault


def _read_freeze(file: Path, text: str) -> tuple[Part, ...]:
    """Lines "name==version"; another requirement, or a line with a link, is there in an unknown version."""
    found = []
    for number, line in enumerate(text.replace("\\\n", " ").splitlines(), start=1):
        words = line.partition(" #")[0].partition(" --hash")[0].strip()
        name = words.partition("#egg=")[2] or words
        if not name or name.startswith(("#", "-")):
            continue
        try:
            requirement = Requirement(name)
        except InvalidRequirement as fault:
            raise _not_read(file, f"line {number} is not a requirement: {line.strip()[:60]!r}") from fault
        exact = [one.version for one in requirement.specifier if one.operator in ("==", "===")]
        found.append(_part(requirement.name, exact[0] if exact else "", file.name))
    if not found:
        raise _not_read(file, "it names no package")
    return tuple(found)


def _not_read(file: Path, why: str) -> WrongArguments:
    return WrongArguments(
        f"--env {file}: {why}. Next step: write one with `python -m pip freeze > freeze.txt`, or with "
        "`megacpp-validate doctor --format json --output doctor.json`."
    )


def _read_doctor(result: DoctorResult) -> Iterator[Part]:
    """What was loaded counts more than what is installed, and stands later."""
    path, by = result.path, "doctor"
    for one in reversed(path.distributions):  # the first of a name is the one that is loaded
        yield _part(one.name, one.version, by)
    rows = {"python": path.python, "torch": path.torch, "driver": path.driver, "cuda": path.torch_cuda}
    rows |= {LIBRARIES[one.name]: one.version for look in result.packages for one in look.libraries
             if one.name in LIBRARIES and one.version}  # fmt: skip
    for name, version in rows.items():
        if version:
            yield _part(name, version, by)


def _part(name: str, version: str, by: str) -> Part:
    known = read_version(version)
    return Part(name=canonicalize_name(name), version=str(known) if isinstance(known, Version) else "", brought_by=by)
