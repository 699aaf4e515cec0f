"""What a release of Transformer Engine needs of its environment, and the release before did not: rows of the matrix."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from ..catalog.bridge import Catalog
from ..catalog.images import Images, Needs, read_images, read_needs
from ..environments.fits import Fit, FitVerdict, Given, Stack, judge_stack, read_given
from ..errors import WrongArguments
from ..evidence.values import read_version


class Requirements:
    """The rows of the matrix, and the environment that they are compared with.

    Args:
        texts: as --env takes them; none where the environment is unknown.
        target: row of targets.toml; empty where unknown.

    Raises:
        WrongArguments: a text names no environment, or a component that no row knows.
    """

    def __init__(self, catalog: Catalog, texts: Sequence[str], matrix: Path | None, target: str = "") -> None:
        self._needs: Needs = read_needs([module.id for module in catalog.modules], matrix)
        images: Images = read_images({row.id: row.machine for row in catalog.targets}, matrix, catalog.targets)
        self._ranges = [row for row in images.range if row.outside == "refused"]
        self._releases = [stack.te for stack in catalog.stacks]
        self.given: Given = read_given(texts, self._needs, images.base, os.environ, target)
        for fit in self._judge(self.given.with_release(self._releases[-1])):
            if fit.need == "no-row":
                raise WrongArguments(
                    f"--env names {fit.component!r}, which no row of the matrix knows. Next step: {fit.next_step}."
                )

    @property
    def shown(self) -> str:
        """The environment as the caller named it; empty for none."""
        return self.given.shown

    def find_new(self, old: str, new: str) -> tuple[Fit, ...]:
        """Requirements that NEW has and OLD had not, compared with the environment, worst first.

        The rows were made from the releases of the matrix. Whether an older OLD had a requirement of the first of them
        is unknown, so that such a requirement is no new one; what the environment does not meet is listed all the same.
        """
        before = {fit.need for fit in self._judge(self.given.with_release(old))}
        first = min(self._releases, key=Version)
        is_older = (version := read_version(old)) is not None and version < Version(first)
        of_first = {fit.need for fit in self._judge(self.given.with_release(first))} if is_older else set()
        after = [fit for fit in self._judge(self.given.with_release(new)) if fit.need not in before]
        kept = (fit for fit in after if fit.need not in of_first or fit.verdict is FitVerdict.REFUSED)
        return tuple(map(_name_option, kept))

    def _judge(self, stack: Stack) -> tuple[Fit, ...]:
        return judge_stack(stack, self._needs, self._ranges, self._releases).fits


def _name_option(fit: Fit) -> Fit:
    """An unknown requirement, with the option that settles it."""
    if fit.verdict is not FitVerdict.UNKNOWN or fit.need == "release":
        return fit
    return fit.model_copy(
        update={"next_step": f"give --env {fit.component}=VERSION; if it is not met: {fit.next_step}"}
    )
