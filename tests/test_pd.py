"""Prefill and decode in processes of their own, above one store: the same tokens and the same bytes, also
when the decode process is killed, or the store is not there.

The prefill process here is a real one, and so is a decode process that is killed; others are this process.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples import pd
from unified_cache import StorageError
from unified_cache.storage.backends.mmap import MmapBackend
from unified_cache.storage.contract import ObjectBatch, PageStatus
from unified_cache.storage.urls import StorageUrl

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).parent.parent
SEED = 3
ANSWER = 80
BOTH = "AB"  # that one decode process answers at the same time
# Tokens that a decode process has found when it makes sure that what it inserted is stored, and when it is
# killed: the second insert was just made, and its pages are on their way.
SURE, KILLED = pd.INSERT_EVERY + 2, 2 * pd.INSERT_EVERY + 2


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models here are tiny, and the machine may have other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclasses.dataclass
class Field:
    """A prefill process that has computed four prompts, and what is right.

    A and B are for tests that store the same answers, or none. The first who stores a page wins, and what
    others compute is the same up to rounding: tests that compare bytes of answers have their own, C and D.
    """

    prefill: pd.Process
    settings: pd.Settings
    talks: dict[str, pd.Conversation]
    jobs: dict[str, pd.Job]
    digests: dict[str, list[str]]


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Field]:
    url = f"mmap://{tmp_path_factory.mktemp('pd')}/store?size=64MB"
    settings = pd.Settings(url, "test-pd", SEED, device_pages=128)
    with pd.Process("prefill", "prefill", settings) as prefill:
        reference = pd.Reference(SEED)
        system = reference.text(pd.SYSTEM)
        talks = {name: reference.conversation(system, ANSWER) for name in "ABCD"}
        assert prefill.receive() == ("ready", "")
        jobs, digests = {}, {}
        for name, talk in talks.items():
            done = prefill.call("prefill", talk.prompt)
            assert (done.token, done.settled) == (talk.answer[0], True)
            jobs[name] = pd.Job(name, [*talk.prompt, done.token], ANSWER - 1)
            digests[name] = done.digests
        decode = dataclasses.replace(settings, device_pages=pd.decode_pages([talks[name] for name in BOTH]))
        yield Field(prefill, decode, talks, jobs, digests)


def answers(engine: pd.DecodeEngine, jobs: Sequence[pd.Job]) -> dict[str, pd.Decoded]:
    """What the engine answers; what it said as it went is the same, and it holds nothing afterwards."""
    said: dict[str, list[int]] = {job.name: [] for job in jobs}
    ends: dict[str, pd.Decoded] = {}
    for name, part in engine.decode(jobs):
        if isinstance(part, pd.Decoded):
            ends[name] = part
        else:
            said[name].append(part)
    assert said == {name: end.tokens for name, end in ends.items()}
    assert engine.settle()
    usage = engine.cache.usage()
    assert usage["requests"] == usage["device_request_pages"] == usage["host_request_pages"] == 0
    assert usage["device_free_pages"] + usage["device_tree_pages"] == usage["device_pages"]
    assert usage["host_free_pages"] + usage["host_tree_pages"] == usage["host_pages"]
    assert engine.cache.tree.protected_tokens == 0
    engine.cache.tree.check_invariants()
    return ends


# The example


def test_the_example() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "pd.py")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = re.findall(r"^(\w.*?)  +(\w), ([\w ]+?)  +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)  ", done.stdout, re.M)
    found = {(process, name, what): list(map(int, numbers)) for process, name, what, *numbers in rows}
    for tokens, computed, device, host, store in found.values():
        assert tokens == computed + device + host + store
    page = pd.PAGE_SIZE
    assert found["prefill 1", "A", "prompt"][1:] == [found["prefill 1", "A", "prompt"][0], 0, 0, 0]
    # In other processes no more than the last page of what was computed is computed.
    for row in (("prefill 2", "A", "prompt"), ("decode", "A", "answer"), ("decode", "B", "answer")):
        assert found[row][1] <= page
        assert found[row][4] > 0
    # The prompt, and all of the answer but what is no whole page, and the question.
    for row in (("prefill 1", "A", "next turn"), ("prefill 2", "B", "next turn")):
        assert found[row][1] <= pd.QUESTION[0] + page
        assert found[row][4] > 0
    assert len(found) == 8
    assert "off the device" in done.stdout
    assert "the same bytes" in done.stdout


def test_what_differs_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(storage: str, seed: int) -> None:
        assert (storage, seed) == ("pages:///somewhere", 7)
        pd.require(True, "this is equal")
        pd.require(False, "decode, A: another token")

    monkeypatch.setattr(pd, "run", run)
    assert pd.main(["--storage", "pages:///somewhere", "--seed", "7"]) == 1
    assert capsys.readouterr() == ("", "pd.py: decode, A: another token\n")


@pytest.mark.parametrize("url", ["nowhere://here", "file:///a#b"])
def test_a_url_that_can_be_none_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pd.main(["--storage", url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pd.py: ")
    assert url.partition(":")[0] in err
    assert err.count("\n") == 1


def test_the_example_sees_a_difference() -> None:
    right = pd.Admitted(20, 4, 0, 0, 16, ["a"])
    talk = pd.Conversation([1] * 20, [5, 6, 7], [], 0)

    def check(**changes: Any) -> int:
        answer = pd.Decoded([6, 7], right, [pd.Retraction(20, ["a", "b"], ["a", "b"], 1)], ["a"], 0)
        return pd._check_answers({"A": dataclasses.replace(answer, **changes)}, {"A": talk}, {"A": ["a"]})

    assert check() == 1
    for changes, said in (
        ({"tokens": [6, 8]}, "another token"),
        ({"retractions": [pd.Retraction(20, ["a", "b"], ["a", "c"], 1)]}, "other bytes after"),
        ({"admitted": dataclasses.replace(right, hit_digests=["b"])}, "does not hold what was stored"),
        ({"admitted": dataclasses.replace(right, computed=20)}, "computed a hit anew"),
    ):
        with pytest.raises(pd.DifferenceError, match=said):
            check(**changes)


# Off the device


class Crowded(pd.DecodeEngine):
    """Somebody else has every page that a retracted request leaves, and writes to it."""

    def _retract(self, decoding: pd.Decoding) -> None:
        super()._retract(decoding)
        assert self.cache.flush(30)
        room = self.cache.usage()["device_free_pages"] + self.cache.tree.evictable_tokens // pd.PAGE_SIZE
        pages = self.cache.alloc(room)
        for layer in range(self.pool.layers):
            for half in (self.pool.k(layer), self.pool.v(layer)):
                half[pages.astype(np.int64)] = torch.nan
        self.cache.free(pages)


@pytest.mark.parametrize("more, half_filled", [(0, False), (1, True)])
def test_a_request_comes_back_as_it_was(field: Field, more: int, half_filled: bool) -> None:
    # With one page more it is the other request that finds no room. B leaves either way: with its last page
    # full, since it needs another, or somewhere in it.
    engine = Crowded(dataclasses.replace(field.settings, device_pages=field.settings.device_pages + more))
    try:
        found = answers(engine, [field.jobs[name] for name in BOTH])
        stats = engine.cache.stats()
    finally:
        engine.close()
    for name in BOTH:
        assert found[name].tokens == field.talks[name].answer[1:]
        hit = found[name].admitted.hit_digests
        assert hit == field.digests[name][: len(hit)]
    # B, the younger, gave way to A: when it came back it had nothing on device but what it shares with A.
    assert found["A"].retractions == []
    assert stats["requests_retracted"] == len(found["B"].retractions) > 0
    for off in found["B"].retractions:
        assert off.before == off.after
        assert len(off.before) == -(-off.tokens // pd.PAGE_SIZE)
        assert off.copied_back == len(off.before) - pd.SYSTEM // pd.PAGE_SIZE
        assert bool(off.tokens % pd.PAGE_SIZE) is half_filled


# Decode asks before prefill has stored anything


def test_decode_may_ask_again(field: Field) -> None:
    prompt = [*field.talks["A"].prompt, *range(3 * pd.PAGE_SIZE)]
    known = len(field.talks["A"].prompt) // pd.PAGE_SIZE * pd.PAGE_SIZE
    engine = pd.DecodeEngine(field.settings)
    try:
        early = engine.cache.begin([*prompt, 1])
        assert early.wait_prefetch() == known
        early.abort()
        done = field.prefill.call("prefill", prompt)
        later = engine.cache.begin([*prompt, done.token])
        # What the first attempt has read is still there; only what has come since is read.
        assert later.host_hit_length == known
        assert later.wait_prefetch() == len(prompt) // pd.PAGE_SIZE * pd.PAGE_SIZE - known
        engine.admit(later)
        assert engine.digests(later, later.device_length) == done.digests
        later.finish()
    finally:
        engine.close()


# A decode process that is killed


def answer_and_die(kind: str, settings: pd.Settings, router: Connection) -> None:
    """A decode process that is killed in the middle of its answer."""
    engine = pd.DecodeEngine(settings)
    router.send(("ready", engine.storage_error))
    _, (jobs,) = router.recv()
    for found, (_, token) in enumerate(engine.decode(jobs), 1):
        request = engine.running[0].request
        router.send(("part", (token, engine.digests(request, request.device_length))))
        if found == SURE:
            engine.cache.flush(30)
        if found == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


def test_another_decode_process_takes_over(field: Field) -> None:
    job, talk = field.jobs["C"], field.talks["C"]
    killed = pd.Process("decode", "decode", field.settings, target=answer_and_die)
    tokens: list[int] = []
    digests: list[str] = []
    with killed:
        assert killed.receive() == ("ready", "")
        parts = killed.stream("decode", [job])
        for _ in range(KILLED):
            token, digests = next(parts)
            tokens.append(token)
        died = f"^decode has died .exit code -{signal.SIGKILL:d}.$"
        with pytest.raises(pd.ProcessError, match=died):
            next(parts)
        with pytest.raises(pd.ProcessError, match=died):
            killed.call("decode", [job])
    assert tokens == talk.answer[1 : 1 + KILLED]
    assert len(digests) == (len(job.tokens) + 2 * pd.INSERT_EVERY) // pd.PAGE_SIZE

    # The router has what was said so far; the KV of most of it is in the store.
    engine = pd.DecodeEngine(field.settings)
    try:
        rest = pd.Job("C", [*job.tokens, *tokens], job.more - len(tokens))
        found = answers(engine, [rest])["C"]
    finally:
        engine.close()
    assert found.tokens == talk.answer[1 + KILLED :]
    admitted = found.admitted
    pages = len(admitted.hit_digests)
    assert pages >= (len(job.tokens) + pd.INSERT_EVERY) // pd.PAGE_SIZE
    assert admitted.storage == pages * pd.PAGE_SIZE
    assert admitted.computed == len(rest.tokens) - admitted.storage
    assert admitted.hit_digests == digests[:pages]
    assert found.digests[:pages] == digests[:pages]

    # What both of them have computed is there for the next turn.
    after = field.prefill.call("prefill", talk.next_prompt)
    assert after.token == talk.next_token
    hit = after.admitted.hit_digests
    assert len(hit) == (len(talk.prompt) + ANSWER - 1) // pd.PAGE_SIZE
    assert all(page in pages for page, *pages in zip_longest(hit, found.digests, digests))
    assert after.admitted.storage >= (ANSWER - 1) // pd.PAGE_SIZE * pd.PAGE_SIZE


# A store that is not there


class Partitioned(MmapBackend):
    """The shared store, until this process can not reach it any more."""

    reachable = True
    refused = 0

    def _reach(self) -> None:
        if not self.reachable:
            self.refused += 1
            raise StorageError("the store can not be reached, as the test wants it")

    def exists(self, runs: Sequence[Sequence[str]]) -> list[int]:
        self._reach()
        return super().exists(runs)

    def get(self, batch: ObjectBatch) -> list[PageStatus]:
        self._reach()
        return super().get(batch)

    def set(self, batch: ObjectBatch) -> list[PageStatus]:
        self._reach()
        return super().set(batch)


def partitioned(field: Field) -> tuple[pd.DecodeEngine, Partitioned]:
    """An engine on the shared store, and the store."""
    assert field.settings.storage is not None
    store = Partitioned.from_url(StorageUrl.parse(field.settings.storage), 5.0)
    engine = pd.DecodeEngine(dataclasses.replace(field.settings, storage=None))
    engine.cache.attach_storage(store)
    return engine, store


def check_alone(field: Field, engine: pd.DecodeEngine) -> None:
    """All answers are right, though not one token came from the store; off the device and back works too."""
    try:
        found = answers(engine, [field.jobs[name] for name in BOTH])
    finally:
        engine.close()
    for name in BOTH:
        assert found[name].tokens == field.talks[name].answer[1:]
        assert found[name].admitted.storage == 0
    # B begins as A does, and A is there.
    assert found["A"].admitted.computed == len(field.jobs["A"].tokens)
    assert found["B"].admitted.computed == len(field.jobs["B"].tokens) - pd.SYSTEM
    assert [off.before == off.after for off in found["B"].retractions] == [True]


def test_a_store_that_can_not_be_opened(field: Field, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = pd.DecodeEngine(
        dataclasses.replace(field.settings, storage=f"mmap://{tmp_path}/file/store?size=1MB")
    )
    assert str(tmp_path) in engine.storage_error
    check_alone(field, engine)


def test_a_store_that_can_not_be_reached(field: Field) -> None:
    engine, store = partitioned(field)
    store.reachable = False
    check_alone(field, engine)
    assert store.refused > 0


def test_a_store_that_goes_away_while_it_decodes(field: Field) -> None:
    engine, store = partitioned(field)
    job, talk = field.jobs["D"], field.talks["D"]
    tokens: list[Any] = []
    try:
        for _, part in engine.decode([job]):
            store.reachable = False
            tokens.append(part)
        assert engine.settle()
        *tokens, found = tokens
        assert tokens == found.tokens == talk.answer[1:]
        # The prompt came from the store; what was answered could not go there, and is on host.
        assert found.admitted.storage == len(talk.prompt) // pd.PAGE_SIZE * pd.PAGE_SIZE
        assert store.refused > 0
        stored = len(talk.prompt) // pd.PAGE_SIZE
        assert engine.cache.stats()["storage_written_pages"] == 0
        assert engine.cache.usage()["host_tree_pages"] == len(found.digests) > stored
        # A detached and attached store gets all of it.
        engine.cache.detach_storage()
        assert field.settings.storage is not None
        engine.cache.attach_storage(field.settings.storage)
        assert engine.settle()
        assert engine.cache.stats()["storage_written_pages"] == len(found.digests) - stored
    finally:
        engine.close()
    after = field.prefill.call("prefill", talk.next_prompt)
    assert after.token == talk.next_token
    assert after.admitted.hit_digests == found.digests
