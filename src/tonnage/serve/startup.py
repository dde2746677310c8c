"""Start the engine: find the device's memory, what everything but the KV cache needs, and the number of blocks.

The pool is planned by arithmetic alone (`budget.serving.own_engine`), as `tonnage plan serve --engine tonnage` prints it.
On a GPU the plan is checked by measurement: the largest step runs and the graphs are captured over a cache of one block.
If the measurement is within the planned reserve and close to it, the pool is exactly the plan's; else it is sized by the
measurement. Then the final runner is built and measured.
"""

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tonnage.budget.serving.memory import ServingConfiguration
from tonnage.budget.serving.own_engine import (
    GRAPHS,
    ModelWidths,
    OwnCard,
    context_term,
    own_card,
    share_bytes,
)
from tonnage.budget.terms import Term
from tonnage.errors import RequestError, TonnageError, UnknownGpu
from tonnage.hardware import Gpu, find_gpu
from tonnage.hardware.host_memory import free_host_bytes
from tonnage.ledger import Category
from tonnage.serve.cache.kv_cache import CacheShape, KvCache
from tonnage.serve.config import EngineConfig
from tonnage.serve.model_runner.runner import Runner
from tonnage.serve.models.architecture import Architecture
from tonnage.serve.models.decoder import Decoder
from tonnage.serve.models.weights import Builder
from tonnage.serve.sampling import MOST_LOGPROBS, Sampling
from tonnage.serve.scheduler.sequence import Decode, ScheduledStep, ScheduledTokens, Sequence
from tonnage.units import format_bytes, parse_bytes

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# A plan that reserves this share of the card more than measured is too conservative to use.
_SPARE_SHARE = 0.01
MEASURED = "measured on this card"
# The largest share of a card that hints suggest.
_LARGEST_SHARE = 0.97


class CannotStart(TonnageError):
    """The device has no room for the model and a sequence."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device before anything is loaded. `others_bytes` is held by other processes."""

    device: torch.device
    name: str
    gpu: Gpu | None
    capacity_bytes: int
    limit_bytes: int
    others_bytes: int = 0


def look(device: torch.device, budget: float | str) -> DeviceMemory:
    """Return the device's memory, and the engine's share of it. On the CPU that is of the free memory."""
    if device.type != "cuda":
        free = free_host_bytes()
        return DeviceMemory(device, "CPU", None, free, _limit(budget, free))
    name = torch.cuda.get_device_name(device)
    try:
        gpu = find_gpu(name)
    except UnknownGpu:
        gpu = None
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    # Memory outside the allocator is our own context and other processes; the catalogue knows the context.
    others = max(outside - int(context_term(gpu).size_bytes), 0) if gpu else 0
    asked = _limit(budget, total)
    # Beside other processes, too, leave something free: the last bytes of a card cannot be allocated.
    spare = min(total - asked, total - share_bytes(total, _LARGEST_SHARE))
    limit = min(asked, max(total - others - spare, 0))
    return DeviceMemory(device, name, gpu, total, limit, others)


def _limit(budget: float | str, capacity_bytes: int) -> int:
    if isinstance(budget, str):
        size_bytes = parse_bytes(budget)
        if size_bytes > capacity_bytes:
            have = format_bytes(capacity_bytes)
            problem = f"--budget {budget} is more than the {have} that there are."
            raise RequestError(problem, hint=f'Use at most "{have}".')
        return size_bytes
    if not 0 < budget <= 1:
        raise RequestError(f"--budget {budget} is no share of a device.", hint='Write it like 0.9 or "60 GiB".')
    return share_bytes(capacity_bytes, budget)


