"""The advice is in the user's words, and none of it is silly."""

import pytest

from support import MIB, Run, training_run
from tonnage.explain import Fix, advise, diagnose
from tonnage.explain.words import batch_of, trains
from tonnage.ledger import Category
from tonnage.recording import Recording

HF = {
    "trainer": "transformers", "arguments": "TrainingArguments", "batch": "10", "eval_batch": "16", "accumulation": "2",
    "library": "transformers", "checkpointing": "gradient_checkpointing_enable", "optimizers": "torch.optim.AdamW",
}  # fmt: skip
LIGHTNING = {"trainer": "lightning", "accumulation": "1", "optimizers": "torch.optim.AdamW"}
ACCELERATE = {"trainer": "accelerate", "accumulation": "4", "optimizers": "torch.optim.Adam"}


def hows(recording: Recording) -> dict[str, str]:
    return {fix.change: fix.how for fix in fixes(recording)}


def fixes(recording: Recording) -> tuple[Fix, ...]:
    return advise(recording).fixes


def trained(training: dict[str, str], gpu: str = "h200", **shape: int) -> Recording:
    """A training whose batch is no flag."""
    recording = training_run(gpu=gpu, training=training, **({"batch": 10, "layers": 6} | shape))
    recording.header.arguments = ()
    return recording


def test_a_trainer_of_transformers_is_spoken_to_in_its_arguments() -> None:
    found = hows(trained(HF))
    assert found["half the batch"] == "TrainingArguments(per_device_train_batch_size=5, gradient_accumulation_steps=4)"
    assert found["recompute 6 blocks"] == "TrainingArguments(gradient_checkpointing=True)"
    assert found["8-bit optimizer states"] == 'TrainingArguments(optim="adamw_8bit")'


def test_trl_has_its_own_class_of_arguments() -> None:
    found = hows(trained(HF | {"trainer": "trl", "arguments": "SFTConfig"}))
    assert found["recompute 6 blocks"] == "SFTConfig(gradient_checkpointing=True)"


def test_a_model_that_cannot_recompute_by_itself_is_not_asked_to() -> None:
    facts = {key: value for key, value in HF.items() if key != "checkpointing"}
    assert hows(trained(facts))["recompute 6 blocks"] == "torch.utils.checkpoint on each layers.*"


def test_lightning_and_accelerate_have_words_of_their_own() -> None:
    found = hows(trained(LIGHTNING))
    assert found["half the batch"] == "batch_size=5 in the DataLoader, Trainer(accumulate_grad_batches=2)"
    assert found["8-bit optimizer states"] == "torchao.optim.AdamW8bit in configure_optimizers"
    found = hows(trained(ACCELERATE))
    assert found["half the batch"] == "batch_size=5 in the DataLoader, Accelerator(gradient_accumulation_steps=8)"
    assert found["8-bit optimizer states"] == "torchao.optim.Adam8bit"


@pytest.mark.parametrize(
    ("library", "method"),
    [("timm", "set_grad_checkpointing"), ("diffusers", "enable_gradient_checkpointing")],
)
def test_a_model_of_a_library_has_its_own_switch(library: str, method: str) -> None:
    found = hows(trained({"library": library, "checkpointing": method}))
    assert found["recompute 6 blocks"] == f"model.{method}()"


