"""Real files, small enough to be read a thousand times: the tests' own, and those that tonnage writes."""

import gzip
import json
import pickle
import tempfile
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from hostile_recordings import hostile_recording
from support import MIB, Run, training_run
from tonnage.ledger import Category
from tonnage.models.presets import preset_config
from tonnage.recording import (
    ClusterRecording,
    ClusterSummary,
    RankSummary,
    Recording,
    open_recording,
    write_cluster,
    write_recording,
)

TESTS = Path(__file__).parents[1]
# Of a long trace, as much as says how the rest looks.
_EVENTS = 400
_ROWS = 40
_PRESETS = (
    "llama-3.1-8b",
    "qwen3-0.6b",
    "deepseek-v3",
    "gpt2",
    "gemma-3-27b",
    "mixtral-8x7b",
    "gpt-oss-20b",
    "qwen3-next-80b-a3b",
)


def _written(write: Callable[[Path], None]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "seed")
        return (Path(folder) / "seed").read_bytes()


@cache
def recordings() -> list[bytes]:
    """Runs of the allocator, one that dies, one full of markup, and a real card's."""
    made = [training_run(), training_run(gpu="t4", batch=512, layers=32), hostile_recording(), _leak()]
    made.append(open_recording(TESTS / "recording" / "snapshot" / "data" / "oom.pickle.gz"))
    return [_written(lambda path, run=run: write_recording(path, run)) for run in made]


def _leak() -> Recording:
    """Steps that keep what they made, and empty the cache."""
    run = Run("a100-40", script="train.py", arguments=("--batch", "4"))
    for step in range(1, 6):
        run.step(step)
        run.phase("forward")
        run.alloc(64 * MIB, Category.ACTIVATIONS, operator="linear", module=f"layers.{step}", line="train.py:9")
        run.phase("backward")
        run.free(run.alloc(16 * MIB, Category.GRADIENTS, operator="mm", line="train.py:10", stack=("train.py:10 f",)))
        run.empty_cache()
    return run.recording


@cache
def clusters() -> list[bytes]:
    """A cluster of ranks that differ, one of which dies."""
    runs = {0: training_run(), 3: training_run(batch=16), 7: training_run(gpu="t4", batch=512, layers=32)}
    stands = {0: (0, 1, 2), 3: (3, 4, 5, 6), 7: (7,)}
    ranks = tuple(RankSummary.of(rank, stands[rank], run, {"all-gather": MIB}, False) for rank, run in runs.items())
    summary = ClusterSummary(
        words="8 × h200", gpu="h200", gpu_name="NVIDIA H200", capacity_bytes=2**37, gpus=8, hosts=1, gpus_per_host=8,
        outcome="oom", exit_status=1, dies_first=7, worst=7, script="train.py", ranks=ranks,
    )  # fmt: skip
    return [_written(lambda path: write_cluster(path, ClusterRecording(summary, runs.__getitem__)))]


@cache
def snapshots() -> list[Any]:
    """Snapshots of a real card, and the head of each."""
    found = []
    for path in sorted((TESTS / "recording" / "snapshot" / "data").glob("*.pickle.gz")):
        snapshot = pickle.loads(gzip.decompress(path.read_bytes()))
        snapshot["device_traces"] = [trace[-_EVENTS:] for trace in snapshot["device_traces"]]
        found.append(snapshot)
    return found


@cache
def event_lists() -> list[Any]:
    """Sequences of events that a real allocator made."""
    paths = sorted((TESTS / "allocator" / "data").glob("*-*.json.gz"))
    return [json.loads(gzip.decompress(path.read_bytes()))[:_EVENTS] for path in paths]


@cache
def traces() -> list[Any]:
    """A trace of the PyTorch profiler."""
    trace = json.loads(gzip.decompress((TESTS / "roofline" / "data" / "step.json.gz").read_bytes()))
    short = trace | {"traceEvents": trace["traceEvents"][-_EVENTS:]}
    return [short, trace]


