"""Steps on the CPU: tokens come back in order, padding changes nothing, and a step that fails leaves the runner ready."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import torchvision_names  # noqa: F401
from serve.families import VOCAB, expected, random_prompts, saved
from tonnage.budget.serving.own_engine import capture_sizes
from tonnage.serve.cache.kv_cache import CacheShape, KvCache
from tonnage.serve.config import EngineConfig
from tonnage.serve.model_runner.runner import Runner, filtered, sample_special
from tonnage.serve.models.architecture import read_architecture
from tonnage.serve.models.load import load_decoder
from tonnage.serve.sampling import Sampling
from tonnage.serve.scheduler.sequence import ScheduledStep, ScheduledTokens, Sequence
from tonnage.serve.startup import largest_steps

CPU = torch.device("cpu")
BLOCK, SLOTS = 4, 6


@pytest.fixture
def runner() -> Runner:
    architecture = read_architecture(saved("llama"))
    decoder = load_decoder(saved("llama"), architecture, device="cpu", dtype=torch.float32)
    shape = CacheShape(layers=2, kv_heads=2, head_dim=8, dtype=torch.float32, block=BLOCK)
    return Runner(decoder, KvCache(shape, 64, CPU), EngineConfig(max_seqs=SLOTS, batched_tokens=64), context=40)


def sequences_of(prompts: list[list[int]], sampling: Sampling | None = None) -> list[Sequence]:
    """Each with blocks for all that it may become."""
    wish = sampling or Sampling(temperature=0)
    return [
        Sequence(slot, list(prompt), wish, len(prompt), slot=slot, blocks=[1 + slot * 10 + n for n in range(10)])
        for slot, prompt in enumerate(prompts)
    ]


def prefill(sequences: list[Sequence]) -> ScheduledStep:
    return ScheduledStep(0, (), tuple(ScheduledTokens(one, 0, len(one.tokens), True) for one in sequences))


def decode(sequences: list[Sequence]) -> ScheduledStep:
    return ScheduledStep(1, tuple(ScheduledTokens(one, len(one.tokens) - 1, 1, True) for one in sequences), ())


def run(runner: Runner, sequences: list[Sequence], steps: int) -> list[list[int]]:
    """Each step's tokens are known before the next; returned by sequence."""
    for number in range(steps):
        tokens, _ = runner.launch(decode(sequences) if number else prefill(sequences)).result()
        for one, token in zip(sequences, tokens, strict=True):
            one.tokens.append(token)
    return [one.output for one in sequences]


