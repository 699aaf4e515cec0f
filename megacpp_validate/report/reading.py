"""Results that a verb wrote as JSON, read back and described as that verb describes them."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from pydantic import TypeAdapter

from ..evidence.strict_json import read_json
from .document import Document

# Schema -> module and name of the model, module and name of what describes it.
_RESULTS: Final = {
    "megacpp-validate/static/1": ("canary.static.findings:StaticResult", "static:describe_static"),
    "megacpp-validate/sweep/1": ("canary.static.findings:Sweep", "static:describe_sweep"),
    "megacpp-validate/firewall/1": ("canary.firewall.result:FirewallResult", "firewall:describe_firewall"),
    "megacpp-validate/upgrade/1": ("canary.dynamic.upgrade_result:UpgradeResult", "upgrade:describe_upgrade"),
    "megacpp-validate/parity/1": ("environments.session_result:ParityResult", "session:describe_session"),
    "megacpp-validate/fp8/1": ("gate.fp8_session:Fp8Result", "session:describe_session"),
    "megacpp-validate/moe-smoke/1": ("environments.session_result:SmokeSession", "session:describe_session"),
    "megacpp-validate/loss-gate/1": ("gate.loss:LossGateResult", "loss:describe_losses"),
    "megacpp-validate/release-gate/1": ("gate.decision:GateDecision", "gate:describe_gate"),
    "megacpp-validate/ablation/1": ("gate.ablation:AblationResult", "ablation:describe_ablation"),
    "megacpp-validate/fp8-policy/1": ("gate.fp8_policy:PolicyResult", "policy:describe_policy"),
    "megacpp-validate/bisect/3": ("canary.dynamic.bisect:BisectResult", "bisect:describe_bisect"),
    "megacpp-validate/blame-score/1": ("canary.dynamic.scores:FaultScore", "scores:describe_planted"),
    "megacpp-validate/fp8-faults/1": ("canary.dynamic.scores:FaultScore", "scores:describe_planted"),
    "megacpp-validate/smoke-faults/1": ("canary.dynamic.scores:FaultScore", "scores:describe_planted"),
    "megacpp-validate/score/1": ("canary.dynamic.scores:SuiteScore", "scores:describe_score"),
    "megacpp-validate/history/2": ("evidence.history:HistoryResult", "history:describe_history"),
    "megacpp-validate/site/1": ("report.site.result:SiteResult", "site:describe_site"),
    "megacpp-validate/matrix/1": ("environments.matrix:MatrixRun", "matrix:describe_matrix"),
    "megacpp-validate/matrix-plan/1": ("environments.matrix:MatrixPlan", "matrix:describe_matrix_plan"),
    "megacpp-validate/doctor/1": ("environments.doctor_result:DoctorResult", "doctor:describe_doctor"),
    "megacpp-validate/te-watch/2": ("canary.watch:WatchResult", "watch:describe_watch"),
    "megacpp-validate/prewarm/1": ("jitcache.result:PrewarmResult", "jit:describe_prewarm"),
    "megacpp-validate/jit-verify/1": ("jitcache.result:JitVerifyResult", "jit:describe_verify"),
    "megacpp-validate/jit-cache/1": ("jitcache.result:JitCacheResult", "jit:describe_cache"),
    "megacpp-validate/image-verify/2": ("images.supply:ImageVerdict", "images:describe_verdict"),
    "megacpp-validate/bundle-written/2": ("images.bundle:BundleResult", "images:describe_bundle"),
    "megacpp-validate/image-keys/1": ("images.supply:KeysResult", "images:describe_keys"),
    "megacpp-validate/image-signed/2": ("images.supply:SignResult", "images:describe_signing"),
    "megacpp-validate/support/1": ("environments.session_result:SupportGrid", "session:describe_support"),
}


def read_result(text: str | bytes) -> Any:
    """A result from its JSON.

    Raises:
        ValueError: it is no result that can be described.
    """
    data = read_json(text)
    schema = data.get("schema_id") if isinstance(data, dict) else None
    if schema not in _RESULTS:
        raise ValueError(f"schema_id is {schema!r}; known are {', '.join(_RESULTS)}")
    for values in [data, *data.get("steps", []), *data.get("static", [])]:  # sentences of version 0.1
        for finding in [*values.get("findings", []), *values.get("unchanged_faults", [])]:
            for word in ("headline", "consequence", "next_step"):
                finding.pop(word, None)
    return TypeAdapter(_load("", _RESULTS[schema][0])).validate_python(data)


def describe_result(result: Any) -> Document:
    """The document of a result that `read_result` gave."""
    document: Document = _load(".report.describe", _RESULTS[result.schema_id][1])(result)
    return document


def _load(room: str, place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"megacpp_validate{room}.{module}"), name)
