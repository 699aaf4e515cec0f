"""What to do about a culprit: the package to pin, the file to mend, the copy to remove. One table of sentences.

Versions and paths come from the receipts, what a release needs from rows of `matrix/needs.toml` that the caller gives:
a missing symbol names its row whichever the release is; else a row is about the release that broke, the component at
fault and the module that lost it, and never about what is already loaded in a version that fits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, NamedTuple, TypeAlias

from packaging.version import Version

from ..evidence.receipt import Library, Outcome, Package, Receipt
from ..evidence.values import Cause, Frozen, read_version
from .blame import Red
from .checks import CheckKind
from .diagnose import Diagnosis, diagnose
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
        tags: what must hold for the failure: the name of a component, or what `_list_tags` finds.
        says: pattern of the exception in one line; empty for any.
        step: the sentence, with names of `_find_words`.
    """

    cause: Cause
    tags: tuple[str, ...]
    says: str
    step: str


_STATIC: Final = "`te_canary -- {releases} --tiers static` names the new way{until}"
STEPS: Final = (
    Step(Cause.ENVIRONMENT, ("advice",), "", "{advice}{or_back}"),
    Step(Cause.ENVIRONMENT, ("missing",), "open shared object",
         "install {package}: it brings {missing}, which the loader does not find{or_back}"),
    Step(Cause.ENVIRONMENT, (), "^ModuleNotFoundError", "pip install {package} (`{missing}` is missing){or_back}"),
    Step(Cause.ENVIRONMENT, ("package",), "",
         "{copies}pin {package} to {newer} ({subject} was built against another version){or_back}"),
    Step(Cause.ENVIRONMENT, ("component",), "",
         "{copies}use the {component} that this release was made for{has}{or_back}"),
    Step(Cause.ENVIRONMENT, (), "",
         f"read {_RECEIPT}: {{kind}} comes from outside the process (memory, a scheduler){{or_back}}"),
    Step(Cause.BINARY, ("torch ABI",), "",
         "rebuild the extension against torch {torch} (the extension was built for another torch){or_back}"),
    Step(Cause.BINARY, ("GPU architecture",), "", "rebuild {subject} with NVTE_CUDA_ARCHS for {gpu}{or_back}"),
    Step(Cause.BINARY, ("component", "missing"), "",
         "pin {package} to the release that {subject} was built for, one that has {missing}{has}; or rebuild {subject} "
         "against yours{or_back}"),
    Step(Cause.BINARY, ("DeepGEMM",), "", "use a DeepGEMM that was built for torch {torch}{or_back}"),
    Step(Cause.BINARY, ("component",), "", "reinstall {package} for this stack{has}{or_back}"),
    Step(Cause.BINARY, ("missing",), "",
         "install sources, core library and torch extension of one release (uninstall all parts of transformer-engine "
         "first): {missing} is missing between them{or_back}"),
    Step(Cause.BINARY, ("import",), "",
         "reinstall sources, core library and torch extension of {release} as one (uninstall all parts of "
         "transformer-engine first): its import fails{or_back}"),
    Step(Cause.BINARY, (), "^exit status",
         f"read {_RECEIPT} of {{cell}}: the process ended itself ({{kind}}) and raised nothing{{until}}"),
    Step(Cause.BINARY, (), "",
         "rebuild the extension of {release} against torch {torch} and run the cell again with CUDA_LAUNCH_BLOCKING=1 "
         "to see the kernel{until}"),
    Step(Cause.API, ("other",), "", "pin {package} to the version that this release was made for{or_back}"),
    Step(Cause.API, (), "unexpected keyword",
         f"{{file}}: keyword `{{missing}}` was renamed or removed{{whom}}: pass its new name; {_STATIC}"),
    Step(Cause.API, (), r"missing \d+ required",
         f"{{file}}: argument `{{missing}}` is required now{{whom}}: pass it; {_STATIC}"),
    Step(Cause.API, (), r"'(?:tuple|NoneType)' object (?:has no|is not)|values? to unpack|cannot unpack",
         f"{{file}}: the call returns something else now (`{{said}}`): handle the new return value; {_STATIC}"),
    Step(Cause.API, (), "^TypeError", f"{{file}}: the call no longer fits{{whom}}; {_STATIC}"),
    Step(Cause.API, ("missing",), "",
         f"{{file}}: `{{missing}}` was moved, renamed or removed: take it from its new place; {_STATIC}"),
    Step(Cause.API, ("import",), "", "satisfy the check that Transformer Engine makes at import (`{said}`){or_back}"),
    Step(Cause.API, ("contract",), "", f"{{file}}: `{{contract}}` no longer holds; adapt the call; {_STATIC}"),
    Step(Cause.API, (), "", f"{{file}}: what is passed is refused now; adapt the call; {_STATIC}"),
    Step(Cause.NUMERICS, (), "",
         "{back}, or take the native path of {paths}, until `{numbers}` is in its bounds again; report the check with "
         "its receipt to {owner}{search}"),
    Step(Cause.SILENT_FALLBACK, (), "",
         "do not rely on the speed or precision of {module}: {why}. Mend that{or_back}"),
    Step(Cause.PERFORMANCE, ("memory",), "",
         "{back}, or take the native path of {module}, until `{memory}` is in its bound again: memory grows with every "
         "step, and a long run ends without any{search}"),
    Step(Cause.PERFORMANCE, (), "",
         f"run {{cell}} alone with a longer --limit to tell slow from hung{{where}}, and read {_RECEIPT}{{until}}"),
)  # fmt: skip


