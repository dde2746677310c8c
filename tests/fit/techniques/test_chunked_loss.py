"""The loss in chunks, put into whole models."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchvision_names  # noqa: F401
from fit.cases import CASES, Case, assert_same_parameters, assert_same_training, build_training, gradients
from fit.observed import Largest
from fit.virtual_peaks import peaks
from tonnage.fit.stepping.step import take_step
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.chunked_loss import ChunkedLoss, find_head
from tonnage.fit.techniques.micro_batches import MicroBatches

# isort: split
from transformers import Gemma2Config, Gemma2ForCausalLM

HEADS = {"llama": "", "gpt2": "", "vit": "classifier", "dropout": "head"}


@pytest.mark.parametrize("chunk_bytes", [3000, 512 << 20])
@pytest.mark.parametrize("case", CASES)
def test_the_training_is_the_same(case: str, chunk_bytes: int) -> None:
    assert_same_training(CASES[case], ChunkedLoss(chunk_bytes=chunk_bytes, head=HEADS[case]))


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_equal_and_undo_gives_the_plain_model_back(case: str) -> None:
    training = build_training(CASES[case])
    expected = gradients(training)
    state = list(training.model.state_dict())
    undo = ChunkedLoss(chunk_bytes=3000, head=HEADS[case]).apply(training)
    torch.testing.assert_close(gradients(training), expected, rtol=1e-10, atol=1e-10)
    assert list(training.model.state_dict()) == state
    undo()
    assert not any("forward" in module.__dict__ for module in training.model.modules())


def _wide(loss: Callable[[nn.Module, dict[str, Tensor]], Tensor], vocabulary: int = 4000) -> Case:
    """A Gemma 2: a tied head over a vocabulary, its logits capped, and the loss of transformers itself."""
    config = Gemma2Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=5.0,
    )
    tokens = torch.randint(0, vocabulary, (2, 64))
    labels = tokens.masked_fill(torch.rand(2, 64) < 0.3, -100)
    return Gemma2ForCausalLM(config), {"input_ids": tokens, "labels": labels}, loss


@pytest.mark.parametrize("counted", [None, 50, torch.tensor(50)])
def test_the_loss_of_transformers_runs_in_chunks(counted: Tensor | int | None) -> None:
    extra = {} if counted is None else {"num_items_in_batch": counted}
    training = build_training(lambda: _wide(lambda model, batch: model(**batch, **extra).loss), dtype=torch.float32)
    expected = gradients(training)
    ChunkedLoss(chunk_bytes=8 * 4000 * 4).apply(training)
    with Largest() as largest:
        found = gradients(training)
    assert largest.elements <= 4000 * 16  # the head's own gradient; the logits would be eight times that
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_logits_of_a_step_can_be_read_and_text_generated() -> None:
    training = build_training(lambda: _wide(lambda model, batch: model(**batch).loss), dtype=torch.float32)
    tokens = training.sample["input_ids"]
    plain = training.model(**training.sample).logits.detach()
    written = training.model.generate(tokens[:1, :5], max_new_tokens=4, do_sample=False)
    ChunkedLoss(chunk_bytes=30_000).apply(training)
    output = training.model(**training.sample)
    output.loss.backward()
    torch.testing.assert_close(output.logits.detach() + 0, plain)
    assert torch.equal(training.model.generate(tokens[:1, :5], max_new_tokens=4, do_sample=False), written)


def test_the_head_of_a_plain_model_is_found_by_its_width() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 100), nn.Tanh(), nn.Linear(100, 2))
    training = build_training(lambda: (model, None, lambda model, batch: model(batch).sum()))
    ChunkedLoss().apply(training)
    assert "forward" in model[1].__dict__


def test_a_micro_batch_without_labels_adds_nothing() -> None:
    plain, fitted = build_training(CASES["llama"]), build_training(CASES["llama"])
    for training in (plain, fitted):
        training.sample["labels"][:2] = -100
    ChunkedLoss().apply(fitted)
    MicroBatches(count=2).apply(fitted)
    for _ in range(2):
        expected, found = (take_step(training, training.sample) for training in (plain, fitted))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert_same_parameters(plain.model, fitted.model, 1e-10)


def test_a_layer_before_the_blocks_is_no_head() -> None:
    """The hand-written model's first layer is wider than its input; its head is narrower, and must be named."""
    training = build_training(CASES["dropout"])
    assert find_head(training.model) is None
    assert ChunkedLoss(head="head").why_not(training) is None


class OwnLinear(nn.Linear):
    pass


def _hooked() -> nn.Linear:
    head = nn.Linear(4, 100)
    head.register_full_backward_hook(lambda *_: None)
    return head


def _replaced() -> nn.Linear:
    head = nn.Linear(4, 100)
    head.forward = lambda x: x  # type: ignore[method-assign]
    return head


@pytest.mark.parametrize(
    ("head", "settings", "words"),
    [
        (lambda: nn.Linear(4, 3), {}, "No linear layer over a vocabulary"),
        (lambda: nn.Linear(4, 100), {"head": "lm_head"}, "no module 'lm_head'"),
        (lambda: nn.Linear(4, 100), {"chunk_bytes": 0}, "at least one byte"),
        (lambda: OwnLinear(4, 100), {}, "OwnLinear"),
        (_hooked, {}, "backward hooks"),
        (_replaced, {}, "forward of its own"),
    ],
)
def test_what_cannot_be_is_said(head: Callable[[], nn.Module], settings: dict[str, object], words: str) -> None:
    training = build_training(lambda: (nn.Sequential(head()), None, lambda model, batch: model(batch).sum()))
    with pytest.raises(NotApplicable, match=words):
        ChunkedLoss(**settings).apply(training)


def test_on_the_virtual_gpu_a_chunk_and_the_heads_gradient_are_all_there_is() -> None:
    found = peaks("chunked-loss")
    logits_bytes, chunk_bytes, head_bytes = 512 << 20, 64 << 20, 16 << 20
    assert found["plain"] > 5 * logits_bytes
    assert found["chunked"] == pytest.approx(chunk_bytes + 2 * head_bytes, rel=0.06)
