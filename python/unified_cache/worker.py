"""A thread that runs jobs in order, and that never keeps a process or a forgotten owner alive."""

import queue
import threading
import weakref
from collections.abc import Callable

__all__ = ["Worker"]

_Job = Callable[[], None]

# At the end of the process each worker may finish the job it is in, for this long.
_EXIT_SECONDS = 1.0


def _run(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        job()
        # Waiting for the next job must not keep what this one refers to.
        del job


def _stop(jobs: "queue.SimpleQueue[_Job | None]", thread: threading.Thread) -> None:
    try:
        while True:
            jobs.get_nowait()
    except queue.Empty:
        jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(_EXIT_SECONDS)


class Worker:
    """One daemon thread with a queue of jobs. A job reports its own errors; it must not raise."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
        # Runs at close, when the worker is forgotten, or at the end of the process, whichever is first:
        # a thread that is inside native code while the interpreter goes down can crash it.
        self._finalizer = weakref.finalize(self, _stop, self._jobs, thread)
        thread.start()

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
