"""Every kind of file that tonnage reads from outside: how such a file is spoilt, and each command that reads it.

| kind        | a file is                                          | read by                                       |
|-------------|----------------------------------------------------|-----------------------------------------------|
| recording   | what `tonnage run -o` writes                       | show, explain, diff, replay                   |
| cluster     | the same of many ranks                             | show, explain, diff                           |
| snapshot    | PyTorch's, pickled, gzipped or not                 | show, explain, diff, replay                   |
| events      | a list of allocator events                         | replay                                        |
| error       | the text of an error                               | explain                                       |
| trace       | a trace of the PyTorch profiler, gzipped or not    | roofline                                      |
| ncu         | Nsight Compute's CSV, gzipped or not               | roofline                                      |
| ceilings    | a probe's figures of a card                        | roofline                                      |
| config      | a model's config.json                              | plan train, plan serve, roofline, serve       |
| checkpoint  | the headers and the index of safetensors           | plan train, plan serve, roofline              |
| card        | a card in TOML                                     | gpu, plan, roofline                           |
| words       | sizes, counts, names and settings in flags         | plan, roofline, gpu, diff                     |
| training    | flags that make sense, or nearly                   | plan train, of every preset and card          |
| request     | the body of a request to `tonnage serve`           | the server                                    |
| fit         | a plan that fit saved, settings of DeepSpeed       | tonnage.fit, tonnage.fit_deepspeed            |
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fuzz import mutations, seeds
from tonnage.hardware import all_gpus
from tonnage.models import all_presets

# A command line, or a function of the library that reads the file.
Call = list[str] | Callable[[], object]
_SPOILT_BYTES = 0.15
_STRANGE = 0.03
_NAMES = ("x y", "q?mode=rwc#f", "%41", "a\nb\x1b[31m", "\udcff\udce9", "é→𝔘", "-", "[bold]x")


@dataclass(frozen=True)
class Kind:
    """`spoil` makes a file's bytes in an empty folder; `calls` are the ways to read it, one of which is taken."""

    spoil: Callable[[Random, Path], bytes]
    calls: Callable[[Random, str], Call]
    name: str = "file"
    is_file: bool = True
    needs_torch: bool = False


def make(kind: Kind, rng: Random, folder: Path) -> Call:
    """Write the case's file into an empty folder; what is to be called."""
    name = kind.name if rng.random() < 0.97 else f"{rng.choice(_NAMES)}{Path(kind.name).suffix}"
    path = folder / name
    chance = rng.random()
    if kind.is_file and chance < _STRANGE:
        strange = rng.choice(list(mutations.STRANGE_FILES))
        mutations.STRANGE_FILES[strange](path)
    elif kind.is_file:
        data = kind.spoil(rng, folder)
        path.write_bytes(mutations.spoil_bytes(data, rng) if chance < _STRANGE + _SPOILT_BYTES else data)
    return kind.calls(rng, name if not name.startswith("-") else f"./{name}")


def _out(rng: Random) -> list[str]:
    """Where the answer goes."""
    return rng.choice(([], ["--json", "out.json"], ["--json", "-"]))


def _reports(rng: Random, file: str) -> Call:
    page = ["--html", "out.html"] if rng.random() < 0.4 else []
    return rng.choice(
        (
            ["show", file, *page, *_out(rng)],
            ["show", file, "--verbose", *page],
            ["explain", "--no-run", file, *_out(rng)],
            ["explain", "--no-run", "--verbose", file],
            ["diff", file, "../seed", *_out(rng)],
            ["diff", "../seed", file],
            ["diff", file, file, "--fail-above", "1%"],
            ["replay", file, *_out(rng)],
        )
    )


def _of_ranks(rng: Random, file: str) -> Call:
    rank = str(rng.choice((0, 3, 7, 8, 10**30)))
    return rng.choice(
        (
            _reports(rng, file),
            ["show", file, "--rank", rank],
            ["explain", "--no-run", file, "--rank", rank],
            ["diff", file, file, "--ranks", f"0,{rank}"],
        )
    )


def _rooflines(rng: Random, file: str) -> Call:
    page = ["--html", "out.html"] if rng.random() < 0.4 else []
    card = ["--gpu", "h200"] if rng.random() < 0.7 else []
    return ["roofline", file, *card, *page, *_out(rng)]


