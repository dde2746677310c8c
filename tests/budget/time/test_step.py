"""Seconds: against what an H200 took, and what must hold whatever the numbers are."""

import json
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.budget.time.launches import LayerLaunches
from tonnage.budget.time.roofline import Calibration, calibration
from tonnage.budget.time.step import PARTS, StepClock, step_time
from tonnage.budget.training.adapters import parse_targets
from tonnage.budget.training.configuration import Configuration
from tonnage.hardware import find_cluster, find_gpu
from tonnage.models import ModelShape, find_model, from_config

ROWS = json.loads((Path(__file__).parents[3] / "benchmarks" / "truth" / "steptime.json").read_text())
PRESETS = {"llama-1b": "llama-3.2-1b", "llama-3b": "llama-3.2-3b", "llama-8b": "llama-3.1-8b"}
H200 = find_cluster("h200")
BASE = Configuration(precision="bf16", optimizer_kernel="fused", seq=2048, micro_batch=2)


def measured(row: dict[str, Any]) -> Configuration:
    precision = "bf16-mixed" if row["precision"] == "amp" else "bf16"
    checkpoint = "full" if row["checkpoint"] else "none"
    return replace(BASE, precision=precision, checkpoint=checkpoint, seq=row["seq"], micro_batch=row["batch"])


def shape_of(row: dict[str, Any]) -> ModelShape:
    return find_model(PRESETS.get(row["size"], row["size"]))


def seconds(configuration: Configuration, gpus: str = "h200", model: str = "llama-3.2-1b") -> float:
    return float(step_time(find_model(model), configuration, find_cluster(gpus)).total_s)


@pytest.mark.truth
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['size']}-{row['batch']}-{row['checkpoint']}")
def test_a_measured_step_is_predicted_within_five_percent(row: dict[str, Any]) -> None:
    """Or within twenty where the card waits for the host for some of it: that host was another one, and shared with nobody."""
    predicted = step_time(shape_of(row), measured(row), H200)
    waits = float(predicted.busy.host_s) > 0.6 * float(predicted.total_s)
    assert float(predicted.total_s) * 1e3 == pytest.approx(sum(row["ms"].values()), rel=0.2 if waits else 0.05)
    optimizer = float(predicted.parts["optimizer"]) * 1e3
    assert optimizer == pytest.approx(row["ms"]["optimizer"], rel=0.1)


@pytest.mark.truth
def test_measured_steps_are_predicted_within_four_percent_in_the_median() -> None:
    errors = [
        abs(float(step_time(shape_of(row), measured(row), H200).total_s) * 1e3 / sum(row["ms"].values()) - 1)
        for row in ROWS
    ]
    assert median(errors) < 0.04


@pytest.mark.truth
def test_phases_are_predicted_within_seven_percent_in_the_median() -> None:
    errors = []
    for row in ROWS:
        parts = step_time(shape_of(row), measured(row), H200).parts
        found = {"forward": parts["forward"], "backward": parts["backward"] + parts["recompute"]}
        errors += [abs(float(found[name]) * 1e3 / row["ms"][name] - 1) for name in found]
    assert median(errors) < 0.07


@pytest.mark.truth
def test_a_row_that_no_constant_has_seen() -> None:
    configuration = replace(BASE, seq=4096, micro_batch=2)
    assert float(step_time(find_model("llama-3.1-8b"), configuration, H200).tokens_per_s) == pytest.approx(
        10_058, rel=0.05
    )


def test_no_share_is_missing() -> None:
    assert all(getattr(calibration(), field.name) > 0 for field in fields(Calibration))


@settings(max_examples=40)
@given(
    micro_batch=st.integers(1, 16),
    seq=st.sampled_from([512, 2048, 8192]),
    checkpoint=st.sampled_from(["none", "selective", "every-2", "full"]),
    zero=st.integers(0, 3),
    tp=st.sampled_from([1, 2, 4]),
)
def test_more_work_takes_longer_and_parts_make_the_whole(
    micro_batch: int, seq: int, checkpoint: str, zero: int, tp: int
) -> None:
    shape, cluster = find_model("llama-3.2-1b"), find_cluster("8xh200")
    data = 8 // tp
    many = Configuration(
        checkpoint=checkpoint,
        zero=zero,
        framework="fsdp2",
        seq=seq,
        micro_batch=micro_batch,
        tp=tp,
        data=data,
        shard=data,
    )
    time = step_time(shape, many, cluster)
    assert set(time.parts) == set(PARTS)
    assert all(float(part) >= 0 for part in time.parts.values())
    assert float(time.hidden_s) >= -1e-9
    assert float(time.total_s) == pytest.approx(sum(float(part) for part in time.parts.values()))
    assert float(step_time(shape, replace(many, micro_batch=micro_batch + 1), cluster).total_s) >= float(time.total_s)
    assert float(step_time(shape, replace(many, seq=2 * seq), cluster).total_s) > float(time.total_s)
    again = step_time(shape, replace(many, checkpoint="full"), cluster)
    assert float(again.total_s) >= float(step_time(shape, replace(many, checkpoint="none"), cluster).total_s)


