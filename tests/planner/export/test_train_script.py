"""train.py trains: a tiny Llama, on this machine, in every way that the script and not its arguments decides."""

from pathlib import Path
from typing import Any

import pytest

from exports import exported, fsdp2, load_each, plan
from tonnage.planner.export import left_out

TRAIN = """
import json, os, runpy
from glob import glob
import torch
from transformers import LlamaConfig, LlamaForCausalLM

home = os.environ["MODEL"]
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(num_attention_heads=4, max_position_embeddings=16, **sizes)).save_pretrained(home)
torch.save(torch.arange(4 * 16).reshape(4, 16), f"{home}/tokens.pt")

def load():
    sys.argv = ["train.py", f"{home}/tokens.pt"]
    torch.manual_seed(0)
    runpy.run_path("train.py", run_name="__main__")
    (state,) = glob("output/checkpoint-*/trainer_state.json")
    return [entry["loss"] for entry in json.load(open(state))["log_history"] if "loss" in entry]
"""
WAYS = {kind: plan(gpus="h200", precision="fp32", checkpoint=kind) for kind in ("none", "every-2", "selective", "full")}
ADAPTED = {"adapters": plan(gpus="h200", precision="fp32", lora_rank=4, checkpoint="full")}


def test_it_trains_and_recomputation_changes_nothing_but_memory(tmp_path: Path) -> None:
    losses = load_each(TRAIN, WAYS | ADAPTED, tmp_path, MODEL=str(tmp_path / "model"))
    assert losses["none"][-1] < losses["none"][0]
    assert losses["every-2"] == losses["selective"] == losses["full"] == losses["none"]
    assert losses["adapters"][0] == pytest.approx(losses["none"][0], rel=1e-3), "adapters start at nothing"
    assert losses["adapters"][-1] != losses["none"][-1]


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (plan(), "dtype=torch.float32"),
        (fsdp2(precision="bf16"), "dtype=torch.bfloat16"),
        (plan(attention="eager"), 'attn_implementation="eager"'),
        (plan(attention="flash-2"), 'attn_implementation="flash_attention_2"'),
        (plan(lora_rank=8, lora_targets=("q_proj", "v_proj")), 'r=8, target_modules=["q_proj", "v_proj"]'),
        (plan(lora_rank=8, base="nf4"), "BitsAndBytesConfig(load_in_4bit=True"),
        (plan(lora_rank=8, lora_dropout=True), "lora_dropout=0.05"),
        (fsdp2(checkpoint="every-3"), "number % 3 == 0"),
        (plan(model="llama-3.1-70b"), '"meta-llama/Llama-3.1-70B"'),
    ],
)
def test_the_script_says(launch: Any, words: str, tmp_path: Path) -> None:
    script = exported(launch, tmp_path)["train.py"]
    compile(script, "train.py", "exec")
    assert words in script


@pytest.mark.parametrize("name", ["bert-base-uncased", "t5-small"])
def test_models_that_do_not_predict_the_next_token_have_none(name: str) -> None:
    assert left_out(plan(model=name))["train.py"] == ["the script is for models that predict the next token"]
