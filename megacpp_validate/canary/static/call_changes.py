"""Binds a call to a signature as Python would, and reports what a change of signature does to the call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import griffe

from ...evidence.values import Cause
from .findings import Change, ChangeKind, Impact
from .relocation import likely_rename
from .shapes import Parameter, Signature
from .surface import Argument, Use


def compare_calls(old: Signature, new: Signature, use: Use) -> Iterator[Change]:
    """Every change between two signatures that the call `use` meets; faults it already had in `old` left out."""
    before, after = bind(old, use), bind(new, use)
    yield from _lost_keywords(old, new, use)
    yield from _no_longer_swallowed(old, new, before, after)
    moved = list(_moved_positionals(old, new, use))
    yield from moved
    if not any(change.kind in (ChangeKind.PARAMETER_REORDERED, ChangeKind.PARAMETER_REMOVED) for change in moved):
        yield from _reordered(new, [name for name in after.doubled if name not in before.doubled])
    named = {p.name for p in old.parameters if p.required}
    renamed = {
        likely_rename(p, old, new) for p in old.parameters if new.named(p.name) is None and p.name in before.given
    }
    for parameter in after.missing:
        if parameter.name not in named and parameter.name not in renamed:
            had = old.named(parameter.name)
            was = f"{parameter.name}={had.default}" if had else ""
            yield _breaks(ChangeKind.PARAMETER_REQUIRED, parameter.name, was, parameter.name)
    if not use.open_keywords:
        yield from _leaned_on_defaults(old, new, before)


def call_faults(signature: Signature, use: Use) -> Iterator[Change]:
    """What keeps a call from fitting a signature at all, without another release to compare with."""
    binding = bind(signature, use)
    for name in (*binding.unexpected, *(name for name in use.keywords if name in signature.refused)):
        yield _breaks(ChangeKind.PARAMETER_REMOVED, name, cause=_lost_cause(signature))
    for index in binding.surplus:
        yield _breaks(ChangeKind.PARAMETER_REMOVED, f"argument {index + 1}")
    yield from _reordered(signature, binding.doubled)
    for parameter in binding.missing:
        yield _breaks(ChangeKind.PARAMETER_REQUIRED, parameter.name, new=parameter.name)


def _lost_keywords(old: Signature, new: Signature, use: Use) -> Iterator[Change]:
    for name in use.keywords:
        had, has = old.named(name), new.named(name)
        if had is None or had.kind is griffe.ParameterKind.positional_only:
            continue
        if has is not None and has.kind is not griffe.ParameterKind.positional_only:
            continue
        if has is not None:
            yield _breaks(ChangeKind.PARAMETER_POSITIONAL_ONLY, name, _text(had), _text(has))
            continue
        suggestion = likely_rename(had, old, new)
        kind = ChangeKind.PARAMETER_RENAMED if suggestion else ChangeKind.PARAMETER_REMOVED
        # **kwargs may still take it; one that is taken by another name there is handed on to what does not know it.
        elsewhere = suggestion and had.popped and name not in new.mentioned
        lenient = new.ignores_unknown or (new.open_keywords and not elsewhere)
        lenient &= name not in new.refused
        lost = _breaks(kind, name, _text(had), suggestion, cause=_lost_cause(new))
        yield replace(lost, suggestion=suggestion, impact=Impact.RISK if lenient else Impact.BREAKING)


def _no_longer_swallowed(old: Signature, new: Signature, before: Binding, after: Binding) -> Iterator[Change]:
    """Arguments that `*args` and `**kwargs` of the old release took without naming them."""
    for name in after.unexpected:
        if name not in before.unexpected and old.named(name) is None:
            yield _breaks(ChangeKind.PARAMETER_REMOVED, name, "**", cause=_lost_cause(new))
    for index in after.surplus:
        if index >= len(old.positionals) and index not in before.surplus:
            yield _breaks(ChangeKind.PARAMETER_REMOVED, f"argument {index + 1}", "*")


def _reordered(signature: Signature, doubled: list[str]) -> Iterator[Change]:
    """A place and a name that now mean the same parameter."""
    for name in doubled:
        yield _breaks(ChangeKind.PARAMETER_REORDERED, name, new=_order(signature.positionals))


def _lost_cause(signature: Signature) -> Cause:
    return Cause.SILENT_FALLBACK if signature.ignores_unknown or signature.open_keywords else Cause.API


def _moved_positionals(old: Signature, new: Signature, use: Use) -> Iterator[Change]:
    before, after = old.positionals, new.positionals
    for index in range(min(len(use.positionals), len(before))):
        had = before[index]
        has = after[index] if index < len(after) else None
        if has is not None and has.name == had.name:
            continue
        other = new.named(had.name)
        replaced = has is not None and has.required and had.required and old.named(has.name) is None
        if has is not None and other is not None and other.default == "None" and replaced:
            yield _renamed_in_place(had, has)  # the old name stays as an alias
        elif other is not None and other.kind is griffe.ParameterKind.keyword_only:
            yield _breaks(ChangeKind.PARAMETER_KEYWORD_ONLY, had.name, _text(had), f"*, {_text(other)}")
        elif has is None:
            if not new.takes_any_positional:
                yield _breaks(ChangeKind.PARAMETER_REMOVED, had.name, _text(had))
        elif other is not None and other.default == "None" and _is_alias(had, has, index, old, new):
            yield _renamed_in_place(had, has)
        elif other is not None or old.named(has.name) is not None:
            kind = ChangeKind.PARAMETER_REORDERED if other is not None else ChangeKind.PARAMETER_REMOVED
            shifted = _breaks(kind, had.name, _order(before), _order(after))
            yield replace(shifted, suggestion="" if other is not None else likely_rename(had, old, new))
            return  # the rest of the row has moved with it
        elif (mode := _new_mode(has, old, new, use)) is not None:
            yield replace(
                _renamed_in_place(had, has), impact=Impact.RISK, old=_text(had), new=f"{has.name}, {_text(mode)}"
            )
        elif has.default is None or had.default is not None:
            yield _renamed_in_place(had, has)
        else:
            yield _breaks(ChangeKind.PARAMETER_REMOVED, had.name, _text(had), _text(has))
    swallowed = after[len(before) : len(use.positionals) + use.open_positionals] if old.takes_any_positional else []
    if swallowed and old.named(swallowed[0].name) is None:  # what `*args` took falls into a new parameter
        yield _breaks(ChangeKind.PARAMETER_REORDERED, swallowed[0].name, "*", _order(after))


def _new_mode(has: Parameter, old: Signature, new: Signature, use: Use) -> Parameter | None:
    """A parameter that is new beside a renamed one, and says by a word of its name how that one is read by default.

    `moe_permute(inp, indices)` became `moe_permute(inp, routing_map, ..., map_type="mask")` in 2.1.0.
    """
    words = set(has.name.split("_"))
    for parameter in new.parameters:
        is_new = old.named(parameter.name) is None and parameter.name not in use.keywords
        if is_new and parameter.default and parameter.default[0] in "'\"" and words & set(parameter.name.split("_")):
            return parameter
    return None


def _is_alias(had: Parameter, has: Parameter, index: int, old: Signature, new: Signature) -> bool:
    """Whether the old name stays as an alias of the new one, which stands in its place.

    What followed it follows still: a parameter that was put in before it pushes it on, and the rest with it.
    """
    behind = [[p.name for p in signature.positionals[index + 1 :]] for signature in (old, new)]
    pushed = behind[1][:1] == [had.name] and behind[0][:1] == behind[1][1:2]
    alone = not behind[0] and bool(had.annotation) and had.annotation == has.annotation
    return old.named(has.name) is None and (has.required or alone or not pushed)


def _leaned_on_defaults(old: Signature, new: Signature, before: Binding) -> Iterator[Change]:
    for had in old.parameters:
        has = new.named(had.name)
        if had.name in before.given or has is None or had.default is None or has.default is None:
            continue
        if not _same_default(had.default, has.default):
            changed = _breaks(ChangeKind.DEFAULT_CHANGED, had.name, had.default, has.default, cause=Cause.NUMERICS)
            yield replace(changed, impact=Impact.RISK)


def _renamed_in_place(had: Parameter, has: Parameter) -> Change:
    """A positional that has another name in the same place: the call reaches it as before."""
    renamed = _breaks(ChangeKind.PARAMETER_RENAMED, had.name, had.name, has.name)
    return replace(renamed, impact=Impact.HARMLESS, suggestion=has.name)


def _breaks(kind: ChangeKind, parameter: str, old: str = "", new: str = "", cause: Cause = Cause.API) -> Change:
    """A change of a parameter that the call does not survive."""
    return Change(kind, Impact.BREAKING, cause, parameter=parameter, old=old, new=new)


def _same_default(old: str, new: str) -> bool:
    """Whether two defaults are one: the same text, or the same name with more or less of its path."""
    if "..." in (old, new) or old == new:
        return True
    with suppress(ValueError):
        return float(old) == float(new)  # 0 and 0.0
    dotted = all(re.fullmatch(r"[A-Za-z_][\w.]*\.[\w.]+", text) for text in (old, new))
    return dotted and (old.endswith(f".{new}") or new.endswith(f".{old}"))


def _text(parameter: Parameter) -> str:
    annotation = f": {parameter.annotation}" if parameter.annotation else ""
    default = f" = {parameter.default}" if parameter.default is not None else ""
    return f"{parameter.name}{annotation}{default}"


def _order(parameters: list[Parameter]) -> str:
    return ", ".join(p.name for p in parameters[:8])


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
