"""Two steps of one of TRL's trainers, on a model from its configuration alone and on random tokens.

    tonnage run --gpu h200 --json out.json benchmarks/objectives/trl_step.py dpo config.json --batch 2 --seq 512

Every sequence is as long as `--seq` says, half of it a prompt. TRL is not among the project's requirements: version 1.8, the last
whose losses read whole logits, is put where `PYTHONPATH` finds it.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import datasets.fingerprint
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

STEPS = 2
TRAINERS = {
    "dpo": (DPOConfig, DPOTrainer, {}),
    "ipo": (DPOConfig, DPOTrainer, {"loss_type": "ipo"}),
    "kto": (KTOConfig, KTOTrainer, {}),
    "orpo": (ORPOConfig, ORPOTrainer, {}),
    "cpo": (CPOConfig, CPOTrainer, {}),
    "simpo": (CPOConfig, CPOTrainer, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "reward": (RewardConfig, RewardTrainer, {}),
}
ADDED = {"orpo": 2, "cpo": 2, "simpo": 2, "reward": 1, "dpo": 1, "ipo": 1, "kto": 1}
SPECIAL = ("<unk>", "<eos>", "<pad>", "<bos>")
REFERENCED = ("dpo", "ipo", "kto")
# Datasets are named by what made them, which takes minutes where a trainer is part of that.
datasets.fingerprint.Hasher.hash = staticmethod(lambda value: f"{random.getrandbits(64):016x}")


def main() -> None:
    """Train for two steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("objective", choices=TRAINERS)
    parser.add_argument("config", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--precision", choices=("fp32", "bf16-mixed", "bf16"), default="bf16-mixed")
    parser.add_argument("--checkpoint", choices=("none", "full"), default="none")
    parser.add_argument("--lora", type=int, default=0)
    parser.add_argument(
        "--precomputed", action="store_true", help="reference log-probabilities are columns of the data"
    )
    train(parser.parse_args())


def train(options: argparse.Namespace) -> None:
    """Build the model, its data and its trainer, and run it."""
    words = json.loads(options.config.read_text())
    config = AutoConfig.for_model(words.pop("model_type"), **words)
    halves = options.precision == "bf16" or (options.lora and options.precision != "fp32")
    dtype = torch.bfloat16 if halves else torch.float32
    torch.manual_seed(0)
    tokenizer = tokens(config.vocab_size)
    config.pad_token_id, config.use_cache = tokenizer.pad_token_id, False
    made = [build(options, config, dtype)]
    arguments, trainer, more = TRAINERS[options.objective]
    given: dict[str, object] = {}
    if options.objective in REFERENCED and not options.precomputed and not options.lora:
        given["ref_model"] = build(options, config, dtype)
    if options.lora:
        task = "SEQ_CLS" if options.objective == "reward" else "CAUSAL_LM"
        given["peft_config"] = LoraConfig(r=options.lora, target_modules="all-linear", task_type=task)
    if options.precomputed:
        trainer._precompute_ref_logps = with_logps
        more = {**more, "precompute_ref_log_probs": True}
    settings = arguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=options.batch,
        max_steps=STEPS,
        max_length=options.seq,
        bf16=options.precision == "bf16-mixed",
        gradient_checkpointing=options.checkpoint == "full",
        gradient_checkpointing_kwargs={"use_reentrant": False},
        optim="adamw_torch_fused",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )
    rows = Dataset.from_list(data(options, tokenizer))
    trainer(model=made.pop(), args=settings, train_dataset=rows, processing_class=tokenizer, **given).train()


def build(options: argparse.Namespace, config: AutoConfig, dtype: torch.dtype) -> torch.nn.Module:
    """The model, or with a reward of one number in place of its head."""
    if options.objective == "reward":
        config.num_labels = 1
        return AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def with_logps(self: object, dataset: Dataset, *_: object) -> Dataset:
    """Columns as an earlier run of the reference left them."""
    count = len(dataset)
    return dataset.add_column("ref_chosen_logps", [0.0] * count).add_column("ref_rejected_logps", [0.0] * count)


def tokens(vocabulary: int) -> PreTrainedTokenizerFast:
    """A word for each token."""
    words = {f"w{number}": number for number in range(len(SPECIAL), vocabulary)}
    words |= {word: number for number, word in enumerate(SPECIAL)}
    made = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[0]))
    from tokenizers.pre_tokenizers import WhitespaceSplit

    made.pre_tokenizer = WhitespaceSplit()
    names = dict(zip(("unk_token", "eos_token", "pad_token", "bos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def data(options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, object]]:
    """Prompts and completions that fill a sequence, with as many words as tokens."""
    draw = random.Random(0)

    def text(count: int) -> str:
        return " ".join(f"w{draw.randrange(4, 1000)}" for _ in range(count)) + " "

    half = options.seq // 2
    rows = []
    for number in range(options.batch * STEPS):
        prompt = text(half)
        # Some trainers add tokens for beginning and end, and leave out or cut what is too long.
        answers = [text(options.seq - half - ADDED[options.objective]) for _ in range(2)]
        if options.objective == "kto":
            rows.append({"prompt": prompt, "completion": answers[0], "label": number % 2 == 0})
        elif options.objective == "reward":
            rows.append({"chosen": prompt + answers[0], "rejected": prompt + answers[1]})
        else:
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    return rows


if __name__ == "__main__":
    main()
