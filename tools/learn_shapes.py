"""Learn each architecture's tensors from transformers, and write src/tonnage/models/data/architectures.jsonl.

    python tools/learn_shapes.py                    every architecture of the automatic mappings
    python tools/learn_shapes.py llama t5 vit       these; the other lines stay

A model is built on the meta device from a configuration whose numbers carry their names (`symbols`), so each dimension
of each tensor comes out as an expression of fields. Switches (flags, fields that may be null, comparisons that the
model's code made) are flipped one by one, two by two and many at random to see which tensors hang on them
(`decisions`); layers that differ are told apart by a rule over their index. The result is held against models built
from varied configurations, untraced (`verify_shapes`): a row that misses says with how many switches turned it does.
"""

import contextlib
import inspect
import itertools
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import build_traced
import decisions
import symbols
import transformers
import verify_shapes
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from tonnage.models.templates import evaluate, names_in

OUTPUT = build_traced.ARCHITECTURES
# Values that make a family's rules visible where the defaults hide them.
SEEDS: dict[str, Any] = {
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "first_k_dense_replace": 2,
    "interleave_moe_layer_step": 2,
}
SEEDS_OF: dict[str, dict[str, Any]] = {
    "albert": {"num_hidden_groups": 2, "inner_group_num": 3},
    "ernie4_5_moe": {"moe_layer_start_index": 3, "moe_layer_interval": 2},
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "gpt_neo": {"num_layers": 8, "attention_types": [[["global", "local"], 4]]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "ministral": {"head_dim": 128},
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {
        "num_hidden_layers": 8,
        "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv", "conv"],
    },
}
# Parts that have no type of their own.
PARTS_OF: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1},
    },
}
# Lists that the type fills with one word by default: other words show what hangs on them.
KINDS_OF: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"] * 3},
}
# Conditions on fields that the code takes apart before it compares them.
SWITCHES_OF: dict[str, list[tuple[str, str, Any]]] = {
    "deberta": [("'c2p' in pos_att_type", "pos_att_type", ["p2c"]), ("'p2c' in pos_att_type", "pos_att_type", ["c2p"])],
    "deberta-v2": [
        ("'c2p' in pos_att_type", "pos_att_type", ["p2c"]),
        ("'p2c' in pos_att_type", "pos_att_type", ["c2p"]),
        ("'layer_norm' in norm_rel_ebd", "norm_rel_ebd", "layer_norm"),
        ("(position_buckets is not None and position_buckets > 0)", "position_buckets", 256),
        ("(conv_kernel_size is not None and conv_kernel_size > 0)", "conv_kernel_size", 3),
    ],
}
# Words in the names of fields by which a family tells its layers apart.
RULE_WORDS = re.compile(
    r"layer|dense|sparse|step|interval|period|offset|pattern|freq|every|interleave|stride|moe|start|end|first|global|num_kv_shared"
)
MOST_SWITCHES = 14
RANDOM_BUILDS = 32
PROVEN = 2  # switches that are turned together on purpose
MOST_HEADS = 9
Loop = tuple[str, str]  # how many, and which of them ("" for all)


@dataclass(frozen=True)
class Entry:
    """A tensor, or one in each turn of its loops: "layers.*.mlp.up_proj.weight"."""

    pattern: str
    sizes: tuple[str, ...]
    loops: tuple[Loop, ...] = ()


@dataclass(frozen=True, eq=False)
class Switch:
    """A condition, and the values of fields that make it true or false."""

    text: str
    path: str
    value: Any


Builds = dict[frozenset[Switch], frozenset[Entry]]


