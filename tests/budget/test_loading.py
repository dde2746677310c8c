"""What loading takes, by who loads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tonnage.budget.demands import shortages
from tonnage.budget.loading import Loading, largest_tensor, loading_sizes, serving_loading, training_loading
from tonnage.budget.serving.memory import ServingConfiguration, serving_budget
from tonnage.budget.training.configuration import Configuration
from tonnage.hardware import Cluster, find_cluster
from tonnage.models import find_model

LLAMA, MIXTRAL = find_model("llama-3.1-8b"), find_model("mixtral-8x7b")
EIGHT = find_cluster("8xh100")
EMBEDDING = 128256 * 4096


def loading(**choices: object) -> Loading:
    return training_loading(LLAMA, Configuration(data=8, shard=8, **choices), EIGHT)  # type: ignore[arg-type]


def test_every_rank_builds_what_it_makes_wider() -> None:
    found = loading(framework="torch", zero=0)
    assert found.host_bytes_by_rank == (4 * LLAMA.parameters,) * 8
    assert found.host_bytes == 8 * 4 * LLAMA.parameters
    narrowed = 2 * EMBEDDING  # DeepSpeed makes 16 bits of it, tensor by tensor
    assert loading(framework="deepspeed", zero=2).host_bytes == found.host_bytes + 8 * narrowed


def test_weights_as_wide_as_stored_are_pages_of_the_file() -> None:
    found = loading(framework="torch", zero=0, precision="bf16")
    assert (found.way, found.host_bytes, found.checkpoint_bytes) == ("mapped", 0, 2 * LLAMA.parameters)


def test_accelerate_hands_whole_tensors_on_and_transformers_copies_the_model_on_the_other_ranks() -> None:
    found = loading(framework="fsdp2", zero=3)
    assert found.host_bytes_by_rank == (4 * LLAMA.parameters, *(8 * LLAMA.parameters,) * 7)
    narrow = loading(framework="fsdp2", zero=3, precision="bf16")  # what is read are pages of the file
    assert narrow.host_bytes_by_rank == (0, *(2 * LLAMA.parameters,) * 7)
    kept = 4 * LLAMA.parameters / 8
    assert kept + 4 * EMBEDDING < found.card_bytes < kept + 4 * EMBEDDING + 2 * 2**30


def test_parameters_that_stay_on_the_host_are_there_beside_the_whole() -> None:
    found = loading(framework="fsdp2", zero=3, parameter_place="host", optimizer_place="host")
    part = round(4 * LLAMA.parameters / 8)
    assert found.host_bytes_by_rank == (4 * LLAMA.parameters + part, *(8 * LLAMA.parameters + part,) * 7)


def test_deepspeed_orders_the_parts_of_stage_3_on_the_host() -> None:
    found = loading(framework="deepspeed", zero=3)
    assert found.way == "split"
    assert found.host_bytes_by_rank == (2 * LLAMA.parameters // 8,) * 8
    stays = loading(framework="deepspeed", zero=3, parameter_place="host", optimizer_place="host")
    assert stays.host_bytes_by_rank == (round(2 * LLAMA.parameters / 8),) * 8


@pytest.mark.parametrize("choices", [{"framework": "megatron", "tp": 8}, {"framework": "fsdp2", "zero": 3, "pp": 8}])
def test_a_rank_that_has_a_part_reads_that(choices: dict[str, object]) -> None:
    found = training_loading(LLAMA, Configuration(**choices), EIGHT)  # type: ignore[arg-type]
    assert found.way == "own part"
    assert found.host_bytes == 8 * 4 * EMBEDDING // int(choices.get("tp", 1))  # type: ignore[call-overload]


def test_a_base_in_four_bits_is_quantised_matrix_by_matrix() -> None:
    single = find_cluster("rtx-4090")
    found = training_loading(LLAMA, Configuration(lora_rank=16, base="nf4"), single)
    assert found.way == "mapped" and found.host_bytes == 0
    assert found.card_bytes < 2 * LLAMA.parameters / 2


def test_experts_are_one_tensor() -> None:
    assert largest_tensor(LLAMA) == EMBEDDING
    assert largest_tensor(MIXTRAL) == 8 * 2 * 4096 * 14336


def test_a_small_host_or_card_is_too_small() -> None:
    found = loading(framework="torch", zero=0)

    def lacking(cluster: Cluster) -> list[str]:
        return [demand.part for demand in shortages(found.demands(cluster))]

    assert lacking(EIGHT) == []
    assert lacking(EIGHT.with_host(memory_bytes=128 * 2**30)) == ["loading on the host"]
    assert lacking(find_cluster("8xrtx-4090").with_host(memory_bytes=2**40)) == ["loading on the GPU"]
    # In unified memory, what is read and what is kept lie side by side.
    whole = find_cluster("gb10")
    assert not whole.host_memory_bytes
    (together,) = training_loading(LLAMA, Configuration(), whole).demands(whole)
    assert together.needed_bytes > 8 * LLAMA.parameters


@pytest.mark.parametrize("framework", ["torch", "fsdp2", "deepspeed", "megatron"])
@pytest.mark.parametrize("base", ["16-bit", "nf4"])
@pytest.mark.parametrize("place", ["gpu", "host"])
def test_many_configurations_at_once_load_as_each_of_them(framework: str, base: str, place: str) -> None:
    """With every degree of parallelism that decides who reads what."""
    degrees = [(1, 1, 1, 8), (8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 8), (2, 2, 2, 2)]
    tp, pp, ep, data = (np.array(column) for column in zip(*degrees, strict=True))
    choices: dict[str, Any] = {"framework": framework, "base": base, "parameter_place": place, "zero": 3}
    choices |= {"lora_rank": 16 if base == "nf4" else 0}
    many = Configuration(**choices, tp=tp, pp=pp, ep=ep, data=data, shard=data)
    sizes = loading_sizes(MIXTRAL, many, EIGHT)
    on_host, on_card = sizes.demands(EIGHT)
    for row in range(len(degrees)):
        alone = training_loading(MIXTRAL, many.at(row), EIGHT)
        assert alone.host_bytes == pytest.approx(np.broadcast_to(on_host.needed_bytes, 5)[row], abs=8)
        assert alone.card_bytes == pytest.approx(np.broadcast_to(on_card.needed_bytes, 5)[row], abs=8)


def test_a_server_of_vllm_quantises_layer_by_layer_since_0_15() -> None:
    gpu = find_cluster("h100").gpu
    cards = {}
    for version in ("0.11.0", "0.20.0"):
        asked = ServingConfiguration(weights="fp8", engine_version=version, context=4096)
        cards[version] = serving_loading(LLAMA, serving_budget(LLAMA, asked, gpu), 1).card_bytes
    assert cards["0.11.0"] > 2 * LLAMA.parameters > cards["0.20.0"]


def test_files_that_are_quantised_already_are_smaller() -> None:
    gpu = find_cluster("rtx-4090").gpu
    asked = ServingConfiguration(weights="int4", context=4096)
    found = serving_loading(LLAMA, serving_budget(LLAMA, asked, gpu), 1)
    assert found.checkpoint_bytes == LLAMA.parameters // 2


COUNTED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "plan-loading.json").read_text())["ways"]
PLANNED: dict[str, dict[str, object]] = {
    "single": {"framework": "torch", "zero": 0},
    "ddp": {"framework": "torch", "zero": 0},
    "ddp_bf16": {"framework": "torch", "zero": 0, "precision": "bf16"},
    "fsdp2": {"framework": "fsdp2", "zero": 3},
    "fsdp2_bf16": {"framework": "fsdp2", "zero": 3, "precision": "bf16"},
    "zero2": {"framework": "deepspeed", "zero": 2},
    "zero3": {"framework": "deepspeed", "zero": 3},
}


@pytest.mark.parametrize("way", PLANNED)
def test_a_plan_says_what_a_run_counted(way: str, tmp_path: Path) -> None:
    """Weights on the host by rank, of the model that `benchmarks/plan_loading.py` loads."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 32000,
        "hidden_size": 2048, "intermediate_size": 5440, "num_hidden_layers": 10, "num_attention_heads": 32,
        "num_key_value_heads": 32, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    counted = COUNTED[way]["run_bytes"]
    ranks = len(counted)
    configuration = Configuration(data=ranks, shard=ranks, **PLANNED[way])  # type: ignore[arg-type]
    shape = find_model(str(tmp_path / "config.json"))
    found = training_loading(shape, configuration, find_cluster(f"{ranks}xh200"))
    assert found.host_bytes_by_rank == pytest.approx(counted, rel=0.01)
    assert found.checkpoint_bytes >= 0.99 * COUNTED[way]["run_file_bytes"]  # a tensor that has moved is mapped no more
