"""FP8 linear layers: which layers, on which cards, and a training that still learns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tonnage
from fit.cases import CASES, build_training, take_step
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.fp8 import Fp8Linear, run_in_fp8
from tonnage.fit.training import Training


def _training() -> Training:
    return build_training(CASES["llama"], dtype=torch.float32)


def test_it_takes_the_large_layers_of_the_blocks_and_never_the_head() -> None:
    model = _training().model
    layers = list(Fp8Linear(minimum_width=32)._layers(model))
    assert len(layers) == 3 * 5  # query, output, gate, up, down; key and value are 16 wide
    assert model.lm_head not in layers
    assert not list(Fp8Linear()._layers(model))


def test_training_in_fp8_learns_and_undo_gives_the_plain_layers_back() -> None:
    plain, fitted = _training(), _training()
    undos = [run_in_fp8(layer) for layer in Fp8Linear(minimum_width=16)._layers(fitted.model)]
    assert len(undos) == 3 * 7
    for step in range(20):
        expected, found = take_step(plain, step), take_step(fitted, step)
    assert found != expected
    assert abs(found - expected) < 0.1 * expected
    for undo in undos:
        undo()
    assert not any("forward" in module.__dict__ for module in fitted.model.modules())


def test_a_cpu_is_refused_by_name() -> None:
    training = _training()
    with pytest.raises(NotApplicable, match="the model is on the CPU"):
        Fp8Linear(minimum_width=32).apply(training)


def test_a_card_without_fp8_is_refused_by_name() -> None:
    with tonnage.virtual_gpu("a100"):
        training = _training()
        training.device = torch.device("cuda")
        with pytest.raises(NotApplicable, match=r"A100.*capability 8\.0"):
            Fp8Linear(minimum_width=32).apply(training)


ON_H200 = """
import torch
import tonnage
from fit.cases import CASES, build_training, take_step
from tonnage.fit.techniques.fp8 import Fp8Linear

with tonnage.virtual_gpu("h200"):
    training = build_training(CASES["llama"], dtype=torch.bfloat16)
    training.device = torch.device("cuda")
    training.model.cuda()
    training.sample = {name: tensor.cuda() for name, tensor in training.sample.items()}
    undo = Fp8Linear(minimum_width=32).apply(training)
    take_step(training, 0)
    print({parameter.dtype for parameter in training.model.parameters()})
    undo()
"""


def test_a_step_runs_on_a_virtual_h200() -> None:
    """In a process of its own: autograd counts the devices at the first backward pass."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", ON_H200], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "{torch.bfloat16}", done.stderr


def test_a_model_without_such_layers_is_refused() -> None:
    with tonnage.virtual_gpu("h200"):
        training = _training()
        training.device = torch.device("cuda")
        with pytest.raises(NotApplicable, match="1024 wide"):
            Fp8Linear().apply(training)
        training.model = nn.Linear(2048, 2048)
        assert Fp8Linear().why_not(training) is not None
