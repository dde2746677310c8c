from pathlib import Path

from tonnage.hardware.host_memory import free_host_bytes
from tonnage.units import GIB


def test_a_container_s_share_bounds_what_is_free(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir(), cgroup.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable:   {64 * 2**20} kB\n")
    assert free_host_bytes(proc, cgroup) == 64 * GIB
    (cgroup / "memory.max").write_text(f"{16 * GIB}\n")
    (cgroup / "memory.current").write_text(f"{10 * GIB}\n")
    (cgroup / "memory.stat").write_text(f"anon {6 * GIB}\ninactive_file {4 * GIB}\n")
    assert free_host_bytes(proc, cgroup) == 10 * GIB
    (cgroup / "memory.max").write_text("max\n")
    assert free_host_bytes(proc, cgroup) == 64 * GIB
