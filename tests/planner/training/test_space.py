"""The space: every layout is one, every flag that was given is kept."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.training.request import NO_OFFLOAD, Offload, TrainingRequest
from tonnage.planner.training.space import CHECKPOINTS, layouts, passes, recomputes_less, searches, shardings

OPEN = TrainingRequest(seq=4096)


@settings(max_examples=30)
@given(gpus=st.sampled_from([1, 2, 6, 8, 16, 64, 256]), seq=st.sampled_from([1024, 4096, 5000]))
def test_every_layout_uses_all_gpus_and_every_batch_is_the_step(gpus: int, seq: int) -> None:
    cluster = find_cluster(f"{gpus}xh100")
    request = TrainingRequest(seq=seq)
    rows = layouts(find_model("mixtral-8x7b"), cluster, request)
    assert (rows.tp * rows.pp * rows.cp * rows.data == gpus).all()
    assert (rows.micro_batch * rows.accumulate * rows.data == request.step_sequences(gpus)).all()
    assert (rows.tp * rows.cp * rows.data % rows.ep == 0).all()
    assert (rows.data % rows.shard == 0).all()
    assert (32 % rows.tp == 0).all() and (8 % rows.ep == 0).all() and (seq % rows.cp == 0).all()
    numbers = np.stack([getattr(rows, name) for name in rows.__slots__], axis=1)
    assert len({tuple(row) for row in numbers.tolist()}) == len(numbers)


def test_flags_that_were_given_are_kept() -> None:
    request = TrainingRequest(
        seq=4096, tp=2, pp=2, micro_batch=4, global_batch=32, zero=3, checkpoint="full", loss="full"
    )
    rows = layouts(find_model("llama-3.1-8b"), find_cluster("16xh100"), request)
    assert set(rows.tp) == {2} and set(rows.pp) == {2} and set(rows.micro_batch) == {4}
    assert {one.configuration.zero for one in shardings(request, rows, NO_OFFLOAD)} == {3}
    assert passes(request, NO_OFFLOAD) == [("full", "full")]


def test_interleaved_stages_take_micro_batches_by_the_round() -> None:
    request = TrainingRequest(seq=4096, pp=4, tp=1, cp=1, pp_chunks=2, framework="megatron", global_batch=96)
    rows = layouts(find_model("llama-3.1-8b"), find_cluster("8xh100"), request)
    assert set(rows.accumulate) == {48, 24, 16, 12, 8, 4}
    chosen = next(shardings(request, rows, NO_OFFLOAD))
    assert chosen.running("none", "full").configuration.pp_chunks == 2


def test_a_micro_batch_alone_makes_a_step_of_one_pass() -> None:
    request = TrainingRequest(seq=4096, micro_batch=4)
    rows = layouts(find_model("llama-3.1-8b"), find_cluster("h200"), request)
    assert rows.micro_batch.tolist() == [4]
    assert rows.accumulate.tolist() == [1]


def test_what_needs_least_comes_first() -> None:
    assert passes(OPEN, NO_OFFLOAD)[0] == ("full", "chunked")
    assert len(passes(OPEN, NO_OFFLOAD)) == 2 * len(CHECKPOINTS)


def test_one_gpu_has_nothing_to_shard() -> None:
    rows = layouts(find_model("llama-3.1-8b"), find_cluster("h200"), OPEN)
    assert {one.configuration.zero for one in shardings(OPEN, rows, NO_OFFLOAD)} == {0}
    asked = TrainingRequest(seq=4096, zero=3)
    assert {one.configuration.zero for one in shardings(asked, rows, NO_OFFLOAD)} == {3}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"framework": "fsdp2"}, {(2, "fsdp2", 32), (3, "fsdp2", 8), (3, "fsdp2", 32)}),
        ({"framework": "fsdp2", "zero": 2, "shard": 4}, {(2, "fsdp2", 4)}),
        ({"framework": "torch"}, {(0, "torch", 1), (1, "torch", 32)}),
        ({"framework": "nanotron"}, {(0, "nanotron", 1), (1, "nanotron", 32)}),
        ({"shard": 16, "zero": 3}, {(3, "fsdp2", 16), (3, "deepspeed", 16)}),
        ({"zero": 3}, {(3, "fsdp2", 32), (3, "fsdp2", 8), (3, "deepspeed", 32)}),
    ],
)
def test_who_trains_and_how_many_share_may_be_said(asked: dict[str, object], found: set[tuple[int, str, int]]) -> None:
    request = TrainingRequest(seq=4096, tp=1, pp=1, cp=1, **asked)
    rows = layouts(find_model("llama-3.1-8b"), find_cluster("32xh100"), request)
    kinds = {
        (one.configuration.zero, one.configuration.framework, int(shard))
        for one in shardings(request, rows, NO_OFFLOAD)
        for shard in set(one.configuration.shard)
    }
    assert kinds == found


def test_hybrid_sharding_is_within_hosts() -> None:
    rows = layouts(find_model("llama-3.1-8b"), find_cluster("32xh100"), OPEN)
    flat = (rows.tp == 1) & (rows.cp == 1) & (rows.pp == 1)
    assert set(rows.shard[flat]) == {8, 32}


@pytest.mark.parametrize(
    ("offload", "stages"),
    [
        (Offload(optimizer="host"), {2, 3}),
        (Offload(optimizer="host", parameters="host"), {3}),
        (Offload(parameters="host"), {3}),
        (Offload(optimizer="host", activations="host"), {2, 3}),
        (Offload(activations="host"), {0, 1, 2, 3}),
        (NO_OFFLOAD, {0, 1, 2, 3}),
    ],
)
def test_what_leaves_the_gpu_goes_with_the_stage_that_shards_it(offload: Offload, stages: set[int]) -> None:
    rows = layouts(find_model("llama-3.1-8b"), find_cluster("8xh100"), OPEN)
    assert {one.configuration.zero for one in shardings(OPEN, rows, offload)} == stages


def test_drives_are_deepspeed_s() -> None:
    rows = layouts(find_model("llama-3.1-8b"), find_cluster("8xh100"), OPEN)
    found = list(shardings(OPEN, rows, Offload(optimizer="nvme", parameters="nvme")))
    assert {one.configuration.framework for one in found} == {"deepspeed"}
    degrees = [
        (one.configuration.tp, one.configuration.pp, one.configuration.cp, one.configuration.ep) for one in found
    ]
    assert all(np.max(degree) == 1 for each in degrees for degree in each)


def tried(request: TrainingRequest) -> list[set[Offload]]:
    return [
        {one.offload for one in found}
        for found in searches(find_model("llama-3.1-8b"), find_cluster("8xh100"), request)
    ]


def test_offload_is_the_last_resort_unless_it_was_asked_for() -> None:
    first, *later = tried(OPEN)
    assert first == {NO_OFFLOAD} and len(later) == 2 and not any(NO_OFFLOAD in choices for choices in later)
    asked = Offload(optimizer="host")
    assert tried(TrainingRequest(seq=4096, offload=asked)) == [{asked}]
    assert len(tried(TrainingRequest(seq=4096, drives=False))) == 2


def test_every_set_of_things_can_go_to_the_host() -> None:
    _, host, drives = tried(OPEN)
    assert len(host) == 7 and Offload(parameters="host") in host
    assert all(places.optimizer == "nvme" for places in drives)


def test_fsdp2_offloads_parameters_with_their_states_or_neither() -> None:
    rows = layouts(find_model("llama-3.1-8b"), find_cluster("8xh100"), OPEN)
    both, alone = Offload(optimizer="host", parameters="host"), Offload(optimizer="host")
    assert {one.configuration.framework for one in shardings(OPEN, rows, both)} == {"fsdp2", "deepspeed"}
    assert {one.configuration.framework for one in shardings(OPEN, rows, alone)} == {"deepspeed"}
    asked = TrainingRequest(seq=4096, offload=alone, tp=2)
    rows = layouts(find_model("llama-3.1-8b"), find_cluster("8xh100"), asked)
    assert {one.configuration.framework for one in shardings(asked, rows, alone)} == {"fsdp2"}


@pytest.mark.parametrize(
    ("way", "other", "less"),
    [
        (("none", "full"), ("selective", "full"), True),
        (("none", "full"), ("none", "chunked"), True),
        (("none", "chunked"), ("every-2", "full"), False),
        (("every-8", "full"), ("every-2", "full"), True),
        (("every-2", "full"), ("every-8", "full"), False),
        (("selective", "full"), ("every-2", "full"), False),
        (("every-8", "full"), ("selective", "full"), False),
        (("selective", "chunked"), ("full", "chunked"), True),
    ],
)
def test_ways_to_recompute_are_partly_ordered(way: Any, other: Any, less: bool) -> None:
    assert recomputes_less(way, other) is less


def test_optimizers_without_a_fused_kernel_run_as_foreach() -> None:
    rows = layouts(find_model("llama-3.1-8b"), find_cluster("h200"), OPEN)
    for optimizer, kernel in (("adamw", "fused"), ("lion", "foreach")):
        request = TrainingRequest(seq=4096, optimizer=optimizer)  # type: ignore[arg-type]
        sharding = next(shardings(request, rows, NO_OFFLOAD))
        assert sharding.running("none", "full").configuration.optimizer_kernel == kernel
