"""Run a language model whose weights torchao quantised."""
import argparse

import torch
from torchao.quantization import (Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig, Int4WeightOnlyConfig,
                                  Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_)
from transformers import AutoModelForCausalLM, LlamaConfig

CONFIGS = {
    "int8": lambda: Int8WeightOnlyConfig(),
    "int8-dynamic": lambda: Int8DynamicActivationInt8WeightConfig(),
    "int4": lambda: Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"),
    "float8": lambda: Float8WeightOnlyConfig(),
    "float8-dynamic": lambda: Float8DynamicActivationFloat8WeightConfig(),
}

p = argparse.ArgumentParser()
p.add_argument("--quant", default="int8", choices=CONFIGS)
p.add_argument("--compile", action="store_true")
p.add_argument("--generate", type=int, default=0, help="tokens to generate")
p.add_argument("--layers", type=int, default=8)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=1024)
args = p.parse_args()

torch.manual_seed(0)
config = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=args.layers,
                     num_attention_heads=32, num_key_value_heads=32)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
quantize_(model, CONFIGS[args.quant](), filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and name != "lm_head")
print(torch.cuda.memory_allocated() // 2**20, "MiB of weights")
run = torch.compile(model) if args.compile else model
ids = torch.randint(5, 32000, (args.batch, args.seq), device="cuda")
with torch.inference_mode():
    if args.generate:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.generate,
                             min_new_tokens=args.generate, do_sample=False, pad_token_id=0)
        print(out.shape)
    else:
        for _ in range(2):
            print(run(input_ids=ids, use_cache=False).logits.argmax(-1)[0, 0].item(), torch.cuda.max_memory_allocated() // 2**20)
