"""Conversations of many clients, and what the model answers without a cache."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unified_cache.demo.model import VOCABULARY
from unified_cache.engines.transformers import Generation, generate_uncached

__all__ = ["NEAR_TIE", "ORDERS", "Clients", "Reference", "Traffic", "Turn"]

# A model of random weights is now and then undecided between two tokens. Where the second is this near to the
# first (in standard deviations of the logits), the last bits of float32 could decide, and those depend on how
# many tokens are computed together. Rounding moves that distance by 1e-5 or so.
NEAR_TIE = 2e-3

# Who asks first in a round: another order each time, the same one (so that next comes who was away longest),
# or backwards every other time (so that next comes who was here last).
ORDERS = ("shuffled", "same", "turning")


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
    """Hold their conversations, and ask in rounds.

    Args:
        order: who asks first in a round, one of `ORDERS`.
    """

    def __init__(self, traffic: Traffic, seed: int, order: str = "shuffled") -> None:
        self._traffic = traffic
        self._random = random.Random(seed)
        self._histories = [self.text(traffic.system)] * traffic.clients
        self._order = order
        self._rounds = 0

    def round(self) -> list[int]:
        """The clients of the next round, in the order in which they ask."""
        clients = list(range(self._traffic.clients))
        self._rounds += 1
        if self._order == "shuffled":
            self._random.shuffle(clients)
        elif self._order == "turning" and self._rounds % 2 == 0:
            clients.reverse()
        return clients

    def ask(self, client: int) -> list[int]:
        """A prompt: the conversation so far, and a question, another one at each call."""
        return self._histories[client] + self.text(self._random.randint(*self._traffic.question))

    def hear(self, client: int, prompt: list[int], answer: Sequence[int]) -> None:
        """The conversation goes on with this."""
        self._histories[client] = [*prompt, *answer]

    def text(self, length: int) -> list[int]:
        """Tokens as they come."""
        return [self._random.randrange(VOCABULARY) for _ in range(length)]


class Reference:
    """The model without a cache, one request after the other, as transformers runs it.

    Attributes:
        redrawn: questions that were asked differently.
    """

    def __init__(self, model: Any, clients: Clients, traffic: Traffic) -> None:
        self._model = model
        self._clients = clients
        self._answer = traffic.answer
        self.redrawn = 0

    def round(self, served: Callable[[], object] = lambda: None) -> list[Turn]:
        """A question of every client. Calls `served` after each."""
        turns = []
        for client in self._clients.round():
            turns.append(self._turn(client))
            self._clients.hear(client, turns[-1].prompt, turns[-1].reference.tokens)
            served()
        return turns

    def _turn(self, client: int) -> Turn:
        """A question whose answer hangs on a near tie is asked differently.

        Such an answer could not say whether a cache is right. Nothing else is ever left out, and what a cache
        answers plays no part in it.
        """
        while True:
            prompt = self._clients.ask(client)
            reference = generate_uncached(self._model, prompt, self._answer)
            if min(reference.margins) >= NEAR_TIE:
                return Turn(client, prompt, reference)
            self.redrawn += 1
