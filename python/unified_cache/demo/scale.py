"""How large the demo is: on a CPU, on a GPU, and for a quick look."""

import shutil
import tempfile
from dataclasses import dataclass, replace

from unified_cache.demo.model import ModelSize
from unified_cache.demo.serving import DEVICE_SHARE, HOST_RATIO, SETUPS
from unified_cache.demo.workload import Traffic
from unified_cache.errors import ArgumentError
from unified_cache.pools.memory import available_bytes

__all__ = ["Scale", "check_room", "scale_for"]


@dataclass(frozen=True)
class Scale:
    """A model, and traffic that gives it something to do."""

    model: ModelSize
    traffic: Traffic

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all conversations in float32."""
        return self.traffic.expected * self.model.token_bytes


_CPU = Scale(ModelSize(4, 512, 1408), Traffic(10, 6, system=256, question=(120, 240), answer=16))
# A GPU is done with the above before a kernel is launched.
_GPU = Scale(ModelSize(16, 1024, 4096), Traffic(10, 6, system=1024, question=(480, 960), answer=16))
_QUICK = Scale(ModelSize(2, 128, 256), Traffic(4, 4, system=64, question=(40, 80), answer=6))


def scale_for(device: str, *, quick: bool, clients: int | None, turns: int | None) -> Scale:
    """The scale for a device, with other numbers of clients and turns if given.

    Raises:
        ArgumentError: more than memory or disk can hold.
    """
    scale = _QUICK if quick else _CPU if device == "cpu" else _GPU
    traffic = replace(
        scale.traffic,
        clients=scale.traffic.clients if clients is None else clients,
        turns=scale.traffic.turns if turns is None else turns,
    )
    scale = replace(scale, traffic=traffic)
    # Say now what would else fail after minutes. Each set-up has pools of its own; some have no host pool, so
    # this is a little too much.
    check_room(
        f"--clients {traffic.clients} and --turns {traffic.turns}",
        memory=scale.model.bytes + scale.kv_bytes * DEVICE_SHARE * (1 + HOST_RATIO) * len(SETUPS),
        disk=scale.kv_bytes,
    )
    return scale


def check_room(asked: str, *, memory: float, disk: float) -> None:
    """Refuse what this machine has no room for.

    Args:
        asked: the options that say how much it is.
        memory: bytes.
        disk: bytes, in the folder for temporary files.

    Raises:
        ArgumentError: more than is free.
    """
    folder = tempfile.gettempdir()
    for needed, free, what, remedy in (
        (memory, available_bytes(), "memory", ""),
        (disk, shutil.disk_usage(folder).free, f"room in {folder}", ", or set TMPDIR to another folder"),
    ):
        if free is not None and needed > free:
            raise ArgumentError(
                f"{asked} need {needed / 1e9:.1f} GB of {what}, {free / 1e9:.1f} GB are free: "
                f"make them smaller{remedy}"
            )
