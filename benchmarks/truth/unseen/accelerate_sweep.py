"""Internal benchmark: several small LMs one after another in one process, with Accelerate; memory table at the end."""

try:
    import torchvision_stub  # noqa: F401
except ImportError:
    pass
import argparse
import gc
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, release_memory, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, Gemma2Config, MambaConfig, OPTConfig, PhiConfig, Qwen3MoeConfig


@dataclass(frozen=True)
class Entry:
    name: str
    config: object
    batch: int
    seq: int


ZOO = {
    "qwen3_moe": Entry(
        "qwen3_moe",
        Qwen3MoeConfig(
            hidden_size=1024,
            intermediate_size=2816,
            moe_intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            num_experts=16,
            num_experts_per_tok=2,
            vocab_size=50000,
        ),
        8,
        512,
    ),
    "gemma2": Entry(
        "gemma2",
        Gemma2Config(
            hidden_size=1152,
            intermediate_size=6912,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            vocab_size=100000,
            sliding_window=256,
        ),
        8,
        512,
    ),
    "mamba": Entry("mamba", MambaConfig(hidden_size=768, num_hidden_layers=4, vocab_size=50280), 4, 128),
    "opt": Entry(
        "opt",
        OPTConfig(
            hidden_size=1024, ffn_dim=4096, num_hidden_layers=12, num_attention_heads=16, word_embed_proj_dim=1024
        ),
        8,
        512,
    ),
    "phi": Entry(
        "phi", PhiConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=16), 8, 512
    ),
}


class Tokens(Dataset):
    def __init__(self, n, seq, vocab):
        self.x = torch.randint(0, vocab, (n, seq), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i]}


def bench(entry, scale, accumulate, precision):
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=accumulate)
    torch.cuda.reset_peak_memory_stats()

    @find_executable_batch_size(starting_batch_size=entry.batch * scale)
    def inner(batch_size):
        accelerator.free_memory()
        print(entry.name, "trying", batch_size)
        set_seed(0)
        model = AutoModelForCausalLM.from_config(entry.config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        loader = DataLoader(Tokens(batch_size * 4, entry.seq, entry.config.vocab_size), batch_size)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        value = accelerator.gather(loss.detach()).mean().item()
        model, optimizer, loader = release_memory(model, optimizer, loader)
        return value

    value = inner()
    return value, torch.cuda.max_memory_allocated() / 2**30


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["opt", "phi"])
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--precision", default="bf16")
    args = parser.parse_args()
    table = {}
    for name in args.models or ["opt", "phi"]:
        table[name] = bench(ZOO[name], args.scale, args.accumulate, args.precision)
        gc.collect()
        torch.cuda.empty_cache()
    for name, (loss, gib) in table.items():
        print(f"{name:10} {loss:8.3f} {gib:6.2f} GiB")
