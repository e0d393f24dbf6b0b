"""A small engine with continuous batching on a `UnifiedCache`: paged attention, chunked prefill, preemption.

    python examples/engine.py

It is here to be copied from. These are the calls of the cache in the order in which a request meets them,
and the methods of `Engine` that make them:

    step         cache.tick()                    once a step: what has ended counts, what waits begins
    _bring_next  cache.begin(tokens)             look it up, lock what is there, ask storage in the background
                 request.prefetch_done()         storage was read, or is not waited for any longer
    _take_in     request.load_back()             what is on host, to device: queued
                 request.extend()                slots for all of it; CapacityError: later, nothing is lost
    _compute     cache.begin_forward(requests)   submits what is queued
                 forward.wait_until(layer)       in each layer: that layer of it is there
    _insert      request.insert(chunked=True)    a part of the prompt was computed: others can hit it
                 request.insert()                all of it was: from the next tick on it goes to host, and on
    _decodes     request.wait()                  what it has come to share with others is there
    _extend      request.extend([token])         a slot for the token that was found
    _insert      request.insert()                a page of the answer is full
    _found       request.finish()                the answer is complete: the next turn hits it

A device that is full:

    _put_off     request.retract()               to host, as it is; its pages come free when that has ended
    _take_in     request.resume()                and back
    _start_over  request.insert(), abort()       no room on host either: what the tree can keep is hit again
    _bring_next  cache.begin(..., resumed=True)  by this, and the rest is computed again

What was loaded may turn out not to have arrived: `wait`, the forward or `insert` is a `CopyError` then.
Nothing that such a forward has found is used; the request gives everything back, and computes what it can not
load.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unified_cache._torch import torch
from unified_cache.cache import UnifiedCache
from unified_cache.config import CacheConfig
from unified_cache.demo.model import HEAD_DIM, KV_HEADS, ModelSize, make_model
from unified_cache.demo.paged_llama import PagedLlama, Part
from unified_cache.demo.workload import Clients, Reference, Traffic
from unified_cache.engines.transformers import Generation
from unified_cache.errors import ArgumentError, CapacityError, CopyError, UnifiedCacheError
from unified_cache.pools.device import MhaDevicePool
from unified_cache.request import Request, as_priority, as_tokens

__all__ = ["Engine", "Event"]

# So many requests are begun before there is room for them, so that storage is read meanwhile.
_AHEAD = 4
# As long may what is under way take to make room for the only request that is left.
_LAST_WAIT_SECONDS = 30.0


@dataclass(frozen=True)
class Event:
    """What a step has found of one request.

    Attributes:
        id: as `Engine.add` returned it.
        token: the next token of the answer; None if the request has failed.
        generation: the answer and what is known of it, at its end; None before that.
        error: why the request has failed; None if it has not.
    """

    id: int
    token: int | None
    generation: Generation | None = None
    error: UnifiedCacheError | None = None


@dataclass(eq=False)
class _Sequence:
    """A request of the engine.

    Attributes:
        tokens: the prompt, and what was answered so far.
        length: of the prompt and the whole answer.
        arrived: when it came.
        request: what it holds in the cache; None: nothing, it waits.
        slots: its first tokens that have a slot on device.
        computed: of those, the ones whose keys and values are there.
        settled: all that its next forward reads is there. If not, `Request.insert` says after the forward
            whether it was.
        counted: the cache has counted its hits.
        load: bring what is on host. Not after that has failed.
        waited: it was alone, and has waited for room as long as it may.
    """

    id: int
    tokens: list[int]
    length: int
    namespace: dict[str, str | None]
    priority: int
    generation: Generation
    arrived: float
    request: Request | None = None
    slots: int = 0
    computed: int = 0
    settled: bool = False
    counted: bool = False
    load: bool = True
    waited: bool = False

    @property
    def held(self) -> Request:
        assert self.request is not None
        return self.request

    @property
    def begun_only(self) -> bool:
        """It holds what was found for it, and has computed nothing."""
        return self.request is not None and self.slots == 0

    def part(self, count: int) -> Part:
        """The next tokens to compute."""
        tokens = self.tokens[self.computed : self.computed + count]
        return Part(np.asarray(tokens, np.int64), self.computed, self.held.pages)


def _rank(sequence: _Sequence) -> tuple[int, int]:
    """Who comes first: the higher priority, then who was here before."""
    return -sequence.priority, sequence.id


class Engine:
    """Answers many requests at once, greedily; all calls on one thread.

    Args:
        model: a `LlamaForCausalLM` of transformers.
        cache: over `pool`. The engine holds nothing in it while it is `idle`.
        pool: the device pool, see `PagedLlama`.
        max_running: requests on device at a time.
        chunk: tokens that a forward computes at most: one for each answer that goes on, the rest for prompts.

    Raises:
        ArgumentError: sizes that can not be, a pool that does not fit the model or is not the cache's.
    """

    def __init__(
        self,
        model: Any,
        cache: UnifiedCache,
        pool: MhaDevicePool,
        *,
        max_running: int = 16,
        chunk: int = 256,
    ) -> None:
        if max_running < 1:
            raise ArgumentError(f"max_running must be an integer >= 1, not {max_running}")
        if chunk < max_running:
            raise ArgumentError(f"chunk must be an integer >= max_running, {max_running}, not {chunk}")
        if pool is not cache.device_pool:
            raise ArgumentError("pool must be the device pool of the cache, not another one")
        self._model = PagedLlama(model, pool)
        self._cache = cache
        self._pool = pool
        self._max_running = max_running
        self._chunk = chunk
        self._ids = 0
        # On device, and off it (not begun, begun, or retracted); both by rank.
        self._running: list[_Sequence] = []
        self._waiting: list[_Sequence] = []
        self._events: list[Event] = []  # that `step` has not returned
        # Of this step: what is computed, and that somebody had to go for lack of room.
        self._batch: dict[_Sequence, Part] = {}
        self._tight = False

    @property
    def idle(self) -> bool:
        """There is no request."""
        return not (self._running or self._waiting)

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model so far, of prompts and of answers."""
        return self._model.computed_tokens

    def add(
        self,
        prompt: Sequence[int] | npt.NDArray[np.integer[Any]],
        max_new_tokens: int,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> int:
        """Take a request; returns its id. The next steps compute it.

        Args:
            prompt: its tokens, at least one.
            max_new_tokens: of the answer, which is always that long.
            extra_key, cache_salt: its namespace: nothing is shared across.
            priority: the higher comes first, and takes the place of a lower one if need be.

        Raises:
            ArgumentError: a prompt or a namespace that can not be, or more tokens than the model takes or the
                device pool holds.
        """
        tokens = as_tokens(prompt)
        if len(tokens) == 0:
            raise ArgumentError("prompt must not be empty: there is nothing to answer")
        if int(tokens.max()) >= self._model.vocabulary:
            raise ArgumentError(
                f"prompt has token {tokens.max()}, those of the model are in 0..{self._model.vocabulary - 1}"
            )
        if max_new_tokens < 1:
            raise ArgumentError(f"max_new_tokens must be an integer >= 1, not {max_new_tokens}")
        for name, value in (("extra_key", extra_key), ("cache_salt", cache_salt)):
            if value is not None and not isinstance(value, str):
                raise ArgumentError(f"{name} must be a string or None, not {value!r}")
        length = len(tokens) + max_new_tokens
        # The last token is found, but not computed: it needs no slot.
        most = min(self._model.longest, self._pool.num_pages * self._pool.page_size + 1)
        if length > most:
            raise ArgumentError(
                f"prompt and answer have {length} tokens together, model and device pool take {most}"
            )
        self._ids += 1
        sequence = _Sequence(
            id=self._ids,
            tokens=tokens.tolist(),
            length=length,
            namespace={"extra_key": extra_key, "cache_salt": cache_salt},
            priority=as_priority(priority),
            generation=Generation(prompt_tokens=len(tokens)),
            arrived=time.perf_counter(),
        )
        insort(self._waiting, sequence, key=_rank)
        return sequence.id

    def abort(self, id: int) -> bool:
        """Forget a request, wherever it is; False if there is none of this id (any more)."""
        for place in (self._running, self._waiting):
            for sequence in place:
                if sequence.id == id:
                    place.remove(sequence)
                    self._give_back(sequence)
                    return True
        return False

    def step(self) -> list[Event]:
        """One forward of what is on device, or a wait if there is nothing else to do; returns what was found.

        If anything is raised inside, no request is lost: the next step goes on with all of them.
        """
        self._batch, self._tight = {}, False
        self._cache.tick()
        self._decodes()
        self._prompts()
        if self._batch:
            self._compute()
        elif not self._events:
            self._wait()
        events, self._events = self._events, []
        return events

    # What is computed in this step

    def _decodes(self) -> None:
        """Take up the sequences that have found a token which is to be computed now."""
        for sequence in list(self._running):
            if sequence not in self._running or sequence.computed < sequence.slots:
                continue  # it was put off for one before it, or it has a slot that is still to be filled
            # What is still on its way, the forward waits for, layer by layer.
            sequence.settled = sequence.held.loaded
            try:
                if sequence.settled:
                    sequence.held.wait()  # returns at once, unless a copy has failed
            except CopyError:
                self._start_over(sequence, load=False)
                continue
            if self._extend(sequence):
                self._batch[sequence] = sequence.part(1)

    def _extend(self, sequence: _Sequence) -> bool:
        """A slot for the token that was found last; False if it has to wait for that, or has failed."""
        while True:
            try:
                sequence.held.extend(sequence.tokens[sequence.slots :])
            except CapacityError as error:
                # Nothing was added. First those give way that have computed nothing; then who comes last.
                last = self._running[-1]
                if self._let_go():
                    continue
                if last is not sequence:
                    self._put_off(last)
                elif len(self._running) > 1:
                    self._put_off(sequence)
                    return False
                elif not self._last_room(sequence, error):
                    return False
            else:
                sequence.slots = len(sequence.tokens)
                sequence.waited = False
                return True

    def _prompts(self) -> None:
        """Take up parts of prompts, as many tokens as the forward has room for.

        Who waits comes to the device no earlier than that: until then others may compute what it shares.
        """
        budget = self._chunk - len(self._batch)
        places = list(self._running)
        while budget > 0:
            sequence = places.pop(0) if places else self._bring_next()
            if sequence is None:
                return
            count = min(sequence.slots - sequence.computed, budget)
            if count > 0 and sequence not in self._batch:
                sequence.settled = False
                self._batch[sequence] = sequence.part(count)
                budget -= count

    def _compute(self) -> None:
        """The forward, and what it has found."""
        prompts = sum(len(part.tokens) for sequence, part in self._batch.items() if not sequence.settled)
        tokens = sum(len(part.tokens) for part in self._batch.values())
        begun = time.perf_counter()
        try:
            forward = self._cache.begin_forward([sequence.held for sequence in self._batch])
            logits = self._model.forward(list(self._batch.values()), forward.wait_until)
            best = logits.topk(2)
            found = zip(
                best.indices[:, 0].tolist(),
                (best.values[:, 0] - logits.logsumexp(-1)).tolist(),
                ((best.values[:, 0] - best.values[:, 1]) / logits.std(-1)).tolist(),
                strict=True,
            )
        except CopyError:
            # Nobody says whose bytes are missing. Those who waited for theirs have them, and go on in the
            # next step. The others give back what they hold, or it would be copied again for their sake.
            self._let_go()
            for sequence in [sequence for sequence in self._batch if not sequence.settled]:
                self._start_over(sequence, load=False)
            return
        if prompts:
            # The cache weighs loading against this. It can not measure it where prompts take turns.
            self._cache.record_prefill(prompts, (time.perf_counter() - begun) * prompts / tokens)
        for (sequence, part), (token, logprob, margin) in zip(self._batch.items(), found, strict=True):
            if not self._insert(sequence, part.stop):
                continue
            if part.stop == len(sequence.tokens):
                self._found(sequence, token, logprob, margin)
            # Last: whatever is raised before, it is computed again.
            sequence.computed = part.stop

    def _insert(self, sequence: _Sequence, computed: int) -> bool:
        """Let others hit what was computed; False if it was computed from bytes that had not arrived."""
        try:
            if not sequence.settled:
                # After each part, and before what was found is believed.
                complete = computed == len(sequence.tokens)
                sequence.held.insert(chunked=not complete, computed=computed)
            elif computed % self._pool.page_size == 0:
                sequence.held.insert()  # only whole pages can be hit, or leave the device
        except CopyError:
            self._start_over(sequence, load=False)
            return False
        return True

    def _found(self, sequence: _Sequence, token: int, logprob: float, margin: float) -> None:
        generation = sequence.generation
        generation.add(token, logprob, margin, seconds=time.perf_counter() - sequence.arrived)
        sequence.tokens.append(token)
        if len(sequence.tokens) < sequence.length:
            self._events.append(Event(sequence.id, token))
            return
        self._running.remove(sequence)
        try:
            sequence.held.finish()
        except CopyError:
            sequence.held.abort()  # of what it shares something is missing now; it was there when it was read
        self._events.append(Event(sequence.id, token, generation))

    def _wait(self) -> None:
        """There is nothing to compute: wait for what is read from storage."""
        for sequence in self._waiting:
            if sequence.begun_only:
                sequence.held.wait_prefetch()
                return

    # To the device

    def _bring_next(self) -> _Sequence | None:
        """The first of those that wait comes to the device; None if none can now."""
        if self._tight:
            return None
        for sequence in self._waiting[:_AHEAD]:
            if sequence.request is None:
                sequence.request = self._cache.begin(
                    sequence.tokens,
                    extra_key=sequence.namespace["extra_key"],
                    cache_salt=sequence.namespace["cache_salt"],
                    priority=sequence.priority,
                    resumed=sequence.counted,
                )
        for sequence in list(self._waiting):
            # Who waits for storage lets others pass.
            if sequence.request is not None and (sequence.held.retracted or sequence.held.prefetch_done()):
                return sequence if self._bring(sequence) else None
        return None

    def _bring(self, sequence: _Sequence) -> bool:
        """A sequence comes to the device; False if there is no room now, or if it has failed."""
        while True:
            error: CapacityError | None = None
            if len(self._running) < self._max_running and self._fits(sequence):
                try:
                    self._take_in(sequence)
                except CapacityError as no_room:
                    error = no_room
                else:
                    self._waiting.remove(sequence)
                    insort(self._running, sequence, key=_rank)
                    sequence.waited = False
                    return True
            if self._running:
                last = self._running[-1]
                if last.priority >= sequence.priority:
                    return False  # one of them will end
                self._put_off(last)
            elif not self._let_go(but=sequence) and error and not self._last_room(sequence, error):
                return False

    def _fits(self, sequence: _Sequence) -> bool:
        """There seems to be room for a sequence, and for the next page of each that runs.

        Without a look what it loads would lie on device before it turns out that the rest has no room.
        """
        if not self._running:
            return True
        room = (
            self._cache.usage()["device_free_pages"] * self._pool.page_size
            + self._cache.tree.evictable_tokens
        )
        there = 0 if sequence.held.retracted else sequence.held.device_length
        return room - len(self._running) * self._pool.page_size >= len(sequence.tokens) - there

    def _take_in(self, sequence: _Sequence) -> None:
        request = sequence.held
        if request.retracted:
            request.resume()
            return
        request.load_back(None if sequence.load else 0)
        before = self._cache.stats()
        request.extend()
        sequence.slots = len(sequence.tokens)
        sequence.computed = request.device_length
        if not sequence.counted:
            after = self._cache.stats()
            for tier in ("device", "host", "storage"):
                hits = after[f"hit_tokens_{tier}"] - before[f"hit_tokens_{tier}"]
                setattr(sequence.generation, f"{tier}_hit_tokens", hits)
            sequence.counted = True

    # Off the device

    def _put_off(self, sequence: _Sequence) -> None:
        """Take a sequence off the device, for one that comes before it."""
        self._tight = True
        self._batch.pop(sequence, None)
        # Of a prompt the tree has what was computed. An answer that is copied to host is not computed again.
        if self._cache.host_pool is not None and sequence.computed + 1 >= sequence.slots:
            try:
                sequence.held.retract()
            except (CapacityError, CopyError):
                pass
            else:
                self._running.remove(sequence)
                insort(self._waiting, sequence, key=_rank)
                return
        self._start_over(sequence)

    def _start_over(self, sequence: _Sequence, *, load: bool = True) -> None:
        """A sequence gives everything back, and is begun again later: what is not found then is computed.

        Args:
            load: False: what it loads does not arrive. It is computed.
        """
        sequence.load = sequence.load and load
        with contextlib.suppress(CopyError):
            sequence.held.insert(chunked=sequence.computed < sequence.slots, computed=sequence.computed)
        self._give_back(sequence)
        self._running.remove(sequence)
        insort(self._waiting, sequence, key=_rank)

    def _let_go(self, but: _Sequence | None = None, *, retracted: bool = False) -> bool:
        """Those that wait give back what they keep; False if none of them keeps anything.

        Args:
            but: not this one.
            retracted: also those that have computed something, and will compute it again.
        """
        keep = [
            sequence
            for sequence in self._waiting
            if (sequence.begun_only or (retracted and sequence.request is not None)) and sequence is not but
        ]
        for sequence in keep:
            self._give_back(sequence)
        self._tight = self._tight or bool(keep)
        return bool(keep)

    def _give_back(self, sequence: _Sequence) -> None:
        if sequence.request is not None:
            sequence.request.abort()
        sequence.request = None
        sequence.slots = sequence.computed = 0

    def _last_room(self, sequence: _Sequence, error: CapacityError) -> bool:
        """Nothing else is on device, and there is no room: may this one try again? If not, it has failed."""
        if not sequence.waited:
            sequence.waited = True
            self._cache.flush(_LAST_WAIT_SECONDS)  # what is under way may make room
            return True
        # What a retracted one shares stays on device if the host has no room for it.
        if self._let_go(sequence, retracted=True):
            return True
        self.abort(sequence.id)
        self._events.append(Event(sequence.id, None, error=error))
        return False


# What `python examples/engine.py` serves: more than the device holds, so that all tiers have something to do.

PAGE_SIZE = 16
MODEL = ModelSize(layers=4, hidden=256, intermediate=704)
TRAFFIC = Traffic(clients=4, turns=4, system=96, question=(60, 120), answer=24)
DEVICE_PAGES = 56


def make_engine(model: Any, name: str, storage: str) -> tuple[UnifiedCache, Engine]:
    """An engine and its cache, which has to be closed."""
    pool = MhaDevicePool(DEVICE_PAGES, PAGE_SIZE, MODEL.layers, KV_HEADS, HEAD_DIM, device=model.device)
    config = CacheConfig(
        page_size=PAGE_SIZE,
        write_policy="write_through",
        hicache_ratio=4.0,
        storage=storage,
        model=name,  # with other weights it has to be another one
        prefetch_policy="wait_complete",
        prefetch_threshold=PAGE_SIZE,
        storage_warm=0.0,  # what is read is what was asked for
    )
    cache = UnifiedCache(config, pool)
    return cache, Engine(model, cache, pool, chunk=128)


def serve(model: Any, storage: str, seed: int) -> bool:
    """Print a line for each answer; False if one is not what the model gives without a cache."""
    reference = Reference(model, Clients(TRAFFIC, seed), TRAFFIC)
    print("turn  client  prompt  device  host  storage  computed  first token  answer")
    equal, half = True, TRAFFIC.turns // 2
    for turns in (range(1, half + 1), range(half + 1, TRAFFIC.turns + 1)):
        # As after a restart of the process: what was on device and on host is gone.
        cache, engine = make_engine(model, f"engine-example-{seed}", storage)
        with cache:
            for turn in turns:
                asked = {engine.add(each.prompt, TRAFFIC.answer): each for each in reference.round()}
                while not engine.idle:
                    for event in engine.step():
                        if event.error is not None:
                            raise event.error
                        if (got := event.generation) is None:
                            continue  # a token; a server would send it now
                        hits = (got.device_hit_tokens, got.host_hit_tokens, got.storage_hit_tokens)
                        same = got.tokens == asked[event.id].reference.tokens
                        equal = equal and same
                        print(
                            f"{turn:4}{asked[event.id].client:8}{got.prompt_tokens:8}"
                            f"{hits[0]:8}{hits[1]:6}{hits[2]:9}{got.prompt_tokens - sum(hits):10}"
                            f"{1e3 * got.ttft_seconds:10.0f} ms  {'equal' if same else 'DIFFERS'}",
                            flush=True,
                        )
        if turns.stop <= TRAFFIC.turns:
            print("(restart)")
    return equal


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a few conversations; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="what is left after the restart, such as mmap:///tmp/kv?size=1GB (default: a folder that is "
        "removed afterwards)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of weights and prompts (default: %(default)s)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the model is tiny
    model = make_model(MODEL, given.seed, TRAFFIC.longest, "cpu")
    try:
        with tempfile.TemporaryDirectory(prefix="unified-cache-engine-") as folder:
            equal = serve(model, given.storage or folder, given.seed)
    except (UnifiedCacheError, OSError) as error:
        print(f"engine.py: {error}", file=sys.stderr)
        return 1
    if not equal:
        print("engine.py: an answer is not what the model gives without a cache", file=sys.stderr)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
