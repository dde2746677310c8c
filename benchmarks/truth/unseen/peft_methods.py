try:
    import torchvision_stub  # noqa: F401
except ImportError:
    pass
import argparse

import torch
from peft import (
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    TaskType,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    get_linear_schedule_with_warmup,
)


def build_base(name):
    if name == "t5":
        cfg = T5Config(
            d_model=1024,
            d_ff=2816,
            num_layers=8,
            num_heads=16,
            d_kv=64,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
            tie_word_embeddings=False,
        )
        return T5ForConditionalGeneration(cfg), TaskType.SEQ_2_SEQ_LM, ["q", "v"], ["wo"]
    if name == "gpt2":
        return (
            GPT2LMHeadModel(GPT2Config(n_embd=1280, n_layer=12, n_head=20)),
            TaskType.CAUSAL_LM,
            ["c_attn"],
            ["mlp.c_proj"],
        )
    cfg = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=10, num_attention_heads=32, num_key_value_heads=4
    )
    return LlamaForCausalLM(cfg), TaskType.CAUSAL_LM, ["q_proj", "k_proj", "v_proj", "o_proj"], ["down_proj"]


def peft_config(method, task, attn, ff):
    if method == "lora":
        return LoraConfig(task_type=task, r=16, lora_alpha=32, lora_dropout=0.1, target_modules=attn)
    if method == "dora":
        return LoraConfig(task_type=task, r=8, lora_alpha=16, target_modules=attn + ff, use_dora=True)
    if method == "rslora-all":
        return LoraConfig(task_type=task, r=64, target_modules="all-linear", use_rslora=True)
    if method == "ia3":
        return IA3Config(task_type=task, target_modules=attn + ff, feedforward_modules=ff)
    if method == "prefix":
        return PrefixTuningConfig(task_type=task, num_virtual_tokens=30, prefix_projection=True)
    if method == "vera":
        return VeraConfig(task_type=task, r=256, target_modules=["q_proj"])
    return PromptTuningConfig(task_type=task, num_virtual_tokens=20)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base", default="llama", choices=["llama", "gpt2", "t5"])
    ap.add_argument("--method", default="lora")
    ap.add_argument("--batch_size", type=int, default=8)
    ap.add_argument("--max_length", type=int, default=512)
    ap.add_argument("--bf16", action="store_true")
    ap.add_argument("--gradient_checkpointing", action="store_true")
    ap.add_argument("--merge", action="store_true")
    args = ap.parse_args()
    torch.manual_seed(1234)
    model, task, attn, ff = build_base(args.base)
    if args.bf16:
        model = model.to(torch.bfloat16)
    model = get_peft_model(model, peft_config(args.method, task, attn, ff))
    model.print_trainable_parameters()
    if args.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = get_linear_schedule_with_warmup(optimizer, 2, 10)
    for step in range(4):
        length = int(torch.randint(args.max_length // 2, args.max_length + 1, ()))
        ids = torch.randint(10, 30000, (args.batch_size, length)).cuda()
        batch = dict(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            labels=ids if task != TaskType.SEQ_2_SEQ_LM else ids[:, : length // 4],
        )
        with torch.autocast("cuda", torch.bfloat16, enabled=not args.bf16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        sched.step()
        optimizer.zero_grad()
        print(step, length, loss.detach().float().item())
    state = {k: v.cpu() for k, v in get_peft_model_state_dict(model).items()}
    print(sum(v.numel() for v in state.values()))
    if args.merge:
        model = model.merge_and_unload().eval()
        with torch.no_grad():
            print(model.generate(input_ids=ids[:, :128], max_new_tokens=16, min_new_tokens=16, do_sample=False).shape)


if __name__ == "__main__":
    main()
