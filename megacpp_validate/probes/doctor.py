"""One look of the doctor: at the path without importing anything, or at one vendor package by importing it.

python -m megacpp_validate.probes.doctor path ANSWER.json
python -m megacpp_validate.probes.doctor transformer_engine.pytorch ANSWER.json

A package is imported in a process of its own, because an import may end or hang the process; a missing answer is then
what the doctor sees. Beside the import itself a look has three parts. The files of a package are compared with the
record that its installer left: one release unpacked over another keeps the metadata of what was there before. The
assertions of torch's headers that a compiled file carries are compared with the headers that are there: sgl-deep-gemm
0.1.7, compiled with torch 2.13, whose tensors are 8 bytes smaller before their sizes than those of 2.11, loads with
2.11 and reads every size wrongly. A call shows whether it does.
"""

from __future__ import annotations

import base64
import csv
import faulthandler
import importlib
import json
import mmap
import os
import platform
import re
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ..evidence.doctor_look import Behaviour, Distribution, Extension, Headers, PackageLook, PathLook, Record
from ..evidence.receipt import Failure, write_whole
from .doctor_elf import find_compiled, group_cuda, look_at, open_runtimes, read_driver_cuda
from .fingerprint import PACKAGES, find_copies, read_libraries, read_mapped, read_packages, read_version
from .process import describe

_TORCHS_OWN: Final = re.compile(r"lib(?:torch\w*|c10\w*|shm)\.so")
_ON_TORCH: Final = re.compile(r"lib(torch\w*|c10\w*|cudart|cublas\w*|cudnn\w*|transformer_engine|tvm_ffi)\.so")
_HASHED: Final = "sha256="


def take_look(what: str, answer: Path) -> None:
    """Look at the path, or at a package, and write it."""
    faulthandler.enable()
    look = look_at_path() if what == "path" else look_at_package(what)
    write_whole(answer, json.dumps(asdict(look)))
    if what == "deep_gemm" and isinstance(look, PackageLook) and look.failure is None:
        # A call that reads memory from the wrong place may end the process: the rest is written before.
        write_whole(answer, json.dumps(asdict(replace(look, behaviours=(_read_scales(),)))))


def look_at_path() -> PathLook:
    """What this interpreter would find."""
    gpu, no_gpu = read_gpu()
    card = {"gpu" if name == "name" else name: (gpu or {}).get(name, "") for name in ("name", "driver", "capability")}
    distributions = tuple(_list_distributions())
    return PathLook(
        python=platform.python_version(), executable=sys.executable, machine=platform.machine(),
        soabi=sysconfig.get_config_var("SOABI") or "", driver_cuda=read_driver_cuda(), no_gpu=no_gpu,
        torch=_read_torch("__version__") or next((one.version for one in distributions if one.name == "torch"), ""),
        torch_cuda=_read_torch("cuda"),
        ld_library_path=os.environ.get("LD_LIBRARY_PATH", ""),
        variables={name: value for name, value in os.environ.items() if name.startswith("NVTE_")},
        distributions=distributions, **card,
    )  # fmt: skip


def _read_torch(what: str) -> str:
    """A value of torch's own version file, without importing torch."""
    for folder in find_package("torch")[0]:
        with suppress(OSError):
            text = (folder / "version.py").read_text(encoding="utf-8")
            if found := re.search(rf"^{what}(?::[^=]*)? = '([^']*)'", text, re.MULTILINE):
                return found[1]
    return ""


def _list_distributions() -> Iterator[Distribution]:
    """What installers have left on the path; what has no name or version, as in a damaged install, is left out."""
    for one in metadata.distributions():
        with suppress(Exception):
            name, version = one.metadata["Name"], one.version
            of_torch = tuple(text for text in one.requires or () if re.match(r"torch\b(?!-)", text))
            if name and version:
                yield Distribution(name, version, str(one.locate_file("")), of_torch)


