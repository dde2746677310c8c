"""Optimizers, schedulers, and what people do to gradients, to steps and to a model between them."""

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fit.zoo.building import (
    VOCABULARY,
    WIDTH,
    Case,
    Embedded,
    Tower,
    case,
    classify,
    kind,
    language,
    sequences,
    several,
    text,
    vectors,
)

# Optimizers -----------------------------------------------------------------------------------------------------------


def stepped_by(name: str, **settings: Any) -> Case:
    return case(Tower(), classify, several(vectors), optimizer=lambda p: getattr(torch.optim, name)(p, **settings))


@kind
def adam_with_amsgrad() -> Case:
    return stepped_by("Adam", lr=1e-3, amsgrad=True, weight_decay=1e-2)


@kind
def fused_adamw() -> Case:
    return stepped_by("AdamW", lr=1e-3, fused=True)


@kind
def nadam() -> Case:
    return stepped_by("NAdam", lr=1e-3)


@kind
def radam() -> Case:
    return stepped_by("RAdam", lr=1e-3)


@kind
def rprop() -> Case:
    return stepped_by("Rprop", lr=1e-3)


@kind
def asgd() -> Case:
    return stepped_by("ASGD", lr=1e-2)


@kind
def adagrad() -> Case:
    return stepped_by("Adagrad", lr=1e-2, initial_accumulator_value=0.1)


@kind
def adafactor() -> Case:
    return stepped_by("Adafactor", lr=1e-2)


@kind
def rmsprop() -> Case:
    return stepped_by("RMSprop", lr=1e-3, momentum=0.5, centered=True)


@kind
def sgd_with_momentum_and_dampening() -> Case:
    return stepped_by("SGD", lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=1e-2)


@kind
def sgd_with_nesterov_that_maximises() -> Case:
    return stepped_by("SGD", lr=1e-3, momentum=0.9, nesterov=True, maximize=True)


@kind
def lbfgs() -> Case:
    return stepped_by("LBFGS", lr=0.1, max_iter=3)


@kind
def muon_for_matrices() -> Case:
    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x).relu()
            return x

    return case(Matrices(), classify, several(vectors), optimizer=lambda p: torch.optim.Muon(p, lr=1e-2))


@kind
def sparse_embedding_with_sparse_adam() -> Case:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, VOCABULARY, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.embed(tokens)

    return case(Sparse(), language, several(text), optimizer=lambda p: torch.optim.SparseAdam(list(p), lr=1e-2))


class Lookahead(Optimizer):
    """By hand, with a count of its own outside the states: slow weights every third step."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(list(parameters), {"lr": lr})
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.taken += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                slow = state.setdefault("slow", parameter.clone())
                parameter.sub_(parameter.grad, alpha=group["lr"] / self.taken**0.5)
                if self.taken % 3 == 0:
                    parameter.copy_(slow.lerp_(parameter, 0.5))


@kind
def optimizer_by_hand_that_counts() -> Case:
    built = case(Tower(), classify, several(vectors), optimizer=Lookahead)
    built.also = lambda: built.optimizer.taken
    return built


class Decayed(torch.optim.SGD):
    """A subclass of torch's own that counts its steps and lets its rate fall."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2, momentum=0.9)
        self.taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 / self.taken
        return super().step(closure)


@kind
def optimizer_derived_from_torchs_own() -> Case:
    built = case(Tower(), classify, several(vectors), optimizer=Decayed)
    built.also = lambda: built.optimizer.taken
    return built


