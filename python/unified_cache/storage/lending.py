"""Memory of a storage's, for host pools to lie in."""

from __future__ import annotations

import logging
from collections.abc import Callable

from unified_cache.storage.contract import Backend

__all__ = ["lender"]

_log = logging.getLogger(__name__)


def lender(backend: Backend | None) -> Callable[[int], memoryview | None]:
    """What a host pool asks for memory of so many bytes; None: it takes its own.

    A backend that fails to give any is only slower without: that is said in the log, once.
    """
    failed = False

    def lend(size: int) -> memoryview | None:
        nonlocal failed
        if backend is None or failed:
            return None
        try:
            return backend.host_memory(size)
        except Exception as error:  # whatever a client of some engine raises
            failed = True
            _log.warning(
                "storage %s lends no memory for a host pool of %d bytes (%s): going on with ordinary memory, "
                "pages are copied once more on their way",
                backend.scheme,
                size,
                error,
            )
            return None

    return lend
