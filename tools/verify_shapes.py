"""Hold learned architectures against models that transformers builds, with numbers varied and switches turned at random.

    python tools/verify_shapes.py                   every architecture of the file
    python tools/verify_shapes.py falcon opt        these

`learn_shapes.py` asks here before it calls a row exact. What is turned: every flag, every field that may be null, every
word that a condition of the row compares, and the kinds of the layers where a configuration lists them.
"""

import copy
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import build_traced
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from tonnage.errors import BadModel
from tonnage.models.config import counted
from tonnage.models.templates import architecture, turned

LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_(en|de)coder_layers|depth)$"
)
# Flags of bookkeeping, and those that change which class fits.
KEPT = {"is_encoder_decoder", "is_decoder", "use_cache", "return_dict", "use_timm_backbone", "use_pretrained_backbone"}
MOST_TRIALS = 12


def failures(row: Mapping[str, Any], seeds: Mapping[str, Any], wanted: int = 5) -> tuple[list[set[str]], int]:
    """For each variation that is counted wrongly, the switches that it has turned; and how many were built."""
    head = next(iter(row["heads"]))
    missed: list[set[str]] = []
    tried = 0
    kinds = layer_kinds(row)
    for seed in range(MOST_TRIALS):
        rng = random.Random(f"{row['model_type']}-{seed}")
        values = varied(row["defaults"], rng, 0.0 if seed == 0 else 0.35, tuple(conditions(row)), kinds) | seeds
        try:
            config = CONFIG_MAPPING[row["model_type"]](**copy.deepcopy(values))
            expected = build_traced.count(getattr(transformers, head), config)
        except Exception:  # transformers refuses these values together, each model in its own way
            continue
        tried += 1
        saved = json.loads(config.to_json_string(use_diff=bool(seed % 2))) | {"architectures": [head]}
        if _ours(saved, row, head) != expected:
            missed.append(turned(row, saved))
        if tried == wanted:
            break
    return missed, tried


def _ours(config: Mapping[str, Any], row: Mapping[str, Any], head: str) -> int:
    try:
        return counted(config, row, head)
    except BadModel:
        return -1


def conditions(row: Mapping[str, Any]) -> Iterator[str]:
    """Of the row's tensors."""
    yield from dict.fromkeys(template[3] for template in row["tensors"] if template[3])


def layer_kinds(row: Mapping[str, Any]) -> list[str]:
    """The words that the row knows for layers."""
    derived = row["derived"].get("layer_types")
    usual = [word for word, _ in derived.get("cases", ())] if isinstance(derived, Mapping) else []
    compared = re.findall(r"\blayer_types\[i\] == '([^']+)'", json.dumps(row["tensors"]))
    return sorted({word for word in [*usual, *compared] if isinstance(word, str)})


def varied(
    defaults: Mapping[str, Any], rng: random.Random, chance: float, texts: Sequence[str], kinds: Sequence[str]
) -> dict[str, Any]:
    """A configuration like the default one: other numbers, and each switch turned with that chance."""
    wider = rng.choice([1, 2])
    values = {name: _varied(name, value, rng, wider, chance) for name, value in defaults.items()}
    for text in texts:
        for path, word in re.findall(r"\b(\w+) == '([^']+)'", text):
            if path in values and rng.random() < chance:
                values[path] = word
        for path in re.findall(r"\b(\w+) is None", text):
            if path not in defaults and rng.random() < chance:
                values[path] = 64
    layers = values.get("num_hidden_layers")
    if "layer_types" not in values and isinstance(layers, int) and kinds and rng.random() < chance:
        values["layer_types"] = [rng.choice(kinds) for _ in range(layers)]
    return values


def _varied(name: str, value: Any, rng: random.Random, wider: int, chance: float) -> Any:
    if isinstance(value, Mapping):
        return varied(value, rng, chance, (), ())
    if isinstance(value, bool):
        return value if name in KEPT or rng.random() >= chance else not value
    if not isinstance(value, int):
        return value
    if LAYERS.search(name):
        return rng.choice([3, 4, 6])
    if name in ("hidden_size", "n_embd", "d_model", "dim"):
        return value * wider
    if name in ("vocab_size", "max_position_embeddings", "n_positions"):
        return value + rng.choice([0, 64, 128])
    doubles = re.search(r"intermediate|ffn|d_ff|n_inner", name) or (name.endswith("experts") and value > 1)
    return value * rng.choice([1, 2]) if doubles else value


def main() -> None:
    """Say what is counted wrongly."""
    names = sys.argv[1:] or [
        json.loads(line)["model_type"] for line in build_traced.ARCHITECTURES.read_text().splitlines()
    ]
    from learn_shapes import SEEDS_OF  # which asks here in turn

    wrong = built = 0
    for name in names:
        row = architecture(name)
        assert row is not None, name
        missed, tried = failures(row, SEEDS_OF.get(name, {}))
        wrong, built = wrong + len(missed), built + tried
        if missed or not tried:
            print(
                f"{name}: {len(missed)} of {tried} wrong, switches turned: {[sorted(switches) for switches in missed]}",
                flush=True,
            )
    print(f"{len(names)} architectures, {built} configurations, {wrong} counted wrongly")


if __name__ == "__main__":
    main()
