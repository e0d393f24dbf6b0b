"""A backend by module and class, ``dynamic://package.module:Class?option=value``: one's own."""

from __future__ import annotations

import importlib
import re

from unified_cache.errors import StorageError
from unified_cache.storage.contract import Backend
from unified_cache.storage.urls import StorageUrl

__all__ = ["DynamicBackend"]

_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class DynamicBackend:
    """Finds the class that a URL names, and opens that."""

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Backend:
        """A backend of the class, by its own ``from_url``, which is given the whole URL.

        Raises:
            StorageError: there is no such class, or it is no `Backend` with a ``from_url``.
        """
        if not _PLACE.fullmatch(url.host):
            raise StorageError(
                f"storage {url}: name module and class, as in dynamic://package.module:Class, "
                f"not {url.host!r}"
            )
        module, _, name = url.host.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except Exception as error:  # whatever a module does when it is imported
            raise StorageError(
                f"storage {url}: {name} can not be taken from module {module} "
                f"({type(error).__name__}: {error})"
            ) from error
        if not (isinstance(found, type) and issubclass(found, Backend) and hasattr(found, "from_url")):
            raise StorageError(
                f"storage {url}: {url.host} must be a subclass of unified_cache.storage.contract.Backend "
                "with a class method from_url(url, deadline)"
            )
        backend = found.from_url(url, deadline)
        if not isinstance(backend, Backend):
            raise StorageError(
                f"storage {url}: from_url of {url.host} gave {type(backend).__name__}, no Backend"
            )
        return backend