# --- an interpreter, described in a second and without importing any of its packages ---------------------------------

_LIMIT_S: Final = 30.0
_QUERY: Final = "name,compute_cap,driver_version,memory.total"


def identify() -> dict[str, Any]:
    """The facts; empty strings and no GPU where something is not there."""
    gpu, why_no_gpu = read_gpu()
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "machine": platform.machine(),
        "torch": read_version(("torch",)),
        "te": read_version(("transformer-engine",)),
        "te_folder": next(map(str, find_package("transformer_engine")[0]), ""),
        "gpu": gpu,
        "why_no_gpu": why_no_gpu,
    }


def read_gpu() -> tuple[dict[str, str] | None, str]:
    """The first GPU that a process started here would see, and why there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = (visible or "").split(",")[0].strip()
    if visible is not None and first in ("", "-1"):
        return None, f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", f"--id={first or '0'}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except FileNotFoundError:
        return None, "there is no nvidia-smi on the path, and so no NVIDIA driver"
    except (OSError, subprocess.TimeoutExpired) as fault:
        return None, f"nvidia-smi did not answer: {fault}"
    fields = [field.strip() for field in done.stdout.strip().split(",")]
    if done.returncode or len(fields) != 4:
        said = " ".join((done.stdout or done.stderr).split())
        return None, f"nvidia-smi sees no GPU: {said or f'exit status {done.returncode}'}"
    return dict(zip(("name", "capability", "driver", "memory_mib"), fields, strict=True)), ""


def find_package(top: str) -> tuple[tuple[Path, ...], Path | None]:
    """The folders of a top-level package and its first file; finding it runs none of its code."""
    try:
        spec = find_spec(top)
    except Exception:  # a damaged install raises what it likes
        spec = None
    if spec is None:
        return (), None
    first = Path(spec.origin) if spec.origin and spec.has_location else None
    return tuple(map(Path, spec.submodule_search_locations or ())), first


# --- one package ------------------------------------------------------------------------------------------------------


def look_at_package(name: str) -> PackageLook:
    """Import one package after torch, and report what came of it."""
    top = name.partition(".")[0]
    folders, first = find_package(top)
    if not folders and first is None:
        return PackageLook(name, installed=False)
    names = PACKAGES.get(top, (top,))
    if top != "torch" and find_package("torch")[0]:
        _import("torch")
    before, start = set(read_mapped()), time.perf_counter()
    failure = _import(name) or _find_no_code(name, folders)
    seconds = round(time.perf_counter() - start, 3)
    mapped = read_mapped()
    loaded = next((package for package in read_packages() if package.name == top), None)
    return PackageLook(
        package=name,
        installed=True,
        version=(loaded.version if loaded else "") or read_version(names),
        file=loaded.file if loaded else str(first or folders[0]),
        copies=loaded.other_copies if loaded else find_copies(top, str(first or ""), tuple(sys.path)),
        failure=failure,
        libraries=read_libraries(),
        mapped=group_cuda(mapped),
        extensions=tuple(_look_at_extensions(top, folders, [file for file in mapped if file not in before], mapped)),
        record=compare_record(top, names, folders[0]) if folders else Record(),
        seconds=seconds,
        runtimes=open_runtimes(),  # last: it maps what it finds
    )


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
    first = f"{name.replace('.', '/')}/__init__.py"
    for distribution in PACKAGES.get(name.partition(".")[0], (name,)):
        with suppress(metadata.PackageNotFoundError):
            if any(file.as_posix() == first for file in metadata.files(distribution) or ()):
                return Failure("ImportError", f"{first} was installed and is gone: what is left imports, and is empty")
    if any(file.is_file() for folder in folders for kind in ("*.py", "*.so") for file in folder.rglob(kind)):
        return None
    return Failure("ImportError", f"{', '.join(map(str, folders))} holds no code: it was emptied, or half removed")


def _look_at_extensions(
    top: str, folders: tuple[Path, ...], new: list[Path], mapped: tuple[Path, ...]
) -> Iterator[Extension]:
    """Compiled files of the package's own folders, and others that its import has brought and that build on torch."""
    if top == "torch":  # its own libraries are made for each other
        return
    own, include = find_compiled(folders), find_headers()
    known = {os.path.realpath(file) for file in own}
    brought = [file for file in new if os.path.realpath(file) not in known and not _TORCHS_OWN.fullmatch(file.name)]
    for file in (*own, *brought):
        extension = look_at(file, mapped, [other for other in own if other != file] if file in own else ())
        foreign = "site-packages/nvidia" in extension.file or not any(map(_ON_TORCH.match, extension.needed))
        if file not in own and foreign:
            continue
        if include is not None and any(map(_TORCHS_OWN.match, extension.needed)):
            with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as image:
                extension = replace(extension, headers=compare_headers(image, include))
        yield extension


