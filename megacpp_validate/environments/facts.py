"""What an environment has, asked of the environment itself before any probe is started."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from ..process import Processes
from .environment import Environment, NoEnvironment

_MODULE: Final = "megacpp_validate.probes.identify"
_LIMIT_S: Final = 90.0  # a cold disk and an nvidia-smi that wakes the driver take their time


class Gpu(BaseModel):
    """The first GPU that a process there sees."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    capability: str
    driver: str
    memory_mib: str

    @property
    def arch(self) -> str:
        """Such as "sm_90"."""
        return f"sm_{self.capability.replace('.', '')}"


class Facts(BaseModel):
    """What an environment has.

    Attributes:
        torch, te: versions; empty where it is not installed.
        te_folder: where `transformer_engine` would be imported from.
        gpu: None where there is none, for the reason `why_no_gpu`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: str
    executable: str
    machine: str
    torch: str
    te: str
    te_folder: str
    gpu: Gpu | None
    why_no_gpu: str


def read_facts(environment: Environment, processes: Processes) -> Facts:
    """Ask an environment what it has.

    Raises:
        NoEnvironment: its interpreter cannot be started, is too old, or answers in another form.
    """
    with tempfile.TemporaryDirectory(prefix="megacpp-facts-") as folder:
        answer, log = Path(folder, "facts.json"), Path(folder, "log")
        words = ""
        try:
            call = environment.call(_MODULE, str(answer), shares=(Path(folder),))
            ended = processes.run(call, folder=Path(folder), limit_s=_LIMIT_S, log=log)
            words = f"{ended.how}; its output: {ended.last_words}"
            return Facts.model_validate_json(answer.read_bytes())
        except (OSError, ValidationError) as fault:
            raise NoEnvironment(
                f"{environment.shown} does not report its packages ({words or fault}). Likely cause: it does not "
                "exist, it is a Python older than 3.11, or another megacpp-validate comes first on its path. Next "
                "step: start it by hand, or give another with --python."
            ) from fault


def require_torch(facts: Facts) -> None:
    """Refuse an environment that has nothing to probe.

    Raises:
        NoEnvironment: it has no torch.
    """
    if not facts.torch:
        raise NoEnvironment(
            f"{facts.executable} (Python {facts.python}) has no torch. Likely cause: it is not the interpreter of the "
            "stack. Next step: give that one with --python, or set MEGACPP_PYTHON."
        )
