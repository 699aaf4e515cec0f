"""A cell as a file that a job on another machine reads: what its probe is told, and the environment to start it in.

Of the environment's variables only those are written that differ from what the scheduler hands on anyway: the others
may hold what is nobody's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ...evidence.whole_file import write_whole
from ...probes.order import read_order
from ..cell import Cell
from ..container import ContainerEnvironment
from ..environment import Environment
from ..interpreter import InterpreterEnvironment
from .launcher import JOB_FILE, Work
from .pyxis import PyxisEnvironment

_SCHEMA: Final = "megacpp-validate/matrix-job/1"


class JobUnreadable(ValueError):
    """The file of a job is none."""


def write_job(work: Work, folder: Path, handed_on: Mapping[str, str]) -> Path:
    """Write the file of a job.

    Args:
        work: the cell.
        folder: of the attempt; its receipt will lie there.
        handed_on: variables that the job has anyway.

    Raises:
        OSError: it cannot be written.
    """
    data = {
        "schema_id": _SCHEMA,
        "order": asdict(work.order),
        "limit_s": work.limit_s,
        "environment": ship_environment(work.environment, handed_on),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / JOB_FILE
    write_whole(path, json.dumps(data, indent=1, sort_keys=True) + "\n")
    path.chmod(0o600)
    return path


def read_job(path: Path, variables: Mapping[str, str]) -> Cell:
    """The cell of a job, in an environment with the variables of this process as far as the file says no other.

    Raises:
        JobUnreadable: the file is damaged, or of another version.
    """
    try:
        data = json.loads(path.read_bytes())
        if data["schema_id"] != _SCHEMA:
            raise ValueError(f"schema_id is {data['schema_id']!r} instead of {_SCHEMA!r}")
        order = read_order(json.dumps(data["order"]))
        environment = receive_environment(data["environment"], variables)
        return Cell(environment, order, path.parent, float(data["limit_s"]))
    except (OSError, ValueError, LookupError, TypeError) as fault:
        raise JobUnreadable(
            f"{path} is no job: {type(fault).__name__}: {fault}. Likely cause: the folder of the receipts is not "
            "shared with this node, or the node has another version of megacpp-validate. Next step: look at it from "
            "the node."
        ) from fault


def ship_environment(environment: Environment, handed_on: Mapping[str, str]) -> dict[str, Any]:
    """An environment as plain values."""
    own: dict[str, Any]
    match environment:
        case InterpreterEnvironment():
            own = {
                "way": "interpreter", "python": list(environment.python),
                "folders": [str(folder) for folder in environment.folders], "lock_hash": environment.lock_hash,
            }  # fmt: skip
        case ContainerEnvironment():
            own = {
                "way": "container", "docker": environment.docker, "image": environment.image,
                "image_id": environment.image_id, "python": environment.python, "path": environment.path,
                "gpus": environment.gpus, "init": environment.init,
            }  # fmt: skip
        case PyxisEnvironment():
            own = {"way": "pyxis", "image": environment.image, "python": environment.python}
        case _:
            raise TypeError(f"{type(environment).__name__} cannot be told to another machine")
    changed = {name: value for name, value in environment.variables.items() if handed_on.get(name) != value}
    removed = sorted(set(handed_on) - set(environment.variables))
    return {**own, "because": environment.because, "changed": changed, "removed": removed}


def receive_environment(data: Mapping[str, Any], variables: Mapping[str, str]) -> Environment:
    """The environment that `ship_environment` told.

    Raises:
        KeyError, TypeError, ValueError: it is told otherwise.
    """
    own = dict(data)
    way, changed, removed = own.pop("way"), own.pop("changed"), set(own.pop("removed"))
    given = {name: value for name, value in variables.items() if name not in removed} | changed
    match way:
        case "interpreter":
            python, folders = tuple(own.pop("python")), tuple(map(Path, own.pop("folders")))
            return InterpreterEnvironment(python=python, folders=folders, variables=given, **own)
        case "container":
            return ContainerEnvironment(variables=given, **own)
        case "pyxis":
            return PyxisEnvironment(variables=given, **own)
        case _:
            raise ValueError(f"there is no way {way!r}")
