"""The scan that a mixer is given, what is said where it cannot be compiled, and numbers of the compiled one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.fused import compiled_scan, why_not_compiled  # noqa: E402
from megacpp_validate.native.mamba import Mamba2Mixer, ssd_chunked, ssd_sequential  # noqa: E402
from megacpp_validate.probes.bounds import Roundings, compare  # noqa: E402

CHUNK, LENGTH = 4, 11


def draw() -> list[Any]:
    """x, dt, a, b, c of 2 sequences, 4 heads of 3, 2 groups of 5."""
    source = torch.Generator().manual_seed(0)
    shapes = (2, LENGTH, 4, 3), (2, LENGTH, 4), (4,), (2, LENGTH, 2, 5), (2, LENGTH, 2, 5)
    x, dt, a, b, c = (torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes)
    return [given.requires_grad_() for given in (x, dt.abs(), -a.abs(), b, c)]


def outcome(scan: Any, **options: Any) -> dict[str, Any]:
    given = draw()
    y, state = scan(*given, **options)
    source = torch.Generator().manual_seed(1)
    upstream = [torch.randn(out.shape, generator=source, dtype=torch.float64) for out in (y, state)]
    found = torch.autograd.grad((y, state), given, upstream)
    of = dict(zip(("x", "dt", "a", "b", "c"), found, strict=True))
    return {"y": y.detach(), "state": state.detach(), **of}


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
    assert "no no-such-compiler to be run. Next step: install one, or name one in CXX" in choice.refusals[0].reason
    monkeypatch.setenv("CXX", sys.executable)  # what can be run is asked, whatever it is
    assert why_not_compiled(torch.device("cpu")) is None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(Path(__file__).parent))
    assert "no g++" in str(why_not_compiled(torch.device("cpu")))


def test_other_devices_are_refused() -> None:
    assert why_not_compiled(torch.device("meta")).code == "device"
    refused = why_not_compiled(torch.device("cuda"))
    assert refused is None or refused.code in ("triton-unavailable", "no-compiler")


def faults(scan: Any) -> list[str]:
    """What lies out of its bound of the exact recurrence, forward and every gradient.

    Every value passes 2 exponentials (each within 2 units of rounding, so 4 roundings), and up to 16 products and sums
    of its own, backward as often again; sums run over a chunk and the states of all chunks, or, for the gradient of a
    rate, over all steps of all sequences and their channels. Exponents are sums of up to LENGTH rates and pass their
    absolute error on: rates below 1 in the mean, as many as a chunk decays over before nothing is left, 4.
    """
    wanted = outcome(ssd_sequential)
    way = Roundings((("fp64", 48),), 2 * LENGTH * 3 * 5, "fp64", amplification=4.0)
    seen = outcome(scan, chunk=CHUNK)
    checks = [compare(name, seen[name], wanted[name], roundings=way) for name in wanted]
    return [f"{check.name}: {check.detail}" for check in checks if not check.passed]


def test_the_eager_scan_lies_within_the_bound_and_a_wrong_one_does_not() -> None:
    assert faults(ssd_chunked) == []

    def chunks_alone(x: Any, dt: Any, *rest: Any, chunk: int) -> Any:
        y, state = ssd_chunked(x, dt, *rest, chunk=chunk)
        return torch.cat((y[:, :chunk], 0.999 * y[:, chunk:]), 1), state

    assert faults(chunks_alone)
    assert faults(lambda x, dt, a, *rest, chunk: ssd_chunked(x, dt * (1 + 1e-6), a, *rest, chunk=chunk))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # torch 2.13's own, of what it looks at while it traces
def test_compiled_numbers_are_those_of_the_recurrence() -> None:
    """Compiles for a minute where nothing is cached."""
    scan, choice = compiled_scan("cpu")
    if choice.observed != "compiled":
        pytest.skip(f"not-run: {choice.refusals[0].reason}")
    assert scan is compiled_scan("cpu")[0]
    assert scan is not ssd_chunked
    assert faults(scan) == []
    mixer, rows = make_mixer()
    wanted = mixer(rows)
    mixer.scan = scan
    # In fp32: a norm, two projections, a convolution and the scan, twice the scan's count of roundings.
    way = Roundings((("fp32", 96),), LENGTH * 8 + 32, amplification=4.0)
    assert compare("mixer", mixer(rows), wanted.double(), roundings=way).passed


@pytest.mark.thorough
@pytest.mark.skipif(not torch.cuda.is_available(), reason="not-run: there is no CUDA device")
def test_compiled_numbers_on_a_gpu() -> None:
    scan, choice = compiled_scan("cuda")
    if choice.observed != "compiled":
        pytest.skip(f"not-run: {choice.refusals[0].reason}")
    given = [item.detach().cuda() for item in draw()]
    for seen, wanted in zip(scan(*given, chunk=CHUNK), ssd_sequential(*given), strict=True):
        check = compare("scan", seen, wanted, roundings=Roundings((("fp64", 24),), LENGTH * 15, "fp64", 4.0))
        assert check.passed, check
