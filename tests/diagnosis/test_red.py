"""Signatures: what varies between two sightings of one fault is out of them, what tells two faults apart is in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.diagnosis.diagnose import below_the_path, normalise, read_raised, sign
from megacpp_validate.evidence.receipt import Failure, Outcome, Receipt
from tests.diagnosis.planted import cannot_import, dies, fails, good, keyword, raises

ONE = {
    "numbers": ("index 2 of dimension 0 with size 2", "index 7 of dimension 1 with size 3"),
    "shapes": ("shape torch.Size([80, 48]) and [2, 3]", "shape torch.Size([160, 48]) and [2, 3, 4]"),
    "addresses": ("<A object at 0x7f01>", "<A object at 0x9bcd>"),
    "paths": ("/tmp/a/te-2.1.0/lib.so: file too short", "/opt/b/lib.so: file too short"),
    "lines": ("/TE/common/a.cu:934 in function f: b", "/TE/other/common/a.cu:12 in function f: b"),
    "sonames": ("libcublasLt.so.13: x", "libcublasLt.so.12: x"),
    "versions": ("needs 2.11.0+cu130", "needs 2.13.1"),
    "floats": ("off by 1.5e-3", "off by 0.25"),
    "cells": ("blocked by te2.14.1-h200-imports", "blocked by te2.17.1+x-b200-attention"),
    "boilerplate": (
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported at "
        "some other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing "
        "CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n",
        "CUDA error: an illegal memory access was encountered",
    ),
}  # fmt: skip
TWO = {
    "symbols": ("undefined symbol: cublasLtA", "undefined symbol: cublasLtB"),
    "keywords": ("f() got an unexpected keyword argument 'a'", "f() got an unexpected keyword argument 'b'"),
    "kernels": ("a.cu:1 in function f: x", "b.cu:1 in function f: x"),
    "types": ("expected e4m3", "expected e5m2"),
    "architectures": ("built for sm_90", "built for sm_100"),
    "libraries": ("/a/libcudnn.so.9: x", "/a/libnccl.so.2: x"),
}


@pytest.mark.parametrize(("one", "other"), ONE.values(), ids=ONE)
def test_what_varies_is_taken_out(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(("one", "other"), TWO.values(), ids=TWO)
def test_what_tells_apart_is_kept(one: str, other: str) -> None:
    assert normalise(one) != normalise(other)


@given(st.one_of(st.text(max_size=60), st.text(alphabet="a/.:0x[1, ](s)oN", max_size=60)))
@settings(max_examples=200, deadline=None)
def test_normalising_again_changes_nothing(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


def test_one_failure_in_two_modules_has_one_signature() -> None:
    one, other = (raises(module, *keyword("native_block")) for module in ("native_block", "layer_spec"))
    assert one.failure != other.failure
    assert sign(one) == sign(other)


def test_the_frame_of_vendor_code_counts_and_torchs_does_not() -> None:
    def signed(frame: str) -> str:
        return str(sign(raises("attention", "RuntimeError", "x", frame)))

    assert signed("transformer_engine/a.py:3 in f") == signed("/tmp/te-9/transformer_engine/a.py:77 in f")
    assert signed("transformer_engine/a.py:3 in f") != signed("transformer_engine/b.py:3 in f")
    assert signed("torch/nn/modules/module.py:1 in _call_impl") == signed("megacpp_validate/bridge/a.py:1 in forward")


@pytest.mark.parametrize(("path", "wanted"), [
    ("/tmp/gpu-host/te-2.17.1/transformer_engine/pytorch/triton/permutation.py:3 in f",
     "transformer_engine/pytorch/triton/permutation.py in f"),
    ("/opt/torch/.venv/lib/python3.12/site-packages/torch/autograd/graph.py:869 in g", "torch/autograd/graph.py in g"),
    ("/work/megacpp_validate/bridge/attention.py:1 in h", "bridge/attention.py in h"),
    ("transformer_engine/common/__init__.py:360", "transformer_engine/common/__init__.py"),
    ("", ""),
])  # fmt: skip
def test_a_frame_begins_with_its_package(path: str, wanted: str) -> None:
    assert below_the_path(path) == wanted


def test_a_death_is_its_signal_and_frame() -> None:
    assert str(sign(dies("attention", "SIGSEGV", "a.py"))) == "SIGSEGV in transformer_engine/a.py in run"
    assert sign(dies("attention", "SIGSEGV", "a.py")) == sign(dies("native_block", "SIGSEGV", "a.py"))  # other words
    assert sign(dies("attention", "SIGSEGV", "a.py")) != sign(dies("attention", "SIGABRT", "a.py"))
    assert sign(dies("attention", "timeout", "a.py")) != sign(dies("attention", "SIGABRT", "a.py"))


def test_checks_are_signed_by_kind_and_not_by_count() -> None:
    assert sign(fails("attention", "bf16.a.forward")) == sign(fails("attention", "bf16.b.forward", "bf16.c.d.forward"))
    assert sign(good("attention")) is None


def chained(between: str, first: str, last: str) -> Receipt:
    vendor = '  File "/x/transformer_engine/a.py", line 1, in f\n    g()\n'
    trace = f"Traceback (most recent call last):\n{vendor}{first}\n\n{between}\n\nTraceback (most recent call last):\n"
    kind, _, text = last.partition(": ")
    made = raises("attention", kind, text)
    return replace(
        made, failure=Failure(kind, text, "torch/a.py:1 in b", f'{trace}  File "/y.py", line 2, in h\n{last}\n')
    )


CAUSE = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"


@pytest.mark.parametrize(("receipt", "wanted"), [
    (chained(CAUSE, "cudnn.Error: CUDNN_STATUS_A", "RuntimeError: wrapped"), ("Error", "CUDNN_STATUS_A")),
    (chained(DURING, "RuntimeError: CUDA error: illegal", "KeyError: 'a'"), ("RuntimeError", "CUDA error: illegal")),
    (chained(DURING, "KeyError: 'tried first'", "TypeError: then"), ("TypeError", "then")),
])  # fmt: skip
def test_the_first_cause_of_a_chain(receipt: Receipt, wanted: tuple[str, str]) -> None:
    raised = read_raised(receipt)
    assert (raised.kind, raised.text) == wanted


def test_a_blocked_cell_has_the_signature_of_what_blocks_it() -> None:
    source = cannot_import()
    reason = f"blocked by te2-h200-imports: {source.reason}"
    by_reason = replace(source, outcome=Outcome.BLOCKED, failure=None, reason=reason)
    assert sign(by_reason) == sign(source)


def test_an_import_that_ends_the_interpreter_is_a_death() -> None:
    reason = (
        "importing transformer_engine.pytorch ends the interpreter (signal 11) in /a/transformer_engine/b.py:3 (load)."
    )
    raised = read_raised(replace(cannot_import(), failure=None, reason=reason))
    assert (raised.kind, raised.frame, raised.died) == ("signal 11", "transformer_engine/b.py in load", True)