# Rows of `catalog.images`: that room lies above this one.
Need: TypeAlias = Any
Needs: TypeAlias = Any


class VersionChange(Frozen):
    """A package or library as loaded that is not the same on both sides; empty where it was not loaded."""

    name: str
    before: str
    after: str


class Second(NamedTuple):
    """A library or package that is there twice.

    Attributes:
        kept: the copy that lies where torch or the package index put it, or the one that is loaded.
        others: the rest.
    """

    name: str
    kept: str
    others: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """What next steps depend on beside the failure.

    Attributes:
        before, after: names of the stacks.
        held: the culprit held before.
        same_release: both sides have one release of Transformer Engine.
        versions: what else changed.
        files: of the bridge module: "bridge/attention.py".
        cascades: modules that are red by the culprit.
        needs: what releases are known to need; None where that is unknown.
    """

    before: str
    after: str
    held: bool
    same_release: bool = False
    versions: tuple[VersionChange, ...] = ()
    files: tuple[str, ...] = ()
    cascades: tuple[str, ...] = ()
    needs: Needs | None = None

    @property
    def way_back(self) -> str:
        """Which release to stay on, as the end of a sentence."""
        return f"stay on {self.before}" if self.held else "choose another release than this one"

    @property
    def releases(self) -> tuple[str, str] | None:
        """Both sides as releases, which can be searched between; None where either is no release, or they are one."""
        found = _RELEASE.fullmatch(self.before), _RELEASE.fullmatch(self.after)
        if found[0] is None or found[1] is None or self.same_release or self.before == self.after:
            return None
        return found[0][1], found[1][1]

    def search(self, module: str) -> str:
        """How to find the release between, as the end of a sentence; empty where there is no range of releases."""
        if self.releases is None:
            return ""
        return f"; `te_bisect -- {' '.join(self.releases)} --module {module}` finds the release that brought it"

    def moved(self, component: str) -> VersionChange | None:
        """The row of a component among what changed; any row where only one changed."""
        rows = [row for row in self.versions if row.before and row.after]
        mine = [row for row in rows if component in (loaded_as(row.name), row.name)]
        return next(iter(mine), rows[0] if len(rows) == 1 else None)


# --- the sentence -----------------------------------------------------------------------------------------------------


def next_step(red: Red, diagnosis: Diagnosis, facts: Facts) -> str:
    """What to do about a culprit that is red."""
    if facts.same_release and not red.fits_no_call and (moved := facts.moved(diagnosis.component)) is not None:
        back = f"put {moved.name} back to {moved.before} (it is {moved.after} now)"
        return f"{back}, or see what its new version changed: Transformer Engine itself is the same on both sides"
    if facts.needs is not None and not facts.same_release and not component_named(diagnosis.component).advice:
        need = find_need(red, diagnosis, facts.needs)
        if need is not None:
            return _pin(need, facts.needs, red, facts)
    words = _find_words(red, diagnosis, facts)
    tags = {tag for tag in ("contract", "memory") if words[tag]}
    if red.receipt.outcome is Outcome.IMPORT_ERROR:
        tags.add("import")
    return _choose(diagnosis, tags, f"{red.raised.line} {red.receipt.reason}" if red.raised else "", words)


