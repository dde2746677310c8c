"""Who drives a script's steps is read from the stack, the model and the optimizer."""

import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from tonnage.script.training import facts_of_driver, facts_of_model, name_of_optimizer  # noqa: E402


def called_from(module: str, driver: object) -> dict[str, str]:
    """The facts, asked below a method of an object in a module of that name."""
    scope = {"__name__": module, "ask": lambda: facts_of_driver(sys._getframe())}
    exec("def train(self):\n    return ask()", scope)
    return scope["train"](driver)[0]


def settings(kind: str, module: str) -> object:
    made = type(kind, (), {"__module__": module})()
    made.per_device_train_batch_size, made.per_device_eval_batch_size, made.gradient_accumulation_steps = 6, 12, 2
    return SimpleNamespace(args=made)


def test_the_trainers_of_transformers_and_trl_say_their_arguments() -> None:
    expected = {"arguments": "TrainingArguments", "batch": "6", "eval_batch": "12", "accumulation": "2"}
    driver = settings("TrainingArguments", "transformers.training_args")
    assert called_from("transformers.trainer", driver) == {"trainer": "transformers", **expected}
    driver = settings("SFTConfig", "trl.trainer.sft_config")
    found = called_from("transformers.trainer", driver)
    assert found == {"trainer": "trl", **expected, "arguments": "SFTConfig"}


def test_lightning_s_trainer_is_known_and_gives_its_module() -> None:
    driver = SimpleNamespace(accumulate_grad_batches=3, lightning_module="the module")
    found = called_from("lightning.pytorch.trainer.trainer", driver)
    assert found == {"trainer": "lightning", "accumulation": "3"}


def test_a_class_of_that_name_elsewhere_is_no_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
    assert called_from("my.trainer", settings("TrainingArguments", "my")) == {}


def test_an_accelerator_that_was_made_drives_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(
        AcceleratorState=SimpleNamespace(_shared_state={"device": "cuda"}),
        GradientState=lambda: SimpleNamespace(num_steps=4),
    )
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    assert called_from("__main__", None) == {"trainer": "accelerate", "accumulation": "4"}
    state.AcceleratorState._shared_state = {}
    assert called_from("__main__", None) == {}


def test_a_model_s_own_switch_is_found_beneath_a_wrapper() -> None:
    class Vit(torch.nn.Module):
        def set_grad_checkpointing(self, enable: bool = True) -> None: ...

    Vit.__module__ = "timm.models.vision_transformer"
    wrapper = torch.nn.Module()
    wrapper.module = Vit()
    expected = {"library": "timm", "checkpointing": "set_grad_checkpointing"}
    assert facts_of_model(Vit()) == facts_of_model(wrapper) == expected


def test_one_of_transformers_says_whether_it_can() -> None:
    class Bert(torch.nn.Module):
        supports_gradient_checkpointing = False
        _supports_sdpa = True

        def gradient_checkpointing_enable(self) -> None: ...

    Bert.__module__ = "transformers.models.bert"
    assert facts_of_model(Bert()) == {"library": "transformers", "sdpa": "yes"}
    Bert.supports_gradient_checkpointing = True
    assert facts_of_model(Bert())["checkpointing"] == "gradient_checkpointing_enable"


def test_layers_that_a_library_recomputes_and_embeddings_are_named() -> None:
    class GradientCheckpointingLayer(torch.nn.Module): ...

    class Layer(GradientCheckpointingLayer): ...

    model = torch.nn.Module()
    model.tokens = torch.nn.Embedding(100, 8)
    model.layers = torch.nn.ModuleList(Layer() for _ in range(2))
    assert facts_of_model(model) == {"recomputed": "layers.0\nlayers.1", "embeddings": "100x8"}


def test_an_optimizer_is_named_as_a_script_imports_it() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert name_of_optimizer(torch.optim.AdamW([parameter])) == "torch.optim.AdamW"
    wrapper = type("AcceleratedOptimizer", (), {"__module__": "accelerate.optimizer"})()
    assert name_of_optimizer(wrapper) == ""
