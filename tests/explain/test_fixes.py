import pytest

from support import MIB, Run, training_run
from tonnage.allocator import OutOfMemory
from tonnage.explain import Fix, advise
from tonnage.ledger import Category
from tonnage.recording import Recording


def fixes_of(recording: Recording) -> dict[str, Fix]:
    return {fix.change: fix for fix in advise(recording).fixes}


def test_half_the_batch_saves_half_of_what_is_computed_from_it() -> None:
    recording = training_run(batch=32, layers=12)
    fix = fixes_of(recording)["half the batch"]
    halved = training_run(batch=16, layers=12)
    assert fix.saves_bytes == pytest.approx(recording.peak_allocated_bytes - halved.peak_allocated_bytes, rel=0.01)
    assert fix.how == "--batch 16"
    assert fix.rescues is None


@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        (("--batch", "8"), "--batch 4"),
        (("--per_device_train_batch_size=6",), "--per_device_train_batch_size=3"),
        (("--lr", "8", "-bs", "2"), "-bs 1"),
        (("--batch", "1"), "and accumulate gradients over two"),
        ((), "and accumulate gradients over two"),
    ],
)
def test_the_change_of_batch_is_the_script_s_own_flag(arguments: tuple[str, ...], how: str) -> None:
    recording = training_run()
    recording.header.arguments = arguments
    assert fixes_of(recording)["half the batch"].how == how


def test_a_batch_of_one_cannot_be_halved() -> None:
    assert "half the batch" not in fixes_of(training_run(batch=1))


def test_chunked_loss_is_offered_where_the_vocabulary_is_wide() -> None:
    recording = training_run(batch=16)
    logits = sum(a.block_bytes for a in recording.live_at_peak if a.shape and a.shape[-1] == 50304)
    fix = fixes_of(recording)["chunked loss"]
    assert 0.5 * logits < fix.saves_bytes < logits
    run = Run()
    run.alloc(50 * MIB, Category.ACTIVATIONS, shape=(25600, 1024), dtype="bfloat16")
    assert "chunked loss" not in fixes_of(run.recording)


def test_recomputing_keeps_one_output_a_block() -> None:
    layers, batch = 12, 32
    recording = training_run(batch=batch, layers=layers)
    each = batch * 1024 * 4096 * 2
    saved = layers * 3 * each - layers * each
    assert fixes_of(recording)["recompute 12 blocks"].saves_bytes == pytest.approx(saved, rel=0.01)


def test_recomputing_needs_more_than_one_block() -> None:
    assert not any("recompute" in change for change in fixes_of(training_run(layers=1)))


def test_a_second_peak_limits_what_a_change_saves() -> None:
    run = Run()
    run.phase("forward")
    run.free(run.alloc(100 * MIB, Category.ACTIVATIONS, shape=(64, 409600), dtype="float32"))
    run.phase("optimizer")
    run.free(run.alloc(90 * MIB, Category.OPTIMIZER_STATES, dtype="float32"))
    assert fixes_of(run.recording)["half the batch"].saves_bytes == 10 * MIB


def test_a_fused_optimizer_saves_the_temporary_lists() -> None:
    run = Run()
    run.phase("optimizer")
    states = run.alloc(40 * MIB, Category.OPTIMIZER_STATES, operator="_foreach_lerp_")
    temporary = run.alloc(20 * MIB, Category.WORKSPACE, operator="_foreach_sqrt")
    run.free(temporary, states)
    fix = fixes_of(run.recording)["fused optimizer"]
    assert (fix.saves_bytes, fix.how) == (20 * MIB, "fused=True in the optimizer")


def test_gradients_that_live_through_forward_are_found() -> None:
    run = Run()
    gradient = None
    for _ in range(2):
        run.phase("forward")
        saved = run.alloc(100 * MIB, Category.ACTIVATIONS, dtype="bfloat16")
        run.phase("backward")
        run.free(saved)
        gradient = gradient or run.alloc(50 * MIB, Category.GRADIENTS)
        run.phase("optimizer")
        run.free(run.alloc(2 * MIB))
    assert fixes_of(run.recording)["free gradients between steps"].saves_bytes == 50 * MIB


def test_gradients_that_accumulate_are_left_alone() -> None:
    run = Run()
    gradient = None
    for _ in range(2):
        run.phase("forward")
        saved = run.alloc(100 * MIB, Category.ACTIVATIONS, dtype="bfloat16")
        run.phase("backward")
        run.free(saved)
        gradient = gradient or run.alloc(50 * MIB, Category.GRADIENTS)
    run.phase("optimizer")
    run.free(gradient)
    assert "free gradients between steps" not in fixes_of(run.recording)


