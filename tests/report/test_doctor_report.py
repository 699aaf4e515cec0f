"""The doctor's answer as people and machines read it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megacpp_validate.environments.doctor_result import Aspect, Difference, DoctorResult, Weight
from megacpp_validate.evidence.doctor_look import Extension, Headers, PackageLook, PathLook, Wanted
from megacpp_validate.evidence.receipt import Library
from megacpp_validate.report.machine import read_json, to_json
from megacpp_validate.report.markdown.static_tier import render_step_summary
from megacpp_validate.report.terminal.doctor import render_doctor

EXTENSION = Extension(
    "/site/deep_gemm/_C.so",
    loaded=True,
    wanted=(Wanted("_ZN3c1010ValueErrorC1E", "c10::ValueError::ValueError()", "torch", lazy=True),),
    headers=Headers(15, ("c10/core/TensorImpl.h:1338",)),
)
RESULT = DoctorResult(
    tool="megacpp-validate 0",
    interpreter="/usr/bin/python3 (a test)",
    target="h200",
    stack="te2.20.2 (pinned)",
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
            extensions=(EXTENSION,),
        ),
        PackageLook("triton", installed=True, ended="signal 6", words="Fatal \x1b[31merror"),
        PackageLook("cutlass", installed=False),
    ),
    differences=(
        Difference(
            weight=Weight.BREAKS,
            aspect=Aspect.TORCH_ABI,
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
            aspect=Aspect.MISSING,
            subject="CuTe DSL",
            seen="nothing",
            wanted="one",
            how="falls back",
            next_step="none",
        ),
    ),
    seconds=1.0,
)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_every_difference_is_told_at_any_width(width: int, encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    render_doctor(RESULT, verbose=True, console=Console(file=stream, width=width, color_system=None))
    stream.seek(0)
    text = " ".join(stream.read().split())
    for words in ("DeepGEMM 0.1.7", "dim == 2 or dim == 3", "expert_gemm", "sgl-deep-gemm==0.1.3", "[red]", "triton"):
        assert words in text
    assert text.index("DeepGEMM 0.1.7, torch ABI") < text.index("CuTe DSL")
    assert "\x1b" not in text


def test_the_summary_names_what_breaks() -> None:
    text = render_step_summary(RESULT)
    assert "1 of 3 packages load; 1 difference that breaks something, 0 risks, 1 note." in text
    assert "Bridge modules that break: expert_gemm." in text
    assert "&#124;" not in text.partition("| | what |")[0]
    assert all(line.count("|") - line.count("&#124;") in (0, 4, 5, 7) for line in text.splitlines()), text


def test_it_goes_to_json_and_back() -> None:
    assert read_json(to_json(RESULT)) == RESULT
