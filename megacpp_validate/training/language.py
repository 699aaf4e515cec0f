"""A synthetic language with structure to learn and a least possible loss, known in closed form.

A token is a class and a word. The next class depends on the class before it; the next word on the word `lag` tokens
back and the class before it: a Markov source of order `lag` (Shannon 1948). Each chain walks a cycle: it moves on by
one of a few distances, drawn from one distribution p whatever its state, the words besides by a turn that the class
before them makes. Distances, turns and what token stands for which class and word are drawn from the seed. So

- the entropy of a token whose past is known is H(p of classes) + H(p of words), in every state;
- uniform is stationary, so that a model that uses no context cannot do better than ln V;
- the first `lag` words have no past and cost ln(words) each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import torch

MOST_STEPS: Final = 4  # distances that a chain may move by
DECAY: Final = 0.4  # each is as much less probable than the one before it


@dataclass(frozen=True)
class Grammar:
    """The numbers of a language.

    Attributes:
        classes, words: how many there are; V = classes * words.
        lag: tokens between a word and the one that it depends on.
    """

    classes: int
    words: int
    lag: int

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.classes * self.words

    def floor(self, length: int) -> float:
        """Least expected loss, nats a prediction, over the T - 1 predictions of a sequence of `length` T."""
        unseen = min(self.lag, length) - 1  # predictions whose word has no past; position 0 is not predicted
        per_class, per_word = entropy(step_probabilities(self.classes)), entropy(step_probabilities(self.words))
        return per_class + (unseen * math.log(self.words) + (length - 1 - unseen) * per_word) / (length - 1)

    def without_context(self) -> float:
        """Least expected loss of a model that uses no context: ln V nats a prediction."""
        return math.log(self.vocabulary)

    def one_token_back(self) -> float:
        """Least expected loss of a model that sees no more than the token before, nats a prediction.

        It knows the class before, and nothing of the next word, which belongs to another chain: the lag is at least 2.
        """
        return entropy(step_probabilities(self.classes)) + math.log(self.words)


def step_probabilities(states: int) -> tuple[float, ...]:
    """p of a chain of so many states: how probable each of its distances is, the most probable first."""
    weights = [DECAY**place for place in range(min(MOST_STEPS, states))]
    return tuple(weight / sum(weights) for weight in weights)


def entropy(probabilities: tuple[float, ...]) -> float:
    """-sum p ln p, in nats."""
    return -sum(p * math.log(p) for p in probabilities)


class Language:
    """The language of one seed.

    A batch depends on the seed and the number of its step alone: the order of a run is fixed, and a run that is resumed
    at a step sees what it would have seen.

    Args:
        grammar: its numbers.
        seed: of its tables, and of what is said in it.

    Attributes:
        grammar: its numbers.
    """

    def __init__(self, grammar: Grammar, *, seed: int) -> None:
        self.grammar, self._seed = grammar, seed
        drawn = generator_of(seed, "language", "tables")
        self._class_steps = torch.randperm(grammar.classes, generator=drawn)[:MOST_STEPS]
        self._word_steps = torch.randperm(grammar.words, generator=drawn)[:MOST_STEPS]
        self._turns = torch.randint(grammar.words, (grammar.classes,), generator=drawn)
        self._token_of = torch.randperm(grammar.vocabulary, generator=drawn)
        self._place_of = self._token_of.argsort()

    def batch(self, step: int, batch: int, length: int) -> Any:
        """The batch of one step: [B, T] int64 from 0 to V - 1, on the CPU."""
        grammar, lag = self.grammar, self.grammar.lag
        drawn = generator_of(self._seed, "language", "step", step)
        whole = -(-length // lag) * lag
        classes = _moves(self._class_steps, grammar.classes, (batch, whole), 1, drawn).cumsum(1) % grammar.classes
        moves = _moves(self._word_steps, grammar.words, (batch, whole), lag, drawn)
        moves[:, lag:] += self._turns[classes[:, lag - 1 : -1]]
        # Positions of one residue modulo the lag are a chain of their own.
        words = moves.unflatten(1, (-1, lag)).cumsum(1).flatten(1) % grammar.words
        classes, words = classes[:, :length], words[:, :length]
        return self._token_of[classes * grammar.words + words]

    def surprise(self, tokens: Any) -> Any:
        """-ln of the true probability of each token after the first, given all before it; infinite if impossible.

        Its mean over a batch is what a perfect model would score there: the floor with this batch's own luck in it.

        Args:
            tokens: [B, T] int64.

        Returns:
            [B, T - 1] fp64, nats, on the CPU.
        """
        grammar, lag = self.grammar, self.grammar.lag
        places = self._place_of[tokens.cpu()]
        classes, words = places // grammar.words, places % grammar.words
        total = _surprise_of(self._class_steps, grammar.classes, classes[:, 1:] - classes[:, :-1])
        moved = words[:, lag:] - words[:, :-lag] - self._turns[classes[:, lag - 1 : -1]]
        of_words = _surprise_of(self._word_steps, grammar.words, moved)
        total[:, : lag - 1] += math.log(grammar.words)
        total[:, lag - 1 :] += of_words
        return total


def _moves(steps: Any, states: int, shape: tuple[int, int], starts: int, drawn: Any) -> Any:
    """[B, T] int64: by how much chains move on at each position; the first `starts` are uniform, for the beginnings."""
    probabilities = torch.tensor(step_probabilities(states), dtype=torch.float64)
    choices = torch.multinomial(probabilities, shape[0] * shape[1], replacement=True, generator=drawn).reshape(shape)
    moves = steps[choices]
    moves[:, :starts] = torch.randint(states, (shape[0], starts), generator=drawn)
    return moves


def _surprise_of(steps: Any, states: int, moved: Any) -> Any:
    """-ln p of moving by `moved` places, in fp64."""
    table = torch.full((states,), math.inf, dtype=torch.float64)
    table[steps] = -torch.tensor(step_probabilities(states), dtype=torch.float64).log()
    return table[moved % states]


# --- seeds
#
# Seeds by name: what is drawn for one part depends on the run's seed and that part's name, on nothing else.
#
# A part that is added, left out or built by another backend therefore shifts no other part's numbers.


def seed_of(seed: int, *name: str | int) -> int:
    """The seed of one named part of a run, from 0 to 2^63 - 1; the same on every machine and release."""
    text = "/".join(map(str, (seed, *name)))
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big") >> 1


def generator_of(seed: int, *name: str | int) -> Any:
    """A generator for that part. It lies on the CPU, whose stream is the same beside every GPU."""
    return torch.Generator("cpu").manual_seed(seed_of(seed, *name))


@contextmanager
def drawn_from(seed: int, *name: str | int) -> Iterator[None]:
    """A region in which torch's own CPU generator starts from that part's seed; left as it was found."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(seed, *name))
        yield
