"""A model's shape from a Hugging Face configuration, as saved or published. It reads no files and builds no model.

The class that is counted is the first of `architectures`, else the type's usual one: the causal language model of a
decoder, the masked one of an encoder, the conditional generation of an encoder-decoder. A vision model is a classifier if
the number of its classes is stated, else the bare model.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tonnage.errors import BadModel
from tonnage.models import roles
from tonnage.models.assemble import Model, outside_layers, stacks
from tonnage.models.fields import SYNONYMS, Fields
from tonnage.models.shape import LayerStack, ModelShape, Projector
from tonnage.models.templates import ConfigValues, Tensor, architecture, names_in, tensors, turned

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8", "float64": "fp64"}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_CLASSIFIER = "ForImageClassification"
_SCORES = ("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration", "LMHead", "ForPreTraining", "Seq2SeqLM")


def from_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """Return the shape of the model that transformers would build from this configuration."""
    if not isinstance(config, Mapping):
        raise BadModel("A model configuration must be a JSON object.", hint="Give the config.json of the model.")
    # The stated type, else the one in the class name ("LlamaForCausalLM").
    named, model_type = config.get("architectures"), config.get("model_type")
    wanted = str(named[0]) if isinstance(named, list) and named else ""
    if not isinstance(model_type, str) or not model_type:
        model_type = wanted.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model").lower() or "unknown"
    row = architecture(model_type)
    if row is None or "tensors" not in row:
        # Counted as a similar one, with a note.
        like = closest(config)
        shape = from_config(like, name or model_type)
        known = like["model_type"]
        note = f"The architecture {model_type!r} is not known; counted as {known!r} of the same dimensions."
        return replace(shape, architecture=model_type, exact=False, notes=(note, *shape.notes))
    config = _as_saved(config, row)
    values = ConfigValues(config, row)
    # The first class that the configuration names, if it is known, else the usual one.
    usual = _usual_class(config, row)
    head = {head.lower(): head for head in row["heads"]}.get(wanted.lower(), usual)
    is_known = not wanted or wanted.lower() == head.lower()
    notes: tuple[str, ...] = () if is_known else (f"The class {wanted!r} is not known; counted as {usual}.",)
    if not wanted and _is_classifier(next(iter(row["heads"]))):
        notes = (f"The configuration names no class; counted as {usual}.",)
    _check(row, values)
    found = _all_tensors(config, row, values, head)
    heads = " ".join(row["heads"])
    masked = "MaskedLM" in head or ("MaskedLM" in heads and "CausalLM" not in head)
    model = Model(model_type, values, masked or "ImageClassification" in heads)
    shape = _shape(model, found, name or model_type, head, notes)
    if row.get("doubtful") is not None and len(turned(row, config)) >= row["doubtful"]:
        note = f"{model_type!r} follows rules that are only partly known: its count may be off."
        shape = replace(shape, exact=False, notes=(*shape.notes, note))
    return replace(shape, dtype=stored_format(config) or shape.dtype)


def _usual_class(config: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return the class of a configuration that names none: without classes to tell apart, a vision model has no head."""
    first: str = next(iter(row["heads"]))
    if not _is_classifier(first) or _states_classes(config):
        return first
    bare = first.removesuffix(_CLASSIFIER) + "Model"
    return bare if bare in row["heads"] else first


def _states_classes(config: Mapping[str, Any]) -> bool:
    """Say whether classes are stated; transformers writes two of its own into every configuration saved in full."""
    names = config.get("id2label")
    if isinstance(names, Mapping):
        return list(names.values()) != ["LABEL_0", "LABEL_1"]
    return config.get("num_labels") is not None


def _is_classifier(head: str) -> bool:
    return head.endswith(_CLASSIFIER)


def counted(config: Mapping[str, Any], row: Mapping[str, Any], head: str) -> int:
    """Return the parameters of a configuration according to a row of templates."""
    return sum(tensor.total for tensor in _all_tensors(config, row, ConfigValues(config, row), head))


