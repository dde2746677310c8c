"""Models as transformers builds them, on the meta device, to hold our counts against."""

import contextlib
import copy
import logging
import random
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import torchvision_names  # noqa: F401

# isort: split
import transformers
from transformers.initialization import no_init_weights

LAYERS = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_(en|de)coder_layers)$")
# Switches of bookkeeping, and those that change what class fits.
KEPT = {"is_encoder_decoder", "is_decoder", "use_cache", "return_dict"}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers warns of every odd configuration; these are odd on purpose."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def config_of(model_type: str, values: Mapping[str, Any]) -> Any:
    """The configuration object."""
    return transformers.AutoConfig.for_model(model_type, **copy.deepcopy(dict(values)))


def built(architecture: str, config: Any) -> int:
    """How many parameters the class has when it is built from the configuration."""
    with quiet(), torch.device("meta"), no_init_weights():
        model = getattr(transformers, architecture)(config)
        model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def varied(defaults: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """A configuration like the default one, with other numbers and some switches turned."""
    wider = rng.choice([1, 2, 3])
    return {name: _varied(name, value, rng, wider) for name, value in defaults.items()}


def _varied(name: str, value: Any, rng: random.Random, wider: int) -> Any:
    if isinstance(value, Mapping):
        return varied(value, rng)
    if isinstance(value, bool):
        return value if name in KEPT or rng.random() < 0.8 else not value
    if not isinstance(value, int):
        return value
    if LAYERS.search(name):
        return rng.choice([2, 3, 4, 6])
    if name in ("hidden_size", "n_embd", "d_model", "dim"):
        return value * wider
    if name in ("vocab_size", "max_position_embeddings", "n_positions"):
        return value + rng.choice([0, 64, 128])
    doubles = re.search(r"intermediate|ffn|d_ff|n_inner", name) or (name.endswith("experts") and value > 1)
    return value * rng.choice([1, 2]) if doubles else value
