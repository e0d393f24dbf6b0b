"""URLs of storages, and the backends that they name."""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Protocol, Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from unified_cache.errors import StorageError

if TYPE_CHECKING:
    from unified_cache.storage.contract import Backend

__all__ = ["DEADLINE_SECONDS", "ENTRY_POINTS", "StorageUrl", "backend_class", "open_storage", "schemes"]

# Where packages that bring a backend of their own name it: ``scheme = "package.module:Class"``.
ENTRY_POINTS = "unified_cache.storage"

# As long may one call to a backend take, as far as its client allows that.
DEADLINE_SECONDS = 5.0

_BACKENDS = "unified_cache.storage.backends"
_BUILT_IN = {
    "dynamic": f"{_BACKENDS}.dynamic:DynamicBackend",
    "file": f"{_BACKENDS}.file:FileBackend",
    "memory": f"{_BACKENDS}.memory:MemoryBackend",
    "mmap": f"{_BACKENDS}.mmap:MmapBackend",
    "mooncake": f"{_BACKENDS}.mooncake:MooncakeBackend",
    "pages": f"{_BACKENDS}.pages:PagesBackend",
    "shm": f"{_BACKENDS}.shm:ShmBackend",
}

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class _FromUrl(Protocol):
    """What the class of a backend has beside the contract."""

    @classmethod
    def from_url(cls, url: StorageUrl, deadline: float) -> Backend: ...


