"""The doctor's answer in words: one snapshot."""

from __future__ import annotations

from syrupy.assertion import SnapshotAssertion

from megacpp_validate.environments.doctor_rules import Difference, DoctorResult, Weight
from megacpp_validate.errors import Exit
from megacpp_validate.evidence.doctor_look import PackageLook, PathLook
from megacpp_validate.evidence.receipt import Library
from megacpp_validate.report.describe.doctor import describe_doctor
from megacpp_validate.report.render.markdown import render_markdown

RESULT = DoctorResult(
    tool="megacpp-validate 0", interpreter="/usr/bin/python3 (a test)", target="h200", stack="te2.20.2 (pinned)",
    path=PathLook(
        "3.12.3", "/usr/bin/python3", "cpython-312", "x86_64", torch="2.11.0", gpu="NVIDIA H200", driver="580"
    ),
    packages=(
        PackageLook(
            "deep_gemm",
            installed=True,
            version="0.1.7",
            file="/site/deep_gemm/__init__.py",
            libraries=(Library("libcudnn", "9.14.0", ("/a/libcudnn.so.9",)),),
            mapped={"libcudnn": ("/a/libcudnn.so.9", "/b/libcudnn.so.9")},
            runtimes={"libcudart.so.12": "/c/libcudart.so.12", "libcudart.so.13": "/d/libcudart.so.13"},
        ),
        PackageLook("triton", installed=True, ended="signal 6", words="Fatal \x1b[31merror"),
        PackageLook("cutlass", installed=False),
    ),
    differences=(
        Difference(
            weight=Weight.BREAKS,
            aspect="torch ABI",
            subject="DeepGEMM 0.1.7",
            seen="[red]`_C.so`[/red] says \x1b[31mdim == 2 or dim == 3",
            wanted="a build for torch 2.11.0",
            breaks=("expert_gemm",),
            how="it reads sizes from the wrong place",
            next_step="install sgl-deep-gemm==0.1.3",
            source="the wheel | itself",
        ),
        Difference(
            weight=Weight.NOTE,
            aspect="missing",
            subject="CuTe DSL",
            seen="nothing",
            wanted="one",
            how="falls back",
            next_step="none",
        ),
    ),
    seconds=1.0,
)  # fmt: skip


def test_its_words(snapshot: SnapshotAssertion) -> None:
    document = describe_doctor(RESULT)
    assert (RESULT.exit, len(document.judged())) == (Exit.CLOSED, 2)
    assert render_markdown(document) == snapshot
