"""JSON: the model as it is, for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Final, cast

from pydantic import TypeAdapter

from megacpp_validate.evidence import json_text
from megacpp_validate.evidence.selftest import SelftestResult

from ..canary.dynamic.upgrade_result import UpgradeResult
from ..canary.firewall.result import FirewallResult
from ..canary.static.findings import StaticResult, Sweep
from ..environments.session_result import ParityResult, SmokeSession, SupportGrid
from ..gate.fp8_policy import PolicyResult
from ..gate.fp8_session import Fp8Result
from .results import Result

_MODELS: Final[dict[str, type[Any]]] = {
    "megacpp-validate/static/1": StaticResult,
    "megacpp-validate/sweep/1": Sweep,
    "megacpp-validate/firewall/1": FirewallResult,
    "megacpp-validate/upgrade/1": UpgradeResult,
    "megacpp-validate/parity/1": ParityResult,
    "megacpp-validate/fp8/1": Fp8Result,
    "megacpp-validate/moe-smoke/1": SmokeSession,
    "megacpp-validate/support/1": SupportGrid,
    "megacpp-validate/selftest/1": SelftestResult,
    "megacpp-validate/fp8-policy/1": PolicyResult,
}


def to_json(result: Result) -> str:
    """The result as JSON: two spaces, keys sorted; the same text for the same result."""
    data = asdict(result) if isinstance(result, SelftestResult) else result.model_dump(mode="json")
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def read_json(text: str) -> Result:
    """What `to_json` wrote; raises `ValueError` on anything else."""
    data = json_text.read_json(text)
    schema = data.get("schema_id") if isinstance(data, dict) else None
    if schema not in _MODELS:
        raise ValueError(f"not a report of this tool: schema_id is {schema!r}, known are {', '.join(_MODELS)}")
    for values in [data, *data.get("steps", []), *data.get("static", [])]:  # sentences of earlier versions
        for finding in [*values.get("findings", []), *values.get("unchanged_faults", [])]:
            for word in ("headline", "consequence", "next_step"):
                finding.pop(word, None)
    return cast("Result", TypeAdapter(_MODELS[schema]).validate_python(data))
