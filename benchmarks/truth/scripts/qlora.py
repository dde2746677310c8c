"""QLoRA: LoRA over a model whose weights bitsandbytes keeps in 4 or 8 bits."""
import argparse
import tempfile

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

p = argparse.ArgumentParser()
p.add_argument("--bits", type=int, default=4, choices=[4, 8])
p.add_argument("--quant", default="nf4", choices=["nf4", "fp4"])
p.add_argument("--single-quant", action="store_true", help="keep the scales in 32 bits")
p.add_argument("--by-hand", action="store_true", help="replace the linear layers of a model in memory; else load from a folder")
p.add_argument("--optimizer", default="paged-adamw8", choices=["adamw", "adamw8", "paged-adamw8", "paged-adamw32"])
p.add_argument("--no-checkpoint", action="store_true")
p.add_argument("--rank", type=int, default=16)
p.add_argument("--layers", type=int, default=12)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=1024)
args = p.parse_args()


def replaced(linear):
    kwargs = dict(bias=linear.bias is not None)
    if args.bits == 8:
        new = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, has_fp16_weights=False, threshold=6.0, **kwargs)
        new.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    else:
        new = bnb.nn.Linear4bit(linear.in_features, linear.out_features, compute_dtype=torch.bfloat16, quant_type=args.quant,
                                compress_statistics=not args.single_quant, **kwargs)
        new.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type=args.quant,
                                       compress_statistics=not args.single_quant)
    return new


torch.manual_seed(0)
config = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=args.layers,
                     num_attention_heads=32, num_key_value_heads=4, use_cache=False)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
if args.by_hand:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and name != "lm_head":
                setattr(module, name, replaced(child))
    model = model.cuda().requires_grad_(False)
    if not args.no_checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
else:
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    quantization = BitsAndBytesConfig(load_in_8bit=True) if args.bits == 8 else BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=args.quant, bnb_4bit_use_double_quant=not args.single_quant,
        bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, device_map={"": 0}, dtype=torch.bfloat16)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=not args.no_checkpoint,
                                            gradient_checkpointing_kwargs={"use_reentrant": False})
model = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear",
                                         task_type="CAUSAL_LM"))
model.print_trainable_parameters()
model.train()
params = [q for q in model.parameters() if q.requires_grad]
kinds = {"adamw": torch.optim.AdamW, "adamw8": bnb.optim.AdamW8bit, "paged-adamw8": bnb.optim.PagedAdamW8bit,
         "paged-adamw32": bnb.optim.PagedAdamW32bit}
optimizer = kinds[args.optimizer](params, lr=2e-4)
for step in range(3):
    ids = torch.randint(0, 32000, (args.batch, args.seq)).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(params, 0.3)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
