"""Decoders on a real GPU: BF16 logits as near to the truth as transformers', captured graphs, and memory while loading."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from serve.models.tiny import Pages, expected_logits, make_model, prompts, save
from tonnage.serve.config import Weights
from tonnage.serve.models.architecture import architecture_of, read_architecture
from tonnage.serve.models.decoder import Decoder
from tonnage.serve.models.load import load_decoder, random_decoder
from tonnage.serve.models.weights import EIGHT_BIT, ExpertStack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DENSE = ["llama_biases", "llama_tied_llama3", "mistral", "qwen2_windows", "qwen3", "gemma", "gemma2", "gemma3"]
SPARSE = ["mixtral", "qwen3_moe_some"]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}


def _logits(decoder: Decoder, given: list[list[int]]) -> Tensor:
    pages = Pages(decoder, given)
    pages.run()
    return torch.cat([torch.stack(sequence.logits) for sequence in pages.sequences])


@pytest.mark.parametrize("case", DENSE)
def test_bf16_logits_are_as_near_to_the_truth_as_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = make_model(case, **SIZES).bfloat16().cuda()
    folder = save(model, tmp_path, max_shard_size="1MB")
    given = list(prompts(seed=5, count=4, longest=100))
    ours = _logits(load_decoder(folder, read_architecture(folder), device="cuda", dtype=torch.bfloat16), given)
    theirs = torch.cat([expected_logits(model, prompt) for prompt in given])
    truth = torch.cat([expected_logits(model.double().cpu(), prompt) for prompt in given]).cuda()
    assert (theirs - truth).norm() < 0.1 * truth.norm()
    assert (ours - truth).norm() <= 1.5 * (theirs - truth).norm()


@pytest.mark.parametrize("case", SPARSE)
def test_experts_are_near_the_truth_where_routes_agree(case: str, tmp_path: Path) -> None:
    model = make_model(case, **SIZES).bfloat16().cuda()
    folder = save(model, tmp_path, max_shard_size="1MB")
    given = list(prompts(seed=5, count=4, longest=100))
    ours = _logits(load_decoder(folder, read_architecture(folder), device="cuda", dtype=torch.bfloat16), given)
    theirs = torch.cat([expected_logits(model, prompt) for prompt in given])
    apart = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
    # A token that is torn between two experts may take the other one; few are.
    assert apart.median() < 0.03


@pytest.mark.parametrize("ends", [[0, 300, 300, 512], [512] * 4, [0, 0, 0, 512], [7, 8, 200, 512]])
def test_the_grouped_product_is_that_of_experts_in_turn(ends: list[int]) -> None:
    rows = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4, 64, 256, device="cuda", dtype=torch.bfloat16)
    borders = torch.tensor(ends, dtype=torch.int32, device="cuda")
    stack = ExpertStack(weight, None, torch.bfloat16)
    stack.grouped = False
    in_turn, stack.grouped = stack(rows, borders, borders), True
    torch.testing.assert_close(stack(rows, borders, borders), in_turn, atol=0.25, rtol=0.02)


@pytest.mark.parametrize("case", [*DENSE, *SPARSE])
@pytest.mark.parametrize("weights", [None, "int8", "fp8"])
def test_a_captured_pass_follows_its_inputs(case: str, weights: Weights | None) -> None:
    shape = architecture_of(make_model(case, **SIZES).config.to_dict())
    decoder = random_decoder(shape, "cuda", torch.bfloat16, weights=weights)
    if not decoder.capturable:
        pytest.skip("experts take turns on this card, and the host reads whose it is")
    given = list(prompts(seed=6, count=4, shortest=9, longest=30))
    eager, captured = Pages(decoder, given), Pages(decoder, given)
    for run in (eager, captured):
        run.step([(sequence, 4) for sequence in run.sequences])
    batch = captured.batch([(sequence, 1) for sequence in captured.sequences], [])
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        decoder.forward(batch, captured.layers)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            logits = decoder.forward(batch, captured.layers)
        for _ in range(4):
            now = captured.batch([(sequence, 1) for sequence in captured.sequences], [])
            for name in ("token_ids", "positions", "slots", "tables", "lengths"):
                getattr(batch, name).copy_(getattr(now, name))
            graph.replay()
            eager.step([(sequence, 1) for sequence in eager.sequences])
            expected = torch.stack([sequence.logits[-1] for sequence in eager.sequences])
            torch.testing.assert_close(logits.double(), expected, atol=1e-2, rtol=1e-2)
            for sequence in captured.sequences:
                sequence.computed += 1


@pytest.mark.parametrize("weights", [None, *EIGHT_BIT])
def test_loading_allocates_the_weights_and_little_else(weights: Weights | None, tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "max_position_embeddings": 128}
    model = make_model("llama", **sizes).bfloat16()
    folder = save(model, tmp_path, max_shard_size="40MB")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    shape = read_architecture(folder)
    decoder = load_decoder(folder, shape, device="cuda", dtype=torch.bfloat16, weights=weights)
    assert decoder.weight_bytes > 100e6
    assert torch.cuda.memory_allocated() - before == pytest.approx(decoder.weight_bytes, rel=0.01)
    assert torch.cuda.max_memory_allocated() - before < 1.2 * decoder.weight_bytes
