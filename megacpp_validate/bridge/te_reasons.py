"""Why Transformer Engine could not be imported, in words that a person can act on.

The exception alone rarely says it: TE's own messages name the symptom, and the cause lies in which of its
three parts (Python sources, core library, torch extension) are installed, from which release, and where. So
the reason joins what was raised with what lies on the path.
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
from typing import Final

from .fault_text import met_on_the_way, say_fault, text_of, told_by
from .te_file_reasons import (
    INSTALL,
    REINSTALL,
    RENAME,
    Cause,
    cannot_be_read,
    emptied,
    no_extension,
    no_folder,
    no_metadata,
    of_another_machine,
    of_another_numpy,
    older_driver,
    shadowed,
    with_null_bytes,
)
from .te_install import EXTENSION, SOURCES, Install, look_for_te

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
    (r"libcuda\.so", "the NVIDIA driver", "the NVIDIA driver"),
    (r"c10|torch|_ZN2at|_ZNK2at|aoti", "torch", "torch"),
    (r"cudart|cuda|^cu[A-Z]", "the CUDA runtime or driver", "nvidia-cuda-runtime"),
    (r"^_?Py", "Python", "python"),
)


def explain_te_import(fault: BaseException) -> str:
    """What happened, the likely cause and the next step, for what importing Transformer Engine raised."""
    install = look_for_te()
    found = _find(told_by(fault), install) or _find(met_on_the_way(fault), install)
    cause = found or Cause(
        "an install that this project has not seen yet",
        f"read the exception above, compare with a clean install: {INSTALL}",
    )
    next_step = cause.next_step.replace("VERSION", install.versions.get(SOURCES, "VERSION").partition("+")[0])
    return (
        f"Transformer Engine cannot be used: {say_fault(fault)}{_innermost(fault)}. Likely "
        f"cause: {cause.likely}. Next step: {next_step}. Found: {install.say()}."
    )


def _find(faults: tuple[BaseException, ...], install: Install) -> Cause | None:
    """What the first rule that knows any of the exceptions says of it."""
    return next((cause for rule in _RULES for each in faults if (cause := rule(each, install))), None)


def _innermost(fault: BaseException) -> str:
    frames = traceback.extract_tb(fault.__traceback__)
    vendor = [frame for frame in frames if f"{os.sep}transformer_engine{os.sep}" in frame.filename]
    if not vendor:
        return ""
    return f" (at {vendor[-1].filename}:{vendor[-1].lineno})"


def _not_installed(fault: BaseException, install: Install) -> Cause | None:
    if isinstance(fault, ModuleNotFoundError) and fault.name == "transformer_engine" and not install.copies:
        return Cause("Transformer Engine is not installed in this interpreter", f"{INSTALL}, or stay native")
    return None


def _exits(fault: BaseException, _: Install) -> Cause | None:
    if not isinstance(fault, SystemExit):
        return None
    return Cause(
        "code that runs while it is imported ends the program, which a library must not do",
        "look at the line named above; a plugin or a patched file does that rather than a release",
    )


def _leftovers(fault: BaseException, install: Install) -> Cause | None:
    missing = (fault.name or "") if isinstance(fault, ModuleNotFoundError) else ""
    if missing == EXTENSION.replace("-", "_") or not install.copies:
        return None
    first = install.copies[0]
    inner = [Path(first, *parts, "__init__.py") for parts in ((), ("pytorch",), ("common",))]
    if not missing.startswith("transformer_engine") and all(file.is_file() for file in inner):
        return None
    what = f"its module {missing}" if missing.startswith("transformer_engine") else "its sources"
    return Cause(
        f"the folder {first} lacks {what}: leftovers of an uninstall, or a damaged install",
        f"remove that folder, then {INSTALL}",
    )


def _damaged_source(fault: BaseException, install: Install) -> Cause | None:
    if isinstance(fault, SyntaxError):
        place = fault.filename or with_null_bytes(install) or "a source file"
        file = f"{place} is damaged (line {fault.lineno})" if fault.lineno else f"{place} is damaged"
        return Cause(f"{file}: cut short, edited, or written for a newer Python", REINSTALL)
    if isinstance(fault, (EOFError, ValueError)) and re.search(r"marshal|null bytes", text_of(fault)):
        return Cause("a source or compiled Python file is damaged", f"remove its __pycache__ folders, or {REINSTALL}")
    return None


def _damaged_library(fault: BaseException, _: Install) -> Cause | None:
    match = re.search(r"(\S+?\.so[\w.]*): (file too short|invalid ELF header|cannot read file data)", text_of(fault))
    if not match:
        return None
    return Cause(f"{match[1]} is damaged ({match[2]}), as a full disk or a broken copy leaves it", REINSTALL)


def _flash_attention_4(fault: BaseException, _: Install) -> Cause | None:
    if not isinstance(fault, ImportError) or (fault.name or "").partition(".")[0] not in {
        "cutlass",
        "quack",
        "tvm_ffi",
    }:
        return None
    return Cause(
        f"flash-attn-4 is installed without the CuTe DSL (`{fault.name}` is missing), and this release of "
        "Transformer Engine imports it as soon as it sees it",
        "pip install nvidia-cutlass-dsl quack-kernels, or pip uninstall flash-attn-4",
    )


def _missing_module(fault: BaseException, _: Install) -> Cause | None:
    if not isinstance(fault, ModuleNotFoundError) or not fault.name or fault.name.startswith("transformer_engine"):
        return None
    missing = fault.name.partition(".")[0]
    if missing in sys.modules and missing != fault.name:
        file = getattr(sys.modules[missing], "__file__", None)
        if file and not hasattr(sys.modules[missing], "__path__"):
            return Cause(f"the file {file} has the name of the package `{missing}` and hides it", RENAME)
        return Cause(
            f"this `{missing}` has no module {fault.name}",
            f"use the {missing} that this release was made for",
        )
    return Cause(
        f"Transformer Engine needs the Python package `{missing}`, which is not here",
        f"pip install {missing}",
    )


def _unreadable_metadata(_: BaseException, install: Install) -> Cause | None:
    if not install.unreadable:
        return None
    return Cause(f"the metadata of {', '.join(install.unreadable)} cannot be read: damaged, or deleted", REINSTALL)


def _no_record(fault: BaseException, install: Install) -> Cause | None:
    if not isinstance(fault, TypeError) or SOURCES not in install.versions:
        return None
    if metadata.distribution(SOURCES).files is not None:
        return None
    return Cause(
        f"the metadata of {SOURCES} has no list of files (RECORD), which this release reads while it is "
        "imported: not installed by pip, or damaged",
        REINSTALL,
    )


def _two_copies(_: BaseException, install: Install) -> Cause | None:
    if len(install.copies) < 2:
        return None
    first, *others = install.copies
    hidden = ", ".join(others)
    return Cause(
        f"a second copy of Transformer Engine: {first} comes first on the path and hides {hidden}; sources "
        "of one are loaded with libraries or metadata of the other",
        "remove one of them, or run from another folder (python -c 'import sys; print(sys.path)' tells)",
    )


def _two_builds(fault: BaseException, _: Install) -> Cause | None:
    match = re.search(r"Multiple files found: \[(.+)\]", text_of(fault))
    if not match:
        return None
    files = ", ".join(re.findall(r"'([^']+)'", match[1])) or match[1]
    return Cause(f"the libraries of two builds lie beside each other: {files}", "remove the one of the older build")


def _undefined_symbol(fault: BaseException, _: Install) -> Cause | None:
    match = re.search(r"(\S+): undefined symbol: (\w+)", text_of(fault))
    if not match:
        return None
    library, package = _owner(match[2])
    return Cause(
        f"{Path(match[1]).name} was built against another build of {library}: it wants the symbol "
        f"{match[2]}, which the one that is loaded does not have",
        f"install the {package} that this release was built for (or rebuild the extension against yours), or "
        "go back to the release that worked",
    )


def _old_system(fault: BaseException, _: Install) -> Cause | None:
    match = re.search(r"version [`'](GLIBC|GLIBCXX|CXXABI)_([\d.]+)' not found", text_of(fault))
    if not match:
        return None
    return Cause(
        f"the libraries were built on a newer Linux: they want {match[1]} {match[2]}",
        "use a newer base image, or build the extension on this one",
    )


def _missing_library(fault: BaseException, _: Install) -> Cause | None:
    text = text_of(fault)
    match = (
        re.search(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object", text)
        or re.search(r"^(\w+) shared object not found", text)
        or (re.search(r"grep '?(lib[\w.]+)", text) if isinstance(fault, subprocess.CalledProcessError) else None)
    )
    if not match:
        return None
    library, package = _owner(match[1])
    bring = f"pip install {package} for the CUDA of this install, or put its folder on LD_LIBRARY_PATH"
    if package == "the NVIDIA driver":
        bring = "run on a GPU host, in a container with its driver (docker run --gpus all)"
    return Cause(f"the shared library {match[1]} ({library}) is not installed or not on the loader's path", bring)


def _parts(_: BaseException, install: Install) -> Cause | None:
    """Which of the three parts is missing or of another release."""
    has_core = install.has_core or install.core is not None
    has_extension = install.has_extension or EXTENSION in install.versions
    if len(set(install.versions.values())) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in install.versions.items())
        return Cause(
            f"the parts of Transformer Engine are of different releases ({listed}); a +local suffix counts",
            f"uninstall all of them, then {INSTALL}",
        )
    if not has_core and not has_extension:
        return Cause(
            "only the Python half is installed (the metapackage): no core library, no torch extension",
            INSTALL,
        )
    if not has_extension:
        return Cause("the core library is here, the torch extension (transformer_engine_torch) is not", INSTALL)
    if not has_core:
        return Cause("the torch extension is here, the core library (transformer_engine_cu12 or _cu13) is not", INSTALL)
    gone = [name for name, here in ((install.core, install.has_core), (EXTENSION, install.has_extension)) if not here]
    if gone:
        return Cause(f"{' and '.join(map(str, gone))} is installed, and its library file is not there", REINSTALL)
    return None


def _two_runtimes(fault: BaseException, _: Install) -> Cause | None:
    if "Multiple lib" not in text_of(fault):
        return None
    return Cause(
        "two CUDA runtimes are visible to this process",
        "keep one of them on LD_LIBRARY_PATH and in site-packages",
    )


def _too_old(fault: BaseException, _: Install) -> Cause | None:
    match = re.search(
        r"[Mm]inimum (?P<a>\S+) version (?P<b>[\d.]*\d) required|requires (?P<c>\w+) (?P<d>[\d.]*\d) or later"
        r"|(?P<e>\w+) (?:version )?>=? ?(?P<f>[\d.]*\d)",
        text_of(fault),
    )
    if not match:
        return None
    what, version = (match["a"] or match["c"] or match["e"]), (match["b"] or match["d"] or match["f"])
    return Cause(
        f"{what} is older than {version}, the least this release takes",
        f"upgrade {what} to {version} or later",
    )


def _missing_name(fault: BaseException, _: Install) -> Cause | None:
    """A name that is not where the sources look for it: in torch, the extension or the sources."""
    if isinstance(fault, AttributeError) and fault.name and fault.obj is not None:
        owner, name = getattr(fault.obj, "__name__", type(fault.obj).__name__), fault.name
    elif found := re.search(
        r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'", text_of(fault)
    ):
        owner, name = found[2], found[1]
    else:
        return None
    root = owner.partition(".")[0]
    if root == "torch":
        return Cause(f"this torch has no `{owner}.{name}`", "use the torch that this release was built for")
    if owner == "transformer_engine.pytorch":
        return Cause(
            f"this release moved, renamed or never had `{owner}.{name}`",
            "run the upgrade canary between a release that has it and this one",
        )
    if root.startswith("transformer_engine") or isinstance(fault, AttributeError):
        return Cause(
            f"`{owner}` has no `{name}`: the Python sources and the compiled extension are not of one build",
            f"uninstall all parts, then {INSTALL}",
        )
    return Cause(f"this `{root}` has no `{owner}.{name}`", f"use the {root} that this release was made for")


def _owner(name: str) -> tuple[str, str]:
    found = ((library, package) for pattern, library, package in _OWNERS if re.search(pattern, name))
    return next(found, ("another library", f"package that brings {name}"))


# The first rule with an answer has it: what the exception itself says comes before what lies on the path.
_RULES: Final[tuple[Callable[[BaseException, Install], Cause | None], ...]] = (
    no_folder,
    _not_installed,
    _exits,
    cannot_be_read,
    shadowed,
    _leftovers,
    _damaged_source,
    _damaged_library,
    of_another_machine,
    no_extension,
    emptied,
    of_another_numpy,
    older_driver,
    _flash_attention_4,
    _missing_module,
    _unreadable_metadata,
    no_metadata,
    _no_record,
    _two_copies,
    _two_builds,
    _undefined_symbol,
    _old_system,
    _two_runtimes,
    _missing_name,
    _missing_library,
    _parts,
    _too_old,
)
