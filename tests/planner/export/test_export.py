"""What is written, what is not, and what is never replaced."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exports import exported, fsdp2, plan
from tonnage.errors import OutputExists, RequestError
from tonnage.planner.export import export_training, left_out

EVERYTHING = [
    "training_arguments.json",
    "train.py",
    "deepspeed.json",
    "accelerate_fsdp2.yaml",
    "accelerate_deepspeed.yaml",
    "torchtitan.toml",
    "torchrun.sh",
    "environment.sh",
    "launch.sh",
    "README.txt",
]


def test_a_plain_plan_has_every_file(tmp_path: Path) -> None:
    paths = export_training(fsdp2(), tmp_path / "new" / "folder")
    assert [path.name for path in paths] == EVERYTHING
    assert all(path.stat().st_mode & 0o111 for path in paths if path.suffix == ".sh")


def test_the_readme_says_why_a_file_is_missing(tmp_path: Path) -> None:
    files = exported(fsdp2(tp=8), tmp_path)
    assert "training_arguments.json" not in files
    words = " ".join(files["README.txt"].split())
    assert "training_arguments.json: tensor parallelism is set where the model is loaded" in words
    assert max(map(len, files["README.txt"].splitlines())) <= 80


def test_nothing_is_replaced_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(OutputExists, match=r"holds train\.py already") as caught:
        export_training(fsdp2(), tmp_path)
    assert "--force" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "not even the others"
    export_training(fsdp2(), tmp_path, force=True)
    assert (tmp_path / "train.py").read_text() != "mine"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="is a file"):
        export_training(fsdp2(), tmp_path / "file", force=True)
    with pytest.raises(RequestError, match="Cannot write"):
        export_training(fsdp2(), tmp_path / "file" / "inner")


PLACES = st.sampled_from(["gpu", "host", "nvme"])
CHOICES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b", "gpt2", "bert-base-uncased"]),
        "gpus": st.sampled_from(["h200", "8xh200", "4x8xh100"]),
        "framework": st.sampled_from(["torch", "fsdp2", "deepspeed", "megatron"]),
        "zero": st.integers(0, 3),
        "precision": st.sampled_from(["fp32", "tf32", "fp16-mixed", "bf16-mixed", "bf16", "fp8"]),
        "optimizer": st.sampled_from(["sgd", "momentum", "adam", "adamw", "adamw-8bit", "adafactor", "lion", "muon"]),
        "optimizer_kernel": st.sampled_from(["foreach", "fused", "loop"]),
        "checkpoint": st.sampled_from(["none", "selective", "full", "every-2"]),
        "attention": st.sampled_from(["flash", "flash-2", "eager"]),
        "loss": st.sampled_from(["full", "chunked"]),
        "optimizer_place": PLACES,
        "parameter_place": PLACES,
        "activation_place": PLACES,
        "lora_rank": st.sampled_from([0, 8]),
        "compile": st.booleans(),
    }
)


@given(CHOICES)
@settings(max_examples=200)
def test_every_target_is_written_or_explained(
    tmp_path_factory: pytest.TempPathFactory, choices: dict[str, Any]
) -> None:
    launch = plan(**choices)
    files = exported(launch, tmp_path_factory.mktemp("plan"))
    omitted = left_out(launch)
    assert set(files) | set(omitted) == set(EVERYTHING)
    assert not set(files) & set(omitted)
    words = " ".join(files["README.txt"].split())
    assert all(f"{name}: {'; '.join(said)}." in words for name, said in omitted.items())
    assert ("deepspeed.json" in files) == ("accelerate_deepspeed.yaml" in files)


def test_export_imports_no_torch() -> None:
    program = "import sys, tonnage.planner.export; print({'torch', 'transformers', 'yaml'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"
