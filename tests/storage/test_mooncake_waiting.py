"""A request that waits for Mooncake is told in time, also where no setting ends the call of its thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cache.support import PAGE, assert_nothing_held, make_cache, serve, toks, until
from tests.storage.lateness import Lateness
from tests.storage.mooncake_server import Master, Owner, environment_kept, wait_until, why_not_here
from unified_cache import UnifiedCache
from unified_cache.storage.backends.mooncake import MooncakeBackend
from unified_cache.storage.guard import GRACE

_MISSING = why_not_here()
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

DEADLINE = 2.0
PAGES = 12
TOKENS = toks(PAGES * PAGE + 1)


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """What the backend sets for its client goes again."""
    with environment_kept(DEADLINE):
        yield


def backend_of(cache: UnifiedCache) -> MooncakeBackend:
    assert cache._storage is not None
    backend = cache._storage.guard.backend
    assert isinstance(backend, MooncakeBackend)
    return backend


def stored(cache: UnifiedCache) -> bool:
    """All pages are in storage, of which the tree knows nothing."""
    serve(cache, TOKENS)
    assert cache.flush(30)
    cache.reset()
    return serve(cache, TOKENS) == (0, 0, PAGES * PAGE)


@pytest.mark.parametrize("call", ["exists", "get"])
@pytest.mark.parametrize("fault", ["client frozen", "master killed"])
def test_whoever_waits_is_told_in_time(fault: str, call: str) -> None:
    """A `mooncake_client` that hangs holds calls up for 30 s and more, a master that dies for 4.3 s."""
    with Master() as master, Owner(master) as owner, Lateness() as lateness:
        url = f"mooncake://{master.address}?force=1&metrics={master.metrics_port}"
        if fault == "client frozen":
            url += f"&client={owner.address}"
        settings: dict[str, Any] = {"prefetch_threshold": PAGE, "prefetch_policy": "wait_complete"}
        with make_cache(2 * PAGES, storage=url, storage_timeout=DEADLINE, **settings) as cache:
            backend = backend_of(cache)
            wait_until(lambda: backend.stats()["capacity_bytes"] > 0, "the master has a segment")
            wait_until(lambda: stored(cache), "it is served")
            cache.reset()
            began: list[float] = []
            asked = getattr(backend, call)

            def held_up(argument: Any) -> Any:
                """The call, and the fault in it."""
                if not began:
                    began.append(time.monotonic())
                    if fault == "client frozen":
                        owner.freeze()
                    else:
                        master.kill()
                        backend._store.is_exist("the first call after it fails at once")
                return asked(argument)

            setattr(backend, call, held_up)
            request = cache.begin(TOKENS)
            until(lambda: began, cache)
            until(request.prefetch_done, cache)
            waited = time.monotonic() - began[0]
            assert waited <= DEADLINE * GRACE + lateness.allowance(began[0])
            assert request.wait_prefetch() == 0
            # It can still write there.
            assert cache._storage is not None
            assert cache._storage.stuck
            assert cache.usage()["host_reading_pages"] == (PAGES if call == "get" else 0)
            # Nobody else waits.
            other = cache.begin(toks(PAGES * PAGE + 1, 1000))
            assert other.prefetch_done()
            request.abort()
            other.abort()
            if fault == "client frozen":
                owner.thaw()
            else:
                master.start()
            until(lambda: not cache._storage.busy, cache)  # type: ignore[union-attr]
            assert cache.usage()["host_free_pages"] == cache.usage()["host_pages"]
            wait_until(lambda: stored(cache), "it is served again", 40)
            assert_nothing_held(cache)
