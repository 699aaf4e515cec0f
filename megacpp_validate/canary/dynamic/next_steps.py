"""What to do about a culprit, in a sentence to act on: the package to pin, the file to mend, the copy to remove.

Versions and paths come from the receipts. Where a row names a package, "{cuda}" is the major version of CUDA: NVIDIA
ships nvidia-cudnn-cu12 and -cu13, and since CUDA 13 nvidia-cublas without a suffix.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ...catalog.needs import Need, Needs
from ...evidence.receipt import Outcome, Receipt
from ...evidence.values import Cause
from .causes import Diagnosis
from .components import TORCH, component_named, loaded_as
from .failed_checks import CheckKind
from .needs import answering, find_need, package_of
from .red import Red
from .upgrade_result import VersionChange
from .versions import cuda_major, release_of, second_copies, version_of

# Raised in Transformer Engine's own code, these are faults of its own, not of what it was handed.
_OWN_FAULT: Final = re.compile(
    r"TypeError: .*(?:unexpected keyword|missing \d+ required|takes .* argument|incompatible function arguments)|"
    r"AttributeError: (?!'NoneType')|"
    r"NameError|UnboundLocalError"
)
# A stack that is a release and nothing else: "te" and a version as PEP 440 writes one.
_RELEASE: Final = re.compile(r"te(\d+(?:\.\d+)*(?:(?:a|b|rc|\.post|\.dev)\d+)*(?:\+[a-z0-9]+(?:[._-][a-z0-9]+)*)?)")


@dataclass(frozen=True)
class Facts:
    """What a step is told of.

    Attributes:
        before, after: names of the stacks.
        held: the culprit held before.
        same_release: both sides have one release of Transformer Engine.
        versions: what else changed.
        files: of the bridge module: "bridge/attention.py".
        cascades: modules that are red by the culprit.
        needs: what releases are known to need; None where that is not told.
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


def next_step(red: Red, diagnosis: Diagnosis, facts: Facts) -> str:
    """What to do about a culprit that is red."""
    if facts.same_release and not red.fits_no_call and (moved := _moved(diagnosis.component, facts)) is not None:
        back = f"put {moved.name} back to {moved.before} (it is {moved.after} now)"
        return f"{back}, or see what its new version changed: Transformer Engine itself is the same on both sides"
    if diagnosis.component not in _WHOLE_SENTENCES and facts.needs is not None and not facts.same_release:
        need = find_need(red, diagnosis, facts.needs)
        if need is not None:
            return _pin(need, facts.needs, red, facts)
    return _STEPS[diagnosis.cause](red, diagnosis, facts)


def package_name(component: str, receipt: Receipt) -> str:
    """The distribution that brings a component, for the CUDA of a receipt; its own name where none is known."""
    row, cuda = component_named(component), cuda_major(receipt)
    if row is None or not row.package:
        return component
    suffix = f"-cu{cuda}" if cuda and int(cuda) < 13 else ""
    return row.package.replace("{-cuda}", suffix).replace("{cuda}", cuda or "12 (or -cu13)")


def _pin(need: Need, needs: Needs, red: Red, facts: Facts) -> str:
    """What the matrix knows to be needed, and what is there instead."""
    package, has = package_of(need, needs, red.receipt), answering(need, red.receipt)
    there = "answers" if need.kind == "library" and need.of == "libcudnn" else "is loaded"
    library = next((row for row in red.receipt.libraries if row.name == need.of), None)
    copies = [copy for copy in second_copies(red.receipt, loaded_as(need.of)) if library and copy.name == need.of]
    second = "".join(f"; a second copy is mapped: remove {', '.join(copy.others)}" for copy in copies)
    why = (
        f"Transformer Engine {need.te} needs it: {need.says}" if need.kind in ("library", "distribution") else need.says
    )
    return f"pin {package}{need.version} ({has} {there}{second}; {why}), or {facts.way_back}"


def _moved(component: str, facts: Facts) -> VersionChange | None:
    rows = [row for row in facts.versions if row.before and row.after]
    mine = [row for row in rows if component in (loaded_as(row.name), row.name)]
    return next(iter(mine), rows[0] if len(rows) == 1 else None)


