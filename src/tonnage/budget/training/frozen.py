"""A frozen reference or teacher beside the trained model: its weights and the memory of its forward pass.

It is sharded as the framework shards parameters: TRL passes a reference to DeepSpeed's ZeRO 3 or to FSDP2 if the policy
uses them, and otherwise keeps it whole on every GPU.
"""

from dataclasses import replace

import numpy as np

from tonnage.budget.serving.forward import layer_elements
from tonnage.budget.terms import Term, model_term, product_term
from tonnage.budget.training.activations import FP32
from tonnage.budget.training.adapters import largest_matrix
from tonnage.budget.training.configuration import MAX_LIVE_PARAMETERS, Configuration
from tonnage.budget.training.loss import head_weights
from tonnage.budget.training.states import StageShare, base_terms, stages
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape

# Hidden-size vectors beside those of attention or MLP: the residual, and a norm's input and output.
_HELD = 3


def frozen_weights(shape: ModelShape, config: Configuration) -> list[Term]:
    """Return its weights on one GPU; empty without one, or if it is the trained model with adapters off."""
    objective = config.objective
    if not objective.holds_frozen:
        return []
    name, stage = objective.frozen_name, _stage(shape, config)
    count = stage.parameters_kept
    if objective.teacher is None and not config.lora_rank:
        # Loaded as the trained one is.
        size = config.working_bytes
        numbers, formula = {"parameters": count, "bytes": size}, "parameters on this GPU × bytes"
        return [Term(Category.PARAMETERS, f"{name} parameters", count * size, formula, numbers)]
    terms = base_terms(stage, count / stage.parameters)
    return [replace(term, name=term.name.replace("frozen", name)) for term in terms]


def frozen_pass(shape: ModelShape, config: Configuration) -> tuple[list[Term], Term]:
    """Return what its forward pass takes: weights in another dtype or gathered, and its largest block."""
    objective, name = config.objective, config.objective.frozen_name
    stage = _stage(shape, config)
    read: list[Term] = []
    autocast = config.autocast and objective.teacher is None
    # Autocast's copies, or a dequantized matrix.
    if objective.holds_frozen and stage.configuration.quantized_base:
        size = stage.configuration.compute_bytes * largest_matrix(stage.shape)
        read.append(model_term(Category.WORKSPACE, f"a matrix of the {name} made wide", size, "bytes × weights"))
    elif objective.holds_frozen and autocast:
        count, words = stage.dense + head_weights(shape), f"autocast copies of the {name}"
        read.append(model_term(Category.WORKSPACE, words, 2 * count, "2 B × weights", weights=count))
    if objective.holds_frozen and config.shards_parameters:
        if config.framework == "deepspeed":
            count = np.minimum(stage.parameters, MAX_LIVE_PARAMETERS)
        elif objective.teacher is None or config.zero < 3:
            # TRL wraps a reference for FSDP2 as one unit; without resharding after a pass, all of it is gathered at the
            # end.
            count = stage.parameters
        else:
            count = np.minimum(stage.outside + 2 * stage.largest_block, stage.parameters)
        numbers = {"bytes": stage.configuration.base_bytes, "parameters": count}
        read.append(product_term(Category.PARAMETERS, f"gathered parameters of the {name}", **numbers))
    layers = [(layer, stack.hidden) for stack in stage.shape.stacks for layer, _ in stack.groups()]
    elements = max(layer_elements(layer, hidden, 1, held=_HELD) for layer, hidden in layers)
    numbers = {"bytes": FP32 if autocast else config.compute_bytes, "elements": elements, "tokens": config.tokens}
    return read, product_term(Category.ACTIVATIONS, f"one block of the {name}", **numbers)


def _stage(shape: ModelShape, config: Configuration) -> StageShare:
    """Return the whole frozen model as one stage, in its base format: pipelines are not combined with frozen models."""
    objective = config.objective
    kept = config if objective.teacher is None else replace(config, base=objective.teacher_base)
    return next(stages(objective.teacher or shape, kept))
