"""Models whose blocks do more than compute their outputs: recomputed, they train as the plain ones do."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from fit.cases import Case, build_training, take_step
from tonnage.fit.modules import find_blocks
from tonnage.fit.recomputing.operators import operations_clock, profile_operators
from tonnage.fit.recomputing.sliced import first_calls
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.recompute import Recompute, recomputable
from tonnage.fit.training import Training

Build = Callable[[], Case]


class Block(nn.Module):
    """What the others are made of."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(x).tanh())


class SpectralBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.one = spectral_norm(self.one)


class OldSpectralBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.utils.spectral_norm(self.one)


class CountingBlock(Block):
    """Its output depends on a buffer written in place, a buffer that is replaced, a number and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.ones(()))
        self.register_buffer("replaced", torch.ones(()))
        self.number = 1
        self.numbers = [1]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.written.clone() / self.replaced + self.number * sum(self.numbers) * x
        self.written.mul_(1.5)
        self.replaced = self.replaced + 1
        self.number += 1
        self.numbers.append(len(self.numbers))
        return y


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class NoisyBlock(Block):
    """Draws from Python's and numpy's generators, and from some of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.others = [random.Random(4), numpy.random.default_rng(5), numpy.random.RandomState(6)]

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        python, numbers, old = self.others
        scale = random.random() + numpy.random.rand() + python.random() + numbers.random() + old.rand()
        return super().forward(x * noise * scale) * nn.functional.dropout(noise, 0.5)


class AuxiliaryBlock(Block):
    """Leaves a part of the loss in an attribute."""

    auxiliary: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).tanh()
        self.auxiliary = hidden.square().mean()
        return x + self.two(hidden)


class ListingBlock(Block):
    """The same in a list that the model empties."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliaries: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.auxiliaries.append(y.square().mean())
        return y


class TokenBlock(Block):
    """Fed with integers only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(self.embedding(tokens)), tokens


class HandedThrough(Block):
    """Returns its input beside its output, and a tensor without a gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, x, y.detach()


def _net(block: type[Block], loss: Callable[[nn.Module, Tensor], Tensor] | None = None) -> Build:
    def build() -> Case:
        model = nn.Sequential(nn.Linear(6, 6), block(), block())
        return model, torch.randn(5, 6, dtype=torch.float64), loss or (lambda m, x: m(x).square().mean())

    return build


def _with_attributes(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + sum(block.auxiliary for block in model[1:])


def _with_lists(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    for block in model[1:]:
        assert len(block.auxiliaries) == 1
        loss = loss + block.auxiliaries.pop()
    return loss


def _tokens_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    first, tokens = model[0](batch["tokens"])
    return first.square().mean() + model[1](tokens.flip(1))[0].cos().mean()


def _tokens() -> Case:
    return nn.Sequential(TokenBlock(), TokenBlock()), {"tokens": torch.randint(0, 9, (4, 3))}, _tokens_loss


def _handed_loss(model: nn.Module, x: Tensor) -> Tensor:
    y, same, plain = model[1](model[0](x))
    return (y * same * plain).mean()


EXACT: dict[str, Build] = {
    "spectral": _net(SpectralBlock),
    "old spectral": _net(OldSpectralBlock),
    "counting": _net(CountingBlock),
    "norm": _net(NormBlock),
    "noisy": _net(NoisyBlock),
    "attribute": _net(AuxiliaryBlock, _with_attributes),
    "list": _net(ListingBlock, _with_lists),
    "handed through": lambda: (_net(HandedThrough)()[0][:2], torch.randn(5, 6, dtype=torch.float64), _handed_loss),
    "tokens": _tokens,
}


def _block_names(model: nn.Module) -> list[str]:
    return list(find_blocks(model)) or [name for name, module in model.named_modules() if isinstance(module, Block)]


def _take_step(training: Training, seed: int) -> Tensor:
    random.seed(seed)
    numpy.random.seed(seed)
    return take_step(training, seed)


def _assert_same(build: Build, *, prepare: Callable[[nn.Module], Any] = lambda model: None, part: str = "") -> Training:
    """Three steps with every block recomputed end where the plain ones do, to the last bits of FP64."""
    plain, fitted = build_training(build), build_training(build)
    prepare(plain.model), prepare(fitted.model)
    names = _block_names(fitted.model)
    undo = Recompute(modes=dict.fromkeys(names, f"part:{part}" if part else "block")).apply(fitted)
    for step in range(3):
        torch.testing.assert_close(_take_step(fitted, step), _take_step(plain, step), rtol=1e-9, atol=1e-9)
        expected = {name: p.grad for name, p in plain.model.named_parameters()}
        found = {name: p.grad for name, p in fitted.model.named_parameters()}
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(fitted.model.state_dict(), plain.model.state_dict(), rtol=1e-9, atol=1e-9)
    undo()
    assert not any("forward" in vars(module) for module in fitted.model.modules())
    return fitted


@pytest.mark.parametrize("case", EXACT)
def test_what_a_block_does_beside_its_output_happens_once(case: str) -> None:
    _assert_same(EXACT[case])


def test_the_generators_go_on_as_in_plain_training() -> None:
    drawn = []
    for recomputed in (False, True):
        training = build_training(EXACT["noisy"])
        if recomputed:
            Recompute(modes=dict.fromkeys(_block_names(training.model), "block")).apply(training)
        _take_step(training, 0)
        own = training.model[1].others[0].random()
        drawn.append((torch.rand(1).item(), random.random(), numpy.random.rand(), own))
    assert drawn[0] == drawn[1]


_TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _language_model(name: str, **settings: Any) -> Build:
    """A model of transformers by the name of its configuration, with its own loss."""

    def build() -> Case:
        config = getattr(transformers, f"{name}Config")(**_TINY | settings)
        config._attn_implementation = config._experts_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config)
        tokens = torch.randint(3, 64, (4, 10))
        return model, {"input_ids": tokens, "labels": tokens}, lambda model, batch: model(**batch, use_cache=False).loss

    return build


def _with(build: Build, **wanted: bool) -> Build:
    """The same with more outputs, all of them part of the loss."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = model(**batch, use_cache=False, **wanted)
        found = [tensor for name in wanted for tensor in outputs[name.removeprefix("output_")]]
        assert found
        return outputs.loss + sum((tensor * torch.arange(tensor.shape[-1])).cos().mean() for tensor in found)

    return lambda: (*build()[:2], loss)