def _environment(red: Red, diagnosis: Diagnosis, facts: Facts) -> str:
    component, receipt = diagnosis.component, red.receipt
    if (whole := _WHOLE_SENTENCES.get(component)) is not None:
        return f"{whole(red)}, or {facts.way_back}"
    version, package = version_of(component, receipt), package_name(component, receipt)
    row = component_named(component)
    if diagnosis.missing and "open shared object" in receipt.reason + (red.raised.text if red.raised else ""):
        return (
            f"install {package}: it brings {diagnosis.missing}, which is not on the loader's path; or {facts.way_back}"
        )
    if red.raised is not None and red.raised.kind == "ModuleNotFoundError":
        return f"pip install {package} (`{diagnosis.missing}` is missing), or {facts.way_back}"
    copies = second_copies(receipt, component)
    steps = [
        f"remove the second copy of {copy.name} at {', '.join(copy.others)}, or keep it off LD_LIBRARY_PATH and the "
        f"loader's cache, so that the one at {copy.kept} is whole"
        + (f" (what answers now says that it is {version})" if version else "")
        for copy in copies
    ]
    if row is not None and row.package:
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
    if not steps:
        ended = red.raised.kind if red.raised else "it"
        steps.append(
            f"look at the log beside the receipt: {ended} comes from outside the process (memory, a scheduler)"
        )
    return f"{'; '.join(steps)}; or {facts.way_back}"


def _binary(red: Red, diagnosis: Diagnosis, facts: Facts) -> str:
    component, receipt = diagnosis.component, red.receipt
    version, release = version_of(component, receipt), release_of({red.module: receipt}) or facts.after
    has = f" ({version} is loaded)" if version else ""
    if component == "torch ABI":
        torch = receipt.machine.torch or "the torch that is here"
        return f"rebuild the extension against torch {torch} (it was built for another one), or {facts.way_back}"
    if component == "GPU architecture":
        gpu = f"sm_{receipt.machine.capability.replace('.', '')}" if receipt.machine.capability else "this GPU"
        return f"rebuild Transformer Engine with NVTE_CUDA_ARCHS for {gpu}, or {facts.way_back}"
    if component and diagnosis.missing:
        package = package_name(component, receipt)
        return (
            f"pin {package} to the release that this Transformer Engine was built for: one that has "
            f"{diagnosis.missing}, newer than what is here{has}; or rebuild Transformer Engine against yours, or "
            f"{facts.way_back}"
        )
    if component == "DeepGEMM":
        return (
            f"use a DeepGEMM that was built for torch {receipt.machine.torch or 'as it is here'}, or {facts.way_back}"
        )
    if component:
        return f"reinstall {package_name(component, receipt)} for this stack{has}, or {facts.way_back}"
    if diagnosis.missing:
        return (
            f"install sources, core library and torch extension of one release (uninstall all parts of "
            f"transformer-engine first): {diagnosis.missing} is missing between them; or {facts.way_back}"
        )
    return _ended(red, release, facts)


