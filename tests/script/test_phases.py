"""Phases that people name, found in what frameworks and plain loops really call."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import loops
import tonnage
from tonnage.recording import Recording
from tonnage.script.lines import telling_functions

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2))


def trainer(folder: Path, **options: Any) -> Any:
    import torch
    from transformers import Trainer, TrainingArguments

    ids = torch.ones(32, dtype=torch.long)
    samples = [{"input_ids": ids, "labels": ids} for _ in range(16)]
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    arguments = TrainingArguments(str(folder), **sizes, report_to=[], disable_tqdm=True, **options)
    return Trainer(llama(), arguments, train_dataset=samples, eval_dataset=samples)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the trainer of `trained` saves."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def trained(checkpoints: Path) -> Recording:
    with tonnage.virtual_gpu("h200", write=True) as gpu:
        trainer(checkpoints, max_steps=4, eval_strategy="steps", eval_steps=2, save_steps=2).train()
        return gpu.recording


def names(recording: Recording) -> set[str]:
    return {phase.name for phase in recording.phases}


def steps_with(recording: Recording, phase: str) -> list[int]:
    return [step.step for step in recording.steps if phase in {found.name for found in step.phases}]


def test_the_trainer_of_transformers_evaluates_and_saves(trained: Recording) -> None:
    assert {"forward", "backward", "optimizer", "evaluation", "saving", "data"} <= names(trained)
    assert "loading" not in names(trained)
    assert [step.step for step in trained.steps] == [0, 1, 2, 3, 4]
    assert steps_with(trained, "evaluation") == [2, 4]
    assert steps_with(trained, "saving") == [2, 4]


def test_a_training_that_resumes_loads_its_checkpoint(trained: Recording, checkpoints: Path) -> None:
    with tonnage.virtual_gpu("h200") as gpu:
        trainer(checkpoints, max_steps=5).train(resume_from_checkpoint=True)
        recording = gpu.recording
    assert "loading" in names(recording)
    assert "evaluation" not in names(recording)


def test_a_model_that_is_loaded_and_generates(trained: Recording, checkpoints: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    with tonnage.virtual_gpu("h200") as gpu:
        model = LlamaForCausalLM.from_pretrained(checkpoints / "checkpoint-4", device_map="cuda")
        prompt = torch.ones(2, 8, dtype=torch.long, device="cuda")
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
        recording = gpu.recording
    assert {"model loading", "generation"} <= names(recording)
    assert "forward" not in names(recording)
    assert len([step for step in recording.steps if step.step]) == 4  # tokens


def test_generation_within_a_training_is_no_step() -> None:
    import torch

    with tonnage.virtual_gpu("h200") as gpu:
        model = llama().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        ids = torch.ones(2, 8, dtype=torch.long, device="cuda")
        for _ in range(2):
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        recording = gpu.recording
    assert [step.step for step in recording.steps if step.step] == [1, 2]
    assert {"generation", "forward"} <= names(recording)
    assert recording.ledger().total_bytes == recording.peak_allocated_bytes


def test_lightning_validates_and_saves(tmp_path: Path) -> None:
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch: Any, _: int) -> None:
            self.layer(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    with tonnage.virtual_gpu("h200") as gpu:
        rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 64)), batch_size=8)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        fitting = lightning.Trainer(default_root_dir=tmp_path, accelerator="gpu", devices=1, max_epochs=2, **quiet)
        fitting.fit(Model(), rows, rows)
        recording = gpu.recording
    assert {"forward", "backward", "optimizer", "evaluation", "saving", "data"} <= names(recording)
    assert [step.step for step in recording.steps if step.step] == [*range(1, 9)]


def test_accelerate_saves_and_loads_its_state(tmp_path: Path) -> None:
    import torch
    from accelerate import Accelerator

    with tonnage.virtual_gpu("h200") as gpu:
        accelerator = Accelerator()
        module = torch.nn.Linear(512, 512)
        model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
        for step in range(2):
            accelerator.backward(model(torch.randn(4, 512, device="cuda")).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                accelerator.save_state(str(tmp_path / "state"))
        accelerator.load_state(str(tmp_path / "state"))
        recording = gpu.recording
    assert {"saving", "loading"} <= names(recording)
    assert steps_with(recording, "saving") == [1]


def test_a_plain_loop_evaluates_saves_and_resumes(tmp_path: Path) -> None:
    recording = loops.recorded(loops.evaluates)
    assert "evaluation" in names(recording)
    assert [step.step for step in recording.steps if step.step] == [1, 2, 3]
    recording = loops.recorded(loops.resumes, folder=tmp_path, where="cpu")
    peaks = {phase.name: phase.peak_allocated_bytes for phase in recording.phases}
    weights = 4 * (2048 * 2048 + 2048) * 4
    assert peaks["saving"] == pytest.approx(4 * weights, rel=0.01)  # weights, two moments, two workspaces


def test_evaluation_mode_is_told_without_no_grad_where_the_module_also_trains() -> None:
    recording = loops.recorded(loops.evaluates_with_gradients)
    assert "evaluation" in names(recording)
    assert [step.step for step in recording.steps if step.step] == [1, 2, 3]


def test_training_in_evaluation_mode_is_training() -> None:
    import torch

    with tonnage.virtual_gpu("h200") as gpu:
        model = torch.nn.Linear(256, 256).cuda().eval()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.randn(8, 256, device="cuda")).square().mean().backward()
            optimizer.step()
        recording = gpu.recording
    assert "evaluation" not in names(recording)
    assert [step.step for step in recording.steps if step.step] == [1, 2, 3]


def test_the_functions_that_tell_a_phase_are_there() -> None:
    """A library that renames one would leave its phase unseen."""
    for file, functions in telling_functions().items():
        package = importlib.util.find_spec(file.partition("/")[0])
        if package and package.submodule_search_locations:
            path = Path(package.submodule_search_locations[0]).parent / file
            text = path.read_text()
            assert [name for name in functions if f"def {name}(" not in text] == [], file
