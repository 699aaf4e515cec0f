"""Every dequantization while a path runs: by a tensor's own method, by a vendor's kernel, by a plain cast of its bytes.

A tensor that says bf16 and stores FP8 is read in bf16 by any operation that does not know it. Nothing is asked of the
path: methods of all loaded vendor tensors are wrapped, and a dispatch mode sees casts from FP8 to wider formats.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VENDORS: Final = ("transformer_engine", "torchao")
_METHODS: Final = ("dequantize", "to_original_precision", "from_float8")
_COMPILED: Final = ("transformer_engine_torch", "dequantize")  # what Transformer Engine's own layers call below
_NARROW: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


@dataclass(frozen=True)
class Dequantization:
    """One tensor read in a wider format.

    Attributes:
        what: method, kernel or operator that did it.
        where: innermost frame of code that is no vendor's: "file:line in function".
        because: what was said of it before; empty of a silent one.
    """

    what: str
    where: str
    because: str


@dataclass
class Watch:
    """What was seen so far.

    Attributes:
        saying: tells what is said of the dequantization that runs; empty where nothing is.
    """

    saying: Callable[[], str]
    seen: list[Dequantization] = field(default_factory=list)
    depth: int = 0  # of a method that calls another: one dequantization is counted once

    @property
    def silent(self) -> tuple[Dequantization, ...]:
        """Those of which nothing was said."""
        return tuple(one for one in self.seen if not one.because)

    def note(self, what: str) -> None:
        """Count one, where it is no part of another."""
        if not self.depth:
            self.seen.append(Dequantization(what, _where(), self.saying()))


@contextmanager
def watching_dequantizations(saying: Callable[[], str]) -> Iterator[Watch]:
    """Count every dequantization of this thread and of the autograd engine while inside.

    Args:
        saying: the bridge's account of what it announces: `quantized_tensor.saying`.
    """
    watch = Watch(saying)
    undo: list[tuple[Any, str, Any]] = []
    try:
        for owner, name in _places():
            old = vars(owner)[name]
            label = f"{owner.__module__}.{owner.__name__}" if isinstance(owner, type) else owner.__name__
            setattr(owner, name, _wrapped(watch, old, f"{label}.{name}"))
            undo.append((owner, name, old))
        with _Casts(watch):
            yield watch
    finally:
        for owner, name, old in reversed(undo):
            setattr(owner, name, old)


def _places() -> Iterator[tuple[Any, str]]:
    """Classes and modules that dequantize, as far as they are loaded."""
    todo, done = [torch.Tensor], {torch.Tensor}
    while todo:
        for kind in todo.pop().__subclasses__():
            if kind not in done:
                done.add(kind)
                todo.append(kind)
    owners = {base for kind in done for base in kind.__mro__ if base.__module__.partition(".")[0] in VENDORS}
    for owner in sorted(owners, key=lambda kind: (kind.__module__, kind.__qualname__)):
        yield from ((owner, name) for name in _METHODS if inspect.isfunction(vars(owner).get(name)))
    module = sys.modules.get(_COMPILED[0])
    if module is not None and _COMPILED[1] in vars(module):
        yield module, _COMPILED[1]


def _wrapped(watch: Watch, old: Any, label: str) -> Any:
    def dequantize(*arguments: Any, **options: Any) -> Any:
        watch.note(label)
        watch.depth += 1
        try:
            return old(*arguments, **options)
        finally:
            watch.depth -= 1

    return dequantize


class _Casts(TorchDispatchMode):
    """Sees plain tensors cast from FP8; a vendor's tensor handles its operators first, and what it does comes back."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__module__.partition(".")[0] in VENDORS for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "name", lambda: "")()
        if name.startswith(("aten::_to_copy", "aten::copy_", "prims::convert_element_type")):
            source = args[1] if name.startswith("aten::copy_") else args[0]
            if source.dtype in _NARROW and out.dtype not in _NARROW:
                self._watch.note(name)
        return out


def _where() -> str:
    """The innermost frame that is neither torch's, nor a vendor's, nor of this file."""
    for frame in reversed(traceback.extract_stack()):
        inside = frame.filename.replace("\\", "/")
        if inside == __file__ or any(f"/{part}/" in inside for part in (*VENDORS, "torch", "contextlib")):
            continue
        return f"{inside.rpartition('/')[2]}:{frame.lineno} in {frame.name}"
    return "no frame of Python: called by the autograd engine"
