"""A start of the engine: what the device has, what everything but the KV cache takes of it, and so how many blocks.

    look      what the device has, what others hold of it, and what the engine may take
    plan      the pool by arithmetic alone (`budget.own_engine`): what `tonnage plan serve --engine tonnage` says
    refuse    where that holds no sequence: the numbers, and the flags that would change it
    start     on a GPU the plan is held against a measurement: the largest step is run and the graphs are captured over a
              cache of one block. Where the measurement is within the planned reserve and close to it, the pool is the
              plan's, to the block; else it is sized by the measurement. Then everything is made for good, and measured.

This module does not know what is served to whom.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tonnage.budget.own_engine import GRAPHS, Limits, OwnCard, Widths, context_term, own_card, share_bytes
from tonnage.budget.terms import Term
from tonnage.errors import RequestError, TonnageError, UnknownGpu
from tonnage.hardware import Gpu, find_gpu
from tonnage.ledger import Category
from tonnage.serve.cache import CacheShape, KvCache
from tonnage.serve.models.architecture import Architecture
from tonnage.serve.models.decoder import Decoder
from tonnage.serve.models.linear import Weights
from tonnage.serve.models.weights import Builder
from tonnage.serve.rehearsal import clear, rehearse, used_bytes
from tonnage.serve.runner import Runner
from tonnage.units import format_bytes, parse_bytes

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# A plan that keeps this share of the card more than a measurement needs is too careful to be followed.
_SPARE_SHARE = 0.01
MEASURED = "measured on this card"
# The most of a card that any advice gives away.
_LARGEST_SHARE = 0.97


class CannotStart(TonnageError):
    """The device has no room for the model and a sequence."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an engine is started. `budget` is a share of the device or a size; `context` None is as far as the model goes.

    `blocks` fixes the size of the pool, whatever the budget; `swap` is a size of host memory.
    """

    budget: float | str = 0.9
    context: int | None = None
    kv: str | None = None
    weights: Weights | None = None
    max_seqs: int = 256
    batched_tokens: int = 8192
    block: int = 16
    blocks: int | None = None
    prefix_cache: bool = True
    swap: int | str = 0
    eager: bool = False

    def __post_init__(self) -> None:
        for name in ("context", "max_seqs", "batched_tokens", "block"):
            number = getattr(self, name)
            least = 2 if name == "context" else 1
            if number is not None and number < least:
                raise RequestError(f"{name} is {number}.", hint=f"Give {name} at least {least}.")
        if self.blocks is not None and self.blocks < 2:
            raise RequestError(f"blocks is {self.blocks}.", hint="Give at least 2: one of them is never used.")
        if self.kv not in (None, "fp8", *DTYPES):
            raise RequestError(f"A KV cache in {self.kv!r} is not known.", hint=f"Use fp8, {', '.join(DTYPES)}.")

    @property
    def rows(self) -> int:
        """Sequences that one step decodes, at most."""
        return min(self.max_seqs, self.batched_tokens)

    @property
    def swap_bytes(self) -> int:
        """Of the host."""
        return parse_bytes(self.swap) if isinstance(self.swap, str) else self.swap


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A device before anything is put on it. `others_bytes`: what other processes hold of it."""

    device: torch.device
    name: str
    gpu: Gpu | None
    capacity_bytes: int
    limit_bytes: int
    others_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model decides memory."""

    architecture: Architecture
    dtype: torch.dtype

    def weight_bytes(self, weights: Weights | None) -> int:
        """Counted on weights that take no memory."""
        return Decoder(self.architecture, Builder(torch.device("meta"), self.dtype, weights), 1).weight_bytes

    @property
    def widths(self) -> Widths:
        """As the budget wants them."""
        shape = self.architecture
        return Widths(
            layers=len(shape.layers),
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate=shape.expert_intermediate or shape.intermediate,
            vocab=shape.vocab,
            experts=shape.experts,
            experts_per_token=shape.experts_per_token,
            ropes=len({layer.rope for layer in shape.layers}),
        )

    @property
    def format(self) -> str:
        """The name of its precision."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    def limits(self, settings: Settings) -> Limits:
        """What the budget is counted for."""
        return Limits(
            context=settings.context or self.architecture.positions,
            weights=settings.weights or self.format,
            kv=settings.kv or self.format,
            block=settings.block,
            max_seqs=settings.max_seqs,
            batched_tokens=settings.batched_tokens,
            eager=settings.eager,
        )

    def cache_shape(self, settings: Settings) -> CacheShape:
        """Of the KV cache."""
        shape, kept = self.architecture, settings.kv or self.format
        return CacheShape(
            layers=len(shape.layers), kv_heads=shape.kv_heads, head_dim=shape.head_dim, block=settings.block,
            dtype=DTYPES.get(kept, self.dtype), fp8=kept == "fp8",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Started:
    """Everything made: `context` is the longest sequence, at most what the pool holds."""

    runner: Runner
    card: OwnCard
    context: int


def look(device: torch.device, budget: float | str) -> Place:
    """What the device has, and the engine's share of it. On the CPU that is of the memory that is free."""
    if device.type != "cuda":
        from tonnage.fit.moving.host import free_host_bytes

        free = free_host_bytes()
        return Place(device=device, name="CPU", gpu=None, capacity_bytes=free, limit_bytes=_limit(budget, free))
    name = torch.cuda.get_device_name(device)
    gpu = _known(name)
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    # What is not the allocator's is our own context and what others hold; which is which, the catalogue knows.
    others = max(outside - int(context_term(gpu).size_bytes), 0) if gpu else 0
    asked = _limit(budget, total)
    # Beside others, too, the budget leaves something free: the last bytes of a card cannot be had.
    spare = min(total - asked, total - share_bytes(total, _LARGEST_SHARE))
    limit = min(asked, max(total - others - spare, 0))
    return Place(
        device=device, name=name, gpu=gpu, capacity_bytes=total, limit_bytes=limit, others_bytes=others
    )  # fmt: skip


def _known(name: str) -> Gpu | None:
    try:
        return find_gpu(name)
    except UnknownGpu:
        return None


def _limit(budget: float | str, capacity_bytes: int) -> int:
    if isinstance(budget, str):
        size_bytes = parse_bytes(budget)
        if size_bytes > capacity_bytes:
            have = format_bytes(capacity_bytes)
            raise RequestError(
                f"--budget {budget} is more than the {have} that there are.", hint=f'Use at most "{have}".'
            )
        return size_bytes
    if not 0 < budget <= 1:
        raise RequestError(f"--budget {budget} is no share of a device.", hint='Write it like 0.9 or "60 GiB".')
    return share_bytes(capacity_bytes, budget)


def plan(model: Model, settings: Settings, place: Place) -> OwnCard:
    """The pool by arithmetic; on the CPU it is no larger than all sequences at their longest need."""
    card = own_card(
        model.widths,
        model.limits(settings),
        place.gpu,
        name=place.name,
        capacity_bytes=place.capacity_bytes,
        limit_bytes=place.limit_bytes,
        weight_bytes=model.weight_bytes(settings.weights),
    )
    assert card.pool.block_bytes == model.cache_shape(settings).bytes_per_block
    if settings.blocks is not None:
        return _with_blocks(card, settings.blocks)
    most = settings.max_seqs * -(-card.limits.context // settings.block) + 1
    return _with_blocks(card, min(card.pool.blocks, most)) if place.device.type != "cuda" else card


def _with_blocks(card: OwnCard, blocks: int) -> OwnCard:
    return replace(card, pool=replace(card.pool, blocks=blocks))


def check(card: OwnCard, model: Model, settings: Settings, place: Place) -> None:
    """Refuse a pool that does not hold one sequence of the context that was asked for, or two tokens."""
    needed = needed_blocks(settings)
    if card.pool.blocks >= needed:
        return
    needed_bytes = card.weight_bytes + card.reserve_bytes + needed * card.pool.block_bytes
    terms = [("weights", card.weight_bytes), (f"{needed} KV blocks", needed * card.pool.block_bytes)]
    terms += [(term.name, int(term.size_bytes)) for term in card.reserve]
    largest = sorted(terms, key=lambda term: -term[1])[:4]
    words = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    ways = list(remedies(card, model, settings, place, needed_bytes))
    raise CannotStart(
        f"The engine needs {format_bytes(needed_bytes)} of the {card.name}, and may take {format_bytes(card.limit_bytes)}"
        f" of its {format_bytes(card.capacity_bytes)}: {words}.",
        hint=f"Use {', or '.join(ways)}." if ways else "Use a device with more memory, or a smaller model.",
    )


def needed_blocks(settings: Settings) -> int:
    """The fewest that make sense: a sequence of the context that was asked for, and the null block."""
    return (-(-settings.context // settings.block) if settings.context else 1) + 1


def remedies(card: OwnCard, model: Model, settings: Settings, place: Place, needed_bytes: int) -> Iterator[str]:
    """Flags that would each suffice alone, with their numbers."""

    def fits(**changes: object) -> bool:
        changed = replace(settings, **changes)  # type: ignore[arg-type]
        return plan(model, changed, place).pool.blocks >= needed_blocks(changed)

    longest = (card.pool.blocks - 1) * settings.block
    if settings.context is not None and longest > 0:
        yield f"--context {longest}"
    if settings.kv != "fp8" and fits(kv="fp8"):
        yield "--kv fp8"
    share = math.ceil(100 * needed_bytes / card.capacity_bytes) / 100
    if needed_bytes > card.limit_bytes and share <= _LARGEST_SHARE and needed_bytes <= _free_bytes(place):
        yield f"--budget {share}"
    for flag, name in (("--max-seqs", "max_seqs"), ("--batched-tokens", "batched_tokens")):
        number = next((number for number in _halves(getattr(settings, name)) if fits(**{name: number})), None)
        if number is not None:
            yield f"{flag} {number}"
    if settings.weights is None and fits(weights="int8"):
        yield "--weights int8"


def _free_bytes(place: Place) -> int:
    return place.capacity_bytes - place.others_bytes


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number


def start(decoder: Decoder, model: Model, settings: Settings, place: Place) -> Started:
    """Make everything. The plan was checked; weights are loaded."""
    card = plan(model, settings, place)
    if place.device.type != "cuda":
        return _Start(decoder, model, settings, place).make(card)
    made = _Start(decoder, model, settings, place, torch.cuda.Stream(place.device))
    try:
        if settings.blocks is None:
            card = made.hold_to_measurement(card)
            check(card, model, settings, place)
        return made.make(card)
    except torch.OutOfMemoryError:
        raise _overtaken(card, place) from None


def _overtaken(card: OwnCard, place: Place) -> CannotStart:
    """Somebody else took memory meanwhile, or a pool of fixed size is too large."""
    clear()
    free = torch.cuda.mem_get_info(place.device)[0] + torch.cuda.memory_reserved(place.device)
    context = card.reserved_for(Category.CONTEXT)
    return CannotStart(
        f"The {card.name} ran out of memory: {format_bytes(card.total_bytes)} were to be taken, of which"
        f" {format_bytes(card.pool.size_bytes)} for the KV cache; {format_bytes(free + context)} are to be had.",
        hint=f"Use --budget {math.floor(100 * (free + context) / card.capacity_bytes) / 100}.",
    )


@dataclass(frozen=True, slots=True)
class _Start:
    decoder: Decoder
    model: Model
    settings: Settings
    place: Place
    stream: torch.cuda.Stream | None = None

    def make(self, card: OwnCard) -> Started:
        """The pool of this card, for good. On a GPU what the first measurement did not see comes off it."""
        context = min(card.limits.context, (card.pool.blocks - 1) * card.pool.block)
        card = replace(card, limits=replace(card.limits, context=context))
        runner = self._runner(card.pool.blocks, context, self.settings.swap_bytes // card.pool.block_bytes)
        if self.stream is None:
            return Started(runner, card, context)
        self._rehearse(runner, context)
        held = self._held_bytes()
        if held <= card.limit_bytes or self.settings.blocks is not None:
            return Started(runner, replace(card, measured_bytes=held), context)
        del runner
        clear()
        excess = -(-(held - card.limit_bytes) // card.pool.block_bytes)
        return self.make(_with_blocks(card, card.pool.blocks - excess))

    def hold_to_measurement(self, card: OwnCard) -> OwnCard:
        """The card with the plan's pool where a measurement bears it out, else with what the measurement leaves."""
        clear()
        runner = self._runner(1, card.limits.context)
        graph_bytes = self._rehearse(runner, card.limits.context)
        reserve_bytes = self._held_bytes() - card.weight_bytes - card.pool.block_bytes
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

    def _runner(self, blocks: int, context: int, host_blocks: int = 0) -> Runner:
        settings = self.settings
        cache = KvCache(self.model.cache_shape(settings), blocks, self.place.device, host_blocks=host_blocks)
        return Runner(
            self.decoder, cache, max_seqs=settings.max_seqs, context=context, batched_tokens=settings.batched_tokens,
            stream=self.stream,
        )  # fmt: skip

    def _rehearse(self, runner: Runner, context: int) -> int:
        settings, graphs = self.settings, self.decoder.capturable and not self.settings.eager
        return rehearse(runner, settings.rows, settings.batched_tokens, context, graphs=graphs)

    def _held_bytes(self) -> int:
        """By this process, as the device counts it."""
        return used_bytes(self.place.device) - self.place.others_bytes
