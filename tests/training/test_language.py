"""The language: its floor against counts of what it says, its order, and what it refuses."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.training.language import Grammar, Language, entropy, step_probabilities  # noqa: E402

SMALL = Grammar(classes=3, words=4, lag=2)


def counted_entropy(pairs: Counter[tuple[object, object]]) -> float:
    """H(next | past) in nats, from how often each (past, next) was seen."""
    pasts: Counter[object] = Counter()
    for (past, _), count in pairs.items():
        pasts[past] += count
    total = sum(pairs.values())
    return -sum(count / total * math.log(count / pasts[past]) for (past, _), count in pairs.items())


def test_the_entropy_of_a_token_is_what_counting_finds() -> None:
    """From tokens alone: 200,000 of them, of which every past of two tokens (144) is seen about 1,400 times.

    The estimate is low by (cells - pasts) / 2N (Miller 1955): at most 144 * 11 / 400,000 = 0.004; its spread is about
    0.6 / sqrt(N) = 0.0013.
    """
    text = Language(SMALL, seed=3).batch(0, 400, 500).tolist()
    known = Counter(((row[t - 2], row[t - 1]), row[t]) for row in text for t in range(2, 500))
    closed = entropy(step_probabilities(3)) + entropy(step_probabilities(4))
    assert counted_entropy(known) == pytest.approx(closed, abs=0.008)
    less = Counter((first, second) for row in text for first, second in pairwise(row))
    assert counted_entropy(less) == pytest.approx(SMALL.one_token_back(), abs=0.001)
    none = Counter((0, token) for row in text for token in row)
    assert counted_entropy(none) == pytest.approx(SMALL.without_context(), abs=0.001)


@pytest.mark.parametrize("grammar", [SMALL, Grammar(2, 2, 1), Grammar(4, 8, 3), Grammar(5, 7, 6)])
@pytest.mark.parametrize("length", [2, 5, 6, 7, 40])
def test_the_floor_is_what_the_language_itself_scores(grammar: Grammar, length: int) -> None:
    language = Language(grammar, seed=1)
    scores = language.surprise(language.batch(0, 20_000 // length, length))
    assert scores.shape == (20_000 // length, length - 1)
    spread = float(scores.mean(1).std()) / math.sqrt(scores.shape[0])
    assert float(scores.mean()) == pytest.approx(grammar.floor(length), abs=5 * spread + 1e-9)


def test_what_cannot_be_said_is_infinitely_surprising() -> None:
    noise = torch.randint(64, (4, 50), generator=torch.Generator().manual_seed(0))
    assert math.isinf(float(Language(Grammar(8, 8, 2), seed=0).surprise(noise).mean()))


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    language = Language(SMALL, seed=1)
    first = language.batch(5, 4, 9)
    torch.rand(3)
    language.batch(0, 4, 9)
    assert torch.equal(language.batch(5, 4, 9), first)
    assert torch.equal(Language(SMALL, seed=1).batch(5, 4, 9), first)
    assert not torch.equal(language.batch(6, 4, 9), first)
    assert not torch.equal(Language(SMALL, seed=2).batch(5, 4, 9), first)
    assert first.dtype == torch.int64
    assert first.shape == (4, 9)
    assert int(first.min()) >= 0
    assert int(first.max()) < SMALL.vocabulary
