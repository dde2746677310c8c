"""Causes in the memory of the host."""

from support import training_run
from tonnage.explain import diagnose
from tonnage.recording.host import HostMemory, HostMoment
from tonnage.units import GIB


def a_run(**parts):
    recording = training_run()
    recording.host = HostMemory(phases=(HostMoment(phase="setup", line="train.py:3", parts=parts),))
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