@dataclass
class Learner:
    """One architecture with one head."""

    model_type: str
    architecture: type
    values: dict[str, Any] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    compared: list[str] = field(default_factory=list)

    def build(self, values: Mapping[str, Any], architecture: type | None = None) -> frozenset[Entry]:
        """The entries of the model that these values make."""
        made: list[Any] = []

        def config() -> Any:
            made.append(build_traced.make_config(self.model_type, build_traced.traced(values, "")))
            return made[-1]

        chosen = architecture or self.architecture
        tensors = build_traced.build(chosen, config)
        prefix = getattr(chosen, "base_model_prefix", "") + "."
        named = {name.removeprefix(prefix): sizes for name, (_, sizes) in tensors.items()}
        numbers = {name.removeprefix(prefix): shape for name, (shape, _) in tensors.items()}
        known = resolved(values, made[-1])
        self.compared = list(symbols.comparisons)
        named = {name: self._guessed(name, sizes, numbers[name], known) for name, sizes in named.items()}
        return frozenset(folded(tree(named), known))

    def _guessed(
        self, name: str, sizes: tuple[str, ...], numbers: tuple[int, ...], known: Mapping[str, Any]
    ) -> tuple[str, ...]:
        """Dimensions that lost their trace in a tensor operation: the field of that value."""
        if "?" not in sizes:
            return tuple(simple(size) for size in sizes)
        if numbers in build_traced.factories:
            return tuple(simple(size) for size in build_traced.factories[numbers])
        ints = [path for path, value in known.items() if isinstance(value, int) and not isinstance(value, bool)]
        found = []
        for number in numbers:
            same = [path for path in ints if known[path] == number and number > 1]
            likely = [path for path in same if re.search("state|dim|size|width|heads", path)]
            computed = symbols.computed.get(number, str(number))
            found.append((likely or same or [computed])[0])
        self.unknown.add(name)
        return tuple(found)


def simple(text: str) -> str:
    """Without what multiplies or divides by one."""
    return re.sub(r" (\*|//) 1(?![\d.])", "", text)


def resolved(values: Mapping[str, Any], config: Any, prefix: str = "") -> dict[str, Any]:
    """Path → value after the configuration has filled in what was left out."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        actual = attribute(config, name, value)
        if isinstance(value, Mapping) and isinstance(actual, transformers.PreTrainedConfig):
            found |= resolved(value, actual, f"{prefix}{name}.")
        else:
            found[prefix + name] = plain(actual)
    return found


def attribute(config: Any, name: str, default: Any = None) -> Any:
    """A field, where asking for it is not refused."""
    try:
        return getattr(config, name, default)
    except Exception:
        return default


def plain(value: Any) -> Any:
    """Without its trace, so that looking at it leaves none."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    for traced, kind in ((symbols.Whole, int), (symbols.Real, float), (symbols.Text, str)):
        if isinstance(value, traced):
            return kind.__str__(value) if kind is str else kind(value)
    return value


