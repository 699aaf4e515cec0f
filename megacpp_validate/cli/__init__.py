"""The command line: parses arguments, calls one verb, renders what it gives, and maps the outcome to an exit code.

A verb's own imports are made when it is called: the one that runs on a GPU host does not need what reads sources.
"""

from __future__ import annotations

from .app import main
from .canary import bisect_verbs, canary_verbs, te_watch_verbs, upgrade_verbs
from .gate import history_verbs, loss_gate_verbs, pipeline_verbs, policy_verbs, release_gate_verbs, report_verbs
from .images import bundle_verbs, image_verify_verbs, images_verbs, lock_verbs
from .jit import jit_cache_verbs, jit_verify_verbs, prewarm_verbs
from .scores import blame_score_verbs, fp8_faults_verbs, score_verbs, selftest_verbs, smoke_faults_verbs
from .sessions import ablate_verbs, doctor_verbs, fp8_verbs, matrix_verbs, parity_verbs, smoke_verbs

__all__ = [
    "ablate_verbs",
    "bisect_verbs",
    "blame_score_verbs",
    "bundle_verbs",
    "canary_verbs",
    "doctor_verbs",
    "fp8_faults_verbs",
    "fp8_verbs",
    "history_verbs",
    "image_verify_verbs",
    "images_verbs",
    "jit_cache_verbs",
    "jit_verify_verbs",
    "lock_verbs",
    "loss_gate_verbs",
    "main",
    "matrix_verbs",
    "parity_verbs",
    "pipeline_verbs",
    "policy_verbs",
    "prewarm_verbs",
    "release_gate_verbs",
    "report_verbs",
    "score_verbs",
    "selftest_verbs",
    "smoke_faults_verbs",
    "smoke_verbs",
    "te_watch_verbs",
    "upgrade_verbs",
]
