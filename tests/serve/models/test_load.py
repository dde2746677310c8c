"""Checkpoints in every layout that files have, the ones that are not whole, and what loading holds in memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from serve.families import CASES as FAMILIES
from serve.families import random_prompts
from serve.models.tiny import CASES, Pages, expected_logits, make_model, prompts, save, transformers
from tonnage.errors import BadModel, RequestError, UnknownModel
from tonnage.serve import Engine, Sampling
from tonnage.serve.config import EngineConfig, Weights
from tonnage.serve.models.architecture import architecture_of, read_architecture
from tonnage.serve.models.decoder import Decoder
from tonnage.serve.models.load import load_decoder, random_decoder, share_decoder
from tonnage.serve.models.weights import EIGHT_BIT, Builder, quantise


def _load(folder: Path, dtype: torch.dtype = torch.float32, weights: Weights | None = None) -> Decoder:
    return load_decoder(folder, read_architecture(folder), device="cpu", dtype=dtype, weights=weights)


def _assert_equal(decoder: Decoder, model: transformers.PreTrainedModel, tolerance: float = 1e-4) -> None:
    given = list(prompts(seed=3, count=2))
    pages = Pages(decoder, given)
    pages.run()
    for sequence, prompt in zip(pages.sequences, given, strict=True):
        expected = expected_logits(model, prompt)
        torch.testing.assert_close(torch.stack(sequence.logits), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe_some"])
def test_experts_as_one_tensor(case: str, tmp_path: Path) -> None:
    model = make_model(case)
    save(model, tmp_path, save_original_format=False)
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    _assert_equal(_load(tmp_path), model)


def test_one_file_from_the_bare_model_of_a_tied_one(tmp_path: Path) -> None:
    model = make_model("llama_tied_llama3")
    model.model.save_pretrained(tmp_path)
    assert "layers.0.input_layernorm.weight" in load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    _assert_equal(_load(tmp_path), model)


def test_the_language_part_of_a_model_that_sees(tmp_path: Path) -> None:
    text = make_model("gemma3").config
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    config.image_token_index = text.vocab_size - 1
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    language = transformers.AutoModelForCausalLM.from_config(text, attn_implementation="eager").eval()
    language.model.load_state_dict(model.model.language_model.state_dict())
    language.tie_weights()
    _assert_equal(_load(tmp_path), language)


@pytest.mark.parametrize("case", ["llama_biases", "gemma2", "qwen3"])
def test_double_precision_comes_closer(case: str, tmp_path: Path) -> None:
    model = make_model(case).double()
    _assert_equal(_load(save(model, tmp_path), torch.float64), model, tolerance=5e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", EIGHT_BIT)
def test_eight_bits_are_of_the_layers_matrices_alone(case: str, kind: Weights, tmp_path: Path) -> None:
    model = make_model(case)
    decoder = _load(save(model, tmp_path), weights=kind)
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() > 1 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight"))
        if matrix:
            weight, scales = torch.empty(parameter.shape, dtype=EIGHT_BIT[kind]), torch.empty(parameter.shape[:-1])
            quantise(parameter.data, weight, scales)
            parameter.data = weight.float() * scales[..., None]
    _assert_equal(decoder, model)
    plain = random_decoder(decoder.architecture, "cpu", torch.float32)
    assert decoder.weight_bytes < 0.7 * plain.weight_bytes


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda held: held.pop("model.layers.1.self_attn.k_proj.weight"), r"lacks model\.layers\.1\.self_attn\.k_proj"),
        (lambda held: [held.pop(name) for name in list(held) if "mlp" in name], "and 5 more"),
        (lambda held: held.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}), r"layers\.0\.self_attn\.q_norm"),
        (lambda held: held.update({"lm_head.weight": torch.ones(95, 32)}), r"lm_head\.weight has the shape \[95, 32\]"),
        (lambda held: held.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), r"norm\.weight is kept as int8"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_another_models_is_refused_by_tensor(change: Change, named: str, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    change(held)
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match=named) as caught:
        _load(tmp_path)
    assert caught.value.hint


def test_tensors_that_are_no_weights_are_passed_over(tmp_path: Path) -> None:
    model = make_model("llama_tied_llama3")
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    other = {"lm_head.weight": torch.ones(96, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**held, **other}, tmp_path / "model.safetensors")
    _assert_equal(_load(tmp_path), model)


def test_folders_without_weights_or_with_too_many(tmp_path: Path) -> None:
    model = make_model("llama")
    model.config.save_pretrained(tmp_path)
    with pytest.raises(BadModel, match=r"no \.safetensors"):
        _load(tmp_path)
    save(model, tmp_path)
    (tmp_path / "model-00001-of-00010.safetensors").rename(tmp_path / "lost.bin")
    with pytest.raises(BadModel, match="1 of 10 shards"):
        _load(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(BadModel, match=r"9 \.safetensors files and no"):
        _load(tmp_path)


def test_a_preset_has_no_weights() -> None:
    with pytest.raises(UnknownModel, match="no folder gemma-2-2b"):
        load_decoder("gemma-2-2b", read_architecture("gemma-2-2b"), device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("case", ["qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize("kind", [None, "int8"])
def test_random_weights_are_those_of_their_seed(case: str, kind: Weights | None) -> None:
    shape = architecture_of(make_model(case).config.to_dict())
    decoders = [random_decoder(shape, "cpu", torch.bfloat16, seed, kind) for seed in (0, 0, 1)]
    logits = []
    for decoder in decoders:
        pages = Pages(decoder, [[1, 2, 3, 4, 5, 6]])
        pages.run()
        logits.append(torch.stack(pages.sequences[0].logits))
    assert logits[0].isfinite().all() and logits[0].std() > 0
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


_PEAK = """
import sys, torch
from pathlib import Path
from tonnage.serve.models.architecture import read_architecture
from tonnage.serve.models.load import load_decoder

