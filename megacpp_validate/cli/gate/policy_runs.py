"""The verb of the policy of low precision: what it decides, and the exit code of each answer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path

import typer

from ...catalog.bridge import read_catalog
from ...catalog.fp8 import read_fp8_policy
from ...gate.fp8_policy import decide_preset, see_waivers
from ...gate.policy_result import PolicyResult
from ..app import TOOL, Exit, Format, foreseen, refuse
from ..telling import tell


class UnknownPreset(ValueError):
    """A preset that the matrix has no row for."""


@foreseen({UnknownPreset: Exit.WRONG_ARGUMENTS})
def run_policy(
    matrix: Path | None, today: date, presets: Sequence[str] | None, fmt: Format, output: Path | None
) -> None:
    """Decide and tell; closed where policy and presets disagree."""
    if presets is not None and not presets:
        refuse("no preset is selected. Next step: name one, or leave --preset out for all.", Exit.NOTHING_SELECTED)
    result = decide_policy(matrix, today, presets)
    tell(result, fmt, output)
    raise typer.Exit(Exit.OPEN if result.holds else Exit.CLOSED)


def read_today() -> date:
    """The day on which waivers are held to their expiry: the same one wherever it is asked for."""
    return datetime.now(UTC).date()


def decide_policy(matrix: Path | None, today: date, presets: Sequence[str] | None = None) -> PolicyResult:
    """What the policy says of presets.

    Args:
        matrix: its folder; the project's own without it.
        today: the day on which waivers are held to their expiry.
        presets: those to look at; all without it.

    Raises:
        MatrixInvalid: with every fault of the files.
        UnknownPreset: one that there is no row for.
    """
    policy = read_fp8_policy(read_catalog(matrix).targets, matrix)
    known = {preset.id: preset for preset in policy.presets}
    if unknown := [name for name in presets or () if name not in known]:
        raise UnknownPreset(
            f"there is no preset {', '.join(map(repr, unknown))}. Next step: choose from {', '.join(known)}, or add a "
            "row to fp8_presets.toml."
        )
    chosen = [known[name] for name in dict.fromkeys(known if presets is None else presets)]
    decisions = tuple(decide_preset(preset, policy.rules, policy.waivers, today) for preset in chosen)
    return PolicyResult(
        tool=TOOL,
        today=today,
        rules=len(policy.rules.rules),
        presets=decisions,
        waivers=see_waivers(policy.waivers, decisions, today),
    )
