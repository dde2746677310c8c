"""Combine counted tensors and described layers (their heads, windows, experts) into the stacks of a `ModelShape`.

Tensors that a loop repeats are layers; their module lists ("encoder.block", "decoder.block") are stacks. What the
fields do not tell about a layer (whether it is sparse or keeps a state) its tensors do. `fields` knows the names that
families use; the rules by which they decide which layers have a window and what a state holds are here.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tonnage.errors import BadModel
from tonnage.models import roles
from tonnage.models.fields import Fields
from tonnage.models.pictures import picture_of, picture_tokens
from tonnage.models.shape import AttentionKind, AttentionShape, FeedForward, LayerShape, LayerStack
from tonnage.models.templates import ConfigValues, Tensor

# Stacks in the order in which data passes them.
_FIRST = re.compile(r"vision|visual|image|audio|speech|encoder(?!\.layer)|vit\b|dvt")
_TOWER = re.compile(r"vision|visual|image|audio|(^|\.)encoder")
_LAST = re.compile(r"decoder|text|language|lm\b|llm")


@dataclass(frozen=True, slots=True)
class Model:
    """What describes the layers of a model."""

    model_type: str
    values: ConfigValues
    encoder: bool  # attention is bidirectional

    def fields(self, loop: str) -> Fields:
        """Return the fields of the part whose field counts the loop."""
        return Fields(self.values, loop.rpartition(".")[0])


def stacks(model: Model, tensors: Iterable[Tensor]) -> tuple[tuple[LayerStack, ...], list[Tensor]]:
    """Return the stacks in order, and the tensors that belong to none."""
    lists: dict[str, list[Tensor]] = {}
    outside = []
    for tensor in tensors:
        if tensor.members is None:
            outside.append(tensor)
        else:
            lists.setdefault(tensor.name.partition(".*")[0], []).append(tensor)
    groups: dict[str, list[str]] = {}
    for path, members in lists.items():
        if any(len(tensor.shape) > 1 for tensor in members):
            # Stages of one tower ("layers.0.blocks", "layers.1.blocks") belong together.
            groups.setdefault(re.sub(r"\.\d+(\..*)?$", "", path), []).append(path)
        else:
            outside += members
    ordered = sorted(groups, key=lambda name: (bool(_LAST.search(name)), not _FIRST.search(name)))
    two_sided = any("encoder" in name for name in ordered) and any("decoder" in name for name in ordered)
    made = [_stack(model, groups[name], lists, two_sided, outside) for name in ordered]
    return tuple(made), outside


def outside_layers(tensors: Sequence[Tensor]) -> tuple[int, int, int]:
    """Count the parameters of embeddings, of the head, and of the rest."""
    embedded = sum(tensor.total for tensor in tensors if roles.is_embedding(tensor.name))
    heads = sum(tensor.total for tensor in tensors if roles.is_head(tensor.name))
    return embedded, heads, sum(tensor.total for tensor in tensors) - embedded - heads


def _stack(
    model: Model, paths: Sequence[str], lists: Mapping[str, list[Tensor]], two_sided: bool, outside: Sequence[Tensor]
) -> LayerStack:
    layers: list[LayerShape] = []
    hidden = 0
    for path in paths:
        fields = model.fields(lists[path][0].loop)
        side = ("decoder" if "decoder" in path else "encoder") if two_sided else ""
        causal = side == "decoder" if two_sided else not (model.encoder or (_TOWER.search(path) and "text" not in path))
        layers += _stage(model, lists[path], fields, side, causal)
        # The layer's width is that of its norms, else the commonest last dimension.
        tensors = [tensor for tensor in lists[path] if tensor.shape]
        norms = [tensor.shape[-1] for tensor in tensors if roles.is_norm(tensor.name, len(tensor.shape))]
        sizes = norms or [tensor.shape[-1] for tensor in tensors if len(tensor.shape) > 1]
        hidden = max(set(sizes), key=sizes.count, default=0) or hidden
    picture = picture_of(model.values, fields, outside)
    frames = fields.get("max_source_positions")
    tokens = frames if isinstance(frames, int) and side == "encoder" else 0
    return LayerStack(
        layers=tuple(layers),
        hidden=hidden,
        causal=causal,
        tokens=picture_tokens(picture).tower if picture and picture.side else tokens,
        part=roles.part(paths[0]),
        picture=picture,
    )


def _stage(model: Model, tensors: Sequence[Tensor], fields: Fields, side: str, causal: bool) -> list[LayerShape]:
    by_index: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        for index in tensor.members or ():
            by_index.setdefault(index, []).append(number)
    made: dict[tuple[tuple[int, ...], AttentionShape | None], LayerShape] = {}
    layers = []
    for index in sorted(by_index):
        held = tuple(by_index[index])
        names = [tensors[number].name for number in held]
        # Attention if there are queries; a recurrent state if there are only a recurrent mixer's tensors.
        mixer = None
        if any(map(roles.is_recurrent, names)) and not any(re.search(r"self_attn|\bq_proj", name) for name in names):
            mixer = recurrent(fields)
        elif any(map(roles.is_attention, names)):
            mixer = attention(fields, model.model_type, index, causal=causal, side=side)
        if (held, mixer) not in made:
            made[held, mixer] = _layer(model, fields, [tensors[number] for number in held], mixer, side)
        layers.append(made[held, mixer])
    return layers


def _layer(
    model: Model, fields: Fields, tensors: Sequence[Tensor], mixer: AttentionShape | None, side: str
) -> LayerShape:
    norms = [tensor for tensor in tensors if roles.is_norm(tensor.name, len(tensor.shape))]
    rest = [tensor for tensor in tensors if tensor not in norms]
    mixing = [tensor for tensor in rest if roles.is_attention(tensor.name)]
    mlp = [tensor for tensor in rest if tensor not in mixing]
    experts = [tensor for tensor in mlp if roles.is_routed_expert(tensor.name)]
    matrices, form = [tensor for tensor in mlp if len(tensor.shape) > 1], None
    if matrices:
        widest = max(max(tensor.shape) for tensor in matrices)
        gated, sparse = any(roles.is_gate(tensor.name) for tensor in matrices), bool(experts and fields.find("experts"))
        form = feed_forward(fields, widest=widest, gated=gated, sparse=sparse, side=side)
    crossing = mixer is not None and any(roles.is_cross(tensor.name) for tensor in mixing)
    return LayerShape(
        attention=mixer,
        cross_attention=replace(mixer, causal=False, window=0) if mixer is not None and crossing else None,
        feed_forward=form,
        attention_parameters=_total(mixing),
        feed_forward_parameters=_total(mlp),
        expert_parameters=_total(experts) // form.experts if form and form.experts else 0,
        norm_parameters=_total(norms),
        norms=sum(tensor.name.endswith("weight") for tensor in norms),
        rms_norm=not any(tensor.name.endswith("bias") for tensor in norms),
        parallel=model.model_type in _ALWAYS_PARALLEL or any(map(fields.flag, _PARALLEL_FLAGS)),
        written=str(fields.get("model_type") or "") if fields.part else "",
    )


def _total(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.elements for tensor in tensors)


# Every n-th layer has full attention and the others a window, unless the configuration lists `layer_types`.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4, "exaone4": 4}
# Their window applies only if a switch is on; elsewhere a stated window is used.
_WINDOW_SWITCH = dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), "use_sliding_window")
_SLIDING = {"sliding_attention", "chunked_attention", "sliding", "local", "local_attention"}
# Attention and MLP read the same input.
_PARALLEL_FLAGS = ("use_parallel_residual", "parallel_attn", "parallel_residual")
_ALWAYS_PARALLEL = {"gptj", "codegen", "phi", "cohere", "cohere2"}


def attention(fields: Fields, model_type: str, index: int, *, causal: bool, side: str = "") -> AttentionShape | None:
    """Return a layer's attention; None if the configuration does not give the number of heads."""
    if fields.get("kv_lora_rank") is not None and fields.get("qk_rope_head_dim") is not None:
        return _latent(fields)
    name = f"{side}_attention_heads"
    if side and fields.get(name) is not None:
        heads = fields.whole(name, least=1)
    elif fields.find("heads") is None:
        return None
    else:
        heads = fields.need("heads")
    head_dim = fields.find("head_dim") or fields.need("hidden") // heads
    window = fields.find("window") or 0 if _slides(fields, model_type, index) else 0
    shares_one = fields.flag("multi_query") and not fields.flag("new_decoder_architecture")
    kv_heads = 1 if shares_one else fields.find("kv_heads") or heads
    if heads % kv_heads:
        problem = f"{heads} attention heads cannot share {kv_heads} key and value heads."
        raise BadModel(problem, hint="The number of heads must be a multiple of the key and value heads.")
    return AttentionShape(
        kind=AttentionKind.SLIDING if window else AttentionKind.FULL,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        window=window,
        causal=causal,
    )


