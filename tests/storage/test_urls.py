"""URLs of storages: taken apart, and refused in one line that says what to write."""

import importlib.metadata
from pathlib import Path

import pytest

from unified_cache.errors import StorageError
from unified_cache.storage.urls import StorageUrl, backend_class, open_storage, schemes


def parse(text: str) -> StorageUrl:
    return StorageUrl.parse(text)


def test_parts() -> None:
    url = parse("mooncake://Host.example:50051/a%20b?protocol=tcp&flag=&size=1.5GiB&n=7&x=0.5")
    assert (url.scheme, url.host, url.port, url.path) == ("mooncake", "Host.example", 50051, "/a b")
    assert url.text("protocol") == "tcp"
    assert url.text("absent", "d") == "d"
    assert url.flag("flag") is True
    assert url.flag("absent") is False
    assert url.size("size") == 3 * 2**29
    assert url.size("absent") is None
    assert url.integer("n", 1) == 7
    assert url.integer("absent", 1) == 1
    assert url.number("x", 0.0) == 0.5
    assert url.choice("protocol", ("tcp", "rdma"), "tcp") == "tcp"
    assert url.need_host() == "Host.example"
    assert parse("FILE:///x").scheme == "file"
    assert parse("shm://[::1]:5/").host == "::1"
    assert parse("dynamic://My.module:Class?a=b").host == "My.module:Class"


def test_a_plain_path_is_a_folder(tmp_path: Path) -> None:
    assert parse("/tmp/a%20b").path == "/tmp/a%20b"
    assert parse("relative").scheme == "pages"
    assert StorageUrl.parse(tmp_path).path == str(tmp_path)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "URL or a folder's path"),
        ("a\0b", "URL or a folder's path"),
        ("file://h:port/x", "no URL"),
        ("file:///x?size", "no URL"),
        ("file:///x?a=1&a=2", "given twice: a"),
        ("file:///x#y", "after '#'"),
        ("file:///x%00y", "zero byte"),
        ("://x", "no scheme"),
    ],
)
def test_what_is_no_url(text: str, said: str) -> None:
    with pytest.raises(StorageError) as error:
        parse(text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_options_say_what_is_allowed() -> None:
    url = parse("file://host/?size=5XB&n=-1&x=nan&flag=maybe&mode=c&zero=0GB&huge=99999999999TB")
    for call, said in (
        (lambda: url.size("size"), "size must be bytes > 0, such as 100GB, 512MiB or 4096, not '5XB'"),
        (lambda: url.size("zero"), "zero must be bytes > 0"),
        (lambda: url.size("huge"), "huge must be bytes > 0"),
        (lambda: url.integer("n", 1), "n must be an integer >= 0, not '-1'"),
        (lambda: url.integer("mode", 1, 0, 5), "mode must be an integer in 0..5, not 'c'"),
        (lambda: url.number("x", 1.0, 0, 2), "x must be a number in 0..2, not 'nan'"),
        (lambda: url.flag("flag"), "flag must be true or false, not 'maybe'"),
        (lambda: url.choice("mode", ("a", "b"), "a"), "mode must be one of a, b, not 'c'"),
        (lambda: url.only("size", "n"), "no option 'x' for file://, allowed: n, size"),
        (lambda: url.need_path(), "write file:///path"),
        (lambda: url.need_size("room"), "add room="),
        (lambda: parse("shm:///x").need_host("name"), "write shm://name"),
    ):
        with pytest.raises(StorageError) as error:
            call()
        assert said in str(error.value)
    parse("file:///x?a=1").only("a", "b")
    assert parse("file:///x").need_path() == "/x"
    assert parse("file:///x?size=4096").need_size("size") == 4096


def test_backends_are_found_by_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"file", "memory", "pages"} <= set(schemes())
    with pytest.raises(StorageError, match=r"no storage backend nothing://: take one of .*file"):
        open_storage("nothing://x")
    entry = importlib.metadata.EntryPoint("theirs", "tests.storage.test_urls:Theirs", "unified_cache.storage")
    broken = importlib.metadata.EntryPoint("broken", "tests.storage.no_such:Thing", "unified_cache.storage")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry, broken])
    assert "theirs" in schemes()
    assert backend_class("theirs") is Theirs
    made = open_storage("theirs://x", 2.5)
    assert (made.url.host, made.deadline) == ("x", 2.5)  # type: ignore[attr-defined]
    with pytest.raises(StorageError, match=r"theirs://bad can not be opened \(RuntimeError: no\)"):
        open_storage("theirs://bad")
    with pytest.raises(StorageError, match="backend of broken:// can not be loaded"):
        open_storage("broken://x")


class Theirs:
    """A backend that another package brings."""

    def __init__(self, url: StorageUrl, deadline: float) -> None:
        self.url, self.deadline = url, deadline

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> "Theirs":
        if url.host == "bad":
            raise RuntimeError("no")
        return cls(url, deadline)
