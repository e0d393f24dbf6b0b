"""Logs of prefixes: what is appended is read, whoever else writes, rewrites, dies or damages it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from unified_cache import page_hashes
from unified_cache.errors import StorageError
from unified_cache.storage.backends.file import FileBackend
from unified_cache.storage.backends.memory import MemoryBackend
from unified_cache.storage.backends.pages import PagesBackend
from unified_cache.storage.contract import Backend, PrefixLog
from unified_cache.storage.keys import KeySpace, PoolKeys
from unified_cache.storage.prefix_log import FileLog, MemoryLog
from unified_cache.storage.prefixes import PrefixLoad, compact, encode, known_prefixes

PAGE = 4
SPACES = [
    PoolKeys("0123456789abcdef"),
    PoolKeys("fedcba9876543210"),
    PoolKeys("0123456789abcdef", first_group=1),
]


@pytest.fixture(params=["file", "memory"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> PrefixLog:
    return FileLog(str(tmp_path / "log")) if request.param == "file" else MemoryLog()


def tokens_of(*numbers: int) -> np.ndarray:
    """A page for each number."""
    return np.repeat(np.array(numbers, np.uint32), PAGE)


def record(*numbers: int, before: int = 0, keys: PoolKeys = SPACES[0], lora: str | None = None) -> bytes:
    """A prefix's pages past the first ones."""
    tokens = tokens_of(*numbers)
    parent = page_hashes(tokens, PAGE, extra_key=lora)[before - 1].tobytes() if before else None
    return encode(tokens[before * PAGE :], parent, (lora, None), PAGE, keys)


def load(
    log: PrefixLog,
    keys: PoolKeys = SPACES[0],
    holds: Callable[[np.ndarray], np.ndarray] = lambda digests: np.ones(len(digests), np.bool_),
    most: int = 10_000,
) -> PrefixLoad:
    loaded = PrefixLoad(log.read(), keys.fingerprint, keys.first_group, PAGE, most, holds)
    while loaded.step():
        pass
    loaded.tree.check_invariants()
    return loaded


def known(loaded: PrefixLoad, *numbers: int, lora: str | None = None) -> int:
    return loaded.tree.known(page_hashes(tokens_of(*numbers), PAGE, extra_key=lora))


def test_what_is_appended_is_read(log: PrefixLog) -> None:
    assert list(log.read()) == []
    sizes = [log.append(record(1, 2)), log.append(record(1, 2, 3, before=2) + record(1, 7, before=1))]
    assert sizes[0] < sizes[1] == sum(map(len, log.read()))
    loaded = load(log)
    assert (loaded.records, loaded.damaged, len(loaded.tree), loaded.tree.pages) == (3, 0, 4, 4)
    assert [known(loaded, *one) for one in ((1, 2, 3), (1, 7), (2,))] == [3, 2, 0]
    prefixes = loaded.recent(100)
    assert [prefix.tokens.tolist() for prefix in prefixes] == [
        tokens_of(1, 7).tolist(),
        tokens_of(1, 2, 3).tolist(),
    ]
    log.clear()
    assert list(log.read()) == []
    log.append(record(5))
    assert load(log).tree.pages == 1


def test_other_models_and_namespaces_are_kept_apart(log: PrefixLog) -> None:
    log.append(record(1, 2))
    log.append(record(1, 2, lora="a") + record(1, 2, 3, keys=SPACES[1]) + record(1, 9, keys=SPACES[2]))
    first = load(log)
    assert (first.tree.pages, first.records) == (4, 2)
    assert [known(first, 1, 2, lora=lora) for lora in (None, "a", "b")] == [2, 2, 0]
    assert {prefix.namespace for prefix in first.recent(10)} == {(None, None), ("a", None)}
    assert known(load(log, SPACES[1]), 1, 2, 3) == 3
    assert known(load(log, SPACES[2]), 1, 2) == 1
    both = PrefixLoad(
        log.read(), SPACES[0].fingerprint, None, PAGE, 99, lambda digests: np.ones(len(digests), np.bool_)
    )
    while both.step():
        pass
    assert both.tree.pages == 5  # of any group: a rank asks for its own objects
    assert first.spaces == {(keys.fingerprint, keys.first_group, PAGE) for keys in SPACES}


