"""LoRA on a Llama in BF16, in a plain loop."""

import torch
from peft import LoraConfig, get_peft_model
from switches import adam, applied, micro_batches, token_loss
from transformers import AutoModelForCausalLM, LlamaConfig

args = applied(batch=4, seq=1024)
config = LlamaConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=12,
    num_attention_heads=32, num_key_value_heads=4, use_cache=False,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
if args.apply == "checkpoint":
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
lora = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"])
model = get_peft_model(model, lora).cuda().train()
optimizer = adam([p for p in model.parameters() if p.requires_grad], args.apply)
for _ in range(3):
    ids = torch.randint(0, 32000, (args.batch, args.seq)).cuda()
    for (part,) in micro_batches(args.apply, ids):
        if args.apply == "chunked":
            hidden = model.base_model.model.model(input_ids=part).last_hidden_state
            loss = token_loss(model.base_model.model.lm_head, hidden, part, "chunked")
        else:
            loss = model(input_ids=part, labels=part).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
