"""The next step for a culprit: a package to pin, a file to change, a copy to remove. One table of sentences.

Versions and paths come from the receipts; requirements of releases are rows of `matrix/needs.toml`, which the caller
passes. A missing symbol selects its row for every release. Otherwise a row must match the release that broke, the
component at fault and the module, and the loaded version must violate the row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

from packaging.version import Version

from ..catalog.images import Need, Needs
from ..evidence.receipt import Library, Outcome, Package, Receipt
from ..evidence.values import Cause, Frozen, read_version
from .blame import Red
from .checks import CheckKind
from .diagnose import Diagnosis, Raised, diagnose
from .rows import COMPONENTS, TORCH, component_named, loaded_as

TE: Final = "transformer_engine"
TE_TITLE: Final = "Transformer Engine"
_OWN: Final = frozenset({TE, "transformer_engine_torch", "libtransformer_engine"})
_WHOLE: Final = frozenset({Outcome.PASS, Outcome.FAIL, Outcome.EXPECTED_UNSUPPORTED})  # ran to its end
_PINNED: Final = ("library", "distribution")  # kinds of need that a version answers
# A stack that is a release and nothing else: "te" and a version as PEP 440 writes one.
_RELEASE: Final = re.compile(r"te(\d+(?:\.\d+)*(?:(?:a|b|rc|\.post|\.dev)\d+)*(?:\+[a-z0-9]+(?:[._-][a-z0-9]+)*)?)")
_MACHINE: Final = ("torch", "cuda", "driver", "python", "gpu")
_RECEIPT: Final = "the log beside the receipt"

Receipts = Mapping[str, Receipt]
"""Receipts of one stack by module."""


class Step(NamedTuple):
    """A next step: the first row whose class of cause, tags and pattern fit a failure.

    Attributes:
        tags: all must apply: the name of the component, or a tag of `_choose`.
        says: pattern of the exception in one line; empty for any.
        step: format string with names of `_describe_component` and `_describe_failure`. Unless it begins with
            "{back}", the release to go back to follows.
    """

    cause: Cause
    tags: tuple[str, ...]
    says: str
    step: str


_STATIC: Final = "`te_canary -- {releases} --tiers static` names the new form"
STEPS: Final = (
    Step(Cause.ENVIRONMENT, ("advice",), "", "{advice}"),
    Step(Cause.ENVIRONMENT, ("missing",), "open shared object",
         "install {package}: it brings {missing}, which the loader does not find"),
    Step(Cause.ENVIRONMENT, (), "^ModuleNotFoundError", "pip install {package} (`{missing}` is missing)"),
    Step(Cause.ENVIRONMENT, ("component",), "",
         "{copies}pin {package} to {newer} ({subject} was built against another version)"),
    Step(Cause.ENVIRONMENT, (), "", f"read {_RECEIPT}: {{kind}} comes from outside the process (memory, a scheduler)"),
    Step(Cause.BINARY, ("torch ABI",), "", "rebuild the extension, which was built for another torch, against {torch}"),
    Step(Cause.BINARY, ("Linux libraries",), "", "{advice}"),
    Step(Cause.BINARY, ("GPU architecture",), "", "rebuild {subject} with NVTE_CUDA_ARCHS for {gpu}"),
    Step(Cause.BINARY, ("component", "missing"), "",
         "pin {package} to the release that {subject} was built for, one that has {missing}{has}; or rebuild {subject} "
         "against yours"),
    Step(Cause.BINARY, ("DeepGEMM",), "", "use a DeepGEMM that was built for torch {torch}"),
    Step(Cause.BINARY, ("component",), "", "reinstall {package} for this stack{has}"),
    Step(Cause.BINARY, ("missing",), "",
         "uninstall all parts of transformer-engine, then install sources, core library and torch extension of one "
         "release: {missing} is missing between them"),
    Step(Cause.BINARY, ("import",), "",
         "uninstall all parts of transformer-engine, then install sources, core library and torch extension of "
         "{release} as one: its import fails"),
    Step(Cause.BINARY, (), "^exit status", f"read {_RECEIPT} of {{cell}}: the process ended itself ({{kind}})"),
    Step(Cause.BINARY, (), "",
         "rebuild the extension of {release} against torch {torch} and run the cell again with CUDA_LAUNCH_BLOCKING=1 "
         "to see the kernel"),
    Step(Cause.API, ("FP8 state of checkpoints",), "", "{advice}"),
    Step(Cause.API, ("other",), "", "pin {package} to the version that this release was made for"),
    Step(Cause.API, (), "unexpected keyword",
         f"{{file}}: keyword `{{missing}}` was renamed or removed{{whom}}: pass its new name; {_STATIC}"),
    Step(Cause.API, (), r"missing \d+ required",
         f"{{file}}: argument `{{missing}}` is required now{{whom}}: pass it; {_STATIC}"),
    Step(Cause.API, (), r"'(?:tuple|NoneType)' object (?:has no|is not)|values? to unpack|cannot unpack",
         f"{{file}}: the call returns another value now (`{{said}}`): handle it; {_STATIC}"),
    Step(Cause.API, (), "^TypeError", f"{{file}}: the call no longer fits{{whom}}; {_STATIC}"),
    Step(Cause.API, ("missing",), "",
         f"{{file}}: `{{missing}}` was moved, renamed or removed: take it from its new place; {_STATIC}"),
    Step(Cause.API, ("import",), "", "satisfy the check that Transformer Engine makes at import (`{said}`)"),
    Step(Cause.API, ("contract",), "", f"{{file}}: `{{contract}}` no longer holds; adapt the call; {_STATIC}"),
    Step(Cause.API, (), "", f"{{file}}: the arguments are refused now; adapt the call; {_STATIC}"),
    Step(Cause.NUMERICS, (), "",
         "{back}, or take the native path of {paths}, until `{numbers}` is in its bounds again; report the check with "
         "its receipt to {owner}{search}"),
    Step(Cause.SILENT_FALLBACK, (), "", "do not rely on the speed or precision of {module}: {why}; mend that"),
    Step(Cause.PERFORMANCE, ("memory",), "",
         "{back}, or take the native path of {module}, until `{memory}` is in its bound again: memory grows with every "
         "step{search}"),
    Step(Cause.PERFORMANCE, (), "", "run {cell} alone with a longer --limit to tell slow from hung{where}"),
)  # fmt: skip
# For failures that name no component while several libraries changed: the libraries of a module, most likely first.
_STANDS_ON: Final[dict[str, tuple[str, ...]]] = {
    "attention": ("cuDNN", "flash-attn", "torch"), "native_block": ("cuBLAS", "cuDNN", "torch"),
    "linear_walker": ("cuBLAS", "torch"), "expert_gemm": ("cuBLAS", "DeepGEMM", "torch"),
    "permute": ("triton", "torch"), "layer_spec": ("cuBLAS", "torch"), "imports": ("torch", "cuBLAS"),
}  # fmt: skip


class VersionChange(Frozen):
    """A package or library whose loaded version differs between the two sides; empty where it was not loaded."""

    name: str
    before: str
    after: str


class Second(NamedTuple):
    """A library or package with several copies.

    Attributes:
        kept: the copy that torch or a wheel installed; of packages the loaded copy.
        others: the other copies.
    """

    name: str
    kept: str
    others: tuple[str, ...]


@dataclass(frozen=True)
class Sides:
    """The two stacks that are compared.

    Attributes:
        before, after: names of the stacks.
        same_release: both stacks have the same release of Transformer Engine.
        versions: other packages and libraries that differ.
        files: bridge files by module: "bridge/attention.py".
        needs: requirements of releases; None where they are unknown.
    """

    before: str
    after: str
    same_release: bool = False
    versions: tuple[VersionChange, ...] = ()
    files: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)
    needs: Needs | None = None

    @property
    def changed(self) -> tuple[str, ...]:
        """Components whose versions differ, if the release of Transformer Engine is the same; empty otherwise."""
        names = (
            loaded_as(row.name) or ("CUDA runtime" if row.name == "cuda" else row.name)
            for row in self.versions
            if self.same_release and row.before and row.after
        )
        return tuple(dict.fromkeys(name for name in names if name != "gpu"))

    def stands_on(self, module: str) -> str:
        """The changed component that a module most likely depends on; empty where none changed."""
        changed = self.changed
        return next((name for name in _STANDS_ON.get(module, ()) if name in changed), next(iter(changed), ""))

    def way_back(self, held: bool) -> str:
        """The stack to return to, as the end of a sentence. `held`: the culprit passed in the first stack."""
        return f"stay on {self.before}" if held else "choose another release than this one"

    @property
    def releases(self) -> tuple[str, ...]:
        """The two releases, if the stacks are named after two different ones; empty otherwise."""
        found = tuple(row[1] for row in map(_RELEASE.fullmatch, (self.before, self.after)) if row)
        return found if len(set(found)) == 2 and not self.same_release else ()

    def search(self, module: str) -> str:
        """The bisect command, as the end of a sentence; empty without two releases."""
        search = f"; `te_bisect -- {' '.join(self.releases)} --module {module}` finds the release that brought it"
        return search if self.releases else ""

    def moved(self, component: str) -> VersionChange | None:
        """The version change of a component; if only one version changed, that one."""
        rows = [row for row in self.versions if row.before and row.after]
        mine = [row for row in rows if component in (loaded_as(row.name), row.name)]
        return next(iter(mine), rows[0] if len(rows) == 1 else None)


# --- the sentence -----------------------------------------------------------------------------------------------------


def next_step(red: Red, diagnosis: Diagnosis, sides: Sides, cascades: Sequence[str] = ()) -> str:
    """The next step for a red culprit.

    Args:
        cascades: modules that are red because of the culprit.
    """
    back = sides.way_back(red.was_good)
    if sides.same_release and not red.fits_no_call and (moved := sides.moved(diagnosis.component)) is not None:
        return f"put {moved.name} back to {moved.before} (it is {moved.after} now); Transformer Engine is the same"
    if sides.needs is not None and not sides.same_release and not component_named(diagnosis.component).advice:
        need = find_need(red, diagnosis, sides.needs)
        if need is not None:
            return f"{_pin(need, sides.needs, red)}, or {back}"
    words = _describe_failure(red, diagnosis, sides, cascades) | {"back": back}
    tags = {tag for tag in ("contract", "memory") if words[tag]}
    if red.receipt.outcome is Outcome.IMPORT_ERROR:
        tags.add("import")
    step = _choose(diagnosis, tags, f"{red.raised.line} {red.receipt.reason}" if red.raised else "", words)
    return step if step.startswith(back) else f"{step}, or {back}"


def advise(error: str, subject: str, torch: str, cuda: str, driver: str) -> str:
    """The next step for an import or loader error of a package; empty where no row of the table matches.

    Args:
        error: as "class: text".
        subject: the package that does not load.
        torch, cuda, driver: version of torch, CUDA major version of torch, version of the driver.
    """
    found = diagnose(error)
    of_te = found.missing and subject == TE_TITLE
    if found.cause not in (Cause.ENVIRONMENT, Cause.BINARY) or not (found.component or of_te):
        return ""
    words = _describe_component(found, "", cuda) | {"copies": "", "torch": torch, "gpu": "this GPU"}
    words |= {"driver": driver or "unknown", "line": error[:120], "subject": subject}
    return _choose(found, set(), error, words)


def slow_step(module: str, component: str, sides: Sides, slowest: str) -> str:
    """The next step for a slower module, or for the component that makes it slower."""
    if component and (moved := sides.moved(component)) is not None:
        return f"put {moved.name} back to {moved.before} (it is {moved.after} now), or accept {slowest}"
    return f"{sides.way_back(True)}, or accept {slowest}{sides.search(module)}"


def _choose(diagnosis: Diagnosis, tags: set[str], said: str, words: Mapping[str, str]) -> str:
    """The sentence of the first matching row."""
    component = component_named(diagnosis.component)
    known = {
        "component": component.name, component.name: component.name, "advice": component.advice,
        "missing": diagnosis.missing, "other": component.name if component.name != TORCH else "",
    }  # fmt: skip
    tags = tags | {tag for tag, has in known.items() if has}
    rows = (row for row in STEPS if row.cause is diagnosis.cause and tags.issuperset(row.tags))
    step = next(row for row in rows if re.search(row.says, said)).step
    return step.format_map({**words, "advice": component.advice.format_map(words)})


def _describe_component(diagnosis: Diagnosis, version: str, cuda: str) -> dict[str, str]:
    """Words for the component at fault.

    NVIDIA ships nvidia-cudnn-cu12 and -cu13, and since CUDA 13 nvidia-cublas without a suffix.
    """
    row = component_named(diagnosis.component)
    suffix = f"-cu{cuda}" if cuda and int(cuda) < 13 else ""
    package = row.package.replace("{-cuda}", suffix).replace("{cuda}", cuda or "12 (or -cu13)")
    return {
        "missing": diagnosis.missing, "package": package or row.name or "the package that brings it",
        "newer": f"a release newer than {version}" if version else "the release that this one was built for",
        "has": f" ({version} is loaded)" if version else "",
    }  # fmt: skip


def _describe_failure(red: Red, diagnosis: Diagnosis, sides: Sides, cascades: Sequence[str]) -> dict[str, str]:
    """Words for the sentences of `STEPS`."""
    receipt, machine, component = red.receipt, red.receipt.machine, diagnosis.component
    raised = red.raised or Raised("", "")
    said = " ".join(raised.text.split())
    called = re.match(r"([\w.]+)\(\)", said)
    inner = raised.bridge[-1].partition(" in ")[0] if raised.bridge else ""
    if raised.kind == "VendorEntryMissing":
        inner = "bridge/imports.py"  # only this file names symbols of Transformer Engine
    first = {kind: next((check.name for check in red.checks if check.kind is kind), "") for kind in CheckKind}
    version = version_of(component, receipt)
    now = f" (its version is {version} now)" if version else ""
    copies = (
        f"remove the second copy of {copy.name} at {', '.join(copy.others)}, or keep it off LD_LIBRARY_PATH, so that "
        f"{copy.kept} is loaded{now}; if it still fails, "
        for copy in second_copies(receipt)
        if copy.name in component_named(component).loaded
    )
    return _describe_component(diagnosis, version, cuda_major(receipt)) | {
        "module": red.module,
        "cell": receipt.cell,
        "kind": raised.kind or "the failure",
        "said": said[:120],
        "line": raised.line[:120],
        "driver": machine.driver or "unknown",
        "where": f" (it was in {raised.frame})" if raised.frame else "",
        "whom": f" by {called[1]}" if called else "",
        "file": inner or next(iter(sides.files.get(red.module, ())), f"bridge/{red.module}.py"),
        "contract": "" if red.raised else first[CheckKind.CONTRACT],
        "numbers": first[CheckKind.NUMBERS] or "the failed check",
        "memory": first[CheckKind.MEMORY],
        "why": _why_passed_over(red),
        "paths": ", ".join(dict.fromkeys((red.module, *cascades))),
        "owner": component or TE_TITLE,
        "subject": TE_TITLE,
        "release": release_of({red.module: receipt}) or sides.after,
        "releases": " ".join(sides.releases or ("OLD", "NEW")),
        "search": "" if component and first[CheckKind.NUMBERS] else sides.search(red.module),
        "torch": machine.torch or "as it is here",
        "gpu": f"sm_{machine.capability.replace('.', '')}" if machine.capability else "this GPU",
        "copies": "".join(copies),
    }  # fmt: skip


def _why_passed_over(red: Red) -> str:
    """Why another backend ran than was requested."""
    fell = {check.name for check in red.checks if check.kind is CheckKind.BACKEND}
    reasons = (f"it was passed over because {why}" for row in red.fallbacks for why in row.reasons)
    said = (" ".join(one.detail.split()) for one in red.receipt.checks if one.name in fell and one.detail)
    return next(chain(reasons, said), "the receipt has no reason for the other path")


# --- what releases need -----------------------------------------------------------------------------------------------


def find_need(red: Red, diagnosis: Diagnosis, needs: Needs) -> Need | None:
    """The violated requirement that explains a failure; None where there is none."""
    rows = [need for need in needs.need if need.version and _is_unmet(need, red.receipt)]
    if diagnosis.missing:
        named = next((row for row in rows if diagnosis.missing in (row.symbol, *row.says.split())), None)
        if named is not None:
            return named
    mine = [row for row in rows if row.kind in _PINNED and red.module in row.breaks and _broke(row, red)]
    if diagnosis.component:
        component = component_named(diagnosis.component)
        return next((row for row in mine if row.of in (*component.loaded, component.package)), None)
    # A crash that names nothing: the only library that is known to be too old is the most likely cause.
    crashed = diagnosis.cause is Cause.BINARY and not diagnosis.missing
    return mine[0] if crashed and len(mine) == 1 and mine[0].kind == "library" else None


def _is_unmet(need: Need, receipt: Receipt) -> bool:
    """Whether a loaded version lies outside of the range; False where no version was recorded."""
    return any(not need.allows(version) for version in _versions(need.of, receipt))


def _versions(name: str, receipt: Receipt) -> Iterator[Version]:
    """Loaded versions of a library, or of the packages of a distribution."""
    names = {name, *(loaded for row in COMPONENTS if row.package == name for loaded in row.loaded)}
    loaded: tuple[Library | Package, ...] = (*receipt.libraries, *receipt.packages)
    texts = (one.strip() for row in loaded if row.name in names for one in row.version.split(","))
    return (version for version in map(read_version, dict.fromkeys(texts)) if version is not None)


def _broke(need: Need, red: Red) -> bool:
    """Whether the release that broke has this need, and the stack before it did not violate it without harm."""

    def needed(receipt: Receipt) -> bool:
        """Whether the release of a receipt has the need."""
        release = read_version(release_of({receipt.probe: receipt}))
        return release is not None and need.holds_for(release)

    harmless = red.before is not None and red.was_good and _is_unmet(need, red.before) and needed(red.before)
    return not harmless and needed(red.receipt)


def _pin(need: Need, needs: Needs, red: Red) -> str:
    """The required version, the loaded version, and why the release needs it."""
    brought = next((row.distributions for row in needs.library if row.id == need.of), [need.of])
    of_cuda = (name for name in brought if len(brought) > 1 and name.endswith(f"-cu{cuda_major(red.receipt)}"))
    has = ", ".join(map(str, _versions(need.of, red.receipt)))
    copies = [copy for copy in second_copies(red.receipt) if copy.name == need.of]
    second = "".join(f"; a second copy is mapped: remove {', '.join(copy.others)}" for copy in copies)
    why = f"Transformer Engine {need.te} needs it: {need.says}" if need.kind in _PINNED else need.says
    package = next(of_cuda, brought[0])
    return f"pin {package}{need.version} ({has} is loaded{second}; {why})"


# --- versions as loaded -----------------------------------------------------------------------------------------------


def compare_versions(before: Receipts, after: Receipts) -> tuple[VersionChange, ...]:
    """Differences of loaded packages and libraries, torch, CUDA, driver, Python and GPU; not Transformer Engine.

    A cell that died has not loaded everything: of such cells only names with one version on each side are compared.
    """
    found: dict[str, tuple[str, str]] = {}
    for probe in sorted(before.keys() & after.keys()):
        one, other = before[probe], after[probe]
        whole = one.outcome in _WHOLE and other.outcome in _WHOLE
        mine, theirs = _loaded(one), _loaded(other)
        for name in sorted(mine.keys() | theirs.keys()):
            old, new = mine.get(name, ""), theirs.get(name, "")
            single = bool(old) and bool(new) and ", " not in f"{old}{new}"
            if old != new and (single or (whole and bool(mine) and bool(theirs))):
                found.setdefault(name, (old, new))
    return tuple(VersionChange(name=name, before=old, after=new) for name, (old, new) in sorted(found.items()))


def release_of(receipts: Receipts) -> str:
    """The loaded release of Transformer Engine, else the release in the name of the stack; empty if unknown."""
    for _, receipt in sorted(receipts.items()):
        for package in receipt.packages:
            if package.name == TE and package.version:
                return package.version
    stacks = (re.match(r"te(\d+(?:\.\w+)+)", receipt.stack) for _, receipt in sorted(receipts.items()))
    return next((found[1] for found in stacks if found), "")


def version_of(component: str, receipt: Receipt) -> str:
    """The loaded version of a component; empty if the receipt has none."""
    found = _loaded(receipt)
    return next((found[name] for name in component_named(component).loaded if found.get(name)), "")


def cuda_major(receipt: Receipt) -> str:
    """CUDA major version, such as "13"; empty if unknown."""
    said = re.match(r"(\d+)", receipt.machine.cuda) or re.search(r"\+cu(\d\d)", receipt.machine.torch)
    return said[1] if said else ""


def second_copies(receipt: Receipt) -> tuple[Second, ...]:
    """Libraries and packages with more than one copy in this process."""
    found = [Second(row.name, row.file, row.other_copies) for row in receipt.packages]
    for library in receipt.libraries:
        # torch was built for the copy that pip installed with it.
        files = sorted(dict.fromkeys(library.files), key=lambda file: ("/nvidia/" not in file, "/torch/" not in file))
        found += [Second(library.name, files[0], tuple(files[1:]))] if files else []
    return tuple(row for row in found if row.others)


def _loaded(receipt: Receipt) -> dict[str, str]:
    if not receipt.packages and not receipt.libraries and not receipt.machine.torch:
        return {}
    found = {package.name: package.version for package in receipt.packages if package.name not in _OWN}
    found |= {library.name: library.version for library in receipt.libraries if library.name not in _OWN}
    machine = {name: str(getattr(receipt.machine, name)) for name in _MACHINE}
    return {name: version for name, version in (found | {k: v for k, v in machine.items() if v}).items() if version}
