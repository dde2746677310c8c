import pytest

from tonnage.explain.text import TextDiagnosis, explain_text

TRACE = (
    'Traceback (most recent call last):\n  File "train.py", line 12, in train\n    {code}\n'
    '  File "{file}", line 3, in {function}\n'
)


def explained(text: str) -> TextDiagnosis:
    return explain_text(text.splitlines())


def message(asked: str, total: str, free: str, allocated: str, unallocated: str, rest: str = "") -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of "
        f"which {free} is free. {rest}Of the allocated memory {allocated} is allocated by PyTorch, and {unallocated} is "
        "reserved by PyTorch but unallocated."
    )


def causes(found: TextDiagnosis) -> dict[str, str]:
    return {suspect.cause: suspect.certainty for suspect in found.causes}


def test_other_processes_are_certain_where_they_hold_most_of_the_card() -> None:
    this = "Including non-PyTorch memory, this process has 10.00 GiB memory in use. "
    held = "Process 7 has 60.00 GiB memory in use. "
    found = explained(message("20.00 MiB", "79.15 GiB", "5.75 MiB", "9.00 GiB", "100.00 MiB", held + this))
    assert (found.first.cause, found.first.certainty) == ("other-process", "certain")
    assert "60.00 GiB" in found.first.sentence and any("would have fitted" in words for words in found.proves)
    little = held.replace("60.00 GiB", "600.00 MiB")
    full = this.replace("10.00", "78.50")
    found = explained(message("20.00 MiB", "79.15 GiB", "5.75 MiB", "77.00 GiB", "1.00 GiB", little + full))
    assert found.first.cause == "capacity" and "other-process" not in causes(found)


def test_what_is_left_over_belongs_to_others_but_is_not_certain() -> None:
    found = explained(
        "RuntimeError: CUDA out of memory. Tried to allocate 60.00 MiB (GPU 0; 11.17 GiB total capacity; 505.96 MiB already "
        "allocated; 12.50 MiB free; 530.00 MiB reserved in total by PyTorch)"
    )
    assert (found.first.cause, found.first.certainty) == ("other-process", "likely")
    assert any("do not list processes" in words for words in found.unproved)


def test_fragmentation_needs_unused_memory_that_would_have_been_enough() -> None:
    found = explained(message("1.00 GiB", "23.69 GiB", "100.00 MiB", "14.00 GiB", "8.00 GiB"))
    assert (found.first.cause, found.first.certainty) == ("fragmentation", "likely")
    assert any("expandable_segments" in step for step in found.steps)
    found = explained(message("1.00 GiB", "23.69 GiB", "100.00 MiB", "21.70 GiB", "300.00 MiB"))
    assert "fragmentation" not in causes(found)
    assert any("not fragmentation" in words for words in found.proves)


def test_rounding_decides_nothing() -> None:
    """9.99 and 10.00 GiB may be the same."""
    found = explained(message("10.00 GiB", "23.69 GiB", "0 bytes", "12.00 GiB", "10.00 GiB"))
    assert causes(found).get("fragmentation") != "certain"
    assert not any("unused" in words for words in found.proves)


def test_a_limit_of_its_own_is_certain_where_the_card_had_room() -> None:
    found = explained(message("2.00 GiB", "79.15 GiB", "60.00 GiB", "7.00 GiB", "1.00 GiB", "8.50 GiB allowed; "))
    assert (found.first.cause, found.first.certainty) == ("own-limit", "certain")


def test_memory_that_was_free_was_not_what_was_short() -> None:
    found = explained(message("86.00 MiB", "16.00 GiB", "7.19 GiB", "7.36 GiB", "40.00 MiB"))
    assert found.first.cause == "refused" and found.first.certainty == "likely"


def test_one_tensor_larger_than_the_card_cannot_fit() -> None:
    found = explained(message("64.00 GiB", "10.92 GiB", "10.11 GiB", "240.92 MiB", "43.08 MiB"))
    assert (found.first.cause, found.first.certainty) == ("one-tensor", "certain")


def test_nothing_freed_yet_is_loading_unless_a_step_was_running() -> None:
    full = message("172.00 MiB", "23.65 GiB", "154.06 MiB", "22.99 GiB", "10.00 MiB")
    assert explained(full).first.cause == "weights"
    forward = TRACE.format(code="loss = model(batch)", file="model.py", function="forward")
    assert explained(forward + full).first.cause == "capacity"


@pytest.mark.parametrize(
    ("file", "function", "code", "cause"),
    [
        ("/site-packages/torch/optim/adamw.py", "_init_group", "optimizer.step()", "optimizer"),
        ("/site-packages/transformers/loss/loss_utils.py", "ForCausalLMLoss", "trainer.train()", "logits"),
        ("/site-packages/diffusers/models/attention_processor.py", "get_attention_scores", "pipe(prompt)", "attention"),
        ("/site-packages/torch/nn/modules/module.py", "convert", "model.to(device)", "weights"),
        ("/site-packages/torch/serialization.py", "_cuda_deserialize", "torch.load(path)", "checkpoint"),
        ("/site-packages/transformers/trainer_pt_utils.py", "nested_concat", "trainer.evaluate()", "evaluation"),
        (
            "/site-packages/torch/distributed/fsdp/_state_dict_utils.py",
            "_full_state_dict",
            "trainer.save()",
            "checkpoint",
        ),
        ("/site-packages/vllm/worker/cache_engine.py", "_allocate_kv_cache", "LLM(model)", "kv-cache"),
    ],
)
def test_the_failing_line_names_the_cause(file: str, function: str, code: str, cause: str) -> None:
    full = message("2.00 GiB", "23.69 GiB", "1.00 GiB", "21.00 GiB", "500.00 MiB")
    found = explained(TRACE.format(code=code, file=file, function=function) + full)
    assert (found.first.cause, found.first.certainty) == (cause, "likely")
    assert "train.py:12" in found.first.sentence


def test_evaluation_is_a_cause_where_training_had_gone_well() -> None:
    trace = TRACE.format(code="validate(model)", file="train.py", function="validate")
    assert (
        explained(trace + message("200.00 MiB", "11.17 GiB", "5.00 MiB", "10.00 GiB", "400.00 MiB")).first.cause
        == "evaluation"
    )


def test_a_log_whose_memory_only_climbs_tells_of_a_leak() -> None:
    climbing = "\n".join(f"Epoch [1][{step}/900] loss: 0.5, memory: {5000 + 30 * step}" for step in range(50, 250, 50))
    climbing += "\nEpoch [1][250/900] loss: 0.5, memory: 13000\n"
    full = message("20.00 MiB", "15.78 GiB", "5.00 MiB", "14.00 GiB", "400.00 MiB")
    assert causes(explained(climbing + full))["leak"] == "likely"
    steady = climbing.replace("13000", "5000")
    assert "leak" not in causes(explained(steady + full))


def test_the_driver_without_numbers_is_never_sure() -> None:
    plain = "RuntimeError: CUDA error: out of memory"
    assert {suspect.certainty for suspect in explained(plain).causes} == {"possible"}
    loading = TRACE.format(code="model.cuda()", file="/site-packages/torch/nn/modules/module.py", function="cuda")
    assert explained(loading + plain).first.cause == "other-process"
    running = TRACE.format(code="loss.backward()", file="/site-packages/torch/_tensor.py", function="backward")
    assert explained(running + plain).first.cause == "capacity"
