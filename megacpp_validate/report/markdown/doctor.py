"""The doctor's answer in Markdown."""

from __future__ import annotations

from ...environments.doctor_result import DoctorResult
from ..words.doctor import mark_package, mark_weight, say_breaks, say_libraries, say_machine, summarize_doctor
from .text import escape


def tell_doctor(result: DoctorResult) -> list[str]:
    """The stack as loaded, then every difference, worst first."""
    lines = [f"## The stack as loaded, held against {escape(result.target)} and {escape(result.stack)}", ""]
    lines += [f"**{escape(summarize_doctor(result))}**", "", escape(say_machine(result.path)), ""]
    if result.differences:
        lines += ["| | what | seen | wanted | breaks | next step |", "| --- | --- | --- | --- | --- | --- |"]
    for one in result.differences:
        mark = mark_weight(one.weight)
        cells = (one.subject, one.seen, one.wanted, say_breaks(one), one.next_step)
        lines.append(f"| {mark.symbol} {mark.word} | {' | '.join(escape(cell) for cell in cells)} |")
    lines += ["", "| package | as loaded | version | file |", "| --- | --- | --- | --- |"]
    for look in result.packages:
        mark = mark_package(look)
        lines.append(f"| {look.package} | {mark.symbol} {mark.word} | {escape(look.version)} | {escape(look.file)} |")
    if rows := say_libraries(result):
        lines += ["", "| mapped library | says it is | files | by import of |", "| --- | --- | --- | --- |"]
        lines += [f"| {' | '.join(escape(cell) for cell in row)} |" for row in rows]
    return lines
