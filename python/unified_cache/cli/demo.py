"""A synthetic chat workload through the prefix tree, with every hit verified.

Many clients hold conversations that start with one of a few system prompts and grow turn by turn. A small
engine in plain Python serves them: it matches, locks, allocates pages, evicts, inserts, backs up and loads
back, in the order a serving engine would. There is no model: the content of a page is a fingerprint of
all tokens up to its end, as the keys and values of a real page depend on all of them. At every hit, the pages
that the tree returns must hold just what was written for those tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Literal

from unified_cache._native import Ack, LockReceipt, PrefixTree
from unified_cache.errors import ArgumentError, InvariantError

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "demo"
HELP = "a synthetic chat workload through the prefix tree, every hit verified"

WritePolicy = Literal["write_through", "write_back"]

PAGE_SIZE = 16
RUNNING = 8  # requests that are in flight together
COPY_DELAY = 3  # requests that are admitted before the ack of a copy arrives
# What an answer may cost to compute again, and how long the next question may be: without, tlru is lru.
POLICY_OPTIONS = {"tlru": {"threshold": 512, "next_prompt_estimate": 160}}
WRITE_POLICIES: tuple[WritePolicy | None, ...] = (None, "write_through", "write_back")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1500, help="requests a run (default %(default)s)")
    parser.add_argument(
        "--clients", type=int, default=48, help="conversations at a time (default %(default)s)"
    )
    parser.add_argument("--device-pages", type=int, default=1536, help="device pool (default %(default)s)")
    parser.add_argument("--host-pages", type=int, default=3072, help="host pool (default %(default)s)")
    parser.add_argument("--policy", help="one eviction policy instead of all")
    parser.add_argument("--seed", type=int, default=1, help="seed of the workload (default %(default)s)")


@dataclass(frozen=True)
class Turn:
    """One request: the prompt, the answer that decoding will add, and what each whole page must hold."""

    tokens: array[int]
    prompt_len: int
    priority: int
    content: list[bytes]


@dataclass
class Report:
    """What one run did; counts of pages unless the name says otherwise."""

    policy: str
    write_policy: WritePolicy | None
    requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    device_evicted: int = 0
    host_evicted: int = 0
    copied_to_host: int = 0
    copied_to_device: int = 0
    dropped_tokens: int = 0
    verified: int = 0
    seconds: float = 0.0

    def summary(self) -> dict[str, float | int | str]:
        device = self.device_hit_tokens / max(self.prompt_tokens, 1)
        host = self.host_hit_tokens / max(self.prompt_tokens, 1)
        return asdict(self) | {
            "device_hit_rate": round(device, 4),
            "host_hit_rate": round(host, 4),
            "hit_rate": round(device + host, 4),
            "seconds": round(self.seconds, 3),
        }


class Pool:
    """Page ids of one tier, and what was written to each page."""

    def __init__(self, name: str, pages: int) -> None:
        self.name = name
        self.size = pages
        self.content: dict[int, bytes] = {}
        self._free = deque(range(pages))

    @property
    def room(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        return [self._free.popleft() for _ in range(count)]

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            # A page of a copy or a prompt that was never filled has no content to forget.
            self.content.pop(page, None)
            self._free.append(page)

    def check_all_free(self) -> None:
        if sorted(self._free) != list(range(self.size)):
            raise InvariantError(f"{self.name} pool: {len(self._free)} pages free at the end, of {self.size}")


@dataclass
class Running:
    """A request between its prefill and its end."""

    turn: Turn
    node: int
    lock: LockReceipt
    pages: list[int]  # the tree's pages of the prompt, then the request's own
    cached: int  # positions of `pages` that belong to the tree


@dataclass
class Copy:
    """A copy in flight, in either direction."""

    ack: Ack
    due: int
    pages: list[int] = field(default_factory=list)


def conversations(requests: int, clients: int, seed: int) -> Iterator[Turn]:
    """The workload: clients in random order, each with a growing history behind a shared system prompt."""
    rng = random.Random(seed)

    def text(low: int, high: int) -> array[int]:
        return array("q", [rng.randrange(32000) for _ in range(rng.randint(low, high))])

    systems = [text(200, 700) for _ in range(6)]
    weights = [2.0**-i for i in range(len(systems))]
    histories: list[array[int]] = [array("q") for _ in range(clients)]
    for _ in range(requests):
        # Some clients answer at once and some come back late: reuse distances of every length.
        client = min(int(rng.expovariate(4.0 / clients)), clients - 1)
        history = histories[client]
        if not history or len(history) > 2400 or rng.random() < 0.08:
            history = rng.choices(systems, weights)[0]
        prompt = history + text(16, 160)
        tokens = prompt + text(16, 240)
        histories[client] = tokens
        yield Turn(tokens, len(prompt), client % 3, fingerprints(tokens))


def fingerprints(tokens: array[int]) -> list[bytes]:
    """For each whole page a fingerprint of all tokens up to its end."""
    chain, out = hashlib.blake2b(digest_size=16), []
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        chain.update(tokens[start : start + PAGE_SIZE].tobytes())
        out.append(chain.digest())
    return out


class Engine:
    """The smallest serving engine around a `PrefixTree`: it owns the pools and does what the tree says."""

    def __init__(
        self, policy: str, write_policy: WritePolicy | None, device_pages: int, host_pages: int
    ) -> None:
        self.write_policy = write_policy
        self.tree = PrefixTree(
            PAGE_SIZE,
            eviction_policy=policy,
            policy_options=POLICY_OPTIONS.get(policy),
            write_policy=write_policy,
        )
        self.device = Pool("device", device_pages)
        self.host = Pool("host", host_pages if write_policy else 0)
        self.report = Report(policy, write_policy)
        self.now = 0
        self.running: deque[Running] = deque()
        self.backups: deque[Copy] = deque()
        self.loads: deque[Copy] = deque()

    def serve(self, turn: Turn) -> None:
        """Admit one request, and finish the oldest one if enough are running."""
        self.now += 1
        self.take_acks(self.now)
        if len(self.running) == RUNNING:
            self.finish(self.running.popleft())
        self.admit(turn)

    def admit(self, turn: Turn) -> None:
        prompt = turn.tokens[: turn.prompt_len]
        # One token must be computed, so the last one is never looked up.
        match = self.tree.match_prefix(prompt[:-1])
        loaded = self.load_back(match.last_host_node) if match.host_hit_length else 0
        if loaded:
            match = self.tree.match_prefix(prompt[:-1])
        hit = match.device_length
        pages = match.device_pages.tolist()
        self.verify(self.device, pages, turn)
        lock = self.tree.inc_lock_ref(match.last_device_node)

        self.report.requests += 1
        self.report.prompt_tokens += turn.prompt_len
        self.report.device_hit_tokens += hit - loaded
        self.report.host_hit_tokens += loaded

        fresh = self.alloc(-(-len(turn.tokens) // PAGE_SIZE) - len(pages))
        pages += fresh
        whole = turn.prompt_len // PAGE_SIZE
        for i in range(hit // PAGE_SIZE, whole):  # the prefill
            self.device.content[pages[i]] = turn.content[i]

        done = self.tree.insert(prompt, pages[:whole], prev_prefix_len=hit, priority=turn.priority)
        self.device.free(done.duplicate_pages.tolist())
        pages[:whole] = done.device_pages.tolist()
        node_lock = self.tree.inc_lock_ref(done.node)
        self.tree.dec_lock_ref(lock)
        self.running.append(Running(turn, done.node, node_lock, pages, whole * PAGE_SIZE))
        self.back_up(done.backup_nodes)

    def finish(self, request: Running) -> None:
        turn, pages = request.turn, request.pages
        whole = len(turn.content)
        for i in range(request.cached // PAGE_SIZE, whole):  # the decoding
            self.device.content[pages[i]] = turn.content[i]
        done = self.tree.insert(
            turn.tokens,
            pages[:whole],
            prev_prefix_len=request.cached,
            inserted_len=request.cached,
            priority=turn.priority,
        )
        self.device.free(done.duplicate_pages.tolist())
        self.device.free(pages[whole:])
        self.tree.dec_lock_ref(request.lock)
        self.back_up(done.backup_nodes)

    def alloc(self, count: int) -> list[int]:
        """Device pages for the request that is being admitted."""
        while not self.make_room(count):
            if not self.running:
                raise ArgumentError(f"--device-pages: {self.device.size} can not hold one request")
            self.finish(self.running.popleft())
        return self.device.alloc(count)

    def make_room(self, count: int) -> bool:
        """Evict for what is missing; what copies in flight keep locked is waited for."""
        while count > self.device.room:
            self.evict(count - self.device.room)
            if count > self.device.room:
                due = [copies[0].due for copies in (self.backups, self.loads) if copies]
                if not due:
                    return False
                self.take_acks(min(due))
        return True

    def evict(self, count: int) -> None:
        room = None
        if self.write_policy == "write_back":
            self.evict_host(count)
            room = self.host.room
        plan = self.tree.evict(count, host_room=room)
        self.device.free(plan.device_pages.tolist())
        self.host.free(plan.host_pages.tolist())
        self.report.device_evicted += len(plan.device_pages)
        self.report.dropped_tokens += plan.dropped_tokens
        self.back_up(plan.write_back_nodes)

    def evict_host(self, room: int) -> None:
        """See to it that the host has room for that many pages, if that can be done."""
        if room > self.host.room:
            freed = self.tree.evict_host(room - self.host.room).host_pages.tolist()
            self.host.free(freed)
            self.report.host_evicted += len(freed)

    def back_up(self, nodes: list[int]) -> None:
        if not nodes:
            return
        self.evict_host(self.tree.plan_backup(nodes).pages)
        # Making room may have taken the host copy of an ancestor, so only this plan counts.
        plan = self.tree.plan_backup(nodes)
        if not plan.nodes or plan.pages > self.host.room:
            return  # the tree asks again at the next hit
        source, target = plan.device_pages.tolist(), self.host.alloc(plan.pages)
        ack = self.tree.begin_backup(plan.nodes, target)
        for a, b in zip(source, target, strict=True):
            self.host.content[b] = self.device.content[a]
        self.backups.append(Copy(ack, self.now + COPY_DELAY))
        self.report.copied_to_host += plan.pages

    def load_back(self, node: int) -> int:
        """Bring a path back to device; returns the tokens, 0 if there is no room."""
        plan = self.tree.plan_load_back(node)
        if not self.make_room(plan.pages):
            plan.cancel()
            return 0
        target = self.device.alloc(plan.pages)
        for a, b in zip(plan.host_pages.tolist(), target, strict=True):
            self.device.content[b] = self.host.content[a]
        ack = self.tree.begin_load_back(plan, target)
        self.loads.append(Copy(ack, self.now + COPY_DELAY))
        self.report.copied_to_device += plan.pages
        return plan.pages * PAGE_SIZE

    def take_acks(self, now: int) -> None:
        while self.backups and self.backups[0].due <= now:
            done = self.tree.finish_backup(self.backups.popleft().ack)
            self.device.free(done.device_pages.tolist())
            self.report.device_evicted += len(done.device_pages)
        while self.loads and self.loads[0].due <= now:
            self.tree.finish_load_back(self.loads.popleft().ack)

    def verify(self, pool: Pool, pages: list[int], turn: Turn) -> None:
        found = [pool.content.get(page) for page in pages]
        if found != turn.content[: len(pages)]:
            raise InvariantError(f"request {self.now}: a hit on {pool.name} returned pages of other tokens")
        self.report.verified += len(pages)

    def close(self) -> None:
        """Finish what runs, check that nothing leaked, and empty the tree."""
        while self.running:
            self.finish(self.running.popleft())
        self.take_acks(self.now + COPY_DELAY)
        self.tree.check_invariants()
        if self.tree.protected_tokens:
            raise InvariantError(f"{self.tree.protected_tokens} tokens are still locked at the end")
        gone = self.tree.evict(self.device.size, host_room=0)
        self.device.free(gone.device_pages.tolist())
        self.host.free(gone.host_pages.tolist())
        self.host.free(self.tree.evict_host(self.host.size).host_pages.tolist())
        self.device.check_all_free()
        self.host.check_all_free()
        if len(self.tree):
            raise InvariantError(f"{len(self.tree)} nodes are left in an empty tree")


def run(arguments: argparse.Namespace) -> int:
    for name in ("requests", "clients", "device_pages", "host_pages"):
        if getattr(arguments, name) < 1:
            raise ArgumentError(f"--{name.replace('_', '-')}: {getattr(arguments, name)} is less than 1")
    known = PrefixTree.eviction_policies()
    if arguments.policy is not None and arguments.policy not in known:
        raise ArgumentError(f"--policy: {arguments.policy!r} is none of {', '.join(known)}")
    policies = [arguments.policy] if arguments.policy else known

    turns = list(conversations(arguments.requests, arguments.clients, arguments.seed))
    tokens = sum(turn.prompt_len for turn in turns)
    if not arguments.json:
        print(
            f"{len(turns)} requests of {arguments.clients} clients, {tokens:,} prompt tokens, "
            f"pages of {PAGE_SIZE} tokens\n"
            f"device {arguments.device_pages} pages, host {arguments.host_pages} pages, "
            f"hit rate of a cache without limits {100 * bound(turns):.1f} %\n"
        )
        print(HEADER)
    reports = []
    for policy in policies:
        for write_policy in WRITE_POLICIES:
            report = simulate(turns, policy, write_policy, arguments.device_pages, arguments.host_pages)
            reports.append(report)
            if not arguments.json:
                print(row(report))
                sys.stdout.flush()
    if arguments.json:
        print(
            json.dumps(
                {
                    "requests": len(turns),
                    "prompt_tokens": tokens,
                    "page_size": PAGE_SIZE,
                    "device_pages": arguments.device_pages,
                    "host_pages": arguments.host_pages,
                    "seed": arguments.seed,
                    "bound": round(bound(turns), 4),
                    "runs": [report.summary() for report in reports],
                }
            )
        )
    else:
        print(
            f"\n{sum(report.verified for report in reports):,} pages of hits verified: each held what was "
            "written for its tokens. Nothing leaked."
        )
    return 0


def simulate(
    turns: list[Turn], policy: str, write_policy: WritePolicy | None, device_pages: int, host_pages: int
) -> Report:
    engine = Engine(policy, write_policy, device_pages, host_pages)
    begin = time.perf_counter()
    for turn in turns:
        engine.serve(turn)
    engine.report.seconds = time.perf_counter() - begin
    engine.close()
    return engine.report


def bound(turns: list[Turn]) -> float:
    """The hit rate of a cache without limits."""
    seen: set[bytes] = set()
    hits = 0
    for turn in turns:
        for content in islice(turn.content, (turn.prompt_len - 1) // PAGE_SIZE):
            if content not in seen:
                break
            hits += PAGE_SIZE
        seen.update(turn.content)
    return hits / max(sum(turn.prompt_len for turn in turns), 1)


HEADER = (
    f"{'policy':9} {'host tier':13} {'hit % device':>12} {'host':>6} {'total':>6}"
    f" {'evicted':>8} {'to host':>8} {'to device':>9} {'dropped':>8} {'seconds':>8}"
)


def row(report: Report) -> str:
    total = max(report.prompt_tokens, 1)
    device = 100 * report.device_hit_tokens / total
    host = 100 * report.host_hit_tokens / total
    return (
        f"{report.policy:9} {report.write_policy or 'none':13}"
        f" {device:12.1f} {host:6.1f} {device + host:6.1f}"
        f" {report.device_evicted:8} {report.copied_to_host:8} {report.copied_to_device:9}"
        f" {report.dropped_tokens // PAGE_SIZE:8} {report.seconds:8.2f}"
    )
