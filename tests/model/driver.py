"""Random calls, made on the production tree and on the model alike, compared after each one.

A script is a list of calls (op, number, symbols). The number is a bag of small choices, taken out one
by one; a live thing (node, lock, ack, plan, pin) is named by an index modulo the number of live ones,
and an op that finds nothing to act on does nothing. So every part of a script is a script.
"""

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.model.tree_model import (
    HOST_ORDERS,
    POLICIES,
    WRITE_POLICIES,
    Cleared,
    Evicted,
    LockError,
    ModelTree,
    Node,
    Removed,
    Stored,
    page_hashes,
    raw_tokens,
)

Call = tuple[str, int, tuple[int, ...]]
Script = list[Call]

NAMESPACES: list[tuple[str | None, str | None]] = [
    (None, None),
    (None, None),
    (None, None),
    ("a", None),
    ("b", None),
    (None, "s"),
    ("a", "s"),
    ("", None),
]


@dataclass(frozen=True)
class Config:
    page_size: int = 1
    eviction_policy: str = "lru"
    policy_options: tuple[tuple[str, int], ...] = ()
    write_policy: str | None = "write_through"
    write_through_threshold: int | None = None
    bigram: bool = False
    events: bool = False
    event_capacity: int = 65536
    pin_capacity: int | None = None
    host_order: str = "copies_first"
    device_pages: int = 24
    host_pages: int = 16
    big_tokens: bool = False
    take_each: bool = True  # take the events after every call; otherwise only where the script says so
    replica: bool = False

    def tree_arguments(self) -> dict[str, Any]:
        return {
            "page_size": self.page_size,
            "eviction_policy": self.eviction_policy,
            "policy_options": dict(self.policy_options) or None,
            "write_policy": self.write_policy,
            "write_through_threshold": self.write_through_threshold,
            "bigram": self.bigram,
            "events": self.events,
            "event_capacity": self.event_capacity,
            "pin_capacity": self.pin_capacity,
            "host_order": self.host_order,
        }


Factory = Callable[[Config], Any]


def model_factory(config: Config) -> ModelTree:
    return ModelTree(**config.tree_arguments())


def production_factory(config: Config) -> Any:
    from unified_cache import PrefixTree

    return PrefixTree(**config.tree_arguments())


def make_config(seed: int, eviction_policy: str) -> Config:
    rng = random.Random(f"config {seed}")
    page_size = rng.choice([1, 1, 1, 2, 2, 2, 16, 64])
    write_policy = rng.choice([*WRITE_POLICIES[:3] * 2, "write_through", None])
    options = tuple((name, rng.randrange(1, 4 * page_size + 1)) for name in POLICIES.get(eviction_policy, {}))
    return Config(
        page_size=page_size,
        eviction_policy=eviction_policy,
        policy_options=options if rng.random() < 0.7 else (),
        write_policy=write_policy,
        write_through_threshold=rng.choice([None, None, 1, 2, 4]),
        bigram=rng.random() < 0.3,
        events=rng.random() < 0.6,
        event_capacity=rng.choice([65536, 65536, 5, 20]),
        pin_capacity=None if write_policy is None else rng.choice([None, 20 * page_size, 5 * page_size]),
        device_pages=rng.choice([8, 16, 32, 64]),
        host_pages=rng.choice([4, 12, 24, 48]),
        big_tokens=rng.random() < 0.3,
        take_each=rng.random() < 0.6,
        replica=rng.random() < 0.25,
        host_order=rng.choice(HOST_ORDERS),
    )


# What evictions ask for: mostly little, so that the tree keeps a shape.
SIZES = (1, 2, 0, 3, 1, 2, 1, 2, 4, 1, 2, 3, 1, 2, 9, 100)

# How often each op comes.
WEIGHTS = {
    "insert": 28,
    "match": 12,
    "peek": 3,
    "match_many": 2,
    "cut": 4,
    "lock": 4,
    "unlock": 6,
    "host_lock": 2,
    "host_unlock": 3,
    "evict": 7,
    "drop": 2,
    "evict_host": 4,
    "evictable_host": 3,
    "backup": 11,
    "begin_plan": 3,
    "finish": 8,
    "cancel": 4,
    "plan_load": 4,
    "begin_load": 4,
    "cancel_plan": 1,
    "finish_load": 3,
    "cancel_load": 2,
    "insert_host": 6,
    "pin": 2,
    "pin_and_evict": 0.5,
    "unpin": 2,
    "expire": 1,
    "hashes": 1,
    "take": 2,
    "bad": 8,
    "reset": 0.1,
}


def generate(seed: int, n_calls: int, config: Config) -> Script:
    rng = random.Random(f"script {seed} {config.eviction_policy}")
    # each script has favourites of its own: states that need several rare ops in a row are met in time
    weights = [w * (1 if op == "insert" else rng.choice([0.2, 1, 1, 4])) for op, w in WEIGHTS.items()]
    ops = rng.choices(list(WEIGHTS), weights, k=n_calls)
    script = []
    for op in ops:
        # mostly the same symbol, so that keys share long prefixes
        symbols = tuple(rng.choices([0, 1, 2], [6, 3, 1], k=rng.choice([0, 1, 1, 2, 2, 3, 4, 5, 8])))
        script.append((op, rng.randrange(10**15), symbols))
    return script


class Choices:
    """Small choices out of one number; 0 gives the first choice each time."""

    def __init__(self, number: int) -> None:
        self.number = number

    def take(self, count: int) -> int:
        self.number, choice = divmod(self.number, count)
        return choice

    def pick(self, items: Sequence[Any]) -> Any:
        return items[self.take(64) % len(items)]


class DifferenceError(Exception):
    """Production and model do not agree."""


@dataclass
class Failure:
    config: Config
    script: Script
    step: int
    message: str
    log: list[str] = field(default_factory=list)

    def report(self) -> str:
        lines = [
            f"call {self.step} of {len(self.script)}: {self.message}",
            "",
            "what was called:",
            *(f"  {line}" for line in self.log),
            "",
            "for tests/model/regressions.py:",
            "    (",
            f"        {self.config!r},",
            "        [",
            *(f"            {call!r}," for call in self.script),
            "        ],",
            "    ),",
        ]
        return "\n".join(lines)


def run(
    script: Script, config: Config, factory: Factory = production_factory, *, every: int = 10
) -> Failure | None:
    driver = Driver(config, factory, every)
    try:
        for call in script:
            driver.step(call)
        driver.check_everything()
        driver.take_events()
    except DifferenceError as error:
        return Failure(config, script, driver.steps - 1, str(error), driver.log)
    return None


# In the order in which they are tried: pools in which the same is met after fewer calls come first.
_SIMPLER_SETTINGS: list[dict[str, Any]] = [
    *({"device_pages": pages} for pages in (1, 2, 4, 8, 16)),
    *({"host_pages": pages} for pages in (1, 2, 4, 8, 16)),
    {"page_size": 1},
    {"page_size": 2},
    {"bigram": False},
    {"big_tokens": False},
    {"replica": False},
    {"events": False},
    {"event_capacity": 65536},
    {"take_each": True},
    {"pin_capacity": None},
    {"host_order": "copies_first"},
    {"policy_options": ()},
    {"eviction_policy": "lru", "policy_options": ()},
]
_SIZES = ("page_size", "device_pages", "host_pages")
# Two calls at a time are left out of scripts up to this length: what one makes another one may use up.
_MOST_IN_PAIRS = 24


