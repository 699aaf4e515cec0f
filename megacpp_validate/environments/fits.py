"""Whether a stack fits a release of Transformer Engine, judged from rows of the matrix before anything is built.

An unknown version stays unknown, and is never taken for a fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from ..catalog.images import Need, Needs, Range, Rule, Source, is_in
from ..errors import WrongArguments
from ..evidence.doctor_look import PackageLook, PathLook
from ..evidence.values import Frozen, read_version

TE: Final = "transformer_engine.pytorch"
LIBRARIES: Final = {"libcudart": "cuda", "libcublasLt": "cublas", "libcudnn": "cudnn", "libnccl": "nccl"}
_ASKED: Final = "asked for"
JUDGED: Final = frozenset({"library", "distribution", "variable"})  # kinds of need that `judge_needs` decides
CORE: Final = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu13", "transformer-engine-cu12")
_CORE_CUDA: Final = re.compile(r"transformer-engine-cu(\d+)")
_LOCAL: Final = re.compile(r"(cpu|xpu|rocm[\d.]*|cu(\d{2,})\d)(?:[.+_-]|$)")


class FitVerdict(StrEnum):
    """What is known of one need; worst first."""

    REFUSED = "refused"
    UNKNOWN = "unknown"
    WARNED = "warned"  # works with less
    FITS = "fits"


class Part(Frozen):
    """A component; its version is empty where it is unknown. `brought_by`: the base, the lock, or the caller."""

    name: str
    version: str
    brought_by: str


class Fit(Frozen):
    """One need, compared with a stack.

    Attributes:
        need: row of matrix/images.toml or matrix/needs.toml.
        seen: the version there, in words where there is none.
        wanted: range.
        breaks: bridge modules that fail by it, in dependency order.
        source: where the need is documented.
    """

    need: str
    component: str
    seen: str
    wanted: str
    verdict: FitVerdict
    says: str
    breaks: tuple[str, ...] = ()
    next_step: str
    source: str


class StackFit(Frozen):
    """A stack ("the given stack", or the target of an image) and its needs, worst first; `te` is empty without one."""

    name: str
    te: str
    fits: tuple[Fit, ...]

    def of(self, verdict: FitVerdict) -> tuple[Fit, ...]:
        """The needs with one verdict."""
        return tuple(fit for fit in self.fits if fit.verdict is verdict)

    @property
    def refused(self) -> bool:
        """Whether anything does not work."""
        return bool(self.of(FitVerdict.REFUSED))


@dataclass(frozen=True)
class Stack:
    """Parts by name: of CUDA, "driver", "python", and distributions. What is not named is unknown.

    Attributes:
        name: a target, or what the caller named.
        te: release of Transformer Engine; empty where none is chosen yet.
        target: row of targets.toml; empty where unknown.
        sources: what is built on these parts, from a commit.
        asks: distribution -> range that is asked of it, where its version is unknown.
        complete: a distribution or a variable that is not named is not there.
    """

    name: str
    te: str
    parts: Mapping[str, Part]
    target: str = ""
    sources: tuple[Source, ...] = ()
    asks: Mapping[str, str] = field(default_factory=dict)
    complete: bool = False

    def with_release(self, te: str) -> Stack:
        """The same stack after a release of Transformer Engine is installed."""
        core = {name: part.model_copy(update={"version": te}) for name, part in self.parts.items() if name in CORE}
        return replace(self, te=te, parts={**self.parts, **core})

    def version(self, name: str) -> Version | None:
        """The version of a part; None where the part is absent or its version unknown."""
        part = self.parts.get(name)
        return read_version(part.version) if part else None

    def has_beside(self, row: Rule) -> bool:
        """Whether what a row holds beside is there, in its range; a part in an unknown version may be."""
        return not row.with_ or (row.beside in self.parts and row.holds_beside(self.version(row.beside)))

    @property
    def core_cuda(self) -> int | None:
        """The major CUDA release of the core library, from its name or from what lies beside it."""
        halves = {int(found[1]) for name in self.parts if (found := _CORE_CUDA.fullmatch(name))}
        if len(halves) == 1:
            return halves.pop()
        cuda, torch, cublas = self.version("cuda"), self.torch_cuda, self.version("cublas")
        return cuda.major if cuda else torch if isinstance(torch, int) else cublas.major if cublas else None

    @property
    def torch_cuda(self) -> int | str | None:
        """The major CUDA release of a torch from PyTorch's index ("2.11.0+cu130"), or the word of one without CUDA."""
        torch = self.version("torch")
        found = _LOCAL.match(torch.local or "") if torch else None
        return (int(found[2]) if found[2] else found[1]) if found else None


