"""Causes in the memory of the host."""

from support import training_run
from tonnage.explain import diagnose
from tonnage.recording import ClusterSummary, RankSummary
from tonnage.recording.cluster import WholeModel
from tonnage.recording.host import HostGroup, HostMoment, HostPeaks
from tonnage.units import GIB


def a_run(**parts):
    recording = training_run()
    recording.host = HostPeaks(phases=(HostMoment(phase="setup", line="train.py:3", parts=parts),))
    return recording


def finding(recording):
    return next((found for found in diagnose(recording).evidence if found.rule == "host-memory"), None)


def test_a_checkpoint_beside_its_model_is_told_with_what_to_do():
    found = finding(a_run(parameters=5 * GIB, checkpoint=5 * GIB))
    assert "the checkpoint (5.00 GiB) lies beside the model that it is copied into (5.00 GiB)" in found.sentence
    assert found.cause is None
    assert found.fixes[0].saves_bytes == 5 * GIB
    assert "mmap=True" in found.fixes[0].how


def test_workers_that_copy_the_data_are_told():
    assert "data loader workers hold 3.00 GiB" in finding(a_run(workers=3 * GIB)).sentence


def test_a_host_that_is_too_small_is_the_cause():
    diagnosis = diagnose(a_run(parameters=9000 * GIB))
    assert diagnosis.cause == "host-memory"
    assert diagnosis.sentence.startswith("The host's memory: the host needs 8.79 TiB at train.py:3")


def test_what_cannot_be_spared_is_not_told():
    assert finding(a_run(parameters=5 * GIB, python=GIB)) is None
    assert finding(training_run()) is None


def a_rank(rank, *, engine="DDP", copies=8, whole=10 * GIB, **parts):
    return RankSummary(
        rank=rank, stands_for=(rank,), outcome="ok", host_bytes=sum(parts.values()), host_parts=parts,
        whole_model=WholeModel(engine, whole, copies),
    )  # fmt: skip


def a_host(*ranks):
    return ClusterSummary(
        words="", gpu="h200", gpu_name="", capacity_bytes=1, gpus=len(ranks), hosts=1, gpus_per_host=len(ranks),
        outcome="ok", exit_status=0, ranks=ranks,
    )  # fmt: skip


def host_finding(recording, summary):
    return next((found for found in diagnose(recording, summary).evidence if found.rule == "host-memory"), None)


def test_eight_ranks_that_each_load_the_whole_model_are_told():
    summary = a_host(*(a_rank(rank, parameters=10 * GIB, python=GIB) for rank in range(8)))
    found = host_finding(a_run(parameters=10 * GIB, python=GIB), summary)
    assert found.sentence == (
        "a host with 8 ranks needs 88.00 GiB at train.py:3; "
        "8 ranks each hold the whole model, 80.00 GiB in all, and DDP needs it on one"
    )
    assert found.cause is None
    assert found.fixes[0].saves_bytes == 70 * GIB
    assert "device_map={'': local_rank}" in found.fixes[0].how


def test_a_host_too_small_for_its_ranks_is_the_cause():
    summary = a_host(*(a_rank(rank, parameters=400 * GIB, whole=400 * GIB) for rank in range(8)))
    diagnosis = diagnose(a_run(parameters=400 * GIB), summary)
    assert diagnosis.cause == "host-memory" and "and has 2.00 TiB" in diagnosis.sentence
    assert diagnosis.fixes[0].change == "load the model on one rank (host)"


def test_what_to_do_is_said_in_the_engine_s_words():
    for engine, said in {
        "FSDP": "sync_module_states=True",
        "fully_shard": "broadcast_from_rank0=True",
        "DeepSpeed": "zero.Init()",
    }.items():
        summary = a_host(*(a_rank(rank, engine=engine, parameters=10 * GIB) for rank in range(8)))
        assert said in host_finding(a_run(parameters=10 * GIB), summary).fixes[0].how
    recording = a_run(parameters=10 * GIB)
    recording.header.training = {"trainer": "accelerate"}
    summary = a_host(*(a_rank(rank, engine="fully_shard", parameters=10 * GIB) for rank in range(8)))
    assert "fsdp_cpu_ram_efficient_loading" in host_finding(recording, summary).fixes[0].how


def test_copies_are_counted_only_where_each_is_the_whole_model():
    recording = a_run(parameters=10 * GIB)
    one = a_host(a_rank(0, parameters=10 * GIB), *(a_rank(rank, python=GIB) for rank in range(1, 8)))
    parts = a_host(*(a_rank(rank, parameters=GIB) for rank in range(8)))  # such as shards that stay on the host
    unknown = a_host(*(a_rank(rank, whole=0, copies=0, parameters=10 * GIB) for rank in range(8)))
    for summary in (one, parts, unknown):
        assert host_finding(recording, summary) is None
    stages = a_host(*(a_rank(rank, copies=2, parameters=10 * GIB) for rank in range(8)))
    assert host_finding(recording, stages).fixes[0].saves_bytes == 10 * GIB


def test_a_checkpoint_twice_as_wide_as_its_model_is_beside_it_too():
    assert "lies beside the model" in finding(a_run(parameters=5 * GIB - 1, checkpoint=10 * GIB)).sentence


def test_a_checkpoint_that_is_held_on_into_training_is_told():
    recording = training_run()
    parts = {"parameters": 5 * GIB, "checkpoint": 5 * GIB, "optimizer_states": 10 * GIB}
    recording.host = HostPeaks(phases=(HostMoment(phase="optimizer", step=2, line="train.py:9", parts=parts),))
    found = finding(recording)
    assert "the checkpoint (5.00 GiB) is still held in step 2" in found.sentence
    assert found.fixes[0].how == "del the checkpoint once it is loaded"


def test_pinned_blocks_at_the_host_s_peak_come_with_their_lines_and_what_to_do():
    recording = training_run()
    recording.header.pinned_host_bytes = 4 * GIB
    group = HostGroup("pinned", "train.py:5", "_pin_memory", 2, 4 * GIB)
    moment = HostMoment(phase="data", step=1, parts={"pinned": 4 * GIB}, largest=(group,))
    recording.host = HostPeaks(phases=(moment,))
    found = next(found for found in diagnose(recording).evidence if found.rule == "pinned-host")
    assert found.lines[0].line == "train.py:5"
    assert found.fixes[0].saves_bytes == 4 * GIB and "prefetch_factor" in found.fixes[0].how