def _resnet() -> Case:
    config = transformers.ResNetConfig(
        num_channels=3, embedding_size=4, hidden_sizes=[4, 8], depths=[2, 2], layer_type="basic", num_labels=5
    )
    batch = {"pixel_values": torch.randn(4, 3, 16, 16, dtype=torch.float64), "labels": torch.randint(0, 5, (4,))}
    return transformers.ResNetForImageClassification(config), batch, lambda model, batch: model(**batch).loss


def _t5() -> Case:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    batch = {"input_ids": torch.randint(3, 64, (4, 7)), "labels": torch.randint(3, 64, (4, 5))}
    return transformers.T5ForConditionalGeneration(config), batch, lambda m, b: m(**b, use_cache=False).loss


def _modern_bert() -> Case:
    config = transformers.ModernBertConfig(**_TINY | {"local_attention": 4, "global_attn_every_n_layers": 2})
    tokens = torch.randint(3, 64, (4, 10))
    mask = torch.ones_like(tokens)
    mask[:, 8:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    return transformers.ModernBertForMaskedLM(config), batch, lambda model, batch: model(**batch).loss


_MIXTRAL = _language_model("Mixtral", num_local_experts=3, num_experts_per_tok=2, output_router_logits=True)
MODELS: dict[str, Build] = {
    "mixtral with router logits": _MIXTRAL,
    "qwen2-moe with router logits": _language_model(
        "Qwen2Moe",
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        output_router_logits=True,
    ),
    "llama with attentions": _with(_language_model("Llama"), output_attentions=True),
    "llama with hidden states": _with(_language_model("Llama"), output_hidden_states=True),
    "gemma 2": _language_model("Gemma2", sliding_window=4),
    "gemma 3": _language_model("Gemma3Text", sliding_window=4),
    "modern bert": _modern_bert,
    "t5": _t5,
    "resnet": _resnet,
}


def _operator_names(training: Training, name: str) -> list[str]:
    """Of the calls of one block, as a mode names them."""
    block = training.model.get_submodule(name)
    with torch.no_grad():
        args, kwargs = first_calls(training, {name: block})[name]
    operators = profile_operators(block, (args[0].detach().requires_grad_(), *args[1:]), kwargs, operations_clock)
    return [f"{operator.index}:{operator.name}" for operator in operators if operator.keepable]


def _two_kinds() -> Case:
    """Layers of one class that call different operators: every second one with a mask."""
    layers = [OftenMasked(masked=index % 2 == 1) for index in range(4)]
    return nn.Sequential(*layers), torch.randn(4, 6, dtype=torch.float64), lambda model, x: model(x).square().mean()


class OftenMasked(Block):
    """Calls an operator more with a mask, or where there are many rows."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        if self.masked or len(x) > 6:
            x = x.exp().log()
        return super().forward(x)


def test_operators_of_one_kind_of_layer_are_not_kept_in_another() -> None:
    training = build_training(_two_kinds)
    mode = _operator_names(training, "0")[:2]
    with pytest.raises(NotApplicable, match=r"1 calls other operators than those profiled.*use mode block"):
        Recompute(modes=dict.fromkeys("0123", mode)).apply(training)
    assert not any("forward" in vars(module) for module in training.model.modules())
    Recompute(modes={"0": mode, "1": "block", "2": mode, "3": _operator_names(training, "3")[:2]}).apply(training)
    plain = build_training(_two_kinds)
    torch.testing.assert_close(_take_step(training, 0), _take_step(plain, 0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(training.model.state_dict(), plain.model.state_dict(), rtol=1e-9, atol=1e-9)


def test_a_batch_with_which_other_operators_are_called_is_recomputed_whole() -> None:
    plain, fitted = build_training(_two_kinds), build_training(_two_kinds)
    mode = _operator_names(fitted, "0")[:2]
    Recompute(modes={"0": mode, "2": mode}).apply(fitted)
    for rows in (4, 7, 4, 9):
        for training in (plain, fitted):
            torch.manual_seed(rows)
            training.sample = torch.randn(rows, 6, dtype=torch.float64)
        torch.testing.assert_close(_take_step(fitted, 0), _take_step(plain, 0), rtol=1e-12, atol=1e-12)
        assert (fitted.model[0].forward.differs is not None) == (rows > 6)
    torch.testing.assert_close(fitted.model.state_dict(), plain.model.state_dict(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("model", ["gemma 2", "gemma 3", "modern bert", "t5"])
def test_kept_operators_of_models_with_two_kinds_of_layers(model: str) -> None:
    """Each block with a choice among its own operators."""
    plain, fitted = build_training(MODELS[model]), build_training(MODELS[model])
    names = find_blocks(fitted.model)
    Recompute(modes={name: _operator_names(fitted, name)[::7] for name in names}).apply(fitted)
    for step in range(2):
        torch.testing.assert_close(_take_step(fitted, step), _take_step(plain, step), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(fitted.model.state_dict(), plain.model.state_dict(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_models_of_transformers_train_the_same(model: str) -> None:
    _assert_same(MODELS[model])


def test_a_part_that_router_logits_leave_trains_the_same() -> None:
    _assert_same(_MIXTRAL, part="mlp")


def test_hooks_that_collect_outputs_are_installed_once() -> None:
    training = build_training(_MIXTRAL)
    Recompute.all(training.model).apply(training)
    for _ in range(2):
        assert len(training.model(**training.sample, use_cache=False).router_logits) == 4


def _freeze_all_but(*kept: str) -> Callable[[nn.Module], None]:
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in kept))

    return freeze


@pytest.mark.parametrize(
    "kept",
    [("layers.2.",), ("layers.3.mlp.up_proj",), ("q_proj", "v_proj"), ("embed_tokens",), ("lm_head",), ("norm",)],
    ids=str,
)
def test_with_frozen_parts_the_rest_trains_the_same(kept: tuple[str, ...]) -> None:
    _assert_same(_language_model("Llama", tie_word_embeddings=False), prepare=_freeze_all_but(*kept))


def test_adapters_of_peft_train_the_same() -> None:
    def build() -> Case:
        model, batch, loss = _language_model("Llama")()
        import peft

        config = peft.LoraConfig(r=2, lora_dropout=0.2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config), batch, loss

    _assert_same(build)


def _collecting(build: Build, outside: dict[str, Tensor] | list[Tensor]) -> Build:
    """A hook of the user's on an inner module collects what the loss reads."""

    def hooked() -> Case:
        model, batch, loss = build()

        def collect(module: nn.Module, args: Any, output: Tensor) -> None:
            if isinstance(outside, list):
                outside.append(output)
            else:
                outside["x"] = output

        model.model.layers[1].mlp.up_proj.register_forward_hook(collect)

        def with_collected(model: nn.Module, batch: Any) -> Tensor:
            outside.clear()
            whole = loss(model, batch)
            return whole + sum(x.square().mean() for x in (outside if isinstance(outside, list) else outside.values()))

        return model, batch, with_collected

    return hooked


@pytest.mark.parametrize("outside", [[], {}], ids=["list", "dict"])
def test_a_block_that_a_hook_collects_from_is_refused_and_the_others_train_the_same(outside: Any) -> None:
    build = _collecting(_language_model("Llama"), outside)
    plain, fitted = build_training(build), build_training(build)
    names = list(find_blocks(fitted.model))
    reasons = recomputable(fitted, names)
    assert [name for name in names if reasons[name]] == ["model.layers.1"]
    with pytest.raises(NotApplicable, match=r"model\.layers\.1 cannot run twice: something outside"):
        Recompute.all(fitted.model).apply(fitted)
    Recompute(modes={name: "block" for name in names if reasons[name] is None}).apply(fitted)
    torch.testing.assert_close(_take_step(fitted, 0), _take_step(plain, 0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fitted.model.state_dict(), plain.model.state_dict(), rtol=1e-9, atol=1e-9)


_COUNT = [0]
_GENERATOR = torch.Generator()


class GlobalBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        _COUNT[0] += 1
        return super().forward(x) * _COUNT[0]


class GlobalNoiseBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(x.shape, generator=_GENERATOR, dtype=x.dtype)


@pytest.mark.parametrize("block", [GlobalBlock, GlobalNoiseBlock])
def test_what_cannot_be_brought_back_is_refused(block: type[Block]) -> None:
    training = build_training(_net(block))
    assert recomputable(training, ["1"]) == {"1": "it gives other values when it runs again"}
    with pytest.raises(NotApplicable, match="1 cannot run twice: it gives other values"):
        Recompute(modes={"1": "block"}).apply(training)
    assert "forward" not in vars(training.model[1])


class FailingBlock(AuxiliaryBlock):
    """Fails in the run that it is told to fail in, in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        _LEFT[0] -= 1
        self.runs.add_(1)
        nn.functional.dropout(x, 0.5)
        if _LEFT[0] == 0:
            raise RuntimeError("as told")
        return super().forward(x)


_LEFT = [10**6]


@pytest.mark.parametrize("loss", [None, _with_attributes], ids=["plain", "beside"])
@pytest.mark.parametrize("run", [1, 2, 3, 4])
def test_a_run_that_fails_leaves_nothing_behind(loss: Any, run: int) -> None:
    """Two blocks run twice each: the failure is in either one, in forward or in backward."""
    plain, fitted = build_training(_net(FailingBlock, loss)), build_training(_net(FailingBlock, loss))
    Recompute(modes={"1": "block", "2": "block"}).apply(fitted)
    before = {name: set(vars(module)) for name, module in fitted.model.named_modules()}
    _LEFT[0] = run
    with pytest.raises(RuntimeError, match="as told"):
        _take_step(fitted, 0)
    _LEFT[0] = 10**6
    # It goes on as if nothing had been.
    fitted.model.zero_grad()
    for block in fitted.model[1:]:
        block.runs.zero_()
    torch.testing.assert_close(_take_step(fitted, 0), _take_step(plain, 0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fitted.model.state_dict(), plain.model.state_dict(), rtol=1e-9, atol=1e-9)
    assert {name: set(vars(module)) - {"auxiliary"} for name, module in fitted.model.named_modules()} == before


def test_a_trial_that_fails_leaves_nothing_behind() -> None:
    training = build_training(_net(FailingBlock))

    def failing(model: nn.Module, batch: Tensor) -> Tensor:
        model(batch)
        raise ValueError("no such loss")

    training.loss = failing
    before = {name: set(vars(module)) for name, module in training.model.named_modules()}
    with pytest.raises(ValueError, match="no such loss"):
        Recompute(modes={"1": "block"}).apply(training)
    assert {name: set(vars(module)) for name, module in training.model.named_modules()} == before


class HandingBlock(Block):
    """It hands on the bias that it was given, as T5's blocks do."""

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x) + bias, bias


class HandingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HandingBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.ones_like(x)
        for block in self.blocks:
            x, bias = block(x, bias)
        return x.square().mean()


def test_an_argument_without_gradient_that_a_block_hands_on_stays_without() -> None:
    def build() -> Case:
        batch = {"x": torch.ones(4, 6, dtype=torch.float64)}
        return HandingNet(), batch, lambda model, batch: model(batch["x"])

    plain, fitted = build_training(build), build_training(build)
    Recompute(modes={"blocks.1": "block", "blocks.2": "block"}).apply(fitted)
    for step in range(2):
        torch.testing.assert_close(_take_step(fitted, step), _take_step(plain, step), rtol=1e-12, atol=1e-12)
