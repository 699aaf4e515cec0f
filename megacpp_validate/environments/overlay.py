"""A path overlay: site folders put before an interpreter's own, so that many releases live on one host.

The folders come first on the path in the order they are given in, then what their .pth files add, then what the user
has on `PYTHONPATH`. A folder on `PYTHONPATH` is no site folder to Python, so its .pth files would be skipped: the
interpreter is asked once what `site.addsitedir` makes of them. That runs their `import` lines too, because one vendor
(the CuTe DSL) writes its path as one; what such a line does beside the path, an import hook for instance, is not kept.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from .environment import NoEnvironment
from .interpreter import InterpreterEnvironment

_LIMIT_S: Final = 60.0
_ASK: Final = (
    "import json, site, sys; before = list(sys.path); [site.addsitedir(folder) for folder in sys.argv[1:]]; "
    "print(json.dumps([entry for entry in sys.path if entry not in before]))"
)
# A second copy of one of these beside the one that torch loads is what a stack breaks on: Transformer Engine 2.12
# raises "Multiple libcudart libraries found" where it can see two runtimes.
_OF_CUDA: Final = re.compile(
    r"lib(cuda|cudart|cublas\w*|cudnn\w*|cufft\w*|cufile\w*|cupti|curand|cusolver\w*|cusparse\w*|nccl|nvfatbin|nvJitLink"
    r"|nvrtc[\w-]*|nvToolsExt|nvshmem\w*)\.so"
)


@dataclass(frozen=True)
class Overlay:
    """Site folders and what they need beside the path.

    Attributes:
        folders: in the order of the path.
        added: what their .pth files put on the path behind them.
        libraries: folders for `LD_LIBRARY_PATH`.
        notes: what was left out, in words.
    """

    folders: tuple[Path, ...]
    added: tuple[Path, ...] = ()
    libraries: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def put_over(host: InterpreterEnvironment, folders: Sequence[Path], because: str = "") -> InterpreterEnvironment:
    """The interpreter of a host with site folders before its own.

    Args:
        host: its variables carry the user's `PYTHONPATH` and `LD_LIBRARY_PATH`, which stay behind the folders'.
        folders: site folders, the first one wins.
        because: why it is these.

    Raises:
        NoEnvironment: a folder is not there, or the interpreter cannot be started.
    """
    overlay = read_overlay(host, folders)
    variables = dict(host.variables)
    variables["PYTHONPATH"] = _join((*overlay.folders, *overlay.added), variables.get("PYTHONPATH", ""))
    if overlay.libraries:
        variables["LD_LIBRARY_PATH"] = _join(overlay.libraries, variables.get("LD_LIBRARY_PATH", ""))
    words = "; ".join([because or _say_folders(overlay), *_say_libraries(overlay), *overlay.notes])
    return replace(host, variables=variables, because=words, folders=overlay.folders)


def read_overlay(host: InterpreterEnvironment, folders: Sequence[Path]) -> Overlay:
    """What site folders need on the paths of an interpreter.

    Raises:
        NoEnvironment: a folder is not there, or the interpreter cannot be started.
    """
    absolute = tuple(dict.fromkeys(map(_as_on_path, folders)))
    if missing := [str(folder) for folder in absolute if not folder.is_dir()]:
        raise NoEnvironment(
            f"there is no folder {', '.join(missing)}. Likely cause: a typing error, or it was not unpacked. Next "
            "step: name folders that hold packages, as `pip install --target` makes them."
        )
    if odd := [str(folder) for folder in absolute if os.pathsep in str(folder)]:
        raise NoEnvironment(
            f"{odd[0]} has a {os.pathsep!r} in its name, which no path can carry. Next step: rename it."
        )
    added, notes = _ask_added(host, absolute)
    libraries, left_out = find_libraries((*absolute, *added))
    if left_out:
        notes = (*notes, f"not on LD_LIBRARY_PATH, because of the CUDA libraries there: {_list(left_out)}")
    return Overlay(absolute, added, libraries, notes)


def _as_on_path(folder: Path) -> Path:
    """Absolute and without "..", as Python puts it on its path; Python would not follow a link before the ".."."""
    return folder.resolve() if ".." in folder.parts else folder.absolute()


def find_libraries(folders: Sequence[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The library folders that compiled packages of an overlay look for each other in, and those that are left out.

    The rule: `PACKAGE/lib` of a site folder, where it holds shared libraries (DeepGEMM finds `tvm_ffi/lib` in no other
    way). One that holds a library of the CUDA toolkit is left out: it would make a second runtime visible.

    Returns:
        Both in the order of the folders.
    """
    taken: list[Path] = []
    left_out: list[Path] = []
    for folder in folders:
        for place in sorted(folder.glob("*/lib")):
            libraries = [file.name for file in place.glob("lib*.so*")]
            if libraries:
                (left_out if any(map(_OF_CUDA.match, libraries)) else taken).append(place)
    return tuple(taken), tuple(left_out)


def _ask_added(host: InterpreterEnvironment, folders: tuple[Path, ...]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """What the .pth files of the folders add to the path, and what Python says of those that it cannot read."""
    if not any(place.suffix == ".pth" for folder in folders for place in folder.iterdir()):
        return (), ()
    variables = {**host.variables, "PYTHONPATH": _join(folders, host.variables.get("PYTHONPATH", ""))}
    words = [*host.python, "-P", "-c", _ASK, *map(str, folders)]
    try:
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        added: list[str] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as fault:
        said = " ".join(str(getattr(fault, "stderr", None) or fault).split())[-600:]
        raise NoEnvironment(
            f"{host.shown} cannot read the .pth files of {_list(folders)}: {said}. Likely cause: a line in one ends "
            "the interpreter, or it is older than Python 3.11. Next step: take that file away, or give another Python."
        ) from fault
    said = " ".join(done.stderr.split())[-300:]
    # A path that is not there says nothing, and one of another host would be found first.
    return tuple(Path(entry) for entry in added if Path(entry).is_dir()), (
        f"its .pth files say: {said}",
    ) if said else ()


def _join(first: Sequence[Path], then: str) -> str:
    """A path variable with folders before what it has; an empty entry would mean the working folder."""
    entries = [str(folder) for folder in first]
    return os.pathsep.join([*entries, *(entry for entry in then.split(os.pathsep) if entry and entry not in entries)])


def _list(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, folders))


def _say_folders(overlay: Overlay) -> str:
    return f"the folders {_list(overlay.folders)} before the host's own"


def _say_libraries(overlay: Overlay) -> Iterator[str]:
    if overlay.added:
        yield f"its .pth files add {_list(overlay.added)}"
    if overlay.libraries:
        yield f"LD_LIBRARY_PATH has {_list(overlay.libraries)}"
