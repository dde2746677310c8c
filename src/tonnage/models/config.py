"""A model's shape from a Hugging Face configuration, as saved or published. It reads no files and builds no model.

The class that is counted is the first of `architectures`, else the usual one of the type: the causal language model of
a decoder, the masked one of an encoder such as BERT, the conditional generation of an encoder-decoder, the classifier
of a vision model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tonnage.errors import BadModel
from tonnage.models import roles
from tonnage.models.architectures import architecture
from tonnage.models.assemble import Model, stacks
from tonnage.models.closest import closest
from tonnage.models.expressions import names_in
from tonnage.models.fields import SYNONYMS, Fields
from tonnage.models.shape import LayerStack, ModelShape, Projector
from tonnage.models.stored import stored_format
from tonnage.models.templates import ConfigValues, Tensor, tensors, turned

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8", "float64": "fp64"}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_SCORES = ("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration", "LMHead", "ForPreTraining", "Seq2SeqLM")


def from_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """Return the shape of the model that transformers would build from this configuration."""
    if not isinstance(config, Mapping):
        raise BadModel("A model configuration must be a JSON object.", hint="Give the config.json of the model.")
    model_type = _model_type(config)
    row = architecture(model_type)
    if row is None or "tensors" not in row:
        # Counted as a similar one, with a note.
        like = closest(config)
        shape = from_config(like, name or model_type)
        note = (
            f"The architecture {model_type!r} is not known; counted as {like['model_type']!r} of the same dimensions."
        )
        return replace(shape, architecture=model_type, exact=False, notes=(note, *shape.notes))
    config = _as_saved(config, row)
    values = ConfigValues(config, row)
    head, notes = _head(config, row)
    _check(row, values)
    found = list(_all_tensors(config, row, values, head))
    heads = " ".join(row["heads"])
    masked = "MaskedLM" in head or ("MaskedLM" in heads and "CausalLM" not in head)
    model = Model(model_type, values, masked or "ImageClassification" in heads)
    shape = _shape(model, found, name or model_type, head, notes)
    if row.get("doubtful") is not None and len(turned(row, config)) >= row["doubtful"]:
        note = f"{model_type!r} follows rules that are only partly known: its count may be off."
        shape = replace(shape, exact=False, notes=(*shape.notes, note))
    return replace(shape, dtype=stored_format(config) or shape.dtype)


def counted(config: Mapping[str, Any], row: Mapping[str, Any], head: str) -> int:
    """Return the parameters of a configuration according to a row of templates."""
    return sum(_count(tensor) for tensor in _all_tensors(config, row, ConfigValues(config, row), head))


def _check(row: Mapping[str, Any], values: ConfigValues) -> None:
    """Raise for what transformers refuses: zero sizes, and heads that do not divide the width."""
    part = "text_config" if values("text_config.hidden_size") else ""
    fields = Fields(values, part)
    hidden, heads, _ = (
        None if fields.find(meant) is None else fields.need(meant) for meant in ("hidden", "heads", "layers")
    )
    paths = [f"{part}.{name}".lstrip(".") for name in SYNONYMS["head_dim"]]
    stated = any(path in values or (values(path) is not None and path not in row["derived"]) for path in paths)
    lenient = any("head_dim is None" in template[3] for template in row["tensors"])
    if hidden and heads and hidden % heads and not stated and not lenient and fields.get("kv_lora_rank") is None:
        raise BadModel(
            f"A width of {hidden} cannot be shared out among {heads} heads.",
            hint="Give a hidden size that the heads divide, or state 'head_dim'.",
        )


def _model_type(config: Mapping[str, Any]) -> str:
    """Return the stated type, else the one in the class name ("LlamaForCausalLM")."""
    stated = config.get("model_type")
    if isinstance(stated, str) and stated:
        return stated
    named = config.get("architectures")
    first = str(named[0]) if isinstance(named, list) and named else ""
    return first.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model").lower() or "unknown"


def _as_saved(config: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration as transformers would save it, from the forms that published ones take.

    | published                                               | saved                                 |
    |---------------------------------------------------------|---------------------------------------|
    | the text model's fields beside those of the vision part | in a `text_config`                    |
    | a part of the whole's own type                          | a part of its usual type              |
    | `hybrid_override_pattern`, a letter for each layer      | `layers_block_type`, a word for each  |
    """
    made = dict(config)
    defaults = row["defaults"]
    usual = defaults.get("text_config")
    if isinstance(usual, Mapping) and "text_config" not in config and "hidden_size" in config:
        made["text_config"] = {name: value for name, value in config.items() if name in usual and name != "model_type"}
    for part in defaults:
        given = made.get(part)
        if isinstance(given, Mapping) and given.get("model_type") == row["model_type"]:
            made[part] = {name: value for name, value in given.items() if name != "model_type"}
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and config.get("layers_block_type") is None:
        made["layers_block_type"] = [_LETTERS.get(letter, letter) for letter in pattern]
    return made