class Padding:
    """In the place of captured graphs: the same body, always with the largest number of rows."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.sizes, self.replayed = runner, [SLOTS], 0

    def size_for(self, rows: int) -> int:
        return SLOTS

    def replay(self, size: int) -> Tensor:
        self.replayed += 1
        return self.runner._decode(size)


@pytest.mark.parametrize("padded", [False, True])
def test_tokens_are_those_of_transformers(runner: Runner, padded: bool) -> None:
    if padded:
        runner._graphs = Padding(runner)  # type: ignore[assignment]
    prompts = random_prompts(4, 4, longest=20)
    assert run(runner, sequences_of(prompts), 9) == [expected("llama", tuple(prompt), 9) for prompt in prompts]
    assert not padded or runner._graphs.replayed == 8  # type: ignore[union-attr]
    assert not runner.inputs.slots.tables[SLOTS].any()


def test_a_step_is_launched_before_the_last_ones_tokens_are_known(runner: Runner) -> None:
    sequences = sequences_of(random_prompts(4, 3, longest=20))
    lengths = [len(one.tokens) for one in sequences]
    pending = runner.launch(prefill(sequences))
    for ahead in range(5):
        works = tuple(
            ScheduledTokens(one, length + ahead, 1, True) for one, length in zip(sequences, lengths, strict=True)
        )
        following = runner.launch(ScheduledStep(ahead, works, ()))
        for one, token in zip(pending.sampling_sequences, pending.result()[0], strict=True):
            one.tokens.append(token)
        pending = following
    for one in sequences:
        assert one.output == expected("llama", tuple(one.tokens[: one.prompt_length]), 5)


def test_chunks_that_draw_nothing_bring_nothing_back(runner: Runner) -> None:
    one, two = sequences_of([[1, 2, 3, 4, 5], [6, 7]])
    pending = runner.launch(ScheduledStep(0, (), (ScheduledTokens(one, 0, 3, False), ScheduledTokens(two, 0, 2, True))))
    assert pending.sampling_sequences == [two]
    assert pending.result()[0] == expected("llama", (6, 7), 1)
    alone = runner.launch(ScheduledStep(1, (), (ScheduledTokens(one, 3, 1, False),)))
    assert alone.result() == ([], None)


def test_a_step_that_fails_leaves_the_runner_ready(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = sequences_of(random_prompts(4, 2, longest=12))
    run(runner, sequences, 3)
    good = runner._decoder.forward

    def fail(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(runner._decoder, "forward", fail)
    with pytest.raises(torch.OutOfMemoryError):
        runner.launch(decode(sequences))
    monkeypatch.setattr(runner._decoder, "forward", good)
    for _ in range(3):
        for one, token in zip(sequences, runner.launch(decode(sequences)).result()[0], strict=True):
            one.tokens.append(token)
    for one in sequences:
        assert one.output == expected("llama", tuple(one.tokens[: one.prompt_length]), 6)


def test_blocks_are_moved_before_the_pass(runner: Runner) -> None:
    """A sequence goes on in copies of its blocks, written over meanwhile."""
    (one,) = sequences_of([[1, 2, 3, 4, 5, 6]])
    for token in runner.launch(prefill([one])).result()[0]:
        one.tokens.append(token)
    old = one.blocks
    one.blocks = [block + 30 for block in old]
    step = replace(decode([one]), copies=tuple(zip(old, one.blocks, strict=True)))
    token = runner.launch(step).result()[0][0]
    assert [*one.output, token] == expected("llama", (1, 2, 3, 4, 5, 6), 2)


def test_logprobs_come_for_those_who_asked(runner: Runner) -> None:
    sequences = sequences_of([[1, 2, 3], [4, 5, 6], [7, 8]])
    sequences[1].sampling = Sampling(temperature=0, logprobs=2)
    tokens, logprobs = runner.launch(prefill(sequences)).result()
    assert logprobs is not None and logprobs[0] is None and logprobs[2] is None
    found = logprobs[1]
    assert found is not None and found.token_id == tokens[1] == found.alternatives[0][0]
    assert found.logprob == found.alternatives[0][1] > found.alternatives[1][1]


def test_filtered_rows_draw_again_and_the_next_step_reads_their_token(runner: Runner) -> None:
    """Only the likeliest token is left over, whatever the temperature: the output is the greedy one."""
    prompts = random_prompts(8, 4, longest=10)
    sequences = sequences_of(prompts, Sampling(temperature=5, top_k=1, seed=3))
    assert run(runner, sequences, 6) == [expected("llama", tuple(prompt), 6) for prompt in prompts]


def test_rehearsal_is_as_large_as_steps_get_and_stays_in_the_null_block(runner: Runner) -> None:
    steps = list(largest_steps(SLOTS, 64, 40, BLOCK))
    assert len(steps[0].samplers) == SLOTS and steps[0].tokens == 60 and len(steps[1].decodes) == SLOTS
    assert steps[2].tokens == 39
    for step in largest_steps(SLOTS, 64, 40, BLOCK):
        tokens, logprobs = runner.launch(step).result()
        assert logprobs is not None and all(0 <= token < VOCAB for token in tokens)
    assert not runner.cache.pages[:, :, 1:].any()


WISHES = [
    Sampling(top_k=5, temperature=0.7),
    Sampling(top_p=0.6, temperature=1.3),
    Sampling(min_p=0.2),
    Sampling(top_k=20, top_p=0.5, min_p=0.1, temperature=0.9),
    Sampling(top_k=1),
    Sampling(top_k=1000),
    Sampling(top_p=1e-6),
    Sampling(temperature=0, top_k=3),
    Sampling(),
]


def logits_of(rows: int, vocabulary: int = 211) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows)) * 3


def reference(logits: torch.Tensor, wish: Sampling) -> torch.Tensor:
    """Which tokens transformers keeps."""
    if wish.temperature == 0:
        return torch.ones_like(logits, dtype=torch.bool)
    scores, ids = logits[None], torch.zeros(1, 1, dtype=torch.long)
    chain = [TemperatureLogitsWarper(wish.temperature)] if wish.temperature != 1 else []
    chain += [TopKLogitsWarper(wish.top_k)] if wish.top_k else []
    chain += [TopPLogitsWarper(wish.top_p)] if wish.top_p < 1 else []
    chain += [MinPLogitsWarper(wish.min_p)] if wish.min_p else []
    for warper in chain:
        scores = warper(ids, scores)
    return scores[0] > -torch.inf


def temperatures_of(wishes: list[Sampling]) -> torch.Tensor:
    return torch.tensor([wish.temperature for wish in wishes])


def test_filters_keep_what_transformers_keeps() -> None:
    logits = logits_of(len(WISHES))
    kept = filtered(logits, WISHES, temperatures_of(WISHES))
    for row, wish in enumerate(WISHES):
        assert torch.equal(kept[row] > -torch.inf, reference(logits[row], wish)), wish
        assert torch.equal(kept[row][kept[row] > -torch.inf], logits[row][kept[row] > -torch.inf])


def test_nothing_is_touched_where_nothing_is_filtered() -> None:
    logits, wishes = logits_of(2), [Sampling(), Sampling(temperature=0)]
    assert filtered(logits, wishes, temperatures_of(wishes)) is logits


@pytest.mark.parametrize("count", [1, 9, 70])
def test_draws_lie_within_the_filter_and_have_the_models_own_logprobs(count: int) -> None:
    """More rows than are sorted at once, too; taken from anywhere among the logits."""
    logits = logits_of(count + 5)
    rows = torch.randperm(count + 5, generator=torch.Generator().manual_seed(1))[:count]
    wishes = [Sampling(top_k=1 + row % 4, logprobs=row % 3 if row % 5 else None) for row in range(count)]
    seeds, positions = torch.arange(count), torch.arange(count) * 7
    tokens, scores = sample_special(logits, rows, wishes, torch.ones(count), seeds, positions)
    for row, wish in enumerate(wishes):
        assert int(tokens[row]) in logits[rows[row]].topk(wish.top_k).indices
    if count == 1:
        assert scores is None
        return
    assert scores is not None
    expected = logits.log_softmax(-1)
    for row, (wish, found) in enumerate(zip(wishes, scores.read(), strict=True)):
        assert (found is None) == (wish.logprobs is None)
        if found is not None:
            line = expected[rows[row]]
            assert found.token_id == int(tokens[row])
            assert found.logprob == pytest.approx(float(line[found.token_id]), abs=1e-5)
            best = line.topk(wish.logprobs or 0)
            assert [token for token, _ in found.alternatives] == best.indices.tolist()
            assert [number for _, number in found.alternatives] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_row_draws_the_same_in_any_company() -> None:
    logits, wish = logits_of(40), Sampling(top_p=0.9)
    seeds, positions = torch.arange(40) + 5, torch.arange(40)
    together, _ = sample_special(logits, torch.arange(40), [wish] * 40, torch.ones(40), seeds, positions)
    for row in (0, 13, 39):
        alone, _ = sample_special(
            logits, torch.tensor([row]), [wish], torch.ones(1), seeds[row : row + 1], positions[row : row + 1]
        )
        assert int(alone[0]) == int(together[row])


def test_fine_steps_first() -> None:
    sizes = capture_sizes(256)
    assert sizes[:6] == [1, 2, 4, 8, 16, 24] and sizes[-2:] == [240, 256]
    assert len(sizes) == 23


@pytest.mark.parametrize("largest", [1, 3, 5, 64, 65, 79, 100, 1000])
def test_the_largest_is_always_there_and_padding_is_bounded(largest: int) -> None:
    sizes = capture_sizes(largest)
    assert sizes[-1] == largest and sizes == sorted(set(sizes)) and sizes[0] == 1
    assert all(after - before <= 16 for before, after in pairwise(sizes))
