"""What the scheduler's side and the workers' side of the vLLM connector tell each other; plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from unified_cache.pools.allocator import Pages

__all__ = ["Fetch", "Load", "Report", "Reports", "Save", "Stage", "Step", "WorkerAbout"]

Stage: TypeAlias = Literal["moved", "stored"]
"""How far an operation is: its bytes are where they were to go; they are in storage too."""


@dataclass(frozen=True, slots=True)
class WorkerAbout:
    """What one worker says of itself before the first step.

    Attributes:
        host_pages: pages of its host pool.
        page_bytes: bytes of one.
        fingerprint: names what its pages hold, see `unified_cache.storage.keys`.
    """

    host_pages: int
    page_bytes: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Save:
    """Device to host, after the forward of the step.

    Attributes:
        op: its number.
        blocks: device blocks.
        pages: as many host pages.
        digests: uint8 (pages, 32): the pages go on to storage under these; None: they do not.
        held: they go on once a later step says so, or never.
    """

    op: int
    blocks: Pages
    pages: Pages
    digests: npt.NDArray[np.uint8] | None = None
    held: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Host to device, for one request.

    Attributes:
        op: its number.
        request: its id.
        pages: host pages.
        blocks: as many device blocks.
        now: the forward of this step reads them; else the request waits until they are there.
    """

    op: int
    request: str
    pages: Pages
    blocks: Pages
    now: bool


@dataclass(frozen=True, slots=True)
class Fetch:
    """Storage to host.

    Attributes:
        op: its number.
        digests: uint8 (pages, 32).
        pages: as many host pages.
    """

    op: int
    digests: npt.NDArray[np.uint8]
    pages: Pages


@dataclass(slots=True)
class Step:
    """What the workers do with one step of the engine.

    Attributes:
        wait: saves whose blocks are written anew from this step on: they must have ended before.
        loads: to begin.
        saves: to begin after the forward.
        fetches: to begin.
        store: held saves that go on to storage now.
        drop: held saves that never will.
    """

    wait: list[int] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    store: list[int] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.wait or self.loads or self.saves or self.fetches or self.store or self.drop)


@dataclass(frozen=True, slots=True)
class Report:
    """How far one operation is, on so many workers.

    Attributes:
        op: its number.
        stage: what has ended.
        pages: pages from the front that are there, on each of these workers.
        workers: how many say so.
    """

    op: int
    stage: Stage
    pages: int
    workers: int = 1


class Reports:
    """Reports of any number of workers, each operation and stage once."""

    def __init__(self, reports: Iterable[Report] = ()) -> None:
        self._reports: dict[tuple[int, Stage], Report] = {}
        self.add(reports)

    def add(self, reports: Iterable[Report]) -> None:
        """Put more of them together with these."""
        for report in reports:
            key = (report.op, report.stage)
            before = self._reports.get(key)
            if before is not None:
                pages = min(before.pages, report.pages)
                report = Report(report.op, report.stage, pages, before.workers + report.workers)
            self._reports[key] = report

    def take(self, workers: int) -> list[Report]:
        """Those that so many workers have made, in the order in which their operations began; taken out."""
        whole = sorted(key for key, report in self._reports.items() if report.workers >= workers)
        return [self._reports.pop(key) for key in whole]

    def all(self) -> list[Report]:
        """All of them."""
        return list(self._reports.values())

    def __len__(self) -> int:
        return len(self._reports)