def test_many_at_once_are_each_one_alone() -> None:
    shape, cluster = find_model("mixtral-8x7b"), find_cluster("16xh100")
    numbers = {
        "micro_batch": np.array([1, 2, 4, 1]),
        "accumulate": np.array([4, 2, 1, 8]),
        "tp": np.array([1, 2, 8, 1]),
        "pp": np.array([1, 2, 1, 1]),
        "cp": np.array([1, 1, 1, 4]),
        "ep": np.array([8, 4, 2, 1]),
        "data": np.array([16, 4, 2, 4]),
        "shard": np.array([16, 4, 2, 4]),
    }
    many = Configuration(zero=3, framework="fsdp2", checkpoint="selective", loss="chunked", **numbers)
    together = StepClock(shape, cluster).step(many)
    for index in range(4):
        alone = step_time(shape, many.at(index), cluster)
        assert float(together.total_s[index]) == pytest.approx(float(alone.total_s))
        for name in PARTS:
            assert float(np.broadcast_to(together.parts[name], 4)[index]) == pytest.approx(float(alone.parts[name]))


def test_one_clock_answers_for_other_arrays_too() -> None:
    clock = StepClock(find_model("llama-3.2-1b"), find_cluster("8xh200"))
    for batch in (1, 2, 3):
        many = Configuration(micro_batch=np.array([batch]), data=np.array([8]), shard=np.array([8]))
        plain = Configuration(micro_batch=batch, data=8, shard=8)
        expected = step_time(find_model("llama-3.2-1b"), plain, find_cluster("8xh200"))
        assert float(clock.step(many).total_s[0]) == pytest.approx(float(expected.total_s))


def test_a_pipeline_is_empty_for_its_share() -> None:
    configuration = Configuration(pp=4, accumulate=12, micro_batch=1)
    time = step_time(find_model("llama-3.1-8b"), configuration, find_cluster("4xh200"))
    working = sum(float(time.parts[name]) for name in ("forward", "backward", "recompute", "collectives"))
    bubble = float(time.parts["bubble"])
    assert bubble / (bubble + working) == pytest.approx(3 / (12 + 3), rel=1e-3)


def test_an_odd_vocabulary_slows_the_head() -> None:
    shape = find_model("gpt2-medium")
    padded = replace(shape, vocab=50304)
    large = replace(BASE, micro_batch=8)  # else the card waits for the host
    assert float(step_time(shape, large, H200).total_s) > 1.1 * float(step_time(padded, large, H200).total_s)


def test_small_models_wait_for_the_host_and_large_ones_do_not() -> None:
    one, two = (seconds(replace(BASE, micro_batch=size, seq=128), model="gpt2") for size in (1, 2))
    assert two < 1.05 * one
    one, two = (seconds(replace(BASE, micro_batch=size, seq=4096), model="llama-3.1-8b") for size in (1, 2))
    assert two > 1.8 * one
    assert seconds(replace(BASE, seq=128, compile=True), model="gpt2") < seconds(replace(BASE, seq=128), model="gpt2")


def test_precision_sets_the_pace() -> None:
    times = [
        seconds(replace(BASE, precision=name, seq=4096), model="llama-3.1-8b")
        for name in ("fp32", "tf32", "bf16", "fp8")
    ]
    assert times == sorted(times, reverse=True)
    # Attention, the head and everything that moves bytes stay as they were.
    assert times[2] / times[3] < 1.8


def test_a_card_without_bf16_computes_in_what_it_has() -> None:
    assert seconds(BASE, "v100") > seconds(BASE, "a100")


def test_optimizers_cost_what_they_stream() -> None:
    def update(**changes: Any) -> float:
        time = step_time(find_model("llama-3.2-1b"), replace(BASE, precision="fp32", **changes), H200)
        return float(time.parts["optimizer"])

    assert update(optimizer_kernel="fused") < update(optimizer_kernel="foreach")
    assert update(optimizer="sgd") < update(optimizer="momentum") < update(optimizer="adamw") < update(optimizer="muon")
    assert update(optimizer="adamw-8bit") < update(optimizer="adamw")


