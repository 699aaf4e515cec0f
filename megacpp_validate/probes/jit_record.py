"""What a receipt says of just-in-time compiles: of the probe's process, and of ranks that it had trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..evidence.receipt import JitCompile, JitCompiles
from ..jit import monitor
from ..jit.compiles import Compile
from ..jit.monitor import start_compiling


@dataclass
class RankJit:
    """What ranks told.

    Attributes:
        compiled: what they compiled.
        hits: library -> how much they took from caches on disk.
        unwatched: as `monitor.unwatched` has it.
        notes: what their guards said, each thing once.
    """

    compiled: list[JitCompile] = field(default_factory=list)
    hits: Counter[str] = field(default_factory=Counter)
    unwatched: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def take(self, receipt: Mapping[str, Any]) -> None:
        """From the receipt of one rank; nothing from one that tells nothing."""
        told: Mapping[str, Any] = receipt.get("jit") or {}
        self.compiled += [JitCompile(**row, rank=int(receipt["rank"])) for row in told.get("compiled", ())]
        self.hits.update(told.get("hits", {}))
        self.unwatched |= told.get("unwatched", {})
        self.notes += [note for note in told.get("notes", ()) if note not in self.notes]


@dataclass
class JitRecord:
    """Of one probe, as far as it came; `late` is what its last use of all compiled."""

    ranks: RankJit = field(default_factory=RankJit)
    warm_up: dict[str, int] = field(default_factory=dict)
    began_at: int | None = None
    late: tuple[Compile, ...] = ()

    def begin(self) -> None:
        """Watch every compiler from here on, and take turns with other processes on the same caches."""
        start_compiling(private=False)  # a process of one cell has its copy by now (`probes.__main__`)
        self.began_at = monitor.mark()

    def receipt(self) -> JitCompiles:
        """As the receipt has it."""
        every = () if self.began_at is None else monitor.compiles_since(self.began_at)
        told = monitor.describe_jit()  # after the last look at the driver's cache, which may have to be reported
        late = set(map(id, self.late))
        rows = [
            JitCompile(one.library, one.kernel, one.shape, one.seconds, "after" if id(one) in late else "warm-up")
            for one in every
        ]
        ranks = self.ranks
        return JitCompiles(
            warm_up=self.warm_up,
            after=dict(sorted(Counter(one.library for one in self.late).items())),
            compiled=(*rows, *ranks.compiled),
            hits=dict(sorted((Counter(told["hits"]) + ranks.hits).items())),
            unwatched=ranks.unwatched | told["unwatched"],
            notes=tuple(dict.fromkeys((*told["notes"], *ranks.notes))),
            root=told["root"],
            arch=told["arch"],
            mode=told["mode"],
        )