def _ceilings(rng: Random, file: str) -> Call:
    of = rng.choice((["--model", "qwen3-0.6b"], ["--model", "llama-3.1-8b", "--phase", "train"]))
    return ["roofline", *of, "--ceilings", file, *rng.choice(([], ["--gpu", "h100"])), *_out(rng)]


def _plans(rng: Random, model: str) -> Call:
    more = rng.choice(([], ["--explain"], _out(rng)))
    return rng.choice(
        (
            ["plan", "train", model, "--gpus", "8xh100", *more],
            ["plan", "train", model, "--gpus", "rtx-4090", "--lora", "8", "--zero", "0", *more],
            ["plan", "train", model, "--gpus", "8xh100", "--export", "out"],
            ["plan", "serve", model, "--gpus", "h100", *more],
            ["plan", "serve", model, "--gpus", "4xh100", "--engine", "tonnage", *more],
            ["plan", "serve", model, "--gpus", "2xa100-80", "--export", "out"],
            ["roofline", "--model", model, "--gpu", "h200", "--phase", rng.choice(("decode", "prefill", "train"))],
        )
    )


def _architecture(file: str) -> Callable[[], object]:
    def read() -> object:
        from tonnage.serve.models.architecture import read_architecture

        return read_architecture(file)

    return read


def _config_calls(rng: Random, file: str) -> Call:
    return _architecture(file) if rng.random() < 0.15 else _plans(rng, file)


def _cards(rng: Random, file: str) -> Call:
    return rng.choice(
        (
            ["gpu", f"./{file}", *_out(rng)],
            ["gpu", f"8x./{file}", "h100"],
            ["plan", "train", "qwen3-0.6b", "--gpus", f"2x./{file}"],
            ["plan", "serve", "qwen3-0.6b", "--gpus", f"./{file}"],
            ["roofline", "--model", "qwen3-0.6b", "--gpu", f"./{file}", "--phase", "train"],
        )
    )


_WORDS = ("", "0", "-1", "1e999", "9" * 400, "9" * 5000, "80 GiB", "1e308 TiB", "nan", "inf", "-inf%", "5%", "1e5%", "٣", "²",
          "8xh100", "0xh100", "99999999999999999999xh100", "h100", "../x", "\0", "a" * 5000, "1m", "4k", "0.5", "3,7", "1,2,3",
          "8x8x8xh100", "\udcff", "full", "every-0", "every-99999", "optimizer:nvme", "none")  # fmt: skip
_FLAGS = {
    ("plan", "train"): ("--gpus", "--seq", "--micro-batch", "--global-batch", "--tp", "--pp", "--cp", "--ep", "--shard", "--lora",
                        "--checkpoint", "--offload", "--zero", "--freeze", "--images", "--image-size", "--lengths"),
    ("plan", "serve"): ("--gpus", "--context", "--users", "--prompt-shared", "--tp", "--pp", "--stage-layers", "--block",
                        "--utilization", "--max-seqs", "--batched-tokens", "--engine-version", "--beside", "--host-memory",
                        "--engine=llama.cpp --gpu-layers", "--engine=llama.cpp --cpu-moe"),
    ("plan", "rl"): ("--gpus", "--prompts", "--group", "--prompt", "--completion", "--iterations", "--rollout-gpus",
                     "--utilization", "--engine-tp", "--sleep", "--offload", "--micro-batch", "--lora", "--zero", "--reward",
                     "--critic"),
    ("roofline", "--gpu", "h200", "--model"): ("--gpu", "--batch", "--seq", "--phase", "--rows"),
}  # fmt: skip


def _commands(rng: Random, file: str) -> Call:
    if rng.random() < 0.15:
        return rng.choice(
            (["gpu", "--", rng.choice(_WORDS)], ["diff", "../seed", "../seed", "--fail-above", rng.choice(_WORDS)])
        )
    command = rng.choice(list(_FLAGS))
    known = [] if command[0] == "roofline" else ["--gpus", "8xh100"]
    flags = rng.sample(_FLAGS[command], rng.choice((1, 1, 2, 3)))
    model = "qwen3-0.6b" if rng.random() < 0.9 else rng.choice(_WORDS)
    return [
        *command,
        model,
        *known,
        *(word for flag in flags for word in f"{flag}={rng.choice(_WORDS)}".split(" ", flag.count(" "))),
    ]


