"""An interpreter with a stack of its own, alone or with site folders put before its own packages (an overlay).

The folders of an overlay come first on the path in the order in which they are given, then what their .pth files add,
then what the user has on `PYTHONPATH`. Python reads no .pth file of a folder on `PYTHONPATH`, so the interpreter is
asked once what `site.addsitedir` makes of them. That runs their `import` lines too, because one vendor (the CuTe DSL)
writes its path as one; an import hook that such a line installs is not kept.

What an environment is made of is one hash. Where that is the same, an earlier receipt may be used again. Files count by
their stat and are not read: an overlay holds gigabytes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import platformdirs

from ..errors import NoEnvironment
from ..evidence.receipt import hash_code
from ..evidence.values import Frozen
from ..process import Call, Processes, run_command

PACKAGE: Final = Path(__file__).resolve().parents[1]
VARIABLE: Final = "MEGACPP_PYTHON"
_CHANGE_WHAT_RUNS: Final = (
    "CUBLAS", "CUDA_", "CUDNN_", "CUTE_DSL_", "DG_", "FLASH_ATTENTION_", "LD_LIBRARY_PATH", "LD_PRELOAD", "MEGACPP_",
    "NCCL_", "NVIDIA_", "NVTE_", "PYTHON", "PYTORCH_", "TORCH", "TRITON_",
)  # fmt: skip
# Where a tool keeps things does not change what runs; what lies there is hashed by itself.
ONLY_PLACES: Final = frozenset({
    "CUDA_CACHE_PATH", "CUTE_DSL_CACHE_DIR", "DG_JIT_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "MEGACPP_CACHE_DIR", "MEGACPP_JIT_DRIVER_CACHE", "MEGACPP_JIT_ROOT", "MEGACPP_OVERLAYS",
    "MEGACPP_PYTHON", "PYTHONPYCACHEPREFIX", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCH_HOME",
    "TRITON_CACHE_DIR", "TRITON_HOME",
})  # fmt: skip
# Read file by file wherever they lie: these are what a person patches in place.
_VENDORS: Final = frozenset({
    "deep_gemm", "flash_attn", "flash_attn_3", "flash_attn_interface.py", "liger_kernel", "transformer_engine",
    "transformer_engine_torch",
})  # fmt: skip
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_IDENTIFY: Final = "import json; from megacpp_validate.probes.doctor import identify; print(json.dumps(identify()))"
_LIMIT_S: Final = 120.0
_CAUSE: Final = "a Python before 3.11, or another megacpp-validate that comes first on its path"
_ABOUT: Final = (
    "import json, sys, sysconfig; "
    "print(json.dumps([sys.version, sys.prefix, sysconfig.get_config_var('EXT_SUFFIX') or '', sys.path]))"
)
_ADDED: Final = (
    "import json, site, sys; before = list(sys.path); [site.addsitedir(folder) for folder in sys.argv[1:]]; "
    "print(json.dumps([entry for entry in sys.path if entry not in before]))"
)
# Transformer Engine 2.12 raises "Multiple libcudart libraries found" where it can see two CUDA runtimes.
_OF_CUDA: Final = re.compile(
    r"lib(cuda|cudart|cublas\w*|cudnn\w*|cufft\w*|cufile\w*|cupti|curand|cusolver\w*|cusparse\w*|nccl|nvfatbin|nvJitLink"
    r"|nvrtc[\w-]*|nvToolsExt|nvshmem\w*)\.so"
)


class About(NamedTuple):
    """What an interpreter reports of itself.

    Attributes:
        version: `sys.version`.
        prefix: where it is installed; of a virtual environment, that.
        suffix: how the names of compiled extensions for it end, such as ".cpython-312-x86_64-linux-gnu.so".
        path: where it imports from, in order.
    """

    version: str
    prefix: str
    suffix: str
    path: tuple[Path, ...]


@dataclass(frozen=True)
class InterpreterEnvironment:
    """An interpreter and its variables: the host's, or one with folders before its own.

    Attributes:
        python: the words that start the interpreter.
        variables: its environment variables, whole.
        because: where it comes from and why it was chosen.
        folders: site folders of an overlay; each of their files is part of the identity.
    """

    python: tuple[str, ...]
    variables: Mapping[str, str] = field(repr=False)
    because: str = ""
    folders: tuple[Path, ...] = ()

    @property
    def shown(self) -> str:
        """What a person may type to start it."""
        return shlex.join(self.python)

    def start(self, *words: str, shares: Sequence[Path] = ()) -> Call:  # noqa: ARG002 - a container mounts them
        """How Python is started off the working folder (-P).

        Args:
            words: its arguments.
            shares: folders that the process reads and writes.
        """
        return Call((*self.python, "-P", *words), self.variables)

    def call(self, module: str, *arguments: str, shares: Sequence[Path] = ()) -> Call:
        """How a module is started, unbuffered (-u); see `start`."""
        return self.start("-u", "-m", module, *arguments, shares=shares)

    def ask(
        self, *words: str, read: Callable[[str], Any] = json.loads, cause: str = _CAUSE,
        processes: Processes | None = None,
    ) -> Any:  # fmt: skip
        """What Python prints there as JSON on its last line.

        Args:
            words: arguments of Python: `-c CODE` or `-m MODULE`, and theirs.
            read: makes a value of the line.
            cause: the likely cause of a failure.
            processes: stops the process when it stops all of its own.

        Raises:
            NoEnvironment: the interpreter does not start, or prints something else.
        """
        call = self.start(*words)
        ended = run_command(call.words, limit_s=_LIMIT_S, variables=call.variables, apart=True, processes=processes)
        if ended.code == 0:
            with suppress(ValueError, LookupError):
                return read(ended.words.splitlines()[-1])
        raise NoEnvironment(
            f"{self.shown} cannot be queried: {ended.last_words}. Likely cause: {cause}. Next step: start Python by "
            "hand, or give another one with --python."
        )

    @cached_property
    def about(self) -> About:
        """What it reports of itself; asked once. Raises as `ask`."""
        version, prefix, suffix, path = self.ask("-c", _ABOUT)
        return About(version, prefix, suffix, tuple(map(Path, path)))

    @cached_property
    def identity(self) -> str:
        """A hash over the interpreter, its path, its variables, the driver, and this project's files that run there.

        Raises:
            NoEnvironment: it cannot be started.
        """
        return hash_parts(tuple(self._parts()))

    def _parts(self) -> Iterator[str]:
        about = self.about
        binary = Path(os.path.realpath(shutil.which(self.python[0], path=self.variables.get("PATH")) or self.python[0]))
        yield from ("interpreter", about.version, about.prefix, str(binary), *self.python[1:])
        yield from ("driver", read_driver())
        yield from ("variables", *list_variables(self.variables))
        yield from ("package", hash_code())
        for entry in about.path:
            if entry in self.folders:
                yield from ("folder", str(entry), *list_files(entry))
            elif not _is_only_ours(entry):
                yield from ("site", str(entry), *list_site(entry))


def own_interpreter(variables: Mapping[str, str]) -> InterpreterEnvironment:
    """The interpreter that runs this tool, with all that is installed there."""
    return InterpreterEnvironment(
        (sys.executable,), _with_package(variables, PACKAGE.parent), "the one that runs this tool"
    )


def host_interpreter(variables: Mapping[str, str], wanted: str = "") -> InterpreterEnvironment:
    """The interpreter of the host, with the host's own stack: what a user gets who types `python3`.

    The first of these: `wanted`; `MEGACPP_PYTHON`; the tool's own interpreter if it has torch; the first python3 on
    PATH outside of the tool's own virtual environments; the tool's own. Another interpreter than the tool's own sees
    this package, and nothing else of the environment that the tool runs in.

    Args:
        variables: environment variables of the user.
        wanted: path or name of an interpreter.

    Raises:
        NoEnvironment: the interpreter that is named does not exist.
    """
    if named := wanted or variables.get(VARIABLE, ""):
        found, because = shutil.which(named, path=variables.get("PATH")), "--python" if wanted else VARIABLE
        if found is None:
            raise NoEnvironment(
                f"there is no interpreter {named!r} ({because}). Likely cause: a typing error, or it is not on PATH. "
                "Next step: give the path of a Python that has torch."
            )
    else:
        found = None if find_spec("torch") is not None else _first_on_path(variables.get("PATH", ""))
        because = "the first python3 on PATH outside of this tool's own environment"
    # Not resolved: the link in a virtual environment's bin folder is what makes it that environment.
    python = str(Path(found or sys.executable).absolute())
    if python == sys.executable:
        return own_interpreter(variables)
    return InterpreterEnvironment((python,), _with_package(variables, show_package()), because)


def _first_on_path(path: str) -> str | None:
    own = {os.path.realpath(sys.prefix), os.path.realpath(PACKAGE.parent / ".venv")}
    for folder in path.split(os.pathsep):
        found = shutil.which("python3", path=folder) if folder else None
        if found and os.path.realpath(Path(found).parents[1]) not in own:
            return found
    return None


def show_package() -> Path:
    """A folder that shows this package and nothing else to Python: the checkout, or one with a link to the package."""
    if (PACKAGE.parent / "pyproject.toml").is_file():
        return PACKAGE.parent
    door = Path(platformdirs.user_cache_dir("megacpp-validate"), f"package-{hash_parts((str(PACKAGE),))[:12]}")
    door.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # of an earlier run, or one beside this
        (door / PACKAGE.name).symlink_to(PACKAGE, target_is_directory=True)
    return door


def _is_only_ours(entry: Path) -> bool:
    """Whether a place on the path holds this package alone: a checkout, or the link to an installed one.

    What of it runs is hashed by content, and the link lies in another folder each time.
    """
    ours = entry / PACKAGE.name
    return ours.is_dir() and ours.resolve() == PACKAGE and not any(entry.glob("*.dist-info"))


def _with_package(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The user's variables, with the package behind what the user has on PYTHONPATH."""
    path = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**variables, "PYTHONPATH": os.pathsep.join([*path, str(folder)])}


