"""Record what the real allocator does, to hold the model against: needs a GPU and torch with CUDA.

    python tests/allocator/record.py OUT.json.gz

Each scenario is a seeded random program run in a process of its own; what is kept is the program, every event of the
caching allocator, its statistics and its segments. `test_recorded.py` runs the same programs on the model.
"""

import contextlib
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIB = 2**20
SMALL = [1, 300, 512, 4096, 100_000, 524_288, 1_000_000, MIB]
MIDDLE = [MIB + 1, 3 * MIB, 5_000_000, 9 * MIB, 10 * MIB - 512, 10 * MIB, 13 * MIB + 17]
LARGE = [21 * MIB, 33_000_000, 48 * MIB, 70 * MIB, 100_000_000, 130 * MIB, 257 * MIB]

SCENARIOS = {
    "default": {},
    "expandable": {"conf": "expandable_segments:True", "empty": 0.01},
    "streams": {"streams": 3, "record": 0.15, "empty": 0.004},
    "expandable-streams": {"conf": "expandable_segments:True", "streams": 3, "record": 0.15, "empty": 0.004},
    "pressure": {"fraction": 0.02, "live": 4500 * MIB},
    "expandable-pressure": {"conf": "expandable_segments:True", "fraction": 0.02, "live": 4500 * MIB},
    "expandable-streams-pressure": {
        "conf": "expandable_segments:True",
        "fraction": 0.02,
        "live": 4500 * MIB,
        "streams": 3,
    },
    "max-split": {"conf": "max_split_size_mb:64", "fraction": 0.02, "live": 3500 * MIB},
    "non-split-rounding": {
        "conf": "max_split_size_mb:40,max_non_split_rounding_mb:60",
        "fraction": 0.02,
        "live": 3500 * MIB,
    },
    "garbage": {"conf": "garbage_collection_threshold:0.6", "fraction": 0.02, "live": 2600 * MIB},
    "garbage-max-split": {
        "conf": "garbage_collection_threshold:0.5,max_split_size_mb:32",
        "fraction": 0.02,
        "live": 2600 * MIB,
        "streams": 2,
    },
    "fraction-setting": {"conf": "per_process_memory_fraction:0.02", "live": 4500 * MIB},
    "roundup": {"conf": "roundup_power2_divisions:4"},
    "roundup-list": {"conf": "roundup_power2_divisions:[1:8,4:2,64:8,128:0,>:1]"},
    "large-segment": {"conf": "large_segment_size_mb:12"},
    "expandable-large-segment": {"conf": "expandable_segments:True,large_segment_size_mb:32", "empty": 0.01},
    "switching": {"switch": ["expandable_segments:True", "expandable_segments:False", "max_split_size_mb:50"]},
    "pools": {"pools": True},
    "expandable-pools": {"conf": "expandable_segments:True", "pools": True},
    "full-streams": {
        "alone": True,
        "fill": 2500 * MIB,
        "live": 4500 * MIB,
        "streams": 2,
        "conf": "max_split_size_mb:64",
    },
    "full": {"alone": True, "fill": 2500 * MIB, "live": 4500 * MIB},
    "expandable-full": {"conf": "expandable_segments:True", "alone": True, "fill": 2500 * MIB, "live": 4500 * MIB},
}

