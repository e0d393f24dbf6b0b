"""Conversations of many clients, and what the model answers without a cache."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unified_cache.demo.model import VOCABULARY
from unified_cache.engines.transformers import Generation, generate_uncached

__all__ = ["NEAR_TIE", "Clients", "Traffic", "Turn"]

# A model of random weights is now and then undecided between two tokens. Where the second is this near to the
# first (in standard deviations of the logits), the last bits of float32 could decide, and those depend on how
# many tokens are computed together. Rounding moves that distance by 1e-5 or so.
NEAR_TIE = 2e-3


@dataclass(frozen=True)
class Traffic:
    """Who asks how much. All lengths are in tokens."""

    clients: int
    turns: int
    system: int  # a prompt that all conversations begin with
    question: tuple[int, int]  # the shortest and the longest
    answer: int

    @property
    def longest(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return self.system + self.turns * (self.question[1] + self.answer)

    @property
    def expected(self) -> int:
        """Tokens of all conversations at their end, what they share counted once."""
        turn = sum(self.question) // 2 + self.answer
        return self.system + self.clients * self.turns * turn


@dataclass(frozen=True)
class Turn:
    """One request: a conversation so far, and what the model answers without a cache."""

    client: int
    prompt: list[int]
    reference: Generation


class Clients:
    """Ask their questions in rounds, each round in another order; the model answers without a cache."""

    def __init__(self, model: Any, traffic: Traffic, seed: int) -> None:
        self._model = model
        self._traffic = traffic
        self._random = random.Random(seed)
        self._histories = [self._text(traffic.system)] * traffic.clients
        self.redrawn = 0
        # The first forwards are slow, whatever they compute.
        generate_uncached(model, self._text(traffic.longest - 1), 2)

    def round(self, served: Callable[[], object]) -> list[Turn]:
        """A question of every client. Calls `served` after each."""
        turns = []
        for client in self._random.sample(range(self._traffic.clients), self._traffic.clients):
            turn = self._ask(client)
            self._histories[client] = turn.prompt + turn.reference.tokens
            turns.append(turn)
            served()
        return turns

    def _ask(self, client: int) -> Turn:
        """A question whose answer hangs on a near tie is asked differently.

        Such an answer could not say whether a cache is right. Nothing else is ever left out, and what a cache
        answers plays no part in it.
        """
        while True:
            question = self._text(self._random.randint(*self._traffic.question))
            prompt = self._histories[client] + question
            reference = generate_uncached(self._model, prompt, self._traffic.answer)
            if min(reference.margins) >= NEAR_TIE:
                return Turn(client, prompt, reference)
            self.redrawn += 1

    def _text(self, length: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(length)]