def test_autocast_is_offered_to_trainings_in_float32_only() -> None:
    run = Run(training={"optimizers": "torch.optim.AdamW"})
    run.alloc(4 * MIB, Category.PARAMETERS, dtype="float32", shape=(1024, 1024))
    run.phase("forward")
    run.alloc(100 * MIB, Category.ACTIVATIONS, dtype="float32", operator="linear", shape=(25600, 1024))
    run.alloc(60 * MIB, Category.ACTIVATIONS, dtype="float32", operator="native_layer_norm", shape=(15360, 1024))
    run.phase("backward")
    # The norm keeps its input in 32 bits: nothing is gained there, and the weight has a copy.
    assert "autocast to bfloat16" not in fixes_of(run.recording)
    run.phase("forward")
    run.alloc(100 * MIB, Category.ACTIVATIONS, dtype="float32", operator="gelu", shape=(25600, 1024))
    run.alloc(100 * MIB, Category.ACTIVATIONS, dtype="float32", operator="linear", shape=(25600, 1024))
    run.alloc(100 * MIB, Category.ACTIVATIONS, dtype="float32", operator="relu", shape=(25600, 1024))
    fresh = Recording(run.header, run.recording.allocations, run.recording.segments, run.recording.marks)
    # Half of the last product and of what follows it, and a copy in place of its input; two copies of the weight remain.
    assert fixes_of(fresh)["autocast to bfloat16"].saves_bytes == (3 * 50 - 2 * 2) * MIB
    run.alloc(2 * MIB, Category.ACTIVATIONS, dtype="bfloat16")
    mixed = Recording(run.header, run.recording.allocations, run.recording.segments, run.recording.marks)
    assert "autocast to bfloat16" not in fixes_of(mixed)


def test_eight_bit_states_leave_counters_alone() -> None:
    run = Run()
    for _ in range(2):
        run.alloc(40 * MIB, Category.OPTIMIZER_STATES, dtype="float32")
        run.alloc(512, Category.OPTIMIZER_STATES, dtype="float32")
    scales = 2 * 40 * MIB // 256
    assert fixes_of(run.recording)["8-bit optimizer states"].saves_bytes == 60 * MIB - scales


def fragmented(settings: str = "") -> Recording:
    """A cached segment that a small block pins: what is left of it and of the card would be enough together."""
    run = Run(capacity_bytes=200 * MIB, settings=settings)
    run.free(run.alloc(100 * MIB))
    run.alloc(40 * MIB, Category.PARAMETERS)
    try:
        run.alloc(120 * MIB)
    except OutOfMemory as error:
        return run.dies(error, line="train.py:5")
    return run.recording


def test_expandable_segments_are_tried_through_the_allocator() -> None:
    recording = fragmented()
    assert recording.header.outcome == "oom"
    fix = fixes_of(recording)["expandable segments"]
    assert fix.how == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    recording.header.torch_modelled = "2.8.0"  # which reads the variable of the older name alone
    assert fixes_of(recording)["expandable segments"].how == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    expandable = fragmented("expandable_segments:True")
    assert fix.rescues is True
    assert expandable.header.outcome == "ok"


def test_expandable_segments_are_not_offered_twice() -> None:
    recording = training_run(batch=32, layers=12)
    assert "expandable segments" in fixes_of(recording)
    recording.header.settings = "expandable_segments:True"
    assert "expandable segments" not in fixes_of(recording)


def test_what_rescues_comes_first_and_is_true() -> None:
    advice = advise(training_run(batch=64, layers=12, gpu="t4"))
    rescues = [fix.rescues for fix in advice.fixes]
    assert rescues == sorted(rescues, reverse=True)
    assert rescues[0]
    assert advice.larger_card == "v100-16"


def test_what_no_card_holds_has_no_larger_card() -> None:
    run = Run("b200")
    with pytest.raises(OutOfMemory) as caught:
        run.alloc(2**40)
    advice = advise(run.dies(caught.value, line="train.py:1"))
    assert advice.larger_card is None


def test_a_small_run_needs_no_advice() -> None:
    run = Run()
    run.alloc(512)
    assert advise(run.recording) == advise(Run().recording)
    assert advise(run.recording).fixes == ()


def test_a_block_that_is_recomputed_is_whole_for_a_while() -> None:
    run = Run()
    run.phase("forward")
    saved = [run.alloc(100 * MIB, Category.ACTIVATIONS, module=f"layers.{i // 3}.{i % 3}") for i in range(6)]
    run.phase("backward")
    run.free(*reversed(saved))
    first_output, whole_second_block = 100 * MIB, 300 * MIB
    assert fixes_of(run.recording)["recompute 2 blocks"].saves_bytes == 600 * MIB - first_output - whole_second_block