_PLANNED = {
    "--micro-batch": ("1", "2", "3", "4", "64", "0"),
    "--global-batch": ("1", "8", "24", "96", "512", "1000", "-8"),
    "--precision": ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "bf16", "fp8", "int4"),
    "--optimizer": ("sgd", "momentum", "adam", "adamw", "adamw-8bit", "adafactor", "lion", "muon", "sophia"),
    "--optimizer-kernel": ("foreach", "fused", "loop"),
    "--checkpoint": ("none", "selective", "full", "every-1", "every-3", "every-100", "some"),
    "--attention": ("flash", "flash-2", "eager"),
    "--loss": ("full", "chunked"),
    "--zero": ("0", "1", "2", "3", "4"),
    "--tp": ("1", "2", "3", "8", "16"),
    "--pp": ("1", "2", "4", "5", "100"),
    "--cp": ("1", "2", "4", "7"),
    "--ep": ("1", "2", "8", "3"),
    "--shard": ("1", "2", "4", "8", "5"),
    "--framework": ("torch", "fsdp2", "deepspeed", "megatron", "nanotron", "jax"),
    "--offload": (
        "none",
        "optimizer",
        "parameters",
        "activations",
        "optimizer,activations",
        "all",
        "all:nvme",
        "optimizer:disk",
    ),
    "--lora": ("1", "16", "256", "100000"),
    "--objective": ("dpo", "kto", "orpo", "reward", "distill", "contrastive", "classify", "ppo"),
    "--reference": ("copy", "adapters-off", "precomputed"),
    "--teacher": ("llama-3.1-8b", "qwen3-8b", "nobody"),
    "--negatives": ("0", "7", "-1", "100000"),
    "--tokens": ("1B", "1e12", "0", "few"),
    "--samples": ("10k", "1"),
    "--epochs": ("3", "0"),
    "--price": ("2.5", "0", "free"),
    "--export": ("out",),
    "--freeze": (
        "vision",
        "language",
        "embeddings",
        "projector",
        "encoder",
        "all-but-projector",
        "all-but-last-2",
        "head",
    ),
    "--images": ("0", "1", "3", "-1"),
    "--image-size": ("224", "640x480", "1", "0", "wide"),
    "--lengths": (
        "600",
        "1",
        "100,4096",
        "999x600,32k",
        "mean 600 max 4k",
        "median 5 max 6",
        "mean 1 max 9999999",
        "x",
    ),
    "--batching": ("pad", "bucket", "padding-free", "pack", "heap"),
}
_SWITCHES = (
    "--qlora",
    "--grad-cache",
    "--compile",
    "--no-sequence-parallel",
    "--explain",
    "--dropout",
    "--lora-dropout",
)
_SWITCHES += ("--tiled-mlp", "--eager-loss", "--fp32-logits")


def _trainings(rng: Random, file: str) -> Call:
    """Any preset on any card, with a few flags whose values are mostly good ones."""
    card = rng.choice([card.key for card in all_gpus()])
    gpus = rng.choice(("", "", "2x", "3x", "4x", "8x", "8x", "16x", "2x4x", "64x", "0x")) + card
    seq = rng.choice(([], ["--seq", rng.choice(("1", "128", "512", "1000", "2k", "8k", "100k", "-4"))]))
    words = [
        f"{flag}={rng.choice(_PLANNED[flag])}" for flag in rng.sample(list(_PLANNED), rng.choice((0, 1, 2, 3, 4, 6)))
    ]
    words += [switch for switch in _SWITCHES if rng.random() < 0.12]
    return ["plan", "train", rng.choice(all_presets()), "--gpus", gpus, *seq, *words, *_out(rng)]


def _request(rng: Random, file: str) -> Call:
    data = mutations.spoil_json(rng.choice(seeds.requests()), rng)
    data = mutations.spoil_bytes(data, rng) if rng.random() < _SPOILT_BYTES else data

    def read() -> object:
        from tonnage.errors import RequestError
        from tonnage.serve.server import schemas
        from tonnage.serve.server.limits import ApiError

        try:
            kind = rng.choice((schemas.CompletionRequest, schemas.ChatRequest))
            return schemas.parse(kind, data)
        except ApiError as error:
            raise RequestError(json.dumps(str(error))) from None  # as it is sent

    return read


