"""A compiled file of a package against what is there: its libraries, its symbols, and the torch it was built for."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from ..evidence.doctor_look import Extension, Headers, Wanted
from .doctor_elf import Elf, NotReadable, Symbol
from .doctor_headers import compare_headers
from .doctor_visible import find_by_name

_TAG: Final = re.compile(r"\.((?:cpython|pypy|cp)-?\d[\w-]*|abi3)\.so$")
_MOST_TOLD: Final = 12  # symbols of one file; more say nothing new
_MOST_FILES: Final = 60
_OF_TORCH: Final = re.compile(r"lib(torch\w*|c10\w*)\.so")
_OWNERS: Final = (
    # The first pattern that a symbol starts with says whose it is, and which libraries have it.
    (r"_Z(?:T[VISTv]|GV)?N?[KVrO]*(?:3c10|2at|5torch|6caffe2)|THP|_ZN[KVrO]*8pybind11.*(?:2at|5torch)", "torch",
     r"lib(torch\w*|c10\w*)\.so"),
    (r"aoti_torch|torch_", "torch", r"lib(torch\w*|c10\w*)\.so"),
    (r"cublasLt", "cuBLAS", r"libcublasLt\.so"),
    (r"cublas", "cuBLAS", r"libcublas\.so"),
    (r"cudnn", "cuDNN", r"libcudnn\w*\.so"),
    (r"nccl", "NCCL", r"libnccl\.so"),
    (r"nvrtc", "NVRTC", r"libnvrtc\.so"),
    (r"nvte_|_ZN[KVrO]*18transformer_engine", "Transformer Engine's core library", r"libtransformer_engine\.so"),
    (r"TVMFFI|_ZN[KVrO]*3tvm", "tvm-ffi", r"libtvm_ffi\.so"),
    (r"cuda|__cuda", "CUDA runtime", r"libcudart\.so"),
    (r"cu[A-Z]", "CUDA driver", r"libcuda\.so"),
    (r"_?Py[A-Z_]", "Python", r"libpython|python"),
)  # fmt: skip


def find_compiled(folders: Iterable[Path]) -> tuple[Path, ...]:
    """The compiled files below some folders; a package with very many is one of which a part says enough."""
    found = [file for folder in folders if folder.is_dir() for file in sorted(folder.rglob("*.so*"))]
    return tuple(file for file in found if re.search(r"\.so[.\d]*$", file.name) and file.is_file())[:_MOST_FILES]


def look_at(file: Path, mapped: Sequence[Path], include: Path | None, beside: Sequence[Path] = ()) -> Extension:
    """One compiled file.

    Args:
        file: which.
        mapped: every library of this process after the import, and the interpreter itself.
        include: headers of the torch that is there; None where there are none.
        beside: other compiled files of its package, which are loaded before it where all is well.
    """
    tag = found[1] if (found := _TAG.search(file.name)) else ""
    loaded = any(file.name == other.name and file.samefile(other) for other in mapped if other.exists())
    try:
        with Elf(file) as elf:
            near, not_found = _find_libraries(elf, mapped, beside)
            lost = [symbol for symbol in elf.wants() if not any(_opened(place).defines(symbol.name) for place in near)]
            of_torch = any(map(_OF_TORCH.match, elf.needed))
            headers = compare_headers(elf.image, include) if include is not None and of_torch else Headers()
            return Extension(
                file=str(file),
                tag=tag,
                loaded=loaded,
                needed=elf.needed,
                not_found=not_found,
                wanted=_tell(lost, not_found),
                headers=headers,
            )
    except (NotReadable, OSError) as fault:
        return Extension(file=str(file), tag=tag, loaded=loaded, problem=str(fault))


def _find_libraries(
    elf: Elf, mapped: Sequence[Path], beside: Sequence[Path]
) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Where its symbols may come from: all that is mapped, and what would be loaded with it. And what is not there."""
    near = {str(place): place for place in (*mapped, *beside) if _opened(place) is not None}
    names = {_opened(place).soname or place.name for place in near.values()} | {place.name for place in near.values()}
    own = [(name, elf.search) for name in elf.needed]
    theirs = [(name, _opened(place).search) for place in beside if str(place) in near for name in _opened(place).needed]
    waiting, not_found = [*theirs, *own], dict[str, None]()  # its own are taken first, from the end
    while waiting:
        name, search = waiting.pop()
        if name in names or name in not_found:
            continue
        places = [place for place in find_by_name(name, search) if _opened(place) is not None]
        if not places:
            not_found.setdefault(name)
            continue
        names.add(name)
        near[str(places[0])] = places[0]
        waiting += [(other, _opened(places[0]).search) for other in _opened(places[0]).needed]
    others = {name for name, _ in theirs} - {name for name, _ in own}  # a neighbour's trouble is told of the neighbour
    return tuple(near.values()), tuple(sorted(set(not_found) - others))


@cache
def _opened(place: Path) -> Elf:
    """A library that stays open; an empty answer for everything where it cannot be read."""
    try:
        elf = Elf(place)
        _ = elf.soname  # reads the dynamic segment
        elf.defines("")
    except Exception:  # a damaged neighbour is its own row
        return None  # type: ignore[return-value]
    return elf


def _tell(lost: Sequence[Symbol], not_found: Sequence[str]) -> tuple[Wanted, ...]:
    """What is to be told of symbols that nothing defines; those of a library that is missing go without saying."""
    told = []
    for symbol in lost:
        owner, homes = find_owner(symbol.name)
        if symbol.source in not_found or (homes and any(re.match(homes, name) for name in not_found)):
            continue
        told.append(Wanted(symbol.name, read_name(symbol.name), owner, symbol.lazy))
    told.sort(key=lambda wanted: (wanted.lazy, not wanted.owner, wanted.symbol))
    return tuple(told[:_MOST_TOLD])


def find_owner(symbol: str) -> tuple[str, str]:
    """Whose a symbol is, and a pattern of the libraries that would have it; empty where its name does not say."""
    for start, owner, homes in _OWNERS:
        if re.match(start, symbol):
            return owner, homes
    return "", ""


def read_name(symbol: str) -> str:
    """A C++ name without its encoding: scopes and name, no parameters. Source: Itanium C++ ABI, 5.1."""
    match = re.match(r"_Z(?:T[VISTv])?N?[KVrO]*", symbol)
    if match is None:
        return symbol
    parts, at = [], match.end()
    while length := re.match(r"\d+", symbol[at:]):
        start = at + length.end()
        at = start + int(length[0])
        parts.append(symbol[start:at])
    if parts and re.match(r"C[1-3]", symbol[at:]):
        parts.append(parts[-1])
    if not parts:
        return symbol
    if match[0].startswith("_ZN") and symbol[at : at + 1] not in ("E", "C", "D", "I"):
        return f"{'::'.join(parts)}::operator..."
    name = "::".join(parts)
    if re.search(r"(?<!\d)Ss(?:$|[A-Z])|RKSs", symbol[at:]):
        name += " (with the C++ strings of before 2015)"
    return f"{name}()" if not symbol.startswith("_ZT") else name


def torch_headers() -> Path | None:
    """The headers beside the torch that is loaded, or that would be."""
    from importlib.util import find_spec

    try:
        loaded = sys.modules.get("torch")
        file = getattr(loaded, "__file__", None) or getattr(find_spec("torch"), "origin", None)
    except Exception:
        return None
    include = Path(file).parent / "include" if file else None
    return include if include is not None and include.is_dir() else None
