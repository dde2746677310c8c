"""Levels of memory under a CUDA build of torch: a script that only loads a model does not climb."""

from pathlib import Path

from cuda_build import answer, needs_cuda_build, run

pytestmark = needs_cuda_build
LOADS = """
import sys
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "vocab_size": 8000}
config = Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=8)
Qwen2ForCausalLM(config).save_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, device_map="cuda")
"""


def test_a_script_that_only_loads_a_model_fits(tmp_path: Path) -> None:
    script = tmp_path / "loads.py"
    script.write_text(LOADS)
    done = run("--gpu", "h200", script, str(tmp_path / "kept"), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = answer(tmp_path)
    assert (found["verdict"], found["climbs"], found["outlook"]) == ("fits", None, [])
