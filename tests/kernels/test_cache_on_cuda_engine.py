"""The whole cache on the GPU's copy engine: forwards and copies on streams that run as late as they may."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.cache.support import (
    PAGE,
    _digests,
    assert_nothing_held,
    contents,
    make_cache,
    make_pool,
    planes_of,
    read_pages,
    write_pages,
)
from tests.kernels.fake_driver import FakeDriver
from unified_cache import CapacityError, Request, UnifiedCache
from unified_cache.copies.cuda import CudaCopyEngine
from unified_cache.pools.device import MlaDevicePool


class Engine:
    """Serves prompts as an engine on a GPU does: everything is launched, nothing is waited for."""

    def __init__(self, seed: int, *, staged: bool, several: bool = False, **settings: Any) -> None:
        self.rng = random.Random(seed)
        self.driver = FakeDriver(seed)
        self.driver.registered = not staged
        self.cache: UnifiedCache = make_cache(
            [make_pool(16), MlaDevicePool(16, PAGE, 2, 6)] if several else make_pool(16),
            copies=lambda device, host: CudaCopyEngine(
                device.planes, host.planes, host_registered=not staged, driver=self.driver
            ),
            load_back_threshold=0,
            **settings,
        )
        self.planes = planes_of(self.cache)
        self.wrong: list[str] = []
        self.read = 0

    def check(self, page: int, layer: int, content: list[torch.Tensor]) -> None:
        self.read += 1
        for at, (there, wanted) in enumerate(zip(read_pages(self.planes, page), content, strict=True)):
            if layer < len(wanted) and not torch.equal(there[layer], wanted[layer]):
                self.wrong.append(f"page {page}, layer {layer} of pool {at}")

    def forward(self, request: Request) -> None:
        """Reads what was served, layer by layer, and writes what is new."""
        pages, digests = request.pages.tolist(), _digests(request)
        served = request.device_length // PAGE
        with self.driver.active():
            forward = self.cache.begin_forward([request])
            for layer in range(max(planes.shape.layers for planes in self.planes)):
                forward.wait_until(layer)
                for page, digest in zip(pages[:served], digests, strict=False):
                    content = contents(self.planes, digest)
                    self.driver.queue(partial(self.check, page, layer, content))
        for page, digest in list(zip(pages, digests, strict=False))[served:]:
            self.driver.queue(partial(write_pages, self.planes, page, contents(self.planes, digest)))

    def prompt(self) -> np.ndarray:
        return np.arange(self.rng.randrange(PAGE, 7 * PAGE)) + 1000 * self.rng.randrange(5)

    def serve(self) -> None:
        rng = self.rng
        request = self.cache.begin(self.prompt())
        try:
            request.load_back()
            request.extend()
            self.forward(request)
            if rng.random() < 0.2:
                request.retract()
                self.driver.step(rng.randrange(40))
                self.cache.tick()
                request.resume()
                self.forward(request)
        except CapacityError:
            request.abort()
            return
        if rng.random() < 0.2:
            request.abort()
        else:
            request.finish()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.serve()
            self.driver.step(self.rng.randrange(60))
            self.cache.tick()
            if self.rng.random() < 0.02:
                self.cache.reset()
        self.driver.finish()
        assert_nothing_held(self.cache)
        self.cache.close()
        assert self.wrong == []


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_what_is_served_is_what_was_written(layout: str, staged: bool) -> None:
    hits = 0
    for seed, policy in enumerate(("write_through", "write_back")):
        engine = Engine(seed, staged=staged, host_layout=layout, write_policy=policy)
        engine.run(60)
        hits += engine.cache.stats()["load_pages"]
        assert engine.read > 100
    assert hits > 20


@pytest.mark.parametrize("staged", [False, True])
def test_pools_of_two_kinds(staged: bool) -> None:
    hits = 0
    for seed, policy in enumerate(("write_through", "write_back")):
        engine = Engine(seed, staged=staged, several=True, write_policy=policy)
        engine.run(60)
        hits += engine.cache.stats()["load_pages"]
        assert engine.read > 100
    assert hits > 20


def test_a_wait_that_is_missing_would_be_seen() -> None:
    wrong = 0
    for seed in range(5):
        engine = Engine(seed, staged=False)
        engine.driver.ignore_waits = True
        try:
            engine.run(60)
        except AssertionError:
            wrong += 1
    assert wrong
