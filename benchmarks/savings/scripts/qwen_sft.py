"""Fine-tuning of a small Qwen with TRL, without recomputation."""

import tempfile

import torch
from datasets import Dataset
from switches import applied
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

args = applied(batch=8, seq=512)
words = {
    word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(31996))])
}
plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
config = AutoConfig.for_model(
    "qwen2", vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
    num_attention_heads=16, num_key_value_heads=4, use_cache=False, pad_token_id=0, eos_token_id=2,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
data = Dataset.from_dict({"text": [" ".join(f"w{i}" for i in range(args.seq))] * args.batch * 3})
change = {
    "batch": {"per_device_train_batch_size": args.batch // 2, "gradient_accumulation_steps": 2},
    "checkpoint": {"gradient_checkpointing": True},
    "autocast": {"bf16": True},
    "fused": {"optim": "adamw_torch_fused"},
    "eight-bit": {"optim": "adamw_8bit"},
}.get(args.apply, {})
settings = {
    "per_device_train_batch_size": args.batch, "optim": "adamw_torch", "max_steps": 3, "report_to": [], "bf16": False,
    "save_strategy": "no", "logging_steps": 1, "max_length": args.seq, "gradient_checkpointing": False,
    "output_dir": tempfile.mkdtemp(),
}  # fmt: skip
SFTTrainer(
    model=model, args=SFTConfig(**settings | change), train_dataset=data, processing_class=tokenizer
).train()  # fmt: skip
