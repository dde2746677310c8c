"""Workspaces that cuBLAS and cuBLASLt take from the caching allocator and keep, by host thread and stream.

The sizes are in `data/workspaces.toml`, by compute capability and torch version.
"""

import os
import re
import threading
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.ledger import Category

if TYPE_CHECKING:
    from tonnage.virtual.device import Device

_DATA = Path(__file__).parent / "data" / "workspaces.toml"


class Workspaces:
    """The workspace of each (library, thread, stream)."""

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._held: dict[tuple[str, int, int], Any] = {}
        rows = tomllib.loads(_DATA.read_text())["workspace"]
        self._rows = [row for row in rows if tuple(row["torch"]) <= device.torch_version]

    def use(self, library: str) -> None:
        """Allocate the library's workspace for the calling thread and its current stream, if it has none."""
        import torch

        key = (library, threading.get_ident(), torch.cuda.current_stream().stream_id)
        is_kept = self._row(library).get("kept", True)
        if key in self._held and is_kept:
            return
        if key not in self._held:
            self._device.use(library, 1 + sum(name == library for name, *_ in self._held))
        size = self.size_bytes(library)
        held = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
        if held is not None:
            self._device.categorise(Category.WORKSPACE, [held.data_ptr()], None)
        self._held[key] = held if is_kept else None

    def clear(self) -> None:
        self._held.clear()

    def size_bytes(self, library: str) -> int:
        """Return the workspace size: from the environment if set, else for this card and version."""
        size = int(self._row(library).get("bytes", 0))
        if library == "cublas":
            # ":4096:2:16:8" means two buffers of 4096 KiB and eight of 16.
            pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
            return sum(int(kib) * 1024 * int(count) for kib, count in pairs) if pairs else size
        if library == "cublaslt":
            # Never more than cuBLAS has, and 0 if the environment unifies them.
            if os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "1":
                return 0
            kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
            return min(int(kib) * 1024 if kib.isdigit() else size, self.size_bytes("cublas"))
        return size

    def _row(self, library: str) -> dict[str, Any]:
        major = self._device.gpu.compute_capability[0]
        fitting = [
            row for row in self._rows if row["library"] == library and major in row.get("capability_majors", [major])
        ]
        return fitting[-1] if fitting else {}
