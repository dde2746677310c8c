"""The free memory of this machine's host, or of the container that we run in."""

from pathlib import Path

# cgroups version 2 and 1: files of the limit and the usage, and the key of reclaimable cache.
_CGROUP_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_host_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that a process on this machine, or in this container, could still allocate."""

    def table(file: Path) -> dict[str, int]:
        rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}

    free = table(proc / "meminfo")["MemAvailable:"] * 1024
    for folder, limit_name, used_name, cache_name in _CGROUP_FILES:
        files = [cgroup / folder / name for name in (limit_name, used_name)]
        limit, used = (file.read_text().strip() if file.exists() else "max" for file in files)
        if limit.isdigit() and used.isdigit():
            cache = table(cgroup / folder / "memory.stat").get(cache_name, 0)
            free = min(free, int(limit) - int(used) + cache)
    return max(free, 0)
