"""Compile ahead of time what the presets and the probes need, and seal it.

The manifest says which files may be trusted. It is written before the first task, and anew when all tasks have ended
well; the seal writes its hash. A prewarm removes what an earlier one left that was killed or failed: a kernel may be
half written, and no library checks what it reads from a cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pydantic import Field

from .. import TOOL
from ..catalog.bridge import Catalog
from ..catalog.prewarm import PrewarmRows, PrewarmTask
from ..environments.cell import own_folder
from ..environments.interpreter import read_commit
from ..environments.plan import find_target
from ..errors import Exit, WrongArguments
from . import layout
from .cache import is_sealed, seal
from .layout import Manifest, TaskDone, describe_files
from .stack import (
    Answer,
    JitOptions,
    JitResult,
    JitStack,
    JitVerdict,
    Selected,
    find_root,
    judge_answer,
    open_stack,
    require_purpose,
    run_tasks,
    select_tasks,
)
from .verify import JitVerifyResult


class PrewarmResult(JitResult):
    """The tasks of a prewarm, and the caches that it left.

    Attributes:
        caches: library -> bytes that lie there now.
        versions: of the stack that compiled.
        sealed: whether the folder is sealed now.
        verdict: on the sealed cache; None where it was not verified.
    """

    schema_id: Literal["megacpp-validate/prewarm/2"] = "megacpp-validate/prewarm/2"
    caches: dict[str, int] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    sealed: bool = False
    verdict: JitVerifyResult | None = None

    @property
    def exit(self) -> Exit:
        """That of the verdict where the cache was verified."""
        return super().exit if self.verdict is None else self.verdict.exit


def run_prewarm(
    catalog: Catalog, matrix: PrewarmRows, options: JitOptions, report: Callable[[str], None]
) -> PrewarmResult:
    """Fill the caches of a target, and seal them; a sealed cache stays as it is, for `run_verify` to judge.

    With `compile_only` the caches are temporary: what is left is which kernels compile.

    Args:
        matrix: tasks, and what may differ between a cache and a stack.
        report: called with a line a task that has ended.

    Raises:
        ToolError: by the class of what is wrong.
        OSError: a disk is full.
    """
    if options.compile_only and options.root is None:
        with TemporaryDirectory(prefix="megacpp-compile-") as aside:
            result = run_prewarm(catalog, matrix, replace(options, root=Path(aside)), report)
        return result.model_copy(update={"folder": "", "manifest": "", "sealed": False})
    started, target = time.monotonic(), find_target(catalog, options.target)
    selected = select_tasks(matrix.task, target.id, options)
    root = find_root(options.root)
    folder = layout.arch_folder(root, layout.cache_arch(target.arch))
    fields: dict[str, Any]
    if not is_sealed(folder):
        layout.require_usable(folder, "--root")  # before a process is started
    with open_stack(catalog, target, options, root) as stack:
        if is_sealed(folder):
            manifest, digest = layout.read_manifest(folder)
            fields = {"caches": manifest.sizes, "manifest": digest, "sealed": True}
        elif reason := stack.why_not(options):
            fields = {
                "rows": tuple(judge_answer(task, Answer(missing=reason), JitVerdict.DONE) for task in selected.tasks)
            }
        else:
            blank = Manifest(
                architecture=folder.name, target=target.id, folder=str(folder), stack=stack.read_seen(), tasks=(),
                files=(), made=datetime.now(UTC).isoformat(timespec="seconds"), tool=TOOL, commit=read_commit(),
            )  # fmt: skip
            with own_folder(folder / layout.STATE, "--root"):
                fields = fill(stack, selected, take_over(folder, blank, matrix.keys), options, report)
            fields["versions"] = blank.stack.versions
        return PrewarmResult(
            target=target.id, architecture=folder.name, folder=str(folder), interpreter=stack.shown,
            left_out=selected.left_out, seconds=round(time.monotonic() - started, 1), **fields,
        )  # fmt: skip


def fill(
    stack: JitStack, selected: Selected, manifest: Manifest, options: JitOptions, report: Callable[[str], None]
) -> dict[str, Any]:
    """Run the tasks, write the manifest of what lies there then, and seal it unless one failed: fields of the result.

    Args:
        manifest: of what lies there before, from `take_over`.
    """
    folder = Path(manifest.folder)

    def run(task: PrewarmTask) -> Answer:
        return require_purpose(task, stack.run(task, folder / layout.STATE / "logs", options.limit_s))

    answers = run_tasks(selected.tasks, run, options.jobs, stack.processes, report)
    rows = tuple(judge_answer(task, answers[task.id], JitVerdict.DONE) for task in selected.tasks)
    if any(row.verdict is JitVerdict.FAILED for row in rows):  # it may have left half a file: the next one sweeps
        return {"rows": rows, "caches": manifest.sizes}
    done = {one.id: one for one in manifest.tasks}
    for task, row in zip(selected.tasks, rows, strict=True):
        if row.verdict is JitVerdict.DONE:
            earlier = done[task.id].compiled if task.id in done else ()
            done[task.id] = TaskDone(
                id=task.id, code=task.code, settings=task.settings, ranks=task.ranks, seconds=row.seconds,
                compiled=(*earlier, *row.compiled), asked=answers[task.id].asked,
            )  # fmt: skip
    missing = tuple(task.id for task in selected.of_target if task.id not in done)
    manifest = write_files(manifest, tasks=tuple(done.values()), missing=missing)
    sealed = {"manifest": seal(folder), "sealed": True} if done else {}
    return {"rows": rows, "caches": manifest.sizes, **sealed}


# --- what lies there --------------------------------------------------------------------------------------------------


def take_over(folder: Path, blank: Manifest, keys: Mapping[str, Collection[str]]) -> Manifest:
    """The manifest of what a prewarm may build on in ROOT/ARCH; every file that is not as a manifest there has it goes.

    Args:
        blank: manifest without tasks and files.
        keys: as of `compare_stack`.

    Raises:
        ManifestInvalid: the manifest that lies there cannot be read.
        WrongArguments: it is of another stack.
        OSError: the folder cannot be written.
    """
    manifest = blank
    if (folder / layout.MANIFEST).exists():
        earlier = layout.read_manifest(folder)[0]
        if differences := layout.compare_stack(earlier, blank.stack, blank.architecture, keys):
            shown = ", ".join(f"{one.what} {one.recorded} (here {one.observed})" for one in differences)
            raise WrongArguments(
                f"{folder} holds caches of another stack: {shown}. Likely cause: the stack was changed, a folder was "
                "copied under another name, or machines of two kinds share it. Next step: give another --root, or "
                f"remove {folder}."
            )
        recorded = {(file.path, file.sha256) for file in earlier.files}
        found = {(file.path, file.sha256) for file in describe_files(folder)}
        for path, _ in found - recorded:
            (folder / path).unlink()
        if recorded <= found:
            manifest = blank.model_copy(update={"tasks": earlier.tasks})
    layout.remove_temporary(folder)
    for name in layout.LIBRARIES:
        (folder / name).mkdir(exist_ok=True)
    return write_files(manifest)


def write_files(manifest: Manifest, **changes: Any) -> Manifest:
    """Write the manifest of what is on disk now, with other fields changed. Raises `OSError`."""
    folder = Path(manifest.folder)
    manifest = manifest.model_copy(update={"files": describe_files(folder), **changes})
    layout.write_manifest(folder, manifest)
    return manifest
