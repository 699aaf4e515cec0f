"""A griffe extension for Transformer Engine's recipes.

They are pydantic dataclasses. griffe makes constructors for those of the standard library only, so their fields
would not be seen as parameters; and where the standard library raises for a field that is gone, pydantic ignores
it without a word, which is the worse fault. The constructor is made here, and labelled.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import griffe

IGNORES_UNKNOWN = "ignores-unknown-arguments"


class ConstructedDataclasses(griffe.Extension):
    """Makes `__init__` for pydantic dataclasses and for dataclasses behind an alias of the decorator."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:  # noqa: ARG002 - griffe's signature
        """Visit every class of the loaded package."""
        _visit(pkg, set())


def _visit(holder: griffe.Module | griffe.Class, seen: set[str]) -> None:
    if holder.path in seen:
        return
    seen.add(holder.path)
    # griffe 2.4.1 writes a member of this name, and fails to read it (flash-attn 2.8.3)
    holder.members.pop("cls", None)
    if isinstance(holder, griffe.Class) and "__init__" not in holder.members:
        decorator = _decorator_of(holder)
        if decorator is not None:
            _construct(holder, decorator)
    for member in list(holder.members.values()):
        if isinstance(member, griffe.Module | griffe.Class):
            _visit(member, seen)


def _decorator_of(cls: griffe.Class) -> griffe.Expr | str | None:
    """The `dataclass(...)` that decorates a class, written there or kept under a name of its module."""
    for decorator in cls.decorators:
        kept = cls.module.members.get(str(decorator.value))
        value = kept.value if isinstance(kept, griffe.Attribute) and kept.value is not None else decorator.value
        path = value.canonical_path if isinstance(value, griffe.Expr) else str(value)
        if path.startswith("pydantic.") and path.endswith("dataclass"):
            return value
    return None


def _construct(cls: griffe.Class, decorator: griffe.Expr | str) -> None:
    parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
    keyword_only = "kw_only=True" in str(decorator).replace(" ", "")
    kind = griffe.ParameterKind.keyword_only if keyword_only else griffe.ParameterKind.positional_or_keyword
    for name, member in _fields(cls).items():
        parameters.append(griffe.Parameter(name, annotation=member.annotation, kind=kind, default=_default(member)))
    init = griffe.Function(
        "__init__", parameters=griffe.Parameters(*parameters), lineno=cls.lineno, endlineno=cls.endlineno
    )
    if "extra='forbid'" not in str(decorator).replace('"', "'").replace(" ", ""):
        init.labels.add(IGNORES_UNKNOWN)
    cls.set_member("__init__", init)


def _fields(cls: griffe.Class) -> dict[str, griffe.Attribute]:
    """Annotated attributes of the class and of its base dataclasses, bases first."""
    fields: dict[str, griffe.Attribute] = {}
    try:
        bases = [base for base in reversed(cls.mro()) if _decorator_of(base) is not None]
    except ValueError:  # a base that is not in the package
        bases = []
    for one in (*bases, cls):
        for name, member in one.members.items():
            if isinstance(member, griffe.Attribute) and member.annotation is not None:
                is_constant = "class-attribute" in member.labels and "instance-attribute" not in member.labels
                if is_constant or "ClassVar" in str(member.annotation) or "property" in member.labels:
                    continue
                if _is_field(member.value) and "init=False" in str(member.value).replace(" ", ""):
                    fields.pop(name, None)
                    continue
                fields[name] = member
    return fields


def _is_field(value: str | griffe.Expr | None) -> TypeGuard[griffe.ExprCall]:
    return isinstance(value, griffe.ExprCall) and value.canonical_path.rpartition(".")[2].lower() == "field"


def _default(member: griffe.Attribute) -> str | griffe.Expr | None:
    value = member.value
    if _is_field(value):
        for argument in value.arguments:
            if isinstance(argument, griffe.ExprKeyword) and argument.name in {"default", "default_factory"}:
                return f"{argument.value}()" if argument.name == "default_factory" else argument.value
        return None
    return value
