"""What to do about a culprit, in a sentence to act on: the package to pin, the file to mend, the copy to remove.

Versions and paths come from the receipts, what a release needs from rows of `matrix/needs.toml` that the caller gives:
a missing symbol names its row whichever the release is; else a row speaks of the release that broke, of the component
at fault and of the module that lost it, and of nothing that what is loaded has already.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from packaging.version import InvalidVersion, Version

from ..evidence.receipt import Library, Outcome, Package, Receipt
from ..evidence.values import Cause
from .checks import CheckKind
from .diagnose import Diagnosis
from .red import Red
from .rows import COMPONENTS, TORCH, component_named, loaded_as
from .versions import VersionChange, cuda_major, release_of, second_copies, version_of

# Raised in Transformer Engine's own code, these are faults of its own, not of what it was handed.
_OWN_FAULT: Final = re.compile(
    r"TypeError: .*(?:unexpected keyword|missing \d+ required|takes .* argument|incompatible function arguments)|"
    r"AttributeError: (?!'NoneType')|NameError|UnboundLocalError"
)
# A stack that is a release and nothing else: "te" and a version as PEP 440 writes one.
_RELEASE: Final = re.compile(r"te(\d+(?:\.\d+)*(?:(?:a|b|rc|\.post|\.dev)\d+)*(?:\+[a-z0-9]+(?:[._-][a-z0-9]+)*)?)")


# Rows of the matrix, as `catalog.needs` reads them: that room lies above this one.
Need: TypeAlias = Any
Needs: TypeAlias = Any


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


def next_step(red: Red, diagnosis: Diagnosis, facts: Facts) -> str:
    """What to do about a culprit that is red."""
    if facts.same_release and not red.fits_no_call and (moved := facts.moved(diagnosis.component)) is not None:
        back = f"put {moved.name} back to {moved.before} (it is {moved.after} now)"
        return f"{back}, or see what its new version changed: Transformer Engine itself is the same on both sides"
    advised = bool(diagnosis.component) and component_named(diagnosis.component).advice
    if not advised and facts.needs is not None and not facts.same_release:
        need = find_need(red, diagnosis, facts.needs)
        if need is not None:
            return _pin(need, facts.needs, red, facts)
    return _STEPS[diagnosis.cause](red, diagnosis, facts)


def slow_step(module: str, component: str, facts: Facts, slowest: str) -> str:
    """What to do about a module that became slower, or a component that slows it."""
    if component and (moved := facts.moved(component)) is not None:
        return f"put {moved.name} back to {moved.before} (it is {moved.after} now), or accept {slowest}"
    return f"{facts.way_back}, or accept {slowest}{facts.search(module)}"


def find_need(red: Red, diagnosis: Diagnosis, needs: Needs) -> Need | None:
    """The row that a failure is about; None where no row is, or nothing is known to be missing."""
    rows = [need for need in needs.need if need.version and _is_unmet(need, red.receipt)]
    named = (row for row in rows if diagnosis.missing in (row.symbol, *row.says.split()))
    if diagnosis.missing and (found := next(named, None)):
        return found
    pinned = ("library", "distribution")  # kinds of need that a version answers
    mine = [row for row in rows if row.kind in pinned and red.module in row.breaks and _holds(row, red)]
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
    said = [row.version for row in loaded if row.name in names]
    for text in dict.fromkeys(one.strip() for version in said for one in version.split(",")):
        try:
            yield Version(text)
        except InvalidVersion:
            continue


def _holds(need: Need, red: Red) -> bool:
    """Whether the release that broke has this need; one that was not met before either, and did no harm, is not it."""
    harmless = red.before is not None and red.was_good and _is_unmet(need, red.before) and _has(need, red.before)
    return not harmless and _has(need, red.receipt)


def _has(need: Need, receipt: Receipt) -> bool:
    try:
        return bool(need.holds_for(Version(release_of({receipt.probe: receipt}))))
    except InvalidVersion:
        return False


def _pin(need: Need, needs: Needs, red: Red, facts: Facts) -> str:
    """What the matrix knows to be needed, and what is there instead."""
    library = next((row for row in needs.library if row.id == need.of), None)
    package = need.of
    if library is not None:
        of_cuda = (name for name in library.distributions if name.endswith(f"-cu{cuda_major(red.receipt)}"))
        package = next(of_cuda, library.distributions[0])
    has = ", ".join(map(str, _versions(need.of, red.receipt)))
    copies = [copy for copy in second_copies(red.receipt, loaded_as(need.of)) if copy.name == need.of]
    second = "".join(f"; a second copy is mapped: remove {', '.join(copy.others)}" for copy in copies)
    pinned = need.kind in ("library", "distribution")
    why = f"Transformer Engine {need.te} needs it: {need.says}" if pinned else need.says
    return f"pin {package}{need.version} ({has} is loaded{second}; {why}), or {facts.way_back}"


def _package_name(component: str, receipt: Receipt) -> str:
    """The distribution that brings a component, for the CUDA of a receipt; its own name where none is known.

    NVIDIA ships nvidia-cudnn-cu12 and -cu13, and since CUDA 13 nvidia-cublas without a suffix.
    """
    package, cuda = component_named(component).package, cuda_major(receipt)
    suffix = f"-cu{cuda}" if cuda and int(cuda) < 13 else ""
    return package.replace("{-cuda}", suffix).replace("{cuda}", cuda or "12 (or -cu13)") or component


def _environment(red: Red, diagnosis: Diagnosis, facts: Facts) -> str:
    component, receipt = diagnosis.component, red.receipt
    row = component_named(component)
    if component and row.advice:
        return f"{row.advice}{_detail(component, red)}, or {facts.way_back}"
    version, package = version_of(component, receipt), _package_name(component, receipt)
    said = red.raised.text if red.raised else ""
    if diagnosis.missing and "open shared object" in receipt.reason + said:
        return f"install {package}: it brings {diagnosis.missing}, which the loader does not find; or {facts.way_back}"
    if red.raised is not None and red.raised.kind == "ModuleNotFoundError":
        return f"pip install {package} (`{diagnosis.missing}` is missing), or {facts.way_back}"
    copies = second_copies(receipt, component)
    now = f" (its version is {version} now)" if version else ""
    steps = [
        f"remove the second copy of {copy.name} at {', '.join(copy.others)}, or keep it off LD_LIBRARY_PATH and the "
        f"loader's cache, so that the copy at {copy.kept} is loaded{now}"
        for copy in copies
    ]
    if row.package:
        newer = f"a release newer than {version}" if version else "the release that this one was built for"
        left = "if it still fails, " if copies else ""
        steps.append(f"{left}pin {package} to {newer} (this Transformer Engine was built against another one)")
    elif component:
        steps.append(f"use the {component} that this release was made for{f', not {version}' if version else ''}")
    steps += [
        f"put {moved.name} back to {moved.before} (it is {moved.after} now) to tell it from the release"
        for moved in facts.versions
        if component and moved.before and moved.after and component in (loaded_as(moved.name), moved.name)
    ][:1]
    ended = red.raised.kind if red.raised else "the failure"
    nothing = f"read the log beside the receipt: {ended} comes from outside the process (memory, a scheduler)"
    return f"{'; '.join(steps or [nothing])}; or {facts.way_back}"


def _detail(component: str, red: Red) -> str:
    """What the receipt adds to the advice on a component, in parentheses."""
    receipt, machine = red.receipt, red.receipt.machine
    if component == "second CUDA runtime":
        copies = [path for second in second_copies(receipt, "CUDA runtime") for path in second.others]
        named = re.findall(r"/\S+?libcudart\S*?\.so[.\d]*", red.raised.text if red.raised else "")
        at = ", ".join(dict.fromkeys(copies or named))
        return f" (at {at or 'a path of LD_LIBRARY_PATH or site-packages'})"
    if component == "driver":
        return f" (driver {machine.driver or 'unknown'}, CUDA {machine.cuda or 'unknown'})"
    if component == "file permissions":
        return f" (`{red.raised.line[:120] if red.raised else ''}`)"
    return ""


def _binary(red: Red, diagnosis: Diagnosis, facts: Facts) -> str:
    component, receipt, missing = diagnosis.component, red.receipt, diagnosis.missing
    package, version = _package_name(component, receipt), version_of(component, receipt)
    torch = receipt.machine.torch or "as it is here"
    has = f" ({version} is loaded)" if version else ""
    if component == "torch ABI":
        step = f"rebuild the extension against torch {torch} (it was built for another one)"
    elif component == "GPU architecture":
        gpu = f"sm_{receipt.machine.capability.replace('.', '')}" if receipt.machine.capability else "this GPU"
        step = f"rebuild Transformer Engine with NVTE_CUDA_ARCHS for {gpu}"
    elif component and missing:
        step = (
            f"pin {package} to the release that this Transformer Engine was built for, one that has {missing}{has}; or "
            "rebuild Transformer Engine against yours"
        )
    elif component == "DeepGEMM":
        step = f"use a DeepGEMM that was built for torch {torch}"
    elif component:
        step = f"reinstall {package} for this stack{has}"
    elif missing:
        step = (
            "install sources, core library and torch extension of one release (uninstall all parts of "
            f"transformer-engine first): {missing} is missing between them;"
        )
    else:
        return _ended(red, release_of({red.module: receipt}) or facts.after, facts)
    return f"{step}{'' if step.endswith(';') else ','} or {facts.way_back}"


def _ended(red: Red, release: str, facts: Facts) -> str:
    """A process that ended, or an import, and nothing says by what."""
    receipt = red.receipt
    if receipt.outcome is Outcome.IMPORT_ERROR:
        return (
            f"reinstall sources, core library and torch extension of {release} as one (uninstall all parts of "
            f"transformer-engine first): its import fails; or {facts.way_back}"
        )
    if red.raised is not None and red.raised.kind.startswith("exit status"):
        return (
            f"read the log beside the receipt of {receipt.cell}: the process ended itself ({red.raised.kind}) and "
            f"raised nothing; {facts.way_back} until then"
        )
    return (
        f"rebuild the extension of {release} against torch {receipt.machine.torch or 'as it is here'} and run the cell "
        f"again with CUDA_LAUNCH_BLOCKING=1 to see the kernel; {facts.way_back} until then"
    )


def _api(red: Red, diagnosis: Diagnosis, facts: Facts) -> str:
    said, raised = red.raised.text if red.raised else "", red.raised
    until = f"{facts.way_back} until then"
    if diagnosis.component and diagnosis.component != TORCH:
        package = _package_name(diagnosis.component, red.receipt)
        return f"pin {package} to the version that this release was made for, or {facts.way_back}"
    if raised is not None and _OWN_FAULT.match(raised.line) and (frame := raised.frame_of_te):
        return (
            f"install all parts of {release_of({red.module: red.receipt}) or facts.after} anew as one (it is raised in "
            f"{frame}, not by a call of the bridge), and report it to Transformer Engine if it stays; {until}"
        )
    static = f"`te_canary -- {' '.join(facts.releases or ('OLD', 'NEW'))} --tiers static` names the new way; {until}"
    file = _bridge_file(red, facts)
    if change := _what_changed(red, diagnosis.missing):
        return f"{file}: {change}; {static}"
    if red.receipt.outcome is Outcome.IMPORT_ERROR:
        asked = " ".join(said.split())[:120]
        return f"do what Transformer Engine asks for where it is imported (`{asked}`), or {facts.way_back}"
    contract = next((check.name for check in red.checks if check.kind is CheckKind.CONTRACT), "")
    about = f"`{contract}` no longer holds" if contract and raised is None else "what is passed is refused now"
    return f"{file}: {about}; adapt the call; {static}"


def _what_changed(red: Red, name: str) -> str:
    """What a call of the bridge meets that changed, and what to do; empty where nothing shows it."""
    said = red.raised.text if red.raised else ""
    called = re.match(r"([\w.]+)\(\)", said)
    whom = f" by {called[1]}" if called else ""
    if "unexpected keyword" in said:
        return f"keyword `{name}` was renamed or removed{whom}: pass its new name"
    if re.search(r"missing \d+ required", said):
        return f"argument `{name}` is required now{whom}: pass it"
    if re.search(r"'(?:tuple|NoneType)' object (?:has no|is not)|values? to unpack|cannot unpack", said):
        return f"the call returns something else now (`{' '.join(said.split())[:120]}`): take it as it comes"
    if red.raised is not None and red.raised.kind == "TypeError":
        return f"the call no longer fits{whom}"
    return f"`{name}` was moved, renamed or removed: take it from its new place" if name else ""


def _bridge_file(red: Red, facts: Facts) -> str:
    if red.raised is not None and red.raised.kind == "VendorEntryMissing":
        return "bridge/imports.py"  # where every name of Transformer Engine is written
    inner = red.raised.bridge[-1].partition(" in ")[0] if red.raised and red.raised.bridge else ""
    return inner or next(iter(facts.files), f"bridge/{red.module}.py")


def _numerics(red: Red, diagnosis: Diagnosis, facts: Facts) -> str:
    check = next((one.name for one in red.checks if one.kind is CheckKind.NUMBERS), "the failed check")
    paths = ", ".join(dict.fromkeys((red.module, *facts.cascades)))
    return (
        f"{facts.way_back}, or take the native path of {paths}, until `{check}` is in its bounds again; report the "
        f"check with its receipt to {diagnosis.component or 'Transformer Engine'}"
        f"{'' if diagnosis.component else facts.search(red.module)}"
    )


def _silent_fallback(red: Red, _: Diagnosis, facts: Facts) -> str:
    why = next((reason for row in red.fallbacks for reason in row.reasons), "")
    fell = {check.name for check in red.checks if check.kind is CheckKind.BACKEND}
    said = next((" ".join(one.detail.split()) for one in red.receipt.checks if one.name in fell and one.detail), "")
    seen = f"it was passed over because {why}" if why else said or "nothing says why another path ran"
    return f"do not rely on the speed or precision of {red.module}: {seen}. Mend that, or {facts.way_back}"


def _performance(red: Red, _: Diagnosis, facts: Facts) -> str:
    if kept := next((check.name for check in red.checks if check.kind is CheckKind.MEMORY), ""):
        return (
            f"{facts.way_back}, or take the native path of {red.module}, until `{kept}` is in its bound again: memory "
            f"grows with every step, and a long run ends without any{facts.search(red.module)}"
        )
    where = f" (it was in {red.raised.frame})" if red.raised and red.raised.frame else ""
    return (
        f"run {red.receipt.cell} alone with a longer --limit to tell slow from hung{where}, and read the log beside "
        f"the receipt; {facts.way_back} until then"
    )


_STEPS: Final[dict[Cause, Callable[[Red, Diagnosis, Facts], str]]] = {
    Cause.ENVIRONMENT: _environment, Cause.BINARY: _binary, Cause.API: _api, Cause.NUMERICS: _numerics,
    Cause.SILENT_FALLBACK: _silent_fallback, Cause.PERFORMANCE: _performance,
}  # fmt: skip
