"""What one look of the doctor sees: the path, without importing anything; or one vendor package, by importing it.

The files of a package against the record that its installer left, so that a version is not believed unseen.

One release unpacked over another, or a file that was patched in place, keeps the metadata of what was there before; and
metadata is where a version is read from. Source of the format: packaging.python.org, "Recording installed projects".
"""

from __future__ import annotations

import base64
import csv
import faulthandler
import importlib
import json
import os
import platform
import re
import stat
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ..evidence.doctor_look import Distribution, Extension, PackageLook, PathLook, Record
from ..evidence.receipt import Failure
from . import doctor_visible as visible
from .doctor_elf import find_compiled, look_at, torch_headers
from .doctor_visible import show_behaviours
from .fingerprint import PACKAGES, find_copies, read_libraries, read_packages, read_version
from .identify import read_gpu
from .process import describe

_MODE: Final = "sha256="


def compare_record(top: str, names: Sequence[str], folder: Path) -> Record:
    """Hold the files of a package against the record of the first distribution that lists any of them.

    An editable install lists none, and then nothing is said. Sizes of all files are compared, contents of sources only.

    Args:
        top: top-level package.
        names: distributions that may have brought it.
        folder: that it was loaded from.
    """
    for name in names:
        with suppress(Exception):  # a damaged install raises what it likes, and is told of elsewhere
            found = metadata.distribution(name)
            # Not `found.files`: from Python 3.12 on it leaves out what is not there, which is what is looked for.
            rows = csv.reader((found.read_text("RECORD") or "").splitlines())
            files = [row for row in rows if len(row) >= 3 and row[1] and row[0].startswith(f"{top}/")]
            if files:
                return _compare(os.path.realpath(str(found.locate_file(""))), files, folder)
    return Record()


def _compare(home: str, files: Sequence[Sequence[str]], folder: Path) -> Record:
    if home != os.path.realpath(folder.parent):
        return Record(elsewhere=home)
    kept = {name: _is_as_recorded(f"{home}/{name}", hashed, size) for name, hashed, size, *_ in files}
    return Record(
        compared=len(kept),
        changed=tuple(name for name, same in kept.items() if same is False),
        gone=tuple(name for name, same in kept.items() if same is None),
    )


def _is_as_recorded(place: str, hashed: str, size: str) -> bool | None:
    """None where it is not there."""
    try:
        kind = os.stat(place)  # noqa: PTH116 - of twelve thousand files; a Path for each takes longer than the kernel
        if size and kind.st_size != int(size):
            return False
        if not place.endswith(".py") or not hashed.startswith(_MODE):
            return True if stat.S_ISREG(kind.st_mode) else None
        digest = base64.urlsafe_b64encode(sha256(Path(place).read_bytes()).digest()).decode().rstrip("=")
    except OSError:
        return None
    return digest == hashed[len(_MODE) :]


_OF_A_VENDOR: Final = re.compile(
    r"torch|triton|flash[-_.]?attn.*|.*deep[-_.]gemm|transformer[-_.]engine.*|nvidia[-_.].*|apache[-_.]tvm[-_.]ffi|xformers"
    r"|quack[-_.]kernels|liger[-_.]kernel|cuda[-_.].*"
)
_OF_TORCH: Final = re.compile(r"lib(?:torch\w*|c10\w*|shm)\.so")
_WANT_TORCH: Final = re.compile(r"lib(torch\w*|c10\w*|cudart|cublas\w*|cudnn\w*|transformer_engine|tvm_ffi)\.so")


def look_at_path() -> PathLook:
    """What this interpreter would find."""
    gpu, no_gpu = read_gpu()
    return PathLook(
        python=platform.python_version(),
        executable=sys.executable,
        soabi=sysconfig.get_config_var("SOABI") or "",
        machine=platform.machine(),
        torch=_torch_says("__version__") or next((d.version for d in _distributions() if d.name == "torch"), ""),
        torch_cuda=_torch_says("cuda"),
        driver=(gpu or {}).get("driver", ""),
        driver_cuda=visible.read_driver_cuda(),
        gpu=(gpu or {}).get("name", ""),
        capability=(gpu or {}).get("capability", ""),
        no_gpu=no_gpu,
        ld_library_path=os.environ.get("LD_LIBRARY_PATH", ""),
        visible=visible.read_visible(),
        distributions=tuple(_distributions()),
    )