class Projected(torch.optim.Adam):
    """A subclass that leaves the step alone and changes what groups are made of."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group | {"betas": (0.8, 0.9)})


@kind
def optimizer_derived_with_other_groups() -> Case:
    return case(Tower(), classify, several(vectors), optimizer=lambda p: Projected(p, lr=1e-3))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    plain = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 3e-3}]


@kind
def groups_without_decay() -> Case:
    model = Tower()
    return case(model, classify, several(vectors), optimizer=lambda _: torch.optim.AdamW(two_groups(model), lr=1e-3))


@kind
def optimizer_over_a_part_of_the_model() -> Case:
    """The rest has gradients too, and nobody steps it."""
    model = Tower()
    return case(
        model, classify, several(vectors), optimizer=lambda _: torch.optim.AdamW(model.blocks.parameters(), 1e-3)
    )


@kind
def optimizer_that_has_stepped_before() -> Case:
    built = stepped_by("AdamW", lr=1e-3)
    for batch in built.batches:
        built.optimizer.zero_grad()
        built.loss(built.model, batch).backward()
        built.optimizer.step()
    return built


@kind
def rate_in_a_tensor() -> Case:
    return stepped_by("AdamW", lr=torch.tensor(1e-3, dtype=torch.float64), foreach=False)


# Schedules, clipping and hooks ----------------------------------------------------------------------------------------


@kind
def cosine_schedule_made_before_fit() -> Case:
    built = stepped_by("AdamW", lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(built.optimizer, 10)
    built.after_step, built.also = scheduler.step, lambda: scheduler.last_epoch
    return built


@kind
def one_cycle_made_before_fit() -> Case:
    """It moves momentum too, and wraps the optimizer's step to count."""
    built = stepped_by("SGD", lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(built.optimizer, 0.1, total_steps=20)
    built.after_step, built.also = scheduler.step, lambda: built.optimizer._opt_called
    return built


@kind
def clipped_gradients() -> Case:
    built = case(Embedded(), language, several(text))
    built.clip_norm = 0.05
    return built


@kind
def clipped_gradients_with_frozen_parts() -> Case:
    model = Embedded()
    model.embed.requires_grad_(False)
    return case(model, language, several(text), clip_norm=0.05)


@kind
def hooks_on_gradients() -> Case:
    """Hooks of the user's halve a gradient inside a block and outside."""
    model = Tower()
    for weight in (model.blocks[0].mlp[0].weight, model.head.weight):
        weight.register_hook(lambda gradient: gradient * 0.5)
    return case(model, classify, several(vectors))


@kind
def hook_that_clips_each_gradient() -> Case:
    """Elementwise, as recipes have it: of a sum it is not the sum of the clipped."""
    model = Tower()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
    return case(model, classify, several(vectors))


@kind
def hook_after_gradients_are_there() -> Case:
    model = Tower()

    def shrink(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    for parameter in model.blocks.parameters():
        parameter.register_post_accumulate_grad_hook(shrink)
    return case(model, classify, several(vectors))


@kind
def backward_hooks_of_modules() -> Case:
    """Gradients between blocks are scaled on their way."""
    model = Tower()
    for block in model.blocks:
        block.register_full_backward_hook(
            lambda _module, inputs, _outputs: tuple(0.5 * gradient for gradient in inputs)
        )
    return case(model, classify, several(sequences))


@kind
def hooks_around_the_step() -> Case:
    """Weights are clamped after every step, as a critic's are, and gradients changed before it."""
    built = stepped_by("RMSprop", lr=1e-2)

    def scale(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    @torch.no_grad()
    def clamp(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.2, 0.2)

    built.optimizer.register_step_pre_hook(scale)
    built.optimizer.register_step_post_hook(clamp)
    return built


@kind
def step_wrapped_by_the_user() -> Case:
    """`optimizer.step` replaced on the object, as loggers and accelerators do."""
    built, taken = stepped_by("AdamW", lr=1e-3), []
    plain = built.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        taken.append(1)
        return plain(*args, **kwargs)

    built.optimizer.step = step
    built.also = lambda: len(taken)
    return built


# Between steps --------------------------------------------------------------------------------------------------------


@kind
def average_of_the_model_after_fit() -> Case:
    built, averages = stepped_by("AdamW", lr=1e-2), []

    def begin() -> None:
        averages.append(AveragedModel(built.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True))

    built.after_fit, built.after_step = begin, lambda: averages[0].update_parameters(built.model)
    built.also = lambda: [*averages[0].parameters(), averages[0](built.batches[0]["x"])]
    return built


@kind
def average_by_a_deep_copy_after_fit() -> Case:
    """The copy must be a model of its own: what it computes may not come from the one that trains."""
    built, copies = case(Embedded(), language, several(text)), []

    @torch.no_grad()
    def follow() -> None:
        for slow, fast in zip(copies[0].parameters(), built.model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

    built.after_fit, built.after_step = lambda: copies.append(copy.deepcopy(built.model)), follow
    built.also = lambda: [*copies[0].parameters(), copies[0](built.batches[0]["input_ids"]) + 0.0]
    return built


@kind
def whole_model_saved_after_fit() -> Case:
    """`torch.save(model)`, and what is loaded computes what was saved."""
    built, saved = case(Embedded(), language, several(text)), io.BytesIO()

    def computed() -> Tensor:
        saved.seek(0)
        return torch.load(saved, weights_only=False)(built.batches[0]["input_ids"]) + 0.0

    built.after_fit, built.also = lambda: torch.save(built.model, saved), computed
    return built


@kind
def checkpoint_loaded_midway() -> Case:
    """State dicts are taken after the first step and loaded again after the fourth."""
    built, steps, kept = stepped_by("AdamW", lr=1e-2), [], []

    def after() -> None:
        steps.append(1)
        if len(steps) == 1:
            kept.append(copy.deepcopy((built.model.state_dict(), built.optimizer.state_dict())))
        if len(steps) == 4:
            built.model.load_state_dict(kept[0][0])
            built.optimizer.load_state_dict(kept[0][1])

    built.after_step = after
    return built


@kind
def validation_between_steps() -> Case:
    """Evaluation mode, no gradients, the loss of another batch, and back."""
    built, losses = case(Embedded(), language, several(text)), []

    def validate() -> None:
        built.model.eval()
        with torch.no_grad():
            losses.append(float(built.loss(built.model, built.batches[1])))
        built.model.train()

    built.after_step, built.also = validate, lambda: losses
    return built


@kind
def blocks_thawed_midway() -> Case:
    """Gradual unfreezing: the first block begins to train after the third step."""
    model, steps = Tower(), []
    model.blocks[0].requires_grad_(False)

    def after() -> None:
        steps.append(1)
        if len(steps) == 3:
            model.blocks[0].requires_grad_(True)

    return case(model, classify, several(vectors), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), after_step=after)


@kind
def model_that_is_compiled_already() -> Case:
    """Without a compiler: graphs are captured and run as they are."""
    built = case(Tower(), classify, several(vectors))
    built.model = torch.compile(built.model, backend="eager", dynamic=True)
    return built
