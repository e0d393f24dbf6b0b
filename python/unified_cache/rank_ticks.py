"""What the caches of several ranks do together: begin with equal pools, and tick.

Every rank holds a tree of its own, and makes the same calls on it as the others. A tick has three steps: look
at what has ended on this rank, agree on what has ended on all, and tell the tree that, and no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unified_cache.controller.storage_operations import ANSWERED, ENDED, FINAL, StorageOperation
from unified_cache.controller.storage_reads import Prefetch
from unified_cache.errors import RankError, RanksDifferError
from unified_cache.ranks.outcomes import Outcomes, TickAgreement

if TYPE_CHECKING:
    from unified_cache._native import PrefixTree
    from unified_cache.controller.cache_controller import CacheController
    from unified_cache.controller.recompute import LoadOrRecompute
    from unified_cache.controller.storage import StorageLink
    from unified_cache.controller.storage_operations import StorageOperations
    from unified_cache.pools.allocator import PageAllocator
    from unified_cache.ranks.agreement import Agreement

__all__ = ["Parts", "RankTicks"]

# How long a stage that has to follow waits at a time for its copies or its storage, in seconds.
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Parts:
    """What a tick looks at and changes.

    Attributes:
        tree: of this rank.
        device: free pages of its device pool.
        host: free pages of its host pool; None: there is none.
        controller: of the copies.
        operations: of the storage.
        rates: thresholds.
    """

    tree: PrefixTree
    device: PageAllocator
    host: PageAllocator | None
    controller: CacheController
    operations: StorageOperations
    rates: LoadOrRecompute


class RankTicks:
    """One rank's part in what all of them do.

    Args:
        agreement: of the ranks.
        clock: seconds, of this rank.
        follow_seconds: as long may a later stage of a pipeline take for what the first has decided.

    Attributes:
        now: seconds, by the slowest clock of all ranks, at the last tick or at the begin.
        attaching: this rank can use the storage that is to be attached at the next tick.
        attached: at the last tick all ranks could use the one that they had then.
    """

    def __init__(
        self, agreement: Agreement, clock: Callable[[], float], *, follow_seconds: float = 30.0
    ) -> None:
        self._agreement = agreement
        self._clock = clock
        self._follow_seconds = follow_seconds
        self._ticks = TickAgreement(agreement)
        self._count = 0
        self._telling = False  # the tick that is being made, or was, has told the others
        self._broken: RankError | None = None
        self.now = 0.0
        self.attaching = False
        self.attached = False

    # The begin

    def agree_on_sizes(self, pages: Sequence[int], settings: str) -> list[int]:
        """The pages of the smallest pools of all ranks of all stages, device and host.

        Args:
            pages: of this rank's.
            settings: what has to be the same on all ranks.

        Raises:
            RankError: another rank can not make its cache.
            RanksDifferError: another rank has other settings.
        """
        digest = int.from_bytes(hashlib.sha256(settings.encode()).digest()[:7], "big")
        ok, lowest, highest, *agreed = self._at_begin([1, digest, -digest, *pages])
        if not ok:
            raise RankError("another rank could not make its cache, and says why there")
        if not lowest == -highest == digest:
            raise RanksDifferError(f"the ranks have other settings; those of this one are {settings}")
        return agreed

    def all_built(self) -> None:
        """Wait until all ranks have made their caches, and set the clock.

        Raises:
            RankError: another rank could not.
        """
        # Of several stages the first one's clock counts, as it does at every tick.
        mine = self._microseconds if self._agreement.decides else 2**63 - 1
        ok, agreed, *_ = self._at_begin([1, mine, 0, 0, 0])
        if not ok:
            raise RankError("another rank could not make its cache, and says why there")
        self.now = agreed / 1e6

    @property
    def _microseconds(self) -> int:
        return int(self._clock() * 1e6)

    def refuse(self) -> None:
        """Tell the others that this rank can not make its cache."""
        with contextlib.suppress(RankError):
            self._at_begin([0] * _BEGIN)

    def _at_begin(self, numbers: Sequence[int]) -> list[int]:
        agreed: list[int] = self._agreement.reduce_min_of_stages(np.array(numbers, np.int64)).tolist()
        return agreed

    def all_stages(self, well: bool) -> bool:
        """See `Agreement.all_stages`: what a tick can not ask, since later stages do not vote."""
        return self._agreement.all_stages(well)

    # The loop

    @property
    def broken(self) -> bool:
        """The ranks can not go on together: every tick says so."""
        return self._broken is not None

    def tick(
        self,
        parts: Parts,
        links: Sequence[StorageLink],
        storage: StorageLink | None,
        *,
        resets: int,
        most_failures: int | None,
    ) -> None:
        """Take what has ended on all ranks, and start what waits.

        Args:
            parts: of this rank's cache.
            links: to storages.
            storage: the one of these that is in use.
            resets: how many there were.
            most_failures: leave copies alone that have failed so often.

        Raises:
            RankLostError: a rank has ended, or did not come within the time limit.
            RanksDifferError: what must be the same on all ranks is not.
            RankError: this stage can not follow the first one, or the tick before was interrupted when this
                rank had told the others.
        """
        if self._broken is not None:
            raise type(self._broken)(str(self._broken))
        try:
            self._tick(parts, links, storage, resets, most_failures)
        except BaseException as error:
            if isinstance(error, RankError):
                self._broken = error
            elif self._telling:
                # What the others apply now is not applied here. Before it, nothing has happened that counts:
                # then the tick may be made again.
                self._broken = RankError(
                    f"tick {self._count} was interrupted on this rank by {error!r}: it can not go on with "
                    "the others"
                )
            raise

    def _tick(
        self,
        parts: Parts,
        links: Sequence[StorageLink],
        storage: StorageLink | None,
        resets: int,
        most_failures: int | None,
    ) -> None:
        controller, rates = parts.controller, parts.rates
        self._telling = False

        def look() -> Outcomes:
            controller.look(most_failures)
            for link in links:
                link.look()
            backups, loads = controller.ended
            load_back, prefetch = rates.measured
            outcomes = [operation.outcome for operation in running]
            return Outcomes(
                {
                    "ended_backups": backups,
                    "ended_loads": loads,
                    "microseconds": self._microseconds,
                    "can_read": 0 if storage is None else storage.can_read,
                    "can_write": 0 if storage is None else storage.can_write,
                    "load_back_threshold": load_back,
                    "prefetch_threshold": prefetch,
                    "attached": int(self.attaching),
                },
                [state for state, _ in outcomes],
                [value for _, value in outcomes],
            )

        running = parts.operations.list()
        here = look()
        host = parts.host
        self._count += 1
        self._telling = True
        self._ticks.begin(
            (
                self._count,
                resets,
                *controller.under_way,
                len(running),
                0 if storage is None else storage.waiting,
                parts.device.free_pages,
                0 if host is None else host.free_pages,
                parts.tree.digest(),
            ),
            here,
        )
        controller.submit()  # meanwhile
        agreed = self._ticks.end()
        if not self._agreement.decides:
            self._follow(running, here, agreed, look, controller, links)
        self.now = agreed.least["microseconds"] / 1e6
        self.attached = bool(agreed.least["attached"])
        rates.agreed = agreed.least["load_back_threshold"], agreed.least["prefetch_threshold"]
        if storage is not None:
            storage.agreed_read = agreed.least["can_read"]
            storage.agreed_write = agreed.least["can_write"]
        controller.acknowledge(agreed.least["ended_backups"], agreed.least["ended_loads"])
        for operation, state, value in zip(running, agreed.states, agreed.values, strict=True):
            for link in links:
                if link.owns(operation):
                    link.apply(operation, state, value)
                    break
        controller.begin_backups()
        controller.submit()
        for link in links:
            link.go_on()

    def _follow(
        self,
        running: Sequence[StorageOperation],
        here: Outcomes,
        decided: Outcomes,
        look: Callable[[], Outcomes],
        controller: CacheController,
        links: Sequence[StorageLink],
    ) -> None:
        """Wait until this stage has come as far as the first one was when it decided.

        Raises:
            RankError: it can not.
        """
        end = time.monotonic() + self._follow_seconds
        while (lacking := _lacking(running, here, decided)) is not None:
            what, hopeless = lacking
            if hopeless or time.monotonic() >= end:
                raise RankError(
                    f"at tick {self._count} this stage can not follow the first one"
                    f"{'' if hopeless else f' within {self._follow_seconds:g} s'}: {what}"
                )
            controller.submit()
            if not controller.take_done(wait=True, timeout=_POLL_SECONDS):
                for link in links:
                    link.wait(_POLL_SECONDS)
            here = look()


# Numbers that ranks tell one another when they begin: whether all is well, the settings, and two sizes.
_BEGIN = 5


def _lacking(
    running: Sequence[StorageOperation], here: Outcomes, decided: Outcomes
) -> tuple[str, bool] | None:
    """What has not happened here yet, and whether it never will."""
    for name in ("ended_backups", "ended_loads"):
        mine, wanted = here.least[name], decided.least[name]
        if mine < wanted:
            return f"{name} are {mine} here, {wanted} there", False
    for at, operation in enumerate(running):
        state, value = here.states[at], here.values[at]
        to_reach, wanted = decided.states[at], decided.values[at]
        # Of what is dropped nothing more gets into the tree.
        if isinstance(operation, Prefetch) and not operation.dropped and value < wanted:
            last = ANSWERED if operation.phase == "look up" else FINAL
            return f"{value} pages of a prefetch are there, {wanted} are needed", state >= last
        if to_reach in (ANSWERED, ENDED) and state < to_reach:
            return f"storage operation {at} is in state {state} here, {to_reach} there", False
    return None
