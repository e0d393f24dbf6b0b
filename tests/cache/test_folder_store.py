"""A folder as storage: what was set is got, anything else is a miss."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from unified_cache import ClosedError, StorageError
from unified_cache.storage import folder
from unified_cache.storage.contract import PageStatus
from unified_cache.storage.folder import FolderStore, folder_of
from unified_cache.storage.page_format import HEADER_BYTES, make_header

SIZE = 5000
KEYS = [f"{digit:02x}" * 32 + "-0123456789abcdef" for digit in range(6)]


def payload(at: int) -> memoryview:
    return memoryview(bytes((at * 7 + i) % 256 for i in range(SIZE)))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FolderStore]:
    store = FolderStore(tmp_path / "store")
    assert store.set(KEYS[:4], [payload(at) for at in range(4)]) == 4
    yield store
    store.close()


def path_of(store: FolderStore, at: int) -> Path:
    return Path(store._path(KEYS[at]))


def get(store: FolderStore, at: int) -> tuple[PageStatus, bytes]:
    target = bytearray(SIZE)
    (status,) = store.get([KEYS[at]], [memoryview(target)])
    return status, bytes(target)


def temporary_files(store: FolderStore) -> list[str]:
    return os.listdir(store._temporary)


def test_set_and_get(store: FolderStore) -> None:
    for at in range(4):
        assert get(store, at) == (PageStatus.HIT, bytes(payload(at)))
    assert get(store, 4)[0] is PageStatus.MISS
    assert temporary_files(store) == []
    assert store.stats() == {"pages": 4, "bytes": 4 * (SIZE + HEADER_BYTES)}


def test_exists_is_the_leading_run(store: FolderStore) -> None:
    assert store.exists(KEYS) == 4
    path_of(store, 1).unlink()
    assert store.exists(KEYS) == 1
    assert store.exists(KEYS[2:]) == 2
    assert store.exists([]) == 0


def test_another_process_sees_it(store: FolderStore) -> None:
    other = FolderStore(store._root)
    assert get(other, 2) == (PageStatus.HIT, bytes(payload(2)))
    other.close()


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_short_files(store: FolderStore, size: int) -> None:
    os.truncate(path_of(store, 1), size)
    assert get(store, 1)[0] is PageStatus.CORRUPT
    # It is out of the way, so that the page can be written again.
    assert get(store, 1)[0] is PageStatus.MISS
    assert store.set([KEYS[1]], [payload(1)]) == 1
    assert get(store, 1) == (PageStatus.HIT, bytes(payload(1)))


@pytest.mark.parametrize("at_byte", [0, 6, 9, 20, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_flipped_bits(store: FolderStore, at_byte: int) -> None:
    whole = bytearray(path_of(store, 1).read_bytes())
    whole[at_byte] ^= 4
    path_of(store, 1).write_bytes(whole)
    statuses = store.get(KEYS[:4], [memoryview(bytearray(SIZE)) for _ in range(4)])
    assert statuses == [PageStatus.HIT, PageStatus.CORRUPT, PageStatus.HIT, PageStatus.HIT]


def test_foreign_files(store: FolderStore) -> None:
    path_of(store, 0).write_bytes(b"x" * (HEADER_BYTES + SIZE))
    path_of(store, 1).write_bytes(path_of(store, 2).read_bytes())
    path_of(store, 3).write_bytes(make_header(KEYS[3], payload(3)[:10]) + payload(3)[:10])
    for at in (0, 1, 3):
        assert get(store, at)[0] is PageStatus.CORRUPT
    path_of(store, 0).mkdir()
    assert get(store, 0)[0] is not PageStatus.HIT


def test_the_first_writer_wins(store: FolderStore) -> None:
    assert store.set(KEYS[:1], [payload(5)]) == 1
    assert get(store, 0) == (PageStatus.HIT, bytes(payload(0)))


def test_a_failing_write_stores_nothing_half(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwritev, []

    def full(file: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", full)
    assert store.set(KEYS[4:], [payload(4), payload(5)]) == 1
    monkeypatch.undo()
    assert get(store, 4) == (PageStatus.HIT, bytes(payload(4)))
    assert get(store, 5)[0] is PageStatus.MISS
    assert temporary_files(store) == []


def test_a_failing_flush_publishes_nothing(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    assert store.set(KEYS[3:], [payload(at) for at in (3, 4, 5)]) == 1
    assert store.exists(KEYS[4:]) == 0
    assert temporary_files(store) == []


def test_writes_and_reads_that_come_in_pieces(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: real_write(file, [parts[0][:77]], at))
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: real_read(file, [parts[0][:99]], at))
    assert store.set([KEYS[4]], [payload(4)]) == 1
    assert get(store, 4) == (PageStatus.HIT, bytes(payload(4)))


def test_left_overs_of_dead_writers_go(store: FolderStore) -> None:
    young, old = store._temporary / ("a" * 32), store._temporary / ("b" * 32)
    for path in (young, old):
        path.write_bytes(b"half a page")
    os.utime(old, (1, 1))
    FolderStore(store._root).close()
    assert temporary_files(store) == [young.name]


def test_files_of_others_stay(store: FolderStore) -> None:
    first = path_of(store, 1).parent.parent
    others = [
        store._root / "tmp" / "thesis.odt",
        store._root / "tmp" / ("b" * 32),
        store._temporary / "notes",
        store._temporary / ("b" * 31),
        store._temporary / ("c" * 32) / "in a folder",
        store._root / "ab" / "photo.jpg",
        store._root / "ab" / "cd" / "photo.jpg",
        store._root / "ab" / "cd" / KEYS[1],  # not its place
        store._root / "my" / "01" / KEYS[1],
        first / "photo.jpg",
        first / "holidays" / KEYS[1],
        path_of(store, 1).parent / "photo.jpg",
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
        os.utime(path, (1, 1))
    (store._temporary / ("d" * 32)).symlink_to(others[0])
    os.utime(store._temporary / ("c" * 32), (1, 1))
    FolderStore(store._root).close()
    assert store.stats()["pages"] == 4
    store.clear()
    assert store.stats() == {"pages": 0, "bytes": 0}
    assert all(path.read_bytes() == b"mine" for path in others)


def test_a_page_of_a_later_version_stays(store: FolderStore) -> None:
    for size in (6, HEADER_BYTES, HEADER_BYTES + SIZE, HEADER_BYTES + SIZE + 100):
        later = b"UCPG\x02\x00".ljust(size, b"x")
        path_of(store, 1).write_bytes(later)
        assert get(store, 1)[0] is PageStatus.MISS
        assert path_of(store, 1).read_bytes() == later


@pytest.mark.parametrize("gone", ["all", "temporary"])
def test_folders_that_were_removed_are_made_again(store: FolderStore, gone: str) -> None:
    shutil.rmtree(store._root if gone == "all" else store._temporary)
    assert store.stats()["pages"] == (0 if gone == "all" else 4)
    store.clear()
    assert store.set(KEYS, [payload(at) for at in range(6)]) == 6
    assert get(store, 5) == (PageStatus.HIT, bytes(payload(5)))
    assert store.exists(KEYS) == 6
    assert temporary_files(store) == []


def test_clear(store: FolderStore) -> None:
    store.clear()
    assert store.stats() == {"pages": 0, "bytes": 0}
    assert store.exists(KEYS) == 0
    assert store.set(KEYS[:1], [payload(0)]) == 1


def test_use_after_close(store: FolderStore) -> None:
    store.close()
    store.close()
    for call in (lambda: store.exists(KEYS), lambda: store.set([], []), store.clear, store.stats):
        with pytest.raises(ClosedError, match="was closed"):
            call()


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as caught:
        FolderStore(tmp_path / "file" / "below")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_of_folders() -> None:
    assert folder_of("relative/path") == Path("relative/path")
    assert folder_of("file:///a/b%20c") == Path("/a/b c")
    assert folder_of(Path("a/b")) == Path("a/b")
    for bad in ("file://host/a", "http://a/b", "file://", "file:///a%00b"):
        with pytest.raises(StorageError, match="file:///path"):
            folder_of(bad)
    assert folder._STALE_SECONDS > 60
