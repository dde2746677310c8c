"""Fine-tune a vision-language model built from a small configuration."""
import argparse

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

p = argparse.ArgumentParser()
p.add_argument("--model", default="llava", choices=["llava", "qwen2_vl", "qwen2_5_vl", "gemma3", "paligemma", "idefics3"])
p.add_argument("--precision", default="bf16", choices=["bf16", "amp-bf16"])
p.add_argument("--freeze-vision", action="store_true")
p.add_argument("--checkpoint", action="store_true")
p.add_argument("--lora", type=int, default=0)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--text", type=int, default=512)
p.add_argument("--image", type=int, default=336)
args = p.parse_args()

VOCAB, PICTURE = 32064, 32000
LANGUAGE = dict(vocab_size=VOCAB, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
                num_key_value_heads=4, max_position_embeddings=8192)
VISION = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=12, image_size=args.image)


def configured():
    """The configuration, and the number of picture tokens in every row."""
    if args.model == "llava":
        config = AutoConfig.for_model(
            "llava", text_config=dict(model_type="llama", **LANGUAGE), image_token_id=PICTURE, image_token_index=PICTURE,
            vision_config=dict(model_type="clip_vision_model", patch_size=14, projection_dim=768, **VISION))
        return config, (args.image // 14) ** 2
    if args.model in ("qwen2_vl", "qwen2_5_vl"):
        vision = dict(depth=8, num_heads=12, patch_size=14, spatial_merge_size=2, temporal_patch_size=2)
        if args.model == "qwen2_vl":
            vision |= dict(embed_dim=768, hidden_size=1024)
        else:
            vision |= dict(hidden_size=768, intermediate_size=3072, out_hidden_size=1024, fullatt_block_indexes=[3, 7], window_size=112)
        rope = dict(rope_type="default", type="default", mrope_section=[8, 12, 12], rope_theta=1e6)
        tokens = dict(image_token_id=PICTURE, video_token_id=PICTURE + 1, vision_start_token_id=PICTURE + 2, vision_end_token_id=PICTURE + 3)
        config = AutoConfig.for_model(args.model, text_config=dict(**LANGUAGE, rope_parameters=rope, rope_scaling=rope), vision_config=vision,
                                      **tokens)
        return config, (args.image // 28) ** 2
    if args.model == "gemma3":
        config = AutoConfig.for_model("gemma3", text_config=dict(**LANGUAGE, head_dim=64, sliding_window=512), image_token_id=PICTURE,
                                      image_token_index=PICTURE, mm_tokens_per_image=64,
                                      vision_config=dict(model_type="siglip_vision_model", patch_size=14, **VISION))
        return config, 64
    if args.model == "paligemma":
        config = AutoConfig.for_model("paligemma", text_config=dict(model_type="gemma", head_dim=64, **LANGUAGE), image_token_id=PICTURE,
                                      image_token_index=PICTURE, projection_dim=1024, hidden_size=1024,
                                      vision_config=dict(model_type="siglip_vision_model", patch_size=14, projection_dim=1024,
                                                         vision_use_head=False, **VISION))
        return config, (args.image // 14) ** 2
    config = AutoConfig.for_model("idefics3", text_config=dict(model_type="llama", pad_token_id=0, **LANGUAGE), image_token_id=PICTURE,
                                  scale_factor=2, vision_config=dict(patch_size=14, **VISION))
    return config, (args.image // 14) ** 2 // 4


config, pictures = configured()
torch.manual_seed(0)
model = AutoModelForImageTextToText.from_config(config)
model = model.to("cuda", torch.bfloat16 if args.precision == "bf16" else torch.float32).train()
model.config.use_cache = False
if args.freeze_vision:
    for name, q in model.named_parameters():
        q.requires_grad = "vision" not in name and "visual" not in name
if args.checkpoint:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
if args.lora:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=args.lora, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
optimizer = torch.optim.AdamW([q for q in model.parameters() if q.requires_grad], lr=1e-4)
dtype = next(model.parameters()).dtype
for step in range(3):
    ids = torch.randint(10, 30000, (args.batch, pictures + args.text))
    ids[:, 4:4 + pictures] = PICTURE
    batch = dict(input_ids=ids.cuda(), attention_mask=torch.ones_like(ids).cuda(), labels=ids.masked_fill(ids == PICTURE, -100).cuda())
    if args.model in ("qwen2_vl", "qwen2_5_vl"):
        side = args.image // 14
        ids[:, 3] = PICTURE + 2
        batch["input_ids"] = ids.cuda()
        batch["mm_token_type_ids"] = (ids == PICTURE).int().cuda()
        batch["pixel_values"] = torch.randn(args.batch * side * side, 3 * 2 * 14 * 14).cuda().to(dtype)
        batch["image_grid_thw"] = torch.tensor([[1, side, side]] * args.batch).cuda()
    elif args.model == "idefics3":
        batch["pixel_values"] = torch.randn(args.batch, 1, 3, args.image, args.image).cuda().to(dtype)
    else:
        batch["pixel_values"] = torch.randn(args.batch, 3, args.image, args.image).cuda().to(dtype)
    if args.model in ("gemma3", "paligemma"):
        batch["token_type_ids"] = (ids == PICTURE).long().cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=args.precision == "amp-bf16"):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
