"""A frozen reference or teacher beside the trained model: its weights and the memory of its forward pass.

It is sharded as the framework shards parameters: TRL passes a reference to DeepSpeed's ZeRO 3 or to FSDP2 if the policy
uses them, and otherwise keeps it whole on every GPU.
"""

from dataclasses import replace

import numpy as np

from tonnage.budget.activations import FP32
from tonnage.budget.adapters import largest_matrix
from tonnage.budget.configuration import Configuration, Quantity
from tonnage.budget.forward import layer_elements
from tonnage.budget.frameworks import MAX_LIVE_PARAMETERS, framework_of, working_bytes
from tonnage.budget.loss import head_weights
from tonnage.budget.sharding import StageParameters, block_parameters, sharded, stages
from tonnage.budget.states import base_terms, sharded_parameters
from tonnage.budget.terms import Term, model_term
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape

# Hidden-size vectors beside those of attention or MLP: the residual, and a norm's input and output.
_HELD = 3


def frozen_weights(shape: ModelShape, configuration: Configuration) -> list[Term]:
    """Return its weights on one GPU; empty without one, or if it is the trained model with adapters off."""
    objective = configuration.objective
    if not objective.holds_frozen:
        return []
    name, stage, frozen = objective.frozen_name, _stage(shape, configuration), _as_kept(configuration)
    count = sharded(stage, configuration, framework_of(configuration).parameters_sharded_from)
    if objective.teacher is None and not configuration.lora_rank:
        # Loaded as the trained one is.
        size = working_bytes(configuration)
        numbers, formula = {"parameters": count, "bytes": size}, "parameters on this GPU × bytes"
        return [Term(Category.PARAMETERS, f"{name} parameters", count * size, formula, numbers)]
    terms = base_terms(objective.frozen_shape(shape), stage, frozen, count / stage.parameters)
    return [replace(term, name=term.name.replace("frozen", name)) for term in terms]


def frozen_copies(shape: ModelShape, configuration: Configuration) -> list[Term]:
    """Return its weights in another dtype while it runs: autocast's copies, or a dequantized matrix."""
    objective = configuration.objective
    if not objective.holds_frozen:
        return []
    frozen = _as_kept(configuration)
    if frozen.quantized_base:
        size = frozen.compute_bytes * largest_matrix(objective.frozen_shape(shape))
        name = f"a matrix of the {objective.frozen_name} made wide"
        return [model_term(Category.WORKSPACE, name, size, "bytes × weights")]
    if not configuration.autocast or objective.teacher is not None:
        return []
    count = _stage(shape, configuration).dense + head_weights(shape)
    name = f"autocast copies of the {objective.frozen_name}"
    return [model_term(Category.WORKSPACE, name, 2 * count, "2 B × weights", weights=count)]


def frozen_block(shape: ModelShape, configuration: Configuration, tokens: Quantity) -> Term:
    """Return what its largest block holds without gradients."""
    objective = configuration.objective
    frozen = objective.frozen_shape(shape)
    layers = [(layer, stack.hidden) for stack in frozen.stacks for layer, _ in stack.groups()]
    elements = max(layer_elements(layer, hidden, 1, held=_HELD) for layer, hidden in layers)
    size = FP32 if configuration.autocast and objective.teacher is None else configuration.compute_bytes
    numbers = {"bytes": size, "elements": elements, "tokens": tokens}
    name, formula = f"one block of the {objective.frozen_name}", "bytes × elements × tokens"
    return model_term(Category.ACTIVATIONS, name, size * elements * tokens, formula, **numbers)


def frozen_gathered(shape: ModelShape, configuration: Configuration) -> list[Term]:
    """Return the sharded weights that are gathered at once while it runs."""
    objective, stage = configuration.objective, _stage(shape, configuration)
    frozen = objective.frozen_shape(shape)
    if not sharded_parameters(configuration) or not objective.holds_frozen:
        return []
    if configuration.framework == "deepspeed":
        count = np.minimum(stage.parameters, MAX_LIVE_PARAMETERS)
    elif objective.teacher is None or configuration.zero < 3:
        # TRL wraps a reference for FSDP2 as one unit; without resharding after a pass, all of it is gathered at the
        # end.
        count = stage.parameters
    else:
        count = np.minimum(stage.outside + 2 * block_parameters(frozen, configuration), stage.parameters)
    size = _as_kept(configuration).base_bytes
    name, numbers = f"gathered parameters of the {objective.frozen_name}", {"bytes": size, "parameters": count}
    return [model_term(Category.PARAMETERS, name, size * count, "bytes × parameters", **numbers)]


def _stage(shape: ModelShape, configuration: Configuration) -> StageParameters:
    """Return the whole model as one stage: pipelines are not combined with frozen models."""
    return next(stages(configuration.objective.frozen_shape(shape), configuration))


def _as_kept(configuration: Configuration) -> Configuration:
    """Return the configuration with the frozen model's base format."""
    objective = configuration.objective
    return configuration if objective.teacher is None else replace(configuration, base=objective.teacher_base)
