"""One sequence: its tokens, its blocks, how far it is computed; and a step, which is some of that to be done at once.

The scheduler alone changes these. Names of time: a token is *known* once the host has read it, *in flight* while the step
that draws it runs; positions before `computed` have their keys and values written, or a launched step will write them.

All that decode advance by one token a step. So they share a counter, and each knows by how much it differs from that: a step
in which hundreds go on as before touches none of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from tonnage.serve.cache.block_pool import PrefixId, TokenHistory
from tonnage.serve.sampling import FinishReason, Sampling

Clock = Callable[[], float]


class Status(StrEnum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"  # its blocks lie on the host
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class DecodeClock:
    """Counts the steps of all that decode; it moves them on by one token each."""

    steps: int = 0


NOT_DECODING = DecodeClock()  # stands still


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and what follows. `tokens` begins with the prompt and grows as steps complete.

    `slot` is the row of the runner's persistent buffers that a running sequence owns, −1 where it has none.
    `parent`: for the second and later draws of one prompt (`n` > 1), the draw that computes the prompt for all.
    """

    id: int
    tokens: list[int]
    sampling: Sampling
    prompt_length: int
    eos_ids: frozenset[int] = frozenset()
    salt: str = ""  # of the tenant: prefixes are shared within one salt only
    draw: int = 0  # which of the n draws; with the seed it decides the random numbers
    parent: "Sequence | None" = None
    arrival_s: float = 0.0

    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    cached: int = 0  # tokens of the prompt that were found in the prefix cache
    preemptions: int = 0
    admitted_s: float = 0.0  # the first time
    first_token_s: float = 0.0

    # The scheduler's notes.
    rank: int = -1  # order of first admission; the highest is preempted first
    end: int = 0  # the length at which it is finished
    stops: frozenset[int] = frozenset()  # tokens that finish it
    clock: DecodeClock = NOT_DECODING  # moves on with every step of those that decode
    clock_offset: int = 0  # `computed` less the steps of the clock
    next_block_at: int = 0  # the `computed` at which its blocks are full, or it samples its last token
    published: int = 0  # leading blocks that are in the prefix cache
    prefix_id: PrefixId = ""  # of the last of them
    busy: int = 0  # launched chunks and swaps that are not complete
    host_blocks: list[int] = field(default_factory=list)
    history: TokenHistory = field(init=False)  # its tokens, for those who keep some of them

    def __post_init__(self) -> None:
        self.history = TokenHistory(self.tokens)

    @property
    def computed(self) -> int:
        """Positions that are written, or will be by a launched step; kept by a preempted one until it comes back."""
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
        """Tokens, those in flight included: who computes its last token draws the next."""
        return max(len(self.tokens), self.computed + 1)

    @property
    def in_flight(self) -> int:
        """Tokens that launched steps will draw."""
        return max(0, self.computed + 1 - len(self.tokens))

    @property
    def drawn(self) -> int:
        """Tokens drawn so far, those in flight included."""
        return self.length - self.prompt_length

    @property
    def output(self) -> list[int]:
        """The tokens after the prompt that are known."""
        return self.tokens[self.prompt_length :]


@dataclass(slots=True, eq=False)
class Work:
    """Compute `count` tokens of a sequence from position `start`; `samples`: the last of them draws the next token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


class Decode:
    """Compute the token that a sequence drew last, and draw the next.

    It may be the same object in many steps, and its `start` moves on: read a step when it is launched.
    """

    __slots__ = ("sequence",)
    count, samples = 1, True

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence

    @property
    def start(self) -> int:
        """The position of that token."""
        return self.sequence.computed - 1


@dataclass(slots=True, eq=False)
class Step:
    """What the runner does in one forward pass, in this order: swaps out, swaps in, copies, then the pass itself.

    `decodes` compute just the token drawn last (its id may still be in flight: the runner takes it from the slot's last
    token); the same tuple as before while the same sequences go on, so that the runner need not look at each to know.
    `chunks` are pieces of prompts, or of sequences computed again; all their ids are known.
    `grown` are sequences with a new block since the step before, and its place in their tables; of chunks all are new.
    Pairs are (source block, target block); host blocks are numbered on their own.
    """

    number: int
    decodes: tuple[Decode, ...]
    chunks: tuple[Work, ...]
    copies: tuple[tuple[int, int], ...] = ()
    swaps_out: tuple[tuple[int, int], ...] = ()
    swaps_in: tuple[tuple[int, int], ...] = ()
    grown: tuple[tuple[Sequence, int], ...] = ()

    @property
    def works(self) -> list[Decode | Work]:
        """Decodes, then chunks."""
        return [*self.decodes, *self.chunks]

    @property
    def samplers(self) -> list[Sequence]:
        """The sequences that draw a token, in the order in which their tokens come back."""
        return [work.sequence for work in self.works if work.samples]

    @property
    def tokens(self) -> int:
        """Computed in this step."""
        return len(self.decodes) + sum(work.count for work in self.chunks)
