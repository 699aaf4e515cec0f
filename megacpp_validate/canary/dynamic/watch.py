"""Which releases are new, which were withdrawn, and against which one each is judged. Pure: no network, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packaging.version import Version

from ..firewall.result import FirewallOutcome
from .upgrade_result import UpgradeResult
from .watch_result import GpuStep, Listed, Standing, WatchedRelease, WatchState

OPEN, CLOSED, MISSING = 0, 1, 4  # as exit codes


class IndexNotBelieved(RuntimeError):
    """The index answers, and what it says cannot be so."""


@dataclass(frozen=True)
class WatchPlan:
    """What one run has to do.

    Attributes:
        state: everything that is known before anything is judged; it may be kept at once.
        judge: releases to judge, oldest first.
        changed: releases of which the index says something else than before, or of which something is untold.
    """

    state: WatchState
    judge: tuple[WatchedRelease, ...]
    changed: tuple[WatchedRelease, ...]


def plan_watch(
    listed: Sequence[Listed], state: WatchState | None, *, pinned: str, prereleases: bool, distribution: str, now: str
) -> WatchPlan:
    """Hold what the index lists against what is known.

    A first run takes releases up to the pinned one for known. From then on whatever was not there before is new, a
    patch of an older series too. What waits or was left out is looked at again; what is judged never is.

    Args:
        listed: releases on the index.
        state: what is known; None in a first run.
        pinned: the release that is in production.
        prereleases: whether they are judged.
        distribution: whose releases.
        now: ISO 8601.

    Raises:
        IndexNotBelieved: the pinned release is not listed: an answer that is cut short would withdraw everything else.
    """
    found = {Version(row.version): row for row in listed}
    if Version(pinned) not in found:
        raise IndexNotBelieved(
            f"the index lists {len(found)} release(s) of {distribution}, and not {pinned}, which is pinned. Likely "
            "cause: a mirror that holds a part, or an answer that was cut short. Next step: look at `pip config list`; "
            "nothing was changed."
        )
    known = {Version(row.version): row for row in state.releases} if state else {}
    rows: dict[Version, WatchedRelease] = {}
    for version in sorted({*found, *known}):
        before, here = known.get(version), found.get(version)
        if before is not None and before.standing in (Standing.KNOWN, Standing.JUDGED):
            rows[version] = before.model_copy(update={"withdrawn": _say_withdrawn(before, here)})
        elif here is None:
            assert before is not None
            rows[version] = before.model_copy(
                update={"standing": Standing.LEFT_OUT, "reason": "deleted from the index before it was judged"}
            )
        else:
            first = state is None and version <= Version(pinned)
            rows[version] = _look_at(here, before, known=first, prereleases=prereleases, now=now)
    order = tuple(rows.values())
    return WatchPlan(
        state=WatchState(distribution=distribution, releases=order),
        judge=tuple(row for row in order if row.standing is Standing.WAITING and not row.reason),
        changed=tuple(row for row in order if row.standing is not Standing.KNOWN or row.withdrawn)
        if state is None
        else tuple(row for version, row in rows.items() if row != known.get(version) or row.untold),
    )


def _look_at(
    here: Listed, before: WatchedRelease | None, *, known: bool, prereleases: bool, now: str
) -> WatchedRelease:
    """A release that nobody has judged; one that is to be judged now waits without a reason."""
    version = Version(here.version)
    standing, reason = Standing.WAITING, ""
    if known:
        standing = Standing.KNOWN
    elif version.is_prerelease and not prereleases:
        standing, reason = Standing.LEFT_OUT, "a pre-release, which the rule leaves out"
    elif here.yanked is not None:
        standing, reason = Standing.LEFT_OUT, f"yanked before it was judged: {here.yanked or 'no reason given'}"
    elif not here.has_wheel:
        reason = "there is no pure-Python wheel of it yet"
    withdrawn = f"yanked: {here.yanked or 'no reason given'}" if known and here.yanked is not None else ""
    return WatchedRelease(
        version=here.version,
        standing=standing,
        first_seen=before.first_seen if before else now,
        reason=reason,
        withdrawn=withdrawn,
        wheel_sha256=here.wheel_sha256,
    )


def _say_withdrawn(before: WatchedRelease, here: Listed | None) -> str:
    if here is None:
        return "deleted from the index"
    if here.yanked is not None:
        return f"yanked: {here.yanked or 'no reason given'}"
    if before.wheel_sha256 and here.wheel_sha256 and before.wheel_sha256 != here.wheel_sha256:
        return f"its wheel is another file than before (sha256 {here.wheel_sha256}): not the one that is known"
    return ""


def decide_release(result: UpgradeResult, release: str) -> tuple[int, str]:
    """The verdict on a release as an exit code, and why there is none where that is so.

    The firewall tier damages installs of releases that were there before. Where it fails on those, the bridge, this
    host or its load is at fault, and no new release is to be blamed: there is no whole answer, and it is made again.
    """
    cases = result.firewall.cases if result.firewall is not None else ()
    failed = [case for case in cases if case.outcome is FirewallOutcome.FAIL]
    if any(step.breaks for step in result.static) or any(case.release == release for case in failed):
        return CLOSED, ""
    if failed:
        named = ", ".join(f"{case.case} ({case.release})" for case in failed)
        return (
            MISSING,
            f"the import firewall fails on installs of other releases: {named}. That is not {release}'s doing",
        )
    if lost := [case.case for case in cases if case.outcome is FirewallOutcome.NOT_RUN]:
        return MISSING, f"the import firewall did not run {', '.join(lost)}"
    return OPEN, ""


def choose_last_good(state: WatchState, pinned: str, new: str) -> str:
    """The newest release before `new` that is known to be good: the pinned one, or one that was open on a GPU, too.

    A release that is older than all of these is judged against the pinned one.
    """
    good = [row.version for row in state.releases if row.code == OPEN == row.gpu_code and not row.withdrawn]
    below = [name for name in (pinned, *good) if Version(name) < Version(new)]
    return max(below, key=Version, default=pinned)


def plan_gpu_steps(state: WatchState, targets: Sequence[str]) -> tuple[GpuStep, ...]:
    """Judged releases that no machine with a GPU has seen, on every target."""
    waiting = [
        row for row in state.releases if row.standing is Standing.JUDGED and row.gpu_code is None and not row.withdrawn
    ]
    return tuple(GpuStep(old=row.against, new=row.version, target=target) for row in waiting for target in targets)


def find_gpu_fault(
    result: UpgradeResult, row: WatchedRelease, *, tool: str, targets: Sequence[str], modules: Sequence[str]
) -> str:
    """Why an answer of the dynamic tier is not one on this release; empty where it is.

    Args:
        result: what came back.
        row: the release, judged.
        tool: name and version of this tool: another may have asked other probes.
        targets: that were asked for.
        modules: ids of the bridge modules, each of which must be in the step.
    """
    if "gpu" not in result.tiers:
        return f"it has the tiers {', '.join(result.tiers) or 'none'}, and not gpu"
    if result.tool != tool:
        return f"it is of {result.tool}, and this is {tool}"
    wanted = [(f"te{row.against}", f"te{row.version}", target) for target in targets]
    found = [(step.before, step.after, step.target) for step in result.steps]
    if sorted(found) != sorted(wanted) or result.target not in targets:
        said = ", ".join(f"{old} -> {new} on {target}" for old, new, target in found) or "no step"
        return f"it has {said}; asked for on {', '.join(targets) or 'no target'}"
    seen = [{change.module for change in step.modules} for step in result.steps]
    lacking = [module for module in modules if not all(module in names for names in seen)]
    return f"nothing was asked of {', '.join(lacking)}" if lacking else ""


def put_release(state: WatchState, row: WatchedRelease) -> WatchState:
    """The state with one release as it is now."""
    others = [other for other in state.releases if other.version != row.version]
    return state.model_copy(
        update={"releases": tuple(sorted([*others, row], key=lambda release: Version(release.version)))}
    )
