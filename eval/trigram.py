"""A trigram model over tokens: what counting does with the same text, to hold a language model's figure against."""

import math
from collections import Counter, defaultdict

import numpy as np


class Trigram:
    """Interpolated trigram model with Witten-Bell smoothing (Witten and Bell 1991, method C).

    The probability of a token after a context seen n times with u different continuations is
    (count + u * probability after the shorter context) / (n + u); the shortest backs off to the uniform distribution.
    """

    def __init__(self, tokens: np.ndarray, vocab_size: int):
        """Count `tokens`, a stream of ids below vocab_size."""
        self.vocab_size = vocab_size
        ids = tokens.tolist()
        self.counts = [Counter(zip(*(ids[i:] for i in range(order)), strict=False)) for order in (1, 2, 3)]
        self.seen = [defaultdict(int) for _ in range(3)]
        self.different = [defaultdict(int) for _ in range(3)]
        for counts, seen, different in zip(self.counts, self.seen, self.different, strict=True):
            for gram, count in counts.items():
                seen[gram[:-1]] += count
                different[gram[:-1]] += 1

    def probability(self, token: int, context: tuple[int, ...]) -> float:
        """Probability of a token after the (at most two) tokens of context."""
        probability = 1 / self.vocab_size
        for order in range(len(context) + 1):
            past = context[len(context) - order :]
            different = self.different[order].get(past)
            if different is None:
                break
            count = self.counts[order].get((*past, token), 0)
            probability = (count + different * probability) / (self.seen[order][past] + different)
        return probability

    def nats(self, row: list[int]) -> float:
        """Negative log-likelihood of the tokens of a row after its first, each given the row up to there."""
        return -sum(math.log(self.probability(row[i], tuple(row[max(0, i - 2) : i]))) for i in range(1, len(row)))