def test_a_prefix_ends_at_its_first_page_that_is_gone(log: PrefixLog) -> None:
    log.append(record(1, 2, 3) + record(1, 2, 3, 4, before=3) + record(1, 5, before=1))
    gone = page_hashes(tokens_of(1, 2), PAGE)[1]
    loaded = load(log, holds=lambda digests: (digests != gone).any(axis=1))
    assert [known(loaded, *one) for one in ((1, 2, 3, 4), (1, 5))] == [1, 2]
    assert loaded.gone == 2  # the page itself, and what hangs below nothing; page 3 ends with it


@pytest.mark.parametrize("seed", range(20))
def test_damage_costs_what_it_hits(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "log"
    records = [record(*(100 * at + page for page in range(rng.randrange(1, 5)))) for at in range(30)]
    whole = bytearray(b"".join(records))
    ends = np.cumsum([len(one) for one in records])
    hit = set()
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(whole))
        number = int(np.searchsorted(ends, at, side="right"))
        if number in hit:
            continue
        hit.add(number)
        whole[at] ^= 1 << rng.randrange(8)
    torn = rng.randrange(1, len(records[0]))
    path.write_bytes(bytes(whole) + records[0][:torn])
    log = FileLog(str(path))
    log.append(record(7))  # whoever comes next
    loaded = load(log)
    numbers = [at for at in range(30) if known(loaded, 100 * at)]
    assert set(range(30)) - hit <= set(numbers)
    assert known(loaded, 7) == 1
    assert loaded.damaged >= 1


def test_pieces_that_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FileLog(str(tmp_path / "log"))
    for at in range(50):
        log.append(record(at, at + 1))
    monkeypatch.setattr("unified_cache.storage.prefix_log._PIECE_BYTES", 77)
    loaded = load(log)
    assert (loaded.records, loaded.damaged, loaded.tree.pages) == (50, 0, 100)
    assert len(loaded.recent(1000)) == 50


@pytest.mark.parametrize("seed", range(10))
def test_against_a_model(log: PrefixLog, seed: int) -> None:
    """The log says what was appended; a compaction leaves what the store has, whosever it is."""
    rng = random.Random(seed)
    backend = MemoryBackend()
    model: dict[int, set[tuple[int, ...]]] = {at: set() for at in range(len(SPACES))}
    stored: set[tuple[int, tuple[int, ...]]] = set()

    def held(space: int, prefix: tuple[int, ...]) -> bool:
        return all((space, prefix[:end]) in stored for end in range(1, len(prefix) + 1))

    for _ in range(40):
        space, prefix = rng.randrange(3), tuple(rng.randrange(3) for _ in range(rng.randrange(1, 7)))
        before = rng.randrange(len(prefix))
        if before == 0 or prefix[:before] in model[space]:
            log.append(record(*prefix, before=before, keys=SPACES[space]))
            for end in range(before + 1, len(prefix) + 1):
                model[space].add(prefix[:end])
                if rng.random() < 0.9:
                    stored.add((space, prefix[:end]))
    backend._objects.update(
        {
            KeySpace([SPACES[space]]).keys(page_hashes(tokens_of(*prefix), PAGE)[-1:])[0]: b""
            for space, prefix in stored
        }
    )
    for space, keys in enumerate(SPACES):
        loaded = load(log, keys)
        assert loaded.tree.pages == len(model[space])
        assert all(known(loaded, *prefix) == len(prefix) for prefix in model[space])
    alive = {space: {p for p in model[space] if held(space, p)} for space in model}
    said = {
        (one.fingerprint, one.first_group): one.pages for one in known_prefixes(backend, log) if one.pages
    }
    assert said == {
        (SPACES[at].fingerprint, SPACES[at].first_group): len(pages) for at, pages in alive.items() if pages
    }
    size = compact(backend, log)
    assert size == sum(map(len, log.read()))
    for space, keys in enumerate(SPACES):
        loaded = load(log, keys)
        assert loaded.tree.pages == len(alive[space])
        assert all(known(loaded, *prefix) == len(prefix) for prefix in alive[space])
    assert compact(backend, log) == size


def test_what_is_added_while_it_is_rewritten_stays(log: PrefixLog) -> None:
    log.append(record(1) + record(2))

    def keep(pieces: Iterator[bytes]) -> list[bytes]:
        assert b"".join(pieces) == record(1) + record(2)
        log.append(record(3))
        assert log.rewrite(lambda _: []) is None  # somebody else is at it
        return [record(2)]

    assert log.rewrite(keep) == len(record(1)) * 2
    assert b"".join(log.read()) == record(2) + record(3)
    assert log.rewrite(lambda _: None) is None

    def clear(pieces: Iterator[bytes]) -> list[bytes]:
        list(pieces)
        log.clear()
        log.append(record(9))
        return [record(2)]

    log.rewrite(clear)
    assert known(load(log), 2) == 0, "what was cleared does not come back"


