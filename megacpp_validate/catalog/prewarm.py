"""What is compiled into the JIT caches before anybody waits for it: `matrix/prewarm.toml` as typed values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from .bridge import Catalog
from .file import MatrixInvalid, Row, matrix_folder, read_matrix_file

FILE: Final = "prewarm.toml"
PROBE: Final = "probe"
SMOKE: Final = "smoke"
_CELL_OF: Final = {PROBE: "probe", SMOKE: "cell"}  # the setting that names the cell

Library = Literal["triton", "inductor", "cute", "fa4", "deep_gemm", "cuda", "torch_extensions"]


class PrewarmTask(Row):
    """One process that compiles.

    Attributes:
        id: its name in manifests and reports.
        library: whose cache it is there for; what else it compiles on the way is kept too.
        code: "probe" or "smoke" for a cell of the tool, else a task of `megacpp_validate.jit`.
        targets: that it is for.
        gpu: whether a device must be there.
        ranks: devices that it takes.
        settings: as the code takes them.
        seconds: that it takes cold.
        limit_s: seconds that it may take; 0 for what the verb says.
    """

    id: str = Field(pattern=r"^[a-z][a-z0-9_]+$")
    library: Library
    code: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    targets: list[str] = Field(min_length=1)
    gpu: bool
    ranks: int = Field(default=1, ge=1)
    settings: dict[str, str] = Field(default_factory=dict)
    seconds: int = Field(default=0, ge=0)
    limit_s: int = Field(default=0, ge=0)

    @property
    def is_cell(self) -> bool:
        """Whether it is a cell of the tool."""
        return self.code in _CELL_OF

    @property
    def cell(self) -> str:
        """The probe, or the row of the smoke run, that it is; empty for a task of `megacpp_validate.jit`."""
        return self.settings.get(_CELL_OF.get(self.code, ""), "")


class UnkeptKernel(Row):
    """A kernel that no cache keeps: a release compiles it in every process, whatever was prewarmed.

    Attributes:
        library: that the monitor names.
        kernel: a pattern that its name has somewhere.
        releases: of Transformer Engine in which that was seen; of another nothing is excused.
        reason: what is known of the cause.
        source: where it was seen.
    """

    library: Library
    kernel: str = Field(min_length=12)
    releases: list[str] = Field(min_length=1)
    reason: str = Field(min_length=1)
    source: str = Field(min_length=1)

    def fits(self, library: str, kernel: str, release: str) -> bool:
        """Whether a compile of a release is one of it."""
        return library == self.library and release in self.releases and re.search(self.kernel, kernel) is not None


class _File(Row):
    task: list[PrewarmTask] = Field(min_length=1)
    unkept: list[UnkeptKernel] = Field(default_factory=list)


class UnknownTask(ValueError):
    """A task that there is not; the text names those that there are."""


def read_prewarm(catalog: Catalog, folder: Path | None = None) -> tuple[PrewarmTask, ...]:
    """The tasks, in their order.

    Args:
        catalog: the matrix whose targets and cells they name.
        folder: of the matrix; the project's own without it.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    file = read_matrix_file((folder or matrix_folder()) / FILE, _File)
    if wrong := [f"{FILE}: {said}" for said in (*_find_wrong(file.task, catalog), *_find_wrong_patterns(file.unkept))]:
        raise MatrixInvalid(wrong)
    return tuple(file.task)


def read_unkept(folder: Path | None = None) -> tuple[UnkeptKernel, ...]:
    """What no cache keeps; `read_prewarm` names the file's faults. Raises `MatrixInvalid`."""
    return tuple(read_matrix_file((folder or matrix_folder()) / FILE, _File).unkept)


def choose_tasks(
    tasks: Iterable[PrewarmTask], target: str, wanted: Iterable[str] = (), *, without_gpu: bool = False
) -> tuple[PrewarmTask, ...]:
    """The tasks of a target, in their order; all that suit where none is named.

    Args:
        tasks: of the matrix.
        target: a row of `matrix/targets.toml`.
        wanted: ids.
        without_gpu: only what needs no device, as at image build.

    Raises:
        UnknownTask: one that the target does not have, or that needs a GPU where there shall be none.
    """
    rows = {task.id: task for task in tasks if target in task.targets}
    asked = tuple(wanted)
    if unknown := [name for name in asked if name not in rows]:
        known = ", ".join(rows) or "none at all"
        raise UnknownTask(
            f"the target {target} has no task {', '.join(map(repr, unknown))}. Next step: choose from {known}."
        )
    if without_gpu and (devices := [name for name in asked if rows[name].gpu]):
        raise UnknownTask(
            f"{', '.join(devices)} cannot be compiled without a GPU. Next step: leave --at-build out, on a machine of "
            f"the target {target}."
        )
    return tuple(task for task in rows.values() if (not asked or task.id in asked) and not (without_gpu and task.gpu))


def _find_wrong(tasks: list[PrewarmTask], catalog: Catalog) -> Iterator[str]:
    counts = Counter(task.id for task in tasks)
    yield from (f"task {name}: is there more than once" for name, count in counts.items() if count > 1)
    targets = {target.id: target for target in catalog.targets}
    probes = {module.id for module in catalog.modules} | {row.id for row in catalog.compositions}
    smoke = {row.id: row for row in catalog.smoke}
    for task in tasks:
        name = f"task {task.id}"
        yield from (f"{name}: there is no target {one!r}" for one in task.targets if one not in targets)
        if task.gpu and any(one in targets and not targets[one].arch for one in task.targets):
            yield f"{name}: it needs a GPU, and one of its targets has none"
        if not task.is_cell:
            continue
        if extra := set(task.settings) - {_CELL_OF[task.code]}:
            yield f"{name}: a {task.code} takes no setting {', '.join(sorted(extra))}"
        if task.code == PROBE and task.cell not in probes:
            yield f"{name}: there is no probe {task.cell!r}"
        if task.code == SMOKE:
            yield from _find_wrong_smoke(task, smoke.get(task.cell))


def _find_wrong_patterns(rows: list[UnkeptKernel]) -> Iterator[str]:
    for row in rows:
        try:
            if re.search(row.kernel, ""):
                yield f"unkept {row.kernel!r}: fits every kernel"
        except re.error as fault:
            yield f"unkept {row.kernel!r}: is no pattern: {fault}"


def _find_wrong_smoke(task: PrewarmTask, row: Any) -> Iterator[str]:
    if row is None:
        yield f"task {task.id}: there is no cell {task.cell!r} of the smoke run"
        return
    if row.ranks != task.ranks:
        yield f"task {task.id}: {row.id} takes {row.ranks} rank(s), and it says {task.ranks}"
    yield from (f"task {task.id}: {row.id} is not of {one}" for one in task.targets if one not in row.targets)
