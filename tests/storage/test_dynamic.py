"""Backends by module and class."""

from typing import ClassVar, Self

import pytest

from tests.cache.support import assert_nothing_held, make_cache, serve, toks
from unified_cache.errors import StorageError
from unified_cache.storage.backends.memory import MemoryBackend
from unified_cache.storage.urls import StorageUrl, open_storage


class Mine(MemoryBackend):
    """Somebody's own."""

    opened: ClassVar[list[tuple[str, float]]] = []

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Self:
        cls.opened.append((url.text("color", ""), deadline))
        return super().from_url(StorageUrl.parse("memory://mine"), deadline)


class Bare:
    pass


class Wrong(MemoryBackend):
    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Self:
        return Bare()  # type: ignore[return-value]


def test_a_class_of_ones_own() -> None:
    backend = open_storage(f"dynamic://{__name__}:Mine?color=red", 2.5)
    assert isinstance(backend, Mine)
    assert Mine.opened[-1] == ("red", 2.5)
    backend.close()


def test_it_serves_a_cache() -> None:
    with make_cache(storage=f"dynamic://{__name__}:Mine", prefetch_threshold=0) as cache:
        serve(cache, toks(17))
        assert cache.flush(30)
        cache.reset()
        assert serve(cache, toks(17)) == (0, 0, 16)
        assert_nothing_held(cache)


@pytest.mark.parametrize(
    "place, said",
    [
        ("", "write dynamic://package.module:Class"),
        (__name__, "write dynamic://package.module:Class"),
        (f"{__name__}:", "write dynamic://package.module:Class"),
        ("no.such.module:Mine", "No module named"),
        (f"{__name__}:Missing", "has no class Missing"),
        (f"{__name__}:Bare", "is no class of a Backend"),
        (f"{__name__}:toks", "is no class of a Backend"),
        (f"{__name__}:Wrong", "gave Bare, no Backend"),
    ],
)
def test_what_is_none(place: str, said: str) -> None:
    with pytest.raises(StorageError, match=said):
        open_storage(f"dynamic://{place}")
