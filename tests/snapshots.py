"""Snapshots as PyTorch would write them, made by the allocator's model; and ways to read bytes as one."""

import io
import pickle
from pathlib import Path
from typing import Any

from tonnage.allocator import AllocatorSettings, CachingAllocator
from tonnage.allocator.blocks import Block
from tonnage.recording import Recording
from tonnage.recording.snapshot import SnapshotLimits, Stream, load, recording_of, snapshot_of

TORCH = "/usr/lib/python3.12/site-packages/torch/"
MODULE = TORCH + "nn/modules/module.py"


def frame(name: str, filename: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


MAIN = frame("<module>", "/home/me/train.py", 88)
FORWARD = [frame("forward", TORCH + "nn/modules/linear.py", 134), frame("_call_impl", MODULE, 1790), MAIN]
MOVE = [frame("convert", MODULE, 1370), frame("_apply", MODULE, 965), frame("to", MODULE, 1384), MAIN]
BACKWARD = [
    frame("_make_grads", TORCH + "autograd/__init__.py", 231),
    frame("backward", TORCH + "_tensor.py", 631),
    MAIN,
]
INIT = [frame("_init_group", TORCH + "optim/adam.py", 169), frame("step", TORCH + "optim/adam.py", 238), MAIN]
UPDATE = [frame("_multi_tensor_adam", TORCH + "optim/adam.py", 400), frame("step", TORCH + "optim/adam.py", 238), MAIN]


class Program:
    """A program on a card of the model's; `snapshot()` is what PyTorch would dump."""

    def __init__(self, settings: str = "") -> None:
        self.settings = AllocatorSettings.parse(settings)
        self.trace: list[dict[str, Any]] = []
        self.frames: list[dict[str, Any]] = []
        self.allocator = CachingAllocator(2**38, self.settings, observer=self._write)
        self._frames_at: dict[int, list[dict[str, Any]]] = {}

    def _write(self, action: str, address: int, size: int, stream: int) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": stream}
        self.trace.append(entry | {"time_us": 1000 + len(self.trace), "frames": self.frames})

    def alloc(self, size: int, frames: list[dict[str, Any]] | None = None, stream: int = 0) -> Block:
        self.frames = [] if frames is None else frames
        block = self.allocator.malloc(size, stream)
        self._write("alloc", block.address, size, stream)
        self._frames_at[block.address] = self.frames
        return block

    def free(self, block: Block, frames: list[dict[str, Any]] | None = None) -> None:
        self.frames = [] if frames is None else frames
        for action in ("free_requested", "free_completed"):
            self._write(action, block.address, block.requested_bytes, block.stream)
        self.allocator.free(block)

    def snapshot(self, first_event: int = 0) -> dict[str, Any]:
        segments = self.allocator.snapshot()
        for segment in segments:
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    block["frames"] = self._frames_at[block["address"]]
        return {
            "segments": segments,
            "device_traces": [self.trace[first_event:]],
            "allocator_settings": self.settings.as_snapshot(),
            "external_annotations": [],
        }


def small_snapshot() -> dict[str, Any]:
    """A little of everything; each object is new, so that a test may spoil one."""
    program = Program()
    kept = program.alloc(3 * 2**20, MOVE)
    gone = program.alloc(700, FORWARD)
    program.free(gone, [MAIN])
    program.alloc(kept.requested_bytes, [MAIN])
    snapshot = program.snapshot()
    snapshot["external_annotations"] = [
        {"stage": "START", "name": "Optimizer.step#SGD.step", "device": 0, "time_us": 5}
    ]
    return pickle.loads(pickle.dumps(snapshot))


def read(data: bytes, limits: SnapshotLimits | None = None) -> Recording:
    limits = limits or SnapshotLimits()
    return recording_of(snapshot_of(load(Stream(io.BytesIO(data), limits), limits), limits))


def read_dict(snapshot: dict[str, Any], protocol: int = 4) -> Recording:
    return read(pickle.dumps(snapshot, protocol))


DATA = Path(__file__).parent / "recording" / "snapshot" / "data"
