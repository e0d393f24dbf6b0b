"""Host memory that a GPU may reach: registered with its driver piece by piece, or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import Any, Protocol

from unified_cache._torch import torch

__all__ = ["CudaRegistrar", "Registrar", "Registration", "RegistrationError", "pieces_of"]

Piece = tuple[int, int]  # address, bytes


class Registrar(Protocol):
    """What makes ranges of host memory known to a GPU's driver."""

    def register(self, address: int, size: int) -> None:
        """Pin these bytes; raises if that can not be."""

    def unregister(self, address: int) -> None:
        """Undo the registration that began at this address; raises if that can not be."""


class CudaRegistrar:
    """Registers with CUDA, for every device of this process.

    Args:
        device: the CUDA device whose pool the memory is for.
    """

    # Usable from every context, and by kernels: cudaHostRegisterPortable | cudaHostRegisterMapped
    _FLAGS = 1 | 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(self, address: int, size: int) -> None:
        """Pin these bytes.

        Raises:
            OSError: CUDA's own words.
        """
        with torch.cuda.device(self._device):
            self._check("cudaHostRegister", self._cudart.cudaHostRegister(address, size, self._FLAGS))

    def unregister(self, address: int) -> None:
        """Undo the registration that began at this address.

        Raises:
            OSError: CUDA's own words.
        """
        with torch.cuda.device(self._device):
            self._check("cudaHostUnregister", self._cudart.cudaHostUnregister(address))

    def _check(self, call: str, code: Any) -> None:
        if int(code) == 0:
            return
        self._forget_error()
        raise OSError(f"{call}: {self._cudart.cudaGetErrorString(code)}")

    def _forget_error(self) -> None:
        """CUDA remembers an error until somebody asks: a small kernel does, or it would be the next one's."""
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(1)


class RegistrationError(Exception):
    """A piece could not be registered, and those before it were unregistered again.

    Attributes:
        left: pieces whose unregistering failed, so that they are still registered.
    """

    def __init__(self, message: str, left: list[str]) -> None:
        super().__init__(message)
        self.left = left


def pieces_of(address: int, size: int, most: int, unit: int) -> list[Piece]:
    """Cut a range into pieces of at most `most` bytes, each but the last one a multiple of `unit`.

    Args:
        address: where the range begins.
        size: its bytes.
        most: at least `unit`.
        unit: bytes that stay together.
    """
    step = most // unit * unit
    return [(address + start, min(step, size - start)) for start in range(0, size, step)]


class Registration:
    """Pieces of memory, registered when this is made, until `release`.

    Args:
        registrar: what registers them.
        pieces: in this order.

    Raises:
        RegistrationError: a piece could not be registered; none is then, but those that it names.
    """

    def __init__(self, registrar: Registrar, pieces: list[Piece]) -> None:
        self._registrar = registrar
        self._process = os.getpid()
        self.pieces: list[Piece] = []
        for at, (address, size) in enumerate(pieces, 1):
            try:
                registrar.register(address, size)
            except BaseException as error:
                left = self._unregister()
                if not isinstance(error, Exception):  # such as an interrupt: not about this piece
                    raise
                message = f"piece {at} of {len(pieces)} ({size} bytes) was refused: {error}"
                raise RegistrationError(message, left) from error
            self.pieces.append((address, size))

    def release(self) -> None:
        """Unregister every piece, also if that fails for some: then there is one warning. Twice is fine."""
        count = len(self.pieces)
        failed = self._unregister()
        if failed:
            warnings.warn(
                f"{len(failed)} of {count} pieces of host memory could not be unregistered from the GPU and "
                f"stay pinned until this process ends: {'; '.join(failed)}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _unregister(self) -> list[str]:
        """Undo all, the last one first; says what could not be undone."""
        pieces, self.pieces = self.pieces, []
        failed = []
        if self._process != os.getpid():
            return []  # a forked child: the pieces are its parent's
        if sys.is_finalizing():
            return []  # the driver may have gone before, and takes everything with it
        for address, size in reversed(pieces):
            try:
                self._registrar.unregister(address)
            except Exception as error:
                failed.append(f"{size} bytes at {address:#x}: {error}")
        return failed
