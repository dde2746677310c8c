"""A start by numbers: the plan's own, and the advice where there is no room, which must be true."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.families import saved
from serve.virtual_starts import SETTINGS, TINY
from tonnage.budget.serving.memory import ServingConfiguration, serving_budget
from tonnage.budget.serving.own_engine import share_bytes
from tonnage.errors import RequestError
from tonnage.hardware import find_gpu
from tonnage.models import find_model
from tonnage.serve.config import EngineConfig
from tonnage.serve.models.architecture import architecture_of, read_architecture
from tonnage.serve.startup import CannotStart, DeviceMemory, Startup, look
from tonnage.units import GIB, MIB

CPU = torch.device("cpu")


def memory_of(gpu: str, share: float = 0.9) -> DeviceMemory:
    """A card that is not there."""
    card = find_gpu(gpu)
    return DeviceMemory(
        device=torch.device("cuda", 0), name=card.name, gpu=card, capacity_bytes=card.memory_bytes,
        limit_bytes=share_bytes(card.memory_bytes, share),
    )  # fmt: skip


def startup_of(name: str, config: EngineConfig, memory: DeviceMemory) -> Startup:
    return Startup(read_architecture(name), torch.bfloat16, config, memory)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-14b", "llama-3.1-8b"])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("weights", [None, "int8", "fp8"])
def test_the_pool_is_the_one_that_plan_serve_predicts(name: str, kv: str, weights: str | None) -> None:
    config = EngineConfig(context=4096, kv=kv, weights=weights, max_seqs=128, batched_tokens=4096)  # type: ignore[arg-type]
    asked = ServingConfiguration(
        engine="tonnage", context=4096, kv=kv, weights=weights or "", max_seqs=128, batched_tokens=4096
    )
    planned = serving_budget(find_model(name), asked, find_gpu("h200"))
    card = startup_of(name, config, memory_of("h200")).plan()
    assert card.pool.blocks == planned.kv.blocks > 1000
    assert card.weight_bytes + card.reserve_bytes + card.pool.size_bytes <= card.limit_bytes


def test_on_the_cpu_the_pool_is_no_larger_than_sequences_need() -> None:
    config = EngineConfig(context=64, max_seqs=3)
    startup = Startup(read_architecture(saved("llama")), torch.float32, config, look(CPU, 0.9))
    assert startup.plan().pool.blocks == 3 * 4 + 1
    assert replace(startup, config=replace(config, blocks=7)).plan().pool.blocks == 7


def test_looking_at_the_cpu() -> None:
    assert look(CPU, "2 GiB").limit_bytes == 2 * GIB
    half, all_of_it = look(CPU, 0.5), look(CPU, 1.0)
    assert half.limit_bytes == pytest.approx(all_of_it.capacity_bytes / 2, rel=0.2)


@pytest.mark.parametrize("budget", [0, 1.5, -1, "900 TiB", "much"])
def test_budgets_that_make_no_sense(budget: float | str) -> None:
    with pytest.raises(RequestError):
        look(CPU, budget)


@pytest.mark.parametrize("changes", [
    {"context": 1}, {"max_seqs": 0}, {"batched_tokens": 0}, {"block": 0}, {"blocks": 1}, {"kv": "fp4"},
])  # fmt: skip
def test_settings_that_make_no_sense(changes: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        EngineConfig(**changes)  # type: ignore[arg-type]


def refusal(startup: Startup) -> CannotStart:
    with pytest.raises(CannotStart) as caught:
        startup.check(startup.plan())
    assert caught.value.exit_code == 1
    return caught.value


def advised(error: CannotStart) -> list[tuple[str, str]]:
    return re.findall(r"--([a-z-]+) ([\w.]+?)(?=[,.]?(?: |$))", error.hint)


def follow(flag: str, value: str, startup: Startup) -> None:
    """Start with the flag changed; it must work, and the numbers must have been computed for it."""
    if flag == "budget":
        limit_bytes = share_bytes(startup.memory.capacity_bytes, float(value))
        startup = replace(startup, memory=replace(startup.memory, limit_bytes=limit_bytes))
    else:
        change = {flag.replace("-", "_"): value if flag in ("kv", "weights") else int(value)}
        startup = replace(startup, config=replace(startup.config, **change))  # type: ignore[arg-type]
    startup.check(startup.plan())


@pytest.mark.parametrize(("name", "gpu", "share", "config", "flags"), [
    ("qwen3-0.6b", "h200", 0.0239, EngineConfig(context=4096), {"context", "kv", "budget", "max-seqs", "batched-tokens"}),
    ("qwen3-14b", "h200", 0.9, EngineConfig(context=800_000), {"context"}),
    ("qwen3-14b", "h200", 0.9, EngineConfig(context=690_000), {"context", "kv"}),
    ("qwen3-14b", "rtx-5090", 0.9, EngineConfig(context=8192), {"weights"}),
    ("llama-3.1-70b", "h200", 0.9, EngineConfig(), {"weights"}),
])  # fmt: skip
def test_advice_is_true(name: str, gpu: str, share: float, config: EngineConfig, flags: set[str]) -> None:
    startup = startup_of(name, config, memory_of(gpu, share))
    error = refusal(startup)
    ways = advised(error)
    assert flags <= {flag for flag, _ in ways}, error.words
    for flag, value in ways:
        follow(flag, value, startup)
    assert "GiB" in str(error) and "weights" in str(error)


def test_where_nothing_helps_it_says_so() -> None:
    error = refusal(startup_of("llama-3.1-405b", EngineConfig(), memory_of("h200")))
    assert "a device with more memory" in error.hint and "--" not in error.hint


def test_one_block_of_context_and_the_null_block() -> None:
    startup = startup_of("qwen3-0.6b", EngineConfig(), memory_of("h200"))
    assert startup.needed_blocks == 2
    assert replace(startup, config=EngineConfig(context=33)).needed_blocks == 4


def test_swap_is_a_size() -> None:
    assert EngineConfig(swap="8 MiB").swap_bytes == 8 * MIB and EngineConfig(swap=5).swap_bytes == 5


@pytest.fixture(scope="module")
def starts() -> dict[str, Any]:
    """On a GPU that is not there."""
    script = Path(__file__).with_name("virtual_starts.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_start_keeps_to_its_plan(starts: dict[str, Any]) -> None:
    memory = replace(memory_of("h200"), limit_bytes=8 * GIB)
    planned = Startup(architecture_of(TINY), torch.bfloat16, SETTINGS, memory).plan()
    assert starts["planned"]["blocks"] == planned.pool.blocks
    assert not starts["planned"]["by_measurement"]


@pytest.mark.parametrize("case", ["reserve too small", "reserve too large"])
def test_a_plan_that_is_not_borne_out_gives_way_to_the_measurement(starts: dict[str, Any], case: str) -> None:
    assert starts[case]["by_measurement"]
    assert starts[case]["total_bytes"] <= 8 * GIB


@pytest.mark.parametrize("case", ["planned", "reserve too small", "reserve too large", "graphs"])
def test_the_budget_is_filled_and_kept(starts: dict[str, Any], case: str) -> None:
    assert 0.98 * 8 * GIB < starts[case]["measured_bytes"] <= 8 * GIB
    assert starts[case]["tokens"] == [3, 3, 3]


def test_graphs_are_captured_for_all_that_decode_at_once(starts: dict[str, Any]) -> None:
    assert starts["graphs"]["graphs"] == [1, 2] and starts["planned"]["graphs"] == []


def test_a_pool_beyond_the_card_is_an_error_with_numbers(starts: dict[str, Any]) -> None:
    assert re.search(
        r"for the KV cache; 13\d\.\d\d GiB are to be had\.\nUse --budget 0\.9\d\.$", starts["beyond the card"]
    )