def _check(row: Mapping[str, Any], values: ConfigValues) -> None:
    """Raise for what transformers refuses: zero sizes, and heads that do not divide the width."""
    part = "text_config" if values("text_config.hidden_size") else ""
    fields = Fields(values, part)
    needed = ("hidden", "heads", "layers")
    hidden, heads, _ = (None if fields.find(meant) is None else fields.need(meant) for meant in needed)
    paths = [f"{part}.{name}".lstrip(".") for name in SYNONYMS["head_dim"]]
    stated = any(path in values or (values(path) is not None and path not in row["derived"]) for path in paths)
    lenient = any("head_dim is None" in template[3] for template in row["tensors"])
    if hidden and heads and hidden % heads and not stated and not lenient and fields.get("kv_lora_rank") is None:
        problem = f"A width of {hidden} cannot be shared out among {heads} heads."
        raise BadModel(problem, hint="Give a hidden size that the heads divide, or state 'head_dim'.")


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


def _all_tensors(config: Mapping[str, Any], row: Mapping[str, Any], values: ConfigValues, head: str) -> list[Tensor]:
    """Return the row's tensors, replacing a part of an unusual type by that type's."""
    found = list(tensors(row, values, head))
    for part, usual in row["defaults"].items():
        given = config.get(part)
        if isinstance(usual, Mapping) and isinstance(given, Mapping) and given.get("model_type"):
            other = architecture(str(given["model_type"]))
            if given["model_type"] == usual.get("model_type") or other is None or "tensors" not in other:
                continue
            # The part's tower becomes the other type's bare model.
            inside = [
                each for each in found if each.loop and all(n.startswith(f"{part}.") for n in names_in(each.loop))
            ]
            if inside:
                tower, heads = inside[0].name.partition(".")[0], other["heads"]
                bare = next((head for head in reversed(heads) if head.endswith("Model")), next(iter(heads)))
                found = [each for each in found if each.name.partition(".")[0] != tower] + [
                    replace(each, name=f"{tower}.{each.name}", loop=f"{part}.{each.loop}" if each.loop else "")
                    for each in tensors(other, ConfigValues(given, other), bare)
                ]
    return found