def widths_of(shape: Architecture) -> ModelWidths:
    """Return the dimensions that determine memory besides the weights."""
    return ModelWidths(
        layers=len(shape.layers), hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, intermediate=shape.expert_intermediate or shape.intermediate, vocab=shape.vocab,
        experts=shape.experts, experts_per_token=shape.experts_per_token,
        ropes=len({layer.rope for layer in shape.layers}),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Startup:
    """A model, its engine options, and the device."""

    architecture: Architecture
    dtype: torch.dtype
    config: EngineConfig
    memory: DeviceMemory

    @property
    def _compute_format(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    @property
    def needed_blocks(self) -> int:
        """The fewest useful blocks: one sequence of the requested context, and the null block."""
        context = self.config.context
        return (-(-context // self.config.block) if context else 1) + 1

    def plan(self) -> OwnCard:
        """Plan the pool by arithmetic; on the CPU it is at most what all sequences at full length need."""
        config, memory, shape = self.config, self.memory, self.architecture
        # Counted on meta tensors.
        weights = Decoder(shape, Builder(torch.device("meta"), self.dtype, config.weights), 1)
        limits = ServingConfiguration(
            engine="tonnage", context=config.context or shape.positions, weights=config.weights or self._compute_format,
            kv=config.kv or self._compute_format, block=config.block, max_seqs=config.max_seqs,
            batched_tokens=config.batched_tokens, eager=config.eager,
        )  # fmt: skip
        card = own_card(
            widths_of(shape), limits, memory.gpu, name=memory.name, capacity_bytes=memory.capacity_bytes,
            limit_bytes=memory.limit_bytes, weight_bytes=weights.weight_bytes,
        )  # fmt: skip
        assert card.pool.block_bytes == self._cache_shape.bytes_per_block
        if config.blocks is not None:
            return _with_blocks(card, config.blocks)
        most = config.max_seqs * limits.columns + 1
        return _with_blocks(card, min(card.pool.blocks, most)) if memory.device.type != "cuda" else card

    def check(self, card: OwnCard) -> None:
        """Raise CannotStart if the pool does not hold one sequence of the requested context, or two tokens."""
        needed = self.needed_blocks
        if card.pool.blocks >= needed:
            return
        needed_bytes = card.weight_bytes + card.reserve_bytes + needed * card.pool.block_bytes
        terms = [("weights", card.weight_bytes), (f"{needed} KV blocks", needed * card.pool.block_bytes)]
        terms += [(term.name, int(term.size_bytes)) for term in card.reserve]
        largest = sorted(terms, key=lambda term: -term[1])[:4]
        words = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
        ways = list(self._remedies(card, needed_bytes))
        raise CannotStart(
            f"The engine needs {format_bytes(needed_bytes)} of the {card.name}, and may take"
            f" {format_bytes(card.limit_bytes)} of its {format_bytes(card.capacity_bytes)}: {words}.",
            hint=f"Use {', or '.join(ways)}." if ways else "Use a device with more memory, or a smaller model.",
        )

    def _remedies(self, card: OwnCard, needed_bytes: int) -> Iterator[str]:
        """Yield flags that would each suffice alone, with their values."""
        config, memory = self.config, self.memory

        def fits(**changes: object) -> bool:
            changed = replace(self, config=replace(config, **changes))  # type: ignore[arg-type]
            return changed.plan().pool.blocks >= changed.needed_blocks

        longest = (card.pool.blocks - 1) * config.block
        if config.context is not None and longest > 0:
            yield f"--context {longest}"
        if config.kv != "fp8" and fits(kv="fp8"):
            yield "--kv fp8"
        share = math.ceil(100 * needed_bytes / card.capacity_bytes) / 100
        free_bytes = memory.capacity_bytes - memory.others_bytes
        if card.limit_bytes < needed_bytes <= free_bytes and share <= _LARGEST_SHARE:
            yield f"--budget {share}"
        for flag, name in (("--max-seqs", "max_seqs"), ("--batched-tokens", "batched_tokens")):
            halves = (getattr(config, name) >> times for times in range(1, getattr(config, name).bit_length()))
            number = next((number for number in halves if fits(**{name: number})), None)
            if number is not None:
                yield f"{flag} {number}"
        if config.weights is None and fits(weights="int8"):
            yield "--weights int8"

    def start(self, decoder: Decoder) -> tuple[Runner, OwnCard]:
        """Build the runner for a checked plan; its context is at most what the pool holds."""
        card, device = self.plan(), self.memory.device
        if device.type != "cuda":
            return self._make(decoder, card, None)
        stream = torch.cuda.Stream(device)
        try:
            if self.config.blocks is None:
                card = self._held_to_measurement(decoder, card, stream)
                self.check(card)
            return self._make(decoder, card, stream)
        except torch.OutOfMemoryError:
            # Another process took memory meanwhile, or a pool of fixed size is too large.
            clear()
            free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
            free += card.reserved_for(Category.CONTEXT)
            raise CannotStart(
                f"The {card.name} ran out of memory: {format_bytes(card.total_bytes)} were to be taken, of which"
                f" {format_bytes(card.pool.size_bytes)} for the KV cache; {format_bytes(free)} are to be had.",
                hint=f"Use --budget {math.floor(100 * free / card.capacity_bytes) / 100}.",
            ) from None

    def _make(self, decoder: Decoder, card: OwnCard, stream: torch.cuda.Stream | None) -> tuple[Runner, OwnCard]:
        """Build the final runner. On a GPU, reduce the pool by what the first measurement did not see."""
        context = min(card.limits.context, (card.pool.blocks - 1) * card.pool.block)
        card = replace(card, limits=replace(card.limits, context=context))
        runner = self._runner(decoder, card, card.pool.blocks, stream)
        if stream is None:
            return runner, card
        _, held = self._warm_up(runner, decoder, context)
        if held <= card.limit_bytes or self.config.blocks is not None:
            return runner, replace(card, measured_bytes=held)
        del runner
        clear()
        excess = -(-(held - card.limit_bytes) // card.pool.block_bytes)
        return self._make(decoder, _with_blocks(card, card.pool.blocks - excess), stream)

    def _held_to_measurement(self, decoder: Decoder, card: OwnCard, stream: torch.cuda.Stream) -> OwnCard:
        """Return the card with the plan's pool if a measurement confirms it, else with what the measurement leaves."""
        clear()
        runner = self._runner(decoder, card, 1, stream)
        graph_bytes, held = self._warm_up(runner, decoder, card.limits.context)
        reserve_bytes = held - card.weight_bytes - card.pool.block_bytes
        del runner
        clear()
        if 0 <= card.reserve_bytes - reserve_bytes <= _SPARE_SHARE * card.capacity_bytes:
            return card
        context = [term for term in card.reserve if term.category is Category.CONTEXT]
        rest_bytes = reserve_bytes - graph_bytes - sum(int(term.size_bytes) for term in context)
        reserve = (
            Term(Category.ACTIVATIONS, "step and libraries", rest_bytes, source=MEASURED),
            Term(Category.WORKSPACE, GRAPHS, graph_bytes, source=MEASURED),
            *context,
        )
        blocks = (card.limit_bytes - card.weight_bytes - reserve_bytes) // card.pool.block_bytes
        return _with_blocks(replace(card, reserve=reserve), max(blocks, 0))

    @property
    def _cache_shape(self) -> CacheShape:
        shape, config = self.architecture, self.config
        dtype = DTYPES.get(config.kv or "", self.dtype)
        return CacheShape(
            len(shape.layers), shape.kv_heads, shape.head_dim, dtype, block=config.block, fp8=config.kv == "fp8"
        )

    def _runner(self, decoder: Decoder, card: OwnCard, blocks: int, stream: torch.cuda.Stream | None) -> Runner:
        """Return a runner over this many blocks; one block is a trial without swapping."""
        host_blocks = self.config.swap_bytes // card.pool.block_bytes if blocks > 1 else 0
        cache = KvCache(self._cache_shape, blocks, self.memory.device, host_blocks=host_blocks)
        return Runner(decoder, cache, self.config, context=card.limits.context, stream=stream)

    def _warm_up(self, runner: Runner, decoder: Decoder, context: int) -> tuple[int, int]:
        """Run the largest steps over null blocks, and capture graphs; return bytes of the graphs, and of all that is held."""
        config, device, graph_bytes = self.config, self.memory.device, 0

        def run() -> None:
            for step in largest_steps(config.rows, config.batched_tokens, context, config.block):
                runner.launch(step).result()
            runner.inputs.forget()

        run()
        if decoder.capturable and not config.eager:
            clear()
            before_bytes = _used_bytes(device)
            runner.capture(config.rows)
            graph_bytes = _used_bytes(device) - before_bytes
            # Capturing releases the memory that passes need.
            run()
        return graph_bytes, _used_bytes(device) - self.memory.others_bytes


def _with_blocks(card: OwnCard, blocks: int) -> OwnCard:
    return replace(card, pool=replace(card.pool, blocks=blocks))


def largest_steps(rows: int, batched_tokens: int, context: int, block: int) -> Iterator[ScheduledStep]:
    """Yield many prompts with the most expensive sampling, their decode step, and one prompt as long as a step."""
    each, longest = min(batched_tokens // rows, context - 1), min(batched_tokens, context - 1)

    def sequence(slot: int, length: int) -> Sequence:
        sampling = Sampling(top_p=0.5, logprobs=MOST_LOGPROBS, max_tokens=2)
        return Sequence(-1, [0] * length, sampling, length, slot=slot, blocks=[0] * (length // block + 1))

    many = [sequence(slot, each) for slot in range(rows)]
    yield ScheduledStep(0, (), [ScheduledTokens(one, 0, each, True) for one in many])
    for one in many:
        one.tokens.append(0)
        one.computed = each + 1
    yield ScheduledStep(1, tuple(map(Decode, many)))
    yield ScheduledStep(2, (), [ScheduledTokens(sequence(0, longest), 0, longest, True)])


def _used_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def clear() -> None:
    """Return unused memory to the device."""
    gc.collect()
    torch.cuda.empty_cache()