def test_a_rewrite_that_fails_leaves_everything(tmp_path: Path) -> None:
    log = FileLog(str(tmp_path / "log"))
    log.append(record(1))

    def fail(pieces: Iterator[bytes]) -> list[bytes]:
        raise StorageError("as it was told to")

    with pytest.raises(StorageError, match="as it was told to"):
        log.rewrite(fail)
    assert b"".join(log.read()) == record(1)
    assert os.listdir(tmp_path) == ["log"]
    (tmp_path / "log.new").write_bytes(b"of somebody who died")
    assert log.rewrite(lambda pieces: [record(2)]) == len(record(2))
    assert b"".join(log.read()) == record(2)
    assert os.listdir(tmp_path) == ["log"]
    assert os.stat(tmp_path / "log").st_mode & 0o777 == 0o600


def test_errors_say_which_file(tmp_path: Path) -> None:
    log = FileLog(str(tmp_path / "nowhere" / "log"))
    with pytest.raises(StorageError, match=r"nowhere/log can not be written \(No such file"):
        log.append(b"x")
    assert list(log.read()) == []
    with pytest.raises(StorageError, match=r"nowhere/log can not be rewritten \(No such file"):
        log.rewrite(lambda pieces: [])


def test_somebody_who_keeps_the_lock_is_not_waited_for(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / "log"
    FileLog(str(path)).append(record(1))
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="somebody has held it"):
            FileLog(str(path), deadline=0.01).append(record(2))
    assert FileLog(str(path), deadline=0.01).append(record(2)) == len(record(1)) * 2


def test_threads_append_and_rewrite(log: PrefixLog) -> None:
    """No record is lost or torn, whatever comes in between."""

    def write(writer: int) -> None:
        for at in range(60):
            log.append(record(1000 * writer + at, 7))

    def rewrite() -> None:
        while not ended.is_set():
            log.rewrite(lambda pieces: [b"".join(pieces)])

    ended = threading.Event()
    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    rewriter = threading.Thread(target=rewrite)
    for thread in (*writers, rewriter):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    rewriter.join()
    loaded = load(log)
    assert (loaded.records, loaded.damaged) == (240, 0)


_WRITER = """
import sys
import numpy as np
from unified_cache.storage.keys import KeySpace, PoolKeys
from unified_cache.storage.prefix_log import FileLog
from unified_cache.storage.prefixes import encode
log, first = FileLog(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
for at in range(100_000):
    tokens = np.full(4 * 3, first + at, np.uint32)
    log.append(encode(tokens, None, (None, None), 4, PoolKeys("0123456789abcdef")))
    print(at, flush=True)
    if at % 50 == 49:
        log.rewrite(lambda pieces: [b"".join(pieces)])
"""


@pytest.mark.parametrize("round_", range(3))
def test_two_processes_of_which_one_is_killed(tmp_path: Path, round_: int) -> None:
    path = tmp_path / "log"
    firsts, said = (1_000_000, 2_000_000), []
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _WRITER, str(path), str(first)], stdout=subprocess.PIPE, text=True
                )
            )
            for first in firsts
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        # Each of them has written so many for certain when it is killed.
        for writer, count in zip(writers, (60 + 37 * round_, 150), strict=True):
            assert writer.stdout is not None
            for _ in range(count):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
            # The last line may be cut.
            rest = writer.stdout.read().split("\n")[:-1]
            said.append(count + len(rest))
    # On a machine that is busy they write thousands before they are killed.
    loaded = load(FileLog(str(path)), most=1_000_000)
    for first, count in zip(firsts, said, strict=True):
        for at in range(count):
            assert known(loaded, *(first + at,) * 3) == 3, f"{first + at} of {count} is lost"
    # Whoever comes next can go on.
    log = FileLog(str(path))
    log.append(record(5))
    assert log.rewrite(lambda pieces: [b"".join(pieces)]) is not None
    assert known(load(log), 5) == 1


@pytest.mark.parametrize("kind", ["file", "pages"])
def test_clear_of_a_store_clears_its_log(tmp_path: Path, kind: str) -> None:
    store: Backend = FileBackend(tmp_path, 1 << 20) if kind == "file" else PagesBackend(tmp_path)
    log = store.prefix_log()
    assert log is not None
    log.append(record(1))
    store.clear()
    assert list(log.read()) == []
    store.close()