def read_commit() -> str:
    """The commit of the checkout that holds the package, "-dirty" where files differ; empty outside of a checkout."""
    if not (PACKAGE.parent / ".git").exists():
        return ""
    command = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    ended = run_command(command, limit_s=_LIMIT_S, apart=True)
    return ended.words.strip() if ended.code == 0 else ""


def put_over(host: InterpreterEnvironment, folders: Sequence[Path], because: str = "") -> InterpreterEnvironment:
    """The interpreter of a host with site folders before its own.

    Args:
        host: its variables carry the user's `PYTHONPATH` and `LD_LIBRARY_PATH`, which stay behind the folders'.
        folders: site folders, the first one wins.
        because: why it is these.

    Raises:
        NoEnvironment: a folder does not exist, or the interpreter cannot be started.
    """
    # Absolute and without "..", as Python puts it on its path; Python would not follow a link before the "..".
    absolute = (place.resolve() if ".." in place.parts else place.absolute() for place in folders)
    site = tuple(dict.fromkeys(absolute))
    if wrong := [str(folder) for folder in site if not folder.is_dir() or os.pathsep in str(folder)]:
        raise NoEnvironment(
            f"there is no folder {', '.join(wrong)}, or its name has a {os.pathsep!r}. Likely cause: a typing error, "
            "or an archive that was not unpacked. Next step: name folders of packages, as of `pip install --target`."
        )
    names = ", ".join(map(str, site))
    variables = {**host.variables, "PYTHONPATH": _join(site, host.variables.get("PYTHONPATH", ""))}
    cause = f"a line in the .pth files of {names} ends the interpreter"
    entries = replace(host, variables=variables).ask("-c", _ADDED, *map(str, site), cause=cause)
    # A path that does not exist adds nothing, and one of another host would be found first.
    added = [Path(entry) for entry in entries if Path(entry).is_dir()]
    variables["PYTHONPATH"] = _join((*site, *added), host.variables.get("PYTHONPATH", ""))
    words = [because or f"the folders {names} before the host's own"]
    if libraries := find_libraries((*site, *added)):
        variables["LD_LIBRARY_PATH"] = _join(libraries, variables.get("LD_LIBRARY_PATH", ""))
        words.append(f"LD_LIBRARY_PATH has {', '.join(map(str, libraries))}")
    return replace(host, variables=variables, because="; ".join(words), folders=site)


