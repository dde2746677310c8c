"""Blocks run alone as the model runs them."""

import torch
from torch import Tensor, nn

from fit.cases import build_training, llama
from tonnage.fit.measure.measuring import _forward_block, capture_calls
from tonnage.fit.modules import find_blocks
from tonnage.fit.training import Training


def narrow(training: Training) -> None:
    plain = training.loss

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(model, batch)

    training.loss = loss


def type_inside_a_block(training: Training) -> torch.dtype:
    blocks = find_blocks(training.model)
    name, call = next(iter(capture_calls(training, blocks, training.sample).by_kind.values()))
    seen: list[torch.dtype] = []
    linear = next(module for module in blocks[name].modules() if isinstance(module, nn.Linear))
    handle = linear.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    _forward_block(training, blocks[name], call)
    handle.remove()
    return seen[0]


def test_a_block_alone_computes_under_the_autocast_of_the_loss() -> None:
    training = build_training(llama, dtype=torch.float32)
    assert type_inside_a_block(training) == torch.float32
    narrow(training)
    assert type_inside_a_block(training) == torch.bfloat16
