"""The sessions that an image knows: what each calls, on which image, and what it leaves in the folder of receipts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Needs(StrEnum):
    """What a session needs of the machine."""

    NOTHING = "nothing"
    GPU = "gpu"  # the one of the image's target
    ITS_TARGET = "its-target"  # a GPU where the image's target has one


class Leaves(StrEnum):
    """What a session leaves in the folder of receipts, beside the record of the run."""

    RECEIPTS = "receipts"  # a file a cell, through the verb's option --receipts
    RESULT = "result"  # what it says, as JSON
    NOTHING = "nothing"


@dataclass(frozen=True)
class Session:
    """A session.

    Attributes:
        name: what a person types.
        verb: of the command line, and the options that are always given.
        needs: of the machine.
        leaves: in the folder of receipts.
        target: of the only image that has it; empty for all of them.
        names_target: whether the verb is told the image's target.
        says: one line for people.
        copies_caches: the verb works on a copy of the image's JIT caches, which it reads as they were sealed.
    """

    name: str
    verb: tuple[str, ...]
    needs: Needs
    leaves: Leaves
    says: str
    target: str = ""
    names_target: bool = False
    copies_caches: bool = False


SESSIONS: Final = (
    Session(
        "doctor",
        ("doctor",),
        Needs.NOTHING,
        Leaves.RESULT,
        "what the image loads, and what breaks by it",
        names_target=True,
    ),
    Session(
        "te_canary",
        ("te-canary",),
        Needs.NOTHING,
        Leaves.RESULT,
        "which bridge module the step OLD NEW breaks; the releases in the image need no network",
    ),
    Session(
        "cpu_parity",
        ("parity", "--target", "cpu"),
        Needs.NOTHING,
        Leaves.RECEIPTS,
        "native layers against fp64 references",
    ),
    *(
        Session(
            name, ("parity", "--target", target), Needs.GPU, Leaves.RECEIPTS, f"every bridge module on a {says}", target
        )
        for name, target, says in (
            ("h200_parity", "h200", "H200"),
            ("b200_parity", "b200", "B200"),
            ("gb10_compat", "gb10", "GB10"),
        )
    ),
    Session(
        "fp8",
        ("fp8",),
        Needs.GPU,
        Leaves.RECEIPTS,
        "FP8: recipes, ownership, lanes, the loss gate",
        names_target=True,
    ),
    Session(
        "moe_smoke",
        ("moe-smoke",),
        Needs.ITS_TARGET,
        Leaves.RECEIPTS,
        "the hybrid model trained on 1 to 4 devices",
        names_target=True,
    ),
    Session(
        "fp8_policy", ("fp8-policy",), Needs.NOTHING, Leaves.NOTHING, "which presets may run in low precision, and why"
    ),
    Session("loss_gate", ("loss-gate",), Needs.NOTHING, Leaves.NOTHING, "the verdict on a folder of curves"),
    Session("prewarm", ("prewarm",), Needs.GPU, Leaves.NOTHING, "the JIT caches filled on this GPU", names_target=True),
    Session(
        "jit_verify",
        ("jit-verify",),
        Needs.GPU,
        Leaves.RECEIPTS,
        "that nothing is compiled on a sealed cache",
        names_target=True,
        copies_caches=True,
    ),
)


def find_session(name: str) -> Session | None:
    """The session of a name; a dash is as good as an underscore."""
    return next((session for session in SESSIONS if session.name == name.replace("-", "_")), None)
