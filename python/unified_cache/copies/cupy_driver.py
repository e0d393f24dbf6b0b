"""The driver behind CuPy: it compiles the kernel at run time and queues copies and launches.

Two things are called in the driver's own library: copies in batches, which CuPy does not have; and queries,
whose "not ready" the CUDA runtime would remember as this thread's last error, for the next check of
somebody's launch to find.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from unified_cache._torch import torch
from unified_cache.copies.cuda_driver import Event, Memory, Stream
from unified_cache.copies.kernel_source import OPTIONS, kernel_source
from unified_cache.errors import ArgumentError, CopyError, MissingDependencyError

__all__ = ["BatchCopy", "CupyDriver", "find_batch_copy"]

_NOT_READY: Final = 600  # CUDA_ERROR_NOT_READY
_SUCCESS: Final = 0
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_HOST_MEMORY: Final = 1  # cudaMemoryTypeHost


def _import_cupy() -> Any:
    try:
        import cupy  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise MissingDependencyError(
            f"copies on a GPU need CuPy, which can not be imported ({error}): "
            "pip install unified-cache[cuda13], or [cuda12] for an older driver"
        ) from None
    return cupy


# --- copies in batches -----------------------------------------------------------------------------------


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_OVERLAP: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class BatchCopy:
    """cuMemcpyBatchAsync in one of its two forms; calls give the driver's status, 0 if all is well."""

    def __init__(self, function: Callable[..., int], *, names_failure: bool) -> None:
        self._function = function
        self._names_failure = names_failure
        self._attributes = CopyAttributes(_STREAM_ORDER, _Location(), _Location(), _OVERLAP)

    def __call__(
        self,
        targets: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stream: int,
    ) -> int:
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        arguments: list[Any] = [
            *(ctypes.c_void_p(array.ctypes.data) for array in (targets, sources, sizes)),
            ctypes.c_size_t(len(targets)),
            ctypes.byref(self._attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        if self._names_failure:
            arguments.append(ctypes.byref(failed))
        return self._function(*arguments, ctypes.c_void_p(stream))


def find_batch_copy(library: Any) -> BatchCopy | None:
    """The batched copy of a driver's library, if it has one.

    Drivers of CUDA 12.8 and 12.9 have a form that also tells the index of the copy that failed; those of 13
    have both, under two names. What a symbol means never changes, so the name tells the form.

    Args:
        library: `ctypes.CDLL` of libcuda, or anything with such attributes.
    """
    for name, names_failure in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        function = getattr(library, name, None)
        if function is not None:
            return BatchCopy(function, names_failure=names_failure)
    return None


def _libcuda() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MissingDependencyError(f"the NVIDIA driver's library can not be loaded: {error}") from None


# --- the driver --------------------------------------------------------------------------------------------


class _Active:
    """Makes a device's context the current one of this thread, for as long as it is entered.

    By the driver's stack of contexts and not by `cudaSetDevice`: torch and CuPy may each have a CUDA runtime
    of their own, with its own idea of the current device, and must both find what they left.

    In it, questions about events and the like are also allowed while another thread captures a graph, and do
    not break that capture: none of what is done here has to do with it.
    """

    def __init__(self, library: Any, context: ctypes.c_void_p) -> None:
        self._library = library
        self._context = context
        self._mode = ctypes.c_int(_RELAXED)
        self._exchanged = False

    def __enter__(self) -> None:
        _check(self._library.cuCtxPushCurrent_v2(self._context), "cuCtxPushCurrent")
        # The mode holds what it was before, from here on.
        self._exchanged = (
            self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode)) == _SUCCESS
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._exchanged:
            self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode))
        self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _check(status: int, call: str) -> None:
    if status != _SUCCESS:
        raise CopyError(f"{call} failed with status {status} of the CUDA driver")