@dataclass(frozen=True, slots=True)
class StorageUrl:
    """``scheme://host:port/path?option=value&...``, taken apart.

    The getters raise `StorageError`, which names the option, its value and what is allowed.

    Attributes:
        scheme: names the backend, in lower case.
        host: "" if there is none; for ``shm`` and ``memory`` a name, for ``dynamic`` module:Class.
        port: None if there is none.
        path: with its leading "/"; "" if there is none. A plain path is taken as it is.
        options: by name.
        given: what the URL was made of, for messages.
    """

    scheme: str
    host: str = ""
    port: int | None = None
    path: str = ""
    options: dict[str, str] = field(default_factory=dict)
    given: str = ""

    @classmethod
    def parse(cls, storage: str | os.PathLike[str]) -> Self:
        """A URL, or a folder's path: that is ``pages://`` with this path.

        Raises:
            StorageError: it can be neither.
        """
        given = os.fspath(storage)
        if not given or "\0" in given:
            raise StorageError(f"storage must be a URL or a folder's path, not {given!r}")
        if "://" not in given:
            return cls("pages", path=given, given=given)
        try:
            parts = urlsplit(given)
            host, port = (parts.netloc, None) if parts.scheme == "dynamic" else (_host(parts), parts.port)
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise StorageError(
                f"storage {given!r} is no URL ({error}): write scheme://host:port/path?option=value"
            ) from None
        path, options = unquote(parts.path), dict(pairs)
        twice = [name for name in options if sum(name == other for other, _ in pairs) > 1]
        wrong = f"options given twice: {', '.join(twice)}" if twice else ""
        if "\0" in path or any("\0" in text for pair in pairs for text in pair):
            wrong = "a zero byte"
        if parts.fragment:
            wrong = f"a part after '#': {parts.fragment!r}"
        if not parts.scheme:
            wrong = "no scheme"
        if wrong:
            raise StorageError(f"storage {given!r} has {wrong}: write scheme://host:port/path?option=value")
        return cls(parts.scheme.lower(), host, port, path, options, given)

    def __str__(self) -> str:
        return self.given or f"{self.scheme}://{self.host}{self.path}"

    def only(self, *names: str) -> None:
        """Refuse options that are not among `names`."""
        unknown = [name for name in self.options if name not in names]
        if unknown:
            allowed = ", ".join(sorted(names)) or "none"
            raise StorageError(
                f"storage {self}: there is no option {unknown[0]!r} for {self.scheme}://, allowed: {allowed}"
            )

    def need_path(self) -> str:
        """The path, of a URL without a host that must have one."""
        if self.host not in ("", "localhost") or self.port is not None or self.path in ("", "/"):
            raise StorageError(f"storage {self}: write {self.scheme}:///path, an absolute path after ://")
        return self.path

    def need_host(self, what: str = "host") -> str:
        """The host, of a URL that must have one; `what` it stands for."""
        if not self.host:
            raise StorageError(f"storage {self}: write {self.scheme}://{what}, there is none after ://")
        return self.host

    def text(self, name: str, default: str = "") -> str:
        """The option `name`."""
        return self.options.get(name, default)

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        """The option `name`, one of `allowed`."""
        value = self.options.get(name, default)
        if value not in allowed:
            raise self._error(name, f"one of {', '.join(allowed)}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """The option `name`, yes or no; an option without a value is a yes."""
        if name not in self.options:
            return default
        value = self.options[name].lower()
        if value not in (*_YES, *_NO, ""):
            raise self._error(name, "true or false")
        return value not in _NO

    def integer(self, name: str, default: int, low: int = 0, high: int | None = None) -> int:
        """The option `name`, an integer in low..high."""
        if name not in self.options:
            return default
        allowed = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
        try:
            value = int(self.options[name])
        except ValueError:
            raise self._error(name, allowed) from None
        if value < low or (high is not None and value > high):
            raise self._error(name, allowed)
        return value

    def number(self, name: str, default: float, low: float = 0.0, high: float | None = None) -> float:
        """The option `name`, a finite number in low..high."""
        if name not in self.options:
            return default
        allowed = f"a number >= {low:g}" if high is None else f"a number in {low:g}..{high:g}"
        try:
            value = float(self.options[name])
        except ValueError:
            raise self._error(name, allowed) from None
        if not math.isfinite(value) or value < low or (high is not None and value > high):
            raise self._error(name, allowed)
        return value

    def size(self, name: str, default: int | None = None) -> int | None:
        """The option `name`, bytes > 0: ``100GB``, ``1.5TiB``, ``4096``."""
        if name not in self.options:
            return default
        value = self.options[name].strip()
        digits = value.rstrip("KMGTiB")
        unit = value[len(digits) :]
        try:
            count = int(float(digits) * _UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            count = 0
        if not 0 < count < 2**63:
            raise self._error(name, "bytes > 0, such as 100GB, 512MiB or 4096")
        return count

    def need_size(self, name: str) -> int:
        """The option `name`, bytes > 0, of a URL that must have it."""
        value = self.size(name)
        if value is None:
            raise StorageError(f"storage {self}: add {name}=, bytes such as 100GB or 512MiB")
        return value

    def _error(self, name: str, allowed: str) -> StorageError:
        return StorageError(
            f"storage {self}: option {name} must be {allowed}, not {self.options.get(name, '')!r}"
        )


def _host(parts: SplitResult) -> str:
    """The host as it is written: names and modules have capitals."""
    name = parts.netloc.rpartition("@")[2]
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return unquote(name.partition(":")[0])


def schemes() -> list[str]:
    """Those that `open_storage` knows, those of installed packages included."""
    others = {entry.name for entry in metadata.entry_points(group=ENTRY_POINTS)}
    return sorted(others | set(_BUILT_IN))


def backend_class(scheme: str) -> type[_FromUrl]:
    """The class of a scheme's backend, imported only now.

    Raises:
        StorageError: there is none, or it can not be imported.
    """
    entry = _BUILT_IN.get(scheme)
    try:
        if entry is not None:
            module, _, name = entry.partition(":")
            found: type[_FromUrl] = getattr(importlib.import_module(module), name)
            return found
        for other in metadata.entry_points(group=ENTRY_POINTS):
            if other.name == scheme:
                loaded: type[_FromUrl] = other.load()
                return loaded
    except StorageError:
        raise
    except Exception as error:  # whatever a package does when it is imported
        raise StorageError(
            f"the storage backend of {scheme}:// can not be loaded ({type(error).__name__}: {error}): "
            "install what it needs"
        ) from error
    raise StorageError(
        f"there is no storage backend {scheme}://: take one of {', '.join(schemes())}, or install the "
        "package that brings it"
    )


def open_storage(storage: str | os.PathLike[str] | StorageUrl, deadline: float = DEADLINE_SECONDS) -> Backend:
    """The backend that a URL or a folder's path names, open.

    Args:
        storage: see `StorageUrl.parse`.
        deadline: seconds that a call to it may take.

    Raises:
        StorageError: it can not be used; the message says what was tried, what came back, what to change.
    """
    url = storage if isinstance(storage, StorageUrl) else StorageUrl.parse(storage)
    try:
        return backend_class(url.scheme).from_url(url, deadline)
    except StorageError:
        raise
    except Exception as error:
        raise StorageError(f"storage {url} can not be opened ({type(error).__name__}: {error})") from error
