"""Tiny models of every family as transformers makes them, and pages to run one's decoder over in pieces."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from torch import Tensor

# Before transformers' classes are looked up.
import torchvision_names  # noqa: F401
from tonnage.budget.serving.own_engine import FAMILIES
from tonnage.models.presets import all_presets, preset_config
from tonnage.serve.batch import Batch, LayerCache
from tonnage.serve.models.decoder import Decoder

SERVED = [
    name
    for name in all_presets()
    if preset_config(name).get("model_type") in FAMILIES
    and str(preset_config(name)["architectures"][0]).endswith(("ForCausalLM", "ForConditionalGeneration"))
]
VOCAB = 96
BLOCK = 4
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0}
_GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}
_LOCAL = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
          "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}  # fmt: skip

# A case's name, its family, and what is not common to all.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "num_key_value_heads": 4}),
    "llama_tied_llama3": ("llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}}),
    "llama_dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}}),
    "llama_yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral_whole": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2_windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma": ("gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", {**_GEMMA, "sliding_window": 6, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
                          "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**_GEMMA, "sliding_window": 6, "num_hidden_layers": 3, "sliding_window_pattern": 2,
                               "query_pre_attn_scalar": 24, "rope_parameters": _LOCAL}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe_some": ("qwen3_moe", {**_EXPERTS, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
}  # fmt: skip


def make_model(case: str, **changes: Any) -> transformers.PreTrainedModel:
    """The case's model with random weights, norms and biases included: in FP32, attention written out."""
    family, fields = CASES[case]
    config = transformers.AutoConfig.for_model(family, **{**_COMMON, **fields, **changes})
    torch.manual_seed(sum(case.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def save(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> Path:
    """As several shards."""
    model.save_pretrained(folder, **{"max_shard_size": "12KB", **options})
    return folder


def expected_logits(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Of every position, by transformers."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)], device=model.device)).logits[0].double()


@dataclass
class Paged:
    """One sequence on pages, and the logits of every position computed so far."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)


class Pages:
    """A cache with blocks in random order, and steps that compute any pieces of some sequences in one pass."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]], seed: int = 0) -> None:
        self.decoder = decoder
        self.random = Random(seed)
        counts = [-(-len(prompt) // BLOCK) for prompt in prompts]
        free = list(range(1, sum(counts) + 1))
        self.random.shuffle(free)
        self.sequences = [Paged(list(p), [free.pop() for _ in range(n)]) for p, n in zip(prompts, counts, strict=True)]
        self.layers = [self._layer(sum(counts) + 1) for _ in decoder.architecture.layers]

    def _layer(self, blocks: int) -> LayerCache:
        shape = self.decoder.architecture
        pages = torch.full((2, blocks, BLOCK, shape.kv_heads, shape.head_dim), torch.nan, dtype=self.decoder.dtype)
        return LayerCache(pages[0].to(self.decoder.device), pages[1].to(self.decoder.device))

    def run(self) -> None:
        """Compute everything in steps of random pieces: of one token as decodes, of more as chunks."""
        while unfinished := [s for s in self.sequences if s.computed < len(s.tokens)]:
            chosen = self.random.sample(unfinished, self.random.randint(1, len(unfinished)))
            self.step([(s, self.random.choice([1, 1, self.random.randint(1, 9)])) for s in chosen])

    def step(self, pieces: Sequence[tuple[Paged, int]]) -> None:
        """Compute the next so many tokens of some sequences."""
        pieces = [(sequence, min(count, len(sequence.tokens) - sequence.computed)) for sequence, count in pieces]
        decodes = [piece for piece in pieces if piece[1] == 1]
        chunks = [piece for piece in pieces if piece[1] > 1]
        logits = self.decoder.forward(self.batch(decodes, chunks), self.layers)
        rows = iter(logits)
        for sequence, count in (*decodes, *chunks):
            sequence.logits.extend(next(rows).double() for _ in range(count))
            sequence.computed += count
        assert next(rows, None) is None

    def batch(self, decodes: Sequence[tuple[Paged, int]], chunks: Sequence[tuple[Paged, int]]) -> Batch:
        """The next tokens of some sequences, one of each in `decodes`; every row draws."""
        device = self.decoder.device
        rows = [*decodes, *chunks]
        positions = [s.computed + i for s, count in rows for i in range(count)]
        owners = [s for s, count in rows for _ in range(count)]
        columns = max(len(s.blocks) for s, _ in rows)
        starts = [0]
        for _, count in chunks:
            starts.append(starts[-1] + count)
        whole = {"dtype": torch.int64, "device": device}
        half = {"dtype": torch.int32, "device": device}
        return Batch(
            token_ids=torch.tensor([s.tokens[p] for s, p in zip(owners, positions, strict=True)], **whole),
            positions=torch.tensor(positions, **whole),
            slots=torch.tensor(
                [s.blocks[p // BLOCK] * BLOCK + p % BLOCK for s, p in zip(owners, positions, strict=True)], **whole
            ),
            decodes=len(decodes),
            tables=torch.tensor([s.blocks + [0] * (columns - len(s.blocks)) for s, _ in rows], **half),
            lengths=torch.tensor([s.computed + count for s, count in rows], **half),
            chunk_starts=torch.tensor(starts, **half),
            longest_chunk=max((count for _, count in chunks), default=0),
            samples=torch.arange(len(positions), **whole),
        )


def prompts(seed: int, count: int = 3, shortest: int = 1, longest: int = 40) -> Iterator[list[int]]:
    """Random tokens of random lengths."""
    random = Random(seed)
    for _ in range(count):
        yield [random.randrange(VOCAB) for _ in range(random.randint(shortest, longest))]