def read_part(name: str, version: str, by: str) -> Part:
    """A distribution or another part; an unreadable version is an unknown one."""
    return Part(name=canonicalize_name(name), version=str(read_version(version) or ""), brought_by=by)


def list_loaded(path: PathLook, packages: Iterable[PackageLook]) -> Iterator[Part]:
    """What doctor saw. What is loaded counts more than what is installed, and stands later.

    Of the libraries those count that Transformer Engine loads, else torch; of two files the older one.
    """
    for one in reversed(path.distributions):  # the first of a name is the one that is loaded
        yield read_part(one.name, one.version, "doctor")
    looks = {look.package: look for look in packages}
    for library in (one for name in ("torch", TE) if name in looks for one in looks[name].libraries):
        if library.name in LIBRARIES and (known := [*filter(None, map(read_version, library.version.split(", ")))]):
            yield read_part(LIBRARIES[library.name], str(min(known)), "doctor")
    rows = {"python": path.python, "torch": path.torch, "driver": path.driver, "cuda": path.torch_cuda}
    yield from (read_part(name, version, "doctor") for name, version in rows.items() if version)
    for name in (name for name, value in path.variables.items() if value == "1"):
        yield Part(name=name, version="1", brought_by="doctor")


def stack_of_words(te: str, words: Iterable[str], needs: Needs | None = None, target: str = "") -> Stack:
    """A stack that is given as "component=version"; "component=" is there in an unknown version.

    Raises:
        WrongArguments: a word has another form, or a version is none.
    """
    found, names = dict[str, Part](), _name_distributions(needs) if needs else {}
    for word in words:
        name, sign, version = word.partition("=")
        name, version = canonicalize_name(name.strip()), version.lstrip("=").strip()
        name, why = names.get(name, name), ""
        if not sign or not name or (version and read_version(version) is None):
            why = "is not COMPONENT=VERSION. Next step: write cublas=13.1.0.3, or cublas= for an unknown version"
        elif name in LIBRARIES.values() and version.isdecimal() and int(version) >= 1000:  # cudnnGetVersion(): 91100
            why = "is a version as the library itself counts it. Next step: write 91100 as 9.11.0"
        if why:
            raise WrongArguments(f"{word!r} {why}.")
        found[name] = Part(name=name, version=version, brought_by=_ASKED)
    if read_version(te) is None:
        raise WrongArguments(f"{te!r} is not a release of Transformer Engine. Next step: write one as in 2.20.2.")
    return Stack("the given stack", te, found, target)


def _name_distributions(needs: Needs) -> dict[str, str]:
    """Distributions that bring a library of CUDA -> the part: "nvidia-cublas" -> "cublas"."""
    rows = (row for row in needs.library if row.id in LIBRARIES)
    return {str(canonicalize_name(name)): LIBRARIES[row.id] for row in rows for name in row.distributions}


def add_libraries(stack: Stack, needs: Needs) -> Stack:
    """The stack with the libraries of CUDA that its distributions bring, by their own names."""
    named, parts = _name_distributions(needs), stack.parts
    brought = {part: parts[name].model_copy(update={"name": part}) for name, part in named.items() if name in parts}
    return replace(stack, parts={**brought, **parts})


def judge_stack(stack: Stack, needs: Needs, ranges: Iterable[Range], releases: Iterable[str]) -> StackFit:
    """Every need of the release, compared with the stack, worst first.

    Args:
        releases: that the rows were made from; of a later one the rows do not know what is new.
    """
    stack = add_libraries(stack, needs)
    ranges = [row for row in ranges if not row.targets or not stack.target or stack.target in row.targets]
    fits = [*_judge_builds(needs, stack), *_judge_sources(stack)]
    if (te := read_version(stack.te)) is not None:
        # Doctor looks at files and symbols, once they are installed.
        fits += [fit for need, fit in judge_needs(stack, needs) if need.kind in JUDGED]
        fits += _judge_ranges(stack, te, ranges)
        fits += [*_judge_release(stack, te, [Version(release) for release in releases]), *_judge_torch(stack)]
    order = list(FitVerdict)
    ordered = tuple(sorted(fits, key=lambda fit: (order.index(fit.verdict), fit.need != "release", fit.component)))
    return StackFit(name=stack.name, te=stack.te, fits=ordered)


