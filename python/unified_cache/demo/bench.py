"""Conversations of many users, served by the engine without and with the cache, in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unified_cache.demo.serving import PAGE_SIZE, Report, Server, Setup, Sizes, warm_up
from unified_cache.demo.workload import Clients, Traffic, Turn

__all__ = ["Plan", "run"]


@dataclass(frozen=True)
class Plan:
    """What is served, and by what.

    Attributes:
        order: who asks first in a round, one of `workload.ORDERS`.
        concurrent: requests at a time; the next user asks when one has its answer.
        host_tokens: 0: there is no host tier.
        storage: URL or folder; None: there is no storage.
        name: of the model, in storage.
    """

    traffic: Traffic
    seed: int
    order: str
    concurrent: int
    chunk: int
    device_tokens: int
    host_tokens: int
    storage: str | None
    name: str

    @property
    def setups(self) -> tuple[Setup, Setup]:
        """Without the cache, and with it."""
        return (
            Setup("without", shared=False),
            Setup(
                "with",
                write_policy="write_through" if self.host_tokens else None,
                storage=self.storage is not None,
            ),
        )

    @property
    def sizes(self) -> Sizes:
        """Of both engines: without a cache the device is as large."""
        pages = self.device_tokens // PAGE_SIZE
        host = self.host_tokens // PAGE_SIZE
        return Sizes(pages, host / pages if host else 1.0, running=self.concurrent, chunk=self.chunk)


def run(model: Any, plan: Plan, served: Callable[[], object]) -> list[Report]:
    """Serve all rounds; returns the reports without and with the cache.

    The engines take turns, round by round, each first every other time, so that whatever else the machine
    does, it does to both. The answers of the one without a cache are what the conversations go on with, and
    what those of the other are compared with.

    Args:
        served: called after each request of each engine.

    Raises:
        CapacityError: the device pool can not hold one of the requests.
        StorageError: the storage can not be used.
    """
    with contextlib.ExitStack() as stack:
        warm_up(model, plan.traffic.longest - 2)
        without, cached = (
            Server(model, setup, plan.sizes, plan.storage or "", plan.name) for setup in plan.setups
        )
        stack.callback(without.close)
        stack.callback(cached.close)
        clients = Clients(plan.traffic, plan.seed, plan.order)
        for number in range(plan.traffic.turns):
            asked = [(client, clients.ask(client)) for client in clients.round()]
            prompts = [prompt for _, prompt in asked]
            answers = {}
            for server in (without, cached) if number % 2 == 0 else (cached, without):
                answers[server] = server.serve(prompts, plan.traffic.answer, served, plan.concurrent)
            rows = zip(asked, answers[without], answers[cached], strict=True)
            for (client, prompt), right, answer in rows:
                turn = Turn(client, prompt, right)
                without.report.add(turn, right)
                cached.report.add(turn, answer)
                clients.hear(client, prompt, right.tokens)
        return [without.report, cached.report]
