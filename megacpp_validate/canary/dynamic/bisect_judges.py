"""What one point of a search is by the receipts of probes that run in its environment."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ...catalog.bridge import BridgeModule
from ...diagnosis.blame import read_order
from ...diagnosis.host_faults import find_host_fault
from ...diagnosis.rows import component_named
from ...environments.environment import Environment, NoEnvironment
from ...evidence.receipt import Library, Outcome, Package, Receipt
from .bisect_result import Answer, Verdict
from .search import NotBuilt

Make = Callable[[Mapping[str, str]], Environment]
"""Makes the environment of a point; raises `NoEnvironment`."""
Observe = Callable[[Environment, Mapping[str, str], Sequence[str], int], Sequence[Receipt]]
"""Runs some probes in an environment, of a point, in its run 0, 1, ..."""

# How receipts name what an axis changes; an axis without a row is taken to be what its folder is said to hold.
_LOADED_AS: Final[dict[str, tuple[str, ...]]] = {
    "te": ("transformer_engine",), "torch": ("torch",), "cudnn": ("libcudnn",), "cublas": ("libcublas",),
    "cudart": ("libcudart",), "nccl": ("libnccl",), "triton": ("triton",), "deep-gemm": ("deep_gemm",),
    "flash-attn": ("flash_attn", "flash_attn_3", "flash_attn_interface"),
}  # fmt: skip
_OF_MACHINE: Final = ("GPU memory", "GPU hardware", "host memory", "disk")  # what fails whichever release is there


class ProbeJudge:
    """Runs the probe of a module, and of all that it stands on, in the environment of each point."""

    def __init__(self, module: str, modules: Sequence[BridgeModule], make: Make, observe: Observe) -> None:
        below = read_order(modules).below[module]
        self.module, self.make, self.observe = module, make, observe
        self.below = tuple(row.id for row in modules if row.id in below)
        self._made: dict[tuple[str, ...], Environment] = {}

    def identify(self, choices: Mapping[str, str]) -> str:
        """Make the environment; its identity."""
        try:
            environment = self._made[tuple(choices.values())] = self.make(choices)
            return environment.identity
        except NoEnvironment as fault:
            raise NotBuilt(str(fault)) from fault

    def judge(self, choices: Mapping[str, str], run: int) -> Answer:
        """What the receipts of one run say."""
        environment = self._made[tuple(choices.values())]
        try:
            receipts = self.observe(environment, choices, (*self.below, self.module), run)
        except NoEnvironment as fault:
            raise NotBuilt(str(fault)) from fault
        return judge_receipts(self.module, self.below, receipts, choices)


def judge_receipts(
    module: str, below: Sequence[str], receipts: Sequence[Receipt], choices: Mapping[str, str]
) -> Answer:
    """What one run says about a module, and not about what it stands on.

    Where another module's failure keeps it from running at all, or something else was loaded than the point is to have,
    nothing is known about it. A module that ran and is red is bad, whoever is to blame.
    """

    def unknown(reason: str, *, lasting: bool = True) -> Answer:
        return Answer(verdict=Verdict.CANNOT_TELL, reason=reason, lasting=lasting)

    by_probe = {receipt.probe: receipt for receipt in receipts}
    own = by_probe.get(module)
    if own is None or own.outcome is Outcome.NOT_RUN:
        return unknown(f"{module} did not run: {own.reason if own else 'there is no receipt'}", lasting=False)
    if own.requested != "te":
        return unknown(f"{module} ran without Transformer Engine: {own.requested_because or own.requested}")
    if other := "; ".join(filter(None, (_find_other(own, axis, value) for axis, value in choices.items()))):
        return unknown(other)
    if own.outcome.is_good:
        return Answer(verdict=Verdict.GOOD, reason=own.outcome.value)
    if trouble := find_machine_trouble(own):
        return unknown(f"the machine failed ({trouble}): {own.reason}", lasting=False)
    red = [name for name in below if name in by_probe and not by_probe[name].outcome.is_good]
    if own.outcome is Outcome.BLOCKED or (own.outcome is Outcome.IMPORT_ERROR and red):
        blocker = next((r for r in receipts if r.cell == own.blocked_by), by_probe[red[0]] if red else None)
        by = f"{blocker.probe}, which is {blocker.outcome.value}: {blocker.reason}" if blocker else own.reason
        return unknown(f"blocked by {by}")
    also = f"; {', '.join(red)}, which it stands on, red too" if red else ""
    return Answer(verdict=Verdict.BAD, reason=f"{own.outcome.value}{also}: {own.reason}")


def find_machine_trouble(receipt: Receipt) -> str:
    """What of the machine ended a probe; empty where nothing did."""
    if fault := find_host_fault(receipt):
        return fault
    if receipt.failure is None or receipt.outcome is not Outcome.ERROR:
        return ""
    text = f"{receipt.failure.type}: {receipt.failure.message}"
    return next((name for name in _OF_MACHINE if re.search(component_named(name).says, text)), "")


def _find_other(receipt: Receipt, axis: str, wanted: str) -> str:
    """What was loaded in place of the version that a point is to have; empty where it was that, or is not known."""
    names = _LOADED_AS.get(axis, ())
    loaded: tuple[Library | Package, ...] = (*receipt.libraries, *receipt.packages)
    several = (re.split(r",\s*", entry.version) for entry in loaded if entry.name in names)
    versions = sorted({version for some in several for version in some if version})
    taken = [version for version in versions if _is_same(version, wanted)]
    # Two copies of a shared library: nobody knows which one computes. Two packages are two backends, as FA2 and FA3.
    if not versions or (taken and (len(versions) == 1 or not names[0].startswith("lib"))):
        return ""
    return f"{axis} {wanted} was to be loaded, and {' and '.join(versions)} was: the process took another folder"


def _is_same(one: str, other: str) -> bool:
    """Whether one version is the other, or its beginning: 9.14.0 and 9.14.0.64 are one cuDNN."""
    pairs = zip(*(re.split(r"[.\-_]", version.partition("+")[0]) for version in (one, other)), strict=False)
    return all(left == right for left, right in pairs)
