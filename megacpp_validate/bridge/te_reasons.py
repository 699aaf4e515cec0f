"""Why Transformer Engine could not be imported, in words that a person can act on.

The exception alone rarely says it: TE's own messages name the symptom, and the cause lies in which of its three
parts (Python sources, core library, torch extension) are installed, from which release, and where. So the
reason joins what was raised with what lies on the path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

INSTALL: Final = 'pip install --no-build-isolation "transformer-engine[pytorch]==VERSION"'
SOURCES: Final = "transformer-engine"
CORES: Final = ("transformer-engine-cu12", "transformer-engine-cu13")
EXTENSION: Final = "transformer-engine-torch"

# Which library a missing symbol or file belongs to, and the package that brings it. First match wins.
_OWNERS: Final = (
    (r"cublas", "cuBLAS", "nvidia-cublas"),
    (r"cudnn", "cuDNN", "nvidia-cudnn-cu13 (or -cu12)"),
    (r"nvrtc", "NVRTC", "nvidia-cuda-nvrtc"),
    (r"curand", "cuRAND", "nvidia-curand"),
    (r"cusolver", "cuSOLVER", "nvidia-cusolver"),
    (r"nccl", "NCCL", "nvidia-nccl-cu13 (or -cu12)"),
    (r"nvshmem", "NVSHMEM", "nvidia-nvshmem-cu13 (or -cu12)"),
    (r"nvte_|transformer_engine", "Transformer Engine's core library", "transformer-engine[pytorch]"),
    (r"c10|torch|_ZN2at|_ZNK2at|aoti", "torch", "torch"),
    (r"cudart|cuda|^cu[A-Z]", "the CUDA runtime or driver", "nvidia-cuda-runtime"),
    (r"^_?Py", "Python", "python"),
)


class Cause(NamedTuple):
    """The likely cause of a failed import and the next step."""

    likely: str
    next_step: str


class Install(NamedTuple):
    """What of Transformer Engine lies on `sys.path`.

    versions: distribution name -> version, as the first match on the path says.
    copies: every folder on the path that holds a `transformer_engine` package, in the order of the path.
    has_core, has_extension: whether the compiled halves were found beside a copy.
    """

    versions: dict[str, str]
    copies: tuple[str, ...]
    has_core: bool
    has_extension: bool

    @property
    def core(self) -> str | None:
        """Version of the installed core library's distribution."""
        return next((self.versions[name] for name in CORES if name in self.versions), None)

    def say(self) -> str:
        """The install in one line."""
        parts = [f"{name} {version}" for name, version in self.versions.items()] or ["no distribution"]
        where = ", ".join(self.copies) or "no folder of sys.path"
        return f"{', '.join(parts)}; sources in {where}"


def look_for_te() -> Install:
    """What of Transformer Engine lies on the path of this process. Imports nothing, never raises."""
    versions: dict[str, str] = {}
    for name in (SOURCES, *CORES, EXTENSION):
        try:
            versions[name] = metadata.version(name)
        except Exception:  # absent, or metadata that cannot be read: both mean that it does not count
            continue
    copies: list[str] = []
    libraries: set[str] = set()
    for entry in dict.fromkeys(sys.path):
        package = Path(entry or ".") / "transformer_engine"
        try:
            if not package.is_dir():
                continue
            copies.append(str(package))
            for folder in (package.parent, package, package / "wheel_lib"):
                libraries.update(file.name for file in folder.glob("*transformer_engine*.so*"))
        except OSError:
            continue
    return Install(
        versions,
        tuple(copies),
        any(name.startswith("libtransformer_engine") for name in libraries),
        any(name.startswith("transformer_engine_torch") for name in libraries),
    )


def explain_te_import(fault: BaseException) -> str:
    """What happened, the likely cause and the next step, for an exception of `import transformer_engine.pytorch`."""
    install = look_for_te()
    causes = (rule(fault, install) for rule in _RULES)
    cause = next((found for found in causes if found), None) or Cause(
        "an install that this project has not seen yet", "read the exception above, then compare with a clean install"
    )
    text = " ".join(str(fault).split()) or "no text"
    return (
        f"transformer_engine.pytorch cannot be imported: {type(fault).__name__}: {text}{_innermost(fault)}. "
        f"Likely cause: {cause.likely}. Next step: {cause.next_step}. Found: {install.say()}."
    )


def _innermost(fault: BaseException) -> str:
    frames = traceback.extract_tb(fault.__traceback__)
    vendor = [frame for frame in frames if f"{os.sep}transformer_engine{os.sep}" in frame.filename]
    if not vendor:
        return ""
    return f" (at {vendor[-1].filename}:{vendor[-1].lineno})"


def _not_installed(fault: BaseException, install: Install) -> Cause | None:
    if isinstance(fault, ModuleNotFoundError) and not install.copies:
        if fault.name == "transformer_engine":
            return Cause("Transformer Engine is not installed in this interpreter", f"{INSTALL}, or stay native")
    elif isinstance(fault, ModuleNotFoundError) and (fault.name or "").startswith("transformer_engine"):
        return Cause(
            f"the package in {install.copies[0]} lacks its module {fault.name}: leftovers of an uninstall, a source "
            "tree, or a damaged install",
            f"remove that folder, then {INSTALL}",
        )
    return None


