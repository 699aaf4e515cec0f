"""A parity session in JUnit XML: one suite a session, one case a probe.

A check out of bounds is a failure; what raised, died, or is blocked is an error; what did not run is skipped with the
reason, which makes no green run: the exit code says that evidence is missing.
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

from megacpp_validate.evidence.parity import ParityResult
from megacpp_validate.evidence.receipt import Outcome, Receipt

from .junit_tree import add, add_properties, make, write
from .parity_words import (
    find_doubles,
    find_failed,
    find_fallbacks,
    find_machine,
    say_backends,
    say_cause,
    say_checks,
    say_fallback,
    say_machine,
    say_next_step,
    say_parts,
    say_worst,
    summarize_parity,
)


def render_parity_junit(result: ParityResult) -> str:
    """The session as one suite."""
    suite = make("testsuite", name=f"parity {result.stack} {result.target}", time=f"{result.seconds:.3f}")
    properties = {
        "tool": result.tool,
        "requested": f"{result.requested}: {result.requested_because}",
        "machine": say_machine(find_machine(result)),
        "interpreter": result.interpreter,
        "seed": str(result.seed),
    }
    add_properties(suite, properties)
    for receipt in result.receipts:
        _add_case(suite, receipt)
    add(suite, "system-out", "\n".join([summarize_parity(result), *find_doubles(result)]))
    return write([suite])


def _add_case(suite: ET.Element, receipt: Receipt) -> None:
    classname = f"parity.{receipt.stack.replace('.', '_')}.{receipt.target}"
    time = f"{receipt.seconds.get('total', 0.0):.3f}"
    case = add(suite, "testcase", name=receipt.probe, classname=classname, time=time)
    cause, text = say_cause(receipt), _tell(receipt)
    if receipt.outcome is Outcome.NOT_RUN:
        add(case, "skipped", message=receipt.reason or "not run, no reason given")
    elif receipt.outcome is Outcome.FAIL:
        add(case, "failure", text, message=cause, type="fail")
    elif not receipt.outcome.is_good:
        add(case, "error", text, message=cause, type=receipt.outcome.value)
    lines = [f"requested: seen {say_backends(receipt)}", f"checks {say_checks(receipt)}", f"worst {say_worst(receipt)}"]
    add(case, "system-out", "\n".join([*lines, *map(say_fallback, find_fallbacks(receipt))]))


def _tell(receipt: Receipt) -> str:
    lines = [receipt.reason]
    for check in find_failed(receipt):
        lines += ["", check.name, *(f"  {line}" for line in say_parts(check))]
    if receipt.failure is not None:
        lines += ["", receipt.failure.traceback or receipt.failure.message]
    return "\n".join([*lines, "", f"next: {say_next_step(receipt)}"])