def recurrent(fields: Fields) -> AttentionShape:
    """Return a mixer that keeps a state per sequence, and the inputs that its causal convolution needs."""

    def number(*names: str) -> int:
        found = next((name for name in names if fields.get(name) is not None), None)
        return fields.whole(found) if found is not None else 0

    if fields.get("linear_num_value_heads") is not None:
        keys = number("linear_num_key_heads") * number("linear_key_head_dim")
        values = number("linear_num_value_heads") * number("linear_value_head_dim")
        kept = values * number("linear_key_head_dim") + (2 * keys + values) * number("linear_conv_kernel_dim")
    else:
        hidden, expand = fields.need("hidden"), fields.get("mamba_expand", fields.get("expand", 2))
        inner = number("mamba_d_ssm", "lru_width") or int(
            hidden * expand if isinstance(expand, (int, float)) else 2 * hidden
        )
        state = number("mamba_d_state", "state_size", "ssm_state_size")
        convolution = number("mamba_d_conv", "conv_kernel", "conv1d_width", "conv_L_cache")
        groups = number("mamba_n_groups", "n_groups")
        kept = inner * max(state, 1) + (inner + 2 * groups * state) * convolution
    kind = AttentionKind.RECURRENT
    return AttentionShape(kind=kind, heads=0, kv_heads=0, head_dim=0, value_head_dim=0, state_elements=kept)


