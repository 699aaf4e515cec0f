"""What a receipt says of its environment, fact by fact, and the facts of two receipts or stacks side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megacpp_validate.evidence.receipt import Receipt

Facts = Mapping[str, str]
MOST_RECEIPTS: Final = 400  # to choose from in the page: their facts lie in it


@dataclass(frozen=True)
class Environment:
    """Where a receipt was made.

    Attributes:
        facts: name -> value; names begin with their kind: "package torch".
    """

    cell: str
    stack: str
    target: str
    probe: str
    run: str
    started: str
    facts: Facts


@dataclass(frozen=True)
class FactPair:
    """One fact on either side; empty where a side does not tell it."""

    name: str
    before: str
    after: str

    @property
    def differs(self) -> bool:
        """Whether the sides do not agree."""
        return self.before != self.after


def read_facts(receipt: Receipt) -> Facts:
    """Every fact of a receipt's environment that it tells."""
    facts = {f"machine {name}": str(value) for name, value in vars(receipt.machine).items()}
    for package in receipt.packages:
        facts[f"package {package.name}"] = package.version or "loaded, says no version"
        facts[f"file of {package.name}"] = package.file
        facts[f"second copy of {package.name}"] = ", ".join(package.other_copies)
    for library in receipt.libraries:
        facts[f"library {library.name}"] = library.version or "loaded, says no version"
        facts[f"file of {library.name}"] = ", ".join(library.files)
    for compiler in receipt.compilers:
        facts[f"compiler of {compiler.library}"] = compiler.mode
    facts |= {
        "JIT root": receipt.jit.root,
        "JIT arch": receipt.jit.arch,
        "JIT mode": receipt.jit.mode,
        "requested": receipt.requested,
        "image digest": receipt.image_digest,
        "lock hash": receipt.lock_hash,
        "environment": receipt.environment,
        "commit": receipt.commit,
        "tool": receipt.tool,
    }
    return {name: value for name, value in facts.items() if value}


def merge_facts(environments: Iterable[Environment]) -> Facts:
    """Facts of a stack, of which each receipt saw some; where they do not agree, every value."""
    found: dict[str, set[str]] = {}
    for each in environments:
        for name, value in each.facts.items():
            found.setdefault(name, set()).add(value)
    # Sorted: which receipt was read first says nothing, and the same values are no difference.
    return {name: " | ".join(sorted(values)) for name, values in found.items()}


def pair_facts(before: Facts, after: Facts) -> tuple[FactPair, ...]:
    """Every fact that either side tells: kinds as they come, those that differ first."""
    names = dict.fromkeys([*before, *after])
    pairs = [FactPair(name, before.get(name, ""), after.get(name, "")) for name in names]
    return tuple(sorted(pairs, key=lambda pair: not pair.differs))


def pack_environments(environments: Sequence[Environment]) -> dict[str, Any]:
    """Facts as a script reads them: each text once, and facts as places in the list of texts."""
    texts: dict[str, int] = {}

    def place(text: str) -> int:
        return texts.setdefault(text, len(texts))

    packed = [[value for pair in each.facts.items() for value in map(place, pair)] for each in environments]
    return {"texts": list(texts), "facts": packed}
