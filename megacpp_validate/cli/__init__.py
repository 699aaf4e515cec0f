"""The command line: parses arguments, calls one verb, renders what it gives, and maps the outcome to an exit code.

A verb's own imports are made when it is called: the one that runs on a GPU host does not need what reads sources.
"""

from __future__ import annotations

from . import (
    ablate_verbs,
    bisect_verbs,
    blame_score_verbs,
    bundle_verbs,
    canary_verbs,
    doctor_verbs,
    fp8_faults_verbs,
    fp8_verbs,
    image_verify_verbs,
    images_verbs,
    jit_cache_verbs,
    jit_verify_verbs,
    lock_verbs,
    loss_gate_verbs,
    matrix_verbs,
    parity_verbs,
    policy_verbs,
    prewarm_verbs,
    release_gate_verbs,
    selftest_verbs,
    smoke_faults_verbs,
    smoke_verbs,
    upgrade_verbs,
)
from .app import main

__all__ = [
    "ablate_verbs",
    "bisect_verbs",
    "blame_score_verbs",
    "bundle_verbs",
    "canary_verbs",
    "doctor_verbs",
    "fp8_faults_verbs",
    "fp8_verbs",
    "image_verify_verbs",
    "images_verbs",
    "jit_cache_verbs",
    "jit_verify_verbs",
    "lock_verbs",
    "loss_gate_verbs",
    "main",
    "matrix_verbs",
    "parity_verbs",
    "policy_verbs",
    "prewarm_verbs",
    "release_gate_verbs",
    "selftest_verbs",
    "smoke_faults_verbs",
    "smoke_verbs",
    "upgrade_verbs",
]
