"""Threads that run jobs: in order, by priority, and never for longer than somebody wants them."""

import gc
import threading

from unified_cache.worker import WorkerPool


def names(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


class Gate:
    """A job that runs until it is told to end."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.inside.set()
        assert self.go_on.wait(30)


def test_the_higher_priority_first_and_in_order_among_equals() -> None:
    pool, gate, order, done = WorkerPool("order", 1), Gate(), [], threading.Event()
    pool.submit(gate)
    assert gate.inside.wait(30)
    for at, priority in enumerate((0, 5, 0, 5, -1)):
        pool.submit(lambda at=at: order.append(at), priority)  # type: ignore[misc]
    pool.submit(done.set, -2)
    gate.go_on.set()
    assert done.wait(30)
    assert order == [1, 3, 0, 2, 4]
    pool.close()


def test_a_job_that_has_not_begun_can_be_cancelled() -> None:
    pool, gate, done = WorkerPool("cancel", 1), Gate(), threading.Event()
    running = pool.submit(gate)
    assert gate.inside.wait(30)
    ran: list[int] = []
    waiting = pool.submit(lambda: ran.append(1))
    assert pool.cancel(waiting)
    assert not pool.cancel(waiting)
    assert not pool.cancel(running)
    pool.submit(done.set)
    gate.go_on.set()
    assert done.wait(30)
    assert ran == []
    pool.close()


def test_whoever_waits_for_the_last_job_hears_of_it() -> None:
    """Also where what waited behind it was cancelled; several may wait."""
    pool, gate, drained = WorkerPool("drain", 2), Gate(), []
    assert pool.drain(0)
    pool.submit(gate)
    assert gate.inside.wait(30)
    assert not pool.drain(0.01)
    others = [threading.Thread(target=lambda: drained.append(pool.drain(30))) for _ in range(2)]
    for other in others:
        other.start()
    tickets = [pool.submit(lambda: None) for _ in range(9)]
    for ticket in tickets[4:]:
        pool.cancel(ticket)
    gate.go_on.set()
    for other in others:
        other.join(30)
    assert drained == [True, True]
    pool.close()


def test_threads_run_side_by_side_and_end_at_close() -> None:
    pool, gates = WorkerPool("side by side", 3), [Gate() for _ in range(3)]
    for gate in gates:
        pool.submit(gate)
    assert all(gate.inside.wait(30) for gate in gates)
    assert names("side by side") == [f"side by side {at}" for at in range(3)]
    never = pool.submit(lambda: None)
    for gate in gates:
        gate.go_on.set()
    pool.close()
    pool.close()
    assert names("side by side") == []
    del never


def test_a_pool_that_is_held_up_ends_when_it_can() -> None:
    pool, gate = WorkerPool("held up", 1), Gate()
    pool.submit(gate)
    assert gate.inside.wait(30)
    ran: list[int] = []
    pool.submit(lambda: ran.append(1))
    pool.close()  # returns, although the thread is inside
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "held up 0"]
    gate.go_on.set()
    thread.join(30)
    assert not thread.is_alive()
    assert ran == []


def test_a_pool_that_is_forgotten_ends() -> None:
    pool = WorkerPool("forgotten", 2)
    assert len(names("forgotten")) == 2
    del pool
    gc.collect()
    assert names("forgotten") == []
