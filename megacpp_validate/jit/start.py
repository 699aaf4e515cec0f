"""The start of every process that compiles: a probe, a rank, a task of a prewarm."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from typing import Final

from .driver_cache import work_on_copy
from .monitor import watch_compilers
from .once import ROOT, Guard, open_guard

# The working folder is in the key of NVRTC's cache (CUDA 13.0, one H200: with the same cache the first attention of a
# process took 0.13 s in the folder in which it was filled, and 1.6 s in another). So every process on shared caches
# works in one that is the same on every machine, and in which nobody can leave a header that a compiler would take.
FOLDER: Final = "/"


def start_compiling() -> Guard | None:
    """One working folder, a copy of the driver's cache, turns with other processes, and every compiler watched.

    Only where the caches are shared (MEGACPP_JIT_ROOT is set) is the working folder changed: paths that were given
    relative must be read before. Call it before CUDA is initialised.

    Returns:
        The guard, as `open_guard`.
    """
    if os.environ.get(ROOT):
        with suppress(OSError, ValueError):  # no core may stay where nobody looks for one
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        os.chdir(FOLDER)
        work_on_copy()
    watch_compilers()
    return open_guard()
