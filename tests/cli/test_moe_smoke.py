"""The verb of the smoke run: it runs, it ends with the code of its class, and what is lacking is never green."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.session_calls import Stack, make_session, make_stack
from tests.command_line import Run

pytestmark = pytest.mark.thorough

OPEN, CLOSED, WRONG, NOTHING, MISSING, NO_ENVIRONMENT, INFRASTRUCTURE = 0, 1, 2, 3, 4, 5, 6


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`moe-smoke` in this process, on a host with no GPU, in a folder of the test's own."""
    return make_session("moe-smoke", capfd, monkeypatch, tmp_path)


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """The host's interpreter sees an H200 and Transformer Engine 2.17.1; its probes do what a test says."""
    return make_stack(tmp_path, monkeypatch)


RECORD = """
def record(**more):
    steps = [dict(step=n, loss=3.4 - n / 10, perfect=2.0, grad_norm=1.0, seconds=0.5 if n else 9.0) for n in range(10)]
    return {**dict(name='plan', model='scaled', pattern='AEMR', parameters=2_600_000_000, ranks=4,
        topology={'data': '4', 'expert_parallel': '4'}, precision='bf16', features={'preset': 'production'},
        forms={'moe': 'bridge'}, floor=2.0, without_context=3.47, steps=steps, whole_ns=20, phases_ns={'start-up': 5,
        'step': 15}, tokens=100, tokens_per_second=1234.5, flop_utilisation=0.321, peak_bytes={'step': 2**33}), **more}
"""


def test_a_session_that_is_good_is_open_and_tells_its_numbers_in_every_form(run: Run, stack: Stack) -> None:
    stack(RECORD + "write(training=[record()])")
    for form in ("table", "markdown", "html"):
        said = run("--target", "h200", "--cells", "scaled_bf16_4", "--format", form)
        assert said.code == OPEN, said.out + said.err
        for word in ("32.1%", "75.0%", "500.0 ms", "8.0 GiB", "experts 4"):
            assert word in said.out, (form, word)
    assert "<svg " in said.out
    told = json.loads(run("--target", "h200", "--cells", "scaled_bf16_4", "--format", "json").out)
    assert told["receipts"][0]["training"][0]["flop_utilisation"] == 0.321


def test_a_cell_that_lacks_gpus_is_not_good_and_a_red_one_closes(run: Run, stack: Stack) -> None:
    stack("write(outcome='not-run', reason='this cell takes 4 GPUs', checks=[])")
    assert run("--target", "h200", "--cells", "scaled_bf16_4").code == MISSING
    stack("write(outcome='fail', reason='one', checks=[dict(name='plan.learns', passed=False)])")
    said = run("--target", "h200", "--cells", "scaled_bf16_4")
    assert said.code == CLOSED
    assert "plan.learns" in said.out