def find_libraries(folders: Sequence[Path]) -> tuple[Path, ...]:
    """The library folders that compiled packages of an overlay look for each other in.

    The rule: `PACKAGE/lib` of a site folder, where it holds shared libraries (DeepGEMM finds `tvm_ffi/lib` in no other
    way). One that holds a library of the CUDA toolkit is left out: it would make a second runtime visible.
    """
    found = {place: list(place.glob("lib*.so*")) for folder in folders for place in sorted(folder.glob("*/lib"))}
    return tuple(
        place for place, files in found.items() if files and not any(_OF_CUDA.match(file.name) for file in files)
    )


def _join(first: Sequence[Path], then: str) -> str:
    """A path variable with folders before what it has; an empty entry would mean the working folder."""
    entries = [str(folder) for folder in first]
    return os.pathsep.join([*entries, *(entry for entry in then.split(os.pathsep) if entry and entry not in entries)])


# --- what an environment is made of -----------------------------------------------------------------------------------


def hash_parts(parts: Sequence[str]) -> str:
    """One hash over texts in their order; no two lists of texts share one."""
    return sha256("".join(f"{len(part.encode())}:{part}" for part in parts).encode()).hexdigest()


def list_variables(variables: Mapping[str, str]) -> Iterator[str]:
    """The variables that change what runs, one a line, sorted; `PYTHONPATH` is left to what lies there."""
    for name in sorted(variables):
        if name.startswith(_CHANGE_WHAT_RUNS) and name not in ONLY_PLACES and name != "PYTHONPATH":
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


# --- what an environment has, as it reports itself --------------------------------------------------------------------


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
    facts: Facts = environment.ask("-c", _IDENTIFY, read=Facts.model_validate_json, processes=processes)
    return facts


def require_torch(facts: Facts) -> None:
    """Refuse an environment that has nothing to probe.

    Raises:
        NoEnvironment: it has no torch.
    """
    if not facts.torch:
        raise NoEnvironment(
            f"{facts.executable} (Python {facts.python}) has no torch. Likely cause: the stack has another "
            "interpreter. Next step: give the stack's interpreter with --python, or set MEGACPP_PYTHON."
        )
