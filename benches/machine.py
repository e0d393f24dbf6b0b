"""What a result was measured on."""

import os
import platform
from pathlib import Path

__all__ = ["machine"]


def machine() -> str:
    """The processor, its cores, the system and the Python, in one line."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
