"""Threads that run jobs in order, and that never keep a process or a forgotten owner alive."""

import atexit
import heapq
import queue
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["Ticket", "Worker", "WorkerPool"]

_Job = Callable[[], None]

# A worker that is closed or forgotten may finish the job it is in, for this long.
_CLOSE_SECONDS = 1.0
# And at the end of the process all workers together, for this long.
_EXIT_SECONDS = 2.0

_workers: "dict[threading.Thread, queue.SimpleQueue[_Job | None]]" = {}
_pools: "dict[_Jobs, list[threading.Thread]]" = {}


def _run(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        job()
        # Waiting for the next job must not keep what this one refers to.
        del job


def _drop(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    """Forget the jobs that have not begun, and end the thread after the one it is in."""
    try:
        while True:
            jobs.get_nowait()
    except queue.Empty:
        jobs.put(None)


def _stop(jobs: "queue.SimpleQueue[_Job | None]", thread: threading.Thread) -> None:
    _workers.pop(thread, None)
    _drop(jobs)
    if thread is not threading.current_thread():
        thread.join(_CLOSE_SECONDS)


@atexit.register
def _stop_all() -> None:
    # A thread that is inside native code while the interpreter goes down can crash it.
    workers, pools = dict(_workers), dict(_pools)
    for jobs in workers.values():
        _drop(jobs)
    for queued in pools:
        queued.end()
    end = time.monotonic() + _EXIT_SECONDS
    for thread in [*workers, *(thread for threads in pools.values() for thread in threads)]:
        thread.join(max(end - time.monotonic(), 0))


class Worker:
    """One daemon thread with a queue of jobs. A job reports its own errors; it must not raise.

    Args:
        name: of the thread.
        awaited: the end of the process waits a little for the job that runs.
    """

    def __init__(self, name: str, *, awaited: bool = True) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
        # Runs at close or when the worker is forgotten; at the end of the process there is `_stop_all`.
        self._finalizer = weakref.finalize(self, _stop, self._jobs, thread)
        self._finalizer.atexit = False
        thread.start()
        if awaited:
            _workers[thread] = self._jobs

    def submit(self, job: _Job) -> None:
        """Run `job` after those before it."""
        self._jobs.put(job)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until every job submitted so far has ended; False if that took longer than `timeout`."""
        if not self._finalizer.alive:
            return True
        ended = threading.Event()
        self._jobs.put(ended.set)
        return ended.wait(timeout)

    def close(self) -> None:
        """Forget the jobs that have not begun and end the thread. More than once is fine."""
        self._finalizer()


class Ticket:
    """A job of a `WorkerPool`."""

    __slots__ = ("_job",)

    def __init__(self, job: _Job) -> None:
        self._job: _Job | None = job  # None: taken by a thread, or cancelled


class _Jobs:
    """The queue of a pool: what its threads know, so that they do not keep the pool alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)  # for the threads: one for each job
        self._idle = threading.Condition(self._lock)  # for who waits until no job is left
        self._waiting: list[tuple[int, int, Ticket]] = []
        self._submitted = 0
        self._running = 0
        self._ended = False

    def put(self, ticket: Ticket, priority: int) -> None:
        with self._lock:
            self._submitted += 1
            # The higher first, and in order among equals.
            heapq.heappush(self._waiting, (-priority, self._submitted, ticket))
            self._more.notify()

    def take(self) -> _Job | None:
        with self._lock:
            while True:
                while self._waiting:
                    ticket = heapq.heappop(self._waiting)[2]
                    job, ticket._job = ticket._job, None
                    if job is not None:
                        self._running += 1
                        return job
                if not self._running:
                    self._idle.notify_all()  # those that waited were cancelled
                if self._ended:
                    return None
                self._more.wait()

    def done(self) -> None:
        with self._lock:
            self._running -= 1
            if not (self._running or self._waiting):
                self._idle.notify_all()

    def drain(self, timeout: float | None) -> bool:
        with self._lock:
            return self._idle.wait_for(lambda: not (self._waiting or self._running), timeout)

    def cancel(self, ticket: Ticket) -> bool:
        with self._lock:
            job, ticket._job = ticket._job, None
            return job is not None

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._waiting.clear()
            self._more.notify_all()
            self._idle.notify_all()


def _work(jobs: _Jobs) -> None:
    while True:
        job = jobs.take()
        if job is None:
            return
        job()
        del job
        jobs.done()


def _stop_pool(jobs: _Jobs, threads: list[threading.Thread]) -> None:
    _pools.pop(jobs, None)
    jobs.end()
    end = time.monotonic() + _CLOSE_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(end - time.monotonic(), 0))


class WorkerPool:
    """Daemon threads with one queue of jobs, the higher priority first. Jobs must not raise.

    Args:
        name: of the threads, with a number after it.
        threads: how many.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._jobs = _Jobs()
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs,), name=f"{name} {at}", daemon=True)
            for at in range(threads)
        ]
        self._finalizer = weakref.finalize(self, _stop_pool, self._jobs, self._threads)
        self._finalizer.atexit = False
        for thread in self._threads:
            thread.start()
        _pools[self._jobs] = self._threads

    def submit(self, job: _Job, priority: int = 0) -> Ticket:
        """Run `job` when a thread is free for it."""
        ticket = Ticket(job)
        self._jobs.put(ticket, priority)
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """True if the job had not begun: it never will."""
        return self._jobs.cancel(ticket)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no job waits or runs; False if that took longer than `timeout`."""
        return self._jobs.drain(timeout)

    def close(self) -> None:
        """Forget the jobs that have not begun, and end the threads; one that is in a job ends after it.

        Waits for a second at most. More than once is fine.
        """
        self._finalizer()