def test_tensors_that_are_updated_one_by_one_take_the_host_longer() -> None:
    small = replace(BASE, seq=128, micro_batch=1)
    assert seconds(replace(small, optimizer_kernel="loop"), model="gpt2") > 1.3 * seconds(small, model="gpt2")


@pytest.mark.truth
def test_adapters_in_fp32_cost_more_than_frozen_weights_save() -> None:
    # A Llama of 1 B on an H200: 168.7 ms in full, 226.4 ms with adapters of rank 16, which PEFT keeps in FP32.
    base = replace(BASE, micro_batch=4)
    adapted = replace(base, lora_rank=16, precision="bf16-mixed")
    assert seconds(adapted) / seconds(base) == pytest.approx(226.4 / 168.7, rel=0.08)


def test_adapters_are_as_wide_as_parameters() -> None:
    wide, narrow = (replace(BASE, micro_batch=4, lora_rank=16, precision=name) for name in ("bf16-mixed", "bf16"))
    assert seconds(narrow) < 0.8 * seconds(wide)


def test_fewer_targets_take_less_time() -> None:
    every, two = (replace(BASE, lora_rank=16, lora_targets=parse_targets(t)) for t in ("all-linear", "q_proj,v_proj"))
    assert seconds(two) < seconds(every)


def test_a_base_in_few_bits_is_made_wide_for_every_product() -> None:
    # Forward and backward, and in between where blocks are recomputed, all but the closing matrix.
    def added(**choices: Any) -> float:
        plain = replace(BASE, micro_batch=8, lora_rank=16, **choices)
        return seconds(replace(plain, base="nf4-single")) - seconds(plain)

    weights = find_model("llama-3.2-1b").decoder.parameters
    # Reading half a byte and writing two is the least that it takes.
    assert added() > 2 * weights * 2.5625 / H200.gpu.bandwidth_bytes_per_s
    assert added(checkpoint="full") == pytest.approx(1.4 * added(), rel=0.05)


def test_offload_costs_what_crosses_the_link() -> None:
    shape, cluster = find_model("llama-3.1-8b"), find_cluster("h200")

    def offload(**places: Any) -> float:
        time = step_time(shape, Configuration(zero=3, framework="deepspeed", **places), cluster)
        return float(time.parts["offload"])

    assert offload() == 0
    back_s = 2 * shape.parameters / (64e9 * calibration().host_link_ceiling)
    assert offload(optimizer_place="host") > back_s
    assert offload(optimizer_place="nvme") > offload(optimizer_place="host")
    assert offload(parameter_place="nvme") > offload(parameter_place="host")
    # A pass of a long sequence hides the parameters' way in.
    assert offload(parameter_place="host", micro_batch=8) == 0


def test_a_layer_launches_what_transformers_was_seen_to_launch() -> None:
    """A Llama of 1 B, 4 × 2048 in BF16: 38 kernels forward and 75 backward."""
    model = find_model("llama-3.2-1b")
    calls = LayerLaunches(model, replace(BASE, micro_batch=4), find_gpu("h200")).layer(model.stacks[0].layers[0], 2048)
    forward = sum(call.times for call in (*calls.products, *calls.attention, *calls.others) if call.launch)
    backward = sum(call.times for call in (*calls.backward, *calls.attention_backward) if call.launch)
    assert (forward, backward) == (38, 75)
    shapes = {call.launch.shape[1:] for call in calls.products if call.launch}
    assert shapes == {(8192, 2048, 2048), (8192, 512, 2048), (8192, 8192, 2048), (8192, 2048, 8192)}


