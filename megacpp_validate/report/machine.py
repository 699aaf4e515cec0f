"""JSON: the model as it is, with the sentences added to each finding for those who only read the file."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Final

from pydantic import TypeAdapter

from megacpp_validate.evidence import json_text
from megacpp_validate.evidence.selftest import SelftestResult

from ..canary.dynamic.upgrade_result import UpgradeResult
from ..canary.firewall.result import FirewallResult
from ..canary.static.findings import StaticResult, Sweep
from ..environments.doctor_result import DoctorResult
from ..environments.session_result import ParityResult, SmokeSession, SupportGrid
from ..gate.fp8_session import Fp8Result
from ..gate.loss_result import LossGateResult
from ..gate.policy_result import PolicyResult
from .results import Result
from .words.findings import consequence, headline, headline_of_fault, next_step, next_step_of_fault

_WORDS: Final = ("headline", "consequence", "next_step")
_MODELS: Final[dict[str, type[Result]]] = {
    "megacpp-validate/static/1": StaticResult,
    "megacpp-validate/sweep/1": Sweep,
    "megacpp-validate/firewall/1": FirewallResult,
    "megacpp-validate/parity/1": ParityResult,
    "megacpp-validate/fp8/1": Fp8Result,
    "megacpp-validate/moe-smoke/1": SmokeSession,
    "megacpp-validate/loss-gate/1": LossGateResult,
    "megacpp-validate/support/1": SupportGrid,
    "megacpp-validate/selftest/1": SelftestResult,
    "megacpp-validate/upgrade/1": UpgradeResult,
    "megacpp-validate/doctor/1": DoctorResult,
    "megacpp-validate/fp8-policy/1": PolicyResult,
}


def to_json(result: Result) -> str:
    """The result as JSON: two spaces, keys sorted; the same text for the same result."""
    data = asdict(result) if isinstance(result, SelftestResult) else result.model_dump(mode="json")
    if isinstance(result, StaticResult):
        _add_words(data, result)
    elif isinstance(result, Sweep):
        for step, values in zip(result.steps, data["steps"], strict=True):
            _add_words(values, step)
    elif isinstance(result, UpgradeResult):
        for static, values in zip(result.static, data["static"], strict=True):
            _add_words(values, static)
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def read_json(text: str) -> Result:
    """What `to_json` wrote, its sentences left out; raises `ValueError` on anything else."""
    data = json_text.read_json(text)
    schema = data.get("schema_id") if isinstance(data, dict) else None
    if schema not in _MODELS:
        raise ValueError(f"not a report of this tool: schema_id is {schema!r}, known are {', '.join(_MODELS)}")
    for values in [data, *data.get("steps", []), *data.get("static", [])]:
        _drop_words(values)
    return TypeAdapter(_MODELS[schema]).validate_python(data)


def _add_words(data: dict[str, Any], result: StaticResult) -> None:
    old = result.old.version
    for values, finding in zip(data["findings"], result.findings, strict=True):
        said = headline(finding), consequence(finding), next_step(finding, old)
        values.update(zip(_WORDS, said, strict=True))
    for values, finding in zip(data["unchanged_faults"], result.unchanged_faults, strict=True):
        said = headline_of_fault(finding), consequence(finding), next_step_of_fault(finding, old)
        values.update(zip(_WORDS, said, strict=True))


def _drop_words(data: dict[str, Any]) -> None:
    for values in [*data.get("findings", []), *data.get("unchanged_faults", [])]:
        for word in _WORDS:
            values.pop(word, None)
