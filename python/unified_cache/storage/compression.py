"""Codecs of the bodies of stored objects; their libraries are extras, imported when they are asked for."""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from typing import Any

from unified_cache.errors import MissingDependencyError

__all__ = ["CODECS", "NO_CODEC", "Codec", "codec_named", "installed_codecs"]

NO_CODEC = 0

_Buffer = memoryview | bytes


class Codec(ABC):
    """Makes a page smaller, and the same page again. Used by several threads at once.

    Attributes:
        number: in the header of objects; never given to another codec.
        name: in settings.
    """

    number: int
    name: str

    @abstractmethod
    def compress(self, page: memoryview) -> _Buffer:
        """The page, in any number of bytes."""

    @abstractmethod
    def decompress(self, stored: _Buffer, page: memoryview) -> bool:
        """Fill `page` from what `compress` made; False if these bytes do not make a page of that size."""


class _Zstd(Codec):
    number, name = 1, "zstd"

    def __init__(self) -> None:
        self._module = _library("zstandard", "zstd")

    def compress(self, page: memoryview) -> _Buffer:
        # Objects of this library belong to one thread, and making one costs little beside a page.
        compressed: bytes = self._module.ZstdCompressor(level=1).compress(page)
        return compressed

    def decompress(self, stored: _Buffer, page: memoryview) -> bool:
        try:
            whole = self._module.ZstdDecompressor().decompress(stored, max_output_size=page.nbytes)
        except self._module.ZstdError:
            return False
        return _put(whole, page)


class _Lz4(Codec):
    number, name = 2, "lz4"

    def __init__(self) -> None:
        self._module = _library("lz4.block", "lz4")

    def compress(self, page: memoryview) -> _Buffer:
        compressed: bytes = self._module.compress(page, store_size=False)
        return compressed

    def decompress(self, stored: _Buffer, page: memoryview) -> bool:
        try:
            whole = self._module.decompress(stored, uncompressed_size=page.nbytes)
        except self._module.LZ4BlockError:
            return False
        return _put(whole, page)


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (_Zstd, _Lz4)}


def codec_named(name: str | None) -> Codec | None:
    """The codec that the setting `storage_compression` names; None for None.

    Raises:
        MissingDependencyError: its library is not installed.
    """
    return None if name is None else CODECS[name]()


def installed_codecs() -> dict[int, Codec]:
    """The codecs whose libraries are installed, by number."""
    found = {}
    for codec in CODECS.values():
        with contextlib.suppress(MissingDependencyError):
            found[codec.number] = codec()
    return found


def _put(whole: bytes, page: memoryview) -> bool:
    if len(whole) != page.nbytes:
        return False
    page[:] = whole
    return True


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingDependencyError(
            f"storage_compression={extra!r} needs the package {module.partition('.')[0]!r}: "
            f"pip install 'unified-cache[{extra}]'"
        ) from None