@pytest.mark.truth
@pytest.mark.parametrize(
    ("config", "batch", "seq", "measured_s"),
    [({"model_type": "bert", "vocab_size": 30522}, 16, 512, 0.0883), ({"model_type": "vit"}, 64, 197, 0.0899)],
)
def test_compiled_encoders_take_attention_apart(
    config: dict[str, Any], batch: int, seq: int, measured_s: float
) -> None:
    """Of 24 layers, on an H200: PyTorch widens their attention to FP32, which takes half of the step."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    configuration = replace(BASE, precision="bf16", compile=True, optimizer_kernel="fused", micro_batch=batch, seq=seq)
    time = step_time(from_config(config | sizes, "encoder"), configuration, find_cluster("h200"))
    assert float(time.total_s) == pytest.approx(measured_s, rel=0.1)


@pytest.mark.truth
def test_autocast_multiplies_one_expert_after_the_other() -> None:
    """A small Mixtral, 4 × 512, on an H200: 127.7 ms, and with BF16 parameters, which have a kernel for all experts, far less."""
    config = {
        "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000,
    }  # fmt: skip
    shape, cluster = from_config(config, "mixtral"), find_cluster("h200")
    narrow = replace(BASE, micro_batch=4, seq=512)
    apart = step_time(shape, replace(narrow, precision="bf16-mixed"), cluster)
    assert float(apart.total_s) == pytest.approx(0.1277, rel=0.1)
    assert float(step_time(shape, narrow, cluster).total_s) < 0.6 * float(apart.total_s)


def test_fp32_with_few_heads_of_keys_has_no_fused_attention() -> None:
    sizes = {
        "hidden_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
        "vocab_size": 100,
    }
    few, all_of_them = (
        step_time(
            from_config({"model_type": "llama", "num_key_value_heads": heads} | sizes, "llama"),
            replace(BASE, precision="fp32", micro_batch=4, seq=4096), find_cluster("h200"),
        )
        for heads in (4, 12)
    )  # fmt: skip
    assert float(few.total_s) > 1.1 * float(all_of_them.total_s)


def test_blocks_are_recomputed_while_the_card_is_busy_with_others() -> None:
    """Checkpoints cost the host much, and one that is behind the card anyway costs nothing but its kernels."""
    large = replace(BASE, micro_batch=1, checkpoint="full")
    parts = step_time(find_model("llama-3.1-8b"), replace(large, seq=2048), find_cluster("h200")).parts
    assert float(parts["recompute"]) < 1.05 * float(parts["forward"])


def test_a_lower_power_limit_slows_arithmetic_down() -> None:
    cluster, configuration = find_cluster("h200"), replace(BASE, micro_batch=8)
    limited = replace(cluster, gpu=replace(cluster.gpu, power_w=400))
    shape = find_model("llama-3.1-8b")
    assert float(step_time(shape, configuration, limited).total_s) > 1.1 * float(
        step_time(shape, configuration, cluster).total_s
    )


def test_python_around_split_products_takes_the_host_longer() -> None:
    """nanotron calls dozens of operators for them: a small micro-batch waits for the host, however far it is split."""

    def pass_s(tp: int) -> float:
        configuration = replace(BASE, framework="nanotron", attention="flash-2", micro_batch=1, seq=1024, tp=tp)
        parts = step_time(find_model("llama-3.2-3b"), configuration, find_cluster(f"{tp}xh100")).parts
        return float(parts["forward"] + parts["backward"])

    assert pass_s(4) > 1.5 * pass_s(1)
    assert pass_s(8) == pytest.approx(pass_s(4), rel=0.1)


def test_a_pipeline_that_waits_for_the_card_has_no_lead() -> None:
    """nanotron's stages read what they receive; Megatron's go on."""

    def slower(framework: str) -> float:
        one, two = (
            step_time(
                find_model("llama-3.2-1b"),
                replace(BASE, framework=framework, seq=512, pp=pp, accumulate=64),
                find_cluster(f"{pp}xh100"),
            )
            for pp in (1, 2)
        )
        return float(two.parts["forward"] / one.parts["forward"])

    assert slower("nanotron") > slower("megatron")


@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpoints_cost_what_they_save(compiled: bool) -> None:
    """Megatron's and nanotron's run attention again and save its scores; others' save more than half and pay more for it."""
    choices = replace(BASE, compile=compiled, seq=8192)
    times = {
        framework: step_time(
            find_model("llama-3.1-8b"), replace(choices, framework=framework, checkpoint="selective"), H200
        )
        for framework in ("torch", "fsdp2", "megatron", "nanotron")
    }
    share = {name: float(time.parts["recompute"] / time.parts["forward"]) for name, time in times.items()}
    assert min(share["torch"], share["fsdp2"]) > 0.25
    assert max(share["megatron"], share["nanotron"]) < 0.2


def test_megatron_adds_gradients_up_within_the_products_that_make_them() -> None:
    """Only the embedding's are added apart: a thirteenth of this model's."""

    def sums(framework: str) -> float:
        configuration = replace(BASE, precision="bf16-mixed", framework=framework, zero=0)
        steps = (step_time(find_model("llama-3.1-8b"), replace(configuration, accumulate=n), H200) for n in (1, 9))
        one, many = (float(time.parts["optimizer"]) for time in steps)
        return (many - one) / 8

    assert 0 < sums("megatron") < 0.1 * sums("nanotron")
