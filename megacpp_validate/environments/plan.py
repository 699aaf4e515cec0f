"""Which cells a session runs, decided before anything is started: pure functions of the matrix and the facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

from .. import TOOL
from ..catalog.bridge import BridgeModule, Catalog, Fp8Cell, ProbeCell, SmokeCell
from ..catalog.bridge import Target as TargetRow
from ..errors import WrongArguments
from ..probes.order import Order, Target
from .interpreter import Facts, read_commit

SWITCH: Final = "MEGACPP_DISABLE_TE"
LOCK_HASH: Final = "MEGACPP_LOCK_HASH"
IMAGE_DIGEST: Final = "MEGACPP_IMAGE_DIGEST"
_MOST_LISTED: Final = 40  # names in a refusal; of more only those that resemble what was typed
_OFF: Final = frozenset({"", "0", "false", "no", "off"})  # what the bridge itself reads as not set
_Row = TypeVar("_Row", bound=Any)  # a row of the matrix: it has an id


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What every verb is asked for that runs something in a stack.

    Attributes:
        target: row of matrix/targets.toml; empty for that of the GPU that is here.
        overlays: site folders, or folders of them, put before those of the interpreter.
        python: interpreter of the stack; empty for MEGACPP_PYTHON, else the host's.
        receipts: folder of the receipts and logs.
        jobs: processes at a time; 0 for what suits this machine.
        limit_s: seconds that one cell, task or import may take.
        seed: of weights and inputs.
        probes: ids of probes or cells; all where there is none.
        fresh: run again what an earlier run has a receipt of.
    """

    target: str = ""
    overlays: tuple[Path, ...] = ()
    python: str = ""
    receipts: Path = Path(".megacpp/receipts")
    jobs: int = 0
    limit_s: float = 300.0
    seed: int = 0
    probes: tuple[str, ...] = ()
    fresh: bool = False


def choose_target(catalog: Catalog, facts: Sequence[Facts]) -> TargetRow:
    """The row of the GPU that is there; that of the reference, the first with a GPU, where none is.

    Raises:
        WrongArguments: the matrix has no row for that GPU.
    """
    for found in facts:
        if found.gpu is not None:
            return find_arch(catalog, found.gpu.name, found.gpu.arch, found.machine)
    return next(target for target in catalog.targets if target.arch)


def find_arch(catalog: Catalog, gpu: str, arch: str, machine: str) -> TargetRow:
    """The row of a GPU, on a kind of machine or on any.

    Raises:
        WrongArguments: there is none.
    """
    known = [target for target in catalog.targets if target.arch]
    for row in known:
        if row.arch == arch and (not machine or row.machine in (machine, "")):
            return row
    raise WrongArguments(
        f"the matrix has no target for {gpu} ({', '.join(filter(None, (arch, machine)))}). Next step: name one with "
        f"--target, of {', '.join(row.id for row in known)}, or add a row to matrix/targets.toml."
    )


def find_target(catalog: Catalog, name: str) -> TargetRow:
    """The row of a target.

    Raises:
        WrongArguments: there is none.
    """
    return choose_rows("target", catalog.targets, [name])[0]


def why_not_here(target: TargetRow, facts: Facts) -> str:
    """Why this machine is none of the target; empty where it is one."""
    has, because = "", ""
    if target.machine and target.machine != facts.machine:
        has = f"is {target.machine}, and this machine is {facts.machine}"
    elif target.arch and facts.gpu is None:
        has = f"needs a GPU of {target.arch}, and none is present: {facts.why_no_gpu}"
        because = "; `nox -s cpu_parity` runs here"
    elif target.arch and facts.gpu is not None and facts.gpu.arch != target.arch:
        has = f"wants {target.arch}, and {facts.gpu.name} is {facts.gpu.arch}"
    step = f"Next step: run it on a machine of the target {target.id}{because}, or choose the target of this machine."
    return f"the target {target.id} {has}. {step}" if has else ""