def _ended(red: Red, release: str, facts: Facts) -> str:
    """A process that ended, or an import, and nothing says by what."""
    receipt = red.receipt
    if receipt.outcome is Outcome.IMPORT_ERROR:
        return (
            f"reinstall sources, core library and torch extension of {release} as one (uninstall all parts of "
            f"transformer-engine first): it does not come through its import; or {facts.way_back}"
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
    file, said = _bridge_file(red, facts), red.raised.text if red.raised else ""
    name, ends = diagnosis.missing, " ".join(facts.releases or ("OLD", "NEW"))
    static = f"`te_canary -- {ends} --tiers static` names the new way; {facts.way_back} until then"
    if diagnosis.component and diagnosis.component != TORCH:
        package = package_name(diagnosis.component, red.receipt)
        return f"pin {package} to the version that this release was made for, or {facts.way_back}"
    if red.raised is not None and _OWN_FAULT.match(red.raised.line) and (frame := red.raised.frame_of_te):
        return (
            f"install all parts of {release_of({red.module: red.receipt}) or facts.after} anew as one (it is raised in "
            f"{frame}, not by a call of the bridge), and report it to Transformer Engine if it stays; "
            f"{facts.way_back} until then"
        )
    if change := _what_changed(red, name):
        return f"{file}: {change}; {static}"
    if red.receipt.outcome is Outcome.IMPORT_ERROR:
        return (
            f"do what Transformer Engine asks for where it is imported (`{' '.join(said.split())[:120]}`), "
            f"or {facts.way_back}"
        )
    contract = next((check.name for check in red.checks if check.kind is CheckKind.CONTRACT), "")
    about = f"`{contract}` no longer holds" if contract and red.raised is None else "what is passed is refused now"
    return f"{file}: {about}; adapt the call; {static}"


def _what_changed(red: Red, name: str) -> str:
    """What a call of the bridge meets that is not as it was, and what to do; empty where nothing tells."""
    said = red.raised.text if red.raised else ""
    if "unexpected keyword" in said:
        return f"keyword `{name}` was renamed or removed{_of_whom(said)}: pass its new name"
    if re.search(r"missing \d+ required", said):
        return f"argument `{name}` is required now{_of_whom(said)}: pass it"
    if re.search(r"'(?:tuple|NoneType)' object (?:has no|is not)|values? to unpack|cannot unpack", said):
        return f"what a call gives back is something else now (`{' '.join(said.split())[:120]}`): take it as it comes"
    if red.raised is not None and red.raised.kind == "TypeError":
        return f"the call no longer fits{_of_whom(said)}"
    return f"`{name}` was moved, renamed or removed: take it from its new place" if name else ""


def _numerics(red: Red, diagnosis: Diagnosis, facts: Facts) -> str:
    check = next((one.name for one in red.checks if one.kind is CheckKind.NUMBERS), "the failed check")
    paths = ", ".join(dict.fromkeys((red.module, *facts.cascades)))
    whose = diagnosis.component or "Transformer Engine"
    return (
        f"{facts.way_back}, or take the native path of {paths}, until `{check}` is in its bounds again; report "
        f"the check with its receipt to {whose}{'' if diagnosis.component else _search(red.module, facts)}"
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
            f"grows with every step, and a long run ends without any{_search(red.module, facts)}"
        )
    where = f" (it was in {red.raised.frame})" if red.raised and red.raised.frame else ""
    return (
        f"run {red.receipt.cell} alone with a longer --limit to tell slow from hung{where}, and read the log beside "
        f"the receipt; {facts.way_back} until then"
    )


def slow_step(module: str, component: str, facts: Facts, slowest: str) -> str:
    """What to do about a module that became slower, or a component that slows it."""
    if component and (moved := _moved(component, facts)) is not None:
        return f"put {moved.name} back to {moved.before} (it is {moved.after} now), or accept {slowest}"
    return f"{facts.way_back}, or accept {slowest}{_search(module, facts)}"


def _search(module: str, facts: Facts) -> str:
    """How to find the release between; empty where the two sides are not two releases."""
    if facts.releases is None:
        return ""
    return f"; `te_bisect -- {' '.join(facts.releases)} --module {module}` finds the release that brought it"


def _bridge_file(red: Red, facts: Facts) -> str:
    if red.raised is not None and red.raised.kind == "VendorEntryMissing":
        return "bridge/imports.py"  # where every name of Transformer Engine is written
    inner = red.raised.bridge[-1].partition(" in ")[0] if red.raised and red.raised.bridge else ""
    return inner or next(iter(facts.files), f"bridge/{red.module}.py")


def _of_whom(said: str) -> str:
    found = re.match(r"([\w.]+)\(\)", said)
    return f" by {found[1]}" if found else ""


def _second_runtime(red: Red) -> str:
    copies = [path for second in second_copies(red.receipt, "CUDA runtime") for path in second.others]
    named = re.findall(r"/\S+?libcudart\S*?\.so[.\d]*", red.raised.text if red.raised else "")
    at = ", ".join(dict.fromkeys(copies or named)) or "wherever LD_LIBRARY_PATH or site-packages has it"
    return f"remove the second copy of libcudart at {at}, so that one CUDA runtime is left"


def _driver(red: Red) -> str:
    machine = red.receipt.machine
    return (
        f"upgrade the NVIDIA driver (it is {machine.driver or 'not known'}) to one for CUDA "
        f"{machine.cuda or 'as built'}, or use the build for an older CUDA"
    )


_WHOLE_SENTENCES: Final[dict[str, Callable[[Red], str]]] = {
    "second CUDA runtime": _second_runtime,
    "driver": _driver,
    "GPU memory": lambda _: (
        "run the cell with less beside it on the GPU (lower --jobs); nothing is known of the release"
    ),
    "host memory": lambda _: "run the cell with less beside it on this host (lower --jobs)",
    "host limits": lambda _: "raise what this user may have (ulimit -u and -n, pids of the container or of the job)",
    "shared memory": lambda _: "give the process more of /dev/shm (docker run --shm-size or --ipc=host)",
    "GPU hardware": lambda _: "run the cell on another GPU: this one reports a fault of its own (nvidia-smi -q, dmesg)",
    "disk": lambda _: (
        "give the process caches that it can write, with room in them (HOME, TMPDIR, TRITON_CACHE_DIR, "
        "TORCH_EXTENSIONS_DIR)"
    ),
    "file permissions": lambda red: (
        f"let the process read and write what it is refused (`{red.raised.line[:120] if red.raised else ''}`): its "
        "owner, its mode, the groups of a device file, or HOME and TRITON_CACHE_DIR for a cache"
    ),
    "compiler": lambda _: "install the compiler that is asked for: what compiles when it is run builds with it",
    "Linux libraries": lambda _: "use a newer base image, or build the extension on this one",
}
_STEPS: Final[dict[Cause, Callable[[Red, Diagnosis, Facts], str]]] = {
    Cause.ENVIRONMENT: _environment,
    Cause.BINARY: _binary,
    Cause.API: _api,
    Cause.NUMERICS: _numerics,
    Cause.SILENT_FALLBACK: _silent_fallback,
    Cause.PERFORMANCE: _performance,
}