def _fit(rng: Random, file: str) -> Call:
    def read() -> object:
        from tonnage.fit.plan import read_plan
        from tonnage.fit.sharding.deepspeed import read_config

        return rng.choice((read_plan, read_config))(file)

    return read


def _plan(rng: Random, folder: Path) -> bytes:
    techniques = [{"name": "recompute", "settings": {"blocks": ["layers.0"]}}, {"name": "chunked-loss", "settings": {}}]
    numbers = (
        "batch_rows",
        "budget_bytes",
        "host_budget_bytes",
        "peak_bytes",
        "step_s",
        "plain_peak_bytes",
        "plain_step_s",
    )
    row = {"name": "recompute", "title": "recompute", "saved_bytes": 5, "seconds": 0.1, "why": "fits"}
    plan = {"version": 1, "device": "cuda", "techniques": techniques, "rows": [row], **dict.fromkeys(numbers, 8)}
    return mutations.spoil_json(plan, rng)


def _model_folder(rng: Random, folder: Path) -> bytes:
    """Shards with their index, and now and then a config.json beside them."""
    if rng.random() < 0.3:
        (folder / "config.json").write_bytes(mutations.spoil_json(seeds.configs()[0], rng))
    if rng.random() < 0.5:
        for number in (1, 2):
            shard = mutations.spoil_safetensors(seeds.headers()[0], rng)
            (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(shard)
        (folder / "model.safetensors.index.json").write_bytes(mutations.spoil_json(seeds.index(), rng))
    return mutations.spoil_safetensors(rng.choice(seeds.headers()), rng)


def _checkpoint_calls(rng: Random, file: str) -> Call:
    return _plans(rng, rng.choice((".", file)))


def _json(trees: Callable[[], list[Any]], pack: bool = False) -> Callable[[Random, Path], bytes]:
    def spoil(rng: Random, folder: Path) -> bytes:
        data = mutations.spoil_json(rng.choice(trees()), rng)
        return mutations.packed(data, rng) if pack else data

    return spoil


def _database(files: Callable[[], list[bytes]]) -> Callable[[Random, Path], bytes]:
    return lambda rng, folder: mutations.spoil_database(rng.choice(files()), rng, folder / ".scratch")


KINDS = {
    "recording": Kind(_database(seeds.recordings), _reports, "run.tonnage"),
    "cluster": Kind(_database(seeds.clusters), _of_ranks, "ranks.tonnage"),
    "snapshot": Kind(lambda rng, _: mutations.spoil_pickle(rng.choice(seeds.snapshots()), rng), _reports, "s.pickle"),
    "events": Kind(_json(seeds.event_lists, pack=True), lambda rng, file: ["replay", file, *_out(rng)], "events.json"),
    "error": Kind(
        lambda rng, _: mutations.spoil_bytes(rng.choice(seeds.errors()), rng),
        lambda rng, file: ["explain", file, *_out(rng)],
        "error.txt",
    ),
    "trace": Kind(_json(seeds.traces, pack=True), _rooflines, "trace.json"),
    "ncu": Kind(
        lambda rng, _: mutations.packed(mutations.spoil_csv(rng.choice(seeds.tables()), rng), rng),
        _rooflines,
        "ncu.csv",
    ),
    "ceilings": Kind(_json(seeds.ceilings), _ceilings, "ceilings.json"),
    "config": Kind(_json(seeds.configs), _config_calls, "config.json"),
    "checkpoint": Kind(_model_folder, _checkpoint_calls, "model.safetensors"),
    "card": Kind(lambda rng, _: mutations.spoil_toml(rng.choice(seeds.cards()), rng), _cards, "card.toml"),
    "words": Kind(lambda rng, _: b"", _commands, is_file=False),
    "training": Kind(lambda rng, _: b"", _trainings, is_file=False),
    "request": Kind(lambda rng, _: b"", _request, is_file=False),
    "fit": Kind(_plan, _fit, "plan.json", needs_torch=True),
}


def lay_seed(folder: Path) -> None:
    """The whole recording that others are compared with."""
    (folder / "seed").write_bytes(seeds.recordings()[0])


def readable(call: Call) -> str:
    """A call as one would type it."""
    return (
        "tonnage " + " ".join(json.dumps(word) if not word.isalnum() else word for word in call)
        if isinstance(call, list)
        else "a reader of the library"
    )
