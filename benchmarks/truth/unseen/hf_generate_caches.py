"""Compare cache implementations and decoding strategies of `generate`."""

try:
    import torchvision_stub  # noqa: F401
except ImportError:
    pass
import argparse

import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    MistralConfig,
    Qwen3Config,
    StaticCache,
    DynamicCache,
    set_seed,
)

CONFIGS = {
    "qwen3": lambda n: Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=n,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "gemma": lambda n: GemmaConfig(
        hidden_size=2048,
        intermediate_size=16384,
        num_hidden_layers=n,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
    ),
    "mistral": lambda n: MistralConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=n, sliding_window=256
    ),
}

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="qwen3", choices=CONFIGS)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--cache", default="dynamic", choices=["dynamic", "static", "offloaded", "static-object", "none"])
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--prompt", type=int, default=1024)
parser.add_argument("--new", type=int, default=32)
parser.add_argument("--beams", type=int, default=1)
parser.add_argument("--sample", action="store_true")
parser.add_argument("--assistant", type=int, default=0, help="layers of an assistant model")
parser.add_argument("--scores", action="store_true")
args = parser.parse_args()

set_seed(42)
config = CONFIGS[args.model](args.layers)
config.eos_token_id = config.pad_token_id = None
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0
lengths = torch.randint(args.prompt // 2, args.prompt + 1, (args.batch,))
lengths[0] = args.prompt
mask = (torch.arange(args.prompt)[None] >= (args.prompt - lengths)[:, None]).long().cuda()
ids = torch.randint(3, 30000, (args.batch, args.prompt)).cuda() * mask
kwargs = dict(max_new_tokens=args.new, min_new_tokens=args.new, num_beams=args.beams, do_sample=args.sample)
if args.sample:
    kwargs |= dict(top_k=50, top_p=0.95, temperature=0.9)
if args.cache == "static":
    kwargs |= dict(cache_implementation="static", disable_compile=True)
elif args.cache == "offloaded":
    kwargs["cache_implementation"] = "offloaded"
elif args.cache == "static-object":
    kwargs |= dict(
        past_key_values=StaticCache(config=config, max_cache_len=args.prompt + args.new), disable_compile=True
    )
elif args.cache == "none":
    kwargs["use_cache"] = False
if args.scores:
    kwargs |= dict(output_scores=True, return_dict_in_generate=True)
if args.assistant:
    small = CONFIGS[args.model](args.assistant)
    small.eos_token_id = small.pad_token_id = None
    assistant = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16).cuda().eval()
    assistant.generation_config.eos_token_id = None
    kwargs["assistant_model"] = assistant
    ids, mask = ids[:1], mask[:1]
with torch.no_grad():
    out = model.generate(input_ids=ids, attention_mask=mask, **kwargs)
if args.scores:
    print(len(out.scores), torch.stack(out.scores).float().softmax(-1).max(-1).values.mean())
    out = out.sequences
print(out.shape)