def test_a_flag_that_the_script_has_is_the_shortest_way(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("group.add_argument('--grad-checkpointing', action='store_true', default=False)")
    recording = trained({"library": "timm", "checkpointing": "set_grad_checkpointing"})
    recording.header.script = str(script)
    assert hows(recording)["recompute 6 blocks"] == "--grad-checkpointing"
    recording.header.arguments = ("--grad-checkpointing",)
    assert hows(recording)["recompute 6 blocks"] == "model.set_grad_checkpointing()"


def test_a_plain_loop_is_told_of_fit() -> None:
    assert "tonnage.fit" in hows(trained({}))["recompute 6 blocks"]


def float_run(gpu: str = "h200", **training: str) -> Run:
    """A training in float32 with one product that is much."""
    run = Run(gpu, training=training)
    run.phase("forward")
    run.alloc(MIB, Category.INPUTS, dtype="float32", shape=(8, 32768))
    run.alloc(100 * MIB, Category.ACTIVATIONS, dtype="float32", operator="linear", shape=(25600, 1024))
    run.phase("backward")
    return run


@pytest.mark.parametrize(
    ("gpu", "training", "how"),
    [
        ("h200", {}, 'torch.autocast("cuda", dtype=torch.bfloat16)'),
        ("t4", {}, 'torch.autocast("cuda", dtype=torch.float16)'),
        ("h200", HF, "TrainingArguments(bf16=True)"),
        ("t4", HF, "TrainingArguments(fp16=True)"),
        ("h200", LIGHTNING, 'Trainer(precision="bf16-mixed")'),
        ("t4", ACCELERATE, 'Accelerator(mixed_precision="fp16")'),
    ],
)
def test_16_bits_are_those_that_the_card_has(gpu: str, training: dict[str, str], how: str) -> None:
    found = hows(float_run(gpu, **training).recording)
    assert found["autocast to float16" if gpu == "t4" else "autocast to bfloat16"] == how


# Silly advice


def test_momentum_is_no_case_for_8_bit_adam() -> None:
    assert "8-bit optimizer states" not in hows(trained({"optimizers": "torch.optim.SGD"}))
    run = Run()  # a snapshot names no optimizer: momentum has one state of a size, Adam two
    run.alloc(40 * MIB, Category.OPTIMIZER_STATES, dtype="float32")
    assert "8-bit optimizer states" not in hows(run.recording)


def test_an_optimizer_without_a_fused_step_is_left_alone() -> None:
    run = Run(training={"optimizers": "torch.optim.NAdam"})
    run.phase("optimizer")
    run.free(run.alloc(20 * MIB, Category.WORKSPACE, operator="_foreach_sqrt"))
    assert "fused optimizer" not in hows(run.recording)
    run.header.training["optimizers"] = "torch.optim.AdamW"
    assert hows(run.recording)["fused optimizer"] == "torch.optim.AdamW(..., fused=True)"


def test_two_optimizers_do_not_accumulate() -> None:
    found = hows(trained({"optimizers": "torch.optim.Adam", "stepping": "2"}))
    assert found["half the batch"] == "a batch of 5 in the loop"


def test_a_loop_that_generates_does_not_accumulate_gradients() -> None:
    run = Run()
    run.phase("forward")
    run.alloc(MIB, Category.INPUTS, dtype="int64", shape=(8, 16384))
    run.alloc(100 * MIB, Category.KV_CACHE, dtype="bfloat16", shape=(8, 8, 6400, 128))
    assert not trains(run.recording)
    assert hows(run.recording) == {"half the batch": "two calls of half the size"}


def test_one_that_died_while_it_generated_does_not_either() -> None:
    run = Run()
    run.phase("forward")
    run.alloc(100 * MIB, Category.KV_CACHE, dtype="bfloat16", shape=(8, 8, 6400, 128))
    run.header.outcome = "oom"
    assert hows(run.recording)["half the batch"] == "two calls of half the size"


def test_inference_in_float32_is_offered_weights_in_16_bits_and_no_autocast() -> None:
    run = Run(settings="expandable_segments:True")
    run.alloc(100 * MIB, Category.PARAMETERS, dtype="float32", shape=(25600, 1024))
    run.phase("forward")
    run.alloc(512, Category.INPUTS, dtype="int64", shape=(1, 64))
    run.free(run.alloc(20 * MIB, Category.ACTIVATIONS, dtype="float32", operator="linear", shape=(1, 5120, 1024)))
    (fix,) = fixes(run.recording)
    assert (fix.change, fix.saves_bytes, fix.how) == ("weights in bfloat16", 60 * MIB, "model.to(torch.bfloat16)")


@pytest.mark.parametrize(("dtype", "rows"), [("float32", 50304), ("int64", 1024)])
def test_what_is_wide_but_has_no_vocabulary_gets_no_chunked_loss(dtype: str, rows: int) -> None:
    run = Run()
    run.alloc(MIB, Category.PARAMETERS, dtype="float32", shape=(rows, 1024))
    run.phase("forward")
    run.alloc(MIB, Category.INPUTS, dtype=dtype, shape=(8, 16384))
    run.alloc(100 * MIB, Category.ACTIVATIONS, dtype="float32", operator="convolution", shape=(521, 50304))
    run.phase("backward")
    assert "chunked loss" not in hows(run.recording)


def test_stages_have_as_many_blocks_as_they_have() -> None:
    run = Run()
    run.phase("forward")
    saved = []
    for stage, (blocks, each) in enumerate([(3, 40), (4, 20), (6, 10), (3, 5)], 1):
        for block in range(blocks):
            for part in ("conv1", "bn1", "conv2"):
                module = f"layer{stage}.{block}.{part}"
                saved.append(run.alloc(each * MIB, Category.ACTIVATIONS, module=module, dtype="float32"))
    run.phase("backward")
    run.free(*reversed(saved))
    found = hows(run.recording)
    assert found["recompute 16 blocks"].startswith(
        "torch.utils.checkpoint on each layer1.*, layer2.*, layer3.* and layer4.*"
    )


def test_blocks_inside_of_stages_are_what_is_recomputed() -> None:
    run = Run()
    run.phase("forward")
    saved = []
    for stage, (blocks, each) in enumerate([(3, 40), (9, 5)]):
        for block in range(blocks):
            for part in ("norm", "mlp"):
                module = f"stages.{stage}.blocks.{block}.{part}"
                saved.append(run.alloc(each * MIB, Category.ACTIVATIONS, module=module, dtype="float32"))
    run.phase("backward")
    run.free(*reversed(saved))
    assert "stages.*.blocks.*" in hows(run.recording)["recompute 12 blocks"]


def test_a_row_of_single_layers_is_no_row_of_blocks() -> None:
    run = Run()
    run.phase("forward")
    names = [str(i) for i in range(8)] * 2  # called twice, as the critic of a GAN is
    saved = [run.alloc(20 * MIB, Category.ACTIVATIONS, module=name, dtype="float32") for name in names]
    run.phase("backward")
    run.free(*reversed(saved))
    assert not any("recompute" in change for change in hows(run.recording))


def test_nothing_is_recomputed_where_nothing_is_kept() -> None:
    run = Run()
    run.phase("forward")
    for i in range(8):
        run.free(
            *[run.alloc(20 * MIB, Category.ACTIVATIONS, module=f"layers.{i}.mlp", dtype="bfloat16") for _ in range(3)]
        )
    assert not any("recompute" in change for change in hows(run.recording))


def test_an_output_that_nobody_saves_is_kept_all_the_same() -> None:
    run = Run()
    run.phase("forward")
    saved = []
    for i in range(4):
        for part in ("attention", "mlp"):
            saved.append(run.alloc(50 * MIB, Category.ACTIVATIONS, module=f"layers.{i}.{part}", dtype="float32"))
        run.free(run.alloc(30 * MIB, Category.ACTIVATIONS, module=f"layers.{i}", dtype="float32"))
    run.phase("backward")
    run.free(*reversed(saved))
    # Four blocks of two: one is whole in backward, beside the outputs of itself and of those before it.
    (fix,) = [fix for fix in fixes(run.recording) if "recompute" in fix.change]
    assert fix.saves_bytes == 430 * MIB - (2 * 50 + 4 * 30) * MIB


def test_gradients_that_are_cleared_after_the_forward_are_cleared_too_late() -> None:
    run = Run()
    gradient = None
    for _ in range(2):
        run.phase("forward")
        saved = run.alloc(100 * MIB, Category.ACTIVATIONS, dtype="bfloat16")
        if gradient:
            run.free(gradient)
        run.phase("backward")
        run.free(saved)
        gradient = run.alloc(50 * MIB, Category.GRADIENTS)
        run.phase("optimizer")
        run.free(run.alloc(2 * MIB))
    assert (
        hows(run.recording)["free gradients between steps"] == "optimizer.zero_grad() before the forward, not after it"
    )


def test_gradients_of_two_halves_lie_beside_the_second_one_s_activations() -> None:
    recording = trained({})
    recording.header.arguments = ("--batch", "10")
    by_flag = next(fix for fix in fixes(recording) if fix.change == "half the batch")
    recording.header.arguments = ()
    accumulated = next(fix for fix in fixes(recording) if fix.change == "half the batch")
    gradients = sum(a.block_bytes for a in recording.allocations if a.category is Category.GRADIENTS and a.step == 1)
    assert by_flag.saves_bytes - accumulated.saves_bytes == pytest.approx(gradients, rel=0.05)


def test_data_that_was_there_before_is_no_part_of_the_batch() -> None:
    run = Run()
    run.phase("setup")
    run.alloc(500 * MIB, Category.INPUTS, dtype="int64", shape=(64000, 1024))
    run.phase("forward")
    run.alloc(100 * MIB, Category.ACTIVATIONS, dtype="bfloat16", shape=(8, 6400, 1024))
    run.alloc(MIB, Category.INPUTS, dtype="int64", shape=(8, 1024))
    run.phase("backward")
    assert batch_of(run.recording) == 8
    (fix,) = [fix for fix in fixes(run.recording) if fix.change == "half the batch"]
    assert fix.saves_bytes == pytest.approx(50 * MIB, rel=0.02)


def evaluated(*, gathers: bool) -> Run:
    """A training whose evaluation is the peak."""
    run = Run(training=HF, settings="expandable_segments:True")
    run.phase("forward")
    run.free(run.alloc(20 * MIB, Category.ACTIVATIONS, dtype="bfloat16", shape=(10, 1024, 1024)))
    run.phase("backward")
    run.alloc(MIB, Category.PARAMETERS, dtype="bfloat16")
    run.phase("evaluation")
    stack = ("transformers/trainer_pt_utils.py:85",) if gathers else ()
    run.alloc(100 * MIB, Category.ACTIVATIONS, dtype="bfloat16", shape=(16, 64, 51200), stack=stack)
    return run


def test_predictions_that_are_gathered_belong_on_the_host() -> None:
    found = hows(evaluated(gathers=True).recording)
    assert found == {"predictions on the host": "TrainingArguments(eval_accumulation_steps=1)"}


def test_evaluation_has_a_batch_of_its_own() -> None:
    found = hows(evaluated(gathers=False).recording)
    assert found == {"half the batch of evaluation": "TrainingArguments(per_device_eval_batch_size=8)"}


def test_the_trainer_leaves_states_of_embeddings_in_32_bits() -> None:
    plain = trained(LIGHTNING)
    spared = trained(HF | {"embeddings": "50304x1024"})
    saves = [next(fix.saves_bytes for fix in fixes(r) if fix.change.startswith("8-bit")) for r in (plain, spared)]
    assert saves[1] < saves[0] / 2


def attending(*, grouped: bool) -> Recording:
    """Attention without a fused kernel, on the way through PyTorch's function for it."""
    run = float_run()
    stack = ("transformers/integrations/sdpa_attention.py:96",)
    repeated = (8, 4, 4, 512, 64) if grouped else (8, 16, 512, 64)
    run.phase("forward")
    run.alloc(MIB, Category.ACTIVATIONS, dtype="float32", operator="clone", shape=repeated, stack=stack)
    for operator in ("bmm", "_softmax"):
        run.alloc(
            128 * MIB, Category.ACTIVATIONS, dtype="float32", operator=operator, shape=(8, 16, 512, 512), stack=stack
        )
    return run.recording


def test_attention_that_is_fused_in_16_bits_only_is_told_to_use_them_and_nothing_else() -> None:
    grouped = attending(grouped=True)
    saved = next(fix.saves_bytes for fix in fixes(grouped) if fix.change == "autocast to bfloat16")
    assert saved > 2 * 128 * MIB
    assert not any(fix.change == "fused attention" for fix in diagnose(grouped).fixes)


def test_nothing_is_promised_of_attention_that_may_stay_as_it_is() -> None:
    assert "autocast to bfloat16" not in hows(attending(grouped=False))


def test_a_weight_as_large_as_a_table_has_states_of_its_own() -> None:
    facts = HF | {"embeddings": "50304x1024"}
    run = Run(training=facts)
    for _ in range(4):  # a table's two, and those of a projection of its size
        run.alloc(50304 * 4096, Category.OPTIMIZER_STATES, dtype="float32", shape=(50304, 1024))
    (fix,) = fixes(run.recording)
    assert fix.saves_bytes == pytest.approx(2 * 50304 * 1024 * (3 - 4 / 256), rel=0.01)
