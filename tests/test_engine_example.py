"""`examples/engine.py`: from whichever tier a prefix comes, the tokens are those of transformers without one.

What was skipped is counted at the model's own first module. Wrong bytes are shown to change the answer, so
that right answers mean something.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cache.support import LateCopies, LateLayers, MemoryStore
from tests.engine_support import (
    LOGPROB,
    LONGEST,
    PAGE,
    SEED,
    SIZE,
    Question,
    Served,
    check,
    counted,
    hits,
    question,
    text,
    tiny_model,
)
from unified_cache import ArgumentError, CacheConfig, CapacityError, UnifiedCache
from unified_cache.copies.cpu import CpuCopyEngine
from unified_cache.demo import engine as example
from unified_cache.demo.engine import Engine
from unified_cache.demo.model import HEAD_DIM, KV_HEADS
from unified_cache.engines.transformers import Generation
from unified_cache.pools.device import MhaDevicePool
from unified_cache.storage.page_format import HEADER_BYTES, checksums_of

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).parent.parent
ANSWER = 6


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    # One thread: the model is tiny, and the machine may have other work.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_model()
    torch.set_num_threads(threads)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Other prompts in each test."""
    return random.Random(request.node.name)


# One request, from each tier


def test_each_tier_gives_the_same_answer_and_only_the_rest_is_computed(
    model: Any, rng: random.Random, tmp_path: Path
) -> None:
    url = f"mmap://{tmp_path}/store?size=16MB"
    served = Served(model, 64, storage=url)
    asked = question(model, rng, [], 200, ANSWER)
    there = 192  # whole pages, and a token is left to compute

    def ask(expected: tuple[int, int, int]) -> Generation:
        before = served.engine.computed_tokens
        with counted(model) as forwards:
            (generation,) = served.ask(asked)
        assert hits(generation) == expected
        assert sum(forwards) == 200 - sum(expected) + ANSWER - 1
        assert sum(forwards) == served.engine.computed_tokens - before
        return generation

    ask((0, 0, 0))
    ask((there, 0, 0))
    served.cache.evict(64)
    assert served.cache.usage()["device_tree_pages"] == 0
    ask((0, there, 0))
    served.cache.reset()
    ask((0, 0, there))
    served.cache.close()

    done = subprocess.run(
        [sys.executable, "-m", "tests.engine_process", url],
        input=json.dumps([asked.prompt, ANSWER]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    other = json.loads(done.stdout)
    assert other["hits"] == [0, 0, there]
    assert other["computed"] == 200 - there + ANSWER - 1
    assert other["tokens"] == asked.expected.tokens
    pairs = zip(other["logprobs"], asked.expected.logprobs, strict=True)
    assert max(abs(a - b) for a, b in pairs) < LOGPROB


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_the_same_prompt_again_leaves_a_token_to_compute(model: Any, rng: random.Random, length: int) -> None:
    served = Served(model, 16, write_policy=None)
    asked = question(model, rng, [], length, ANSWER)
    assert [hits(served.ask(asked)[0]) for _ in range(2)] == [(0, 0, 0), ((length - 1) // PAGE * PAGE, 0, 0)]


def test_the_next_turn_hits_the_answer_before(model: Any, rng: random.Random) -> None:
    served = Served(model, 16, write_policy=None)
    first = question(model, rng, [], 28, ANSWER)
    (answer,) = served.ask(first)
    # Two whole pages, the second of which ends within the answer.
    (next_turn,) = served.ask(question(model, rng, first.prompt + answer.tokens, 20, ANSWER))
    assert hits(next_turn) == (32, 0, 0)


def test_a_prompt_is_computed_in_chunks_beside_answers_that_go_on(model: Any, rng: random.Random) -> None:
    served = Served(model, 64, chunk=32, write_policy=None)
    short, long = question(model, rng, [], 20, 30), question(model, rng, [], 150, ANSWER)
    id = served.add(short)
    served.run(3)
    other = served.add(long)
    with counted(model) as forwards:
        ended = served.run()
    # One token of the answer that goes on, and as much of the prompt as there is room for.
    assert forwards[:6] == [32] * 4 + [1 + 150 - 4 * 31, 2]
    assert set(ended) == {id, other}
    assert sum(forwards) == 150 + ANSWER - 1 + 30 - 3
    served.check_idle()


# Bytes that are wrong


def corrupt(folder: Path, *, checksums: bool) -> int:
    """Change the sign of keys and values in every stored page; returns how many there were."""
    objects = [path for path in folder.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"UCPG"]
    for path in objects:
        whole = np.fromfile(path, np.uint8)
        whole[HEADER_BYTES:].view(np.float32)[:] *= -1
        if checksums:
            header = whole[:HEADER_BYTES].reshape(1, -1).copy()
            sums = checksums_of(header)
            sums.make([0], [whole[HEADER_BYTES:].data])
            whole[HEADER_BYTES - 8 : HEADER_BYTES] = sums.values.view(np.uint8)
        whole.tofile(path)
    return len(objects)


@pytest.mark.parametrize("checksums", [True, False])
def test_stored_bytes_are_what_is_computed_with_unless_their_checksum_is_wrong(
    model: Any, rng: random.Random, tmp_path: Path, checksums: bool
) -> None:
    before = Served(model, 16, storage=tmp_path)
    asked = question(model, rng, [], 100, ANSWER)
    before.ask(asked)
    before.cache.close()
    assert corrupt(tmp_path, checksums=checksums) == 6
    after = Served(model, 16, storage=tmp_path)
    if checksums:
        # The control: if hits were not used, or answers not compared, this would be equal.
        after.add(asked)
        (wrong,) = after.run().values()
        assert isinstance(wrong, Generation)
        assert hits(wrong) == (0, 0, 96)
        assert wrong.tokens != asked.expected.tokens
        assert after.cache.stats()["storage_corrupt_pages"] == 0
    else:
        (right,) = after.ask(asked)
        assert hits(right) == (0, 0, 0)
        assert after.cache.stats()["storage_corrupt_pages"] > 0
    after.cache.close()


def test_what_is_on_device_is_what_is_computed_with(model: Any, rng: random.Random) -> None:
    served = Served(model, 16, write_policy=None)
    asked = question(model, rng, [], 100, ANSWER)
    served.ask(asked)
    assert served.pool.data is not None
    served.pool.data.neg_()
    served.add(asked)
    (wrong,) = served.run().values()
    assert isinstance(wrong, Generation)
    assert hits(wrong) == (96, 0, 0)
    assert wrong.tokens != asked.expected.tokens


# Copies and storage that fail


class BreaksInTheMiddle(CpuCopyEngine):
    """The first loads bring one layer, and garbage in its place, and then fail."""

    failures = 1

    def _copy(self, handle: Any, arrived: Callable[[int], None] | None) -> None:
        if handle.direction == "load" and self.failures:
            self.failures -= 1
            self.pool.data[:, :, handle.device_pages.astype(np.int64)] = 1e3
            assert arrived is not None
            arrived(0)
            raise OSError("on purpose")
        super()._copy(handle, arrived)

    pool: Any


class SilentLayers(LateLayers):
    """As on a GPU: the forward computes on, whatever has become of the load."""

    def wait(self, layer: int) -> None:
        while not self.done:
            assert self._engine.run("load")


class SilentCopies(LateCopies):
    def new_layer_events(self) -> LateLayers:
        return SilentLayers(self)


def broken_in_the_middle(device: Any, host: Any) -> CpuCopyEngine:
    engine = BreaksInTheMiddle(device.planes, host.planes, threads=1)
    engine.pool = device
    return engine


def failing(kind: type[LateCopies], times: int) -> Callable[[Any, Any], LateCopies]:
    """Copies of which the first `times` loads fail."""

    def make(device: Any, host: Any) -> LateCopies:
        left = times

        def fail(handle: Any) -> bool:
            nonlocal left
            left -= (fails := handle.direction == "load" and left > 0)
            return fails

        engine = kind.between(device, host)
        engine.fail = fail
        return engine

    return make


@pytest.mark.parametrize(
    "copies",
    [
        broken_in_the_middle,
        failing(LateCopies, 1),
        failing(LateCopies, 10**9),
        failing(SilentCopies, 1),
        failing(SilentCopies, 10**9),
    ],
    ids=["in the middle", "at once", "always", "unnoticed", "always unnoticed"],
)
def test_what_can_not_be_loaded_is_computed(model: Any, rng: random.Random, copies: Any) -> None:
    served = Served(model, 32, parts={"copies": copies})
    shared = text(rng, 64)
    asked = [question(model, rng, shared, 100, ANSWER) for _ in range(3)]
    other = question(model, rng, [], 40, 40)
    served.ask(asked[0])
    served.cache.evict(32)
    id = served.add(other)  # it is being answered when the load fails
    served.run(8)
    ids = [served.add(each) for each in asked]
    ended = served.run()
    for each, asked_now in zip([id, *ids], [other, *asked], strict=True):
        generation = ended[each]
        assert isinstance(generation, Generation)
        check(generation, asked_now)
    assert served.cache.stats()["failed_copies"] >= 1
    served.check_idle()
    # No load has worked, so everything was computed: nothing of the first answer is still on device.
    assert hits(served.ask(asked[0])[0])[0] > 0
    served.cache.close()


@pytest.mark.parametrize("call", ["exists", "get", "set"])
def test_a_storage_that_dies_under_load_is_done_without(model: Any, rng: random.Random, call: str) -> None:
    store = MemoryStore()
    shared = text(rng, 64)
    asked = [question(model, rng, shared, 60 + 20 * at, ANSWER) for at in range(5)]
    before = Served(model, 64, storage=store)
    before.ask(*asked[:3])
    before.cache.close()
    alive = len(store.pages)
    assert alive > 10

    served = Served(model, 24, storage=store)
    dead = False

    def die(name: str) -> None:
        nonlocal dead
        dead = dead or name == call

    store.before = die
    store.fault = lambda: "down" if dead else None
    served.ask(*asked, *reversed(asked))
    assert dead
    assert served.cache.stats()["storage_errors"] > 0
    served.cache.close(timeout=0.0)


# Many at once


@pytest.fixture(scope="module")
def crowd(model: Any) -> list[Question]:
    """Questions that share beginnings, some with priority."""
    rng = random.Random(11)
    shared = [text(rng, 48), text(rng, 20)]
    return [
        question(
            model,
            rng,
            rng.choice(shared),
            rng.randrange(5, 60),
            rng.randrange(20, 70),
            priority=rng.randrange(2),
        )
        for _ in range(9)
    ]


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back", None])
def test_many_at_once_with_too_little_room_answer_as_one_by_one(
    model: Any, crowd: list[Question], policy: Any
) -> None:
    served = Served(model, 16, write_policy=policy, hicache_ratio=3.0)
    answers = served.ask(*crowd)
    assert sum(answer.device_hit_tokens for answer in answers) > 0
    stats = served.cache.stats()
    # Else there was room for all of them, and this has shown less.
    assert (stats["requests_retracted"] if policy is not None else stats["requests_aborted"]) > 0
    # And once more, from wherever they are now.
    served.ask(*reversed(crowd))


def test_who_was_put_off_goes_on_with_the_bytes_it_had(model: Any, rng: random.Random) -> None:
    served = Served(model, 10, hicache_ratio=4.0)
    asked = [question(model, rng, [], 60, 40) for _ in range(2)]
    with counted(model) as forwards:
        served.ask(*asked)
    assert served.cache.stats()["requests_retracted"] == 1
    # Nothing was computed twice.
    assert sum(forwards) == 2 * (60 + 40 - 1)


def test_without_a_host_tier_it_computes_again_what_the_tree_has_not_kept(
    model: Any, rng: random.Random
) -> None:
    served = Served(model, 10, write_policy=None)
    asked = [question(model, rng, [], 60, 40) for _ in range(2)]
    with counted(model) as forwards:
        served.ask(*asked)
    stats = served.cache.stats()
    assert stats["requests_aborted"] >= 1
    assert 2 * (60 + 40 - 1) < sum(forwards) < 2 * (60 + 40 - 1) + 99
    # What it computed itself before is no hit.
    assert stats["asked_tokens"] == 120


def test_a_higher_priority_takes_the_place_of_a_lower_one(model: Any, rng: random.Random) -> None:
    served = Served(model, 12, max_running=2)
    low = [question(model, rng, [], 50, 30) for _ in range(2)]
    high = question(model, rng, [], 80, 4, priority=1)
    ids = [served.add(each) for each in low]
    assert served.run(4) == {}
    urgent = served.add(high)
    ended = served.run()
    assert list(ended) == [urgent, *ids]
    for id, each in zip(ended, [high, *low], strict=True):
        generation = ended[id]
        assert isinstance(generation, Generation)
        check(generation, each)
    served.check_idle()


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 9, 15])
def test_whoever_is_aborted_leaves_nothing_behind(
    model: Any, rng: random.Random, steps: int, tmp_path: Path
) -> None:
    served = Served(model, 16, storage=tmp_path, max_running=3)
    shared = text(rng, 32)
    asked = [question(model, rng, shared, 50, 20) for _ in range(6)]
    ids = [served.add(each) for each in asked]
    ended = served.run(steps)
    gone = ids[::2]
    for id in gone:
        assert served.engine.abort(id) == (id not in ended)
        assert not served.engine.abort(id)
    ended |= served.run()
    assert set(ids) - set(gone) <= set(ended)
    for id, generation in ended.items():
        assert isinstance(generation, Generation)
        check(generation, asked[ids.index(id)])
    served.check_idle()
    served.cache.close()


@pytest.mark.parametrize(
    "one", [{}, {"extra_key": "a"}, {"cache_salt": "a"}, {"extra_key": "a", "cache_salt": "b"}]
)
def test_nothing_is_shared_across_namespaces(model: Any, rng: random.Random, one: dict[str, str]) -> None:
    served = Served(model, 64, storage=MemoryStore())
    plain = question(model, rng, [], 100, ANSWER)
    served.ask(Question(plain.prompt, plain.expected, one))
    for other in (
        {},
        {"extra_key": "a"},
        {"cache_salt": "a"},
        {"extra_key": "b"},
        {"extra_key": "b", "cache_salt": "a"},
    ):
        (answer,) = served.ask(Question(plain.prompt, plain.expected, other))
        assert hits(answer) == ((96, 0, 0) if other == one else (0, 0, 0)), other
        # Neither from host nor from storage.
        served.cache.evict(64)
        (again,) = served.ask(Question(plain.prompt, plain.expected, one))
        assert hits(again) == (0, 96, 0)
        served.cache.reset()
        (again,) = served.ask(Question(plain.prompt, plain.expected, one))
        assert hits(again) == (0, 0, 96)
    served.cache.close()


# What can not be served


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [0, 1, 3])
def test_a_forward_that_is_interrupted_is_made_again(
    model: Any, rng: random.Random, error: type[BaseException], call: int
) -> None:
    served = Served(model, 32)
    asked = [question(model, rng, [], 60, ANSWER) for _ in range(2)]
    ids = [served.add(each) for each in asked]
    calls = 0

    def fail(module: Any, ids: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise error("on purpose")

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    try:
        with pytest.raises(error, match="on purpose"):
            served.run()
        ended = served.run()
    finally:
        hook.remove()
    for id, each in zip(ids, asked, strict=True):
        generation = ended[id]
        assert isinstance(generation, Generation)
        check(generation, each)
    served.check_idle()


def test_a_request_that_finds_no_room_fails_and_the_next_is_served(model: Any, rng: random.Random) -> None:
    served = Served(model, 8)
    taken = served.cache.alloc(4)  # somebody else's
    large, small = question(model, rng, [], 90, ANSWER), question(model, rng, [], 30, ANSWER)
    growing = question(model, rng, [], 60, 20)  # its prompt has room
    ids = [served.add(each) for each in (large, growing, small)]
    ended = served.run()
    assert isinstance(ended[ids[0]], CapacityError)
    assert isinstance(ended[ids[1]], CapacityError)
    answer = ended[ids[2]]
    assert isinstance(answer, Generation)
    check(answer, small)
    served.cache.free(taken)
    served.ask(large)


def test_what_was_found_before_an_error_is_told_by_the_next_step(
    model: Any, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(model, 32)
    one, other = (question(model, rng, [], 20, 2) for _ in range(2))
    for asked in (one, other):
        served.add(asked)
    insert = Engine._insert

    def fail(self: Engine, sequence: Any, computed: int) -> bool:
        if sequence.id == 2:
            raise RuntimeError("on purpose")
        return insert(self, sequence, computed)

    monkeypatch.setattr(Engine, "_insert", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        served.engine.step()
    monkeypatch.undo()
    said = [(event.id, event.token) for event in served.engine.step()]
    assert (1, one.expected.tokens[0]) in said
    assert (2, other.expected.tokens[0]) in said
    served.run()
    served.check_idle()


def test_arguments_that_can_not_be_used(model: Any) -> None:
    served = Served(model, 8)
    for arguments, named in (
        (([], 1), "prompt must not be empty"),
        (([1], 0), "max_new_tokens must be an integer >= 1, not 0"),
        (([-1], 1), "token 0 is -1"),
        (([511, 512], 1), "prompt has token 512, those of the model are in 0..511"),
        (([1] * 128, 2), "130 tokens together, model and device pool take 129"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(named)):
            served.engine.add(*arguments)
    for named, value in (("extra_key", 1), ("cache_salt", b"x"), ("priority", "high")):
        with pytest.raises(ArgumentError, match=named):
            served.engine.add([1], 1, **{named: value})
    with pytest.raises(ArgumentError, match=f"take {LONGEST}"):
        Served(model, 64).engine.add([1] * LONGEST, 1)
    assert served.engine.idle
    assert not served.engine.abort(1)
    for sizes in ({"max_running": 0}, {"max_running": 8, "chunk": 7}):
        with pytest.raises(ArgumentError, match=list(sizes)[-1]):
            Engine(model, served.cache, served.pool, **sizes)


def test_a_pool_that_does_not_fit_the_model_is_refused(model: Any) -> None:
    fitting = {"layers": SIZE.layers, "heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": torch.float32}
    for change in ({"layers": 3}, {"heads": 8}, {"head_dim": 32}, {"dtype": torch.bfloat16}):
        pool = MhaDevicePool(4, PAGE, **(fitting | change))
        cache = UnifiedCache(CacheConfig(page_size=PAGE, write_policy=None), pool)
        with pytest.raises(ArgumentError, match="make one like that"):
            Engine(model, cache, pool)
    with pytest.raises(ArgumentError, match="not another one"):
        Engine(model, cache, MhaDevicePool(4, PAGE, **fitting))


# The script


def test_the_example(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "engine.py"), "--seed", str(SEED)],
        env=os.environ | {"TMPDIR": str(tmp_path), "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    answers = [row for row in rows if row[-1] == "equal"]
    assert len(answers) == example.TRAFFIC.clients * example.TRAFFIC.turns
    for row in answers:
        _, _, prompt, *found = map(int, row[:7])
        assert prompt == sum(found)
    device, host, storage = (sum(int(row[at]) for row in answers) for at in (3, 4, 5))
    assert min(device, host, storage) > 0
    assert ["(restart)"] in rows
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["nowhere://here", "file:///a#b"])
def test_a_storage_that_can_be_none_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert example.main(["--storage", url]) == 1
    finally:
        torch.set_num_threads(threads)
    err = capsys.readouterr().err
    assert err.startswith("engine.py: ")
    assert err.count("\n") == 1


def test_an_answer_that_differs_is_the_exit_status(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "serve", lambda *arguments: False)
    threads = torch.get_num_threads()
    try:
        assert example.main([]) == 1
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().err == "engine.py: an answer is not what the model gives without a cache\n"
