"""Traffic between GPUs: rings over the right link, and who pays for what."""

from typing import Any

import numpy as np
import pytest

from tonnage.budget.time.collectives import ClusterLinks, traffic
from tonnage.budget.time.roofline import calibration
from tonnage.budget.time.step import StepTime, step_time
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.states import stages
from tonnage.hardware import find_cluster
from tonnage.models import find_model

SHARES = calibration()
GB = 10**9


def step(gpus: str, model: str = "llama-3.1-8b", **choices: Any) -> StepTime:
    choices = {"zero": 3, "framework": "fsdp2", "checkpoint": "full"} | choices
    return step_time(find_model(model), Configuration(**choices), find_cluster(gpus))


def test_a_ring_within_a_host_uses_its_link() -> None:
    network = ClusterLinks(find_cluster("8xh100"), SHARES)
    expected = 7 * (8 * GB / 8 / (450e9 * SHARES.link_ceiling) + SHARES.link_hop_s) + SHARES.link_start_s
    assert float(network.gather_s(8 * GB, 8)) == pytest.approx(expected)
    assert float(network.reduce_s(8 * GB, 8)) == pytest.approx(2 * expected)


def test_one_rank_sends_nothing() -> None:
    network = ClusterLinks(find_cluster("8xh100"), SHARES)
    assert float(network.gather_s(GB, 1)) == 0
    assert float(network.exchange_s(GB, 1)) == 0


def test_between_hosts_every_member_brings_its_network_card() -> None:
    cluster = find_cluster("2x8xh100")
    network = ClusterLinks(cluster, SHARES)
    all_cards, one_card = float(network.gather_s(GB, 16)), float(network.gather_s(GB, 2, stride=8))
    assert all_cards < one_card * 15 / 16 * 2
    slow = cluster.network_bytes_per_s * SHARES.link_ceiling
    assert one_card == pytest.approx(GB / 2 / slow + SHARES.network_hop_s + SHARES.link_start_s)


@pytest.mark.parametrize(("hosts", "measured"), [(4, 229.4), (8, 178.5), (16, 126.7), (32, 77.0), (64, 44.4)])
def test_rings_over_efa_are_as_slow_as_was_measured(hosts: int, measured: float) -> None:
    """Bus bandwidth of all-gathers of 1 GiB in GB/s: the upper edge of the Ultra-Scale Playbook's measurements."""
    ranks, size = 8 * hosts, 2**30
    seconds = float(ClusterLinks(find_cluster(f"{hosts}xp5.48xlarge"), SHARES).gather_s(size, ranks))
    assert size * (ranks - 1) / ranks / seconds / 1e9 == pytest.approx(measured, rel=0.12)


def test_rings_over_infiniband_are_as_slow_as_was_measured() -> None:
    """All-gathers of 2 GB on 256 H100s at 200 GB/s: issue 1218 of NCCL's."""
    seconds = float(ClusterLinks(find_cluster("256xh100"), SHARES).gather_s(2 * 2**30, 256))
    assert 2 * 2**30 * 255 / 256 / seconds / 1e9 == pytest.approx(200, rel=0.12)


def test_trees_reduce_over_many_hosts_in_less_time_than_rings() -> None:
    network = ClusterLinks(find_cluster("512xh100"), SHARES)
    assert float(network.reduce_s(GB, 512)) < float(network.gather_s(GB, 512))
    assert float(network.reduce_s(GB, 8)) == pytest.approx(2 * float(network.gather_s(GB, 8)))


def test_small_messages_take_the_quicker_protocol() -> None:
    network = ClusterLinks(find_cluster("16xh100"), SHARES)
    assert float(network.gather_s(1024, 16)) < 15 * SHARES.network_hop_s


def test_tensor_parallelism_pays_more_across_hosts() -> None:
    near = step("16xh100", tp=8, data=2, shard=2, micro_batch=2)
    far = step("16xh100", tp=16, data=1, shard=1, micro_batch=4)
    share_near, share_far = (float(time.parts["collectives"] / time.total_s) for time in (near, far))
    assert share_far > 1.5 * share_near


def test_sharded_parameters_are_gathered_more_often_the_higher_the_stage() -> None:
    everything = []
    for zero, framework in ((0, "torch"), (2, "fsdp2"), (3, "fsdp2")):
        time = step("64xh100", zero=zero, framework=framework, data=64, shard=64, micro_batch=1, seq=1024)
        everything.append(float(time.parts["collectives"] + time.hidden_s))
    assert everything[1] < everything[2]
    assert all(seconds > 0 for seconds in everything)


def test_large_batches_hide_the_gathers() -> None:
    small = step("64xh100", data=64, shard=64, micro_batch=1, seq=512)
    large = step("64xh100", data=64, shard=64, micro_batch=4, seq=8192)
    assert float(small.parts["collectives"]) > 0.1 * float(small.total_s)
    # What is hidden takes SMs from the arithmetic beside it; the embedding's part has nothing to hide behind.
    taken = SHARES.link_channels / 132 * float(large.hidden_s)
    assert taken < float(large.parts["collectives"]) < 0.03 * float(large.total_s)


