"""A storage that fails is left alone for a while, and tried once."""

from tests.storage.support import Watch
from unified_cache.storage.breaker import Breaker


def test_a_few_failures_in_a_row_open_it() -> None:
    breaker = Breaker(Watch())
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.state == "closed"
    for _ in range(3):
        assert breaker.allow()
        breaker.failed()
    assert (breaker.state, breaker.opened) == ("open", 1)
    assert breaker.refuses
    assert not breaker.allow()


def test_a_timeout_opens_it_at_once() -> None:
    breaker = Breaker(Watch())
    breaker.failed(timeout=True)
    assert breaker.state == "open"


def test_one_call_probes_after_the_pause() -> None:
    clock = Watch()
    breaker = Breaker(clock, pause=1.0, longest_pause=3.0)
    breaker.failed(timeout=True)
    for pause in (1.0, 2.0, 3.0, 3.0):
        clock.now += pause - 0.01
        assert not breaker.allow()
        clock.now += 0.02
        assert not breaker.refuses
        assert breaker.allow()
        assert breaker.state == "half-open"
        assert breaker.refuses
        assert not breaker.allow()
        breaker.failed()
        assert breaker.state == "open"
    clock.now += 3.01
    assert breaker.allow()
    breaker.succeeded()
    assert breaker.state == "closed"
    # From the beginning again.
    breaker.failed(timeout=True)
    clock.now += 1.01
    assert breaker.allow()


def test_late_answers_from_before_change_nothing() -> None:
    clock = Watch()
    breaker = Breaker(clock)
    breaker.failed(timeout=True)
    breaker.succeeded()
    breaker.failed()
    assert (breaker.state, breaker.opened) == ("open", 1)
    assert not breaker.allow()
    clock.now += 1.01
    assert breaker.allow()
