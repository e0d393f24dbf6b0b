"""Progress bars of the commands."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["bar"]


@contextmanager
def bar(total: int | None, unit: str, shown: bool) -> Iterator[Callable[[int], object]]:
    """A progress bar on standard error, if one is wanted and tqdm (the extra `cli`) is there.

    Args:
        total: of units; None: nobody knows.
        unit: what is counted.
        shown: False: none is wanted.
    """
    shown = shown and sys.stderr is not None and sys.stderr.isatty()
    try:
        tqdm = importlib.import_module("tqdm") if shown else None
    except ImportError:
        print("unified-cache: pip install 'unified-cache[cli]' shows a progress bar here", file=sys.stderr)
        tqdm = None
    if tqdm is None:
        yield lambda count: None
        return
    with tqdm.tqdm(total=total, unit=f" {unit}", leave=False) as shown_bar:
        yield shown_bar.update