TEXTS = [
    "max_split_size_mb:19", "max_split_size_mb:20", "max_split_size_mb:x", "max_split_size_mb", "foo:1",
    "backend:native", "backend:foo", "max_non_split_rounding_mb:19", "garbage_collection_threshold:1",
    "roundup_power2_divisions:3", "roundup_power2_divisions:[64:8,256:4,>:1]", "roundup_power2_divisions:[63:8]",
    "roundup_power2_divisions:[64:3]", "roundup_power2_divisions:[>:2]", "roundup_power2_divisions:8",
    "expandable_segments:true", "pinned_num_register_threads:3", "pinned_num_register_threads:256",
    "pinned_num_register_threads:4", "pinned_reserve_segment_size_mb:0", "pinned_reserve_segment_size_mb:8",
    "per_process_memory_fraction:1.5", "per_process_memory_fraction:0.5", "pinned_use_background_threads:True",
    "large_segment_size_mb:10", "large_segment_size_mb:12", "throw_on_cudamalloc_oom:True",
    "pinned_free_catch_all:True", "pinned_max_round_threshold_mb:8", "pinned_max_cached_size_mb:8",
    "graph_capture_record_stream_reuse:True", "release_lock_on_cudamalloc:True", "pinned_use_cuda_host_register:True",
    "expandable_segments:False,max_split_size_mb:100", "",
]  # fmt: skip


