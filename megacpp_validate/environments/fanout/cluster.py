"""What a site's scheduler wants to be told, as data: a file in TOML of the site's own, strict about its keys."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

# One word of an option: Slurm reads them to the end, and none of them begins another option.
_Word = Annotated[str, StringConstraints(pattern=r"^[\w.:,+&|()\[\]@=/*!-]*$")]
_OWN: Final = (
    "account", "chdir", "constraint", "cpus-per-task", "error", "export", "gres", "job-name", "mem", "no-requeue",
    "nodes", "ntasks", "output", "parsable", "partition", "qos", "requeue", "reservation", "time", "wait", "array",
    "wrap", "test-only", "dependency", "exclude",
)  # fmt: skip
_WEEK_S, _WEEK_MINUTES = 604_800, 10_080  # more is a typing error


class ClusterInvalid(ValueError):
    """The settings of a scheduler are wrong; every fault is named."""


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class JobOptions(_Row):
    """Options of `sbatch`; what is empty or 0 is left to the cluster.

    Attributes:
        gres: with {gpus} where the number of GPUs belongs; asked for where a cell needs one.
        cpus, memory_mib: of a job.
        minutes: of a job; without it, what the cell may take and what a start may take.
        extra: further options, such as "--exclusive"; none that this tool sets itself.
    """

    partition: _Word = ""
    account: _Word = ""
    qos: _Word = ""
    constraint: _Word = ""
    reservation: _Word = ""
    gres: Annotated[str, StringConstraints(pattern=r"^[\w.:,]*(\{gpus\})?[\w.:,]*$")] = "gpu:{gpus}"
    cpus: int = Field(default=0, ge=0)
    memory_mib: int = Field(default=0, ge=0)
    minutes: int = Field(default=0, ge=0, le=2 * _WEEK_MINUTES)  # a cell of a week, and its start
    extra: list[Annotated[str, StringConstraints(pattern=r"^--[a-z][\w-]*(=[^\s]+)?$")]] = Field(default_factory=list)


class Cluster(_Row):
    """How jobs are given to a scheduler, and how long one waits for it.

    Attributes:
        all: options of every job.
        target: options by target; what is given there takes the place of what `all` says.
        containers: "pyxis" demands the plugin, "none" takes no container through it, "auto" takes it where srun has it.
        python: interpreter in a container.
        retries: of one cell, after infrastructure faults.
        poll_s: between two looks at the queue.
        grace_s: that a receipt may take to arrive after its job is over: a shared file system tells late.
        patience_s: that the scheduler may be silent while jobs are on their way.
        client_s: that one call of its tools may take.
        start_minutes: that a job may take beside its cell: an image that is pulled, a cold disk.
        at_a_time: jobs in the queue; 0 for all.
    """

    all: JobOptions = JobOptions()
    target: dict[str, JobOptions] = Field(default_factory=dict)
    containers: Literal["auto", "pyxis", "none"] = "auto"
    python: _Word = "python3"
    retries: int = Field(default=2, ge=0, le=20)
    poll_s: float = Field(default=5.0, gt=0, le=_WEEK_S)
    grace_s: float = Field(default=15.0, ge=0, le=_WEEK_S)
    patience_s: float = Field(default=600.0, ge=0, le=_WEEK_S)
    client_s: float = Field(default=60.0, gt=0, le=_WEEK_S)
    start_minutes: int = Field(default=15, ge=1, le=_WEEK_MINUTES)
    at_a_time: int = Field(default=0, ge=0)

    def options(self, target: str) -> JobOptions:
        """Options of the jobs of one target."""
        own = self.target.get(target, JobOptions())
        return self.all.model_copy(update=own.model_dump(include=own.model_fields_set))


def read_cluster(path: Path | None) -> Cluster:
    """The settings of a file; those of a cluster with defaults where there is none.

    Raises:
        ClusterInvalid: with every fault of the file.
    """
    if path is None:
        return Cluster()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        cluster = Cluster.model_validate(_with_floats(data))
    except ValidationError as invalid:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']} (found {e['input']!r:.60})" for e in invalid.errors()]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        faults = [f"cannot be read: {fault}"]
    else:
        rows = {"all": cluster.all, **{f"target.{name}": row for name, row in cluster.target.items()}}
        faults = [
            f"{name}.extra: {word} is set by this tool itself"
            for name, row in rows.items()
            for word in row.extra
            if word.removeprefix("--").partition("=")[0] in _OWN
        ]
        if not faults:
            return cluster
    lines = "\n".join(f"  {path.name}: {fault}" for fault in faults)
    raise ClusterInvalid(
        f"the settings of the scheduler have {len(faults)} fault(s):\n{lines}\nNext step: mend each line named above."
    )


def _with_floats(data: dict[str, object]) -> dict[str, object]:
    """Seconds may be written without a point."""
    return {
        key: float(v) if key.endswith("_s") and type(v) is int and abs(v) <= _WEEK_S else v for key, v in data.items()
    }