def shrink(
    script: Script, config: Config, factory: Factory = production_factory, *, limit: int = 1500
) -> Failure | None:
    """Delta debugging: the shortest failing script found in `limit` runs, with all checks after each call."""
    every = 1 if run(script, config, factory, every=1) is not None else 10
    shrinker = _Shrinker(factory, every, limit)
    if not shrinker.fails(script, config):
        return None
    shrinker.shrink()
    return shrinker.best


class _Shrinker:
    """The shortest failing script so far, and what can be tried on it.

    Calls name live things by a number, so without one call the later ones may mean others. That is met by
    trying each call with simpler numbers, and by leaving out two calls where leaving out one does not do.
    """

    def __init__(self, factory: Factory, every: int, limit: int) -> None:
        self._factory, self._every, self._left = factory, every, limit
        self._tried: set[tuple[Config, tuple[Call, ...]]] = set()
        self.best: Failure | None = None

    @property
    def script(self) -> Script:
        assert self.best is not None
        return self.best.script

    @property
    def config(self) -> Config:
        assert self.best is not None
        return self.best.config

    def fails(self, script: Script, config: Config | None = None) -> bool:
        """Whether this fails: then it is the best, up to the call that fails."""
        config = self.config if config is None else config
        if self._left <= 0 or (config, tuple(script)) in self._tried:
            return False
        self._tried.add((config, tuple(script)))
        self._left -= 1
        failure = run(script, config, self._factory, every=self._every)
        if failure is not None:
            self.best = replace(failure, script=script[: failure.step + 1])
        return failure is not None

    def shrink(self) -> None:
        while True:
            before = self.script, self.config
            self._simplify_settings()
            self._leave_out_parts()
            self._simplify_calls()
            if (self.script, self.config) == before and not self._leave_out_pairs():
                return

    def _simplify_settings(self) -> None:
        for settings in _SIMPLER_SETTINGS:
            config = replace(self.config, **settings)
            if all(getattr(config, size) <= getattr(self.config, size) for size in _SIZES):
                self.fails(self.script, config)

    def _leave_out_parts(self) -> None:
        parts = 2
        while len(self.script) > 1:
            script = self.script
            size = max(1, len(script) // parts)
            if any(
                self.fails(script[:start] + script[start + size :]) for start in range(0, len(script), size)
            ):
                parts = max(parts - 1, 2)
            elif size == 1:
                return
            else:
                parts = min(parts * 2, len(script))

    def _leave_out_pairs(self) -> bool:
        script = self.script
        if len(script) > _MOST_IN_PAIRS:
            return False
        return any(
            self.fails(script[:first] + script[first + 1 : second] + script[second + 1 :])
            for second in range(len(script))
            for first in range(second)
        )

    def _simplify_calls(self) -> None:
        at = 0
        while at < len(self.script):
            op, number, symbols = self.script[at]
            tries: Script = [(op, 0, ()), (op, 0, symbols)]
            tries += [(op, number % 10**digits, symbols) for digits in (2, 4, 6, 8, 10, 12)]
            any(self._replaced(at, simpler) for simpler in tries if simpler != (op, number, symbols))
            if at < len(self.script):
                op, number, symbols = self.script[at]
                any(self._replaced(at, (op, number, symbols[:length])) for length in range(len(symbols)))
            at += 1

    def _replaced(self, at: int, call: Call) -> bool:
        return self.fails([*self.script[:at], call, *self.script[at + 1 :]])


def error_kind(error: BaseException) -> str:
    """LockError first: a production LockError may also derive from something built in."""
    names = [c.__name__ for c in type(error).__mro__]
    for name in ("LockError", "KeyError", "ValueError"):
        if name in names:
            return name
    return f"{type(error).__name__} ({error})"


def page_list(pages: Any) -> list[int]:
    """The page ids of a result; the array is then spoiled, since it must not be the tree's own."""
    if isinstance(pages, np.ndarray):
        if pages.dtype != np.uint32 or pages.ndim != 1:
            raise DifferenceError(f"pages come as {pages.dtype} with {pages.ndim} dimensions")
        out: list[int] = pages.tolist()
        if pages.flags.writeable:
            pages[:] = 0xEEEEEEEE
        return out
    return list(pages)


def hash_rows(hashes: Any) -> list[bytes]:
    if isinstance(hashes, np.ndarray) and (hashes.dtype != np.uint8 or hashes.shape[1:] != (32,)):
        raise DifferenceError(f"hashes come as {hashes.dtype} of shape {hashes.shape}")
    return [bytes(row) for row in hashes]


def event_tuple(event: Any) -> tuple[Any, ...]:
    kind = type(event).__name__
    if kind == "Stored":
        place = (event.parent, list(event.tokens), event.page_size, event.extra_key, event.cache_salt)
        return (kind, event.tier, list(event.hashes), *place)
    if kind == "Removed":
        return (kind, event.tier, list(event.hashes))
    return (kind,)


@dataclass
class Late:
    """A match whose pages are read some calls later: they are a snapshot."""

    match: Any
    pages: list[int]
    due: int


class Driver:
    """Index 0 of every list of sides, results and handles is the model."""

    def __init__(self, config: Config, factory: Factory, every: int) -> None:
        self.config = config
        self.factory = factory
        self.every = every
        self.model = model_factory(config)
        self.trees: list[Any] = [self.model, factory(config)]
        if config.replica:
            self.trees.append(factory(config))
        self.foreign = [model_factory(config)] + [factory(config) for _ in self.trees[1:]]
        self.sides = range(len(self.trees))
        self.ack_numbers: list[dict[Any, int]] = [{} for _ in self.trees]
        self.acks_given = 0
        self.log: list[str] = []
        self.steps = 0
        self.clock = 0.0
        self.buffers: list[Any] = []
        self.late: list[Late] = []
        self.mirror: dict[str, set[int]] = {"device": set(), "host": set()}
        self.touched: list[int] = []
        self.spent: dict[str, list[list[Any]]] = {k: [] for k in self.KINDS}
        self._start_empty()

    KINDS = ("lock", "host_lock", "pin", "plan", "backup", "load")

    def _start_empty(self) -> None:
        self.free_device = list(range(100, 100 + self.config.device_pages))
        self.free_host = list(range(500, 500 + self.config.host_pages))
        self.live: dict[str, list[list[Any]]] = {k: [] for k in self.KINDS}
        self.wanted: list[int] = []
        self.backup_plans: list[list[int]] = []

    def step(self, call: Call) -> None:
        op, number, symbols = call
        self.touched = []
        self.steps += 1
        getattr(self, f"op_{op}")(Choices(number), symbols)
        self._check_sizes()
        self._check_nodes(n for n in self.touched if self.model._is_live(n))
        if self.steps % self.every == 0:
            self.check_everything()

    # --- one call on every side

    def do(
        self,
        text: str,
        action: Callable[[int, Any], Any],
        view: Callable[[int, Any], Any] = lambda i, result: result,
        *,
        reads_only: bool = False,
    ) -> list[Any] | None:
        """Make a call on every side; the results, or None where it raised."""
        self.log.append(text)
        before = [self._digest(i) for i in self.sides]
        results: list[Any] = []
        errors: list[BaseException | None] = []
        for i in self.sides:
            try:
                results.append(action(i, self.trees[i]))
                errors.append(None)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a panic of the native side is not an Exception
                if i == 0 and not isinstance(error, (ValueError, KeyError, LockError)):
                    raise
                results.append(None)
                errors.append(error)
        for buffer in self.buffers:
            # nobody may still look at what was given
            for at in range(len(buffer)):
                buffer[at] = 77
        self.buffers = []
        if errors[0] is not None:
            self.log[-1] += f"  -> {error_kind(errors[0])}: {errors[0]}"
            allowed = {error_kind(e) for e in getattr(errors[0], "faults", [errors[0]])}
            for i in self.sides[1:]:
                error_i = errors[i]
                got = "no error" if error_i is None else error_kind(error_i)
                if got not in allowed:
                    raise DifferenceError(
                        f"{text}: raises {got}, model raises {sorted(allowed)}: {errors[0]}"
                    )
        else:
            for i in self.sides[1:]:
                if errors[i] is not None:
                    raise DifferenceError(f"{text}: raises {errors[i]!r}, model gives {results[0]}")
            views = [view(i, results[i]) for i in self.sides]
            self.log[-1] += f"  -> {views[0]}"
            for i in self.sides[1:]:
                self._same(f"{text}: result", views[i], views[0])
        after = [self._digest(i) for i in self.sides]
        if (reads_only or errors[0] is not None) and after != before:
            raise DifferenceError(f"{text}: digest changed by a call that must change nothing")
        if any(d != after[1] for d in after[1:]):
            raise DifferenceError(f"{text}: digests of two trees with the same calls differ: {after[1:]}")
        if self.config.take_each:
            self.take_events()
        return results if errors[0] is None else None

    def _digest(self, side: int) -> int:
        digest = getattr(self.trees[side], "digest", None)
        return 0 if digest is None else int(digest())

    def _same(self, what: str, got: Any, expected: Any) -> None:
        if got == expected:
            return
        if isinstance(got, dict) and isinstance(expected, dict):
            parts = [k for k in expected if got.get(k) != expected[k]]
            told = ", ".join(f"{k} is {got.get(k)}, model {expected[k]}" for k in parts)
            raise DifferenceError(f"{what}: {told}")
        raise DifferenceError(f"{what}: is {got}, model {expected}")

    def _ack_number(self, side: int, ack: Any) -> Any:
        if ack is None:
            return None
        return self.ack_numbers[side].get(ack, f"unknown ack {ack!r}")

    def _new_acks(self, acks: list[Any], kind: str) -> None:
        self.acks_given += 1
        for i in self.sides:
            if acks[i] in self.ack_numbers[i]:
                raise DifferenceError("an ack is given twice")
            self.ack_numbers[i][acks[i]] = self.acks_given
            if acks[i].kind != kind:
                raise DifferenceError(f"ack.kind is {acks[i].kind}, not {kind}")

    # --- what results look like

    def _match_view(self, side: int, m: Any, with_pages: bool = True) -> dict[str, Any]:
        view = {
            "device_length": m.device_length,
            "host_hit_length": m.host_hit_length,
            "last_device_node": m.last_device_node,
            "last_host_node": m.last_host_node,
            "pending_ack": self._ack_number(side, m.pending_ack),
        }
        if with_pages:
            view["device_pages"] = page_list(m.device_pages)
        return view

    def _insert_view(self, side: int, r: Any) -> dict[str, Any]:
        return {
            "prefix_len": r.prefix_len,
            "duplicate_pages": page_list(r.duplicate_pages),
            "device_pages": page_list(r.device_pages),
            "node": r.node,
            "backup_nodes": list(r.backup_nodes),
        }

    def _evict_view(self, side: int, e: Any) -> dict[str, Any]:
        return {
            "device_pages": page_list(e.device_pages),
            "host_pages": page_list(e.host_pages),
            "demoted_nodes": list(e.demoted_nodes),
            "write_back_nodes": list(e.write_back_nodes),
            "dropped_tokens": e.dropped_tokens,
        }

    def _info_view(self, side: int, info: Any) -> dict[str, Any]:
        at_root = info.id == self.model.root
        return {
            "id": info.id,
            "pages": info.pages,
            # whether the root has no pages or none at all is nobody's business
            "device_pages": None if at_root or info.device_pages is None else page_list(info.device_pages),
            "host_pages": None if at_root or info.host_pages is None else page_list(info.host_pages),
            "parent": info.parent,
            "hit_count": info.hit_count,
            "priority": info.priority,
            "lock_ref": info.lock_ref,
            "host_lock_ref": info.host_lock_ref,
            "locks": tuple(info.locks),
            "pending": self._ack_number(side, info.pending),
            "held": info.held,
            "pins": info.pins,
        }

    # --- checks

    def _check_sizes(self) -> None:
        names = (
            "evictable_tokens",
            "protected_tokens",
            "device_tokens",
            "host_tokens",
            "pending_host_tokens",
        )
        for name in (*names, "pinned_tokens", "root"):
            expected = getattr(self.model, name)
            for i in self.sides[1:]:
                self._same(name, getattr(self.trees[i], name), expected)
        for i in self.sides[1:]:
            self._same("len(tree)", len(self.trees[i]), len(self.model))

    def _check_nodes(self, ids: Iterable[int]) -> None:
        for node_id in ids:
            expected = self._info_view(0, self.model.node_info(node_id))
            for i in self.sides[1:]:
                try:
                    got = self._info_view(i, self.trees[i].node_info(node_id))
                except KeyError as error:
                    raise DifferenceError(f"node {node_id} is gone, model has {expected}") from error
                self._same(f"node {node_id}", got, expected)
                acks = [
                    [self._ack_number(side, ack) for ack in self.trees[side].pending_acks(node_id)]
                    for side in (0, i)
                ]
                self._same(f"pending_acks({node_id})", acks[1], acks[0])

    def check_everything(self) -> None:
        self.model.check_invariants()
        for i in self.sides[1:]:
            try:
                self.trees[i].check_invariants()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise DifferenceError(f"check_invariants: {error!r}") from error
        self._check_sizes()
        self._check_nodes([self.model.root, *(n.id for n in self.model.nodes())])
        for late in self.late:
            if late.due <= self.steps:
                self._same("pages of an old match", page_list(late.match.device_pages), late.pages)
        self.late = [late for late in self.late if late.due > self.steps]
        # the model's own accounts: every page is free or in the tree
        device = self.free_device + [p for n in self.model.nodes() for p in n.value or []]
        host = self.free_host + [p for n in self.model.nodes() for p in n.host_value or []]
        assert len(set(device)) == len(device) == self.config.device_pages
        assert len(set(host)) == len(host) == self.config.host_pages

    def take_events(self) -> None:
        taken = [[event_tuple(e) for e in tree.take_events()] for tree in self.trees]
        for i in self.sides[1:]:
            for at, expected in enumerate(taken[0]):
                if at >= len(taken[i]):
                    raise DifferenceError(f"event {at} is missing, model has {expected}")
                self._same(f"event {at}", taken[i][at], expected)
            self._same("events too many", taken[i][len(taken[0]) :], [])
        if not self.config.events:
            assert not taken[0]
            return
        # production's events alone must tell what each tier holds
        for event in taken[1]:
            self._replay(event)
        for tier, hashes in self.mirror.items():
            self._same(f"mirror of {tier}", sorted(hashes), sorted(self.model.tier_hashes(tier)))

    def _replay(self, event: tuple[Any, ...]) -> None:
        if event[0] == Cleared.__name__:
            self.mirror = {"device": set(), "host": set()}
            return
        held = self.mirror[event[1]]
        if event[0] == Removed.__name__:
            if not held.issuperset(event[2]):
                raise DifferenceError(f"{event} takes away what is not there")
            held.difference_update(event[2])
            return
        assert event[0] == Stored.__name__
        if held.intersection(event[2]):
            raise DifferenceError(f"{event} stores what is there")
        # under write_back a host copy may hang on nothing
        no_gaps = event[1] == "device" or self.config.write_policy != "write_back"
        if no_gaps and event[3] is not None and event[3] not in held:
            raise DifferenceError(f"{event} comes before its parent")
        held.update(event[2])

    # --- material

    def _token(self, symbol: int) -> int:
        return (0, 2**31 - 1, 2**32 - 1)[symbol] if self.config.big_tokens else symbol

    def _page_tokens(self, symbol: int) -> list[int]:
        """Pages differ in the last token, some in the first one too."""
        rest = [self._token(0)] * (self.config.page_size - 1)
        return [self._token(2), *rest] if symbol == 2 else [*rest, self._token(symbol)]

    def _text(self, symbols: Iterable[int]) -> list[int]:
        return [t for s in symbols for t in self._page_tokens(s)]

    def _tail(self, c: Choices) -> list[int]:
        ragged = c.take(3) == 2
        return [self._token(0)] * (c.take(64) % self.config.page_size if ragged else 0)

    def _key(self, c: Choices, symbols: Iterable[int]) -> tuple[list[int], tuple[str | None, str | None]]:
        """A key from scratch, or one that goes on where a live node ends or somewhat before."""
        base = c.take(2)
        namespace = c.pick(NAMESPACES)
        text = self._text(symbols)
        nodes = self.model.nodes()
        if base and nodes:
            node: Node = c.pick(self._near_unsettled() or nodes if c.take(4) == 3 else nodes)
            namespace = node.namespace
            whole = raw_tokens([p for n in node.path() for p in n.key])
            back = c.take(4) * self.config.page_size
            text = whole[: max(len(whole) - back, 0)] + text
        elif self.config.bigram and c.take(8) < 7:
            text.append(self._token(0))
        return text + self._tail(c), namespace

    def _buffer(self, values: Sequence[int], kind: int) -> Any:
        """The same numbers as another kind of buffer; spoiled after the call."""
        small = all(v < 2**31 for v in values)
        out: Any
        if kind == 0:
            out = np.array(values, dtype=np.int64)
        elif kind == 1 and small:
            out = np.array(values, dtype=np.int32)
        elif kind == 2:
            out = np.array(values, dtype=np.uint32)
        elif kind == 3:
            out = array("q", values)
        elif kind == 4:
            return list(values)
        else:
            out = np.repeat(np.array(values, dtype=np.int64), 2)[::2]
        self.buffers.append(out)
        return out

    def _any_node(self, c: Choices) -> int:
        near = self._near_unsettled()
        if near and c.take(3) == 2:
            return int(c.pick(near).id)
        ids: list[int] = [self.model.root, *(n.id for n in self.model.nodes())]
        return int(c.pick(ids[::-1]))

    def _near_unsettled(self) -> list[Node]:
        """Nodes that are held or pending, and those below them: chance alone seldom finds them."""
        return [
            n
            for n in self.model.nodes()
            if any(a.hold is not None or a.backup is not None or a.load is not None for a in n.path())
        ]

    def _positions(self, tokens: Sequence[int]) -> int:
        return max(len(tokens) - 1, 0) if self.config.bigram else len(tokens)

    def _whole(self, tokens: Sequence[int]) -> int:
        return self._positions(tokens) // self.config.page_size

    def _names(self, namespace: tuple[str | None, str | None]) -> dict[str, str | None]:
        return {"extra_key": namespace[0], "cache_salt": namespace[1]}

    def _spend(self, kind: str, handle: list[Any]) -> None:
        self.live[kind] = [h for h in self.live[kind] if h is not handle]
        self.spent[kind].append(handle)

    def _take_evicted(self, evicted: Evicted) -> None:
        self.free_device += evicted.device_pages
        self.free_host += evicted.host_pages
        self.touched += [*evicted.demoted_nodes, *evicted.write_back_nodes]

    def _evict(self, num_pages: int, room: int | None) -> None:
        results = self.do(
            f"evict({num_pages}, host_room={room})",
            lambda i, t: t.evict(num_pages, host_room=room),
            self._evict_view,
        )
        assert results is not None
        self._take_evicted(results[0])

    def _evict_host(self, num_pages: int) -> None:
        results = self.do(
            f"evict_host({num_pages})",
            lambda i, t: t.evict_host(num_pages),
            lambda i, h: (page_list(h.host_pages), list(h.gone)),
        )
        assert results is not None
        self.free_host += results[0].host_pages

    def _device_room(self, count: int) -> bool:
        if len(self.free_device) < count:
            self._evict(count - len(self.free_device), len(self.free_host))
        return len(self.free_device) >= count

    def _host_room(self, count: int) -> bool:
        if len(self.free_host) < count:
            self._evict_host(count - len(self.free_host))
        return len(self.free_host) >= count

    def _held(self) -> list[int]:
        return [h.span.node.id for h in self.model.holds]

    # --- ops: match, insert

    def op_match(self, c: Choices, symbols: tuple[int, ...]) -> None:
        deep, late, kind = c.take(4) < 3, c.take(4) == 3, c.take(6)
        key, namespace = self._key(c, symbols)
        results = self.do(
            f"match_prefix({key}, {namespace}, include_evicted={deep})",
            lambda i, t: t.match_prefix(
                self._buffer(key, kind), **self._names(namespace), include_evicted=deep
            ),
            lambda i, m: self._match_view(i, m, with_pages=not late),
        )
        assert results is not None
        self.touched += [results[0].last_device_node, results[0].last_host_node]
        if late:
            for m in results[1:]:
                self.late.append(Late(m, results[0].device_pages, self.steps + 1 + c.take(20)))

    def op_cut(self, c: Choices, symbols: tuple[int, ...]) -> None:
        """A match that ends inside a node which is held, pending, locked or pinned, if there is one."""
        size = self.config.page_size
        nodes = [n for n in self.model.nodes() if len(n.key) > size]
        nodes = [n for n in nodes if n.hold or n.backup or n.load or n.host_lock_ref or n.pins] or nodes
        if not nodes:
            return
        node: Node = c.pick(nodes)
        end = node.begin() + size * (1 + c.take(16) % (len(node.key) // size - 1))
        key = raw_tokens([p for n in node.path() for p in n.key][:end])
        results = self.do(
            f"match_prefix({key}, {node.namespace})",
            lambda i, t: t.match_prefix(self._buffer(key, 0), **self._names(node.namespace)),
            self._match_view,
        )
        assert results is not None
        self.touched += [results[0].last_host_node, node.id]

    def op_peek(self, c: Choices, symbols: tuple[int, ...]) -> None:
        deep, kind = c.take(4) < 3, c.take(6)
        key, namespace = self._key(c, symbols)
        self.do(
            f"peek_prefix({key}, {namespace}, include_evicted={deep})",
            lambda i, t: t.peek_prefix(
                self._buffer(key, kind), **self._names(namespace), include_evicted=deep
            ),
            self._match_view,
            reads_only=True,
        )

    def op_match_many(self, c: Choices, symbols: tuple[int, ...]) -> None:
        keys = [self._key(c, symbols[at:]) for at in range(c.take(4))]
        with_keys, with_salts = c.take(4) < 3, c.take(4) < 3
        kind = c.take(6)
        self.do(
            f"match_prefixes({keys}, {with_keys}, {with_salts})",
            lambda i, t: t.match_prefixes(
                [self._buffer(k, kind) for k, _ in keys],
                extra_keys=[n[0] for _, n in keys] if with_keys else None,
                cache_salts=[n[1] for _, n in keys] if with_salts else None,
            ),
            lambda i, matches: [self._match_view(i, m) for m in matches],
        )

    def op_insert(self, c: Choices, symbols: tuple[int, ...]) -> None:
        size = self.config.page_size
        kind, page_kind, mode = c.take(6), c.take(6), c.take(4)
        inserted_mode, priority, chunked = c.take(3), c.take(4) - 1, c.take(6) == 5
        how_much = c.take(16)
        key, namespace = self._key(c, symbols)
        count = self._whole(key)
        if count > self.config.device_pages // 2:
            key = key[: self.config.device_pages // 2 * size]
            count = self._whole(key)
        if not self._device_room(count):
            return
        peek = self.model.peek_prefix(key, extra_key=namespace[0], cache_salt=namespace[1])
        # modes: a stranger; one that goes on from its match; from a part of it; one that was given
        # the tree's pages and says nothing about it
        own = len(peek.device_pages)
        if mode == 0:
            own = 0
        if mode == 2:
            own = how_much % (own + 1)
        prev = own * size if mode in (1, 2) else 0
        fresh, self.free_device = self.free_device[: count - own], self.free_device[count - own :]
        below = peek.device_pages[:own]
        if prev and how_much % 2:
            below = [9000 + i for i in range(own)]  # what stands there is not looked at
        pages = below + fresh
        known = peek.device_length + peek.host_hit_length
        inserted = (0, known, how_much * size // 2)[inserted_mode]
        arguments = {
            "prev_prefix_len": prev,
            "inserted_len": inserted,
            "priority": priority,
            "chunked": chunked,
            **self._names(namespace),
        }
        results = self.do(
            f"insert({key}, {pages}, {arguments})",
            lambda i, t: t.insert(self._buffer(key, kind), self._buffer(pages, page_kind), **arguments),
            self._insert_view,
        )
        assert results is not None
        self.free_device += results[0].duplicate_pages
        self.touched += [results[0].node, *results[0].backup_nodes]
        if results[0].backup_nodes:
            self.wanted = list(results[0].backup_nodes)

    # --- ops: locks

    def _acquire(self, kind: str, method: str, node: int) -> None:
        results = self.do(
            f"{method}({node})", lambda i, t: getattr(t, method)(node), lambda i, receipt: "receipt"
        )
        assert results is not None
        self.live[kind].append(results)
        self.touched.append(node)

    def _release(self, kind: str, method: str, c: Choices) -> None:
        if self.live[kind]:
            handle = c.pick(self.live[kind])
            self.do(
                f"{method}({kind} {self.live[kind].index(handle)})",
                lambda i, t: getattr(t, method)(handle[i]),
            )
            self._spend(kind, handle)

    def op_lock(self, c: Choices, symbols: tuple[int, ...]) -> None:
        if len(self.live["lock"]) > 4:  # a tree that is locked all over does nothing any more
            self._release("lock", "dec_lock_ref", c)
        self._acquire("lock", "inc_lock_ref", self._any_node(c))

    def op_unlock(self, c: Choices, symbols: tuple[int, ...]) -> None:
        self._release("lock", "dec_lock_ref", c)

    def op_host_lock(self, c: Choices, symbols: tuple[int, ...]) -> None:
        if len(self.live["host_lock"]) > 3:
            self._release("host_lock", "dec_host_lock_ref", c)
        self._acquire("host_lock", "inc_host_lock_ref", self._any_node(c))

    def op_host_unlock(self, c: Choices, symbols: tuple[int, ...]) -> None:
        self._release("host_lock", "dec_host_lock_ref", c)

    # --- ops: eviction

    def op_evict(self, c: Choices, symbols: tuple[int, ...]) -> None:
        num_pages = SIZES[c.take(len(SIZES))]
        room = (None, 0, 1, 2, 3, 4, 5, 6, 8, len(self.free_host))[c.take(10)]
        self._evict(num_pages, room)

    def op_drop(self, c: Choices, symbols: tuple[int, ...]) -> None:
        held = self._held()
        many = c.take(3)
        nodes = held if many == 2 else [c.pick(held)] if held else []
        if c.take(2):
            nodes = nodes[::-1]
        results = self.do(f"drop({nodes})", lambda i, t: t.drop(nodes), self._evict_view)
        assert results is not None
        self._take_evicted(results[0])
        self.touched += nodes

    def op_evict_host(self, c: Choices, symbols: tuple[int, ...]) -> None:
        self._evict_host(SIZES[c.take(len(SIZES))])

    def op_evictable_host(self, c: Choices, symbols: tuple[int, ...]) -> None:
        limit = SIZES[c.take(len(SIZES))] if c.take(2) else 100
        self.do(f"evictable_host_pages({limit})", lambda i, t: t.evictable_host_pages(limit), reads_only=True)

    # --- ops: backup

    def op_backup(self, c: Choices, symbols: tuple[int, ...]) -> None:
        if self.config.write_policy is None:
            return
        which = c.take(3)
        later = c.take(4) == 3
        if which == 0:
            nodes = self.wanted
            self.wanted = []
        elif which == 1:
            nodes = self._held()[: 1 + c.take(4)]  # children are held before their parents
            if c.take(2):
                nodes = nodes[::-1]
        else:
            nodes = [self._any_node(c) for _ in range(1 + c.take(3))]
            if c.take(4) == 3:
                nodes.append(max(self.model.next_id - 1 - c.take(8), 0))  # dead, perhaps
        if not nodes:
            return
        results = self.do(
            f"plan_backup({nodes})",
            lambda i, t: t.plan_backup(nodes),
            lambda i, p: {
                "nodes": list(p.nodes),
                "pages": p.pages,
                "device_pages": page_list(p.device_pages),
            },
            reads_only=True,
        )
        assert results is not None
        planned = list(results[0].nodes)
        if later:
            self.backup_plans.append(planned)
        elif planned:
            self._begin_backup(planned, c.take(6))

    def op_begin_plan(self, c: Choices, symbols: tuple[int, ...]) -> None:
        """A plan that lay about for some calls, perhaps stale by now."""
        if self.backup_plans:
            nodes = c.pick(self.backup_plans)
            self.backup_plans.remove(nodes)
            if nodes:
                self._begin_backup(nodes, c.take(6))

    def _begin_backup(self, nodes: list[int], kind: int) -> None:
        count = sum(self.model.node_info(n).pages for n in nodes if self.model._is_live(n))
        if not self._host_room(count):
            return
        pages, self.free_host = self.free_host[:count], self.free_host[count:]
        acks = self.do(
            f"begin_backup({nodes}, {pages})",
            lambda i, t: t.begin_backup(nodes, self._buffer(pages, kind)),
            lambda i, ack: "ack",
        )
        if acks is None:
            self.free_host += pages
            return
        self._new_acks(acks, "backup")
        self.live["backup"].append(acks)
        self.touched += nodes

    def op_finish(self, c: Choices, symbols: tuple[int, ...]) -> None:
        if self.live["backup"]:
            below = [h for h in self.live["backup"] if self._below_another(h[0])]
            acks = c.pick(below if below and c.take(2) else self.live["backup"])
            results = self.do(
                f"finish_backup({self.ack_numbers[0][acks[0]]})",
                lambda i, t: t.finish_backup(acks[i]),
                lambda i, f: {"nodes": list(f.nodes), "device_pages": page_list(f.device_pages)},
            )
            assert results is not None
            self.free_device += results[0].device_pages
            self.touched += results[0].nodes
            self._spend("backup", acks)

    def _below_another(self, ack: Any) -> bool:
        """Part of this backup is below part of another one, and may have to wait for it."""
        nodes = [n for s in self.model.backups[ack].spans for n in s.parts()]
        return any(a.backup not in (None, ack) for n in nodes for a in n.path())

    def op_cancel(self, c: Choices, symbols: tuple[int, ...]) -> None:
        if self.live["backup"]:
            acks = c.pick(self.live["backup"])
            results = self.do(
                f"cancel_backup({self.ack_numbers[0][acks[0]]})",
                lambda i, t: t.cancel_backup(acks[i]),
                lambda i, pages: page_list(pages),
            )
            if results is not None:
                self.free_host += results[0]
                self._spend("backup", acks)

    # --- ops: load-back

    def op_plan_load(self, c: Choices, symbols: tuple[int, ...]) -> None:
        evicted = [n.id for n in self.model.nodes() if n.value is None]
        node = c.pick(evicted) if evicted and c.take(8) < 7 else self._any_node(c)
        if len(self.live["plan"]) > 2:
            self.op_cancel_plan(c, symbols)
        results = self.do(
            f"plan_load_back({node})",
            lambda i, t: t.plan_load_back(node),
            lambda i, p: {"nodes": list(p.nodes), "pages": p.pages, "host_pages": page_list(p.host_pages)},
        )
        assert results is not None
        self.live["plan"].append(results)
        self.touched += results[0].nodes

    def op_begin_load(self, c: Choices, symbols: tuple[int, ...]) -> None:
        if not self.live["plan"]:
            return
        plans = c.pick(self.live["plan"])
        kind = c.take(6)
        count = plans[0].pages + (1 if c.take(16) == 15 else 0)
        if not self._device_room(count):
            return
        pages, self.free_device = self.free_device[:count], self.free_device[count:]
        acks = self.do(
            f"begin_load_back(plan {self.live['plan'].index(plans)}, {pages})",
            lambda i, t: t.begin_load_back(plans[i], self._buffer(pages, kind)),
            lambda i, ack: "ack",
        )
        if acks is None:
            self.free_device += pages
            return
        self._new_acks(acks, "load_back")
        self.live["load"].append(acks)
        self._spend("plan", plans)
        self.touched += [n.id for n in plans[0].parts()]

    def op_cancel_plan(self, c: Choices, symbols: tuple[int, ...]) -> None:
        if self.live["plan"]:
            plans = c.pick(self.live["plan"])
            self.do(f"plan {self.live['plan'].index(plans)}.cancel()", lambda i, t: plans[i].cancel())
            self._spend("plan", plans)

    def op_finish_load(self, c: Choices, symbols: tuple[int, ...]) -> None:
        if self.live["load"]:
            acks = c.pick(self.live["load"])
            self.do(
                f"finish_load_back({self.ack_numbers[0][acks[0]]})",
                lambda i, t: t.finish_load_back(acks[i]),
            )
            self._spend("load", acks)

    def op_cancel_load(self, c: Choices, symbols: tuple[int, ...]) -> None:
        if self.live["load"]:
            acks = c.pick(self.live["load"])
            results = self.do(
                f"cancel_load_back({self.ack_numbers[0][acks[0]]})",
                lambda i, t: t.cancel_load_back(acks[i]),
                lambda i, pages: page_list(pages),
            )
            if results is not None:
                self.free_device += results[0]
                self._spend("load", acks)

    # --- ops: host insert

    def _below(self, c: Choices, symbols: tuple[int, ...]) -> tuple[Node, list[int]]:
        """An anchor and tokens below it, which often follow a path that is there."""
        nodes = self.model.nodes()
        anchor, text = self.model.root_node, self._text(symbols)
        if nodes and c.take(4) < 3:
            target: Node = c.pick(self._near_unsettled() or nodes if c.take(3) == 2 else nodes)
            path = [self.model.root_node, *target.path()]
            anchor = path[c.take(16) % len(path)]
            key = [p for n in path[path.index(anchor) + 1 :] for p in n.key]
            back = c.take(3) * self.config.page_size
            key = key[: max(len(key) - back, 0)]
            if key:
                return anchor, raw_tokens(key) + text
        if self.config.bigram:
            first = self._token(0) if anchor is self.model.root_node else anchor.key[-1][1]
            text = [first, *text]
        return anchor, text

    def op_insert_host(self, c: Choices, symbols: tuple[int, ...]) -> None:
        if self.config.write_policy is None:
            return
        size = self.config.page_size
        kind, page_kind, with_hashes, named = c.take(6), c.take(6), c.take(3) == 2, c.take(2)
        anchor, text = self._below(c, symbols)
        namespace = anchor.namespace
        if anchor is self.model.root_node:
            below = [n for n in anchor.children if raw_tokens(n.key)[:size] == text[:size]]
            namespace = c.pick(below).namespace if below else c.pick(NAMESPACES)
        elif not named:
            namespace = (None, None)
        text = text[: self.config.host_pages // 2 * size] + self._tail(c)
        count = self._whole(text)
        if not self._host_room(count):
            return
        # making room can have taken the anchor
        if not self.model._is_live(anchor.id):
            return
        pages, self.free_host = self.free_host[:count], self.free_host[count:]
        hashes = None
        if with_hashes:
            above = self.model.prefix_hashes(anchor.id)
            rows = page_hashes(
                text,
                size,
                parent=above[-1] if above else None,
                bigram=self.config.bigram,
                **self._names(namespace),
            )
            hashes = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(-1, 32).copy()
        results = self.do(
            f"insert_host({anchor.id}, {text}, {pages}, hashes={with_hashes}, {namespace})",
            lambda i, t: t.insert_host(
                anchor.id,
                self._buffer(text, kind),
                self._buffer(pages, page_kind),
                hashes=hashes,
                **self._names(namespace),
            ),
            lambda i, r: {
                "node": r.node,
                "duplicate_host_pages": page_list(r.duplicate_host_pages),
                "inserted_pages": r.inserted_pages,
            },
        )
        assert results is not None
        self.free_host += results[0].duplicate_host_pages
        self.touched += [anchor.id, results[0].node]

    # --- ops: pins, looking, events, reset

    def op_pin(self, c: Choices, symbols: tuple[int, ...]) -> None:
        node = self._any_node(c)
        # a pin matters most where device eviction meets it: on an unbacked leaf
        leaves = [n.id for n in self.model.nodes() if self.model._is_device_leaf(n) and n.host_value is None]
        if leaves and c.take(2):
            node = c.pick(leaves)
        if len(self.live["pin"]) > 4:
            self._release("pin", "unpin", c)
        until = self.clock + c.take(8) if c.take(2) and node != self.model.root else None
        results = self.do(
            f"pin({node}, {until})", lambda i, t: t.pin(node, expires_at=until), lambda i, pin: "pin"
        )
        if results is not None:
            self.live["pin"].append(results)
            self.touched.append(node)

    def op_pin_and_evict(self, c: Choices, symbols: tuple[int, ...]) -> None:
        """Unbacked leaves of one parent are pinned and all go: their room is asked for one by one."""
        leaves = [n for n in self.model.nodes() if self.model._is_device_leaf(n) and n.host_value is None]
        crowds = [n for n in self.model.nodes() if len([x for x in leaves if x.parent is n]) > 1]
        if not crowds:
            return
        parent: Node = c.pick(crowds)
        chosen = [n for n in leaves if n.parent is parent][:3]
        until = self.clock + c.take(4)
        for leaf in chosen:
            results = self.do(
                f"pin({leaf.id}, {until})",
                lambda i, t, node=leaf.id: t.pin(node, expires_at=until),  # type: ignore[misc]
                lambda i, pin: "pin",
            )
            if results is not None:
                self.live["pin"].append(results)
        pages = sum(len(n.key) for n in [*chosen, *parent.path()]) // self.config.page_size
        self._evict(100, max(pages - c.take(pages + 2) + 1, 0))

    def op_unpin(self, c: Choices, symbols: tuple[int, ...]) -> None:
        self._release("pin", "unpin", c)

    def op_expire(self, c: Choices, symbols: tuple[int, ...]) -> None:
        self.clock += c.take(4)
        self.do(f"expire_pins({self.clock})", lambda i, t: t.expire_pins(self.clock))
        for handle in [h for h in self.live["pin"] if h[0] not in self.model.pin_list]:
            self._spend("pin", handle)

    def op_hashes(self, c: Choices, symbols: tuple[int, ...]) -> None:
        node = self._any_node(c)
        method = ("page_hashes", "prefix_hashes")[c.take(2)]
        self.do(
            f"{method}({node})",
            lambda i, t: getattr(t, method)(node),
            lambda i, rows: hash_rows(rows),
            reads_only=True,
        )

    def op_take(self, c: Choices, symbols: tuple[int, ...]) -> None:
        self.take_events()

    def op_reset(self, c: Choices, symbols: tuple[int, ...]) -> None:
        self.do("reset()", lambda i, t: t.reset())
        for kind in self.KINDS:
            self.spent[kind] += self.live[kind]
        self._start_empty()

    # --- ops: calls that must fail and change nothing

    BAD = (
        "node",
        "page_count",
        "prev_prefix_len",
        "token",
        "ack",
        "foreign",
        "spent",
        "begin_backup",
        "insert_host",
        "drop",
        "match_many",
        "page",
    )

    def op_bad(self, c: Choices, symbols: tuple[int, ...]) -> None:
        getattr(self, f"bad_{self.BAD[c.take(len(self.BAD))]}")(c, symbols)

    def bad_node(self, c: Choices, symbols: tuple[int, ...]) -> None:
        node = c.take(self.model.next_id + 3)
        if self.model._is_live(node):
            node = 2**40
        methods: list[tuple[str, Callable[[Any], Any]]] = [
            ("inc_lock_ref", lambda t: t.inc_lock_ref(node)),
            ("inc_host_lock_ref", lambda t: t.inc_host_lock_ref(node)),
            ("node_info", lambda t: t.node_info(node)),
            ("pending_acks", lambda t: t.pending_acks(node)),
            ("page_hashes", lambda t: t.page_hashes(node)),
            ("prefix_hashes", lambda t: t.prefix_hashes(node)),
            ("plan_load_back", lambda t: t.plan_load_back(node)),
            ("drop", lambda t: t.drop([node])),
        ]
        if self.config.write_policy is not None:
            methods += [
                ("pin", lambda t: t.pin(node)),
                ("insert_host", lambda t: t.insert_host(node, [], [])),
            ]
        name, action = c.pick(methods)
        self.do(f"{name} of unknown node {node}", lambda i, t: action(t), lambda i, result: "no error")

    def bad_page_count(self, c: Choices, symbols: tuple[int, ...]) -> None:
        key, namespace = self._key(c, symbols)
        count = self._whole(key)
        count = count - 1 if count and c.take(2) else count + 1
        self.do(
            f"insert({key}, {count} pages, {namespace})",
            lambda i, t: t.insert(self._buffer(key, 0), list(range(count)), **self._names(namespace)),
        )

    def bad_prev_prefix_len(self, c: Choices, symbols: tuple[int, ...]) -> None:
        size = self.config.page_size
        key, namespace = self._key(c, symbols)
        known = self.model.peek_prefix(key, extra_key=namespace[0], cache_salt=namespace[1]).device_length
        prev = (known + size, known + 1, known - 1, -size)[c.take(4)]
        if prev % size == 0 and 0 <= prev <= known:
            return
        self.do(
            f"insert({key}, {namespace}, prev_prefix_len={prev})",
            lambda i, t: t.insert(
                self._buffer(key, 0),
                list(range(self._whole(key))),
                prev_prefix_len=prev,
                **self._names(namespace),
            ),
        )

    def bad_token(self, c: Choices, symbols: tuple[int, ...]) -> None:
        method, bad, where = c.take(4), (-1, 2**32)[c.take(2)], c.take(64)
        key, namespace = self._key(c, symbols)
        key = key or [0]
        key[where % len(key)] = bad
        names = self._names(namespace)
        pages = list(range(self._whole(key)))
        actions: list[tuple[str, Callable[[Any], Any]]] = [
            ("match_prefix", lambda t: t.match_prefix(self._buffer(key, 0), **names)),
            ("peek_prefix", lambda t: t.peek_prefix(self._buffer(key, 4), **names)),
            ("insert", lambda t: t.insert(self._buffer(key, 3), pages, **names)),
            ("insert_host", lambda t: t.insert_host(t.root, self._buffer(key, 0), pages, **names)),
        ]
        name, action = actions[method]
        self.do(f"{name}({key}, {namespace})", lambda i, t: action(t), lambda i, result: "no error")

    def bad_ack(self, c: Choices, symbols: tuple[int, ...]) -> None:
        """One that has ended, or is of the other kind."""
        methods = ("finish_backup", "cancel_backup", "finish_load_back", "cancel_load_back")
        which = c.take(4)
        kind, other = ("backup", "load") if which < 2 else ("load", "backup")
        acks = self.spent[kind] + self.spent[other] + self.live[other]
        if acks:
            handle = c.pick(acks)
            self.do(
                f"{methods[which]}(ack {self.ack_numbers[0][handle[0]]})",
                lambda i, t: getattr(t, methods[which])(handle[i]),
                lambda i, result: "no error",
            )

    def bad_foreign(self, c: Choices, symbols: tuple[int, ...]) -> None:
        pairs = [("inc_lock_ref", "dec_lock_ref"), ("inc_host_lock_ref", "dec_host_lock_ref")]
        if self.config.write_policy is not None:
            pairs.append(("pin", "unpin"))
        take, give = c.pick(pairs)
        foreign = [getattr(t, take)(t.root) for t in self.foreign]
        self.do(f"{give}(foreign)", lambda i, t: getattr(t, give)(foreign[i]))
        plans = [t.plan_load_back(t.root) for t in self.foreign]
        self.do("begin_load_back(foreign)", lambda i, t: t.begin_load_back(plans[i], []))

    def bad_spent(self, c: Choices, symbols: tuple[int, ...]) -> None:
        """A second release; after a reset also a first one."""
        actions: list[tuple[str, str, Callable[[Any, Any], Any]]] = [
            ("lock", "dec_lock_ref", lambda t, h: t.dec_lock_ref(h)),
            ("host_lock", "dec_host_lock_ref", lambda t, h: t.dec_host_lock_ref(h)),
            ("pin", "unpin", lambda t, h: t.unpin(h)),
            ("plan", "cancel", lambda t, h: h.cancel()),
            ("plan", "begin_load_back", lambda t, h: t.begin_load_back(h, list(range(h.pages)))),
        ]
        kind, name, action = c.pick(actions)
        if self.spent[kind]:
            handle = c.pick(self.spent[kind])
            self.do(f"{name}(spent {kind})", lambda i, t: action(t, handle[i]), lambda i, result: "no error")

    def bad_begin_backup(self, c: Choices, symbols: tuple[int, ...]) -> None:
        nodes = self.model.nodes()
        which = c.take(5)
        chosen: list[int] = []
        extra = 0
        if which == 0:
            pass
        elif which == 1:  # evicted or backed
            chosen = [n.id for n in nodes if n.value is None or n.host_value is not None][:1]
        elif which == 2:  # twice
            chosen = [n.id for n in nodes if n.value is not None and n.host_value is None][:1] * 2
        elif which == 3:  # too few or too many pages
            chosen = [n.id for n in nodes if n.value is not None and n.host_value is None][:1]
            extra = 1
        elif self.model._writes_through():  # before its parent
            unbacked = [n for n in nodes if n.value is not None and n.host_value is None]
            chosen = [n.id for n in unbacked if n.parent in unbacked][:1]
        if which > 0 and not chosen:
            return
        count = sum(self.model.node_info(n).pages for n in chosen) + extra
        self.do(
            f"begin_backup({chosen}, {count} pages)",
            lambda i, t: t.begin_backup(chosen, list(range(count))),
            lambda i, ack: "no error",
        )

    def bad_insert_host(self, c: Choices, symbols: tuple[int, ...]) -> None:
        if self.config.write_policy is None:
            self.do("insert_host without a host tier", lambda i, t: t.insert_host(t.root, [], []))
            return
        which = c.take(4)
        anchor, text = self._below(c, symbols)
        count = self._whole(text)
        names: dict[str, str | None] = {}
        hashes = None
        pages = list(range(count))
        if which == 0:
            pages.append(99)
        elif which == 1:
            hashes = np.zeros((count + 1, 32), dtype=np.uint8)
        elif which == 2 and anchor is not self.model.root_node:
            names = {"extra_key": "other"}
        elif which == 3 and self.config.bigram and anchor is not self.model.root_node and text:
            text[0] = 12345
        else:
            return
        self.do(
            f"insert_host({anchor.id}, {text}, {pages}, {names}), fault {which}",
            lambda i, t: t.insert_host(anchor.id, self._buffer(text, 0), pages, hashes=hashes, **names),
            lambda i, r: "no error",
        )

    def bad_drop(self, c: Choices, symbols: tuple[int, ...]) -> None:
        held = self._held()
        marked = [n.id for n in self.model.nodes() if n.hold is not None]
        nodes = held[:1] * 2
        if c.take(2):
            free = [i for i in (self.model.root, *(n.id for n in self.model.nodes())) if i not in marked]
            nodes = [*held[:1], c.pick(free)]
        if nodes:
            self.do(f"drop({nodes})", lambda i, t: t.drop(nodes), self._evict_view)

    def bad_match_many(self, c: Choices, symbols: tuple[int, ...]) -> None:
        good, namespace = self._key(c, symbols)
        if c.take(2):
            keys, extra_keys = [good, [*good, 2**32]], [namespace[0]] * 2
        else:
            keys, extra_keys = [good], [namespace[0]] * 2
        self.do(
            f"match_prefixes({keys}, extra_keys={extra_keys})",
            lambda i, t: t.match_prefixes([self._buffer(k, 0) for k in keys], extra_keys=extra_keys),
            lambda i, matches: "no error",
        )

    def bad_page(self, c: Choices, symbols: tuple[int, ...]) -> None:
        key, namespace = self._key(c, symbols)
        pages = list(range(self._whole(key)))
        if pages:
            pages[-1] = (-1, 2**32)[c.take(2)]
            kind = (0, 4)[c.take(2)]
            self.do(
                f"insert({key}, {pages}, {namespace})",
                lambda i, t: t.insert(
                    self._buffer(key, 0), self._buffer(pages, kind), **self._names(namespace)
                ),
            )
