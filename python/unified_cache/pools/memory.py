"""How much memory this process may still take: the machine's, or its control group's if that is less."""

from pathlib import Path

__all__ = ["available_bytes"]


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _machine(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _reclaimable(group: Path) -> int:
    """Bytes of files that count as used but go when memory is asked for."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))


def _group(group: Path, limit_name: str, usage_name: str) -> int | None:
    limit = _read_int(group / limit_name)
    usage = _read_int(group / usage_name)
    if limit is None or usage is None:
        return None
    return max(limit - usage + _reclaimable(group), 0)


def _groups(root: Path) -> list[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Every group up to the root has its say. In a container the path may be the host's and the files
        # lie at the base: then only the base is found.
        own = base / path.strip("/")
        for group in (own, *own.parents):
            left = _group(group, *names)
            if left is not None:
                found.append(left)
            if group == base:
                break
    return found


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can still be taken without swapping; None if the system does not say."""
    machine = _machine(root)
    limits = [*_groups(root), *([] if machine is None else [machine])]
    return min(limits, default=None)
