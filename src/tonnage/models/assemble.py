"""Combine counted tensors and described layers into a `ModelShape`.

Tensors that a loop repeats are layers; their module lists ("encoder.block", "decoder.block") are stacks. What the
fields do not tell about a layer (whether it is sparse or keeps a state) its tensors do.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tonnage.models import roles
from tonnage.models.fields import Fields
from tonnage.models.pictures import picture_of, picture_tokens
from tonnage.models.shape import AttentionShape, FeedForward, LayerShape, LayerStack
from tonnage.models.structure import attention, feed_forward, is_parallel, recurrent
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


def _stack(
    model: Model, paths: Sequence[str], lists: Mapping[str, list[Tensor]], two_sided: bool, outside: Sequence[Tensor]
) -> LayerStack:
    layers: list[LayerShape] = []
    hidden = 0
    for path in paths:
        fields = model.fields(lists[path][0].loop)
        side = ("decoder" if "decoder" in path else "encoder") if two_sided else ""
        causal = side == "decoder" if two_sided else not (model.encoder or (_TOWER.search(path) and "text" not in path))
        stage = _stage(model, lists[path], fields, side, causal)
        layers += stage
        hidden = _width(lists[path]) or hidden
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


def _width(tensors: Sequence[Tensor]) -> int:
    """Return the layer's width: that of its norms, else the commonest last dimension."""
    norms = [tensor.shape[-1] for tensor in tensors if tensor.shape and roles.is_norm(tensor.name, len(tensor.shape))]
    sizes = norms or [tensor.shape[-1] for tensor in tensors if len(tensor.shape) > 1]
    return max(set(sizes), key=sizes.count) if sizes else 0


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
        mixer = _mixer(model, fields, names, index, side, causal)
        if (held, mixer) not in made:
            made[held, mixer] = _layer(model, fields, [tensors[number] for number in held], mixer, side)
        layers.append(made[held, mixer])
    return layers


def _mixer(
    model: Model, fields: Fields, names: Sequence[str], index: int, side: str, causal: bool
) -> AttentionShape | None:
    """Return attention if there are queries, a recurrent state if there are only a recurrent mixer's tensors."""
    if any(roles.is_recurrent(name) for name in names) and not any(
        re.search(r"self_attn|\bq_proj", name) for name in names
    ):
        return recurrent(fields)
    if not any(roles.is_attention(name) for name in names):
        return None
    return attention(fields, model.model_type, index, causal=causal, side=side)


def _layer(
    model: Model, fields: Fields, tensors: Sequence[Tensor], mixer: AttentionShape | None, side: str
) -> LayerShape:
    norms = [tensor for tensor in tensors if roles.is_norm(tensor.name, len(tensor.shape))]
    rest = [tensor for tensor in tensors if tensor not in norms]
    mixing = [tensor for tensor in rest if roles.is_attention(tensor.name)]
    mlp = [tensor for tensor in rest if tensor not in mixing]
    experts = [tensor for tensor in mlp if roles.is_routed_expert(tensor.name)]
    form = _feed_forward(fields, mlp, experts, side)
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
        parallel=is_parallel(fields, model.model_type),
        written=str(fields.get("model_type") or "") if fields.part else "",
    )


def _feed_forward(fields: Fields, mlp: Sequence[Tensor], experts: Sequence[Tensor], side: str) -> FeedForward | None:
    matrices = [tensor for tensor in mlp if len(tensor.shape) > 1]
    if not matrices:
        return None
    widest = max(max(tensor.shape) for tensor in matrices)
    gated = any(roles.is_gate(tensor.name) for tensor in matrices)
    return feed_forward(fields, widest=widest, gated=gated, sparse=bool(experts and fields.find("experts")), side=side)


def _total(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.elements for tensor in tensors)
