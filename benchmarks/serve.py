"""`tonnage serve`'s engine on the standard workload, beside transformers: `python benchmarks/serve.py throughput`.

256 sequences, inputs and outputs of 100 to 1024 tokens, seed 0: 133,966 tokens to draw at temperature 0.6, ends ignored.
Models have random weights and the shape of a published one, so nothing is downloaded.

| part       | what it measures                                                                                     |
|------------|------------------------------------------------------------------------------------------------------|
| throughput | tokens/s, time and host time of a step, share of the ceiling, waste; blocks planned and had          |
| peers      | transformers' continuous batching and `generate`, and the engine, on the same part of the workload   |
| prefix     | what the prefix cache costs where nothing is ever found in it                                        |
| waste      | pages of 16 to 256 tokens and contiguous rows: the scheduler alone, no device                        |

The ceiling of a run, from what its own steps did: the KV cache that they read and the weights once a step at 4.1 TB/s, and
the products of the prompts' tokens at 600 TFLOP/s. Each part prints a table and writes benchmarks/results/serve-PART.json
with card, versions and commit. `--tiny --device cpu` tries it out anywhere.
"""

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from tonnage.budget.serving.kv_cache import blocks_for
from tonnage.budget.serving.memory import ServingConfiguration, serving_budget
from tonnage.errors import TonnageError
from tonnage.garbage import no_collection
from tonnage.hardware import find_gpu
from tonnage.models import find_model
from tonnage.models.presets import preset_config
from tonnage.report.serve import card_figures
from tonnage.serve.cache.block_pool import BlockPool
from tonnage.serve.config import EngineConfig
from tonnage.serve.engine import Engine
from tonnage.serve.model_runner.runner import TokensInTransit
from tonnage.serve.models.architecture import Architecture, architecture_of
from tonnage.serve.models.load import random_decoder
from tonnage.serve.sampling import Sampling
from tonnage.serve.scheduler.scheduler import Scheduler
from tonnage.serve.scheduler.sequence import ScheduledStep
from tonnage.serve.scheduler.sequence import Sequence as Sequenced
from tonnage.serve.stats import Stats