def _shape(model: Model, found: list[Tensor], name: str, head: str, notes: tuple[str, ...]) -> ModelShape:
    text = Fields(model.values, "text_config") if model.values("text_config.hidden_size") else Fields(model.values)
    made, outside = stacks(model, found)
    # Each tower has what lies outside its layers; the rest is the language model's.
    towers: list[LayerStack] = []
    for stack in made[:-1]:
        # Of two lists of layers in one tower the first has it.
        first = all(other.part != stack.part for other in towers)
        mine = [tensor for tensor in outside if first and roles.part(tensor.name) == stack.part]
        embedded, _, others = outside_layers(mine)
        towers.append(replace(stack, embedding_parameters=embedded, other_parameters=others))
    embedded, heads, others = outside_layers(outside)
    dtype = model.values("torch_dtype") or model.values("dtype")
    # Embedding and head are tied if no head matrix is as large as the embedding.
    rows = model.values("vocab_size") or model.values("text_config.vocab_size")
    is_apart = any(roles.is_head(each.name) and len(each.shape) > 1 and rows in each.shape for each in outside)
    logits, vocab, positions = head.endswith(_SCORES), text.find("vocab") or 0, text.find("positions") or 0
    return ModelShape(
        name=name,
        architecture=model.model_type,
        stacks=(*towers, *made[-1:]),
        vocab=vocab,
        tied=logits and not is_apart,
        embedding_parameters=embedded,
        head_parameters=heads,
        other_parameters=others,
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
    return Projector(parameters=sum(tensor.total for tensor in mine), matrices=sides)


# Unknown architectures


_LLAMA = {
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate",
    "vocab_size": "vocab",
    "max_position_embeddings": "positions",
}
_GPT2 = {"n_embd": "hidden", "n_layer": "layers", "n_head": "heads", "n_inner": "intermediate", "vocab_size": "vocab",
         "n_positions": "positions"}  # fmt: skip
_NEEDED = ("hidden", "layers", "heads", "vocab")


def closest(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of the most similar known architecture, judged by its fields, with the unknown one's numbers.

    | it has                                | it is treated as   |
    |---------------------------------------|--------------------|
    | a compressed key and value (MLA)      | deepseek_v3        |
    | experts                               | mixtral            |
    | RMS norms or rotary positions         | llama              |
    | anything else                         | gpt2               |
    """
    fields = Fields(config.get)
    missing = [meant for meant in _NEEDED if fields.find(meant) is None]
    if missing:
        raise BadModel(
            f"The configuration's architecture {config.get('model_type')!r} is not known, and it does not say: "
            f"{', '.join(missing)}.",
            hint="Give a configuration with model_type, hidden_size, num_hidden_layers, num_attention_heads, vocab_size.",
        )
    if fields.get("kv_lora_rank") is not None:
        return {**config, "model_type": "deepseek_v3", "architectures": None}
    if fields.find("experts"):
        experts = {"num_local_experts": fields.need("experts"), "num_experts_per_tok": fields.find("experts_per_token")}
        width = {"intermediate_size": fields.find("expert_intermediate")}
        return _like("mixtral", _LLAMA, fields) | experts | width
    modern = ("rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "num_key_value_heads")
    if any(fields.get(name) is not None for name in modern):
        return _like("llama", _LLAMA, fields) | {"attention_bias": fields.flag("attention_bias")}
    return _like("gpt2", _GPT2, fields)


def _like(model_type: str, names: Mapping[str, str], fields: Fields) -> dict[str, Any]:
    numbers = {name: fields.find(meant) for name, meant in names.items()}
    tied = fields.get("tie_word_embeddings")
    stated = {name: number for name, number in numbers.items() if number is not None}
    return {"model_type": model_type, **stated, **({} if tied is None else {"tie_word_embeddings": tied})}


# Quantized checkpoints

_PLAIN = {"fp8": "fp8", "fbgemm_fp8": "fp8", "modelopt": "fp8", "mxfp4": "mxfp4", "finegrained_fp8": "fp8"}
_BY_BITS = {4: "int4", 8: "int8"}


def stored_format(config: Mapping[str, Any]) -> str:
    """Return the format of the quantized matrices by `quantization_config`; "" if nothing is, or in an unknown way.

    | method                                        | format                              |
    |-----------------------------------------------|-------------------------------------|
    | fp8, fbgemm_fp8                               | fp8                                 |
    | modelopt                                      | fp8 or nvfp4, as it says            |
    | awq, gptq, auto-round                         | int4 or int8, as it says            |
    | bitsandbytes                                  | nf4 or int8, as it says             |
    | compressed-tensors                            | that of its first group of weights; int4-experts if attention is left out |
    | mxfp4                                         | mxfp4: the experts alone            |
    """
    quantized = config.get("quantization_config")
    if not isinstance(quantized, Mapping):
        return ""
    method = str(quantized.get("quant_method", ""))
    if method == "compressed-tensors":
        groups = quantized.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
        weights = first.get("weights") if isinstance(first, Mapping) else None
        if not isinstance(weights, Mapping):
            return ""
        bits, left_out = _whole(weights.get("num_bits")), quantized.get("ignore")
        if weights.get("type") == "float":
            return {8: "fp8", 4: "nvfp4"}.get(bits, "")
        attention = isinstance(left_out, list) and any("self_attn" in str(name) for name in left_out)
        return "int4-experts" if bits == 4 and attention else _BY_BITS.get(bits, "")
    if method == "modelopt" and "FP4" in str(quantized.get("quant_algo", "")):
        return "nvfp4"
    if method == "bitsandbytes":
        return "nf4" if quantized.get("load_in_4bit") else "int8"
    return _PLAIN.get(method) or _BY_BITS.get(_whole(quantized.get("bits", quantized.get("w_bit"))), "")


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