def plan_blank(target: TargetRow, facts: Facts, variables: Mapping[str, str], *, seed: int = 0) -> Order:
    """What all orders of a session have in common: the order of no probe.

    It requests Transformer Engine, unless that cannot or shall not run here.

    Args:
        target: row that the probes are judged by.
        facts: what the environment has.
        variables: environment variables of the user, which may turn Transformer Engine off.
        seed, tool, commit: what the receipts carry.
    """
    switch = variables.get(SWITCH, "").strip()
    backend, because = "te", f"Transformer Engine is the default on the target {target.id}"
    if not target.arch:
        backend, because = "native", f"Transformer Engine has no kernels for the target {target.id}"
    elif switch.lower() not in _OFF:
        backend, because = "native", f"{SWITCH}={switch} turns Transformer Engine off"
    stack = f"te{facts.te.partition('+')[0]}" if facts.te else "te-unknown" if facts.te_folder else "te-absent"
    same = {name: getattr(target, name) for name in ("id", "arch", "production_recipe", "deep_gemm")}
    return Order(
        probe="", stack=stack if backend == "te" else backend, requested=backend, requested_because=because, seed=seed,
        target=Target(recipes=tuple(target.recipes), attention=tuple(target.attention), **same), tool=TOOL,
        commit=read_commit(), lock_hash=variables.get(LOCK_HASH, ""), image_digest=variables.get(IMAGE_DIGEST, ""),
    )  # fmt: skip


def plan_row(blank: Order, row: BridgeModule | ProbeCell) -> Order:
    """The order of a bridge module, or of a row that is more than one."""
    if isinstance(row, BridgeModule):
        return replace(blank, probe=row.id)
    return replace(
        blank, probe=row.id, code=row.code, stands_on=tuple(row.stands_on),
        settings={str(key): value for key, value in row.settings.items()},
        once=row.once or isinstance(row, SmokeCell),  # a second use of a smoke cell would be a second training
        needs_te=row.needs_te if isinstance(row, Fp8Cell) else blank.needs_te,
    )  # fmt: skip


def limit_of(row: BridgeModule | ProbeCell, least: float) -> float:
    """Seconds that a cell may take: those of its row, and at least those of the session."""
    return max(least, row.limit_s) if isinstance(row, ProbeCell) else least


def choose_canary_probes(catalog: Catalog, wanted: Sequence[str]) -> tuple[BridgeModule | ProbeCell, ...]:
    """The probes of the canary: those of modules in dependency order, then compositions; all where none is named.

    Raises:
        WrongArguments: there is no such probe.
    """
    return choose_rows("probe", (*catalog.modules, *catalog.compositions), wanted)


def choose_smoke_cells(catalog: Catalog, target: str, wanted: Sequence[str]) -> tuple[SmokeCell, ...]:
    """The target's cells of the smoke run, named with or without `smoke_`; all where none is named.

    Raises:
        WrongArguments: there is no such cell, or the target has none.
    """
    rows = [row for row in catalog.smoke if target in row.targets]
    if not rows:
        others = sorted({name for row in catalog.smoke for name in row.targets})
        raise WrongArguments(f"the smoke run has no cell for {target}. Next step: choose one of {', '.join(others)}.")
    return choose_rows(f"cell of the smoke run on {target}", rows, wanted, "smoke_")


def choose_rows(what: str, rows: Sequence[_Row], wanted: Sequence[str], prefix: str = "") -> tuple[_Row, ...]:
    """The rows that are wanted, in their order; all where none is named. Raises as `choose_names`."""
    names = choose_names(what, [row.id for row in rows], wanted, prefix)
    return tuple(row for row in rows if row.id in names)


def choose_names(what: str, known: Sequence[str], wanted: Sequence[str], prefix: str = "") -> tuple[str, ...]:
    """Those of the known names that are wanted, in their order; all where none is named.

    Args:
        prefix: that a wanted name may lack.

    Raises:
        WrongArguments: one is not known; the text names those that are.
    """
    names = [name if name.startswith(prefix) else prefix + name for name in wanted]
    if unknown := [name for name in names if name not in known]:
        near = (get_close_matches(unknown[0], known, 9) if len(known) > _MOST_LISTED else ()) or known
        raise WrongArguments(
            f"there is no {what} {', '.join(map(repr, unknown))}. Likely cause: a typing error, or a name of "
            f"another target or stack. Next step: choose from {', '.join(dict.fromkeys(near)) or 'other --targets'}."
        )
    return tuple(name for name in known if not names or name in names)