def feed_forward(fields: Fields, *, widest: int, gated: bool, sparse: bool, side: str = "") -> FeedForward:
    """Return the MLP of a layer; `widest` is its width if the configuration does not give one."""
    if not sparse:
        stated = fields.get(f"{side}_ffn_dim") if side else None
        intermediate = fields.whole(f"{side}_ffn_dim", least=1) if stated else fields.find("intermediate")
        return FeedForward(intermediate=intermediate or widest, gated=gated)
    width = fields.find("expert_intermediate") or widest
    experts = fields.need("experts")
    shared = fields.find("shared_intermediate")
    if shared is None and fields.get("n_shared_experts") is not None:
        shared = fields.whole("n_shared_experts") * width
    return FeedForward(
        intermediate=width,
        gated=gated,
        experts=experts,
        experts_per_token=min(experts, fields.find("experts_per_token") or 1),
        shared_intermediate=shared or 0,
    )


def _slides(fields: Fields, model_type: str, index: int) -> bool:
    for name in ("layer_types", "attention_layers"):
        listed = fields.get(name)
        if isinstance(listed, (list, tuple)) and listed:
            return listed[index % len(listed)] in _SLIDING
    every = fields.get("sliding_window_pattern", _FULL_EVERY.get(model_type))
    if isinstance(every, int) and every > 0:
        return (index + 1) % every != 0
    switch = _WINDOW_SWITCH.get(model_type)
    if switch is None:
        return True
    return fields.flag(switch) and index >= (fields.find("window_start") or 0)


def _latent(fields: Fields) -> AttentionShape:
    heads = fields.need("heads")
    rope, nope = fields.whole("qk_rope_head_dim", least=1), fields.whole("qk_nope_head_dim")
    return AttentionShape(
        kind=AttentionKind.LATENT,
        heads=heads,
        kv_heads=heads,
        head_dim=rope + nope,
        value_head_dim=fields.whole("v_head_dim", least=1),
        latent_rank=fields.whole("kv_lora_rank", least=1),
        query_rank=fields.whole("q_lora_rank") if fields.get("q_lora_rank") is not None else 0,
        rope_dim=rope,
    )
