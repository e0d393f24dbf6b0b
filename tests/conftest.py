"""What every run of the tests does once."""

from __future__ import annotations

import gc

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there before the first test stays: torch and all modules of tests are a million objects, which
    every collection of garbage would go through, and tests that ask for one do so hundreds of times."""
    gc.collect()
    gc.freeze()