def advise(error: str, subject: str, torch: str, cuda: str, driver: str) -> str:
    """What to do about an import or loader error of a package; empty where no row of the table of failures is about it.

    Args:
        error: as "class: text".
        subject: the package that does not load.
        torch, cuda, driver: versions of torch and of the driver, and the major CUDA release that torch is built for.
    """
    found = diagnose(error)
    of_te = found.missing and subject == TE_TITLE
    if found.cause not in (Cause.ENVIRONMENT, Cause.BINARY) or not (found.component or of_te):
        return ""
    words = _describe_component(found, "", cuda) | dict.fromkeys(("or_back", "until", "copies"), "")
    words |= {"torch": torch, "gpu": "this GPU", "driver": driver or "unknown", "line": error[:120]}
    return _choose(found, set(), error, words | {"subject": subject})


def slow_step(module: str, component: str, facts: Facts, slowest: str) -> str:
    """What to do about a module that became slower, or a component that slows it."""
    if component and (moved := facts.moved(component)) is not None:
        return f"put {moved.name} back to {moved.before} (it is {moved.after} now), or accept {slowest}"
    return f"{facts.way_back}, or accept {slowest}{facts.search(module)}"


def _choose(diagnosis: Diagnosis, tags: set[str], said: str, words: Mapping[str, str]) -> str:
    """The sentence of the first row that fits."""
    component = component_named(diagnosis.component)
    known = {
        "component": component.name, component.name: component.name, "advice": component.advice,
        "package": component.package, "missing": diagnosis.missing,
        "other": component.name if component.name != TORCH else "",
    }  # fmt: skip
    tags = tags | {tag for tag, has in known.items() if has}
    rows = (row for row in STEPS if row.cause is diagnosis.cause and tags.issuperset(row.tags))
    step = next(row for row in rows if re.search(row.says, said)).step
    return step.format_map({**words, "advice": component.advice.format_map(words)})


def _describe_component(diagnosis: Diagnosis, version: str, cuda: str) -> dict[str, str]:
    """Words about the component at fault.

    NVIDIA ships nvidia-cudnn-cu12 and -cu13, and since CUDA 13 nvidia-cublas without a suffix.
    """
    row = component_named(diagnosis.component)
    suffix = f"-cu{cuda}" if cuda and int(cuda) < 13 else ""
    package = row.package.replace("{-cuda}", suffix).replace("{cuda}", cuda or "12 (or -cu13)")
    return {
        "component": row.name, "missing": diagnosis.missing, "package": package or row.name,
        "newer": f"a release newer than {version}" if version else "the release that this one was built for",
        "has": f" ({version} is loaded)" if version else "",
    }  # fmt: skip


def _find_words(red: Red, diagnosis: Diagnosis, facts: Facts) -> dict[str, str]:
    """Everything that a sentence can name."""
    receipt, raised, machine = red.receipt, red.raised, red.receipt.machine
    said = " ".join(raised.text.split()) if raised else ""
    called = re.match(r"([\w.]+)\(\)", said)
    inner = raised.bridge[-1].partition(" in ")[0] if raised and raised.bridge else ""
    if raised is not None and raised.kind == "VendorEntryMissing":
        inner = "bridge/imports.py"  # where every name of Transformer Engine is written
    first = {kind: next((check.name for check in red.checks if check.kind is kind), "") for kind in CheckKind}
    component = diagnosis.component
    version = version_of(component, receipt)
    return _describe_component(diagnosis, version, cuda_major(receipt)) | {
        "module": red.module,
        "cell": receipt.cell,
        "kind": raised.kind if raised else "the failure",
        "said": said[:120],
        "line": raised.line[:120] if raised else "",
        "driver": machine.driver or "unknown",
        "where": f" (it was in {raised.frame})" if raised and raised.frame else "",
        "whom": f" by {called[1]}" if called else "",
        "file": inner or next(iter(facts.files), f"bridge/{red.module}.py"),
        "contract": "" if raised else first[CheckKind.CONTRACT],
        "numbers": first[CheckKind.NUMBERS] or "the failed check",
        "memory": first[CheckKind.MEMORY],
        "why": _why_passed_over(red),
        "paths": ", ".join(dict.fromkeys((red.module, *facts.cascades))),
        "owner": component or TE_TITLE,
        "subject": TE_TITLE,
        "release": release_of({red.module: receipt}) or facts.after,
        "releases": " ".join(facts.releases or ("OLD", "NEW")),
        "search": "" if component and first[CheckKind.NUMBERS] else facts.search(red.module),
        "torch": machine.torch or "as it is here",
        "gpu": f"sm_{machine.capability.replace('.', '')}" if machine.capability else "this GPU",
        "copies": _say_copies(red, component),
        "back": facts.way_back,
        "or_back": f", or {facts.way_back}",
        "until": f"; {facts.way_back} until then",
    }  # fmt: skip