class Recorder:
    """Runs one random program and writes down each step before it is taken."""

    def __init__(self, name: str) -> None:
        import torch

        self.torch = torch
        self.spec = SCENARIOS[name]
        self.random = random.Random(name)
        self.ops: list[list] = []
        self.tensors: dict[int, object] = {}
        self.sizes: dict[int, int] = {}
        self.count = 0
        self.streams = [torch.cuda.default_stream()]
        self.streams += [torch.cuda.Stream() for _ in range(self.spec.get("streams", 1) - 1)]

    def run(self, steps: int) -> None:
        if "fraction" in self.spec:
            self.note("fraction", self.spec["fraction"])
            self.torch.cuda.set_per_process_memory_fraction(self.spec["fraction"])
        if "fill" in self.spec:
            free, _ = self.torch.cuda.mem_get_info()
            self.alloc(size=(free - self.spec["fill"]) // (2 * MIB) * 2 * MIB)
            self.sizes.clear()
        for step in range(steps):
            self.step(step, steps)
        self.note("sync")
        self.torch.cuda.synchronize()
        self.alloc(size=512)

    def note(self, *op) -> None:
        self.ops.append(list(op))

    def step(self, step: int, steps: int) -> None:
        if step == steps // 2:
            self.note("reset_peak")
            self.torch.cuda.reset_peak_memory_stats()
        if step == steps * 2 // 3:
            self.note("reset_accumulated")
            self.torch.cuda.reset_accumulated_memory_stats()
        if self.random.random() < self.spec.get("empty", 0.002):
            self.note("empty_cache")
            self.torch.cuda.empty_cache()
        if self.spec.get("switch") and step % 150 == 149:
            text = self.random.choice(self.spec["switch"])
            self.note("settings", text)
            self.torch.cuda.memory._set_allocator_settings(text)
        if self.spec.get("pools") and step % 200 == 100:
            self.pool(step)
        if self.sizes and sum(self.sizes.values()) > self.random.random() * 1.3 * self.spec.get("live", 2000 * MIB):
            self.free(self.random.choice(list(self.sizes)))
        else:
            self.alloc()

    def pool(self, step: int) -> None:
        torch = self.torch
        pool = torch.cuda.MemPool()
        self.note("create_pool", list(pool.id))
        for _ in range(2):
            self.note("begin_pool", list(pool.id))
            with torch.cuda.use_mem_pool(pool):
                for _ in range(12):
                    self.alloc()
                    if self.random.random() < 0.4:
                        self.free(self.random.choice(list(self.sizes)))
                self.note("end_pool", list(pool.id))
        if self.random.random() < 0.5:
            for each in list(self.sizes)[-10:]:
                self.free(each)
        self.note("delete_pool", list(pool.id))
        del pool

    def alloc(self, size: int | None = None) -> None:
        stream = self.random.choice(self.streams)
        size = size or self.random.choice(self.random.choice([SMALL, SMALL, MIDDLE, LARGE]))
        self.count += 1
        with self.torch.cuda.stream(stream):
            try:
                tensor = self.torch.empty(size, dtype=self.torch.uint8, device="cuda")
            except self.torch.OutOfMemoryError as error:
                self.note("oom", size, stream.cuda_stream, str(error))
                return
        self.note("alloc", self.count, size, stream.cuda_stream)
        self.tensors[self.count], self.sizes[self.count] = tensor, size
        if self.random.random() < self.spec.get("record", 0):
            self.record(tensor)

    def record(self, tensor) -> None:
        other = self.random.choice(self.streams)
        self.note("record_stream", self.count, other.cuda_stream)
        tensor.record_stream(other)

    def free(self, key: int) -> None:
        if self.spec.get("record") and self.random.random() < 0.02:
            self.note("sync")
            self.torch.cuda.synchronize()
            self.alloc(size=512)
            for stream in self.streams:
                with self.torch.cuda.stream(stream):
                    self.torch.cuda._sleep(600_000_000)
        self.note("free", key)
        del self.tensors[key], self.sizes[key]


def record_one(name: str) -> dict:
    import torch

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
    recorder = Recorder(name)
    if SCENARIOS[name].get("record"):
        for stream in recorder.streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(600_000_000)
    free, total = torch.cuda.mem_get_info()
    recorder.run(900)
    stats, snapshot = torch.cuda.memory_stats(), torch.cuda.memory._snapshot()
    at_end = {"free_bytes": torch.cuda.mem_get_info()[0], "process_bytes": process_bytes()}
    events = [
        [e["action"], e.get("addr", e.get("device_free", 0)), e["size"], e.get("stream", 0)]
        for e in snapshot["device_traces"][0]
        if e["action"] != "snapshot"
    ]
    return {
        "name": name, "torch": torch.__version__, "conf": SCENARIOS[name].get("conf", ""), "capacity_bytes": total,
        "free_bytes": free, "at_end": at_end, "ops": recorder.ops, "events": events, "stats": stats,
        "segments": [_plain(segment) for segment in snapshot["segments"]],
        "allocator_settings": snapshot["allocator_settings"],
    }  # fmt: skip


def process_bytes() -> int | None:
    """What NVML says that this process holds."""
    import pynvml

    pynvml.nvmlInit()
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    return {process.pid: process.usedGpuMemory for process in processes}.get(os.getpid())


def _plain(segment: dict) -> dict:
    kept = {key: value for key, value in segment.items() if key not in ("frames", "blocks")}
    blocks = [{k: v for k, v in block.items() if k != "frames"} for block in segment["blocks"]]
    return kept | {"blocks": blocks}


def record_texts() -> list[dict]:
    import torch

    torch.cuda.init()
    rows = []
    for text in TEXTS:
        row: dict = {"text": text, "error": None}
        try:
            torch.cuda.memory._set_allocator_settings(text)
        except Exception as error:
            row["error"] = [type(error).__name__, str(error).split("\n")[0]]
        row["settings"] = torch.cuda.memory._snapshot()["allocator_settings"]
        rows.append(row)
    return rows


def _in_process(name: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        env = {"PYTORCH_ALLOC_CONF": SCENARIOS.get(name, {}).get("conf", "")}
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, str(out)], env={**os.environ, **env}, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            return {"name": name, "failed": done.stderr[-1500:]}
        return json.loads(out.read_text())


def main() -> None:
    warnings.simplefilter("ignore")
    if sys.argv[1] == "--one":
        result = record_texts() if sys.argv[2] == "texts" else record_one(sys.argv[2])
        Path(sys.argv[3]).write_text(json.dumps(result))
        return
    shared = [name for name, spec in SCENARIOS.items() if not spec.get("alone")]
    with ThreadPoolExecutor(6) as threads:
        done = dict(zip([*shared, "texts"], threads.map(_in_process, [*shared, "texts"]), strict=True))
    for name in SCENARIOS.keys() - set(shared):
        done[name] = _in_process(name)
    with gzip.open(sys.argv[1], "wt") as file:
        json.dump(done, file)
    for name, result in done.items():
        print(name, result.get("failed") or len(result["events"]) if isinstance(result, dict) else len(result))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
