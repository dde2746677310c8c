import tomllib
from pathlib import Path

import pytest

from tonnage.explain.text import explain_text

DATA = Path(__file__).parents[3] / "src/tonnage/explain/text/data"
CAUSES = tomllib.loads((DATA / "causes.toml").read_text("utf-8"))


@pytest.mark.parametrize(
    ("line", "cause", "certainty"),
    [
        ("ValueError: No available memory for the cache blocks. Try increasing it.", "kv-cache", "certain"),
        ("Free memory on device cuda:0 (12.18/23.56 GiB) on startup is less than desired GPU memory utilization "
         "(0.92, 21.67 GiB).", "other-process", "likely"),
        ("CUDA out of memory occurred when warming up sampler with 256 dummy requests.", "logits", "certain"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "kv-cache", "certain"),
        ("KV cache pool is full. Retract requests. #retracted_reqs: 1", "kv-cache", "likely"),
        ("Error: model requires more system memory (164.8 GiB) than is available (13.4 GiB)", "host", "certain"),
        ("llama_kv_cache_init: failed to allocate buffer for kv cache", "kv-cache", "certain"),
        ("llama_model_load: error loading model: unable to allocate CUDA0 buffer", "weights", "likely"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 116813856768 bytes.", "host", "certain"),
        ("OSError: [WinError 1455] The paging file is too small for this operation", "host", "certain"),
        ("RuntimeError: DataLoader worker (pid 47) is killed by signal: Bus error.", "shared-memory", "likely"),
        ("This might be caused by insufficient shared memory (shm).", "shared-memory", "likely"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/nccl-x'", "shared-memory", "certain"),
        ("OutOfResources: out of resource: shared memory, Required: 135168, Hardware limit: 101376", "kernel-limit", "certain"),
        ("Out of memory: Killed process 4242 (python) total-vm:99kB", "host", "certain"),
        ("Killed", "host", "likely"),
        ("./run.sh: line 3:  4242 Killed                  python train.py", "host", "likely"),
        ("  exitcode  : -9 (pid: 4242)", "host", "likely"),
        ("[ERROR] [launch.py:434:sigkill_handler] exits with return code = -9", "host", "likely"),
        ("see_memory_usage] CPU Virtual Memory: used = 29.71 GB, percent = 95.3% exits with return code = -9", "host", "likely"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.", "capacity", "likely"),
        ("ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 'out of memory'", "outside", "likely"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "capacity", "possible"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "capacity", "possible"),
        ("torch.OutOfMemoryError: Allocation on device", "capacity", "likely"),
        ("RuntimeError: Invalid buffer size: 74.51 GB", "one-tensor", "certain"),
        ("torch.cuda.OutOfMemoryError", "no-numbers", "possible"),
        ("I get CUDA out of memory", "no-numbers", "possible"),
        ("Exception: Capture cuda graph failed: CUDA out of memory.", "outside-cache", "likely"),
    ],
)  # fmt: skip
def test_programs_are_understood_in_their_own_words(line: str, cause: str, certainty: str) -> None:
    first = explain_text([line]).first
    assert (first.cause, first.certainty) == (cause, certainty)


def test_figures_stand_in_the_answer() -> None:
    found = explain_text(
        [
            "The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache (16816)."
        ]
    )
    assert "16,816 tokens" in found.first.sentence and "32,768" in found.first.sentence
    assert found.steps[0] == "--max-model-len 16,816 or less"
    found = explain_text(
        ["To serve at least one request with the models's max seq len (40960), (10.00 GiB KV cache is needed, which is larger "
         "than the available KV cache memory (1.25 GiB). Based on the available memory, the estimated maximum model length is "
         "5104."]
    )  # fmt: skip
    assert "10.00 GiB" in found.first.sentence and "5,104" in found.steps[0]


def test_every_entry_names_a_cause_and_what_it_leaves_open() -> None:
    for name, key in (("words", "words"), ("places", "operators")):
        for row in tomllib.loads((DATA / f"{name}.toml").read_text("utf-8"))[key]:
            assert row["cause"] in CAUSES and row["steps"], row
            assert CAUSES[row["cause"]]["unproved"] and row["says"]
