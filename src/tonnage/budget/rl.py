"""One step of reinforcement learning as phases: what is on a card in each of them.

| phase          | on the card beside what waits there                                                        |
|----------------|--------------------------------------------------------------------------------------------|
| rollout        | the engine: its weights, KV cache, CUDA graphs, the peak of a step                          |
| reward         | a forward pass of the reward model, where it is a model                                     |
| reference      | a forward pass for log-probabilities, by a frozen copy or the actor without its adapters    |
| old log-probs  | the same by the actor as it is                                                              |
| values         | a forward pass of the critic                                                                |
| train actor    | the worst moment of a training step, with logits of completions alone                       |
| train critic   | the same of the critic                                                                      |
| sync           | the engine's weights, and what the actor's are gathered or merged in                        |

What waits: weights and optimizer states of the actor and the critic, the frozen models, and what the engine keeps. Each may
lie on the host until its phase (`Cast.offload`); a sleeping vLLM keeps its graphs and libraries, an engine of ours its buffers.
This module does not know how long a phase takes, and chooses nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tonnage.budget.adapters import largest_matrix
from tonnage.budget.configuration import Configuration
from tonnage.budget.forward import layer_elements
from tonnage.budget.frameworks import framework_of
from tonnage.budget.loss import head_weights, loss_term
from tonnage.budget.own_engine import GRAPHS, ROUNDING
from tonnage.budget.serving import ServingBudget
from tonnage.budget.states import sharded_parameters
from tonnage.budget.terms import Term
from tonnage.budget.training import training_budget
from tonnage.hardware import Gpu
from tonnage.ledger import Category, Ledger
from tonnage.models.shape import ModelShape

Algorithm = Literal["grpo", "ppo", "rloo", "reinforce++", "dapo"]
Reference = Literal["copy", "adapters-off", "none"]
Movable = Literal["frozen", "optimizer", "weights"]
On = Literal["all", "trainer", "rollout"]
MOVABLE: tuple[Movable, ...] = ("frozen", "optimizer", "weights")

# Whose loss has a KL term by default: TRL's `beta` is 0 for GRPO and 0.05 for RLOO, its `kl_coef` for PPO 0.05; DAPO has none.
KEEPS_REFERENCE = {"grpo": False, "dapo": False, "rloo": True, "ppo": True, "reinforce++": True}
# Terms of a training step that stay between steps beside parameters and optimizer states.
_STAY = ("DDP buckets", "reduce bucket", "cuBLAS", "NCCL buffers", "CUDA context")
_BUFFERS = "buffers"


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one owner: the actor, the critic, the reference, the reward model or the engine."""

    owner: str
    term: Term

    @property
    def size_bytes(self) -> int:
        """In whole bytes."""
        return round(float(self.term.size_bytes))


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the step: what one of the cards that it runs on holds. `seconds` is 0 until a clock says."""

    name: str
    on: On
    held: tuple[Held, ...]
    seconds: float = 0.0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(one.size_bytes for one in self.held)

    @property
    def allocated_bytes(self) -> int:
        """What `torch.cuda.max_memory_allocated` would say of one process."""
        outside = (Category.CONTEXT, Category.FRAGMENTATION)
        found = (one for one in self.held if one.term.category not in outside and one.term.name != ROUNDING)
        return sum(one.size_bytes for one in found)

    @property
    def context_bytes(self) -> int:
        """Outside of torch's allocator."""
        return self.ledger[Category.CONTEXT]

    @property
    def ledger(self) -> Ledger:
        """By category."""
        return Ledger.of((one.term.category, one.size_bytes) for one in self.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Who takes part in a step, and how. `training` is of the actor; the critic is trained likewise.

    `sleep` 0: the engine stays as it is between rollouts; 1 and 2 as vLLM has them. `offload`: what lies on the host while it
    is not in use. `apart`: the engine has cards of its own.
    """

    shape: ModelShape
    gpu: Gpu
    training: Configuration
    reference: Reference = "none"
    reward: ModelShape | None = None
    critic: ModelShape | None = None
    old_log_probs: bool = True
    sleep: int = 0
    share_weights: bool = False
    own_process: bool = False
    apart: bool = False
    offload: frozenset[Movable] = frozenset()

    @property
    def critic_shape(self) -> ModelShape | None:
        """With one output in the place of the vocabulary."""
        return valued(self.critic) if self.critic else None


def valued(shape: ModelShape) -> ModelShape:
    """A model that ends in one number: a critic or a reward model."""
    return replace(shape, logits=False, tied=False, head_parameters=shape.hidden)


def phases(cast: Cast, engine: ServingBudget | None) -> Iterator[Phase]:
    """In the order of the step; without an engine, those of the trainer's cards alone, as if it were not there."""
    on: On = "trainer" if cast.apart else "all"
    actor = _trained("actor", cast.shape, cast)
    critic = _trained("critic", cast.critic_shape, cast) if cast.critic_shape else None
    frozen = list(_frozen(cast))
    crew = [actor, critic] if critic else [actor]

    def waiting(busy: str = "") -> list[Held]:
        """What everybody keeps on the card; of who is `busy`, the weights too that are on the host otherwise."""
        kept = [one for model in crew for one in model.resting(cast, model.owner == busy)]
        kept += [one for one in frozen if "frozen" not in cast.offload or one.owner == busy]
        return kept

    def asleep(state: str) -> list[Held]:
        return list(_engine(cast, engine, state)) if engine and not cast.apart else []

    quiet = "asleep" if cast.sleep else "idle"
    if engine and cast.apart:
        yield Phase("rollout", "rollout", tuple(_engine(cast, engine, "rollout")))
    elif engine:
        yield Phase("rollout", on, (*waiting("actor" if cast.share_weights else ""), *asleep("rollout")))
    for name, owner, shape in _forwards(cast):
        yield Phase(name, on, (*waiting(owner), *_forward(owner, shape, cast), *asleep(quiet)))
    for model in crew:
        others = [one for one in waiting(model.owner) if one.owner != model.owner]
        yield Phase(f"train {model.owner}", on, (*others, *model.training, *asleep(quiet)))
    if engine and not cast.share_weights:
        state = "weights" if cast.sleep else "idle"
        yield Phase("sync", on, (*waiting("actor"), *_gathered(cast), *asleep(state)))


# -- models that are trained


@dataclass(frozen=True, slots=True)
class _Trained:
    """The actor or the critic: what it has at the worst moment of its step, and what of that stays."""

    owner: str
    training: tuple[Held, ...]

    def resting(self, cast: Cast, busy: bool) -> Iterator[Held]:
        """Between steps; `busy`: its weights are on the card, wherever they lie otherwise."""
        keeps = framework_of(cast.training).keeps_gradients
        for one in self.training:
            category, name = one.term.category, one.term.name
            weights = category is Category.PARAMETERS and name != "gathered parameters"
            if weights and ("weights" not in cast.offload or busy):
                yield one
            if category is Category.OPTIMIZER_STATES and "optimizer" not in cast.offload:
                yield one
            if name in _STAY or (keeps and name == "gradients"):
                yield one


def _trained(owner: str, shape: ModelShape, cast: Cast) -> _Trained:
    budget = training_budget(shape, cast.training, cast.gpu)
    held = [Held(owner, term) for term in budget.terms_at(0)]
    if owner != "actor":
        # One process trains both, with one context and one set of libraries.
        held = [one for one in held if one.term.name not in ("cuBLAS", "NCCL buffers", "CUDA context")]
    return _Trained(owner, tuple(held))


# -- frozen models and forward passes


def _frozen(cast: Cast) -> Iterator[Held]:
    """Copies of weights in 16 bits, sharded where the actor's parameters are."""
    configuration = cast.training
    over = configuration.shard if configuration.zero == 3 else 1
    copies = [("reference", cast.shape)] if cast.reference == "copy" else []
    copies += [("reward model", valued(cast.reward))] if cast.reward else []
    for owner, shape in copies:
        numbers = {"parameters": shape.parameters, "bytes": configuration.compute_bytes, "shards": over}
        size = float(shape.parameters * configuration.compute_bytes / over)
        yield Held(owner, Term(Category.PARAMETERS, "weights", size, "parameters × bytes ÷ shards", numbers))


def _forwards(cast: Cast) -> Iterator[tuple[str, str, ModelShape]]:
    """Name, owner and shape of each pass without gradients."""
    if cast.reward:
        yield "reward", "reward model", valued(cast.reward)
    if cast.reference != "none":
        yield "reference", "reference" if cast.reference == "copy" else "actor", cast.shape
    if cast.old_log_probs:
        yield "old log-probs", "actor", cast.shape
    if cast.critic_shape:
        yield "values", "critic", cast.critic_shape


def _forward(owner: str, shape: ModelShape, cast: Cast) -> Iterator[Held]:
    """Nothing is kept for a backward pass: the worst layer or the logits, whichever is more; and what is gathered or cast."""
    configuration = cast.training
    tokens = float(configuration.tokens)
    width = 4 if configuration.autocast else configuration.compute_bytes
    widest = max(layer_elements(layer, shape.hidden, 1, held=2) for layer in shape.decoder.layers)
    layers = tokens * widest * configuration.compute_bytes
    logits = loss_term(shape, configuration, tokens, "forward").size_bytes + tokens * shape.hidden * width
    numbers = {"layers": layers, "logits": logits, "tokens": tokens}
    size = float(max(layers, logits if shape.logits else 0.0))
    yield Held(owner, Term(Category.ACTIVATIONS, "forward pass", size, "max(layers, logits)", numbers, "model"))
    if configuration.autocast and owner != "reference" and owner != "reward model":
        casts = 2.0 * (sum(layer.parameters for layer in shape.decoder.layers) + head_weights(shape))
        formula, counted = "2 B × weights", {"weights": casts / 2}
        yield Held(owner, Term(Category.WORKSPACE, "autocast copies of weights", casts, formula, counted, "model"))
    if sharded_parameters(configuration):
        budget = training_budget(shape, configuration, cast.gpu)
        yield from (Held(owner, term) for term in budget.terms_at(0) if term.name == "gathered parameters")


# -- the engine


def _engine(cast: Cast, budget: ServingBudget, state: str) -> Iterator[Held]:
    """Of a budget's terms those that a state keeps: "rollout", "idle", "asleep", or "weights" (awake but for the cache)."""
    tonnage = budget.configuration.engine == "tonnage"
    alone = cast.apart or cast.own_process
    for term in budget.terms:
        category = term.category
        if category is Category.PARAMETERS:
            # vLLM's sleep takes the weights away, ours leaves them.
            here = not cast.share_weights and (tonnage or state != "asleep")
        elif category is Category.KV_CACHE:
            here = state in ("rollout", "idle")
        elif category is Category.CONTEXT:
            here = alone
        elif category is Category.ACTIVATIONS:
            # Freed blocks are the trainer's to use where it is the same process.
            here = state == "rollout" or (alone and state == "idle")
        elif term.name == GRAPHS:
            here = not tonnage or state in ("rollout", "idle")
        else:
            here = not tonnage or state in ("rollout", "idle") or term.name == _BUFFERS
        if here and term.size_bytes:
            yield Held("engine", term)


def _gathered(cast: Cast) -> Iterator[Held]:
    """What weights pass through on their way to the engine: one whole parameter at a time where they are sharded.

    Adapters are merged into the base first, a matrix at a time; DeepSpeed's ZeRO 3 gathers the whole base for that.
    """
    configuration, shape = cast.training, cast.shape
    size = 0.0
    if configuration.lora_rank:
        size = float(configuration.compute_bytes * largest_matrix(shape))
        if sharded_parameters(configuration) and configuration.framework == "deepspeed":
            size += float(configuration.base_bytes * shape.parameters)
    elif sharded_parameters(configuration):
        largest = max(head_weights(shape), largest_matrix(shape))
        size = float(largest * (configuration.parameter_bytes + configuration.compute_bytes))
    if size:
        yield Held(
            "actor", Term(Category.WORKSPACE, "weights on their way", size, "the largest parameter", {}, "model")
        )