def _why_passed_over(red: Red) -> str:
    """Why another path ran than was requested."""
    reasons = (reason for row in red.fallbacks for reason in row.reasons)
    if why := next(reasons, ""):
        return f"it was passed over because {why}"
    fell = {check.name for check in red.checks if check.kind is CheckKind.BACKEND}
    said = (" ".join(one.detail.split()) for one in red.receipt.checks if one.name in fell and one.detail)
    return next(said, "the receipt has no reason for the other path")


def _say_copies(red: Red, component: str) -> str:
    version = version_of(component, red.receipt)
    now = f" (its version is {version} now)" if version else ""
    return "".join(
        f"remove the second copy of {copy.name} at {', '.join(copy.others)}, or keep it off LD_LIBRARY_PATH and the "
        f"loader's cache, so that the copy at {copy.kept} is loaded{now}; if it still fails, "
        for copy in second_copies(red.receipt, component)
    )


# --- what releases need -----------------------------------------------------------------------------------------------


def find_need(red: Red, diagnosis: Diagnosis, needs: Needs) -> Need | None:
    """The row that a failure is about; None where no row is, or nothing is known to be missing."""
    rows = [need for need in needs.need if need.version and _is_unmet(need, red.receipt)]
    if diagnosis.missing:
        named = next((row for row in rows if diagnosis.missing in (row.symbol, *row.says.split())), None)
        if named is not None:
            return named
    mine = [row for row in rows if row.kind in _PINNED and red.module in row.breaks and _broke(row, red)]
    if diagnosis.component:
        component = component_named(diagnosis.component)
        return next((row for row in mine if row.of in (*component.loaded, component.package)), None)
    # A crash that names nothing: the one library that is known to be too old is the first thing to mend.
    crashed = diagnosis.cause is Cause.BINARY and not diagnosis.missing
    return mine[0] if crashed and len(mine) == 1 and mine[0].kind == "library" else None


def _is_unmet(need: Need, receipt: Receipt) -> bool:
    """Whether a version as loaded lies outside of the range; of what was not seen loaded nothing is known."""
    return any(not need.allows(version) for version in _versions(need.of, receipt))


def _versions(name: str, receipt: Receipt) -> Iterator[Version]:
    """Versions of a library, or of the packages that a distribution is imported as."""
    names = {name, *(loaded for row in COMPONENTS if row.package == name for loaded in row.loaded)}
    loaded: tuple[Library | Package, ...] = (*receipt.libraries, *receipt.packages)
    texts = (one.strip() for row in loaded if row.name in names for one in row.version.split(","))
    return (version for version in map(read_version, dict.fromkeys(texts)) if version is not None)


def _broke(need: Need, red: Red) -> bool:
    """Whether the release that broke has this need; one that was not met before either, and did no harm, did not."""

    def has(receipt: Receipt) -> bool:
        """Whether a fact holds."""
        release = read_version(release_of({receipt.probe: receipt}))
        return release is not None and need.holds_for(release)

    harmless = red.before is not None and red.was_good and _is_unmet(need, red.before) and has(red.before)
    return not harmless and has(red.receipt)


