"""A run resumes from a checkpoint: bitwise on as many ranks, and on others with every number as it was saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training.parallel.gloo_ranks import on_ranks
from tests.training.parallel.sharded_run import EXPERTS, Run, read_batch, same

pytestmark = pytest.mark.thorough


def go_on(load: str | None, until: int, save: str | None, end: int) -> dict[str, Any]:
    """Begin or resume, train until a save, and to the end."""
    run = Run(seed=1 if load is None else 99)  # other weights than those that are to be loaded
    seen: dict[str, Any] = {"loaded": None, "by": None}
    if load is not None:
        seen["by"] = run.load(load).world
        seen["loaded"] = run.whole()
    seen["first"] = run.train(until)
    seen["saved"] = run.whole()
    if save is not None:
        run.save(save)
    seen["rest"] = run.train(end)
    seen["final"] = run.whole()
    return seen


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """One rank trains 3 steps and saves; two resume, train to 6 and save; two and four resume there; all end at 8."""
    one, two = str(tmp_path_factory.mktemp("one")), str(tmp_path_factory.mktemp("two"))
    return {
        "one": on_ranks(1, go_on, None, 3, one, 8),
        "two": on_ranks(2, go_on, one, 6, two, 8),
        "two again": on_ranks(2, go_on, two, 6, None, 8),
        "four": on_ranks(4, go_on, two, 6, None, 8),
    }


def test_as_many_ranks_resume_bit_by_bit(chain: dict[str, list[dict[str, Any]]]) -> None:
    for before, after in zip(chain["two"], chain["two again"], strict=True):
        assert after["by"] == 2
        assert same(before["saved"], after["loaded"])
        assert before["rest"] == after["rest"]
        assert same(before["final"], after["final"])
        assert not same(before["saved"], before["final"])


def test_other_ranks_resume_with_every_number(chain: dict[str, list[dict[str, Any]]]) -> None:
    for source, target, count in (("one", "two", 2), ("two", "four", 4)):
        assert len(chain[target]) == count
        for rank in chain[target]:
            assert same(chain[source][0]["saved"], rank["loaded"])
            assert rank["by"] == len(chain[source])


def loss_bound(whole: dict[str, Any], step: int) -> float:
    """How far the loss of a step can lie apart in two orders of its sums, from the weights before it.

    A sum of products is off by gamma times the sum of their absolute values (Higham 2002, 3.1), here at the end of
    both layers with ReLU at most |x|; a square of d that is off by e, by 2 |d| e; all these are positive, so their sum
    is off by gamma of itself too. No path has 128 roundings; two orders are off twice.
    """
    gamma = 128 * 2.0**-53 / (1 - 128 * 2.0**-53)
    rows, wanted = read_batch(step)
    first, bias, second, shift = (whole[name] for name in ("0.weight", "0.bias", "2.weight", "2.bias"))
    parts = [
        (
            (rows @ first.t() + bias).relu() @ second.t() + shift - wanted,
            (rows.abs() @ first.abs().t() + bias.abs()) @ second.abs().t() + shift.abs() + wanted.abs(),
            1 / wanted.numel(),
        )
    ]
    gate = torch.arange(EXPERTS) + step + 1.0
    parts.append((whole["experts"].sum((1, 2)) - gate, whole["experts"].abs().sum((1, 2)) + gate, 1.0))
    return 2 * gamma * float(sum(((2 * d.abs() * size + d.square()) * share).sum() for d, size, share in parts))


def test_other_ranks_go_on_from_there(chain: dict[str, list[dict[str, Any]]]) -> None:
    for source, target, kind, step in (("one", "two", "first", 3), ("two", "four", "rest", 6)):
        before, after = chain[source][0], chain[target][0]
        bound = loss_bound(before["saved"], step)
        assert 0 < bound < 1e-9
        assert abs(after[kind][0] - before["rest"][0]) <= bound
    assert all(rank["rest"] == chain["four"][0]["rest"] for rank in chain["four"])