def look_at_package(name: str) -> PackageLook:
    """Import one package after torch, and tell what came of it."""
    top = name.partition(".")[0]
    folders, first = _find(top)
    if not folders and first is None:
        return PackageLook(name, installed=False)
    names = PACKAGES.get(top, (top,))
    torch_failed = None if top == "torch" else _import("torch") if _find("torch")[0] else None
    before = set(visible.read_mapped())
    start = time.perf_counter()
    failure = _import(name) or _find_no_code(name, folders) or (torch_failed if top == "torch" else None)
    seconds = round(time.perf_counter() - start, 3)
    mapped = visible.read_mapped()
    look = PackageLook(
        package=name,
        installed=True,
        version=read_version(names),
        file=str(first or folders[0]),
        failure=failure,
        libraries=read_libraries(),
        mapped=visible.group_cuda(mapped),
        extensions=tuple(_look_at_extensions(top, folders, [file for file in mapped if file not in before], mapped)),
        record=compare_record(top, names, folders[0]) if folders else Record(),
        seconds=seconds,
    )
    if loaded := next((package for package in read_packages() if package.name == top), None):
        version = loaded.version or look.version
        look = replace(look, version=version, file=loaded.file, copies=loaded.other_copies)
    else:
        look = replace(look, copies=find_copies(top, str(first or ""), tuple(sys.path)))
    return replace(look, runtimes=visible.open_runtimes())  # last: it maps what it finds


def _import(name: str) -> Failure | None:
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as fault:  # whatever a damaged install makes up, SystemExit too
        return describe(fault)
    return None


def _find_no_code(name: str, folders: tuple[Path, ...]) -> Failure | None:
    """An empty folder imports as a namespace package; one whose parts hold code, as FlashAttention 4, is well."""
    if getattr(sys.modules.get(name), "__file__", None):
        return None
    if first := _find_lost_init(name):
        return Failure("ImportError", f"{first} was installed and is gone: what is left imports, and is empty")
    if any(file.is_file() for folder in folders for kind in ("*.py", "*.so") for file in folder.rglob(kind)):
        return None
    return Failure("ImportError", f"{', '.join(map(str, folders))} holds no code: it was emptied, or half removed")


def _find_lost_init(name: str) -> str:
    """The `__init__.py` that the install record of a package names, of one that was imported without it."""
    wanted = f"{name.replace('.', '/')}/__init__.py"
    for distribution in PACKAGES.get(name.partition(".")[0], (name,)):
        with suppress(metadata.PackageNotFoundError):
            if any(file.as_posix() == wanted for file in metadata.files(distribution) or ()):
                return wanted
    return ""


def _look_at_extensions(
    top: str, folders: tuple[Path, ...], new: list[Path], mapped: tuple[Path, ...]
) -> Iterator[Extension]:
    """Compiled files of the package's own folders, and others that its import has brought and that build on torch."""
    if top == "torch":  # its own libraries are made for each other
        return
    own = find_compiled(folders)
    include = torch_headers()
    known = {os.path.realpath(file) for file in own}
    for file in own:
        yield look_at(file, mapped, include, [other for other in own if other != file])
    for file in new:
        if os.path.realpath(file) in known or _OF_TORCH.fullmatch(file.name):
            continue
        extension = look_at(file, mapped, None)
        if "site-packages/nvidia" not in extension.file and any(map(_WANT_TORCH.match, extension.needed)):
            yield look_at(file, mapped, include)


def _find(top: str) -> tuple[tuple[Path, ...], Path | None]:
    """The folders of a top-level package and its first file; finding it runs none of its code."""
    try:
        spec = find_spec(top)
    except Exception:
        return (), None
    if spec is None:
        return (), None
    origin = Path(spec.origin) if spec.origin and spec.has_location else None
    return tuple(Path(place) for place in spec.submodule_search_locations or ()), origin


def _torch_says(what: str) -> str:
    """What torch's own version file says, without importing torch."""
    folders, _ = _find("torch")
    for folder in folders:
        with suppress(OSError):
            text = (folder / "version.py").read_text(encoding="utf-8")
            if found := re.search(rf"^{what}(?::[^=]*)? = '([^']*)'", text, re.MULTILINE):
                return found[1]
    return ""


def _distributions() -> list[Distribution]:
    """What installers have left on the path; what has no name or version, as in a damaged install, is left out."""
    found = []
    for one in metadata.distributions():
        with suppress(Exception):
            name, version = one.metadata["Name"], one.version
            if name and version:
                vendor = _OF_A_VENDOR.fullmatch(name.lower())
                found.append(
                    Distribution(name, version, str(one.locate_file("")), tuple(one.requires or ()) if vendor else ())
                )
    return found


def _write(look: PathLook | PackageLook, answer: Path) -> None:
    aside = answer.with_suffix(".part")
    aside.write_text(json.dumps(asdict(look)), encoding="utf-8")
    aside.replace(answer)


def take_look(what: str, answer: str) -> None:
    """Look at the path, or at a package, and write it."""
    faulthandler.enable()
    file = Path(answer)
    if what == "path":
        return _write(look_at_path(), file)
    look = look_at_package(what)
    _write(look, file)
    if look.installed and look.failure is None:  # a call that reads memory from the wrong place may end the process
        _write(replace(look, behaviours=show_behaviours(what.partition(".")[0])), file)
    return None