def test_hybrid_sharding_gathers_within_a_host() -> None:
    wide = step("512xh100", data=512, shard=512, micro_batch=1, seq=512)
    hybrid = step("512xh100", data=512, shard=8, micro_batch=1, seq=512)
    assert float(hybrid.parts["collectives"] + hybrid.hidden_s) < float(wide.parts["collectives"] + wide.hidden_s)


def test_rings_of_many_ranks_pay_for_their_hops() -> None:
    network = ClusterLinks(find_cluster("1024xh100"), SHARES)
    few, many = (float(network.gather_s(GB, ranks, messages=100)) for ranks in (64, 1024))
    assert many > 5 * few


def test_experts_are_reached_over_the_network() -> None:
    alone = step("16xh100", "mixtral-8x7b", data=16, shard=16, ep=1, micro_batch=8)
    spread = step("16xh100", "mixtral-8x7b", data=16, shard=16, ep=8, micro_batch=8)
    assert float(spread.parts["collectives"]) > 2 * float(alone.parts["collectives"])


def test_long_sequences_hide_the_ring() -> None:
    def exposed(seq: int) -> float:
        time = step("8xh100", cp=8, data=1, shard=1, micro_batch=1, seq=seq)
        return float(time.parts["collectives"] / time.total_s)

    assert exposed(131072) < exposed(8192)


def test_gradients_go_in_buckets() -> None:
    """Of 25 MB or one large tensor each: twice as many layers are twice as many messages, and their hops."""

    def sent(model: str) -> float:
        time = step("256xp5.48xlarge", model, zero=0, framework="torch", data=2048, shard=2048, seq=256)
        return float(time.parts["collectives"] + time.hidden_s)

    assert sent("llama-3.1-8b") > 2 * sent("llama-3.2-1b")


def test_all_cards_wait_for_the_slowest() -> None:
    def forward(gpus: int) -> float:
        return float(step(f"{gpus}xh100", data=gpus, shard=gpus, micro_batch=4).parts["forward"])

    assert 1.01 < forward(8) / forward(1) < 1.03
    assert forward(8) < forward(512) < 1.06 * forward(1)


def test_one_gpu_has_no_collectives() -> None:
    time = step("h100", data=1, shard=1, zero=0, framework="torch")
    assert float(time.parts["collectives"]) == 0
    assert float(time.hidden_s) == 0


def test_a_pipeline_gathers_and_reduces_once_a_step_under_fsdp2() -> None:
    shape, cluster = find_model("llama-3.1-8b"), find_cluster("2x8xh100")
    network = ClusterLinks(cluster, SHARES)
    choices: dict[str, Any] = {"framework": "fsdp2", "pp": 2, "data": 8, "shard": 8, "accumulate": 8}
    for zero, gathers in ((2, 0), (3, 1)):
        configuration = Configuration(zero=zero, **choices)
        sent = traffic(next(stages(shape, configuration)), network)
        assert sent.forward_s == 0
        assert sent.first_forward_s > 0
        assert sent.step_s == pytest.approx(2 * sent.first_forward_s, rel=0.02)  # FP32 beside BF16
        assert sent.backward_s == gathers * sent.first_forward_s


def test_selective_checkpoints_gather_again_what_tensor_parallelism_splits() -> None:
    shape, network = find_model("llama-3.1-8b"), ClusterLinks(find_cluster("8xh100"), SHARES)

    def sent(checkpoint: str, framework: Any) -> float:
        configuration = Configuration(tp=8, framework=framework, checkpoint=checkpoint)
        return float(traffic(next(stages(shape, configuration)), network).plain_s)

    none, selective, full = (sent(way, "torch") for way in ("none", "selective", "full"))
    assert selective - none == pytest.approx((full - none) / 2)
    assert sent("selective", "megatron") == sent("none", "megatron")


@pytest.mark.parametrize(("tp", "data", "copies", "apart"), [(1, 64, 8, 8), (2, 32, 4, 16)])
def test_copies_of_an_expert_lie_apart_and_share_one_network_card(tp: int, data: int, copies: int, apart: int) -> None:
    shape, network = find_model("mixtral-8x7b"), ClusterLinks(find_cluster("8x8xh100"), SHARES)
    configuration = Configuration(framework="fsdp2", zero=3, ep=8, tp=tp, data=data, shard=data)
    stage = next(stages(shape, configuration))
    experts_s = network.gather_s(2 * stage.experts, copies, stride=apart, messages=32)
    others_s = network.gather_s(2 * (stage.dense + stage.outside), data, stride=tp, messages=32)
    assert float(traffic(stage, network).forward_s) == pytest.approx(float(experts_s + others_s))


def test_many_degrees_of_expert_parallelism_at_once_are_as_each_alone() -> None:
    shape, network = find_model("mixtral-8x7b"), ClusterLinks(find_cluster("8x8xh100"), SHARES)
    for framework, zero in (("torch", 0), ("fsdp2", 3), ("deepspeed", 2)):
        many = Configuration(framework=framework, zero=zero, ep=np.array([1, 4, 8]), data=64, shard=64)  # type: ignore[arg-type]
        together = traffic(next(stages(shape, many)), network)
        for place in range(3):
            one = many.at(place)
            alone = traffic(next(stages(shape, one)), network)
            for some, expected in zip(together, alone, strict=True):
                assert float(np.broadcast_to(some, 3)[place]) == pytest.approx(float(expected))
