"""The scan that a mixer is given, what is said where it cannot be compiled, and numbers of the compiled one."""

from __future__ import annotations

import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.fused import compiled_scan, why_not_compiled  # noqa: E402
from megacpp_validate.native.mamba import Mamba2Mixer, ssd_chunked  # noqa: E402

CHUNK, LENGTH = 4, 11


def make_mixer() -> tuple[Any, Any]:
    torch.manual_seed(0)
    mixer = Mamba2Mixer(16, state=8, head_dim=4, chunk=CHUNK)
    return mixer, torch.randn(2, LENGTH, 16)


def test_a_mixer_takes_the_scan_that_it_is_given() -> None:
    mixer, rows = make_mixer()
    names, wanted = list(mixer.state_dict()), mixer(rows)
    mixer.scan = ssd_chunked
    assert torch.equal(mixer(rows), wanted)
    seen = []

    def scan(*given: Any, chunk: int) -> Any:
        seen.append((given[0].shape, chunk))
        y, state = ssd_chunked(*given, chunk=chunk)
        return 2 * y, state

    mixer.scan = scan
    assert not torch.allclose(mixer(rows), wanted)
    assert seen == [((2, LENGTH, 8, 4), CHUNK)]
    assert list(mixer.state_dict()) == names


def test_a_machine_without_a_compiler_takes_the_eager_scan_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    scan, choice = compiled_scan("cpu")
    assert scan is ssd_chunked
    assert (choice.module, choice.requested, choice.observed) == ("compiled_scan", "compiled", "eager")
    assert [refusal.code for refusal in choice.refusals] == ["no-compiler"]
    assert "no-such-compiler" in choice.refusals[0].reason
    monkeypatch.setenv("CXX", sys.executable)  # what can be run is asked, whatever it is
    assert why_not_compiled(torch.device("cpu")) is None
