"""Ranks that are processes of `torch.distributed`.

Made for gloo, which reduces in CPU memory on threads of its own. NCCL has a branch as small as it can be, for
engines that have no gloo group; it was never run, since there was no machine with two GPUs to run it on.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from unified_cache._torch import torch
from unified_cache.copies.cuda_events import poll
from unified_cache.errors import ArgumentError, ClosedError, RankError, RankLostError
from unified_cache.ranks.agreement import (
    TIME_LIMIT,
    Agreement,
    OneRank,
    Reduction,
    Vector,
    check_count,
    check_time_limit,
    check_vector,
)
from unified_cache.ranks.layout import RankLayout
from unified_cache.ranks.pipeline import MOST_BEHIND, PipelineRanks

__all__ = ["TorchLink", "TorchRanks"]

# What is under way when ranks close or their process ends may take so long to end by itself.
_LEAVE_SECONDS = 1.0
# Nobody sends with this tag.
_NOBODYS_TAG = 0x5EED

_Start = Callable[[torch.Tensor], dist.Work]


class _Carrier(Protocol):
    """Memory that a vector is in while a collective is under way; used again for the next one."""

    length: int

    def start(self, collective: _Start, vector: Vector | None) -> None:
        """Begin the collective with this vector, or with room for one."""

    @property
    def done(self) -> bool:
        """It has ended, well or badly."""

    def wait(self, seconds: float) -> None:
        """Raises RuntimeError if it has failed, or has not ended then."""

    def read(self) -> Vector:
        """What came out."""


class _CpuCarrier:
    def __init__(self, length: int) -> None:
        self.length = length
        self._tensor = torch.empty(length, dtype=torch.int64)
        self._numbers: Vector = self._tensor.numpy()
        self._work: dist.Work | None = None

    def start(self, collective: _Start, vector: Vector | None) -> None:
        if vector is not None:
            self._numbers[:] = vector
        self._work = collective(self._tensor)

    @property
    def done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self, seconds: float) -> None:
        assert self._work is not None
        # 0 would mean for ever.
        self._work.wait(timedelta(seconds=max(seconds, 0.001)))

    def read(self) -> Vector:
        return self._numbers.copy()


class _CudaCarrier:
    """Pinned memory and the device's, on a stream of its own: the forward neither waits nor is waited for."""

    def __init__(self, length: int, stream: torch.cuda.Stream) -> None:
        self.length = length
        self._stream = stream
        self._host = torch.empty(length, dtype=torch.int64, pin_memory=True)
        self._numbers: Vector = self._host.numpy()
        self._device = torch.empty(length, dtype=torch.int64, device=stream.device)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self, collective: _Start, vector: Vector | None) -> None:
        with torch.cuda.stream(self._stream):
            if vector is not None:
                self._numbers[:] = vector
                self._device.copy_(self._host, non_blocking=True)
            collective(self._device).wait()  # lets the stream wait, not the CPU
            self._host.copy_(self._device, non_blocking=True)
            self._event.record()

    @property
    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self, seconds: float) -> None:
        if not poll(lambda: self.done, seconds):
            raise RuntimeError("timed out")

    def read(self) -> Vector:
        return self._numbers.copy()


