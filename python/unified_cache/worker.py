"""A thread that runs jobs in order, and that never keeps a process or a forgotten owner alive."""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["Worker"]

_Job = Callable[[], None]

# A worker that is closed or forgotten may finish the job it is in, for this long.
_CLOSE_SECONDS = 1.0
# And at the end of the process all workers together, for this long.
_EXIT_SECONDS = 2.0

_workers: "dict[threading.Thread, queue.SimpleQueue[_Job | None]]" = {}


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
    workers = dict(_workers)
    for jobs in workers.values():
        _drop(jobs)
    end = time.monotonic() + _EXIT_SECONDS
    for thread in workers:
        thread.join(max(end - time.monotonic(), 0))


class Worker:
    """One daemon thread with a queue of jobs. A job reports its own errors; it must not raise."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
        # Runs at close or when the worker is forgotten; at the end of the process there is `_stop_all`.
        self._finalizer = weakref.finalize(self, _stop, self._jobs, thread)
        self._finalizer.atexit = False
        thread.start()
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