@cache
def errors() -> list[bytes]:
    """The text of an error, and the words of other programs beneath each other."""
    wordings = tomllib.loads((TESTS.parent / "benchmarks" / "reports" / "wordings.toml").read_text("utf-8"))
    return [(TESTS / "explain/text/data/error.txt").read_bytes(), "\n".join(wordings.values()).encode()]


@cache
def tables() -> list[str]:
    """Nsight Compute's CSV, as a line for each kernel and as one for each counter."""
    text = gzip.decompress((TESTS / "roofline" / "data" / "ncu.csv.gz").read_bytes()).decode()
    heading = '"ID","Process ID","Kernel Name","Block Size","Grid Size","Device Name",'
    heading += '"Metric Name","Metric Unit","Metric Value"\n'
    cells = '"0","7","void k<float>(int)","(128, 1, 1)","(4096, 1, 1)","NVIDIA H200",'
    counters = ('"gpu__time_duration.sum","us","12.5"', '"Memory Throughput","Gbyte/second","1,234"',
                '"dram__bytes_read.sum","Mbyte","3"', '"dram__bytes_write.sum","Mbyte","4"')  # fmt: skip
    return ["".join(text.splitlines(keepends=True)[:_ROWS]), heading + "".join(f"{cells}{each}\n" for each in counters)]


@cache
def configs() -> list[Any]:
    """Configurations of published models."""
    return [preset_config(name) for name in _PRESETS]


@cache
def headers() -> list[Any]:
    """A checkpoint's header, with and without experts."""

    def row(*shape: int) -> dict[str, Any]:
        return {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 2]}

    plain = {
        "__metadata__": {"format": "pt"},
        "model.embed_tokens.weight": row(100, 64),
        "lm_head.weight": row(100, 64),
    }
    for layer in range(3):
        name = f"model.layers.{layer}"
        plain |= {f"{name}.self_attn.{part}_proj.weight": row(64, 64) for part in "qkvo"}
        plain |= {f"{name}.mlp.{part}_proj.weight": row(128, 64) for part in ("gate", "up")}
        plain |= {f"{name}.mlp.down_proj.weight": row(64, 128), f"{name}.input_layernorm.weight": row(64)}
    experts = {f"model.layers.0.mlp.experts.{number}.down_proj.weight": row(64, 32) for number in range(4)}
    return [plain, plain | experts]


def ceilings() -> list[Any]:
    """What a probe of a card writes."""
    rates = {"bf16": 7.9e14, "fp32": 5.1e13}
    numbers = {"memory_bytes_per_s": 4.3e12, "host_link_bytes_per_s": 5.5e10, "kernel_floor_s": 1e-6, "launch_s": 4e-6}
    return [{"tonnage_ceilings": 1, "gpu": "NVIDIA H200", "rates": rates} | numbers]


def cards() -> list[str]:
    """Cards of one's own."""
    return [
        'name = "Prototype 48"\narchitecture = "sm_90"\nmemory_bytes = "48 GiB"\nbandwidth_bytes_per_s = 2.4e12\n'
        "sm_count = 96\nclock_mhz = 1800\nl2_bytes = 50000000\nrates = { fp32 = 4.4e13, bf16 = 3.5e14 }\n",
        'name = "H100 64"\nlike = "h100"\nmemory_bytes = 64000000000\npower_w = 350\nnvlink_bytes_per_s = 4.5e11\n',
    ]


def index() -> Any:
    """The index of a checkpoint in two files."""
    names = list(headers()[0])[1:]
    placed = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
    return {"metadata": {"total_size": 1000}, "weight_map": placed}


def requests() -> list[Any]:
    """Bodies that clients send."""
    sampling = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 16, "stop": ["\n"], "seed": 1, "stream": True}
    message = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    return [
        {"model": "m", "prompt": ["Hello", "there"], "n": 2, "logprobs": 1, **sampling},
        {"model": "m", "messages": [{"role": "system", "content": "Be brief."}, message], **sampling},
    ]