class _Group:
    """A process group and what is under way on it.

    Knows nothing of who uses it, so that a finalizer can hold it.
    """

    def __init__(self, group: dist.ProcessGroup, time_limit: float, *, owned: bool) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.time_limit = time_limit
        self.limit = timedelta(seconds=time_limit)
        self.closed = False
        self._owned = owned
        backends = dist.get_backend_config(group)
        self._cpu = "gloo" in backends
        if not self._cpu and "nccl" not in backends:
            raise ArgumentError(f"group must be of gloo or nccl, not of {backends}")
        self._stream = None if self._cpu else torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._free: list[_Carrier] = []
        self._under_way: set[_Carrier] = set()

    def start(self, collective: _Start, vector: Vector | None, length: int) -> _Carrier:
        carrier = self._free.pop() if self._free else None
        if carrier is None or carrier.length != length:
            carrier = _CpuCarrier(length) if self._stream is None else _CudaCarrier(length, self._stream)
        carrier.start(collective, vector)
        self._under_way.add(carrier)
        return carrier

    def give_back(self, carrier: _Carrier) -> None:
        """Nothing is under way in it any more."""
        self._under_way.discard(carrier)
        self._free.append(carrier)

    def hang_up(self) -> None:
        """End what is under way, here and on the ranks that wait for this one.

        gloo has no call for this: its threads would go on until the time limit, and the end of the process
        would wait for them. But when a receive times out it closes all connections of the group.
        """
        if not self._cpu or self.size == 1:
            return
        nothing = torch.empty(1, dtype=torch.int64)
        with contextlib.suppress(Exception):
            self.group.recv([nothing], (self.rank + 1) % self.size, _NOBODYS_TAG).wait(
                timedelta(milliseconds=1)
            )

    def leave(self) -> None:
        """What is under way ends well, or ends anyway; then the group goes, if it is ours."""
        if self.closed:
            return
        self.closed = True
        if not dist.is_initialized():
            return
        with contextlib.suppress(Exception):
            if not poll(lambda: all(carrier.done for carrier in self._under_way), _LEAVE_SECONDS):
                self.hang_up()
                poll(lambda: all(carrier.done for carrier in self._under_way), _LEAVE_SECONDS)
        self._under_way.clear()
        if self._owned:
            # The others may have destroyed all groups already.
            with contextlib.suppress(Exception):
                dist.destroy_process_group(self.group)

    def explain(self, error: Exception, late: bool) -> str:
        """What a failed collective says about the other ranks."""
        said = str(error).partition("\n")[0][:200]
        if late or "timed out" in said.lower() or "timeout" in said:
            return f"did not come within {self.time_limit:g} s ({said})"
        return f"has ended ({said})"


class _TorchReduction:
    """A `Reduction` of `TorchRanks`, or a vector on its way through a `TorchLink`."""

    __slots__ = ("_carrier", "_end", "_number", "_owner", "_result")

    def __init__(self, owner: TorchRanks | TorchLink, carrier: _Carrier, number: int, end: float) -> None:
        self._owner = owner
        self._carrier = carrier
        self._number = number
        self._end = end
        self._result: Vector | None = None

    @property
    def done(self) -> bool:
        """See `Reduction`."""
        return self._result is not None or self._carrier.done

    def wait(self) -> Vector:
        """See `Reduction`."""
        if self._result is None:
            self._result = self._owner._finish(self._carrier, self._number, self._end)
        return self._result


