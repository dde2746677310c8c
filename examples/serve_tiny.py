"""Make a tiny Llama with random weights and a tokenizer of its own, and let it answer on the CPU. Needs no download.

python examples/serve_tiny.py tiny-llama     # make it in this folder, answer three prompts, show where the memory is
tonnage serve tiny-llama                     # then serve it
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tonnage.report.serve import Load, card_lines, kv_frame
from tonnage.serve import Engine, Sampling

END, ROLES = "<|end|>", ["<|system|>", "<|user|>", "<|assistant|>"]
TEXTS = (
    "how much can this ship carry, and what is the fastest way to make it fit?",
    "the harbour lies in the north, and its cranes move what the old ships bring over the grey sea at night",
    "where did the cargo go, and why did the hold run out of room before the captain had counted every crate?",
)
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 64, 128, 2, 4, 2, 16, 512


def make_model(folder: Path) -> None:
    """A folder as the hub has them: config.json, model.safetensors, tokenizer.json, tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    vocab = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": vocab,
        "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id(END),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(make_weights(vocab), folder / "model.safetensors", metadata={"format": "pt"})


def make_tokenizer() -> Tokenizer:
    """Pieces of words over bytes, as in Llama 3: any text goes there and back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=[END, *ROLES], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def make_weights(vocab: int) -> dict[str, torch.Tensor]:
    """Random numbers under the names that checkpoints have."""
    torch.manual_seed(0)
    attention, mlp = "model.layers.{}.self_attn.{}_proj.weight", "model.layers.{}.mlp.{}_proj.weight"
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            attention.format(layer, part): (size, HIDDEN)
            for part, size in zip("qkv", (queries, keys, keys), strict=True)
        }
        shapes |= {attention.format(layer, "o"): (HIDDEN, queries), mlp.format(layer, "down"): (HIDDEN, WIDE)}
        shapes |= {mlp.format(layer, part): (WIDE, HIDDEN) for part in ("gate", "up")}
        shapes |= {f"model.layers.{layer}.{part}_layernorm.weight": (HIDDEN,) for part in ("input", "post_attention")}
    drawn = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    # Single bytes come first; as faint as this, they are seldom drawn, and the model speaks in pieces of words.
    drawn["model.embed_tokens.weight"][:260] *= 0.1
    return {name: (1 + tensor if "norm" in name else tensor).bfloat16() for name, tensor in drawn.items()}


def main() -> None:
    """Make it, ask it, look at its memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("tiny-llama"))
    folder = parser.parse_args().folder
    make_model(folder)

    engine = Engine(folder, device="cpu", budget="64 MiB")
    prompts = ["how much can this ship carry", "the captain counted every crate at night and", [300, 301, 302]]
    for output in engine.generate(prompts, Sampling(max_tokens=12, temperature=0)):
        print(f"{len(output.prompt_token_ids):>3} tokens → {output.text!r} ({output.finish_reason})")

    print(*card_lines(engine.card, model=folder.name), sep="\n")
    print(*kv_frame(engine.kv_ledger(), Load()), sep="\n")


if __name__ == "__main__":
    main()
