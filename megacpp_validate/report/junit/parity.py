"""A parity session in JUnit XML: one suite a session, one case a probe.

A check out of bounds is a failure; what raised, died, or is blocked is an error; what did not run is skipped with the
reason, which makes no green run: the exit code says that evidence is missing.
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

from megacpp_validate.evidence.receipt import Outcome, Receipt

from ...environments.session_result import SessionResult
from ...gate.loss_result import LossOutcome, LossVerdict
from ..words.checks import say_parts
from ..words.loss import find_failed_losses, find_losses, say_loss, say_loss_missing
from ..words.parity import (
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
    say_red_policy,
    say_subject,
    say_worst,
    summarize_session,
)
from ..words.smoke import say_trained
from .tree import add, add_properties, make, write


def render_session_junit(result: SessionResult) -> str:
    """The session as one suite."""
    suite = make(
        "testsuite", name=f"{say_subject(result).lower()} {result.stack} {result.target}", time=f"{result.seconds:.3f}"
    )
    properties = {
        "tool": result.tool,
        "requested": f"{result.requested}: {result.requested_because}",
        "machine": say_machine(find_machine(result)),
        "interpreter": result.interpreter,
        "seed": str(result.seed),
    }
    add_properties(suite, properties)
    for receipt in result.receipts:
        _add_case(suite, receipt, say_subject(result).lower())
    for verdict in find_losses(result):
        _add_loss(suite, result, verdict)
    _add_what_is_lacking(suite, result)
    add(suite, "system-out", "\n".join([summarize_session(result), *find_doubles(result)]))
    return write([suite])


def _add_case(suite: ET.Element, receipt: Receipt, subject: str) -> None:
    classname = f"{subject}.{receipt.stack.replace('.', '_')}.{receipt.target}"
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
    lines += [f"{receipt.probe} {line}" for line in say_trained(receipt)]
    add(case, "system-out", "\n".join([*lines, *map(say_fallback, find_fallbacks(receipt))]))


def _add_loss(suite: ET.Element, result: SessionResult, verdict: LossVerdict) -> None:
    classname = f"{say_subject(result).lower()}.{result.stack.replace('.', '_')}.{result.target}"
    case = add(suite, "testcase", name=f"loss gate, {verdict.recipe or 'no recipe'}", classname=classname, time="0.000")
    lines = [line for check in find_failed_losses(verdict) for line in (check.name, *say_parts(check))]
    if verdict.outcome is LossOutcome.REFUSED:
        add(case, "skipped", message=say_loss(verdict))
    elif verdict.outcome is LossOutcome.FAIL:
        add(case, "failure", "\n".join(lines), message=say_loss(verdict), type="fail")
    add(case, "system-out", say_loss(verdict))


def _add_what_is_lacking(suite: ET.Element, result: SessionResult) -> None:
    """What keeps a session from being good and is of no cell: else its suite would be green."""
    subject = say_subject(result).lower()
    if missing := say_loss_missing(result):
        case = add(suite, "testcase", name="loss gate", classname=subject, time="0.000")
        add(case, "skipped", message=f"no verdict on the loss: {missing}")
    if refused := say_red_policy(result):
        case = add(suite, "testcase", name="policy of low precision", classname=subject, time="0.000")
        add(case, "failure", refused, message=refused, type="fail")


def _tell(receipt: Receipt) -> str:
    lines = [receipt.reason]
    for check in find_failed(receipt):
        lines += ["", check.name, *(f"  {line}" for line in say_parts(check))]
    if receipt.failure is not None:
        lines += ["", receipt.failure.traceback or receipt.failure.message]
    return "\n".join([*lines, "", f"next: {say_next_step(receipt)}"])
