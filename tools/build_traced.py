"""Build a transformers model on the meta device from a traced configuration, and list its tensors with expressions."""

import contextlib
import dataclasses
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import symbols
import torch
import torch.utils._device

with contextlib.suppress(ImportError, RuntimeError):
    import torchvision  # noqa: F401
if "torchvision" not in sys.modules:
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import transformers
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# torch remembers which functions take a device when it first looks; it must see the real ones.
torch.utils._device._device_constructors()
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
transformers.logging.set_verbosity_error()

ARCHITECTURES = Path(__file__).parents[1] / "src" / "tonnage" / "models" / "data" / "architectures.jsonl"
# Fields of the library's own bookkeeping: none reaches a tensor.
BOOKKEEPING = frozenset(
    "transformers_version architectures output_hidden_states return_dict dtype chunk_size_feed_forward id2label label2id "
    "problem_type use_cache initializer_range initializer_factor pad_token_id bos_token_id eos_token_id "
    "decoder_start_token_id forced_eos_token_id forced_bos_token_id pretraining_tp output_attentions torch_dtype "
    "output_router_logits router_aux_loss_coef classifier_dropout".split()
)
# Fields that some model's code has read.
read: set[str] = set()
# Those that it asked for and that the configuration of that type does not have.
missing: set[tuple[str, str]] = set()
# The shapes that factories made in this build, with their expressions.
factories: dict[tuple[int, ...], tuple[str, ...]] = {}
Tensor = tuple[tuple[int, ...], tuple[str, ...]]


def defaults(model_type: str) -> dict[str, Any]:
    """The fields of a configuration and their defaults, as JSON would hold them."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(CONFIG_MAPPING[model_type]):
        value = field.default
        if value is dataclasses.MISSING:
            value = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
        if field.name not in BOOKKEEPING and (value is None or isinstance(value, (bool, int, float, str, list, tuple))):
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def traced(value: Any, path: str) -> Any:
    """A value whose numbers and words carry their path."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return symbols.Whole(value, path)
    if isinstance(value, float):
        return symbols.Real(value, path)
    if isinstance(value, str):
        return symbols.Text(value, path)
    if isinstance(value, (list, tuple)):
        return [traced(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {key: traced(item, f"{path}.{key}" if path else key) for key, item in value.items()}
    return value


def make_config(model_type: str, values: Mapping[str, Any]) -> Any:
    """The configuration object."""
    config = CONFIG_MAPPING[model_type](**values)
    if not hasattr(config, "pad_token_id"):
        config.pad_token_id = None
    return config


@contextlib.contextmanager
def _patched(replaced: list[tuple[Any, str, Any]]) -> Iterator[None]:
    missing = object()
    kept = [(owner, name, owner.__dict__.get(name, missing)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in kept:
            delattr(owner, name) if value is missing else setattr(owner, name, value)


def _sizes(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
    first = options.get("size", arguments[0] if arguments else ())
    if isinstance(first, (list, tuple)):
        return tuple(first)
    return tuple(item for item in arguments if isinstance(item, int) and not isinstance(item, bool))


def _factory(name: str) -> tuple[Any, str, Callable[..., Any]]:
    plain = getattr(torch, name)

    def make(*arguments: Any, **options: Any) -> Any:
        made = plain(*arguments, **options)
        sizes = _sizes(arguments, options)
        if name == "full":
            sizes = tuple(arguments[0]) if isinstance(arguments[0], (list, tuple)) else ()
        if len(sizes) == made.dim():
            made._sizes = sizes
            if any(isinstance(size, symbols.Whole) for size in sizes):
                factories[tuple(made.shape)] = tuple(symbols.expression(size) for size in sizes)
        return made

    return torch, name, make


def _parameter() -> tuple[Any, str, Any]:
    plain = torch.nn.Parameter.__new__

    def make(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        made = plain(cls, data, requires_grad)
        if hasattr(data, "_sizes"):
            made._sizes = data._sizes
        return made

    return torch.nn.Parameter, "__new__", staticmethod(make)


def _namespaces() -> list[tuple[Any, str, Any]]:
    modules = [
        module for name, module in list(sys.modules.items()) if name.startswith("transformers.models.") and module
    ]
    return [(module, name, value) for module in modules for name, value in symbols.REPLACEMENTS.items()
            if "modeling_" in module.__name__ or "configuration_" in module.__name__]  # fmt: skip


def _labels() -> tuple[Any, str, Any]:
    from transformers import PreTrainedConfig

    plain = PreTrainedConfig.num_labels

    def count(self: Any) -> Any:
        return symbols.Whole(len(self.id2label), "num_labels") if self.id2label is not None else None

    return PreTrainedConfig, "num_labels", property(count, plain.fset)


def _reads() -> tuple[Any, str, Any]:
    """Note which fields a model's own code reads."""
    from transformers import PreTrainedConfig

    plain = PreTrainedConfig.__getattribute__

    def get(self: Any, key: str) -> Any:
        module = sys._getframe(1).f_globals.get("__name__", "")
        if ".modeling_" in module or ".configuration_" in module:
            read.add(key)
            try:
                return plain(self, key)
            except AttributeError:
                missing.add((type(self).model_type, key))
                raise
        return plain(self, key)

    return PreTrainedConfig, "__getattribute__", get


def build(architecture: type, config_of: Callable[[], Any]) -> dict[str, Tensor]:
    """Name → (numbers, expressions) of every parameter, ties counted once."""
    symbols.comparisons.clear()
    symbols.ranges.clear()
    symbols.computed.clear()
    factories.clear()
    makers = [_factory(name) for name in ("empty", "zeros", "ones", "full", "rand", "randn")]
    with (
        _patched([*makers, _parameter(), *_namespaces(), _labels(), _reads()]),
        torch.device("meta"),
        no_init_weights(),
    ):
        model = architecture(config_of())
        model.tie_weights()
    return {name: _described(parameter) for name, parameter in model.named_parameters()}


def _described(parameter: Any) -> Tensor:
    numbers = tuple(int(size) for size in parameter.shape)
    sizes = getattr(parameter, "_sizes", None)
    if sizes is None or tuple(int(size) for size in sizes) != numbers:
        return numbers, factories.get(numbers, tuple("?" for _ in numbers))
    return numbers, tuple(symbols.expression(size) for size in sizes)


def count(architecture: type, config: Any) -> int:
    """What transformers itself builds, untraced."""
    with torch.device("meta"), no_init_weights():
        model = architecture(config)
        model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())
