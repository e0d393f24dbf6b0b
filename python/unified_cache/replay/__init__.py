"""Replays of request traces: reading them, running them through the tree, reporting what was hit.

>>> import numpy as np
>>> from unified_cache.replay import Settings, Trace, replay
>>> trace = Trace.of([([1, 2, 3], 1300), ([1, 2, 4], 1300)])
>>> replay([trace], Settings(device_blocks=10)).device_hit_blocks
2
"""

from unified_cache.replay.report import ReplayReport
from unified_cache.replay.run import Settings, replay
from unified_cache.replay.traces import Trace, read_trace

__all__ = ["ReplayReport", "Settings", "Trace", "read_trace", "replay"]
