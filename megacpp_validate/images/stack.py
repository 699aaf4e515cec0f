"""A stack whose release of Transformer Engine is to be judged: that of an image, or one that is given in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ..catalog.images import Base, Image, Images
from ..catalog.needs import Needs
from .fit_result import Part
from .locks import ImageLock
from .refusals import ImageRefused

LIBRARIES: Final = {"libcudart": "cuda", "libcublasLt": "cublas", "libcudnn": "cudnn", "libnccl": "nccl"}
ASKED: Final = "asked for"

_BY_FILE: Final = {canonicalize_name(file): name for file, name in LIBRARIES.items()}
_CORE: Final = re.compile(r"transformer-engine-cu(\d+)")
_LOCAL: Final = re.compile(r"(cpu|xpu|rocm[\d.]*|cu(\d{2,})\d)(?:[.+_-]|$)")
# A number as a library says it at run time, by the factor of its major release: cudnnGetVersion() 91100 is 9.11.0.
_ENCODED: Final = {"cudnn": 10_000, "cublas": 10_000, "nccl": 10_000, "cuda": 1_000}
_ENCODED_EARLIER: Final = {"cudnn": (90_000, 1_000), "nccl": (10_000, 1_000)}  # below the first, by the second


@dataclass(frozen=True)
class Stack:
    """What is there, by name: parts of CUDA, "driver", "python", and distributions.

    Attributes:
        te: release of Transformer Engine.
        whole: whether everything that is there is known by name, so that what is not named is not there.
        target: row of targets.toml; empty where nobody has said which.
    """

    name: str
    te: str
    parts: Mapping[str, Part]
    whole: bool
    target: str = ""

    def version(self, name: str) -> Version | None:
        """The version of a part; None where it is not there, or nobody has told."""
        part = self.parts.get(name)
        return read_version(part.version) if part else None

    @property
    def core_cuda(self) -> int | None:
        """The major CUDA release that the core library is for, by what is told of it or lies beside it."""
        halves = {int(found[1]) for name in self.parts if (found := _CORE.fullmatch(name))}
        if halves:
            return halves.pop() if len(halves) == 1 else None
        cuda, torch, cublas = self.version("cuda"), self.torch_cuda, self.version("cublas")
        return cuda.major if cuda else torch if isinstance(torch, int) else cublas.major if cublas else None

    @property
    def torch_cuda(self) -> int | str | None:
        """The major CUDA release of a torch from PyTorch's index ("2.11.0+cu130"), or the word of one without CUDA."""
        torch = self.version("torch")
        found = _LOCAL.match(torch.local or "") if torch else None
        return (int(found[2]) if found[2] else found[1]) if found else None


def read_version(text: str) -> Version | None:
    """A version, where it is one."""
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


def stack_of_image(images: Images, image: Image, lock: ImageLock, own_base: str = "") -> Stack:
    """The stack that an image would have: what its base provides, and what its lock lays over it.

    Args:
        own_base: a base that the caller named: nothing is known of what is in it.
    """
    found = _lie_under(images, image, own_base)
    for name, package in lock.packages.items():
        found[name] = Part(name=name, version=package.version, brought_by=f"lock {image.lock}")
    base = images.find_base(image.base)
    whole = not own_base and not base.distributions  # of a base with a stack nobody has listed every distribution
    return Stack(image.target, image.te, found, whole, image.target)


def stack_of_rows(images: Images, image: Image, own_base: str = "") -> Stack:
    """What the rows alone say of that stack, before there is a lock: the base, and what is asked for in one version."""
    found = _lie_under(images, image, own_base)
    for name, version in image.pinned.items():
        found[name] = Part(name=name, version=version, brought_by=f"row {image.target}")
    return Stack(image.target, image.te, found, whole=False, target=image.target)


def stack_of_words(te: str, words: Iterable[str], needs: Needs | None = None, target: str = "") -> Stack:
    """A stack that is given as "component=version"; "component=" is there in a version that is not known.

    Args:
        needs: rows that say which distributions bring a library of CUDA: those names are taken for it.
        target: row of targets.toml.

    Raises:
        ImageRefused: a word is none of that kind, a version is none, or a component is given twice.
    """
    found: dict[str, Part] = {}
    said: dict[str, str] = {}
    names = _BY_FILE | (name_distributions(needs) if needs else {})
    for word in words:
        name, sign, version = word.partition("=")
        name, version = canonicalize_name(name.strip()), version.lstrip("=").strip()
        name = names.get(name, name)
        if not sign or not name or (version and read_version(version) is None):
            raise ImageRefused(
                f"{word!r} is no component and version. Next step: say for instance cublas=13.1.0.3 cudnn=9.19 "
                "torch=2.11.0, or cublas= for one whose version you do not know."
            )
        if name in said:
            raise ImageRefused(
                f"{said[name]!r} and {word!r} are both {name}, and one of them would be held against nothing. Next "
                "step: say the one that is loaded."
            )
        _refuse_encoded(word, name, version)
        said[name] = word
        found[name] = Part(name=name, version=version, brought_by=ASKED)
    if read_version(te) is None:
        raise ImageRefused(f"{te!r} is no release of Transformer Engine. Next step: say one as in 2.20.2.")
    return Stack("asked", te, found, whole=False, target=target)


def name_distributions(needs: Needs) -> dict[str, str]:
    """Distributions that bring a library of CUDA -> the part that it is: "nvidia-cublas" -> "cublas"."""
    return {
        str(canonicalize_name(name)): LIBRARIES[row.id]
        for row in needs.library
        if row.id in LIBRARIES
        for name in row.distributions
    }


def _lie_under(images: Images, image: Image, own_base: str) -> dict[str, Part]:
    """What the base brings, less what is taken out of it."""
    found = {} if own_base else {part.name: part for part in _parts_of_base(images.find_base(image.base))}
    for row in image.removes:
        found.pop(row.name, None)
    return found


def _parts_of_base(base: Base) -> Iterator[Part]:
    by = f"base {base.id}"
    yield Part(name="python", version=base.python, brought_by=by)
    if base.driver_least:
        yield Part(name="driver", version=base.driver_least, brought_by=f"{by}, the least that runs it")
    for name, version in base.provided.items():
        yield Part(name=name, version=version, brought_by=by)


def _refuse_encoded(word: str, name: str, version: str) -> None:
    """A library says its version as one number, which is later than any range, and would pass for a fit."""
    if name not in _ENCODED or not version.isdecimal() or int(version) < min(_ENCODED.values()):
        return
    number, factor = int(version), _ENCODED[name]
    first, earlier = _ENCODED_EARLIER.get(name, (0, 0))
    factor = earlier if number < first else factor
    major, rest = divmod(number, factor)
    minor, patch = divmod(rest, 10 if name == "cuda" else 100)
    told = f"{major}.{minor}" if name == "cuda" else f"{major}.{minor}.{patch}"
    raise ImageRefused(
        f"{word!r} is a version as the library itself counts it, and no release. Next step: say {name}={told}."
    )