class TorchRanks(Agreement):
    """The processes of a group of `torch.distributed`.

    Use gloo, and a group of its own (`of_layout` makes one): collectives of one group must begin in the same
    order on all its ranks, so another thread's would come between. With NCCL the vector takes the way over
    the current GPU and back, and a rank that has died ends the others' reductions at the time limit only.

    Where a rank is lost, the others get a RankLostError: at once if its connections broke (the process or its
    machine ended them), else at the time limit. From then on the group is unusable, and its connections are
    closed. Vectors whose lengths differ between ranks are not noticed by gloo as an error: it ends a process.

    Args:
        group: of `torch.distributed`; None: all processes.
        time_limit: seconds from the begin of a reduction until ranks that have not come are lost.
        owned: `close` destroys the group.

    Raises:
        ArgumentError: this process is not in that group, it is of neither gloo nor NCCL, or the time limit
            is none.
        RankError: `torch.distributed` was not initialised.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        time_limit: float = TIME_LIMIT,
        owned: bool = False,
    ) -> None:
        _check_limit(time_limit)
        _check_initialized()
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise ArgumentError(f"group must be a process group that this process is in, not {group!r}")
        self._group = _Group(group, time_limit, owned=owned)
        self._finalizer = weakref.finalize(self, self._group.leave)
        self.rank = self._group.rank
        self.size = self._group.size
        self.reductions = 0
        self._world_ranks = dist.get_process_group_ranks(group)
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        # Older versions of torch take no notice: there only the waits have the time limit.
        self._options.timeout = self._group.limit
        self._lost: str | None = None

    @classmethod
    def of_layout(
        cls, layout: RankLayout, *, time_limit: float = TIME_LIMIT, behind: int = MOST_BEHIND
    ) -> Agreement:
        """The agreement of this layout's rank, on new gloo groups: all processes make this call together.

        A `PipelineRanks` if there are several stages, a `OneRank` if there is nobody to agree with.

        Args:
            layout: of this process; those of all processes differ in their ranks only.
            time_limit: see `TorchRanks`.
            behind: reductions that a stage may be behind the one before it.

        Raises:
            ArgumentError: the layout is for another number of processes, or for another of them.
            RankError: `torch.distributed` was not initialised.
        """
        _check_limit(time_limit)
        check_count("behind", behind)
        _check_initialized()
        world, here = dist.get_world_size(), dist.get_rank()
        if layout.world_size != world:
            raise ArgumentError(
                f"tp_size={layout.tp_size} times pp_size={layout.pp_size} are {layout.world_size} ranks, but "
                f"torch.distributed has {world} processes"
            )
        if layout.world_rank != here:
            raise ArgumentError(
                f"tp_rank={layout.tp_rank} of stage pp_rank={layout.pp_rank} is process "
                f"{layout.world_rank}, but this is process {here}"
            )

        def agreement(groups: list[list[int]]) -> Agreement:
            mine = _new_groups(groups, here)
            return OneRank() if mine is None else cls(mine, time_limit=time_limit, owned=True)

        group = agreement(layout.attention_groups())
        if layout.pp_size == 1:
            return group
        everyone = agreement(layout.stage_groups())
        links: dict[int, TorchLink] = {}
        for stage in range(layout.pp_size - 1):
            pair = _new_groups([ranks[stage : stage + 2] for ranks in layout.pipelines()], here)
            if pair is not None:
                links[stage] = TorchLink(pair, stage, behind=behind, time_limit=time_limit)
        return PipelineRanks(
            group, everyone, before=links.get(layout.pp_rank - 1), after=links.get(layout.pp_rank)
        )

    def begin_reduce_min(self, vector: Vector) -> Reduction:
        """See `Agreement`.

        Raises:
            ArgumentError: it is something else.
            ClosedError: after `close`.
            RankLostError: a rank has ended.
        """
        check_vector(vector)
        self._check_usable()
        end = time.monotonic() + self._group.time_limit
        number = self.reductions
        try:
            carrier = self._group.start(self._all_reduce, vector, len(vector))
        except RuntimeError as error:
            raise self._lose(error, number, late=False) from error
        self.reductions = number + 1
        return _TorchReduction(self, carrier, number, end)

    def close(self) -> None:
        """See `Agreement`; waits for what is under way, for a second at most."""
        self._finalizer()

    def _all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        # What dist.all_reduce does, without what it looks up each time.
        return self._group.group.allreduce([tensor], self._options)

    def _finish(self, carrier: _Carrier, number: int, end: float) -> Vector:
        if not carrier.done:
            self._check_usable()
        try:
            carrier.wait(end - time.monotonic())
        except RuntimeError as error:
            raise self._lose(error, number, late=time.monotonic() >= end) from error
        result = carrier.read()
        self._group.give_back(carrier)
        return result

    def _check_usable(self) -> None:
        if self._lost is not None:
            raise RankLostError(self._lost)
        if self._group.closed:
            raise ClosedError(f"rank {self.rank} of {self.size} was closed before this call")

    def _lose(self, error: Exception, number: int, *, late: bool) -> RankLostError:
        if self._lost is None:
            self._lost = (
                f"rank {self.rank} of {self.size} (processes {self._world_ranks}), reduction {number}: "
                f"another rank {self._group.explain(error, late)}"
            )
            self._group.hang_up()
        return RankLostError(self._lost)


class TorchLink:
    """A `Link` between two processes, by broadcasts in a group of the two: sends of gloo can not be asked
    whether they have ended without waiting for them, its collectives can.

    Args:
        group: the two processes, that of the earlier stage first; destroyed at `close`.
        stage: the earlier one.
        behind: vectors that may be on their way.
        time_limit: seconds until the other one is lost.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        stage: int,
        *,
        behind: int = MOST_BEHIND,
        time_limit: float = TIME_LIMIT,
    ) -> None:
        self._group = _Group(group, time_limit, owned=True)
        self._finalizer = weakref.finalize(self, self._group.leave)
        self._stage = stage
        self._behind = behind
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._options.rootTensor = 0
        self._options.timeout = self._group.limit
        self._on_the_way: deque[_Carrier] = deque()
        self._sent = 0
        self._asked = 0

    def send(self, vector: Vector) -> None:
        """See `Link`."""
        after = self._stage + 1
        if self._group.closed:
            raise ClosedError(f"the link to stage {after} was closed before this call")
        try:
            while self._on_the_way and self._on_the_way[0].done:
                arrived = self._on_the_way.popleft()
                arrived.wait(0)
                self._group.give_back(arrived)
            if len(self._on_the_way) >= self._behind:
                self._wait_for_room()
            self._on_the_way.append(self._group.start(self._broadcast, vector, len(vector)))
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            self._group.hang_up()
            raise RankLostError(f"stage {after} {self._group.explain(error, late=False)}") from error
        self._sent += 1

    def _wait_for_room(self) -> None:
        oldest = self._on_the_way.popleft()
        try:
            oldest.wait(self._group.time_limit)
        except RuntimeError as error:
            self._group.hang_up()
            raise RankLostError(
                f"stage {self._stage + 1} does not follow: it has been {self._behind} reductions behind "
                f"stage {self._stage}, as many as it may be, for {self._group.time_limit:g} s"
            ) from error
        self._group.give_back(oldest)

    def begin_receive(self, length: int) -> Reduction:
        """See `Link`."""
        if self._group.closed:
            raise ClosedError(f"the link to stage {self._stage} was closed before this call")
        number, self._asked = self._asked, self._asked + 1
        end = time.monotonic() + self._group.time_limit
        return _TorchReduction(self, self._group.start(self._broadcast, None, length), number, end)

    def close(self, *, lost: bool = False) -> None:
        """See `Link`; waits for what is on its way, for the time limit at most, or for a second if `lost`."""
        if not lost and not self._group.closed:
            with contextlib.suppress(RuntimeError):
                poll(lambda: all(carrier.done for carrier in self._on_the_way), self._group.time_limit)
        self._finalizer()

    def _broadcast(self, tensor: torch.Tensor) -> dist.Work:
        return self._group.group.broadcast([tensor], self._options)

    def _finish(self, carrier: _Carrier, number: int, end: float) -> Vector:
        try:
            carrier.wait(end - time.monotonic())
        except RuntimeError as error:
            late = time.monotonic() >= end
            self._group.hang_up()
            raise RankLostError(
                f"reduction {number}: stage {self._stage} {self._group.explain(error, late)}"
            ) from error
        result = carrier.read()
        self._group.give_back(carrier)
        return result


def _check_limit(time_limit: float) -> None:
    check_time_limit(time_limit)
    if not 0.001 <= time_limit <= 1e6:
        raise ArgumentError(f"time_limit must be a number of seconds from 0.001 to 1e6, not {time_limit!r}")


def _check_initialized() -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise RankError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group first"
        )


def _new_groups(groups: list[list[int]], here: int) -> dist.ProcessGroup | None:
    """Make all these groups, as every process must; the one with this process, unless it is alone there."""
    mine = None
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(ranks, backend="gloo")
            if here in ranks:
                mine = group
    return mine
