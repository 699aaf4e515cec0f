"""What an environment is made of, as one hash; and what it has, as it reports itself.

Where the hash is the same, an earlier receipt may be used again. Files count by their stat and are not read: an overlay
holds gigabytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

import platformdirs

from ..errors import NoEnvironment
from ..evidence.values import Frozen
from ..process import Processes

if TYPE_CHECKING:
    from .interpreter import InterpreterEnvironment

__all__ = ["NoEnvironment"]

VARIABLE: Final = "MEGACPP_ENVIRONMENTS"
_CHANGE_WHAT_RUNS: Final = (
    "CUBLAS", "CUDA_", "CUDNN_", "CUTE_DSL_", "DG_", "FLASH_ATTENTION_", "LD_LIBRARY_PATH", "LD_PRELOAD", "MEGACPP_",
    "NCCL_", "NVIDIA_", "NVTE_", "PYTHON", "PYTORCH_", "TORCH", "TRITON_",
)  # fmt: skip
# Where a tool keeps things does not change what runs; what lies there is hashed by itself.
_ONLY_PLACES: Final = frozenset({
    "CUDA_CACHE_PATH", "CUTE_DSL_CACHE_DIR", "DG_JIT_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "MEGACPP_CACHE_DIR", "MEGACPP_ENVIRONMENTS", "MEGACPP_JIT_DRIVER_CACHE", "MEGACPP_JIT_ROOT", "MEGACPP_OVERLAYS",
    "MEGACPP_PYTHON", "PYTHONPYCACHEPREFIX", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCH_HOME",
    "TRITON_CACHE_DIR", "TRITON_HOME",
})  # fmt: skip
# Read file by file wherever they lie: these are what a person patches in place.
_VENDORS: Final = frozenset({
    "deep_gemm", "flash_attn", "flash_attn_3", "flash_attn_interface.py", "liger_kernel", "transformer_engine",
    "transformer_engine_torch",
})  # fmt: skip
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_IDENTIFY: Final = "import json; from megacpp_validate.probes.identify import identify; print(json.dumps(identify()))"


def environments_folder(variables: Mapping[str, str]) -> Path:
    """The user's environments: where `MEGACPP_ENVIRONMENTS` points, else in the user's cache folder."""
    named = variables.get(VARIABLE, "")
    return Path(named).absolute() if named else Path(platformdirs.user_cache_dir("megacpp-validate"), "envs")


def hash_parts(parts: Sequence[str]) -> str:
    """One hash over texts in their order; no two lists of texts share one."""
    return sha256("".join(f"{len(part.encode())}:{part}" for part in parts).encode()).hexdigest()


def list_variables(variables: Mapping[str, str]) -> Iterator[str]:
    """The variables that change what runs, one a line, sorted; `PYTHONPATH` is left to what lies there."""
    for name in sorted(variables):
        if name.startswith(_CHANGE_WHAT_RUNS) and name not in _ONLY_PLACES and name != "PYTHONPATH":
            yield f"{name}={variables[name]}"


def read_driver() -> str:
    """The NVIDIA driver of this host; empty where there is none."""
    return _DRIVER.read_text(errors="replace") if _DRIVER.is_file() else ""


def list_files(folder: Path) -> Iterator[str]:
    """Every file below a folder with its size and time of change, without what Python writes there by itself.

    Links to folders are not followed: they may lead in a circle.
    """
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if not name.endswith(".pyc"):
                yield _state_file(Path(place, name), folder)


def list_site(folder: Path) -> Iterator[str]:
    """What a site folder has installed, without a walk through all of it: torch alone has ten thousand files.

    That is every distribution with the time of its record, every top-level module or package with the time of its
    first file, and the files of the vendor packages that a bridge module stands on.
    """
    # A place on the path that there is not is what Python skips, too.
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = place.name
        if name in _VENDORS and place.is_dir():
            yield from (f"{name}/{line}" for line in list_files(place))
        elif name != "__pycache__" and not name.endswith(".pyc"):
            inside = "RECORD" if name.endswith((".dist-info", ".egg-info")) else "__init__.py"
            yield _state_file(place / inside if place.is_dir() else place, folder)


def _state_file(file: Path, folder: Path) -> str:
    if not file.exists():
        return f"{file.relative_to(folder)} -"  # a link to nothing, or a record that a packer left out
    found = file.stat()
    return f"{file.relative_to(folder)} {found.st_size} {found.st_mtime_ns}"


# --- what an environment has, answered by itself before any probe is started ------------------------------------------


class Gpu(Frozen):
    """The first GPU that a process there sees."""

    name: str
    capability: str
    driver: str
    memory_mib: str

    @property
    def arch(self) -> str:
        """Such as "sm_90"."""
        return f"sm_{self.capability.replace('.', '')}"


class Facts(Frozen):
    """What an environment has.

    Attributes:
        torch, te: versions; empty where it is not installed.
        te_folder: where `transformer_engine` would be imported from.
        gpu: None where there is none, for the reason `why_no_gpu`.
    """

    python: str
    executable: str
    machine: str
    torch: str
    te: str
    te_folder: str
    gpu: Gpu | None
    why_no_gpu: str


def read_facts(environment: InterpreterEnvironment, processes: Processes) -> Facts:
    """Ask an environment what it has.

    Raises:
        NoEnvironment: its interpreter cannot be started, is too old, or answers in another form.
    """
    facts: Facts = environment.ask("-c", _IDENTIFY, read=Facts.model_validate_json, processes=processes)[0]
    return facts


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
