"""Pages that work from disk: no server, no network, no assets, readable without a script and in print."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ...canary.dynamic.upgrade_result import UpgradeResult
from ...canary.firewall.result import FirewallResult
from ...canary.static.findings import Finding, Impact, ModuleVerdict, StaticResult, Sweep
from ...environments.session_result import SessionResult
from ..loss_section import draw_loss_section
from ..marks import mark_cell, mark_impact, mark_outcome, mark_verdict
from ..plain_text import strip_control
from ..sections import Section, arrange_modules, is_shown, sort_by_verdict
from ..summaries import (
    count,
    count_impacts,
    first_sentence,
    say_direction,
    say_not_consumed,
    summarize_firewall,
    summarize_static,
    summarize_sweep,
)
from ..training_section import draw_training_section
from ..words import checks as check_words
from ..words import loss as loss_words
from ..words import parity as parity_words
from ..words import smoke as smoke_words
from ..words import upgrade as upgrade_words
from ..words.findings import LIMITS, consequence, headline, headline_of_fault, next_step, next_step_of_fault, place

_BREAK: Final = re.compile(r"(?<=[/.])(?=[^/.\s])|(?<=[A-Za-z0-9]_)(?=[A-Za-z0-9])")


def render_static_html(result: StaticResult) -> str:
    """The static tier's answer for one pair as a page."""
    return render_page("static.html.j2", result=result, sections=arrange_modules(result), tone=_judge(result))


def render_sweep_html(sweep: Sweep) -> str:
    """Every step between releases as a grid of releases x modules, whose cells open to their findings."""
    steps = [(step, {section.row.module: section for section in arrange_modules(step)}) for step in sweep.steps]
    modules = list(dict.fromkeys(module for _, sections in steps for module in sections))
    tones = {_judge(step) for step in sweep.steps}
    if sweep.unreadable or not sweep.steps:
        tones.add("risk")  # what was not compared is never good
    tone = next(tone for tone in ("bad", "risk", "good") if tone in tones)
    return render_page("sweep.html.j2", sweep=sweep, steps=steps, modules=modules, tone=tone)


def render_firewall_html(result: FirewallResult) -> str:
    """What the bridge made of each damaged install as a page."""
    return render_page("firewall.html.j2", result=result, tone="good" if result.holds else "bad")


def render_session_html(result: SessionResult) -> str:
    """A session as a page; each probe opens to its checks."""
    tone = "bad" if result.breaks else "good" if result.holds else "risk"
    return render_page("parity.html.j2", result=result, tone=tone)


def render_upgrade_html(result: UpgradeResult) -> str:
    """The upgrade canary's answer over all its tiers as a page."""
    tone = "bad" if result.breaks else "risk" if result.lacks else "good"
    statics = [(static, arrange_modules(static)) for static in result.static]
    return render_page("upgrade.html.j2", result=result, statics=statics, tone=tone)


def _judge(result: StaticResult) -> str:
    verdicts = {row.verdict for row in result.modules}
    if result.breaks or verdicts & {ModuleVerdict.BREAKS, ModuleVerdict.CASCADE}:
        return "bad"
    return "risk" if ModuleVerdict.RISK in verdicts else "good"


def render_page(template: str, **values: Any) -> str:
    """A page from a template, free of control characters."""
    page = _environment().get_template(template).render(**values)
    return strip_control(page)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("megacpp_validate.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(sentence=draw_sentence, breakable=draw_breakable, place=place)
    for module in (check_words, parity_words, loss_words, smoke_words, upgrade_words):
        words = (
            name
            for name in vars(module)
            if name.startswith(("find_", "say_", "summarize_", "mark_change", "mark_loss"))
        )
        environment.globals.update({name: getattr(module, name) for name in words})
    environment.globals.update(
        LIMITS=LIMITS,
        Impact=Impact,
        ModuleVerdict=ModuleVerdict,
        consequence=consequence,
        count=count,
        count_impacts=count_impacts,
        count_shown=_count_shown,
        draw_loss_section=draw_loss_section,
        draw_training_section=draw_training_section,
        first_sentence=first_sentence,
        headline=headline,
        headline_of_fault=headline_of_fault,
        is_eventful=_is_eventful,
        mark_cell=mark_cell,
        mark_impact=mark_impact,
        mark_outcome=mark_outcome,
        mark_verdict=mark_verdict,
        next_step=next_step,
        next_step_of_fault=next_step_of_fault,
        say_direction=say_direction,
        say_not_consumed=say_not_consumed,
        sort_by_verdict=sort_by_verdict,
        summarize_firewall=summarize_firewall,
        summarize_static=summarize_static,
        summarize_sweep=summarize_sweep,
    )
    return environment


def _count_shown(section: Section) -> int:
    return sum(is_shown(finding, verbose=False) for finding in section.own)


def _is_eventful(step: StaticResult) -> bool:
    def is_loud(finding: Finding) -> bool:
        return is_shown(finding, verbose=False)

    return any(map(is_loud, step.findings)) or any(row.verdict is not ModuleVerdict.CLEAN for row in step.modules)


def draw_sentence(text: str) -> Markup:
    """A sentence as HTML: escaped, and what stands between backticks as code."""
    code = Markup("<code>{}</code>")
    pieces = [draw_breakable(piece) for piece in re.split(r"`([^`]*)`", text)]
    return Markup("").join(code.format(text) if odd % 2 else text for odd, text in enumerate(pieces))


def draw_breakable(text: str) -> Markup:
    """Text as HTML whose paths may be broken after a separator, and are copied without the breaks."""
    return Markup("<wbr>").join(escape(part) for part in _BREAK.split(text))
