"""Which layers stay in BF16: the first ones, the last ones, and every auxiliary head.

The ends of a stack, and the heads above it, lose most to rounding and gain least: Nemotron-H (arXiv:2504.03624) was
trained in FP8 with the first and last four matrix products in BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from .errors import BridgeError, UnknownName

Head = Literal["lm_head", "mtp"]
HEADS: Final[tuple[Head, ...]] = get_args(Head)


class WrongZone(BridgeError, ValueError):
    """A BF16 zone, a layer or a group of layers that there cannot be."""


@dataclass(frozen=True)
class Zones:
    """The BF16 zones of a stack of layers.

    Attributes:
        num_layers: layers of the whole model, over all pipeline stages.
        first: how many of the first layers stay in BF16.
        last: how many of the last ones do.

    Raises:
        WrongZone: a negative number, or zones that overlap.
    """

    num_layers: int
    first: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        counts = (self.num_layers, self.first, self.last)
        if any(not isinstance(count, int) or isinstance(count, bool) or count < 0 for count in counts):
            raise WrongZone(
                f"zones are numbers of layers, not {counts}. Next step: pass num_layers, first and last as integers "
                "from 0 up."
            )
        if self.first + self.last > self.num_layers:
            raise WrongZone(
                f"the first {self.first} and the last {self.last} of {self.num_layers} layers overlap: nothing would "
                "be left in low precision. Likely cause: num_layers counts one pipeline stage only. Next step: pass "
                "the layers of the whole model, or smaller zones."
            )

    def why_bf16(self, place: int | Head) -> str:
        """Why a layer or head stays in BF16; empty where it does not.

        Args:
            place: index of a layer in the whole model from 0, or the name of an auxiliary head.

        Raises:
            WrongZone: there is no such layer.
            UnknownName: there is no such head.
        """
        if isinstance(place, str):
            if place not in HEADS:
                raise UnknownName(
                    f"there is no auxiliary head {place!r}. Next step: choose one of {', '.join(HEADS)}, or pass the "
                    "index of a layer."
                )
            return f"{place} is an auxiliary head, which stays in BF16"
        if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < self.num_layers:
            raise WrongZone(
                f"there is no layer {place!r} among {self.num_layers}. Likely cause: an index within a pipeline "
                f"stage. Next step: pass the index in the whole model, 0 to {self.num_layers - 1}."
            )
        if place < self.first:
            return f"layer {place} is one of the first {self.first}, which stay in BF16"
        if place >= self.num_layers - self.last:
            return f"layer {place} is one of the last {self.last}, which stay in BF16"
        return ""

    def is_bf16(self, place: int | Head) -> bool:
        """Whether a layer or head stays in BF16; raises as `why_bf16`."""
        return bool(self.why_bf16(place))

    def why_group_is_bf16(self, layers: Sequence[int | Head]) -> str:
        """Why a group of layers stays in BF16 as a whole: one of them does; empty where none does.

        Raises:
            WrongZone: the group is empty, or has a layer that there is not.
            UnknownName: there is no such head.
        """
        if not layers:
            raise WrongZone("a group without layers has no precision. Next step: pass the layers that it runs.")
        reasons = [reason for reason in map(self.why_bf16, layers) if reason]
        if not reasons:
            return ""
        return f"{reasons[0]}, and a group stays together" if len(layers) > 1 else reasons[0]
