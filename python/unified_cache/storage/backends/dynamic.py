"""``dynamic://package.module:Class?...``: a backend that no package has made known."""

from __future__ import annotations

import importlib

from unified_cache.errors import StorageError
from unified_cache.storage.contract import Backend
from unified_cache.storage.urls import StorageUrl

__all__ = ["DynamicBackend"]


class DynamicBackend:
    """Opens the class that a URL names; the rest of the URL is for that class."""

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Backend:
        """The backend that ``Class.from_url(url, deadline)`` makes.

        Raises:
            StorageError: the module can not be imported, or has no such class, or it is no backend.
        """
        module, _, name = url.host.partition(":")
        if not all(module.split(".")) or not name:
            raise StorageError(f"storage {url}: write dynamic://package.module:Class")
        try:
            imported = importlib.import_module(module)
        except Exception as error:  # whatever a module does when it is imported
            raise StorageError(
                f"storage {url}: the module {module} can not be imported ({type(error).__name__}: {error}): "
                "install it, or set PYTHONPATH"
            ) from error
        found = getattr(imported, name, None)
        if found is None:
            raise StorageError(f"storage {url}: the module {module} has no class {name}")
        if not (isinstance(found, type) and issubclass(found, Backend) and hasattr(found, "from_url")):
            raise StorageError(f"storage {url}: {name} of {module} is no class of a Backend with from_url")
        backend = found.from_url(url, deadline)
        if not isinstance(backend, Backend):
            raise StorageError(f"storage {url}: from_url of {name} gave {type(backend).__name__}, no Backend")
        return backend