def compare_record(top: str, names: Sequence[str], folder: Path) -> Record:
    """Compare the files of a package with the record of the first distribution that lists any of them.

    An editable install lists none, and then nothing is said. Sizes of all files are compared, contents of sources only.
    Source of the format: packaging.python.org, "Recording installed projects".

    Args:
        top: top-level package.
        names: distributions that may have brought it.
        folder: that it was loaded from.
    """
    for name in names:
        with suppress(Exception):  # a damaged install raises what it likes, and is reported elsewhere
            found = metadata.distribution(name)
            # Not `found.files`: from Python 3.12 on it leaves out what is not there, which is what is looked for.
            rows = csv.reader((found.read_text("RECORD") or "").splitlines())
            files = [row for row in rows if len(row) >= 3 and row[1] and row[0].startswith(f"{top}/")]
            home = os.path.realpath(str(found.locate_file("")))
            if files and home != os.path.realpath(folder.parent):
                return Record(elsewhere=home)
            if files:
                kept = {row[0]: _is_as_recorded(f"{home}/{row[0]}", *row[1:3]) for row in files}
                changed = tuple(name for name, same in kept.items() if same is False)
                return Record(len(kept), changed, tuple(name for name, same in kept.items() if same is None))
    return Record()


def _is_as_recorded(place: str, hashed: str, size: str) -> bool | None:
    """None where it is not there."""
    try:
        kind = os.stat(place)  # noqa: PTH116 - of twelve thousand files; a Path for each takes longer than the kernel
        if size and kind.st_size != int(size):
            return False
        if not place.endswith(".py") or not hashed.startswith(_HASHED):
            return True if stat.S_ISREG(kind.st_mode) else None
        digest = base64.urlsafe_b64encode(sha256(Path(place).read_bytes()).digest()).decode().rstrip("=")
    except OSError:
        return None
    return digest == hashed.removeprefix(_HASHED)


# --- which torch headers an extension was compiled with ---------------------------------------------------------------

_SAID: Final = b' INTERNAL ASSERT FAILED at "'
_PLACE: Final = re.compile(rb'[^"\0]{0,400}?/torch/include/([^"\0]{1,200})":(\d{1,6})')
_LONGEST: Final = 600  # bytes of a condition
_ASSERTION: Final = re.compile(r"\bTORCH_INTERNAL_ASSERT(?:_DEBUG_ONLY)?\(")
_COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def find_headers() -> Path | None:
    """The headers beside the torch that is loaded, or that would be."""
    include = next((folder / "include" for folder in find_package("torch")[0]), None)
    return include if include is not None and include.is_dir() else None


