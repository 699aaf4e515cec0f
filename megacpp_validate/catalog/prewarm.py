"""What is compiled into the JIT caches before anybody waits for it: `matrix/prewarm.toml` as typed values."""

from __future__ import annotations

import re
from typing import Final, Literal

from pydantic import Field

from .bridge import Catalog, Targets
from .file import Row, Text

FILE: Final = "prewarm.toml"
PROBE: Final = "probe"
_CELL_OF: Final = {PROBE: "probe", "smoke": "cell"}  # the setting that names the cell

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
    """

    id: str = Field(pattern=r"^[a-z][a-z0-9_]+$")
    library: Library
    code: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    targets: Targets
    gpu: bool
    ranks: int = Field(default=1, ge=1)
    settings: dict[str, str] = Field(default_factory=dict)
    seconds: int = Field(default=0, ge=0)

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
    kernel: re.Pattern[str]
    releases: list[str] = Field(min_length=1)
    reason: Text
    source: Text

    def fits(self, library: str, kernel: str, release: str) -> bool:
        """Whether a compile of a release is one of it."""
        return library == self.library and release in self.releases and self.kernel.search(kernel) is not None


class PrewarmRows(Row):
    """The file: tasks in their order, what no cache keeps, and in whose keys what stands that may differ."""

    task: list[PrewarmTask] = Field(min_length=1)
    unkept: list[UnkeptKernel] = Field(default_factory=list)
    keys: dict[str, list[Library]]


def read_prewarm(catalog: Catalog) -> PrewarmRows:
    """The file of a matrix.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    return catalog.read(FILE, PrewarmRows)