def tree(tensors: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Names split at their dots."""
    root: dict[str, Any] = {}
    for name, sizes in tensors.items():
        *parents, leaf = name.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = sizes
    return root


def folded(node: Mapping[str, Any], known: Mapping[str, Any], path: str = "") -> Iterator[Entry]:
    """Entries, with the members of a counted list folded into one."""
    indices = [int(key) for key in node if key.isdigit()]
    if len(indices) == len(node) and indices and not any(isinstance(child, tuple) for child in node.values()):
        counter = counted(max(indices) + 1, path, known)
        if counter:
            yield from folded_list(node, known, path, counter, max(indices) + 1)
            return
    for key, child in node.items():
        below = f"{path}.{key}" if path else key
        if isinstance(child, tuple):
            yield Entry(below, child)
        else:
            yield from folded(child, known, below)


def folded_list(
    node: Mapping[str, Any], known: Mapping[str, Any], path: str, counter: str, length: int
) -> Iterator[Entry]:
    """One entry for like tensors of the members, with the rule that says which members have it."""
    where: dict[Entry, set[int]] = {}
    for key, child in node.items():
        for entry in folded(child, known, f"{path}.*"):
            where.setdefault(entry, set()).add(int(key))
    for entry, members in where.items():
        rule = (
            ""
            if len(members) == length
            else rule_for(tuple(index in members for index in range(length)), known, counter)
        )
        yield Entry(entry.pattern, entry.sizes, ((counter, rule), *entry.loops))


def counted(length: int, path: str, known: Mapping[str, Any]) -> str:
    """What counts a list of this length."""
    counters = list(symbols.ranges.get(length, {}))
    layered = [
        name for name, value in known.items() if value == length and type(value) is int and RULE_LAYERS.search(name)
    ]
    choices = [text for text in counters if RULE_LAYERS.search(text)] or counters or layered or listed(length, known)
    side = [
        text
        for text in choices
        if any(word in path and word in text for word in ("encoder", "decoder", "vision", "text", "audio"))
    ]
    return (side or choices or [""])[0]


def listed(length: int, known: Mapping[str, Any]) -> list[str]:
    """Lists with a word for each layer, which count them."""
    return [
        f"len({name})"
        for name, value in known.items()
        if isinstance(value, list) and len(value) == length > 2 and all(isinstance(item, str) for item in value)
    ]


RULE_LAYERS = re.compile(r"layer|depth|block|n_group|stage")


def rule_for(vector: tuple[bool, ...], known: Mapping[str, Any], counter: str) -> str:
    """An expression of the index `i` that is true where the vector is."""
    basic = dict(candidates(known, len(vector), counter))
    opposite = tuple(not value for value in vector)
    for text, truth in basic.items():
        if truth == vector:
            return text
        if truth == opposite:
            return f"not ({text})"
    for (first, one), (second, two) in itertools.permutations(basic.items(), 2):
        both = tuple(a and b for a, b in zip(one, two, strict=True))
        if both == vector:
            return f"({first}) and ({second})"
        if both == opposite:
            return f"not (({first}) and ({second}))"
        mixed = tuple(a and not b for a, b in zip(one, two, strict=True))
        if mixed == vector:
            return f"({first}) and not ({second})"
        if mixed == opposite:
            return f"not ({first}) or ({second})"
    return f"i in {[index for index, value in enumerate(vector) if value]}".replace("in [", "in (").replace("]", ",)")


def candidates(known: Mapping[str, Any], length: int, counter: str) -> Iterator[tuple[str, tuple[bool, ...]]]:
    """Simple rules over the index, the likeliest first."""
    for path, value in known.items():
        if (
            isinstance(value, list)
            and len(value) == length
            and value
            and all(isinstance(item, (str, int)) for item in value)
        ):
            for item in dict.fromkeys(value):
                yield (
                    f"{path}[i] == {str(item)!r}" if isinstance(item, str) else f"{path}[i] == {int(item)}",
                    tuple(other == item for other in value),
                )
    for path, value in known.items():
        if (
            isinstance(value, list)
            and RULE_WORDS.search(path)
            and value
            and all(isinstance(item, int) for item in value)
        ):
            yield f"i in {path}", tuple(index in value for index in range(length))
    yield "i == 0", tuple(index == 0 for index in range(length))
    yield f"i == {counter} - 1", tuple(index == length - 1 for index in range(length))
    yield from numeric_candidates(known, length)
    for step in range(2, 8):
        yield f"(i + 1) % {step} == 0", tuple((index + 1) % step == 0 for index in range(length))
        yield f"i % {step} == 0", tuple(index % step == 0 for index in range(length))


def numeric_candidates(known: Mapping[str, Any], length: int) -> Iterator[tuple[str, tuple[bool, ...]]]:
    """Rules with a field in them."""
    fit = {path: int(value) for path, value in known.items()
           if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= length and RULE_WORDS.search(path)}  # fmt: skip
    turns = range(length)
    for path, value in fit.items():
        yield f"i >= {path}", tuple(index >= value for index in turns)
        if value > 0:
            yield f"(i + 1) % {path} == 0", tuple((index + 1) % value == 0 for index in turns)
            yield f"i % {path} == 0", tuple(index % value == 0 for index in turns)
    for (one, period), (two, offset) in itertools.permutations(fit.items(), 2):
        if period > 0 and "period" in one and "offset" in two and one.partition("_")[0] == two.partition("_")[0]:
            yield f"i % {one} == {two}", tuple(index % period == offset for index in turns)


# Configurations


def default_values(model_type: str, depth: int = 0) -> dict[str, Any]:
    """The defaults of a configuration and of those inside it."""
    values = {**build_traced.defaults(model_type), **PARTS_OF.get(model_type, {})}
    if depth > 2:
        return values
    try:
        made = CONFIG_MAPPING[model_type]()
    except Exception:
        return values
    for name in getattr(made, "sub_configs", None) or {}:
        part = attribute(made, name)
        if isinstance(part, transformers.PreTrainedConfig) and part.model_type in CONFIG_MAPPING_NAMES:
            inner = default_values(part.model_type, depth + 1)
            changed = {
                key: attribute(part, key)
                for key in inner
                if _simple_value(attribute(part, key)) and not isinstance(inner[key], dict)
            }
            values[name] = {
                **inner,
                **{k: v for k, v in changed.items() if inner[k] is not None},
                "model_type": part.model_type,
            }
    return values


def _simple_value(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) or (
        isinstance(value, list) and all(isinstance(item, (int, str, float)) for item in value)
    )


def shortened(values: Mapping[str, Any], numbers: Iterator[int]) -> dict[str, Any]:
    """Few layers, a number of its own for each stack, and visible rules."""
    lengths = {len(value) for value in values.values() if isinstance(value, list)}
    short: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            short[name] = shortened(value, numbers)
        elif (
            isinstance(value, int) and not isinstance(value, bool) and LAYER_COUNT.search(name) and value not in lengths
        ):
            short[name] = next(numbers) + (8 if any("period" in other for other in values) else 0)
        else:
            short[name] = SEEDS.get(name, value)
    return short


LAYER_COUNT = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_(en|de)coder_layers|depth|num_hidden_layers)$"
)


def at(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path."""
    for part in path.split("."):
        values = values[part]
    return values


def changed(values: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one value replaced."""
    head, _, rest = path.partition(".")
    return {**values, head: changed(values[head], rest, value) if rest else value}


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field by its path."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def annotations(model_type: str, values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Path → the declared type, as text."""
    found = {prefix + item.name: str(item.type) for item in fields(CONFIG_MAPPING[model_type])}
    for name, value in values.items():
        if isinstance(value, Mapping) and value.get("model_type") in CONFIG_MAPPING_NAMES:
            found |= annotations(value["model_type"], value, f"{prefix}{name}.")
    return found


def fill_in(learner: Learner) -> None:
    """Give what the configuration derives a name of its own, and keep how it was derived."""
    made = build_traced.make_config(learner.model_type, build_traced.traced(learner.values, ""))
    for path, value in list(leaves(learner.values)):
        got = reached(made, path)
        if value is not None or got is None or isinstance(got, bool):
            continue
        if isinstance(got, (symbols.Whole, symbols.Real, int)):
            learner.derived[path] = symbols.expression(got)
            learner.values = changed(learner.values, path, int(got) if isinstance(got, int) else float(got))
        elif isinstance(got, list) and got and all(isinstance(item, (str, int)) for item in got):
            later = {name for name, raw in leaves(learner.values) if raw is None}
            longer, rule_values = many_layers(learner, path)
            learner.derived[path] = list_rule(
                path, longer, {name: item for name, item in rule_values.items() if name not in later}
            )
            learner.values = changed(learner.values, path, plain(got))


def many_layers(learner: Learner, path: str) -> tuple[list[Any], dict[str, Any]]:
    """A derived list of so many layers that its rule shows."""
    for more in (41, 40, 0):
        values = learner.values
        for name, value in list(leaves(values)):
            if more and LAYER_COUNT.search(name.rpartition(".")[2]) and isinstance(value, int):
                values = changed(values, name, value + more)
            if more and name in learner.derived and isinstance(value, list):
                values = changed(values, name, None)
        with contextlib.suppress(Exception):
            made = build_traced.make_config(learner.model_type, values)
            return plain(reached(made, path)), resolved(values, made)
    raise ValueError(path)


def reached(config: Any, path: str) -> Any:
    """The attribute at a dotted path, traced as it is."""
    for part in path.split("."):
        config = attribute(config, part)
    return config


def list_rule(path: str, got: list[Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """A list with a word for each layer, as the index rule of each word; a list of layers, as their rule."""
    others = {
        name: value
        for name, value in known.items()
        if not isinstance(value, list) or not value or isinstance(value[0], int)
    }
    prefix = path.rpartition(".")[0]
    counter = next((name for name, value in others.items() if value == len(got) and LAYER_COUNT.search(name.rpartition(".")[2])
                    and name.rpartition(".")[0] == prefix), str(len(got)))  # fmt: skip
    words = list(dict.fromkeys(got))
    layers = next(
        (name for name in others if LAYER_COUNT.search(name.rpartition(".")[2]) and name.rpartition(".")[0] == prefix),
        "",
    )
    if counter.isdigit() and layers and isinstance(got[0], int) and sorted(words) == got and got[-1] < others[layers]:
        vector = tuple(index in got for index in range(others[layers]))
        return {"count": layers, "indices": rule_for(vector, others, layers)}
    if len(words) == 1:
        return {"count": counter, "cases": [[words[0], ""]]}
    return {
        "count": counter,
        "cases": [[word, rule_for(tuple(item == word for item in got), others, counter)] for word in words],
    }


# Switches


def switches(learner: Learner) -> Iterator[Switch]:
    """Everything that might decide whether a tensor is there."""
    types = annotations(learner.model_type, learner.values)
    for path, value in leaves(learner.values):
        name = path.rpartition(".")[2]
        if name not in build_traced.read and name != "tie_word_embeddings":
            continue
        if isinstance(value, bool):
            yield Switch(path, path, not value)
        elif value is None:
            kind = types.get(path, "")
            if "bool" in kind:
                yield Switch(path, path, True)
            elif "int" in kind and not any(word in name for word in ("token", "seed")):
                yield Switch(f"{path} is None", path, 40)
        elif isinstance(value, int) and "None" in types.get(path, "") and path not in learner.derived:
            yield Switch(f"{path} is None", path, None)
    yield from itertools.starmap(Switch, SWITCHES_OF.get(learner.model_type, ()))
    yield from undeclared(learner)
    for text in learner.compared:
        yield from flips(text, learner.values)


def undeclared(learner: Learner) -> Iterator[Switch]:
    """Fields that the code asks for and the configuration does not have: absent, they are null."""
    places = {learner.model_type: ""}
    for name, value in learner.values.items():
        if isinstance(value, Mapping) and "model_type" in value:
            places[value["model_type"]] = f"{name}."
    for model_type, name in sorted(build_traced.missing):
        path = places.get(model_type, "") + name
        if model_type not in places or path in dict(leaves(learner.values)):
            continue
        if re.search(r"dim$|size$|^num_|_rank$|heads$|layers$", name):
            yield Switch(f"{path} is None", path, 40)
        elif not name.startswith("_"):
            yield Switch(f"{path} == False", path, False)
            yield Switch(f"{path} == True", path, True)


IRRELEVANT = re.compile(
    r"drop|token_id|_eps|epsilon|activation|hidden_act|act_fn|\bi\b|initializer|_prob\b|rate|num_labels|scal"
)


# A comparison of a layer's index with a field that rules over layers: the index rules find it.
LAYERWISE = re.compile(
    r"^\(?\d+ %|\b\w*(layer|dense|step|interval|period|offset|pattern|freq|stride|start|first)\w*\)* (<=|>=|<|>|==|!=) [1-9]|^\d+ [<>=!]"
)


def flips(text: str, values: Mapping[str, Any]) -> Iterator[Switch]:
    """Values of one field that turn a comparison round."""
    if IRRELEVANT.search(text) or LAYERWISE.search(text):
        return
    if any(LAYER_COUNT.search(name.rpartition(".")[2]) for name in names_in(text)):
        return
    known = dict(leaves(values))
    try:
        now = bool(evaluate(text, lambda name: known[name]))
    except Exception:
        return
    for path in sorted(names_in(text)):
        for value in _trials(text, path, known):
            try:
                if bool(evaluate(text, lambda name: value if name == path else known[name])) != now:
                    yield Switch(_word(text), path, value)
            except Exception:
                continue


def _word(text: str) -> str:
    """The whole family of gated activations hangs on one word."""
    return re.sub(r"^([\w.]+) == 'gated-\w+'$", r"'gated' in \1", text)


def _trials(text: str, path: str, known: Mapping[str, Any]) -> list[Any]:
    value = known.get(path)
    if isinstance(value, str):
        return re.findall(r"== '([^']*)'", text)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return []
    others = [known[name] for name in names_in(text) if name != path and isinstance(known.get(name), int)]
    return [*others, 0, 1, 2 * value, value // 2, value + 1]


def effective(learner: Learner, base: frozenset[Entry], tried: Iterable[Switch]) -> dict[Switch, frozenset[Entry]]:
    """The switches that change tensors, with what they then are."""
    found: dict[Switch, frozenset[Entry]] = {}
    seen: set[str] = set()
    for switch in tried:
        if switch.text in seen:
            continue
        try:
            entries = learner.build(changed(learner.values, switch.path, switch.value))
        except Exception:
            continue
        seen.add(switch.text)
        if entries != base and not any(entries == other and _alike(one, switch) for one, other in found.items()):
            found[switch] = entries
    return found


def _alike(one: Switch, two: Switch) -> bool:
    """Comparisons that turn together are one switch; flags of which either does the same are two."""
    return one.path == two.path or not (isinstance(one.value, bool) and isinstance(two.value, bool))


def conditions(learner: Learner) -> tuple[Builds, list[Switch]]:
    """What the model is under each switch and each pair of them."""
    base = learner.build(learner.values)
    single = effective(learner, base, list(switches(learner)))
    single = dict(list(single.items())[:MOST_SWITCHES])
    builds: Builds = {frozenset(): base, **{frozenset([switch]): entries for switch, entries in single.items()}}
    builds |= at_random(learner, list(single), f"{learner.model_type}")
    for one, two in itertools.combinations(single, 2):
        # Only in the modules that both change can they meet.
        if one.path == two.path or not touched(base, single[one]) & touched(base, single[two]):
            continue
        both = changed(changed(learner.values, one.path, one.value), two.path, two.value)
        with contextlib.suppress(Exception):
            builds[frozenset([one, two])] = learner.build(both)
    return builds, list(single)


def at_random(learner: Learner, turnable: list[Switch], seed: str) -> Builds:
    """What the model is with several switches turned at once."""
    builds: Builds = {}
    rng = random.Random(seed)
    subsets: Iterable[Iterable[Switch]] = (
        itertools.chain.from_iterable(itertools.combinations(turnable, size) for size in range(len(turnable) + 1))
        if 2 ** len(turnable) <= RANDOM_BUILDS
        else ([switch for switch in turnable if rng.random() < 0.5] for _ in range(RANDOM_BUILDS))
    )
    for subset in subsets:
        flipped = {switch.path: switch for switch in subset}
        values = learner.values
        for switch in flipped.values():
            values = changed(values, switch.path, switch.value)
        with contextlib.suppress(Exception):
            builds[frozenset(flipped.values())] = learner.build(values)
    return builds


def touched(base: frozenset[Entry], other: frozenset[Entry]) -> set[str]:
    """Where two builds differ: the modules that hold those whose tensors they do not share."""
    return {".".join(entry.pattern.split(".")[:-2]) for entry in base ^ other}


def under(learner: Learner, all_switches: list[Switch], architecture: type) -> Builds:
    """Another head of the same model, under each switch."""
    builds: Builds = {frozenset(): learner.build(learner.values, architecture)}
    for switch in all_switches:
        with contextlib.suppress(Exception):
            builds[frozenset([switch])] = learner.build(
                changed(learner.values, switch.path, switch.value), architecture
            )
    return builds


def decided(learner: Learner, builds: Builds, all_switches: list[Switch]) -> dict[Entry, list[str]]:
    """Which positions an entry needs: those whose change takes it away."""
    base_truth = {switch: _truth(learner.values, switch) for switch in all_switches}
    needed: dict[Entry, list[str]] = {}
    for flipped in sorted(builds, key=len):
        for entry in builds[flipped]:
            if entry in needed:
                continue
            texts = []
            for switch in all_switches:
                neighbour = builds.get(flipped ^ {switch})
                if neighbour is not None and entry not in neighbour:
                    truth = base_truth[switch] ^ (switch in flipped)
                    texts.append(switch.text if truth else f"not ({switch.text})")
            needed[entry] = texts
    return {entry: agreeing(learner, builds, all_switches, entry, texts) for entry, texts in needed.items()}


def agreeing(learner: Learner, builds: Builds, all_switches: list[Switch], entry: Entry, texts: list[str]) -> list[str]:
    """The conditions, where every build bears them out; else a tree of them that does."""
    samples = [(standing(learner, flipped, all_switches), entry in entries) for flipped, entries in builds.items()]
    if all(all(decisions.holds(text, sample) for text in texts) == present for sample, present in samples):
        return texts
    found = decisions.condition(samples)
    return texts if found is None else [found] if found else []


def standing(learner: Learner, flipped: Iterable[Switch], all_switches: list[Switch]) -> dict[str, bool]:
    """Which conditions hold when these switches are turned."""
    values = learner.values
    for switch in flipped:
        values = changed(values, switch.path, switch.value)
    return {switch.text: _truth(values, switch) for switch in all_switches}


def _truth(values: Mapping[str, Any], switch: Switch) -> bool:
    known = dict(leaves(values))
    return bool(evaluate(switch.text, known.get))


# Heads


def heads_of(model_type: str) -> list[str]:
    """The classes that the automatic mappings know for a type, the usual one first."""
    order = ["CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "CTC", "IMAGE_CLASSIFICATION",
             "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "UNIVERSAL_SEGMENTATION",
             "ZERO_SHOT_IMAGE_CLASSIFICATION", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM", "PRETRAINING", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION",
             "QUESTION_ANSWERING", "MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION", "MASKED_IMAGE_MODELING", "MASK_GENERATION", "TIME_SERIES_PREDICTION",
             "KEYPOINT_DETECTION", "IMAGE_TO_IMAGE", "VISUAL_QUESTION_ANSWERING"]  # fmt: skip
    if CONFIG_MAPPING[model_type].__dataclass_fields__["is_encoder_decoder"].default:
        order = ["SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", *order]
    elif model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        order = ["MASKED_LM", *order]
    if "text_config" in (CONFIG_MAPPING[model_type].sub_configs or {}):
        order = ["IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", *order]
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in order]
    mappings.append(modeling_auto.MODEL_MAPPING_NAMES)
    found: list[str] = []
    for mapping in mappings:
        names = mapping.get(model_type, ())
        found += [names] if isinstance(names, str) else list(names)
    return list(dict.fromkeys(found))


def synonyms(model_type: str, values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Other names of fields, by path."""
    found = {prefix + other: prefix + name for other, name in (CONFIG_MAPPING[model_type].attribute_map or {}).items()}
    for name, value in values.items():
        if isinstance(value, Mapping) and value.get("model_type") in CONFIG_MAPPING_NAMES:
            found |= synonyms(value["model_type"], value, f"{prefix}{name}.")
    return found


def first_that_builds(
    model_type: str, architecture: type, defaults: Mapping[str, Any]
) -> tuple[Learner, Builds, list[Switch]]:
    """With few layers, or else with the usual number."""
    seeds = SEEDS_OF.get(model_type, {})
    build_traced.read.clear()
    build_traced.missing.clear()
    few = shortened(defaults, itertools.count(9, 2))
    for values, grouped in (({**few, **seeds}, True), ({**few, **seeds}, False), ({**defaults, **seeds}, False)):
        learner = Learner(model_type, architecture, values)
        try:
            fill_in(learner)
            learner.values = {**learner.values, **KINDS_OF.get(model_type, {})}
            if grouped:
                learner.values = with_groups(learner.values)
            return learner, *conditions(learner)
        except Exception as error:
            failure = error
    raise failure


def with_groups(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fewer key and value heads than heads, so that the two can be told apart."""
    heads = values.get("num_attention_heads")
    same = (
        "num_key_value_heads" in values
        and values["num_key_value_heads"] == heads
        and isinstance(heads, int)
        and heads % 2 == 0
    )
    inner = {name: with_groups(value) for name, value in values.items() if isinstance(value, Mapping)}
    return {**values, **inner, **({"num_key_value_heads": heads // 2} if same else {})}


def learn(model_type: str) -> dict[str, Any] | None:
    """The row of an architecture."""
    names = [name for name in heads_of(model_type) if hasattr(transformers, name)]
    if not names:
        return None
    defaults = default_values(model_type)
    learner, builds, chosen = first_that_builds(model_type, getattr(transformers, names[0]), defaults)
    needed = decided(learner, builds, chosen)
    simply = {entry for flipped, entries in builds.items() if len(flipped) < 2 for entry in entries}
    entries = sorted(needed, key=lambda entry: (entry.pattern, entry.sizes))
    heads: dict[str, Any] = {names[0]: {"without": [], "with": []}}
    base = builds[frozenset()]
    # A switch of the layers alone does in every head what it does in the first.
    outer = [switch for switch in chosen if any(not entry.loops for entry in base ^ builds[frozenset([switch])])]
    layered = {entry for entry in needed if entry.loops}
    for name in names[1:MOST_HEADS]:
        try:
            others = decided(learner, under(learner, outer, getattr(transformers, name)), outer)
        except Exception:
            continue
        heads[name] = {
            "without": [
                number
                for number, entry in enumerate(entries)
                if entry in simply and entry not in others and (entry in base or entry not in layered)
            ],
            "with": [
                written(entry, others[entry])
                for entry in sorted(set(others) - set(needed), key=lambda entry: entry.pattern)
            ],
        }
    row = {
        "model_type": model_type,
        "defaults": {name: value for name, value in defaults.items() if value is not None},
        "doubtful": None,
        "old_kinds": "remap_legacy_layer_types" in inspect.getsource(CONFIG_MAPPING[model_type]),
        "switches": [switch.text for switch in chosen],
        "names": synonyms(model_type, defaults),
        "derived": learner.derived,
        "heads": heads,
        "tensors": [written(entry, needed[entry]) for entry in entries],
    }
    return {**row, **doubt(row)}


def doubt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Of which switches, and from how many of them on, a count may be off; no doubt where no variation was."""
    seeds = SEEDS_OF.get(row["model_type"], {})
    missed, tried = verify_shapes.failures(json.loads(json.dumps(row)), seeds)
    if not missed:
        return {"doubtful": None if tried else 0, "switches": []}
    # What a seed turned is turned in every variation, and no cause.
    common = {text for text in set.intersection(*missed) if names_in(text).isdisjoint(seeds)}
    fewest = min(len(switches) for switches in missed)
    kept = [text for text in row["switches"] if text in common or not common]
    return {"doubtful": min(PROVEN + 1, fewest, len(kept)), "switches": kept}


def written(entry: Entry, needs: list[str]) -> list[Any]:
    """As the file holds it."""
    return [entry.pattern, list(entry.sizes), [list(loop) for loop in entry.loops], " and ".join(needs)]


def usual() -> list[str]:
    """Every type, those with a head for language first."""
    tasks = (
        "CAUSAL_LM",
        "MASKED_LM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "IMAGE_CLASSIFICATION",
        "SPEECH_SEQ_2_SEQ",
        "IMAGE_TEXT_TO_TEXT",
    )
    first = [name for task in tasks for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")]
    return [name for name in dict.fromkeys([*first, *CONFIG_MAPPING_NAMES]) if name in CONFIG_MAPPING_NAMES]


def main() -> None:
    """Learn what was asked for, and write the file."""
    asked = sys.argv[1:] or usual()
    rows = {json.loads(line)["model_type"]: line for line in OUTPUT.read_text().splitlines()} if OUTPUT.exists() else {}
    for model_type in asked:
        try:
            learned = learn(model_type)
        except Exception as error:
            print(f"{model_type}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        if learned is not None:
            rows[model_type] = json.dumps(learned)
            doubtful = "" if learned["doubtful"] is None else f", doubtful from {learned['doubtful']} switches on"
            print(
                f"{model_type}: {len(learned['tensors'])} tensors, {len(learned['heads'])} heads{doubtful}", flush=True
            )
            save(rows)


def save(rows: Mapping[str, str]) -> None:
    """After each architecture, so that nothing learned is lost."""
    OUTPUT.write_text("\n".join(rows[name] for name in sorted(rows)) + "\n")


if __name__ == "__main__":
    main()