def judge_needs(stack: Stack, needs: Needs) -> Iterator[tuple[Need, Fit]]:
    """Rows of matrix/needs.toml that hold for a stack: its release, its core library, and what lies beside."""
    te = read_version(stack.te)
    for need in needs.need:
        if te and need.holds_for(te) and need.holds_for_core(stack.core_cuda) and stack.has_beside(need):
            unset = need.kind == "variable" and need.of not in stack.parts  # whoever starts a run sets it
            yield need, _compare(
                stack, need.id, LIBRARIES.get(need.of, need.of), need.version, need.says, need.next, need.source,
                breaks=need.breaks, verdict=FitVerdict.WARNED if unset else None,
            )  # fmt: skip


def _judge_ranges(stack: Stack, te: Version, ranges: Iterable[Range]) -> Iterator[Fit]:
    """Ranges of the matrix that hold for a release; and its halves, which refuse each other."""
    for row in ranges:
        absent = row.component not in stack.parts and (row.with_ == row.component or row.needs == "<0")
        if absent or (row.te and not row.holds_for(te)) or not stack.has_beside(row):
            continue  # what must not be there is not there
        outside = FitVerdict.REFUSED if row.outside == "refused" else FitVerdict.WARNED
        yield _compare(stack, row.id, row.component, row.needs, row.says, row.next, row.source, outside=outside)
    for name in CORE:
        version = stack.version(name)
        if version is not None and version.public != te.public:
            yield _compare(
                stack, "one-release", name, f"=={te.public}",
                "its other half is of another release, which it refuses at import",
                f"ask for {name}=={te.public} in the image's requirements",
                "Requires-Dist of transformer_engine and transformer_engine_torch",
            )  # fmt: skip


def _compare(  # noqa: PLR0913, PLR0917 - a row of a table
    stack: Stack, need: str, name: str, wanted: str, says: str, step: str, source: str,
    outside: FitVerdict = FitVerdict.REFUSED, breaks: Iterable[str] = (), verdict: FitVerdict | None = None,
) -> Fit:  # fmt: skip
    """One need, compared with a part.

    Args:
        wanted: range; empty for any version, "<0" where it must not be there; words where there is a `verdict` already.
    """
    part, version = stack.parts.get(name), stack.version(name)
    seen, found = str(version), FitVerdict.UNKNOWN
    if part is None and stack.complete:
        installed = name in LIBRARIES.values()  # without a distribution, as those of the system
        seen, found = ("(unknown version)", found) if installed else ("(not installed)", outside)
    elif part is None:
        seen = "(not provided)"
    elif version is None:
        by = "" if verdict or wanted == "<0" else f"; from {part.brought_by}"
        seen, found = f"(unknown version{by})", found if wanted else FitVerdict.FITS
    elif verdict is None and wanted != "<0":
        # A build of a release counts as it: "2.13.0a0+9186a08b2c" is what NVIDIA calls its 2.13.
        release = version.base_version if name == "torch" else version.public
        found = FitVerdict.FITS if SpecifierSet(wanted).contains(release, prereleases=True) else outside
    if part is not None and wanted == "<0":
        found = outside
    return Fit(
        need=need, component=name, seen=seen, wanted={"<0": "not beside it", "": "any version"}.get(wanted, wanted),
        verdict=verdict or found, says=says, breaks=tuple(breaks), next_step=step, source=source,
    )  # fmt: skip


