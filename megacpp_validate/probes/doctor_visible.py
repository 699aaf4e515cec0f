"""Which libraries are mapped into this process, and which the loader would find by name.

Which torch headers an extension was compiled against, told by the assertions that it took from them.

A failed assertion of torch names its header and line, so the text lies in every extension that inlines torch's code.
Where the headers beside the torch that is there have no such assertion at that line, the extension was compiled
against others. sgl-deep-gemm 0.1.7 shows what that does: compiled with torch 2.13, whose tensors are 8 bytes smaller
before their sizes than those of 2.11 (`PyObjectSlot` lost a member), it loads with 2.11 and reads every size wrongly.

Calls that show whether an extension reads tensors as the torch that is there lays them out.

An extension that was compiled with another torch may load and read sizes and strides from the wrong place. What it
then says of a tensor contradicts the tensor.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from ..evidence.doctor_look import Behaviour, Headers

# Libraries of which a second file in one process, or on the way to one, is a finding.
CUDA_LIBRARIES: Final = re.compile(r"lib(?:cudart|cublas|cublasLt|cudnn\w*|nccl|nvrtc|transformer_engine)\.so[.\d]*")
RUNTIMES: Final = ("libcudart.so.11.0", "libcudart.so.12", "libcudart.so.13")
_LDCONFIG: Final = ("/sbin/ldconfig", "/usr/sbin/ldconfig", "ldconfig")
_PLACES: Final = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu",
                  "/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu")  # fmt: skip
_LIMIT_S: Final = 20.0


def read_mapped(maps: Path = Path("/proc/self/maps")) -> tuple[Path, ...]:
    """Every file that this process has mapped as code or data of a library, and the interpreter itself."""
    try:
        text = maps.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ()
    files = {line.split(maxsplit=5)[5] for line in text.splitlines() if len(line.split(maxsplit=5)) == 6}
    program = os.path.realpath("/proc/self/exe")
    return tuple(Path(file) for file in sorted(files) if file.startswith("/") and (".so" in file or file == program))


def group_cuda(files: Iterable[Path]) -> dict[str, tuple[str, ...]]:
    """The CUDA libraries among some files, by their name without version: "libcudnn" -> its files."""
    groups: dict[str, dict[str, None]] = {}
    for file in files:
        if CUDA_LIBRARIES.fullmatch(file.name):
            groups.setdefault(file.name.partition(".so")[0], {}).setdefault(str(file))
    return {name: tuple(found) for name, found in sorted(groups.items())}


def find_by_name(soname: str, first: Iterable[Path] = ()) -> tuple[Path, ...]:
    """The files that the loader knows under a name, in the order in which it looks; the same file once."""
    folders = [*first, *(Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry)]
    places = [folder / soname for folder in folders]
    places += [Path(file) for file in read_loader_cache().get(soname, ())]
    places += [Path(place, soname) for place in _PLACES]
    found: dict[str, Path] = {}
    for place in places:
        with suppress(OSError):
            if place.is_file():
                found.setdefault(os.path.realpath(place), place)
    return tuple(found.values())


def read_visible() -> dict[str, tuple[str, ...]]:
    """The CUDA libraries that the loader finds by name, on `LD_LIBRARY_PATH` and in its cache."""
    names = set(RUNTIMES)
    for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        with suppress(OSError):
            names |= {file.name for file in Path(entry).iterdir()} if entry else set()
    names |= set(read_loader_cache())
    wanted = sorted(name for name in names if CUDA_LIBRARIES.fullmatch(name) and re.search(r"\.so\.\d+(\.0)?$", name))
    return {name: tuple(map(str, files)) for name in wanted if (files := find_by_name(name))}


def open_runtimes() -> dict[str, str]:
    """What `dlopen` gives for each CUDA runtime: the question that cuDNN's frontend asks. It maps what it finds."""
    found = {}
    for name in RUNTIMES:
        before = set(read_mapped())
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        after = [file for file in read_mapped() if re.fullmatch(rf"{re.escape(name)}[.\d]*", file.name)]
        new = [file for file in after if file not in before] or after
        found[name] = str(new[0]) if new else name
    return found


