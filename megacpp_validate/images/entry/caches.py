"""The JIT caches of an image with a read-only root: read where they lie, with room beside them for what is missing."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ...jitcache.layout import ARCH_VARIABLE, MODE_VARIABLE, NVRTC, ROOT_VARIABLE, arch_folder, cache_variables


class CachesClosed(PermissionError):
    """What lies at the root of the caches may not be read by whoever runs this container."""


def make_room(variables: Mapping[str, str], beside: Path | None = None) -> dict[str, str]:
    """The variables with caches that can be written: the image's own, or a copy of links to its files.

    A cache that is found and cannot be written fails a compiler at its first miss. Links cost no memory, so that a
    folder in `/tmp` holds only what is compiled anew.

    Raises:
        CachesClosed: a part of them may not be read, and would be compiled anew as if it were not there.
        OSError: there is no room for them either.
    """
    root, arch = variables.get(ROOT_VARIABLE, ""), variables.get(ARCH_VARIABLE, "")
    if not root or not arch:
        return dict(variables)
    kept = arch_folder(Path(root), arch)
    if Path(root).is_dir() and not os.access(root, os.X_OK):
        raise CachesClosed(errno.EACCES, os.strerror(errno.EACCES), root)
    if not kept.is_dir() or os.access(kept, os.W_OK):
        return dict(variables)
    new = (beside or Path(tempfile.gettempdir())) / "megacpp-jit"
    for folder, _, files in os.walk(kept, onerror=_close):
        here = arch_folder(new, arch) / Path(folder).relative_to(kept)
        here.mkdir(parents=True, exist_ok=True)
        for name in files:
            link = here / name
            if not os.access(Path(folder) / name, os.R_OK):
                raise CachesClosed(errno.EACCES, os.strerror(errno.EACCES), str(Path(folder) / name))
            if not link.exists():
                link.symlink_to(Path(folder) / name)
    nvrtc = variables.get(MODE_VARIABLE) == NVRTC
    return {**variables, **cache_variables(new, arch, nvrtc=nvrtc)}


def _close(fault: OSError) -> None:
    raise CachesClosed(fault.errno, fault.strerror, fault.filename) from fault