def _primary_context(library: Any, device: int) -> ctypes.c_void_p:
    """The context that torch and CuPy work in. It is held until the process ends, as they hold it."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(library.cuInit(0), "cuInit")
    _check(library.cuDeviceGet(ctypes.byref(handle), device), f"cuDeviceGet({device})")
    _check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    return context


class CupyDriver:
    """`Driver` of one CUDA device.

    Args:
        device: which.
        forward_stream: gives the forward's stream of the calling thread; None: torch's current stream.

    Raises:
        MissingDependencyError: CuPy or the NVIDIA driver is not installed.
        ArgumentError: not a CUDA device.
        CopyError: the driver refuses the device.
    """

    def __init__(
        self, device: str | torch.device | int, forward_stream: Callable[[], Stream] | None = None
    ) -> None:
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if where.type != "cuda":
            raise ArgumentError(f"device must be a CUDA device, not {where}")
        self._cupy = _import_cupy()
        self._runtime: Any = self._cupy.cuda.runtime
        self._launch: Any = self._cupy.cuda.driver.launchKernel
        library = self._library = _libcuda()
        index = torch.cuda.current_device() if where == torch.device("cuda") else where.index
        self._device = index
        self._torch_device = torch.device("cuda", index)
        self._forward_stream = forward_stream
        self._context = _primary_context(library, index)
        self._kernels: dict[str, Any] = {}
        self._module = self._cupy.RawModule(code=kernel_source(), options=OPTIONS, backend="nvrtc")
        self._batch = find_batch_copy(library)
        self.batched = self._batch is not None

    def active(self) -> _Active:
        return _Active(self._library, self._context)

    # Streams and events.

    def new_stream(self) -> Stream:
        return int(self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking))

    def destroy_stream(self, stream: Stream) -> None:
        self._runtime.streamDestroy(stream)

    def forward_stream(self) -> Stream:
        if self._forward_stream is not None:
            return self._forward_stream()
        return int(torch.cuda.current_stream(self._torch_device).cuda_stream)

    def new_event(self, *, timing: bool = False) -> Event:
        return int(self._runtime.eventCreateWithFlags(0 if timing else self._runtime.eventDisableTiming))

    def destroy_event(self, event: Event) -> None:
        self._runtime.eventDestroy(event)

    def record(self, event: Event, stream: Stream) -> None:
        self._runtime.eventRecord(event, stream)

    def stream_wait(self, stream: Stream, event: Event) -> None:
        self._runtime.streamWaitEvent(stream, event)

    def event_done(self, event: Event) -> bool:
        return self._done(self._library.cuEventQuery(ctypes.c_void_p(event)))

    def stream_done(self, stream: Stream) -> bool:
        return self._done(self._library.cuStreamQuery(ctypes.c_void_p(stream)))

    def _done(self, status: int) -> bool:
        if status not in (_SUCCESS, _NOT_READY):
            raise self._cupy.cuda.driver.CUDADriverError(status)
        return status == _SUCCESS

    def seconds_between(self, start: Event, end: Event) -> float:
        return float(self._runtime.eventElapsedTime(start, end)) / 1e3

    # Memory. From torch, so that its caches know of it: blocks that are given back cost no cudaFree, which
    # would wait for the device.

    def device_memory(self, size: int, stream: Stream) -> Memory:
        # Of this stream's cache: a block from the forward's could still be in use by what runs there.
        with torch.cuda.stream(self._external(stream)):
            tensor = torch.empty(size, dtype=torch.uint8, device=self._torch_device)
        self._library.cuCtxSetCurrent(self._context)  # torch goes back to the device it thinks it was on
        return Memory(tensor.data_ptr(), size, tensor)

    def _external(self, stream: Stream) -> torch.cuda.Stream:
        external: Any = torch.cuda.ExternalStream
        made: torch.cuda.Stream = external(stream, device=self._torch_device)
        return made

    def pinned_memory(self, size: int) -> Memory:
        tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._library.cuCtxSetCurrent(self._context)
        return Memory(tensor.data_ptr(), size, tensor, tensor.numpy())

    def reaches_host(self, address: int) -> bool:
        attributes = self._runtime.pointerGetAttributes(address)
        return bool(attributes.type == _HOST_MEMORY and attributes.devicePointer == address)

    # Copies.

    def copy(self, target: int, source: int, size: int, stream: Stream) -> None:
        self._runtime.memcpyAsync(target, source, size, self._runtime.memcpyDefault, stream)

    def copy_2d(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        stream: Stream,
    ) -> None:
        self._runtime.memcpy2DAsync(
            target, target_pitch, source, source_pitch, width, height, self._runtime.memcpyDefault, stream
        )

    def copy_batch(
        self,
        targets: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stream: Stream,
    ) -> None:
        if self._batch is not None:
            status = self._batch(targets, sources, sizes, stream)
            if status == _SUCCESS:
                return
            # A driver that has the call but will not take it here. If the error lies deeper, the plain copies
            # below fail as well, and say so; copies that the batch did queue are queued again, to no harm.
            self._batch, self.batched = None, False
            warnings.warn(
                f"the driver refused a batch of {len(targets)} copies with status {status}: "
                "from now on they go one by one",
                RuntimeWarning,
                stacklevel=2,
            )
        kind = self._runtime.memcpyDefault
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._runtime.memcpyAsync(target, source, size, kind, stream)

    # The kernel.

    def prepare(self, kernel: str) -> None:
        if kernel not in self._kernels:
            if self._runtime.getDevice() != self._device:  # which CuPy compiles for
                self._runtime.setDevice(self._device)
            self._kernels[kernel] = self._module.get_function(kernel).kernel

    def launch(
        self, kernel: str, blocks: int, threads: int, argument: npt.NDArray[np.void], stream: Stream
    ) -> None:
        self.prepare(kernel)
        pointers = (ctypes.c_void_p * 1)(argument.ctypes.data)
        function = self._kernels[kernel].ptr
        self._launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
