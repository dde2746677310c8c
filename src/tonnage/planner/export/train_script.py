"""`train.py`: a script that reads `training_arguments.json` and does what that file cannot express.

That is the dtype in which parameters are loaded, the attention kernel, adapters, and recomputation of some blocks. It
reads rows of tokens, so it is for models that predict the next one.
"""

import json

from tonnage.budget.training.adapters import ALL_LINEAR, EXPERTS, target_words
from tonnage.models.presets import hub_id
from tonnage.planner.export import training_arguments
from tonnage.planner.export.launch import TrainingRun, reasons
from tonnage.planner.export.text import template

FILE = "train.py"
DTYPES = {"bf16-mixed": "bfloat16", "fp8": "bfloat16", "bf16": "bfloat16", "fp16-mixed": "float16"}
_ATTENTION = {"flash": "sdpa", "flash-2": "flash_attention_2", "eager": "eager"}

_LOAD = """
(arguments,) = HfArgumentParser(TrainingArguments).parse_json_file("training_arguments.json")
model = AutoModelForCausalLM.from_pretrained(MODEL, {options})
"""

_EVERY = """model.gradient_checkpointing_enable({{"use_reentrant": False}})
blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
for number, block in enumerate(blocks, start=1):
    block.gradient_checkpointing = number % {every} == 0
"""

_SELECTIVE = """model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_some})
"""

_ADAPTERS = """model = get_peft_model(model, LoraConfig(r={rank}, target_modules={targets}{dropout}, task_type="CAUSAL_LM"))
"""

_TRAIN = """model.config.use_cache = False
tokens = torch.load(sys.argv[1])
rows = [{"input_ids": row, "labels": row} for row in tokens]
Trainer(model=model, args=arguments, train_dataset=rows).train()
"""


def obstacles(launch: TrainingRun) -> list[str]:
    """Return why the script cannot run: it needs the arguments, and a model that predicts the next token."""
    shape = launch.shape
    predicts = len(shape.stacks) == 1 and shape.decoder.causal and shape.vocab > 0
    missing = training_arguments.obstacles(launch)
    config = launch.configuration
    return reasons(
        (bool(missing), f"it reads {training_arguments.FILE}, which is left out"),
        (config.base == "fp8", "PEFT trains no adapters on a base in FP8"),
        (config.lora_rank > 0 and EXPERTS in config.lora_targets, "adapters of experts are named model by model"),
        (not predicts, "the script is for models that predict the next token"),
    )


def notes(launch: TrainingRun) -> list[str]:
    """Return what the script needs."""
    config = launch.configuration
    return reasons(
        (config.lora_rank > 0, "adapters are PEFT's: pip install peft"),
        (config.base.startswith("nf4"), "4-bit weights are bitsandbytes': pip install bitsandbytes"),
    )


def render(launch: TrainingRun) -> str:
    """Return the script. Trained parameters are FP32 unless the plan is pure BF16; frozen ones are 16-bit."""
    config = launch.configuration
    # One block in this many is recomputed whole; 0 if none is.
    every = int(config.checkpoint.removeprefix("every-")) if config.checkpoint.startswith("every-") else 0
    every = 1 if config.checkpoint == "full" else every
    selective = config.checkpoint == "selective"
    quantized = "BitsAndBytesConfig, " if config.quantized_base else ""
    lines = ["from peft import LoraConfig, get_peft_model"] if config.lora_rank else []
    if selective:
        lines.append("from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts")
    names = f"AutoModelForCausalLM, {quantized}HfArgumentParser, Trainer, TrainingArguments"
    lines.append(f"from transformers import {names}")
    if every > 1:
        lines.append("from transformers.modeling_layers import GradientCheckpointingLayer")
    head = template("train_head").format(
        model=launch.model, source=json.dumps(hub_id(launch.model)), seq=launch.sizes.seq, imports="\n".join(lines)
    )
    # How the model is loaded.
    halved = config.precision == "bf16" or config.lora_rank > 0
    dtype = DTYPES.get(config.precision, "float32") if halved else "float32"
    options = [f"dtype=torch.{dtype}", f'attn_implementation="{_ATTENTION[config.attention]}"']
    if config.quantized_base:
        twice = ", bnb_4bit_use_double_quant=True" if config.base == "nf4" else ""
        four_bit = f'load_in_4bit=True, bnb_4bit_quant_type="nf4"{twice}, bnb_4bit_compute_dtype=torch.{dtype}'
        options.append(f"quantization_config=BitsAndBytesConfig({four_bit})")
    setup = template("train_selective") if selective else ""
    recompute = _SELECTIVE if selective else _EVERY.format(every=every) if every > 1 else ""
    adapters = ""
    if config.lora_rank:
        chosen = config.lora_targets
        targets = target_words(chosen) if chosen == ALL_LINEAR else list(chosen)
        dropout = ", lora_dropout=0.05" if config.lora_dropout else ""
        adapters = _ADAPTERS.format(rank=config.lora_rank, targets=json.dumps(targets), dropout=dropout)
    load = _LOAD.format(options=", ".join(options))
    return "".join([head.rstrip("\n") + "\n", setup, load, recompute, adapters, _TRAIN])
