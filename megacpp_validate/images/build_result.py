"""What is known of images before, while and after they are built. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .plan_result import ImagePlan


class LintOutcome(StrEnum):
    """How a linter ended. `NOT_RUN` is never clean."""

    CLEAN = "clean"
    FAULTS = "faults"
    NOT_RUN = "not-run"


@dataclass(frozen=True)
class Lint:
    """What one linter says of the recipe.

    Attributes:
        linter: its name, with the version where it is known.
        subject: what it read.
        faults: one a line; of a linter that did not run, why.
    """

    linter: str
    subject: str
    outcome: LintOutcome
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """Why a target is not built: a sentence, with the next step in it."""

    target: str
    why: str


@dataclass(frozen=True)
class ImagePlans:
    """What would be built.

    Attributes:
        tool: that planned.
        plans: of each image that can be planned.
        refused: targets that are not built, and why.
        warned: what works with less.
        lints: of the recipe.
        pins_hash: SHA-256 of the file of pins; empty where there is none.
    """

    tool: str
    plans: tuple[ImagePlan, ...]
    refused: tuple[Refused, ...]
    warned: tuple[Refused, ...]
    lints: tuple[Lint, ...]
    pins_hash: str
    schema_id: str = "megacpp-validate/image-plans/1"

    @property
    def breaks(self) -> bool:
        """Whether a target is refused, or a linter finds a fault."""
        return bool(self.refused) or any(lint.outcome is LintOutcome.FAULTS for lint in self.lints)

    @property
    def lacks(self) -> bool:
        """Whether a linter could not be asked."""
        return any(lint.outcome is LintOutcome.NOT_RUN for lint in self.lints)


@dataclass(frozen=True)
class BuildStep:
    """A step of a build: seconds, and whether it was taken from the engine's cache."""

    name: str
    seconds: float
    cached: bool


@dataclass(frozen=True)
class ImageBuild:
    """An image that was built: the receipt.

    Attributes:
        tool: that built it.
        target, platform: what it is for.
        name: repository and tag.
        digest: of its index, by which it is pulled; it names the image and its provenance.
        pushed: whether the registry in the name has it.
        base: what it was built on, by its own registry's name and digest.
        base_verified: day on which a registry gave that digest; empty where none has.
        lock, lock_hash, pins_hash: of what it was made from.
        revision: commit of the project, with "-dirty" where files differ; empty outside of a checkout.
        engine, buildx: versions.
        steps: in the order in which they ended.
        started: UTC, ISO 8601.
        seconds: of the whole build, with the push.
    """

    tool: str
    target: str
    platform: str
    name: str
    digest: str
    pushed: bool
    base: str
    base_verified: str
    lock: str
    lock_hash: str
    pins_hash: str
    revision: str
    engine: str
    buildx: str
    steps: tuple[BuildStep, ...]
    started: str
    seconds: float
    schema_id: str = "megacpp-validate/image-build/1"

    @property
    def reference(self) -> str:
        """The image by its digest: repository and digest, without the tag."""
        repository, colon, tag = self.name.rpartition(":")
        return f"{repository if colon and '/' not in tag else self.name}@{self.digest}"


@dataclass(frozen=True)
class Proof:
    """One thing that was done with an image, and whether it went as it should.

    Attributes:
        deed: what was done, as a sentence.
        holds: whether it did.
        seen: what was seen.
        seconds: that it took.
    """

    deed: str
    holds: bool
    seen: str
    seconds: float


@dataclass(frozen=True)
class ImageProof:
    """An image that was pushed, pulled by its digest, and run without a network.

    Attributes:
        build: that was proved.
        proofs: in order; what follows one that does not hold was done all the same where it could be.
    """

    tool: str
    build: ImageBuild
    proofs: tuple[Proof, ...]
    schema_id: str = "megacpp-validate/image-proof/1"

    @property
    def holds(self) -> bool:
        """Whether there is a proof, and every one holds."""
        return bool(self.proofs) and all(proof.holds for proof in self.proofs)