def peak_bytes():
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

folder, weights = Path(sys.argv[1]), sys.argv[2] or None
shape = read_architecture(folder)
load_decoder(sys.argv[3], read_architecture(sys.argv[3]), device="cpu", dtype=torch.bfloat16, weights=weights)  # to warm up
Path("/proc/self/clear_refs").write_text("5")
before = peak_bytes()
decoder = load_decoder(folder, shape, device="cpu", dtype=torch.bfloat16, weights=weights)
print(peak_bytes() - before, decoder.weight_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("weights", ["", "int8"])
def test_loading_never_holds_the_model_twice(weights: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    _write(tmp_path / "big", {**config, "num_hidden_layers": 12, "vocab_size": 64})
    _write(tmp_path / "small", {**config, "num_hidden_layers": 1, "vocab_size": 64})
    command = [sys.executable, "-c", _PEAK, str(tmp_path / "big"), weights, str(tmp_path / "small")]
    # By default malloc raises this threshold as it goes, and keeps some of the freed matrices on its heap.
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=settings)
    peak_bytes, weight_bytes = map(int, run.stdout.split())
    assert weight_bytes > 150e6
    assert 0.9 * weight_bytes < peak_bytes < 1.1 * weight_bytes


def _write(folder: Path, config: dict[str, object]) -> None:
    """A checkpoint with a shard for each tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    build = Builder(torch.device("meta"), torch.bfloat16, None)
    Decoder(architecture_of(config), build, positions=8)
    for name, piece in build.pieces.items():
        save_file({name: torch.ones(piece.weight.shape, dtype=torch.bfloat16)}, folder / f"{name}.safetensors")
    placed = {name: f"{name}.safetensors" for name in build.pieces}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


TOKENS = 8
SETTINGS = EngineConfig(blocks=40, block=4, context=64, max_seqs=4, batched_tokens=32)
GREEDY = Sampling(max_tokens=TOKENS, temperature=0, ignore_eos=True)


def reference(model: nn.Module, prompt: list[int]) -> list[int]:
    """What transformers generates, greedily and token by token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def check(engine: Engine, model: nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    answers = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    assert answers == [reference(model, prompt) for prompt in prompts]
    return answers


def train(model: nn.Module, steps: int = 2) -> None:
    """Enough that greedy tokens change."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    tokens = torch.arange(2, 26).view(2, 12)
    for _ in range(steps):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("case", FAMILIES)
def test_tokens_after_an_update_are_those_of_transformers(case: str) -> None:
    model = make_model(case)
    engine, prompts = Engine.of_module(model, settings=SETTINGS), random_prompts(3, 3, longest=20)
    before = check(engine, model, prompts)
    engine.sleep()
    train(model)
    engine.wake()
    assert check(engine, model, prompts) != before


def test_prefixes_of_old_weights_are_forgotten_without_sleep() -> None:
    model, prompts = make_model("qwen3"), random_prompts(3, 3, longest=20)
    engine = Engine.of_module(model, settings=SETTINGS)
    check(engine, model, prompts)
    train(model)
    engine.refresh()
    check(engine, model, prompts)


def test_there_is_one_copy_of_the_weights() -> None:
    model = make_model("qwen3")
    decoder = share_decoder(model)
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    assert sum(storages.values()) == decoder.weight_bytes == sum(one.nbytes for one in set(model.parameters()))
    assert decoder.blocks[0].qkv.weight.untyped_storage().data_ptr() in storages
    assert all(one.is_contiguous() for one in model.parameters())


def test_sleep_frees_the_cache_and_takes_no_requests() -> None:
    engine = Engine.of_module(make_model("llama"), settings=SETTINGS)
    size = engine.runner.cache.pages.nbytes
    assert size == engine.runner.cache.size_bytes > 0
    engine.sleep()
    assert engine.runner.cache.pages.nbytes == 0 and not engine.runner.cache.layers
    with pytest.raises(RequestError, match="asleep"):
        engine.submit([1, 2, 3], GREEDY)
    engine.wake()
    engine.wake()
    assert engine.runner.cache.pages.nbytes == size


def test_a_busy_engine_does_not_sleep() -> None:
    engine = Engine.of_module(make_model("llama"), settings=SETTINGS)
    engine.submit([1, 2, 3], GREEDY)
    with pytest.raises(RequestError, match="still has sequences"):
        engine.sleep()


def test_adapters_are_served_once_they_are_merged() -> None:
    import peft

    base = make_model("qwen3")
    prompts = random_prompts(3, 3, longest=20)
    plain = [reference(base, prompt) for prompt in prompts]
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    engine = Engine.of_module(model, settings=SETTINGS)
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == plain
    model.merge_adapter()
    engine.refresh()
    assert check(engine, model, prompts) != plain
    model.unmerge_adapter()


def test_weights_that_cannot_be_shared_are_named() -> None:
    model = make_model("llama")
    model.model.layers[1].self_attn.q_proj = nn.Linear(8, 8)
    with pytest.raises(BadModel, match=r"layers\.1\.self_attn\.q_proj\.weight"):
        share_decoder(model)
