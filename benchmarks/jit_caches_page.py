"""The page of benchmarks/jit_caches.py, from its figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

AIM: Final = 1.10  # first step over second, prewarmed


def write_page(figures: Mapping[str, Any]) -> str:
    """Markdown of all parts there are."""
    return "\n".join(_lines(figures)) + "\n"


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    yield "# JIT caches: the first step, cold and prewarmed"
    yield ""
    yield f"Measured on {figures.get('date', '?')} by `python benchmarks/jit_caches.py`. Times in seconds."
    yield from _aims(figures)
    if storm := figures.get("storm"):
        yield from _storm(storm)
    if smoke := figures.get("smoke"):
        yield from _smoke(smoke)
    if parity := figures.get("parity"):
        yield from _parity(parity)
    if tasks := figures.get("tasks"):
        yield from _tasks(tasks)


def _aims(figures: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield "| aim | seen | |"
    yield "|---|---|---|"
    for row in figures.get("smoke", ()):
        if row["state"] != "cold":
            ratio = _ratio(row)
            yield (
                f"| small, {row['precision']}, {row['state']}: first step within 10% of the second | {ratio:.2f} "
                f"| {_kept(ratio <= AIM)} |"
            )
    for row in figures.get("storm", ()):
        if row["guard"] == "with" or row["state"] != "cold":
            seen = f"{row['more_than_once']} twice, {sum(row['compiled'].values())} in all"
            right = not row["more_than_once"] if row["state"] == "cold" else not row["compiled"]
            wanted = "each kernel is compiled once" if row["state"] == "cold" else "nothing is compiled"
            yield f"| {row['ranks']} process(es), {row['state']}: {wanted} | {seen} | {_kept(right)} |"
    for row in figures.get("tasks", ()):
        if row["guard"] == "with" or row["state"] != "cold":
            each = (row["compiled"] + row["hits"]) // row["ranks"]  # that a process asks for
            right = row["compiled"] == (each if row["state"] == "cold" else 0)
            wanted = f"{each} kernels compiled once" if row["state"] == "cold" else "nothing compiled"
            yield (
                f"| {row['task']}, {row['ranks']} process(es), {row['state']}: {wanted} | {row['compiled']} in all "
                f"| {_kept(right)} |"
            )


def _kept(is_kept: bool) -> str:
    return "kept" if is_kept else "**not kept**"


def _ratio(row: Mapping[str, Any]) -> float:
    return row["first_step_s"] / row["second_step_s"] if row["second_step_s"] else float("nan")


def _storm(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield ""
    yield f"## Processes that start together ({rows[0]['gpu']}, torch {rows[0]['torch']})"
    yield ""
    yield (
        "Each process trains a whole small model of its own; compiles are summed over processes, times are the slowest "
        "process's. Twice: kernels that more than one process compiled."
    )
    yield ""
    yield (
        "| processes | caches | guard | compiled | twice | from caches | first step | second | waited "
        "| DeepGEMM first, second |"
    )
    yield "|---:|---|---|---|---:|---|---:|---:|---:|---|"
    for row in rows:
        yield (
            f"| {row['ranks']} | {row['state']} | {row['guard']} | {_counts(row['compiled'])} "
            f"| {row['more_than_once']} | {_counts(row['hits'])} | {row['first_step_s']:.2f} "
            f"| {row['second_step_s']:.3f} | {row['waited_s']:.1f} | {_deep_gemm(row['deep_gemm'])} |"
        )
    for name, why in sorted({pair for row in rows for pair in row["unwatched"].items()}):
        yield ""
        yield f"Not seen: {name}: {why}."
    for note in sorted({note for row in rows for note in row["notes"]}):
        yield ""
        yield f"Said: {note}"


def _smoke(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield ""
    yield "## The small smoke run"
    yield ""
    yield "| precision | caches | compiled | compiling | first step | second | median | first / second | whole run |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        ratio = _ratio(row)
        yield (
            f"| {row['precision']} | {row['state']} | {_counts(row['compiled'])} | {row['compile_s']:.1f} "
            f"| {row['first_step_s']:.2f} | {row['second_step_s']:.3f} | {row['median_step_s']:.3f} | {ratio:.2f} "
            f"| {row['whole_s']:.1f} |"
        )


def _parity(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield ""
    yield f"## h200_parity ({rows[0]['gpu']}, commit {rows[0]['commit'][:12]})"
    yield ""
    yield "First and second use: the whole probe, and the same calls again in its process. Probes run side by side."
    yield ""
    yield "| probe | caches | compiled | from caches | first use | second | first / second | whole |"
    yield "|---|---|---|---|---:|---:|---:|---:|"
    for row in rows:
        ratio = row["first_use_s"] / row["second_use_s"]
        yield (
            f"| {row['probe']} | {row['state']} | {_counts(row['compiled'])} | {_counts(row['hits'])} "
            f"| {row['first_use_s']:.1f} | {row['second_use_s']:.1f} | {ratio:.2f} | {row['whole_s']:.1f} |"
        )


def _tasks(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    versions = {name: value for row in rows for name, value in row["versions"].items() if value}
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "flash-attn-4") if name in versions)
    yield ""
    yield f"## Tasks that need no GPU, each by several processes at once ({rows[0]['cores']} cores, {shown})"
    yield ""
    yield "Load: average of the machine in the minute before. Times of rows with unlike loads say little."
    yield ""
    yield "| task | processes | caches | guard | compiled | from caches | seconds | load |"
    yield "|---|---:|---|---|---:|---:|---:|---:|"
    for row in rows:
        yield (
            f"| {row['task']} | {row['ranks']} | {row['state']} | {row['guard']} | {row['compiled']} | {row['hits']} "
            f"| {row['seconds']:.1f} | {row['load']:.1f} |"
        )


def _counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items()) or "nothing"


def _deep_gemm(seen: Mapping[str, Any]) -> str:
    if "first_s" in seen:
        return f"{seen['first_s']:.2f}, {seen['second_s']:.3f}"
    return str(seen.get("missing") or seen.get("failure") or "-")[:80]
