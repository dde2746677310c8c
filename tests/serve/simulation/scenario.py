"""What one seed decides: the sizes, the limits, the requests, and how often each fault strikes.

Everything is small, so that a few dozen steps meet full pools, evictions, preemptions and chunk boundaries.
"""

from dataclasses import dataclass
from random import Random

from serve.simulation.story import END, STOP, VOCABULARY
from tonnage.serve.sampling import Sampling

TENANTS = ("", "acme", "zoo")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that arrives at a tick; `n` draws of it are sequences of their own."""

    tick: int
    prompt: list[int]
    sampling: Sampling
    salt: str
    eos_ids: frozenset[int]

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end it early."""
        return frozenset(self.sampling.stop_token_ids) | (frozenset() if self.sampling.ignore_eos else self.eos_ids)


@dataclass(frozen=True, slots=True)
class Faults:
    """The chance of each at every tick, until the faults stop."""

    abort: float = 0.0  # a client is gone, whatever state its sequence is in
    stop: float = 0.0  # a stop string is found in the text of a sequence
    allocation: float = 0.0  # some later take() raises, full or not
    crash: float = 0.0  # a launch raises
    crash_moving: float = 0.0  # a launch raises that was to copy or swap blocks
    hidden_crash: float = 0.0  # a step fails, and it is known when its result is read, one step later
    late: float = 0.0  # no result is read at this tick: the loop runs further ahead
    shuffled: float = 0.0  # the result of a later step is read before that of an earlier one
    twice: float = 0.0  # a step that was completed or failed before is completed or failed again
    clock: float = 0.0  # the clock jumps, back or ahead


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run, before it begins."""

    seed: int
    size: int
    usable: int  # blocks besides the null block
    host_blocks: int
    prefix_cache: bool
    max_seqs: int
    batched_tokens: int
    max_waiting: int
    context: int
    ahead: int  # steps in flight when the next is scheduled
    ticks: int  # with faults; quiet follows
    faults: Faults
    requests: list[Request]


def scenario_of(seed: int) -> Scenario:
    """The scenario of a seed: the same on every machine."""
    random = Random(seed)
    size = random.choice((1, 1, 1, 2, 2, 4, 16))
    usable = 1 if random.random() < 0.05 else random.randint(3, 20)
    max_seqs = random.randint(1, 8)
    ticks = random.randint(8, 24)
    return Scenario(
        seed=seed,
        size=size,
        usable=usable,
        host_blocks=random.choice((0, usable, random.randint(1, 12))),
        prefix_cache=random.random() < 0.75,
        max_seqs=max_seqs,
        batched_tokens=random.choice((random.randint(1, max_seqs), max_seqs + 1, random.randint(max_seqs, 12), 64)),
        max_waiting=random.choice((2, 5, 64, 64)),
        context=random.choice((usable * size, usable * size + 1, 64, random.randint(2, 40))),
        ahead=random.choice((0, 1, 1, 1)),
        ticks=ticks,
        faults=_faults(random),
        requests=_requests(random, ticks, usable * size),
    )


def _faults(random: Random) -> Faults:
    def chance(most: float) -> float:
        return random.random() * most if random.random() < 0.25 else 0.0

    return Faults(
        abort=chance(0.5),
        stop=chance(0.3),
        allocation=chance(0.5),
        crash=chance(0.2),
        crash_moving=chance(1.0),
        hidden_crash=chance(0.2),
        late=chance(0.5),
        shuffled=chance(0.5),
        twice=chance(0.5),
        clock=chance(0.5),
    )


def _requests(random: Random, ticks: int, room: int) -> list[Request]:
    """Prompts that share beginnings, of each other and across tenants."""
    longest = max(1, min(room // 4, 16))
    common = [random.randrange(VOCABULARY) for _ in range(longest)]
    tenants = TENANTS[: random.randint(1, 3)]
    most_draws = random.choice((1, 1, 2, 4))
    most_tokens = random.choice((3, 24, 24, 24))
    requests = []
    for _ in range(random.randint(2, 8)):
        shared = random.choice((0, random.randrange(longest), longest - 1))
        own = random.randint(1, max(1, min(longest - shared, 4)))
        prompt = common[:shared] + [random.randrange(VOCABULARY) for _ in range(own)]
        # What never fits is asked for as well, now and then.
        most = max(1, min(most_tokens, room - len(prompt))) if random.random() < 0.95 else 24
        sampling = Sampling(
            max_tokens=random.choice((most, random.randint(1, most))),
            n=random.randint(1, most_draws),
            stop_token_ids=random.choice(((), (), (), (STOP,))),
            ignore_eos=random.random() < 0.7,
        )
        tick = random.choice((0, random.randrange(ticks)))
        requests.append(Request(tick, prompt, sampling, random.choice(tenants), frozenset((END,))))
    return sorted(requests, key=lambda request: request.tick)
