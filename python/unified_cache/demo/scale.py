"""How large the demo is: on a CPU, on a GPU, and for a quick look."""

import shutil
import tempfile
from dataclasses import dataclass, replace

from unified_cache.demo.model import HEAD_DIM, KV_HEADS, ModelSize
from unified_cache.demo.serving import DEVICE_SHARE, HOST_RATIO, SETUPS
from unified_cache.demo.workload import Traffic
from unified_cache.errors import ArgumentError
from unified_cache.pools.memory import available_bytes

__all__ = ["Scale", "scale_for"]


@dataclass(frozen=True)
class Scale:
    """A model, and traffic that gives it something to do."""

    model: ModelSize
    traffic: Traffic

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all conversations in float32."""
        return self.traffic.expected * 2 * self.model.layers * KV_HEADS * HEAD_DIM * 4


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
    _check_room(scale)
    return scale


def _check_room(scale: Scale) -> None:
    """Say now what would else fail after minutes."""
    # Each set-up has pools of its own. The first has no host pool, so this is a little too much.
    pools = scale.kv_bytes * DEVICE_SHARE * (1 + HOST_RATIO) * len(SETUPS)
    memory = available_bytes()
    folder = tempfile.gettempdir()
    disk = shutil.disk_usage(folder).free
    for needed, free, what, remedy in (
        (pools, memory, "memory", ""),
        (scale.kv_bytes, disk, f"room in {folder}", ", or set TMPDIR to another folder"),
    ):
        if free is not None and needed > free:
            raise ArgumentError(
                f"--clients {scale.traffic.clients} and --turns {scale.traffic.turns} need "
                f"{needed / 1e9:.1f} GB of {what}, {free / 1e9:.1f} GB are free: make them smaller{remedy}"
            )
