"""What was found of an image that is told by its digest: a check a row, each of which can fail."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from ..evidence.values import Frozen


class CheckOutcome(StrEnum):
    """How a check of an image went; worst first."""

    FAIL = "fail"
    NOT_RUN = "not-run"  # never a pass
    PASS = "pass"  # noqa: S105


class ImageCheck(Frozen):
    """One check.

    Attributes:
        name: "digest", "layers", "label lock", "signature", ...
        says: what was found.
        next_step: what to do; empty where it passed.
    """

    name: str
    outcome: CheckOutcome
    says: str
    next_step: str = ""


class ImageVerdict(Frozen):
    """An image, verified.

    Attributes:
        image: "REPOSITORY@sha256:...".
        target: that it says it is for; empty where it does not.
        key: file of the key that should have signed it; empty where none was given.
        checks: in the order in which they depend on each other.
        packages: how many it holds, by kind.
        unknown_licences: packages whose licence nothing says.
    """

    schema_id: Literal["megacpp-validate/image-verify/1"] = "megacpp-validate/image-verify/1"
    tool: str
    image: str
    target: str
    key: str
    checks: tuple[ImageCheck, ...]
    packages: dict[str, int]
    unknown_licences: tuple[str, ...]
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(check.outcome is CheckOutcome.FAIL for check in self.checks)

    @property
    def lacks(self) -> bool:
        """Whether a check was not run."""
        return any(check.outcome is CheckOutcome.NOT_RUN for check in self.checks)
