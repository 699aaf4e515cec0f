"""What the stand-in of TE's torch extension holds, so that TE's real Python sources import in full.

Runs inside the module `transformer_engine_torch`, never imported from here. It computes nothing: a name that
the sources only mention exists, and calling it raises. An enumeration has the members that the sources read,
as they compare the two while they are imported; cuDNN has a version that every release takes.
"""

import importlib
import importlib.util
import sys
from typing import Any
from unittest.mock import MagicMock

LACKS: set[str] = set()  # names that this build does not have; the build fills it


def get_cudnn_version() -> int:
    """The version of cuDNN as its own number: 9.20.0."""
    return 92000


class _AnyNames(type):
    """A class that has every attribute: an enumeration such as `DType`, a class such as `CommOverlap`."""

    def __init__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> None:
        super().__init__(name, bases, names)
        cls.__members__: dict[str, Any] = {}

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = cls()
        member.number = len(cls.__members__)
        cls.__members__[name] = member
        setattr(cls, name, member)
        return member


def _stand_in(name: str) -> type:
    def refuse(_self: object, *_given: object, **_named: object) -> None:
        raise RuntimeError(f"{name} is a stand-in and computes nothing: this host has no compiled extension")

    methods = {"__call__": refuse, "__int__": lambda member: member.number}
    return _AnyNames(name, (), {"__module__": "transformer_engine_torch", **methods})


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name in LACKS:
        raise AttributeError(f"module 'transformer_engine_torch' has no attribute {name!r}")
    found = globals()[name] = _stand_in(name)
    return found


class _FindTriton:
    """Finds every module of a Triton that is not there."""

    @classmethod
    def find_spec(cls, name: str, *_: object) -> Any:
        if name.partition(".")[0] != "triton":
            return None
        return importlib.util.spec_from_loader(name, cls(), is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        return MagicMock(name=spec.name, __version__="3.0.0", __path__=[])  # kernels can be declared, none runs

    def exec_module(self, _: Any) -> None:
        """Nothing to run: a mock makes what is asked for."""


def _stand_in_for_triton() -> None:
    """CPU builds of torch come without Triton, and TE declares kernels while it is imported."""
    try:
        importlib.import_module("triton")
    except ImportError:
        importlib.import_module("torch._dynamo")  # finds that torch has no Triton, before there seems to be one
        sys.meta_path.append(_FindTriton)


_stand_in_for_triton()