def _pin(need: Need, needs: Needs, red: Red, facts: Facts) -> str:
    """What the matrix knows to be needed, and what is there instead."""
    brought = next((row.distributions for row in needs.library if row.id == need.of), [need.of])
    of_cuda = (name for name in brought if len(brought) > 1 and name.endswith(f"-cu{cuda_major(red.receipt)}"))
    has = ", ".join(map(str, _versions(need.of, red.receipt)))
    copies = [copy for copy in second_copies(red.receipt, loaded_as(need.of)) if copy.name == need.of]
    second = "".join(f"; a second copy is mapped: remove {', '.join(copy.others)}" for copy in copies)
    why = f"Transformer Engine {need.te} needs it: {need.says}" if need.kind in _PINNED else need.says
    package = next(of_cuda, brought[0])
    return f"pin {package}{need.version} ({has} is loaded{second}; {why}), or {facts.way_back}"


# --- versions as loaded -----------------------------------------------------------------------------------------------


def compare_versions(before: Receipts, after: Receipts) -> tuple[VersionChange, ...]:
    """Packages and libraries as loaded, torch, CUDA, the driver, Python and the GPU, where they are not the same.

    Only cells that ran to their end on both sides are compared: one that died half way had not loaded all it would. Of
    the others, what has one version on either side is. Transformer Engine itself is the release, and not in it.
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


def changed_components(versions: tuple[VersionChange, ...]) -> tuple[str, ...]:
    """Components that are of another version, each once; what was only loaded on one side is none."""
    names = (
        loaded_as(row.name) or ("CUDA runtime" if row.name == "cuda" else row.name)
        for row in versions
        if row.before and row.after
    )
    return tuple(dict.fromkeys(name for name in names if name != "gpu"))


def release_of(receipts: Receipts) -> str:
    """The release of Transformer Engine, as loaded, else as the stack is named; empty where neither tells."""
    for _, receipt in sorted(receipts.items()):
        for package in receipt.packages:
            if package.name == TE and package.version:
                return package.version
    stacks = (re.match(r"te(\d+(?:\.\w+)+)", receipt.stack) for _, receipt in sorted(receipts.items()))
    return next((found[1] for found in stacks if found), "")


def version_of(component: str, receipt: Receipt) -> str:
    """The version of a component that a receipt says was loaded; empty where it says none."""
    found = _loaded(receipt)
    return next((found[name] for name in component_named(component).loaded if found.get(name)), "")


def cuda_major(receipt: Receipt) -> str:
    """Such as "13"; empty where the receipt does not tell."""
    said = re.match(r"(\d+)", receipt.machine.cuda) or re.search(r"\+cu(\d\d)", receipt.machine.torch)
    return said[1] if said else ""


def second_copies(receipt: Receipt, component: str) -> tuple[Second, ...]:
    """Libraries and packages of a component of which this process had more than one file."""
    names = component_named(component).loaded
    found = [second for library in receipt.libraries if library.name in names if (second := _second(library))]
    found += [
        Second(package.name, package.file, package.other_copies)
        for package in receipt.packages
        if package.name in names and package.other_copies
    ]
    return tuple(found)


def _second(library: Library) -> Second | None:
    files = list(dict.fromkeys(library.files))
    if len(files) < 2:
        return None
    # What pip put beside torch is what torch was built for.
    kept = next((file for file in files if "/nvidia/" in file), next((f for f in files if "/torch/" in f), files[0]))
    return Second(library.name, kept, tuple(file for file in files if file != kept))


def _loaded(receipt: Receipt) -> dict[str, str]:
    if not receipt.packages and not receipt.libraries and not receipt.machine.torch:
        return {}
    found = {package.name: package.version for package in receipt.packages if package.name not in _OWN}
    found |= {library.name: library.version for library in receipt.libraries if library.name not in _OWN}
    machine = {name: str(getattr(receipt.machine, name)) for name in _MACHINE}
    return {name: version for name, version in (found | {k: v for k, v in machine.items() if v}).items() if version}


def shorter(path: str) -> str:
    """The end of a path, enough to find it by."""
    parts = PurePath(path).parts
    return path if len(parts) <= 4 else str(PurePath("...", *parts[-4:]))
