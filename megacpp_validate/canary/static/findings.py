"""Results of the static tier: what it found between two releases of Transformer Engine.

Every value is frozen and goes to JSON and back unchanged. A finding is about one change to one symbol, as one or
more call sites of the bridge consume it; the sentences about it are made in `report.describe.changes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import Field

from ...environments.fits import Fit, FitVerdict
from ...errors import Exit, exit_for
from ...evidence.values import Cause, Frozen, SourceLine


class ChangeKind(StrEnum):
    """What changed. A closed enumeration: a change that fits none of these is not reported as another."""

    REFUSED = "refused"
    ADDED = "added"
    REMOVED = "removed"
    MOVED = "moved"
    RENAMED = "renamed"
    CLASS_BECAME_FUNCTION = "class-became-function"
    NOT_CALLABLE = "not-callable"
    PARAMETER_REMOVED = "parameter-removed"
    PARAMETER_RENAMED = "parameter-renamed"
    PARAMETER_REORDERED = "parameter-reordered"
    PARAMETER_REQUIRED = "parameter-required"
    PARAMETER_KEYWORD_ONLY = "parameter-keyword-only"
    PARAMETER_POSITIONAL_ONLY = "parameter-positional-only"
    DEFAULT_CHANGED = "default-changed"
    DEFAULT_MEANING_CHANGED = "default-meaning-changed"
    RETURN_CHANGED = "return-changed"
    DEPRECATED = "deprecated"
    GUARD_ADDED = "guard-added"
    WARNING_ADDED = "warning-added"
    ATTRIBUTE_REMOVED = "attribute-removed"
    DECORATOR_LOST = "decorator-lost"
    CONTEXT_MANAGER_LOST = "context-manager-lost"
    IMPORT_REQUIREMENT_ADDED = "import-requirement-added"
    NOT_LOADED = "not-loaded"


class Impact(StrEnum):
    """What a change does to the bridge as it is written."""

    BREAKING = "breaking"  # the call or the import as written fails
    RISK = "risk"  # an argument is ignored, a default that it leans on moved, a deprecation, another path is taken
    HARMLESS = "harmless"  # not consumed, or consumed in a way that the change does not touch


class Doubt(StrEnum):
    """Why something that fails as written is a risk and no breakage."""

    CAUGHT = "caught"  # the code goes on: it catches the failure, or only sets what is lost
    GUARDED = "guarded"  # a check of the release decides whether it is reached, and cannot be evaluated


class ModuleVerdict(StrEnum):
    """One bridge module between two releases."""

    BREAKS = "breaks"
    CASCADE = "cascade"  # red by a fault of the import or of the environment, which the first module is blamed for
    RISK = "risk"
    FAILS_BEFORE = "fails-before"  # nothing new, and something in it fails under OLD already
    CLEAN = "clean"


class Finding(Frozen):
    """One change to one symbol, as the bridge consumes it.

    Attributes:
        module: the first of `modules` in dependency order.
        modules: every module with one of the call sites.
        kind: what changed.
        impact: what it does to the bridge.
        cause: class of cause.
        symbol: dotted name as the bridge imports it.
        member: method, attribute or "forward"-like call on it; empty for the symbol itself.
        parameter: name of the parameter or field concerned; empty if none.
        before, after: where it stands in each release; None where it does not.
        call_sites: where the bridge consumes it.
        old, new: the changed text on either side: a default, a signature, a path; of a deprecation or an
            import-time requirement `new` is the notice or what is asked for, of a guard the check.
        suggestion: the likely new name or place; of a guard its message, of an import-time requirement the
            condition under which it is asked for; empty if there is none.
        follows: the bridge already takes the new way by itself (a second path in its accessor or call site).
        doubt: why it is a risk, though the use as written fails.
    """

    module: str
    modules: tuple[str, ...]
    kind: ChangeKind
    impact: Impact
    cause: Cause
    symbol: str
    member: str = ""
    parameter: str = ""
    before: SourceLine | None = None
    after: SourceLine | None = None
    call_sites: tuple[SourceLine, ...] = ()
    old: str = ""
    new: str = ""
    suggestion: str = ""
    follows: bool = False
    doubt: Doubt | None = None


class ModuleResult(Frozen):
    """The verdict on one bridge module, and the module it is filed under if that is another one."""

    module: str
    verdict: ModuleVerdict
    under: str = ""


class ReleaseSource(Frozen):
    """Where the sources of a release came from."""

    version: str
    wheel: str
    sha256: str


class StaticResult(Frozen):
    """The static tier's answer for one pair of releases.

    Attributes:
        library: whose releases, as people call it.
        modules: one row a bridge module, in dependency order.
        findings: breaking first, then risk; harmless ones that touch a consumed symbol last.
        not_consumed: API changes between the two that the bridge does not consume: counted, and listed only with
            `changes_not_consumed` when asked for.
        downgrade: OLD is the newer one.
        source: the source tree that was judged, in words; empty for the bridge of this project.
        not_read: file of the source tree that uses the library -> why it was left out.
        unchanged_faults: uses that already fail in OLD in the same way: not this upgrade's doing.
        rows: file -> module, where a module is more than the file of that name.
        first_uses: module -> the first line that uses Transformer Engine.
        environment: as the caller named it; empty where it is unknown.
        requirements: what NEW needs of the environment and OLD did not, worst first; `breaks` of each are `modules`.
    """

    schema_id: Literal["megacpp-validate/static/1"] = "megacpp-validate/static/1"
    tool: str
    library: str = "Transformer Engine"
    old: ReleaseSource
    new: ReleaseSource
    downgrade: bool
    modules: tuple[ModuleResult, ...]
    findings: tuple[Finding, ...]
    unchanged_faults: tuple[Finding, ...] = ()
    not_consumed: int = 0
    changes_not_consumed: tuple[str, ...] = ()
    not_read: dict[str, str] = Field(default_factory=dict)
    source: str = ""
    environment: str = ""
    requirements: tuple[Fit, ...] = ()
    rows: dict[str, str] = Field(default_factory=dict)
    first_uses: dict[str, SourceLine] = Field(default_factory=dict)

    def requirements_of(self, verdict: FitVerdict) -> tuple[Fit, ...]:
        """The requirements with one verdict."""
        return tuple(fit for fit in self.requirements if fit.verdict is verdict)

    @property
    def breaks(self) -> bool:
        """Whether the step from old to new breaks a use, or a requirement that the environment does not meet does."""
        return any(finding.impact is Impact.BREAKING for finding in self.findings) or bool(
            self.requirements_of(FitVerdict.REFUSED)
        )

    @property
    def lacks(self) -> bool:
        """Whether a file that uses the library is not judged, or the named environment leaves a requirement unknown."""
        return bool(self.not_read or (self.environment and self.requirements_of(FitVerdict.UNKNOWN)))

    @property
    def risks(self) -> bool:
        """Whether a change that the code does not follow yet is a risk to it, or a requirement is unknown."""
        at_risk = any(finding.impact is Impact.RISK and not finding.follows for finding in self.findings)
        return at_risk or bool(self.requirements_of(FitVerdict.UNKNOWN))

    @property
    def exit(self) -> Exit:
        """Closed where something breaks; evidence is missing where `lacks`."""
        return exit_for(breaks=self.breaks, lacks=self.lacks)


class Sweep(Frozen):
    """Every adjacent pair of releases, oldest first; releases that could not be read, with the reason."""

    schema_id: Literal["megacpp-validate/sweep/1"] = "megacpp-validate/sweep/1"
    steps: tuple[StaticResult, ...]
    unreadable: dict[str, str] = Field(default_factory=dict)

    @property
    def exit(self) -> Exit:
        """Open: the grid is history."""
        return Exit.OPEN


@dataclass(frozen=True)
class Change:
    """What a comparison of one use found; the fields are those of `Finding`, and the exception that it `raises`."""

    kind: ChangeKind
    impact: Impact
    cause: Cause = Cause.API
    member: str = ""
    parameter: str = ""
    before: SourceLine | None = None
    after: SourceLine | None = None
    old: str = ""
    new: str = ""
    suggestion: str = ""
    follows: bool = False
    doubt: Doubt | None = None
    raises: str = "TypeError"
