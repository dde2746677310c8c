"""Fine-tune with TRL's trainers: supervised, by preferences (DPO), by rewards (GRPO), on a small data set in memory."""
import argparse
import copy
import random
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

p = argparse.ArgumentParser()
p.add_argument("--trainer", default="sft", choices=["sft", "dpo", "grpo"])
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seq", type=int, default=1024)
p.add_argument("--layers", type=int, default=8)
p.add_argument("--packing", action="store_true")
p.add_argument("--lora", type=int, default=0)
p.add_argument("--liger", action="store_true")
p.add_argument("--generations", type=int, default=8)
p.add_argument("--beta", type=float, default=0.0, help="weight of the reference model (GRPO)")
p.add_argument("--no-checkpoint", action="store_true")
args = p.parse_args()

torch.manual_seed(0)
random.seed(0)
words = [f"w{i}" for i in range(31990)]
vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
config = AutoConfig.for_model("qwen2", vocab_size=32000, hidden_size=1536, intermediate_size=4096, num_hidden_layers=args.layers,
                              num_attention_heads=12, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
common = dict(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=args.batch, max_steps=3, bf16=True, logging_steps=1,
              report_to=[], save_strategy="no", gradient_checkpointing=not args.no_checkpoint, use_liger_kernel=args.liger)
lora = None
if args.lora:
    from peft import LoraConfig

    lora = LoraConfig(r=args.lora, target_modules="all-linear", task_type="CAUSAL_LM")


def text(length):
    return " ".join(random.choices(words, k=length))


count = args.batch * 4
if args.trainer == "sft":
    # One text in four is short, the longest of a batch sets its width.
    data = Dataset.from_dict({"text": [text(args.seq // 4 if i % 4 == 1 else args.seq) for i in range(count)]})
    arguments = SFTConfig(**common, max_length=args.seq, packing=args.packing)
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora)
elif args.trainer == "dpo":
    data = Dataset.from_dict({"prompt": [text(args.seq // 2) for _ in range(count)],
                              "chosen": [text(args.seq // 2 - 1) for _ in range(count)],
                              "rejected": [text(args.seq // 4) for _ in range(count)]})
    arguments = DPOConfig(**common, max_length=args.seq)
    reference = None if lora else copy.deepcopy(model)
    trainer = DPOTrainer(model=model, ref_model=reference, args=arguments, train_dataset=data, processing_class=tokenizer,
                         peft_config=lora)
else:
    data = Dataset.from_dict({"prompt": [text(args.seq // 4) for _ in range(count)]})
    arguments = GRPOConfig(**common, num_generations=args.generations, max_completion_length=args.seq // 4, beta=args.beta,
                           generation_kwargs={"min_new_tokens": args.seq // 4})
    trainer = GRPOTrainer(model=model, reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
                          args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora)
print(trainer.train().training_loss, torch.cuda.max_memory_allocated() // 2**20)