def _head(config: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    named = config.get("architectures")
    wanted = str(named[0]) if isinstance(named, list) and named else ""
    known = {head.lower(): head for head in row["heads"]}
    usual = next(iter(row["heads"]))
    if not wanted or wanted.lower() in known:
        return known.get(wanted.lower(), usual), ()
    return usual, (f"The class {wanted!r} is not known; counted as {usual}.",)


def _all_tensors(
    config: Mapping[str, Any], row: Mapping[str, Any], values: ConfigValues, head: str
) -> Iterator[Tensor]:
    """Yield the row's tensors, replacing a part of an unusual type by that type's."""
    found = list(tensors(row, values, head))
    for part, usual in row["defaults"].items():
        given = config.get(part)
        if isinstance(usual, Mapping) and isinstance(given, Mapping) and given.get("model_type"):
            other = architecture(str(given["model_type"]))
            if given["model_type"] != usual.get("model_type") and other is not None and "tensors" in other:
                found = _with_part(found, part, given, other)
    yield from found


def _with_part(found: list[Tensor], part: str, given: Mapping[str, Any], other: Mapping[str, Any]) -> list[Tensor]:
    """Rebuild the part's tower as the other type's bare model."""
    looped = [
        tensor for tensor in found if tensor.loop and all(name.startswith(f"{part}.") for name in names_in(tensor.loop))
    ]
    if not looped:
        return found
    tower = looped[0].name.partition(".")[0]
    bare = next((head for head in reversed(other["heads"]) if head.endswith("Model")), next(iter(other["heads"])))
    inner = [
        replace(tensor, name=f"{tower}.{tensor.name}", loop=f"{part}.{tensor.loop}" if tensor.loop else "")
        for tensor in tensors(other, ConfigValues(given, other), bare)
    ]
    return [tensor for tensor in found if tensor.name.partition(".")[0] != tower] + inner


def _shape(model: Model, found: list[Tensor], name: str, head: str, notes: tuple[str, ...]) -> ModelShape:
    text = Fields(model.values, "text_config") if model.values("text_config.hidden_size") else Fields(model.values)
    made, outside = stacks(model, found)
    heads = sum(_count(tensor) for tensor in outside if roles.is_head(tensor.name))
    embedded = sum(_count(tensor) for tensor in outside if roles.is_embedding(tensor.name))
    total = sum(_count(tensor) for tensor in outside)
    dtype = model.values("torch_dtype") or model.values("dtype")
    logits, vocab, positions = head.endswith(_SCORES), text.find("vocab") or 0, text.find("positions") or 0
    return ModelShape(
        name=name,
        architecture=model.model_type,
        stacks=_with_outside(made, outside),
        vocab=vocab,
        tied=logits and _tied(model.values, outside),
        embedding_parameters=embedded,
        head_parameters=heads,
        other_parameters=total - heads - embedded,
        logits=logits,
        max_positions=positions,
        # OPT and BART leave two rows free.
        learned_positions=any(
            roles.is_embedding(tensor.name) and tensor.shape[0] in {positions, positions + 2} - {vocab}
            for tensor in outside
        ),
        dtype=_DTYPES.get(str(dtype).removeprefix("torch."), "bf16" if dtype is None else str(dtype)),
        notes=notes,
        projector=_projector(outside),
    )


def _with_outside(made: tuple[LayerStack, ...], outside: list[Tensor]) -> tuple[LayerStack, ...]:
    """Add to each tower what it has outside its layers; the rest is the language model's."""
    towers: list[LayerStack] = []
    for stack in made[:-1]:
        # Of two lists of layers in one tower the first has it.
        first = all(other.part != stack.part for other in towers)
        mine = [tensor for tensor in outside if first and roles.part(tensor.name) == stack.part]
        embedded = sum(_count(tensor) for tensor in mine if roles.is_embedding(tensor.name))
        others = sum(_count(tensor) for tensor in mine if not roles.is_head(tensor.name)) - embedded
        towers.append(replace(stack, embedding_parameters=embedded, other_parameters=others))
    return (*towers, *made[-1:])


def _projector(outside: list[Tensor]) -> Projector | None:
    """Return what lies between a tower and the language model; None if nothing does."""
    mine = [tensor for tensor in outside if roles.part(tensor.name) == "projector"]
    # nn.Linear weights have outputs first; bare parameters have inputs first.
    matrices = [
        tensor.shape[::-1] if tensor.name.endswith(".weight") else tensor.shape
        for tensor in mine
        if len(tensor.shape) == 2
    ]
    if not mine:
        return None
    sides = tuple((inputs, outputs) for inputs, outputs in matrices)
    return Projector(parameters=sum(_count(tensor) for tensor in mine), matrices=sides)


def _tied(values: ConfigValues, outside: list[Tensor]) -> bool:
    """Say whether embedding and head are tied: no head matrix is as large as the embedding."""
    vocab = values("vocab_size") or values("text_config.vocab_size")
    return not any(roles.is_head(tensor.name) and len(tensor.shape) > 1 and vocab in tensor.shape for tensor in outside)


def _count(tensor: Tensor) -> int:
    return tensor.elements * (1 if tensor.members is None else len(tensor.members))
