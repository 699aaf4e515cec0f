"""Binds a call of the bridge to a signature, as Python would, and names what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import SequenceMatcher

import griffe

from .shapes import Parameter, Signature
from .surface import Argument, Use


@dataclass
class Binding:
    """How a call's arguments meet a signature.

    Attributes:
        given: parameter name -> what is passed for it.
        unexpected: keywords that no parameter takes.
        surplus: indices of positional arguments that no parameter takes.
        doubled: parameters that are given by position and by name.
        missing: parameters without a default that the call does not give.
    """

    given: dict[str, Argument] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    surplus: list[int] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    missing: list[Parameter] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether the call would be accepted."""
        return not (self.unexpected or self.surplus or self.doubled or self.missing)


def bind(signature: Signature, use: Use) -> Binding:
    """Bind a CALL use to a signature."""
    binding = Binding()
    positionals = signature.positionals
    for index, argument in enumerate(use.positionals):
        if index < len(positionals):
            binding.given[positionals[index].name] = argument
        elif not signature.takes_any_positional:
            binding.surplus.append(index)
    for name, argument in use.keywords.items():
        parameter = signature.named(name)
        if parameter is None or parameter.kind is griffe.ParameterKind.positional_only:
            if not (signature.open_keywords or signature.ignores_unknown):
                binding.unexpected.append(name)
        elif name in binding.given:
            binding.doubled.append(name)
        else:
            binding.given[name] = argument
    if not (use.partial or use.open_keywords or use.open_positionals):
        binding.missing = [p for p in signature.parameters if p.required and p.name not in binding.given]
    return binding


def likely_rename(gone: Parameter, old: Signature, new: Signature) -> str:
    """The parameter of `new` that `gone` of `old` most likely became; empty if none is likely."""
    before = {p.name for p in old.parameters}
    index = _index(old, gone.name)
    best, best_score = "", 0.0
    for candidate in new.parameters:
        if candidate.name in before or new.named(candidate.name) is None:
            continue
        score = name_likeness(gone.name, candidate.name)
        score += 0.25 * (bool(gone.annotation) and candidate.annotation == gone.annotation)
        score += 0.25 * (_index(new, candidate.name) == index)
        score += 0.1 * (candidate.default == gone.default)
        if score > best_score:
            best, best_score = candidate.name, score
    return best if best_score >= 0.6 else ""


def name_likeness(one: str, other: str) -> float:
    """0 for names that have nothing in common, 1 for the same: letters in order, or words shared."""
    if one == other:
        return 1.0
    letters = SequenceMatcher(None, one.lower(), other.lower()).ratio()
    words, others = set(one.lower().split("_")), set(other.lower().split("_"))
    shared = len(words & others) / max(len(words | others), 1)
    return max(letters if letters >= 0.6 else 0.0, shared)


def _index(signature: Signature, name: str) -> int:
    return next((i for i, p in enumerate(signature.parameters) if p.name == name), -1)