@cache
def read_loader_cache() -> dict[str, tuple[str, ...]]:
    """The cache of the loader: name -> files; empty where it cannot be read."""
    for program in _LDCONFIG:
        try:
            done = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        found: dict[str, list[str]] = {}
        for name, file in re.findall(r"^\s*(\S+) \(.*?\) => (\S+)$", done.stdout, re.MULTILINE):
            found.setdefault(name, []).append(file)
        return {name: tuple(files) for name, files in found.items()}
    return {}


def read_driver_cuda() -> str:
    """The newest CUDA release that the driver runs, such as "13.0"; empty where there is no driver."""
    with suppress(OSError, AttributeError):
        number = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
            return f"{number.value // 1000}.{number.value % 1000 // 10}"
    return ""


_SAID: Final = b' INTERNAL ASSERT FAILED at "'
_PLACE: Final = re.compile(rb'[^"\0]{0,400}?/torch/include/([^"\0]{1,200})":(\d{1,6})')
_LONGEST: Final = 600  # bytes of a condition
_ASSERTION: Final = re.compile(r"\bTORCH_INTERNAL_ASSERT(?:_DEBUG_ONLY)?\(")
_COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def compare_headers(image: bytes | mmap.mmap, include: Path) -> Headers:
    """Hold the assertions of a compiled file against the headers in `include`; one that is not there says nothing."""
    compared, moved = 0, []
    for condition, name, number in _find_sites(image):
        assertions = _read_assertions(include / name)
        if assertions is None:
            continue
        compared += 1
        wanted = _squeeze(condition)
        if not any(first <= number <= last and _is_of(text, wanted) for first, last, text in assertions):
            moved.append(f"{name}:{number}")
    return Headers(compared, tuple(sorted(set(moved))))


def _find_sites(image: bytes | mmap.mmap) -> Iterator[tuple[str, str, int]]:
    """Condition, header and line of every assertion; by plain search, because a library may have half a gigabyte."""
    at = image.find(_SAID)
    while at >= 0:
        after = at + len(_SAID)
        if place := _PLACE.match(image[after : after + _LONGEST]):
            start = image.rfind(b"\0", max(0, at - _LONGEST), at) + 1
            yield image[start:at].decode(errors="replace"), place[1].decode(errors="replace"), int(place[2])
        at = image.find(_SAID, after)


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


def _is_of(text: str, condition: str) -> bool:
    """Whether an assertion is of this condition: alone, or followed by its message."""
    return text.startswith(condition) and text[len(condition) : len(condition) + 1] in ("", ",")


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


# What an assertion about a tensor reads like: "dim == 2 or dim == 3", "sf.size(-1) == k", "sf.scalar_type() == kFloat".
_CONDITION: Final = re.compile(
    r"\b(?:n?dim|sizes?|strides?|shape|numel|scalar_type|dtype)\w*(?:\([^)]*\))?\s*(?:[=!<>]=|[<>])"
)
_ROWS, _COLUMNS = 8, 2  # 8 rows of fp32 are 32 bytes, which is aligned for the TMA: no kernel is compiled for it


def show_behaviours(package: str) -> tuple[Behaviour, ...]:
    """What calls of a package show; nothing for one that has none to offer."""
    show = _CALLS.get(package)
    return () if show is None else (show(),)


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
    except Exception as fault:
        return Behaviour(name, given, f"this release does not offer it: {type(fault).__name__}: {fault}", None)
    try:
        answer = call(scales)
        answer = answer if isinstance(answer, torch.Tensor) else torch.from_dlpack(answer)
    except Exception as fault:
        return Behaviour(name, given, f"{type(fault).__name__}: {' '.join(str(fault).split())[:400]}", _is_other(fault))
    return judge_answer(name, given, scales, answer)


def judge_answer(name: str, given: str, scales: Any, answer: Any) -> Behaviour:
    """Whether an answer is the tensor that was given, [rows, columns] in fp32."""
    import torch

    seen = f"{answer.dtype} tensor {list(answer.shape)} with strides {tuple(answer.stride())}"
    same = answer.shape == scales.shape and bool(torch.equal(answer.float().cpu(), scales.float().cpu()))
    return Behaviour(name, given, seen if same else f"{seen}, other than what was given", same)


def _is_other(fault: Exception) -> bool | None:
    """A refusal contradicts the tensor where it is a condition on its sizes; other trouble is no statement about it."""
    return False if _CONDITION.search(str(fault)) else None


_CALLS: Final[dict[str, Callable[[], Behaviour]]] = {"deep_gemm": _read_scales}
