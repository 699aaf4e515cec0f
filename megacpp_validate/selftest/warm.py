"""Imported once by the server that every run is forked from: torch, the probes, the bridge, and nothing of a vendor."""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress

from .. import bridge, native, probes
from . import double, plants

# What torch and numpy import only when a gradient, a seed or a layer without storage is first made: seconds a run.
for _late in ("torch.fx.experimental.symbolic_shapes", "numpy.random", "torch.utils.checkpoint", "torch._dynamo"):
    with suppress(ImportError):
        importlib.import_module(_late)

for _package in (native, bridge, probes, plants):
    for _module in pkgutil.walk_packages(_package.__path__, f"{_package.__name__}."):
        if not _module.name.endswith(".__main__"):
            with suppress(Exception):  # what cannot be imported shows in the receipt of its probe
                importlib.import_module(_module.name)

__all__ = ["double"]
