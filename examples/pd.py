"""Prefill and decode in processes of their own, with nothing between them but a shared store.

    python examples/pd.py
    python examples/pd.py --storage 'mooncake://127.0.0.1:50051'

Two prefill processes compute prompts, one decode process answers them; each has a model, a device pool, a
host pool and a `UnifiedCache`, and what they share is one URL. The first process is the router: it hands
prompts to prefill, takes them to decode with the first token of the answer, and no KV passes through it.

To write an engine of this kind, read `Engine.admit`, then `PrefillEngine.prefill` and `DecodeEngine.decode`:
the calls of the cache are all there, in their order. What is left is a router and what checks the results:
every token against the same model without a cache, and the bytes of every page before and after its way
from one process to another, or off the device and back.

Exit status: 0 if all are equal; 1, with one line that says what is not, if they are not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import multiprocessing
import random
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

from unified_cache import CacheConfig, CapacityError, Request, StorageError, UnifiedCache, UnifiedCacheError
from unified_cache.demo.model import HEAD_DIM, KV_HEADS, VOCABULARY, ModelSize, make_model
from unified_cache.demo.workload import NEAR_TIE
from unified_cache.engines.transformers import PagedModel, generate_uncached
from unified_cache.pools.device import MhaDevicePool
from unified_cache.storage.urls import StorageUrl, backend_class

PAGE_SIZE = 16
MODEL = ModelSize(layers=4, hidden=256, intermediate=704)
LONGEST = 4096
SYSTEM, QUESTION = 96, (60, 100)  # tokens of the prompt that all share, and of what each asks behind it
ANSWER = 56
# The decode process gives its cache what it has computed after so many tokens. A page can leave the device
# only then, and only then it is stored: what was computed since is lost with the process.
INSERT_EVERY = 2 * PAGE_SIZE
# As long may what prefill has computed take to the store; what is not there then, decode computes.
STORE_SECONDS = 30.0
# The router waits so long for a process before it says that this one hangs.
REPLY_SECONDS = 300.0


@dataclass(frozen=True)
class Settings:
    """What all processes must agree on, and the size of one.

    Attributes:
        storage: URL of the store that all share; None: none.
        model: its name. Pages of another name are never hits, so each run of this example takes a new one.
        seed: of the weights.
        device_pages: of the device pool.
    """

    storage: str | None
    model: str
    seed: int
    device_pages: int


@dataclass(frozen=True)
class Admitted:
    """Where the tokens of a request came from when it was admitted, and what its pages held.

    Attributes:
        computed: tokens that went through the model until its first token, counted at the model's input.
        device, host, storage: tokens that were there.
        hit_digests: of the pages that were there.
    """

    tokens: int
    computed: int
    device: int
    host: int
    storage: int
    hit_digests: list[str]


@dataclass(frozen=True)
class Prefilled:
    """What prefill tells the router: the answer's first token. The KV is in the store.

    Attributes:
        settled: nothing was on its way to the store any more. What could not be stored is not there; decode
            computes it.
        digests: of the prompt's whole pages.
    """

    token: int
    admitted: Admitted
    settled: bool
    digests: list[str]


@dataclass(frozen=True)
class Job:
    """A request for decode.

    Attributes:
        name: the router's.
        tokens: the prompt and what was answered so far, at least the first token, which prefill has found.
        more: tokens that are still to be answered.
    """

    name: str
    tokens: Sequence[int]
    more: int


@dataclass(frozen=True)
class Retraction:
    """A request was off the device.

    Attributes:
        tokens: it had so many.
        before, after: digests of its pages, the last, half-filled one included.
        copied_back: pages that had to be copied to the device; the others had not left it.
    """

    tokens: int
    before: list[str]
    after: list[str]
    copied_back: int


@dataclass(frozen=True)
class Decoded:
    """An answer.

    Attributes:
        tokens: those that decode has found.
        digests: of all whole pages that have been computed.
        stored_before_end: pages that the process had stored when this answer's last token was found.
    """

    tokens: list[int]
    admitted: Admitted
    retractions: list[Retraction]
    digests: list[str]
    stored_before_end: int


# The engines


class Engine:
    """A model on a cache: what prefill and decode have in common."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)  # the model is tiny, and three processes share this machine
        model = make_model(MODEL, settings.seed, LONGEST, "cpu")
        self.pool = MhaDevicePool(settings.device_pages, PAGE_SIZE, MODEL.layers, KV_HEADS, HEAD_DIM)
        self.model = PagedModel(model, self.pool)
        # The model's own word for what was computed: nothing gets past its first layer.
        self.computed_tokens = 0
        model.get_input_embeddings().register_forward_pre_hook(self._count)
        config = CacheConfig(
            page_size=PAGE_SIZE,
            # What is inserted goes to the host at once, and from there to the store. With "write_back" it
            # would go when the device evicts it: too late for a request that waits for it in decode.
            write_policy="write_through",
            hicache_ratio=4.0,
            model=settings.model,
            # Decode has nothing to do with a request until its prompt is there. `storage_timeout` is the
            # limit that is left.
            prefetch_policy="wait_complete",
            prefetch_threshold=PAGE_SIZE,
        )
        self.cache = UnifiedCache(config, self.pool)
        self.storage_error = ""
        if settings.storage is not None:
            try:
                self.cache.attach_storage(settings.storage)
            except StorageError as error:
                # Without a store the process computes what it would have read. A later `attach_storage` also
                # stores what is on host by then.
                self.storage_error = str(error)

    def _count(self, module: Any, inputs: Any) -> None:
        self.computed_tokens += inputs[0].shape[1]

    def admit(self, request: Request) -> tuple[int, Admitted]:
        """Bring what was computed before to the device, and compute the rest; returns the next token."""
        on_device = request.device_length
        # 1. `begin` has asked the store for what is on no tier here. An engine with other requests to serve
        #    comes back when `request.prefetch_done()`.
        request.wait_prefetch()
        # 2. Host to device: device pages are taken, and the copy is queued.
        request.load_back()
        # 3. Pages for all tokens that have none. CapacityError: no room; abort, and admit it later.
        pages = request.extend()
        # 4. The bytes are there. (An engine with hooks in its layers takes `cache.begin_forward` in place of
        #    this, and computes the first layers while the last ones are copied.)
        request.wait()
        hit, before = request.device_length, self.computed_tokens
        hit_digests = self.digests(request, hit)
        # 5. Compute from there on. A hit always leaves a token, so there is a next one.
        token = self.model.compute(request.tokens[hit:], pages, hit)
        from_storage = min(request.storage_hit_length, hit - on_device)
        return token, Admitted(
            tokens=len(request.tokens),
            computed=self.computed_tokens - before,
            device=on_device,
            host=hit - on_device - from_storage,
            storage=from_storage,
            hit_digests=hit_digests,
        )

    def digests(self, request: Request, length: int) -> list[str]:
        """SHA-256 of keys and values of the first `length` tokens, page by page, as they lie on device."""
        digests = []
        for at, page in enumerate(request.pages[: -(-length // PAGE_SIZE)].tolist()):
            digest = hashlib.sha256()
            for layer in range(self.pool.layers):
                for half in (self.pool.k(layer), self.pool.v(layer)):
                    digest.update(half[page, : length - at * PAGE_SIZE].contiguous().cpu().numpy().tobytes())
            digests.append(digest.hexdigest()[:16])
        return digests

    def close(self) -> None:
        """Store what is on its way, and end."""
        self.cache.close()


class PrefillEngine(Engine):
    """Computes prompts, and stores what it has computed."""

    def prefill(self, prompt: Sequence[int]) -> Prefilled:
        request = self.cache.begin(prompt)
        try:
            token, admitted = self.admit(request)
            digests = self.digests(request, len(prompt) // PAGE_SIZE * PAGE_SIZE)
            # 6. The cache takes the pages: others hit them from now on, they are copied to host at the next
            #    tick, and stored when that copy has ended.
            request.finish()
        except BaseException:
            request.abort()  # whatever has happened, its pages and locks are given back
            raise
        # 7. Decode finds in the store what is there when it asks, so this waits until nothing is under way.
        #    A busy engine, for which that never comes, answers at once and goes on with its loop: docs/pd.md.
        settled = self.cache.flush(STORE_SECONDS)
        return Prefilled(token, admitted, settled, digests)


@dataclass
class Decoding:
    """A request that is being answered.

    Attributes:
        next_token: found, but not computed yet: it has no KV.
        inserted: tokens that the cache has got.
    """

    job: Job
    request: Request
    admitted: Admitted
    next_token: int
    inserted: int
    answer: list[int]
    retractions: list[Retraction] = field(default_factory=list)
    # Of the retraction that it is in.
    before: list[str] = field(default_factory=list)


class DecodeEngine(Engine):
    """Answers several requests in turns; takes one off the device when there is no room for all."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.running: list[Decoding] = []  # oldest first
        self.retracted: deque[Decoding] = deque()

    def decode(self, jobs: Sequence[Job]) -> Iterator[tuple[str, int | Decoded]]:
        """Answer them; yields each token with its job's name when it is found, and at its end the answer.

        Raises:
            CapacityError: the device has not even room for one of them.
        """
        waiting = deque(jobs)
        try:
            while waiting or self.running or self.retracted:
                # Once a pass: takes copies and stored pages that have ended, begins what waits.
                self.cache.tick()
                # Room comes when a request ends, and goes first to those that were here before.
                while self.retracted and self._resume():
                    pass
                while waiting and not self.retracted and (decoding := self._begin(waiting[0])):
                    waiting.popleft()
                    yield decoding.job.name, decoding.next_token
                ended = False
                while not ended:
                    # An engine computes all of them in one forward; this one has them take turns.
                    for decoding in list(self.running):
                        if decoding not in self.running:
                            continue  # it was retracted for one that came before it
                        if len(decoding.answer) == decoding.job.more:
                            yield decoding.job.name, self._finish(decoding)
                            ended = True
                        elif self._step(decoding):
                            yield decoding.job.name, decoding.next_token
                    self.cache.tick()
        except BaseException:
            for decoding in (*self.running, *self.retracted):
                decoding.request.abort()
            self.running.clear()
            self.retracted.clear()
            raise

    def _begin(self, job: Job) -> Decoding | None:
        """Admit a request; None if there is no room now."""
        request = self.cache.begin(job.tokens)
        try:
            token, admitted = self.admit(request)
            request.insert()
        except CapacityError:
            request.abort()
            if not self.running:
                raise  # nobody's end would make room
            return None
        except BaseException:
            request.abort()
            raise
        decoding = Decoding(job, request, admitted, token, len(job.tokens), [token])
        self.running.append(decoding)
        return decoding

    def _step(self, decoding: Decoding) -> bool:
        """One more token of one request; False if it had to leave the device instead."""
        request = decoding.request
        while True:
            try:
                pages = request.extend([decoding.next_token])
                break
            except CapacityError:
                # Nothing was added. The youngest gives way; its pages are free when their copy to host has
                # ended, for which the next `extend` waits.
                if len(self.running) == 1:
                    raise
                youngest = self.running[-1]
                self._retract(youngest)
                if youngest is decoding:
                    return False
        length = len(request.tokens)
        decoding.next_token = self.model.compute([decoding.next_token], pages, length - 1)
        decoding.answer.append(decoding.next_token)
        if length - decoding.inserted >= INSERT_EVERY:
            # Not chunked=True: that is for parts of a prompt, which no policy takes to host before its end.
            request.insert()
            decoding.inserted = length
        return True

    def _retract(self, decoding: Decoding) -> None:
        """Off the device. What the cache has of it stays in the tree, which moves it to host when it must;
        what was computed since goes to host by itself, the half-filled page too."""
        request = decoding.request
        decoding.before = self.digests(request, len(request.tokens))
        request.retract()
        self.running.remove(decoding)
        self.retracted.append(decoding)

    def _resume(self) -> bool:
        """Back on the device, with the same bytes; False if there is no room now."""
        decoding = self.retracted[0]
        request = decoding.request
        loaded = self.cache.stats()["load_pages"]
        try:
            request.resume()
        except CapacityError:
            if not self.running:
                raise
            return False
        request.wait()
        self.retracted.popleft()
        self.running.append(decoding)
        after = self.digests(request, len(request.tokens))
        copied = self.cache.stats()["load_pages"] - loaded
        decoding.retractions.append(Retraction(len(request.tokens), decoding.before, after, copied))
        return True

    def _finish(self, decoding: Decoding) -> Decoded:
        request = decoding.request
        digests = self.digests(request, len(request.tokens) // PAGE_SIZE * PAGE_SIZE)
        stored = self.cache.stats()["storage_written_pages"]
        # The rest of the answer goes to the cache too: the next turn begins with it.
        request.finish()
        self.running.remove(decoding)
        return Decoded(decoding.answer, decoding.admitted, decoding.retractions, digests, stored)

    def settle(self) -> bool:
        """Wait until all answers are stored; False if that took too long."""
        return self.cache.flush(STORE_SECONDS)


# Processes

ENGINES = {"prefill": PrefillEngine, "decode": DecodeEngine}


def serve(kind: str, settings: Settings, router: Connection) -> None:
    """The main function of an engine's process: calls come through `router`, what they give goes back."""
    try:
        engine: Any = ENGINES[kind](settings)
        router.send(("ready", engine.storage_error))
        while True:
            try:
                name, arguments = router.recv()
            except EOFError:
                break  # the router is gone
            try:
                result = getattr(engine, name)(*arguments)
                if isinstance(result, Iterator):
                    for part in result:
                        router.send(("part", part))
                    result = None
                router.send(("end", result))
            except UnifiedCacheError as error:
                router.send(("error", f"{type(error).__name__}: {error}"))
            if name == "close":
                return
        engine.close()
    except (BrokenPipeError, KeyboardInterrupt):
        pass  # the router is gone


class ProcessError(Exception):
    """A process has died, hangs, or says that something went wrong."""


class Process:
    """An engine in a process of its own, as the router sees it."""

    def __init__(self, name: str, kind: str, settings: Settings, target: Any = serve) -> None:
        self.name = name
        # A new interpreter, not a copy of this one: torch has threads, and CUDA survives no fork.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(kind, settings, theirs), name=name, daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def receive(self) -> Any:
        """What comes next: ("ready" | "part" | "end", what).

        Raises:
            ProcessError: nothing comes any more, or an error.
        """
        if not self._connection.poll(REPLY_SECONDS):
            raise ProcessError(f"{self.name} has said nothing for {REPLY_SECONDS:.0f} s")
        try:
            kind, what = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise ProcessError(f"{self.name} has died (exit code {self.process.exitcode})") from None
        if kind == "error":
            raise ProcessError(f"{self.name}: {what}")
        return kind, what

    def send(self, name: str, *arguments: Any) -> None:
        """Call a method of the engine; `receive` has what comes of it."""
        try:
            self._connection.send((name, arguments))
        except (BrokenPipeError, ConnectionResetError):
            self.process.join()
            raise ProcessError(f"{self.name} has died (exit code {self.process.exitcode})") from None

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the engine and wait for its result."""
        self.send(name, *arguments)
        return self.receive()[1]

    def stream(self, name: str, *arguments: Any) -> Iterator[Any]:
        """The same of one that yields."""
        self.send(name, *arguments)
        while (received := self.receive())[0] == "part":
            yield received[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None and self.process.is_alive():
                self.call("close")
                self.process.join(REPLY_SECONDS)
        finally:
            self.process.kill()  # nothing to do if it has ended
            self.process.join()
            self._connection.close()


# The router, and what is right


class DifferenceError(Exception):
    """Something is not what it is without a cache, or what it was in another process."""


def require(equal: bool, what: str) -> None:
    if not equal:
        raise DifferenceError(what)


@dataclass
class Conversation:
    """A prompt, what the model answers without a cache, what the user says to that, and what comes next."""

    prompt: list[int]
    answer: list[int]
    next_prompt: list[int]
    next_token: int


class Reference:
    """The same model without a cache."""

    def __init__(self, seed: int) -> None:
        self._model = make_model(MODEL, seed, LONGEST, "cpu")
        self._random = random.Random(seed)

    def text(self, length: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(length)]

    def conversation(self, system: list[int], tokens: int = ANSWER) -> Conversation:
        """One in which no token hangs on rounding (see `NEAR_TIE`); that depends on the model alone."""
        while True:
            prompt = system + self.text(self._random.randint(*QUESTION))
            first = generate_uncached(self._model, prompt, tokens)
            next_prompt = prompt + first.tokens + self.text(QUESTION[0])
            second = generate_uncached(self._model, next_prompt, 1)
            if min(*first.margins, *second.margins) > NEAR_TIE:
                return Conversation(prompt, first.tokens, next_prompt, second.tokens[0])


def decode_pages(conversations: Sequence[Conversation], system: int = SYSTEM) -> int:
    """A device pool that holds all prompts, and one conversation to its end, but not all of them."""
    begins = [
        len(conversation.prompt) // PAGE_SIZE + 1 - system // PAGE_SIZE for conversation in conversations
    ]
    return system // PAGE_SIZE + sum(begins) + 2  # each of them grows by more than two


def run(storage: str, seed: int) -> None:
    """Print the table.

    Raises:
        DifferenceError: something is not equal.
        ProcessError: a process failed.
    """
    begun = time.perf_counter()
    torch.set_num_threads(1)
    prefill = Settings(storage, f"pd-example-{uuid.uuid4().hex}", seed, device_pages=128)
    with contextlib.ExitStack() as processes:
        first, second = (
            processes.enter_context(Process(name, "prefill", prefill)) for name in ("prefill 1", "prefill 2")
        )
        reference = Reference(seed)
        system = reference.text(SYSTEM)
        talks = {name: reference.conversation(system) for name in "ABC"}
        pages = decode_pages([talks["A"], talks["B"]])
        decode = processes.enter_context(
            Process("decode", "decode", dataclasses.replace(prefill, device_pages=pages))
        )
        for process in (first, second, decode):
            error = process.receive()[1]
            require(not error, f"{process.name}: {error}")
        print(
            f"Llama, {MODEL.layers} layers of {MODEL.hidden}; pages of {PAGE_SIZE} tokens; "
            f"decode has {pages} pages on device\nstore: {storage}\n"
        )
        print(f"{'':12}{'':16}{'tokens':>7}{'computed':>10}{'device':>8}{'host':>6}{'store':>7}  equal")
        digests: dict[str, list[str]] = {}
        tokens = {}
        # Prefill computes the prompts. The second one begins as the first does.
        for name in "AB":
            done = _prefill(first, name, talks[name].prompt, talks[name].answer[0], digests)
            tokens[name] = done.token
        # Another process, which has computed nothing, has the same prompts, and one that begins like them.
        require(
            _prefill(second, "A", talks["A"].prompt, talks["A"].answer[0], digests).admitted.storage > 0,
            "prefill 2 found nothing of A in the store",
        )
        _prefill(second, "C", talks["C"].prompt, talks["C"].answer[0], digests)
        # Decode gets prompts with the first token of the answer, and finds the KV in the store.
        jobs = [Job(name, [*talks[name].prompt, tokens[name]], ANSWER - 1) for name in "AB"]
        answers: dict[str, Decoded] = {}
        for name, part in decode.stream("decode", jobs):
            if isinstance(part, Decoded):
                answers[name] = part
        retracted = _check_answers(answers, talks, digests)
        require(retracted > 0, "decode took no request off the device, though it is too small for two")
        require(decode.call("settle"), f"decode did not store its answers within {STORE_SECONDS:.0f} s")
        # The next turn hits what decode has computed, on whichever process it comes.
        for process, name in ((first, "A"), (second, "B")):
            digests[name] = answers[name].digests
            _prefill(process, name, talks[name].next_prompt, talks[name].next_token, digests, "next turn")
    print(
        f"\nEvery token as without a cache, every page the same bytes on its way; "
        f"{time.perf_counter() - begun:.0f} s."
    )


def _prefill(
    process: Process,
    name: str,
    prompt: list[int],
    token: int,
    digests: dict[str, list[str]],
    turn: str = "prompt",
) -> Prefilled:
    """Have a prompt computed, check it, print its row; `digests` has the pages of prompts by name."""
    done: Prefilled = process.call("prefill", prompt)
    require(done.token == token, f"{process.name}, {name}: token {done.token}, without a cache it is {token}")
    require(done.settled, f"{process.name}, {name}: not stored within {STORE_SECONDS:.0f} s")
    _check_hits(process.name, name, done.admitted, digests)
    digests[name] = done.digests
    print(_row(process.name, f"{name}, {turn}", done.admitted, "token, bytes"))
    return done


def _check_hits(process: str, name: str, admitted: Admitted, digests: Mapping[str, list[str]]) -> None:
    """Pages that were hit hold what they held where they were computed."""
    # Who has never seen the prompt before has what all of them begin with.
    known = digests.get(name) or next(iter(digests.values()), [])
    hit = admitted.hit_digests
    require(hit == known[: len(hit)], f"{process}, {name}: a page does not hold what was stored")
    there = admitted.device + admitted.host + admitted.storage
    require(admitted.computed == admitted.tokens - there, f"{process}, {name}: the model computed a hit anew")


def _check_answers(
    answers: Mapping[str, Decoded], talks: Mapping[str, Conversation], digests: Mapping[str, list[str]]
) -> int:
    """Check what decode has answered, print its rows; returns how often a request was off the device."""
    notes = []
    for name, answer in sorted(answers.items()):
        tokens, expected = answer.tokens, talks[name].answer[1:]
        differ = [at for at, pair in enumerate(zip(tokens, expected, strict=True), 1) if pair[0] != pair[1]]
        require(not differ, f"decode, {name}: another token than without a cache, first at {differ[:1]}")
        _check_hits("decode", name, answer.admitted, digests)
        print(_row("decode", f"{name}, answer", answer.admitted, f"{len(tokens)} tokens, bytes"))
        for off in answer.retractions:
            require(off.before == off.after, f"decode, {name}: other bytes after it was off the device")
            notes.append(
                f"decode took {name} off the device at {off.tokens} tokens and put it back: "
                f"{len(off.before)} pages, {off.copied_back} of them copied, the same bytes"
            )
    stored = min(answer.stored_before_end for answer in answers.values())
    notes.append(f"decode had stored {stored} pages of its own before the first answer was at its end")
    print(*(f"    {note}" for note in notes), sep="\n")
    return sum(len(answer.retractions) for answer in answers.values())


def _row(process: str, request: str, admitted: Admitted, equal: str) -> str:
    numbers = f"{admitted.tokens:>7}{admitted.computed:>10}{admitted.device:>8}{admitted.host:>6}"
    return f"{process:12}{request:16}{numbers}{admitted.storage:>7}  {equal}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="what all processes share, such as mmap:///tmp/kv?size=1GB; it keeps the run's pages, under a "
        "model name of their own (default: file:// in a folder that is removed afterwards)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of weights and prompts (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        if given.storage is not None:
            backend_class(StorageUrl.parse(given.storage).scheme)  # said at once, before anything is started
        with tempfile.TemporaryDirectory(prefix="unified-cache-pd-") as folder:
            run(given.storage or f"file://{folder}/store?size=64MB", given.seed)
    except (DifferenceError, ProcessError, UnifiedCacheError, OSError) as error:
        print(f"pd.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