def require_known(stack: Stack, needs: Needs, ranges: Iterable[Range]) -> Stack:
    """The stack.

    Raises:
        WrongArguments: the caller names a part that no row of any release knows.
    """
    known = {"torch", *CORE, *LIBRARIES.values(), *_name_distributions(needs), *(row.of for row in needs.build)}
    known |= {name for row in needs.need for name in (row.of, row.beside)}
    known |= {name for row in ranges for name in (row.component, Requirement(row.with_).name if row.with_ else "")}
    names = {canonicalize_name(name) for name in known if name}
    for name, part in stack.parts.items():
        if part.brought_by == _ASKED and name not in names:
            near = get_close_matches(name, names, n=1)
            step = f"write {near[0]}, if you mean that" if near else "leave it out, or add a row for it"
            raise WrongArguments(f"no row of the matrix knows the component {name!r}. Next step: {step}.")
    return stack


def _judge_release(stack: Stack, te: Version, releases: list[Version]) -> Iterator[Fit]:
    first, last = min(releases), max(releases)
    if not first <= Version(te.public) <= last:
        part = Part(name="transformer-engine", version=str(te), brought_by=_ASKED)
        yield _compare(
            replace(stack, parts={part.name: part}), "release", part.name, f">={first},<={last}",
            f"the matrix has no release {te.public}, and the index may have none: its needs are unknown",
            f"if `nox -s te_canary -- --list` shows it, compare it with {last}, then add rows to matrix/needs.toml",
            "matrix/stacks.toml", verdict=FitVerdict.UNKNOWN,
        )  # fmt: skip


def _judge_torch(stack: Stack) -> Iterator[Fit]:
    """The torch extension is compiled against torch: a wheel of PyTorch's index names the CUDA of both."""
    own, core = stack.torch_cuda, stack.core_cuda
    if own is None:
        return
    without = isinstance(own, str)
    differs = without or (core is not None and own != core)
    yield _compare(
        stack, "torch-of-one-cuda", "torch", f"a build for CUDA {core or 'of the core library'}",
        "it is built without CUDA" if without else "its extension is compiled with the CUDA of the core library",
        f"take a torch that is built for CUDA {core or '12 or 13'}, or the core library for that of torch",
        "torch 2.13: utils/cpp_extension.py _check_cuda_version raises where the major releases differ",
        verdict=FitVerdict.REFUSED if differs else FitVerdict.UNKNOWN if core is None else FitVerdict.FITS,
    )  # fmt: skip


def _judge_builds(needs: Needs, stack: Stack) -> Iterator[Fit]:
    """Wheels that are built for one torch, and do not name it."""
    for name in dict.fromkeys(row.of for row in needs.build if row.of in stack.parts):
        version, rows = stack.version(name), [row for row in needs.build if row.of == name]
        held = [row for row in rows if version is not None and is_in(version, row.version)]
        for row in held:
            step = f"take a {name} that is built for it, or build it from source"
            says = f"{name} {version} is built for that torch"
            yield _compare(stack, f"build of {name}", "torch", row.torch, says, step, row.source)
        if not held:
            yield _compare(
                stack, f"build of {name}", name, " or ".join(row.version for row in rows),
                "it is built for one torch without naming it, and no row has this version",
                "nox -s doctor reports it where it is installed; then add a [[build]] row to matrix/needs.toml",
                "matrix/needs.toml", verdict=FitVerdict.UNKNOWN,
            )  # fmt: skip


def _judge_sources(stack: Stack) -> Iterator[Fit]:
    """Whether the build of each source accepts the stack, unknown at a commit that no row has; and what is asked."""
    for name, wanted in stack.asks.items():
        step = "name it under `over` of the image, or write its version to the row of the base"
        says = "the image requires this range, and the base provides an unknown version"
        yield _compare(stack, f"requirement-{name}", name, wanted, says, step, "pyproject.toml, matrix/images.toml")
    for source in stack.sources:
        accepted = source.list_accepted(stack.target)
        for name in ("cuda", "torch", "python"):
            row = accepted.get(name)
            wanted, says, place = (row.needs, row.says, row.source) if row else (
                f"what is accepted at {source.commit[:12]}", "no row says what the build accepts at this commit",
                "matrix/images.toml",
            )  # fmt: skip
            step = f"pin a commit of {source.repository} whose [[source.accepts]] rows accept it, or add them"
            verdict = None if row else FitVerdict.UNKNOWN
            yield _compare(stack, f"{source.id}-{name}", name, wanted, says, step, place, verdict=verdict)
