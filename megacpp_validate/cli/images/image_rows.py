"""What the matrix says of images and stacks, for the verbs of locks, images, bundles and of the supply chain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...catalog.bridge import Catalog, Target, matrix_folder
from ...catalog.images import MACHINES, Base, Image, Images, read_images
from ...catalog.needs import read_needs
from ...environments.plan import find_target
from ...images.bundle.wheels import Machine
from ...images.compatibility import judge_stack
from ...images.fit_result import StackFit
from ...images.pins import FILE, Pins, read_pins
from ...images.plan import find_images
from ...images.stack import Stack


@dataclass(frozen=True)
class ImageRows:
    """The rows of a target.

    Attributes:
        root: of the checkout, where locks lie.
        matrix: folder of the matrix.
    """

    root: Path
    matrix: Path
    images: Images
    target: Target
    image: Image

    @property
    def base(self) -> Base:
        """What it is built on."""
        return self.images.find_base(self.image.base)

    @property
    def machine(self) -> Machine:
        """What its wheels must fit."""
        return Machine(self.base.python, MACHINES[self.image.platform], self.base.glibc)

    @property
    def sources(self) -> dict[str, str]:
        """What is built from source -> commit; Transformer Engine too, which has sources of its own licence."""
        built = {name: self.images.find_source(name).commit for name in self.image.sources}
        return built | ({"transformer-engine": self.image.te} if self.image.te else {})

    def read_pins(self) -> Pins:
        """The digests of bases.

        Raises:
            ImageRefused: the file cannot be read.
        """
        return read_pins(self.root / FILE)


def read_rows(catalog: Catalog, target: str, matrix: Path | None) -> ImageRows:
    """The rows of a target.

    Raises:
        MatrixInvalid: the matrix is wrong.
        UnknownTarget: there is no such target.
        ImageRefused: it has no image.
    """
    row = find_target(catalog, target)
    images = read_images({one.id: one.machine for one in catalog.targets}, matrix, catalog.targets)
    folder = (matrix or matrix_folder()).absolute()
    return ImageRows(folder.parent, folder, images, row, find_images(images, [row.id])[0])


def judge_stacks(
    catalog: Catalog, matrix: Path | None, images: Images, stacks: Iterable[Stack]
) -> tuple[StackFit, ...]:
    """Whether each stack fits, by all rows of the matrix.

    Raises:
        MatrixInvalid: the rows are wrong.
    """
    needs = read_needs([module.id for module in catalog.modules], matrix)
    releases = [stack.te for stack in catalog.stacks]
    return tuple(judge_stack(stack, needs, images.range, releases) for stack in stacks)
