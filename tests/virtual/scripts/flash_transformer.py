"""A model of transformers that is asked for FlashAttention 2: two steps, the second with padding."""
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available

print("before", is_flash_attn_2_available())
config = AutoConfig.for_model("llama", vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                              num_attention_heads=4, num_key_value_heads=2, use_cache=False)
model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2", dtype=torch.bfloat16).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    ids = torch.randint(0, 1000, (2, 512), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, : 100 * step] = 0
    loss = model(input_ids=ids, labels=ids, attention_mask=mask).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("after", is_flash_attn_2_available(), model.config._attn_implementation)