RESULTS = Path(__file__).parent / "results"
PRESETS = {"0.6b": "qwen3-0.6b", "14b": "qwen3-14b"}
BANDWIDTH, MATMUL_RATE = 4.1e12, 6e14
CONTEXT, TEMPERATURE = 4096, 0.6
STANDARD_TOKENS = 133_966
TINY = {
    "model_type": "qwen3", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and how many tokens are drawn for each."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.outputs)

    def first(self, count: int, most: int) -> "Workload":
        """A part of it: so many prompts, so many tokens for each."""
        return Workload(self.prompts[:count], [min(most, wanted) for wanted in self.outputs[:count]])


def workload(*, tiny: bool = False, seed: int = 0) -> Workload:
    """The standard one."""
    count, low, high, words = (6, 4, 40, 256) if tiny else (256, 100, 1024, 10_000)
    drawn = random.Random(seed)
    prompts = [[drawn.randint(0, words - tiny) for _ in range(drawn.randint(low, high))] for _ in range(count)]
    return Workload(prompts, [drawn.randint(low, high) for _ in range(count)])


# One run of the engine.


@dataclass(slots=True)
class Trace:
    """What the steps of a run read and computed, and where the host's time went."""

    decodes: list[int] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    keys_read: list[int] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    waits_s: float = 0.0
    own_s: float = 0.0  # of this tracing
    held: list[tuple[float, int, int, int]] = field(default_factory=list)  # seconds, slack, held by sequences, pool

    def note(self, step: ScheduledStep) -> None:
        self.decodes.append(len(step.decodes))
        self.chunk_tokens.append(sum(work.count for work in step.chunks))
        decoded = sum([work.start for work in step.decodes]) + len(step.decodes)
        self.keys_read.append(decoded + sum(work.start + work.count for work in step.chunks))

    def full_host_s(self) -> float:
        """The median of steps that decode nearly as many sequences as any, and nothing else."""
        most = max(self.decodes, default=0)
        pairs = zip(self.decodes, self.chunk_tokens, self.host_s, strict=False)
        found = [seconds for count, chunks, seconds in pairs if count >= 0.9 * most and not chunks]
        return statistics.median(found) if found else statistics.median(self.host_s)

    def waste(self, whole: int) -> float:
        """Slack as a share of what sequences hold (2) or of the pool (3), over time."""
        seconds = sum(moment[0] for moment in self.held)
        return sum(m[0] * m[1] / max(m[whole], 1) for m in self.held) / seconds if seconds else 0.0


def run(engine: Engine, work: Workload, salt: str, *, temperature: float = TEMPERATURE) -> tuple[float, Trace]:
    """Seconds from the first prompt to the last token, and the trace. Each run has a salt: it finds nothing cached."""
    trace = Trace()
    engine.stats = Stats()
    noted = mock.patch.object(engine.scheduler, "schedule", _noting(engine.scheduler.schedule, trace))
    timed = mock.patch.object(TokensInTransit, "result", _timing(TokensInTransit.result, trace))
    with noted, timed, no_collection(), engine.at_work():
        _synchronize(engine)
        began_s = time.perf_counter()
        for prompt, wanted in zip(work.prompts, work.outputs, strict=True):
            engine.submit(
                prompt, Sampling(max_tokens=wanted, temperature=temperature, ignore_eos=True, seed=0), salt=salt
            )
        drawn = _advance_all(engine, trace)
        seconds = time.perf_counter() - began_s
    assert drawn == work.tokens, f"{drawn:,} tokens were drawn, not {work.tokens:,}"
    return seconds, trace


def _advance_all(engine: Engine, trace: Trace) -> int:
    drawn, looked_s = 0, time.perf_counter()
    while engine.has_work:
        began_s, before_s = time.perf_counter(), trace.waits_s + trace.own_s
        drawn += len(engine.advance().tokens)
        now_s = time.perf_counter()
        trace.host_s.append(now_s - began_s - (trace.waits_s + trace.own_s - before_s))
        if len(trace.host_s) % 8 == 0:
            ledger = engine.kv_ledger()
            held = ledger.used_bytes + ledger.slack_bytes + ledger.shared_bytes
            trace.held.append((now_s - looked_s, ledger.slack_bytes, held, ledger.total))
            looked_s = now_s
    return drawn


def _noting(schedule: Callable[[], ScheduledStep | None], trace: Trace) -> Callable[[], ScheduledStep | None]:
    def noted() -> ScheduledStep | None:
        step = schedule()
        began_s = time.perf_counter()
        if step is not None:
            trace.note(step)
        trace.own_s += time.perf_counter() - began_s
        return step

    return noted


def _timing(result: Callable[[TokensInTransit], Any], trace: Trace) -> Callable[[TokensInTransit], Any]:
    def timed(pending: TokensInTransit) -> Any:
        began_s = time.perf_counter()
        if pending.arrived is not None:
            pending.arrived.synchronize()
        trace.waits_s += time.perf_counter() - began_s
        return result(pending)

    return timed


def ceiling_s(engine: Engine, trace: Trace) -> tuple[float, float]:
    """Seconds that memory takes at least, and arithmetic on prompts. An embedding that is not the head is not read."""
    decoder = engine.runner._decoder
    embedding = decoder.embedding.nbytes
    token_bytes = engine.card.pool.block_bytes / engine.config.block
    weights = decoder.weight_bytes - (0 if engine.architecture.tied else embedding)
    read = len(trace.decodes) * weights + sum(trace.keys_read) * token_bytes
    passed = (weights - embedding) / decoder.embedding.itemsize
    return read / BANDWIDTH, 2 * passed * sum(trace.chunk_tokens) / MATMUL_RATE


def figures(engine: Engine, work: Workload, seconds: float, trace: Trace) -> dict[str, Any]:
    """One run in numbers."""
    steps, (memory_s, arithmetic_s) = len(trace.decodes), ceiling_s(engine, trace)
    ceiling = memory_s + arithmetic_s
    return {
        "tokens": work.tokens,
        "seconds": seconds,
        "tokens_per_s": work.tokens / seconds,
        "steps": steps,
        "step_s": seconds / steps,
        "host_step_s": statistics.mean(trace.host_s),
        "host_step_full_s": trace.full_host_s(),
        "waited_share": trace.waits_s / seconds,
        "ceiling_tokens_per_s": work.tokens / ceiling,
        "share_of_ceiling": ceiling / seconds,
        "ceiling_memory_s": memory_s,
        "ceiling_prompts_s": arithmetic_s,
        "waste_of_held": trace.waste(2),
        "waste_of_pool": trace.waste(3),
        "prefix_hit_tokens": engine.scheduler.counters.prefix_hits,
        "preemptions": engine.scheduler.counters.preemptions,
    }


# Parts.


def shape_of(options: argparse.Namespace) -> Architecture:
    return architecture_of(TINY if options.tiny else preset_config(PRESETS[options.shape]))


def make_engine(options: argparse.Namespace, *, kv: str = "bf16", prefix_cache: bool = True) -> Engine:
    """With random weights: FP32 on the CPU, as the engine has it there; warm when it is handed out."""
    device = torch.device(options.device)
    on_cpu = device.type == "cpu"
    architecture, context = shape_of(options), 512 if options.tiny else CONTEXT
    decoder = random_decoder(architecture, device, torch.float32 if on_cpu else torch.bfloat16, context=context)
    kept = None if kv == "bf16" else kv
    small = {"budget": "200 MiB", "max_seqs": 8, "batched_tokens": 64} if options.tiny else {}
    settings = EngineConfig(**{"context": context, "kv": kept, "prefix_cache": prefix_cache, **small})
    engine = Engine.of(decoder, settings=settings)
    # All of another workload: kernels are loaded, clocks are up, and the host has the memory that it needs.
    run(engine, workload(tiny=options.tiny, seed=1), "warm")
    return engine


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """The workload, some times over."""
    engine, work = make_engine(options, kv=options.kv), workload(tiny=options.tiny)
    runs = [figures(engine, work, *run(engine, work, f"run {number}")) for number in range(options.runs)]
    median = sorted(runs, key=lambda each: each["tokens_per_s"])[len(runs) // 2]
    name = f"{'tiny' if options.tiny else options.shape} {options.kv}"
    rows = [[name, *words(each)] for each in runs]
    table(["", "tokens/s", "ms a step", "host µs", "at full µs", "of ceiling", "waste", "of pool"], rows)
    planned = planned_blocks(engine, options)
    say(f"{engine.card.pool.blocks:,} blocks; `tonnage plan serve --engine tonnage` says {planned or 'nothing'}")
    return {
        "shape": "tiny" if options.tiny else options.shape,
        "kv": options.kv,
        **median,
        "runs": runs,
        "planned_blocks": planned,
        "memory": card_figures(engine.card),
    }


def words(found: dict[str, Any]) -> list[str]:
    return [
        f"{found['tokens_per_s']:,.0f}",
        f"{1e3 * found['step_s']:.2f}",
        f"{1e6 * found['host_step_s']:.0f}",
        f"{1e6 * found['host_step_full_s']:.0f}",
        f"{found['share_of_ceiling']:.1%} of {found['ceiling_tokens_per_s']:,.0f}",
        f"{found['waste_of_held']:.2%}",
        f"{found['waste_of_pool']:.2%}",
    ]


def planned_blocks(engine: Engine, options: argparse.Namespace) -> int | None:
    """What the planner says of this card and this start; None where it does not know the card."""
    if options.tiny or torch.device(options.device).type != "cuda":
        return None
    try:
        gpu = find_gpu(engine.card.name)
    except TonnageError:
        return None
    limits = engine.card.limits
    asked = ServingConfiguration(
        engine="tonnage", context=limits.context, kv=limits.kv, max_seqs=limits.max_seqs,
        batched_tokens=limits.batched_tokens, users=limits.max_seqs,
    )  # fmt: skip
    return serving_budget(find_model(PRESETS[options.shape]), asked, gpu).kv.blocks


def prefix(options: argparse.Namespace) -> dict[str, Any]:
    """On and off in turns, in one engine, so that clocks and temperature are the same."""
    engine, work = make_engine(options, kv=options.kv), workload(tiny=options.tiny)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for number in range(options.runs):
        for cached in (True, False) if number % 2 else (False, True):
            engine.scheduler = fresh_scheduler(engine, prefix_cache=cached)
            found = figures(engine, work, *run(engine, work, f"{number}"))
            assert found["prefix_hit_tokens"] == 0
            rates[cached].append(found["tokens_per_s"])
    medians = {cached: statistics.median(each) for cached, each in rates.items()}
    slower = 1 - medians[True] / medians[False]
    rows = [[f"prefix cache {'on' if on else 'off'}", *(f"{rate:,.0f}" for rate in rates[on])] for on in (True, False)]
    table(["tokens/s", *(f"run {number}" for number in range(options.runs))], rows)
    say(f"the cache costs {slower:.2%} where nothing is found in it")
    return {"shape": options.shape, "kv": options.kv, "on": rates[True], "off": rates[False], "slower": slower}


def fresh_scheduler(engine: Engine, *, prefix_cache: bool) -> Scheduler:
    """With an empty pool; the engine must be idle."""
    old = engine.scheduler
    pool = BlockPool(old.pool.count, old.pool.size, prefix_cache=prefix_cache)
    return Scheduler(pool, engine.config, old.clock, context=engine.context)


def waste(options: argparse.Namespace) -> dict[str, Any]:
    """Slack of what sequences hold, by the size of a page; each step counts as long as what it reads."""
    work, found = workload(tiny=options.tiny), {}
    for block in (16, 32, 64, 128, 256):
        found[f"pages of {block}"] = simulated_waste(work, block)
    for reserved in (2048, 4096):
        lengths = [len(prompt) + output / 2 for prompt, output in zip(work.prompts, work.outputs, strict=True)]
        time_each = work.outputs
        used = sum(length * count for length, count in zip(lengths, time_each, strict=True))
        found[f"rows of {reserved}"] = 1 - used / (reserved * sum(time_each))
    table(["", "wasted"], [[name, f"{share:.2%}"] for name, share in found.items()])
    return {"waste": found}


def simulated_waste(work: Workload, block: int) -> float:
    """By the scheduler itself, with room for all."""
    count = sum(blocks_for(len(p) + o, block) for p, o in zip(work.prompts, work.outputs, strict=True)) + 1
    scheduler = Scheduler(BlockPool(count, block, prefix_cache=False), EngineConfig(), time.monotonic, context=CONTEXT)
    for number, (prompt, wanted) in enumerate(zip(work.prompts, work.outputs, strict=True)):
        scheduler.add(Sequenced(number, list(prompt), Sampling(max_tokens=wanted, ignore_eos=True), len(prompt)))
    slack = held = 0
    while (step := scheduler.schedule()) is not None:
        scheduler.complete(step, [0] * len(step.samplers))
        for sequence in scheduler.running:
            slack += len(sequence.blocks) * block - sequence.computed
            held += len(sequence.blocks) * block
    return slack / held


# Peers.


def peers(options: argparse.Namespace) -> dict[str, Any]:
    """All prompts, a few tokens for each: as many as a peer draws in the time given. The engine draws the same."""
    work = workload(tiny=options.tiny)
    results = {
        "continuous batching": attempt(lambda: of_peer(continuous, options, work, "paged|sdpa")),
        "generate": attempt(lambda: of_peer(static, options, work, "sdpa")),
    }
    engine = make_engine(options)
    for name, found in list(results.items()):
        if "each" in found:
            part = Workload(work.prompts, [found["each"]] * len(work.prompts))
            seconds, _ = run(engine, part, name)
            found["engine_tokens_per_s"] = part.tokens / seconds
    rows = [
        [name, f"{f['each']} each", f"{f['tokens_per_s']:,.0f}", f"{f['engine_tokens_per_s']:,.0f}"]
        for name, f in results.items()
        if "each" in f
    ]
    table(["transformers", "drawn", "tokens/s", "tonnage, the same part"], rows)
    return {"shape": "tiny" if options.tiny else options.shape, "prompts": len(work.prompts), "peers": results}


Draw = Callable[[Any, Sequence[list[int]], int], float]


def of_peer(draw: Draw, options: argparse.Namespace, work: Workload, attention: str) -> dict[str, Any]:
    """Tokens a second with so many for each prompt as fit the time."""
    model = transformers_model(options, attention)
    draw(model, work.prompts, 2)
    few = 8
    rate_s = draw(model, work.prompts, few) / few
    each = max(few, min(int(options.seconds / rate_s), work.tokens // len(work.outputs)))
    seconds = draw(model, work.prompts, each)
    return {"each": each, "seconds": seconds, "tokens_per_s": each * len(work.prompts) / seconds}


def transformers_model(options: argparse.Namespace, attention: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(TINY if options.tiny else preset_config(PRESETS[options.shape]))
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return model.eval()


def generation(each: int) -> Any:
    from transformers import GenerationConfig

    # An end that no token is: all are drawn.
    return GenerationConfig(
        max_new_tokens=each, do_sample=True, temperature=TEMPERATURE, eos_token_id=-1, pad_token_id=0, use_cache=True
    )


def continuous(model: Any, prompts: Sequence[list[int]], each: int) -> float:
    """transformers' continuous batching, from its first request to its last: without setting up, which it does each time."""
    began_s = time.perf_counter()
    found = model.generate_batch(inputs=[list(p) for p in prompts], generation_config=generation(each)).values()
    seconds = time.perf_counter() - began_s
    drawn = sum(len(output.generated_tokens) for output in found)
    assert drawn == each * len(prompts), f"{drawn} tokens were drawn, not {each * len(prompts)}"
    spans = [span for output in found if (span := getattr(output, "lifespan", None)) and span[1] > 0]
    return max(end for _, end in spans) - min(start for start, _ in spans) if spans else seconds


@torch.inference_mode()
def static(model: Any, prompts: Sequence[list[int]], each: int) -> float:
    """transformers' `generate`: one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    began_s = time.perf_counter()
    found = model.generate(input_ids=ids, attention_mask=mask, generation_config=generation(each)).cpu()
    seconds = time.perf_counter() - began_s
    assert found.shape[1] == longest + each, f"{found.shape[1] - longest} tokens were drawn for each"
    return seconds


def attempt(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A peer that fails says why."""
    try:
        return measured()
    except Exception as error:
        say(f"failed: {error}")
        return {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# Words and files.


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns flush right, but for the first."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "  ".join([first.strip().ljust(widths[0]), *rest]).rstrip(), flush=True)


def say(words: str) -> None:
    print(f"  {words}", flush=True)


def _synchronize(engine: Engine) -> None:
    if engine.runner.cache.device.type == "cuda":
        torch.cuda.synchronize(engine.runner.cache.device)


def facts() -> dict[str, Any]:
    """Card, versions and commit."""
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        **{package: installed(package) for package in ("torch", "triton", "transformers")},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Of the tree that ran, with a + where it was changed since; None where there is no repository."""
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS)
        status = ["git", "status", "--short", "-uno", "--", ":/", ":!/benchmarks/results"]
        changed = subprocess.run(status, capture_output=True, text=True, cwd=RESULTS)
    except OSError:
        return None
    return found.stdout.strip() + "+" * bool(changed.stdout.strip()) or None


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "throughput": throughput,
    "peers": peers,
    "prefix": prefix,
    "waste": waste,
}


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--shape", choices=PRESETS, default="0.6b", help="of Qwen3 (default: 0.6b)")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16", help="the KV cache (default: bf16)")
    parser.add_argument("--runs", type=int, default=2, help="of each kind (default: 2)")
    parser.add_argument("--seconds", type=float, default=60, help="about how long a peer may draw (default: 60)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model and a workload of a few seconds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for the figures")
    options = parser.parse_args(given)
    if not options.tiny:
        assert workload().tokens == STANDARD_TOKENS
    result = PARTS[options.part](options) | facts()
    kind = "" if options.part == "waste" else f"-{'tiny' if options.tiny else options.shape}-{options.kv}"
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"serve-{options.part}{kind}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    say(f"wrote {path}")


if __name__ == "__main__":
    main()