def _two_copies(fault: BaseException, install: Install) -> Cause | None:
    if len(install.copies) < 2:
        return None
    first, *hidden = install.copies
    return Cause(
        f"a second copy of Transformer Engine: {first} comes first on the path and hides {', '.join(hidden)}; "
        "sources of one are loaded with libraries or metadata of the other",
        f"remove one of them (python -c 'import sys; print(sys.path)' shows the order), or run from another folder",
    )


def _flash_attention_4(fault: BaseException, install: Install) -> Cause | None:
    if not isinstance(fault, ImportError) or (fault.name or "").partition(".")[0] not in {"cutlass", "quack", "tvm_ffi"}:
        return None
    return Cause(
        f"flash-attn-4 is installed without the CuTe DSL (`{fault.name}` is missing), and this release of "
        "Transformer Engine imports it as soon as it sees it",
        "pip install nvidia-cutlass-dsl quack-kernels, or pip uninstall flash-attn-4",
    )


def _missing_module(fault: BaseException, install: Install) -> Cause | None:
    if not isinstance(fault, ModuleNotFoundError) or not fault.name:
        return None
    missing = fault.name.partition(".")[0]
    return Cause(f"Transformer Engine needs the Python package `{missing}`, which is not here", f"pip install {missing}")


def _undefined_symbol(fault: BaseException, install: Install) -> Cause | None:
    match = re.search(r"(\S+): undefined symbol: (\w+)", str(fault))
    if not match:
        return None
    library, package = _owner(match[2])
    return Cause(
        f"{Path(match[1]).name} was built against another {library}: it wants the symbol {match[2]}, which the one "
        "that is loaded does not have",
        f"install the {package} that this release was built for (or rebuild the extension against yours), or go back "
        "to the release that worked",
    )


def _missing_library(fault: BaseException, install: Install) -> Cause | None:
    text = str(fault)
    match = (
        re.search(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object", text)
        or re.search(r"^(\w+) shared object not found", text)
        or (re.search(r"grep '?(lib\w+)", text) if isinstance(fault, subprocess.CalledProcessError) else None)
    )
    if not match:
        return None
    library, package = _owner(match[1])
    return Cause(
        f"the shared library {match[1]} ({library}) is not installed or not on the loader's path",
        f"pip install {package} of the CUDA major version of this install, or put its folder on LD_LIBRARY_PATH",
    )


def _parts(fault: BaseException, install: Install) -> Cause | None:
    """Which of the three parts is missing or of another release."""
    versions = {name: version for name, version in install.versions.items()}
    has_core = install.has_core or install.core is not None
    has_extension = install.has_extension or EXTENSION in versions
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        return Cause(
            f"the parts of Transformer Engine are of different releases ({listed}); a +local suffix counts",
            f"uninstall all of them, then {INSTALL}",
        )
    if not has_core and not has_extension:
        return Cause("only the Python half is installed (the metapackage): no core library, no torch extension", INSTALL)
    if not has_extension:
        return Cause("the core library is here, the torch extension (transformer_engine_torch) is not", INSTALL)
    if not has_core:
        return Cause("the torch extension is here, the core library (transformer_engine_cu12 or _cu13) is not", INSTALL)
    return None


def _two_runtimes(fault: BaseException, install: Install) -> Cause | None:
    if "Multiple lib" not in str(fault):
        return None
    return Cause("two CUDA runtimes are visible to this process", "keep one of them on LD_LIBRARY_PATH and in site-packages")


def _too_old(fault: BaseException, install: Install) -> Cause | None:
    match = re.search(r"[Mm]inimum (\S+) version (\S+) required|(\w+) (?:version )?>=? ?([\d.]+)", str(fault))
    if not match:
        return None
    what, version = match[1] or match[3], match[2] or match[4]
    return Cause(f"{what} is older than {version}, the least this release takes", f"upgrade {what} to {version} or later")


def _missing_attribute(fault: BaseException, install: Install) -> Cause | None:
    if not isinstance(fault, AttributeError):
        return None
    owner = getattr(fault.obj, "__name__", type(fault.obj).__name__)
    if owner == "torch" or owner.startswith("torch."):
        return Cause(f"this torch has no `{owner}.{fault.name}`", "use the torch that this release was built for")
    return Cause(
        f"`{owner}` has no `{fault.name}`: the Python sources and the compiled extension are not of one build",
        f"uninstall all parts, then {INSTALL}",
    )


def _owner(name: str) -> tuple[str, str]:
    found = ((library, package) for pattern, library, package in _OWNERS if re.search(pattern, name))
    return next(found, ("another library", f"package that brings {name}"))


_RULES: Final[tuple[Callable[[BaseException, Install], Cause | None], ...]] = (
    _two_copies,
    _not_installed,
    _flash_attention_4,
    _missing_module,
    _undefined_symbol,
    _two_runtimes,
    _missing_attribute,
    _missing_library,
    _parts,
    _too_old,
)
