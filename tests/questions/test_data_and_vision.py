"""Questions about data and vision: docs/questions/data-and-vision.md."""

import pytest

from questions.asking import answer

GIB = 2**30
PACKING = "tonnage plan train llama-3.1-8b --gpus h100 --lora 16 --lengths mean 600 max 4096"


# Q: Can I fine-tune Qwen2.5-VL-7B on one 4090 with the vision tower frozen?
def test_qwen_with_a_frozen_tower_on_a_4090() -> None:
    asked = "tonnage plan train qwen2.5-vl-7b --gpus rtx-4090 --seq 2k --freeze vision"
    adapters, all_of_it = answer(f"{asked} --qlora"), answer(f"{asked} --offload none")
    assert adapters["status"] == 0 and all_of_it["status"] == 1
    # The tower without its merger has 32 layers of 1280 numbers, about 19.7 M parameters each.
    frozen = adapters["model"]["parameters"] - adapters["model"]["trained_parameters"]
    assert frozen == pytest.approx(32 * 19.7e6, rel=0.01)
    # Adapters in the tower, too, need its activations: less fits beside them.
    alone = "--qlora --micro-batch 1 --checkpoint none --loss full --offload none"
    both, tower = answer(f"{asked.removesuffix(' --freeze vision')} {alone}"), answer(f"{asked} {alone}")
    assert tower["best"]["ledger"]["activations_bytes"] < both["best"]["ledger"]["activations_bytes"]


# Q: What does LLaVA stage 1 (projector only) take?
def test_llava_with_the_projector_alone() -> None:
    found = answer("tonnage plan train llava-1.5-7b --gpus a100-40 --seq 2k --freeze all-but-projector")
    trained = 1024 * 4096 + 4096 * 4096 + 2 * 4096
    assert found["model"]["trained_parameters"] == trained
    ledger = found["best"]["ledger"]
    # 16 bits for what is frozen, 32 for what is trained, and two states of 32.
    assert ledger["parameters_bytes"] == pytest.approx(
        2 * (found["model"]["parameters"] - trained) + 4 * trained, rel=1e-3
    )
    assert ledger["optimizer_bytes"] == 8 * trained
    assert found["status"] == 0


# Q: How many images per batch fit for ViT-L/16 on a 3090?
def test_images_of_a_vision_transformer_on_a_3090() -> None:
    asked = "tonnage plan train vit-large --gpus rtx-3090 --offload none"
    assert answer(f"{asked} --checkpoint none --micro-batch 96")["status"] == 0
    assert answer(f"{asked} --checkpoint none --micro-batch 112")["status"] == 1
    assert answer(f"{asked} --checkpoint full --micro-batch 512")["status"] == 0
    # With the class token a picture of 224 pixels has 14 × 14 + 1 tokens.
    assert answer(f"{asked} --micro-batch 96")["best"]["config"]["seq"] == 197


# Q: Will packing help my data (mean 600, max 4096)?
def test_packing_trains_more_samples() -> None:
    found = answer(PACKING)["lengths"]
    speeds = {row["batching"]: row["samples_per_s"] for row in found["batchings"]}
    assert speeds["pack"] > 1.5 * speeds["pad"]
    # Packs of 4096 tokens leave almost nothing free, for most samples are far shorter.
    packed = answer(f"{PACKING} --batching pack")
    assert packed["lengths"]["share_padding"] < 0.02
    assert packed["best"]["sequences_per_s"] == pytest.approx(speeds["pack"])


# Q: How much memory does padding waste?
def test_what_padding_takes() -> None:
    asked = f"{PACKING} --checkpoint full --loss chunked --micro-batch 8"
    padded, free = answer(asked), answer(f"{asked} --batching padding-free")
    assert padded["lengths"]["worst_tokens"] == 8 * 4096
    # Eight samples of 600 tokens in the mean rarely come to half of that.
    assert 8 * 600 < free["lengths"]["worst_tokens"] < 0.5 * 8 * 4096
    kept = [found["best"]["ledger"]["activations_bytes"] for found in (padded, free)]
    assert kept[0] / kept[1] == pytest.approx(8 * 4096 / free["lengths"]["worst_tokens"], rel=0.1)


# Q: What if one sample in a thousand is 32k long?
def test_a_sample_of_32k() -> None:
    asked = "tonnage plan train llama-3.1-8b --gpus h100 --lora 16 --micro-batch 4"
    rare = answer(f"{asked} --lengths 999x600,32k")["lengths"]
    assert rare["worst_tokens"] == 4 * 32768
    assert rare["share_near_worst"] == pytest.approx(1 - 0.999**4)
    # A batch of four in 250 is padded to it.
    longest = 0.996006 * 600 + (1 - 0.996006) * 32768
    assert rare["share_padding"] == pytest.approx(1 - (0.999 * 600 + 0.001 * 32768) / longest, abs=1e-3)
    cut = answer(f"{asked} --lengths 999x600,32k --seq 4k")["lengths"]
    assert (cut["worst_tokens"], cut["share_cut"]) == (4 * 4096, pytest.approx(0.001))


# Q: How long does an epoch over 52k Alpaca samples take on one A100?
def test_an_epoch_of_alpaca() -> None:
    found = answer("tonnage plan train llama-2-7b --gpus a100-80 --lora 16 --lengths mean 120 max 1024 --samples 52k")
    best = found["best"]
    assert best["training_s"] == pytest.approx(52_000 / best["sequences_per_s"], rel=0.01)
    # 4 operations for a parameter and token of adapters' training: at two fifths of 312 Tflop/s that is 1,350 s without padding.
    least = 4 * 6.74e9 * 52_000 * 120 / 312e12
    assert least < best["training_s"] < 3600
    quickest = max(row["samples_per_s"] for row in found["lengths"]["batchings"])
    assert quickest > 1.7 * best["sequences_per_s"]


# Q: What does freezing all but the last layers save?
def test_the_last_layers_alone() -> None:
    asked = "tonnage plan train llama-3.1-8b --gpus h100 --offload none"
    some, all_of_it = answer(f"{asked} --freeze all-but-last-4"), answer(asked)
    assert (some["status"], all_of_it["status"]) == (0, 1)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    trained = 4 * layer + 128_256 * 4096 + 4096
    assert some["model"]["trained_parameters"] == trained
    assert some["best"]["ledger"]["optimizer_bytes"] == 8 * trained
