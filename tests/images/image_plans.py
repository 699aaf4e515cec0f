"""The plans of this project's own images, for tests of what is made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.images import read_images
from megacpp_validate.images.pins import FILE, read_pins
from megacpp_validate.images.plan import plan_images
from megacpp_validate.images.plan_result import ImagePlan

ROOT = Path(__file__).resolve().parents[2]


def read_plans(catalog: Catalog, *targets: str, **how: Any) -> tuple[ImagePlan, ...]:
    """The plans of some targets, of all of them without a name."""
    images = read_images({target.id: target.machine for target in catalog.targets})
    rows = [row for row in catalog.targets if not targets or row.id in targets]
    return plan_images(images, read_pins(ROOT / FILE), rows, root=ROOT, **{"mirror": "", **how})
