"""How much this process compiled just in time: a compile after warm-up is a step that suddenly takes seconds.

Each compiler is hooked when it is loaded; what it takes from its cache on disk does not count. `unwatched` names what
cannot be seen. `start_compiling` is the start of every process that compiles: a probe, a rank, a task of a prewarm.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from functools import cache
from typing import Any, Final

from .compiles import ARCH, ROOT, Compile, seen_since
from .driver_cache import look_at_driver, watch_driver, why_shared, work_on_copy
from .watch import HOOKS, after_import, faults

# NVRTC keeps what it compiles in the driver's cache since CUDA 12.9 (its manual, "Caching"), and is seen there. Before,
# it compiled in memory and reported nothing: module that is loaded where it does -> what it compiles.
_BY_NVRTC: Final = {
    "transformer_engine": "its NVRTC kernels (transposes, casts) are compiled in memory, in every process",
    "cudnn": "its fused engines are compiled in memory by NVRTC, in every process",
}
_CACHES_SINCE: Final = (12, 9)
_NO_CACHE: Final = "CUDA_CACHE_DISABLE"
MODE: Final = "MEGACPP_JIT_MODE"
# The working folder is in the key of NVRTC's cache (CUDA 13.0, one H200: with the same cache the first attention of a
# process took 0.13 s in the folder in which it was filled, and 1.6 s in another). So every process on shared caches
# works in one that is the same on every machine, and in which nobody can leave a header that a compiler would take.
FOLDER: Final = "/"


@cache
def watch_compilers() -> None:
    """Watch every compiler from here on, once a process. Imports no compiler."""
    for name, hook in HOOKS.items():
        after_import(name, hook)
    watch_driver()


def start_compiling(*, private: bool = True) -> None:
    """Watch every compiler, and count the driver's compiles in a private cache.

    Where the caches are shared (MEGACPP_JIT_ROOT is set), the working folder is changed: read relative paths before.
    Call it before CUDA is initialised.

    Args:
        private: whether this process is one that may have a copy of the driver's cache: not a part of another program.
    """
    if os.environ.get(ROOT):
        os.chdir(FOLDER)
    if private:
        work_on_copy()
    watch_compilers()


def mark() -> int:
    """A position in the list of compiles, for `compiles_since` and `seen_since`."""
    look_at_driver()
    return len(seen_since())


def compiles_since(moment: int = 0) -> tuple[Compile, ...]:
    """What was compiled since, in its order; what came from caches is left out."""
    look_at_driver()
    return tuple(one for one in seen_since(moment) if not one.cached)


def describe_jit() -> dict[str, Any]:
    """What a receipt holds of this process beside its compiles: hits of caches on disk, unwatched libraries, caches."""
    names = {"root": ROOT, "arch": ARCH, "mode": MODE}
    return {
        "hits": dict(sorted(Counter(one.library for one in seen_since() if one.cached).items())),
        "unwatched": unwatched(),
        **{name: os.environ.get(variable, "") for name, variable in names.items()},
    }


def unwatched() -> dict[str, str]:
    """Libraries in this process whose compiles cannot be seen, and why."""
    found = {name: why for name, why in _BY_NVRTC.items() if name in sys.modules and not _nvrtc_caches()}
    if why := why_shared():
        found["cuda"] = f"its compiles are not counted: {why}"
    return found | {name: f"its hook failed: {why}" for name, why in faults().items()}


def _nvrtc_caches() -> bool:
    """Whether NVRTC keeps compiled kernels in the driver's cache, where they are seen."""
    if os.environ.get(_NO_CACHE, "0") not in ("", "0"):
        return False
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or ""
    release = re.match(r"(\d+)\.(\d+)", str(cuda))
    return release is not None and (int(release[1]), int(release[2])) >= _CACHES_SINCE
