"""`fits`: whether the stack of an image, or one that is given in words, fits a release of Transformer Engine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from ..catalog.bridge import Catalog, matrix_folder
from ..catalog.images import Image, Images, read_images
from ..catalog.needs import read_needs
from ..environments.fits import FitVerdict, Part, Stack, StackFit, judge_stack, stack_of_words
from ..errors import Exit, exit_for
from ..evidence.values import Frozen
from .locks import ImageLock, read_image_lock
from .tools import ImageRefused


class FitResult(Frozen):
    """Several stacks."""

    tool: str
    stacks: tuple[StackFit, ...]
    seconds: float = 0.0

    @property
    def exit(self) -> Exit:
        """Closed where something does not fit, incomplete where something is unknown."""
        unknown = any(stack.of(FitVerdict.UNKNOWN) for stack in self.stacks)
        return exit_for(breaks=any(stack.refused for stack in self.stacks), lacks=unknown)


def run_fits(
    catalog: Catalog, matrix: Path | None, te: str | None, parts: Iterable[str], target: str, tool: str
) -> FitResult:
    """Judge a stack that is given in words; without a release, the stack of every image.

    Raises:
        ImageRefused: a word, a target or a lock is wrong.
    """
    started = time.monotonic()
    images = read_all_images(catalog, matrix)
    if target and target not in {row.id for row in catalog.targets}:
        known = ", ".join(row.id for row in catalog.targets)
        raise ImageRefused(f"there is no target {target!r}. Next step: choose one of {known}.")
    if te is not None:  # an empty one, of a variable without a value, is no question about the images
        stacks = [stack_of_words(te, parts, read_needs([one.id for one in catalog.modules], matrix), target)]
    else:
        root = (matrix or matrix_folder()).absolute().parent
        chosen = [image for image in images.image if image.te and target in ("", image.target)]
        stacks = [stack_of_image(images, image, read_image_lock(root / image.lock)) for image in chosen]
    found = judge_stacks(catalog, matrix, images, stacks)
    return FitResult(tool=tool, stacks=found, seconds=round(time.monotonic() - started, 3))


def read_all_images(catalog: Catalog, matrix: Path | None) -> Images:
    """The rows of images.toml, checked against the targets."""
    return read_images({target.id: target.machine for target in catalog.targets}, matrix, catalog.targets)


def judge_stacks(
    catalog: Catalog, matrix: Path | None, images: Images, stacks: Iterable[Stack]
) -> tuple[StackFit, ...]:
    """Whether each stack fits, by all rows of the matrix."""
    needs = read_needs([module.id for module in catalog.modules], matrix)
    releases = [stack.te for stack in catalog.stacks]
    return tuple(judge_stack(stack, needs, images.range, releases) for stack in stacks)


def stack_of_image(images: Images, image: Image, lock: ImageLock | None, own_base: str = "") -> Stack:
    """The stack of an image: its base, less what is removed, and its lock; without a lock what its row pins.

    Args:
        own_base: a base that the caller names: its contents are unknown.
    """
    base, by = images.find_base(image.base), f"base {image.base}"
    rows = [("python", base.python, by), *((name, version, by) for name, version in base.provided.items())]
    rows += [("driver", base.driver_least, f"{by}, the least that runs it")] if base.driver_least else []
    removed = {row.name for row in image.removes}
    rows = [] if own_base else [row for row in rows if row[0] not in removed]
    added = {name: one.version for name, one in lock.packages.items()} if lock else image.pinned
    by = f"lock {image.lock}" if lock else f"row {image.target}"
    rows += [(name, version, by) for name, version in added.items()]
    found = {name: Part(name=name, version=version, brought_by=by) for name, version, by in rows}
    whole = lock is not None and not own_base and not base.distributions  # a base with a stack is never listed whole
    return Stack(image.target, image.te, found, whole, image.target)
