"""Which parts of a model are trained: `--freeze vision`, `vision,language`, `all-but-projector`, `all-but-last-4`.

| part       | what it holds                                                                  |
|------------|--------------------------------------------------------------------------------|
| vision     | the vision tower with its patches and positions (audio, encoder: likewise)     |
| projector  | the modules between the tower and the language model                           |
| language   | the layers of the language model, its embeddings, last norm and head           |
| embeddings | the token embedding, and the head if they are tied                             |
| last-N     | the last N layers of the language model, with its last norm and head           |

A frozen layer saves activations only if something before it is trained.
"""

import re
from dataclasses import replace

from tonnage.errors import BadLayout
from tonnage.models.shape import Frozen, LayerShape, LayerStack, ModelShape, Unfrozen

_BUT = "all-but-"
_LAST = re.compile(r"last-([1-9][0-9]{0,4})")


def freeze(shape: ModelShape, text: str) -> ModelShape:
    """Return the shape with those parts frozen, as written after `--freeze`."""
    known = [stack.part for stack in shape.stacks[:-1]]
    known += ["projector"] if shape.projector else []
    known += ["language"] + (["embeddings"] if shape.vocab else [])
    inverted = text.startswith(_BUT)
    named = [word.strip() for word in text.removeprefix(_BUT).split(",")]
    last = next((int(found[1]) for word in named if (found := _LAST.fullmatch(word))), 0) if inverted else 0
    for word in named:
        if word not in known and not (inverted and _LAST.fullmatch(word)):
            hint = f"Write some of {', '.join(known)}; or all-but- and what is trained: all-but-last-4, say."
            raise BadLayout(f"--freeze {text}: {shape.name} has no part {word!r}.", hint=hint)
    trained = {part for part in known if (part in named) == inverted}
    # The whole language model includes its embeddings, unless these are named beside it.
    if "language" in named and "embeddings" not in named:
        trained = trained | {"embeddings"} if inverted else trained - {"embeddings"}
    if "language" in trained:
        last = len(shape.decoder.layers)
    if not trained and not last:
        raise BadLayout(f"--freeze {text}: nothing is left to train.", hint="Leave a part out of it.")
    if last > len(shape.decoder.layers):
        hint = f"Write all-but-last-{len(shape.decoder.layers)} at most."
        raise BadLayout(f"--freeze {text}: {shape.name} has {len(shape.decoder.layers)} layers.", hint=hint)
    return _frozen(shape, trained, last)


def _frozen(shape: ModelShape, trained: set[str], last: int) -> ModelShape:
    """Return the shape with those parts and the last layers of the language model trained."""
    stacks: list[LayerStack] = []
    before = False
    for stack in shape.stacks[:-1]:
        before = before or stack.part in trained
        stacks.append(_marked(stack, 0 if stack.part in trained else len(stack.layers), before))
    embeddings = "embeddings" in trained
    before = before or "projector" in trained or embeddings
    decoder = _marked(shape.decoder, len(shape.decoder.layers) - last, before, narrow=not embeddings)
    towers = shape.stacks[:-1]
    tables = shape.embedding_parameters - sum(stack.embedding_parameters for stack in towers)
    projector = shape.projector.parameters if shape.projector else 0
    norms = shape.other_parameters - projector - sum(stack.other_parameters for stack in towers)
    unfrozen = Unfrozen(
        table=tables * embeddings,
        head=shape.head_parameters if last else 0,
        other=sum(stack.embedding_parameters + stack.other_parameters for stack in towers if stack.part in trained)
        + projector * ("projector" in trained)
        + (norms if last else 0),
        projector="projector" in trained,
    )
    return replace(shape, stacks=(*stacks, decoder), unfrozen=unfrozen)


def _marked(stack: LayerStack, frozen: int, before: bool, *, narrow: bool = False) -> LayerStack:
    """Return the stack with its first layers frozen; `before`: whether something ahead of them is trained."""
    how: Frozen = "passing" if before else "still"
    made: dict[tuple[int, bool], LayerShape] = {}
    layers = []
    for place, layer in enumerate(stack.layers):
        key = id(layer), place < frozen
        if key not in made:
            made[key] = replace(layer, frozen=how if place < frozen else "", narrow=narrow)
        layers.append(made[key])
    return replace(stack, layers=tuple(layers))