def compare_headers(image: bytes | mmap.mmap, include: Path) -> Headers:
    """Compare the assertions of a compiled file with the headers in `include`; a header that is not there is left out.

    A failed assertion of torch names its header and line, so the text lies in every extension that inlines torch's
    code. Where the header has no such assertion at that line, the extension was compiled with another one. The text is
    found by plain search, because a library may have half a gigabyte.
    """
    compared, moved, at = 0, set(), image.find(_SAID)
    while at >= 0:
        after = at + len(_SAID)
        place = _PLACE.match(image[after : after + _LONGEST])
        name, line = (place[1].decode(errors="replace"), int(place[2])) if place else ("", 0)
        if name and (assertions := _read_assertions(include / name)) is not None:
            compared += 1
            condition = _squeeze(image[image.rfind(b"\0", max(0, at - _LONGEST), at) + 1 : at].decode(errors="replace"))
            at_line = [text for first, last, text in assertions if first <= line <= last]
            if not any(text == condition or text.startswith(f"{condition},") for text in at_line):  # "," and a message
                moved.add(f"{name}:{line}")
        at = image.find(_SAID, after)
    return Headers(compared, tuple(sorted(moved)))


@cache
def _read_assertions(header: Path) -> tuple[tuple[int, int, str], ...] | None:
    """First and last line of every assertion of a header, and what stands between its brackets."""
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    text = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)  # lines keep their numbers
    found = []
    for match in _ASSERTION.finditer(text):
        end, depth = match.end(), 1
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        first, last = (text.count("\n", 0, place) + 1 for place in (match.start(), end))
        found.append((first, last, _squeeze(text[match.end() : end - 1])))
    return tuple(found)


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


# --- a call that shows whether an extension reads tensors as the torch that is there lays them out --------------------

# What an assertion about a tensor reads like: "dim == 2 or dim == 3", "sf.size(-1) == k", "sf.scalar_type() == kFloat".
_CONDITION: Final = re.compile(
    r"\b(?:n?dim|sizes?|strides?|shape|numel|scalar_type|dtype)\w*(?:\([^)]*\))?\s*(?:[=!<>]=|[<>])"
)
_ROWS, _COLUMNS = 8, 2  # 8 rows of fp32 are 32 bytes, which is aligned for the TMA: no kernel is compiled for it


def _read_scales() -> Behaviour:
    """Have DeepGEMM look at fp32 scales that lie in the layout it wants already: it gives them back as they are.

    sgl-deep-gemm 0.1.7 and 0.2.0 refuse them on torch 2.11 with "dim == 2 or dim == 3".
    """
    import torch

    name = "deep_gemm.utils.layout.get_mn_major_tma_aligned_tensor"
    given = f"fp32 tensor [{_ROWS}, {_COLUMNS}] with strides (1, {_ROWS})"
    if not torch.cuda.is_available():
        return Behaviour(name, given, "torch sees no GPU, and the call takes CUDA tensors only", None)
    scales = torch.arange(float(_ROWS * _COLUMNS), device="cuda").as_strided((_ROWS, _COLUMNS), (1, _ROWS))
    try:
        call = importlib.import_module("deep_gemm.utils.layout").get_mn_major_tma_aligned_tensor
        answer = call(scales)
        answer = answer if isinstance(answer, torch.Tensor) else torch.from_dlpack(answer)
    except Exception as fault:
        return Behaviour(name, given, f"{type(fault).__name__}: {' '.join(str(fault).split())[:400]}", is_right(fault))
    return judge_answer(name, given, scales, answer)


def judge_answer(name: str, given: str, scales: Any, answer: Any) -> Behaviour:
    """Whether an answer is the tensor that was given, [rows, columns] in fp32."""
    import torch

    seen = f"{answer.dtype} tensor {list(answer.shape)} with strides {tuple(answer.stride())}"
    same = answer.shape == scales.shape and bool(torch.equal(answer.float().cpu(), scales.float().cpu()))
    return Behaviour(name, given, seen if same else f"{seen}, other than what was given", same)


def is_right(fault: Exception) -> bool | None:
    """False where a refusal is a condition on sizes, which contradicts the tensor; None for any other trouble."""
    return False if _CONDITION.search(str(fault)) else None


if __name__ == "__main__":
    take_look(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # a vendor library may end the process again while it is taken down
