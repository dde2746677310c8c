"""A tiny model on disk, as a person would have one: a random Llama with a tokenizer of its own and a chat template."""

from pathlib import Path

import torchvision_names  # noqa: F401

# isort: split
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|end|>"
CORPUS = (
    "the quick brown fox jumps over the lazy dog and runs away from the old house",
    "how much can this ship carry, and what is the fastest way to make it fit?",
    "über Straßen und Brücken, ça va très bien, 你好世界, 🚢🚢 tonnage",
)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and loop.first %}{{ raise_exception('the user speaks first') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = [EOS, "<|user|>", "<|system|>", "<|assistant|>"]


def byte_level_tokenizer(*, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """As in Llama 3 and Qwen: every byte has a token, so that any text goes there and back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, chat_template=template)


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As in Llama 2 and Mistral: a space is part of a word, and what has no token is written in bytes."""
    pieces = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("▁" + "abcdefghijklmnopqrstuvwxyz,.?"))
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *letters, "▁th", "th"])}
    merges = [("t", "h"), ("▁", "th")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


def make_llama(folder: Path, *, layers: int = 2, hidden: int = 32, context: int = 256, tokenizer: bool = True) -> Path:
    """A folder with config.json, model.safetensors and, if wanted, a tokenizer."""
    import torch

    torch.manual_seed(0)
    words = byte_level_tokenizer()
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    if tokenizer:
        words.save_pretrained(folder)
    return folder
