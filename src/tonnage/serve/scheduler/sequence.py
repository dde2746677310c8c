"""One sequence: its tokens, blocks and progress; and a step, the work of one forward pass.

Only the scheduler changes these. A token is *known* once the host has read it, *in flight* while the step that
samples it runs; positions before `computed` have their keys and values written, or a launched step will write them.

All decoding sequences advance by one token per step. So they share a counter, and each stores its offset: a step in
which hundreds continue touches none of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from tonnage.serve.cache.block_pool import PrefixId, TokenHistory
from tonnage.serve.sampling import FinishReason, Sampling

Clock = Callable[[], float]


class Status(StrEnum):
    """The state of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"  # its blocks are on the host
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class DecodeClock:
    """Counts decode steps; advancing it advances all decoding sequences by one token."""

    steps: int = 0


NOT_DECODING = DecodeClock()  # never advances


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and its continuation; `tokens` grows as steps complete. `slot` is its row in the runner's buffers, or −1.

    `parent` is set for the second and later samples of one prompt (`n` > 1): the one that computes the prompt for all.
    """

    id: int
    tokens: list[int]
    sampling: Sampling
    prompt_length: int
    eos_ids: frozenset[int] = frozenset()
    salt: str = ""  # of the tenant: prefixes are shared only within one salt
    sample_index: int = 0  # which of the n samples; with the seed it determines the random numbers
    parent: "Sequence | None" = None
    arrival_s: float = 0.0

    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    cached: int = 0  # prompt tokens found in the prefix cache
    preemptions: int = 0
    admitted_s: float = 0.0  # the first time

    # Set by the scheduler.
    rank: int = -1  # order of first admission; the highest is preempted first
    end: int = 0  # the length at which it is finished
    stops: frozenset[int] = frozenset()  # tokens that finish it
    clock: DecodeClock = NOT_DECODING  # advances with every decode step
    clock_offset: int = 0  # `computed` minus the steps of the clock
    next_block_at: int = 0  # the `computed` at which its blocks are full, or it samples its last token
    published: int = 0  # leading blocks that are in the prefix cache
    prefix_id: PrefixId = ""  # of the last of them
    busy: int = 0  # launched chunks and swaps not yet complete
    host_blocks: list[int] = field(default_factory=list)
    history: TokenHistory = field(init=False)  # its tokens, as the prefix cache references them

    def __post_init__(self) -> None:
        self.history = TokenHistory(self.tokens)

    @property
    def computed(self) -> int:
        """Positions written, or to be written by a launched step; a preempted sequence keeps it until it returns."""
        return self.clock.steps + self.clock_offset

    @computed.setter
    def computed(self, positions: int) -> None:
        self.clock_offset = positions - self.clock.steps

    def join(self, clock: DecodeClock) -> None:
        """Advance with this clock from now on."""
        self.clock_offset += self.clock.steps - clock.steps
        self.clock = clock

    @property
    def length(self) -> int:
        """Number of tokens, including those in flight."""
        return max(len(self.tokens), self.computed + 1)

    @property
    def in_flight(self) -> int:
        """Tokens that launched steps will sample."""
        return max(0, self.computed + 1 - len(self.tokens))

    @property
    def sampled(self) -> int:
        """Tokens sampled so far, including those in flight."""
        return self.length - self.prompt_length

    @property
    def output(self) -> list[int]:
        """The known tokens after the prompt."""
        return self.tokens[self.prompt_length :]


@dataclass(slots=True, eq=False)
class ScheduledTokens:
    """Compute `count` tokens of a sequence from position `start`; with `samples`, the last one samples the next token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


class Decode:
    """Compute the last sampled token of a sequence, and sample the next. In many steps at once: `start` advances."""

    __slots__ = ("sequence",)
    count, samples = 1, True

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence

    @property
    def start(self) -> int:
        """The position of that token."""
        return self.sequence.computed - 1


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """The work of one forward pass, in this order: swaps out, swaps in, copies, then the pass itself.

    `decodes` compute only the last sampled token (its id may be in flight: the runner takes it from the slot). The
    tuple is the same object while the same sequences continue, so the runner need not compare each. `chunks` are
    parts of prompts, or of recomputed sequences; all their ids are known. `grown` are sequences with a new block
    since the previous step, and its table index; for chunks all blocks are new. Pairs are (source block, target
    block); host blocks have their own numbering.
    """

    number: int
    decodes: tuple[Decode, ...] = ()
    chunks: list[ScheduledTokens] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)
    grown: list[tuple[Sequence, int]] = field(default_factory=list)

    # The scheduler's own, while it builds the step and until its tokens arrive.
    budget: int = 0  # tokens that it may still compute
    preempted: bool = False  # some sequence made room
    swapped: list[Sequence] = field(default_factory=list)  # preempted sequences that `swaps_out` belong to
    ending: list[Sequence] = field(default_factory=list)  # decodes that sample their last token
    sampled: list[int] | None = None  # its tokens, if they arrived before those of an earlier step
    plain: bool = True  # none of its sequences has ended since

    @property
    def works(self) -> list[Decode | ScheduledTokens]:
        """Decodes, then chunks."""
        return [*self.decodes, *self.chunks]

    @property
    def samplers(self) -> list[Sequence]:
        """The sequences that sample a token, in the order of the returned tokens."""
        return [work.sequence for work in self.works if work.samples]

    @property
    def tokens(self) -> int:
        """Number of tokens computed in this step."""
        return len(self.decodes) + sum(work.count for work in self.chunks)
