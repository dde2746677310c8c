"""One step of reinforcement learning as phases, with the memory each holds on a GPU.

| phase          | on the GPU beside what waits there                                                         |
|----------------|--------------------------------------------------------------------------------------------|
| rollout        | the engine: its weights, KV cache, CUDA graphs, the peak of a step                          |
| reward         | a forward pass of the reward model, if it is a model                                        |
| reference      | a forward pass for log-probabilities, by a frozen copy or the actor without its adapters    |
| old log-probs  | the same by the current actor                                                               |
| values         | a forward pass of the critic                                                                |
| train actor    | the peak of a training step, with logits of completions only                                |
| train critic   | the same of the critic                                                                      |
| sync           | the engine's weights, and the buffers in which the actor's are gathered or merged           |

What waits: weights and optimizer states of actor and critic, the frozen models, and what the engine keeps. Each may be offloaded
to the host until its phase (`Cast.offload`). A sleeping vLLM keeps its graphs and libraries, Tonnage's engine its buffers. This
module computes no times and makes no choices.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tonnage.budget.serving.forward import layer_elements
from tonnage.budget.serving.memory import ServingBudget
from tonnage.budget.serving.own_engine import ROUNDING
from tonnage.budget.terms import Term
from tonnage.budget.training.adapters import largest_matrix
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.loss import head_weights, loss_term
from tonnage.budget.training.memory import training_budget
from tonnage.hardware import Gpu
from tonnage.ledger import Category, Ledger
from tonnage.models.shape import ModelShape

Algorithm = Literal["grpo", "ppo", "rloo", "reinforce++", "dapo"]
Reference = Literal["copy", "adapters-off", "none"]
Movable = Literal["frozen", "optimizer", "weights"]
On = Literal["all", "trainer", "rollout"]
MOVABLE: tuple[Movable, ...] = ("frozen", "optimizer", "weights")

# Whether the loss has a KL term by default: TRL's `beta` is 0 for GRPO and 0.05 for RLOO, its `kl_coef` for PPO 0.05;
# DAPO has none.
KEEPS_REFERENCE = {"grpo": False, "dapo": False, "rloo": True, "ppo": True, "reinforce++": True}
# Terms of a training step that persist between steps, beside parameters and optimizer states.
_STAY = ("DDP buckets", "reduce bucket", "cuBLAS", "NCCL buffers", "CUDA context")
_BUFFERS = "buffers"


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one owner: the actor, critic, reference, reward model or engine."""

    owner: str
    term: Term

    @property
    def size_bytes(self) -> int:
        """Size in whole bytes."""
        return round(float(self.term.size_bytes))


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the step, and what one of its GPUs holds. `seconds` is 0 until a clock sets it."""

    name: str
    on: On
    held: tuple[Held, ...]
    seconds: float = 0.0

    @property
    def total_bytes(self) -> int:
        return sum(one.size_bytes for one in self.held)

    @property
    def allocated_bytes(self) -> int:
        """Peak allocated bytes of one process, as `torch.cuda.max_memory_allocated` reports them."""
        outside = (Category.CONTEXT, Category.FRAGMENTATION)
        found = (one for one in self.held if one.term.category not in outside and one.term.name != ROUNDING)
        return sum(one.size_bytes for one in found)

    @property
    def context_bytes(self) -> int:
        """Bytes outside torch's allocator."""
        return self.ledger[Category.CONTEXT]

    @property
    def ledger(self) -> Ledger:
        """Bytes by category."""
        return Ledger.of((one.term.category, one.size_bytes) for one in self.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """The models of a step and their settings. `training` is the actor's; the critic is trained the same way.

    `sleep` is vLLM's sleep level, 0 for none. `offload` lists what moves to the host while unused. `apart`: the engine
    runs on its own GPUs.
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
        """The critic's shape, with one output instead of the vocabulary."""
        return valued(self.critic) if self.critic else None


def valued(shape: ModelShape) -> ModelShape:
    """Return the model with a single output, as a critic or reward model has."""
    return replace(shape, logits=False, tied=False, head_parameters=shape.hidden)


def phases(cast: Cast, engine: ServingBudget | None) -> Iterator[Phase]:
    """Yield the phases in order; without an engine, only those of the trainer's GPUs."""
    on: On = "trainer" if cast.apart else "all"
    # What actor and critic hold at the peaks of their steps. One process trains both, with one context and one set of
    # libraries.
    crew = {"actor": [Held("actor", term) for term in training_budget(cast.shape, cast.training, cast.gpu).terms_at(0)]}
    if cast.critic_shape:
        terms = training_budget(cast.critic_shape, cast.training, cast.gpu).terms_at(0)
        shared = ("cuBLAS", "NCCL buffers", "CUDA context")
        crew["critic"] = [Held("critic", term) for term in terms if term.name not in shared]
    # 16-bit copies of frozen weights, sharded if the actor's parameters are.
    config, frozen = cast.training, []
    over = config.shard if config.zero == 3 else 1
    copies = [("reference", cast.shape)] if cast.reference == "copy" else []
    copies += [("reward model", valued(cast.reward))] if cast.reward else []
    for owner, shape in copies:
        numbers = {"parameters": shape.parameters, "bytes": config.compute_bytes, "shards": over}
        size, formula = float(shape.parameters * config.compute_bytes / over), "parameters × bytes ÷ shards"
        frozen.append(Held(owner, Term(Category.PARAMETERS, "weights", size, formula, numbers)))

    def waiting(busy: str = "") -> Iterator[Held]:
        """Yield what all models keep on the GPU between steps, including the weights of the `busy` one."""
        for one in (one for held in crew.values() for one in held):
            category, name = one.term.category, one.term.name
            weights = category is Category.PARAMETERS and name != "gathered parameters"
            if weights and ("weights" not in cast.offload or one.owner == busy):
                yield one
            if category is Category.OPTIMIZER_STATES and "optimizer" not in cast.offload:
                yield one
            if name in _STAY or (config.traits.keeps_gradients and name == "gradients"):
                yield one
        yield from (one for one in frozen if "frozen" not in cast.offload or one.owner == busy)

    def asleep(state: str) -> list[Held]:
        return list(_engine(cast, engine, state)) if engine and not cast.apart else []

    quiet = "asleep" if cast.sleep else "idle"
    if engine and cast.apart:
        yield Phase("rollout", "rollout", tuple(_engine(cast, engine, "rollout")))
    elif engine:
        yield Phase("rollout", on, (*waiting("actor" if cast.share_weights else ""), *asleep("rollout")))
    # Passes without gradients: their names, owners and shapes.
    owner = "reference" if cast.reference == "copy" else "actor"
    forwards = [("reward", "reward model", valued(cast.reward))] if cast.reward else []
    forwards += [("reference", owner, cast.shape)] if cast.reference != "none" else []
    forwards += [("old log-probs", "actor", cast.shape)] if cast.old_log_probs else []
    forwards += [("values", "critic", cast.critic_shape)] if cast.critic_shape else []
    for name, owner, shape in forwards:
        yield Phase(name, on, (*waiting(owner), *_forward(owner, shape, cast), *asleep(quiet)))
    for owner, held in crew.items():
        others = [one for one in waiting(owner) if one.owner != owner]
        yield Phase(f"train {owner}", on, (*others, *held, *asleep(quiet)))
    if engine and not cast.share_weights:
        state = "weights" if cast.sleep else "idle"
        yield Phase("sync", on, (*waiting("actor"), *_gathered(cast), *asleep(state)))


def _forward(owner: str, shape: ModelShape, cast: Cast) -> Iterator[Held]:
    """Yield a pass without gradients: the larger of widest layer and logits, and gathered or cast weights."""
    config = cast.training
    tokens = float(config.tokens)
    width = 4 if config.autocast else config.compute_bytes
    widest = max(layer_elements(layer, shape.hidden, 1, held=2) for layer in shape.decoder.layers)
    layers = tokens * widest * config.compute_bytes
    logits = loss_term(shape, config, "forward").size_bytes + tokens * shape.hidden * width
    numbers = {"layers": layers, "logits": logits, "tokens": tokens}
    size = float(max(layers, logits if shape.logits else 0.0))
    yield Held(owner, Term(Category.ACTIVATIONS, "forward pass", size, "max(layers, logits)", numbers, "model"))
    if config.autocast and owner != "reference" and owner != "reward model":
        casts = 2.0 * (sum(layer.parameters for layer in shape.decoder.layers) + head_weights(shape))
        formula, counted = "2 B × weights", {"weights": casts / 2}
        yield Held(owner, Term(Category.WORKSPACE, "autocast copies of weights", casts, formula, counted, "model"))
    if config.shards_parameters:
        budget = training_budget(shape, config, cast.gpu)
        yield from (Held(owner, term) for term in budget.terms_at(0) if term.name == "gathered parameters")


def _engine(cast: Cast, budget: ServingBudget, state: str) -> Iterator[Held]:
    """Yield the engine's terms in a state: "rollout", "idle", "asleep", or "weights" (awake without the cache)."""
    tonnage = budget.configuration.engine == "tonnage"
    alone = cast.apart or cast.own_process
    for term in budget.terms:
        category = term.category
        here = not tonnage or state in ("rollout", "idle") or term.name == _BUFFERS
        if category is Category.PARAMETERS:
            # vLLM's sleep discards or offloads the weights, Tonnage's engine keeps them.
            here = not cast.share_weights and (tonnage or state != "asleep")
        elif category is Category.KV_CACHE:
            here = state in ("rollout", "idle")
        elif category is Category.CONTEXT:
            here = alone
        elif category is Category.ACTIVATIONS:
            # In the same process, the trainer can reuse freed blocks.
            here = state == "rollout" or (alone and state == "idle")
        if here and term.size_bytes:
            yield Held("engine", term)


def _gathered(cast: Cast) -> Iterator[Held]:
    """Yield the buffers through which weights go to the engine: one whole parameter at a time if they are sharded.

    Adapters are merged into the base first, matrix by matrix; DeepSpeed's ZeRO 3 gathers the whole base for that.
    """
    config, shape = cast.training, cast.shape
    size = 0.0
    if config.lora_rank:
        size = float(config.compute_bytes * largest_matrix(shape))
        if config.shards_parameters and config.framework == "deepspeed":
            size += float(config.base_bytes * shape.parameters)
    elif config.shards_parameters:
        largest = max(head_weights(shape), largest_matrix(shape))
        size = float(largest * (config.parameter_bytes + config.compute_bytes))
    if size:
        words = "the largest parameter"
        yield Held("actor", Term(Category.WORKSPACE, "weights on their way", size, words, source="model"))
