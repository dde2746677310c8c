"""The engine as people call it: answers in order, errors in words, and no request that harms another."""

from collections.abc import Callable
from dataclasses import replace
from weakref import ref

import pytest
import torch
from torch import Tensor

from serve.families import VOCAB, Watched, expected, random_prompts, saved
from serve.models.tiny import expected_logits, make_model
from serve.tiny import make_llama
from tonnage.errors import RequestError
from tonnage.serve import Engine, Sampling
from tonnage.serve.config import EngineConfig
from tonnage.serve.engine import StepOutput
from tonnage.serve.models.architecture import read_architecture
from tonnage.serve.models.load import load_decoder
from tonnage.serve.scheduler.sequence import Sequence
from tonnage.serve.startup import CannotStart

GREEDY = Sampling(temperature=0, max_tokens=8)
PROMPTS = random_prompts(11, 6, longest=20)


def make(**options: object) -> Watched:
    return Watched(saved("llama"), **{"block": 4, "blocks": 64, "max_seqs": 4, "device": "cpu", **options})


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine with a tokenizer."""
    return Engine(make_llama(tmp_path_factory.mktemp("llama")), block=4, blocks=128, device="cpu")


def drain(engine: Engine) -> list[StepOutput]:
    outputs = []
    while engine.has_work:
        outputs.append(engine.advance())
    return outputs


def is_clean(engine: Engine) -> bool:
    """Whether every block is free or cached."""
    return engine.scheduler.pool.available == engine.scheduler.pool.count - 1


def reference(prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [expected("llama", tuple(prompt), 8) for prompt in prompts]


def test_an_engine_of_a_decoder_that_exists() -> None:
    decoder = load_decoder(saved("llama"), read_architecture(saved("llama")), device="cpu", dtype=torch.float32)
    engine = Engine.of(decoder, settings=EngineConfig(blocks=40, block=4))
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == reference()
    assert engine.context == 128 and engine.card.pool.blocks == 40


def test_each_request_has_its_own_wishes() -> None:
    wishes = [Sampling(temperature=0, max_tokens=1 + number) for number in range(len(PROMPTS))]
    outputs = make().generate(PROMPTS, wishes)
    assert [output.token_ids for output in outputs] == [tokens[: n + 1] for n, tokens in enumerate(reference())]


def test_the_bound_of_the_queue_is_not_for_generate() -> None:
    outputs = make(max_waiting=2).generate(PROMPTS * 3, GREEDY)
    assert [output.token_ids for output in outputs] == reference() * 3


def test_random_draws_depend_on_the_seed_alone() -> None:
    """Not on the company, the order, nor on preemptions."""
    wishes = [Sampling(seed=number, max_tokens=8, temperature=2.0) for number in range(len(PROMPTS))]
    together = [output.token_ids for output in make().generate(PROMPTS, wishes)]
    crowded = make(blocks=9, max_seqs=6, batched_tokens=7)
    assert [output.token_ids for output in crowded.generate(PROMPTS, wishes)] == together
    assert crowded.scheduler.counters.preemptions
    backwards = make().generate(PROMPTS[::-1], wishes[::-1])
    assert [output.token_ids for output in backwards][::-1] == together
    others = [Sampling(seed=100 + number, max_tokens=8, temperature=2.0) for number in range(len(PROMPTS))]
    assert [output.token_ids for output in make().generate(PROMPTS, others)] != together


def test_without_a_seed_the_engines_decides() -> None:
    wish = Sampling(max_tokens=8, temperature=2.0)
    first, again, other = (
        [output.token_ids for output in make(seed=seed, max_waiting=waiting).generate(PROMPTS, wish)]
        for seed, waiting in ((3, 1024), (3, 1), (4, 1024))
    )
    assert first == again != other


def test_draws_of_one_prompt_differ() -> None:
    outputs = make().generate([PROMPTS[0]], Sampling(n=4, seed=1, max_tokens=8, temperature=2.0))
    assert len({tuple(output.token_ids) for output in outputs}) == 4
    single = make().generate([PROMPTS[0]], Sampling(seed=1, max_tokens=8, temperature=2.0))
    assert single[0].token_ids == outputs[0].token_ids


def test_steps_tell_what_generate_returns() -> None:
    engine = make()
    sequences = [engine.submit(prompt, GREEDY)[0] for prompt in PROMPTS]
    told: dict[Sequence, list[int]] = {sequence: [] for sequence in sequences}
    ended: list[Sequence] = []
    for output in drain(engine):
        for sequence, token in zip(output.sequences, output.tokens, strict=True):
            assert sequence not in ended
            told[sequence].append(token)
        assert not set(ended) & set(output.finished)
        ended += output.finished
    assert [told[sequence] for sequence in sequences] == reference()
    assert set(ended) == set(sequences) and is_clean(engine)


def test_end_of_sequence_and_stop_tokens() -> None:
    tokens = reference()[0]
    (output,) = make().generate([PROMPTS[0]], Sampling(temperature=0, max_tokens=8, stop_token_ids=(tokens[3],)))
    assert output.token_ids == tokens[: tokens.index(tokens[3]) + 1] and output.finish_reason == "stop"
    engine = make()
    (sequence,) = engine.submit(PROMPTS[0], GREEDY)
    assert sequence.eos_ids == engine.architecture.eos_ids


def test_a_temperature_next_to_nothing_is_greedy() -> None:
    for temperature in (1e-7, 1e-38, 1e-40, 1e-300):
        (output,) = make().generate([PROMPTS[0]], Sampling(temperature=temperature, max_tokens=8, seed=1))
        assert output.token_ids == reference()[0]


def test_the_context_ends_an_answer() -> None:
    engine = make(context=24)
    (output,) = engine.generate([[1] * 20], Sampling(temperature=0, max_tokens=100, ignore_eos=True))
    assert len(output.token_ids) == 4 and output.finish_reason == "length"


def test_logprobs_are_the_models() -> None:
    model = make_model("llama")
    (output,) = make().generate([PROMPTS[1]], Sampling(temperature=0, max_tokens=5, logprobs=3))
    assert output.logprobs is not None and len(output.logprobs) == 5
    lines = expected_logits(model, [*PROMPTS[1], *output.token_ids]).log_softmax(-1)[len(PROMPTS[1]) - 1 :]
    for line, found, token in zip(lines, output.logprobs, output.token_ids, strict=False):
        assert found.token_id == token
        assert found.logprob == pytest.approx(float(line[token]), abs=1e-4)
        assert [one for one, _ in found.alternatives] == line.topk(3).indices.tolist()


@pytest.mark.parametrize(("prompt", "words"), [
    ([], "empty"),
    ([1] * 128, "128 tokens"),
    ([1] * 4000, "4,000 tokens"),
    ([1, VOCAB], f"token id {VOCAB}"),
    ([-1], "token id -1"),
    ([1.0, 2.0], "no token id"),
    ([None], "no token id"),
    ("some text", "no tokenizer"),
])  # fmt: skip
def test_prompts_that_cannot_be_served(prompt: list[int] | str, words: str) -> None:
    engine = make()
    with pytest.raises(RequestError, match=words):
        engine.generate([PROMPTS[0], prompt], GREEDY)
    assert not engine.has_work and engine.stats.steps == 0


def test_as_many_samplings_as_prompts() -> None:
    with pytest.raises(RequestError, match="6 prompts and 2 samplings"):
        make().generate(PROMPTS, [GREEDY, GREEDY])


def test_a_list_of_ids_is_no_list_of_prompts() -> None:
    with pytest.raises(RequestError, match="the number 3") as caught:
        make().generate([3, 4, 5], GREEDY)  # type: ignore[list-item]
    assert "list of prompts" in caught.value.hint


def test_a_text_is_no_list_of_stop_strings() -> None:
    with pytest.raises(RequestError, match="'END'"):
        Sampling(stop="END")  # type: ignore[arg-type]


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        make().generate([PROMPTS[0]], Sampling(stop=("x",)))


def fail_on(engine: Watched, when: Callable[[int], bool], error: BaseException) -> None:
    """Passes of these numbers raise."""
    good, passes = engine.runner._decoder.forward, 0

    def forward(*arguments: object) -> Tensor:
        nonlocal passes
        passes += 1
        if when(passes):
            raise error
        return good(*arguments)  # type: ignore[arg-type]

    engine.runner._decoder.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("failing", [1, 2, 5, 9])
def test_out_of_memory_ends_only_the_steps_own_sequences(failing: int) -> None:
    engine = make(max_seqs=2)
    fail_on(engine, lambda number: number == failing, torch.OutOfMemoryError("CUDA out of memory"))
    outputs = engine.generate(PROMPTS, GREEDY)
    failed = engine.steps[failing - 1]
    own = {tuple(work.sequence.tokens[: work.sequence.prompt_length]) for work in (*failed.decodes, *failed.chunks)}
    for prompt, output, tokens in zip(PROMPTS, outputs, reference(), strict=True):
        if tuple(prompt) in own:
            assert output.finish_reason == "error" and output.token_ids == tokens[: len(output.token_ids)]
        else:
            assert output.token_ids == tokens
    assert own and engine.stats.failed_steps == 1 and is_clean(engine)


def test_what_a_step_held_that_ran_out_of_memory_is_free_when_memory_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, held, given_back = make(), [], []

    def forward(*_: object) -> Tensor:
        large = torch.zeros(3)
        held.append(ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine.runner._decoder, "forward", forward)
    monkeypatch.setattr(engine.runner.cache, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(held[-1]() is None))
    engine.generate(PROMPTS[:1], GREEDY)
    assert given_back == [True]


@pytest.mark.parametrize(
    "words", ["CUBLAS_STATUS_ALLOC_FAILED when calling", "DefaultCPUAllocator: can't allocate memory"]
)
def test_libraries_that_have_no_name_for_it(words: str) -> None:
    engine = make()
    fail_on(engine, lambda number: number == 1, RuntimeError(words))
    assert {output.finish_reason for output in engine.generate(PROMPTS[:2], GREEDY)} == {"error"}


def test_any_other_error_is_raised_and_the_engine_goes_on() -> None:
    engine = make()
    fail_on(engine, lambda number: number == 3, ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        engine.generate(PROMPTS, GREEDY)
    drain(engine)
    assert is_clean(engine) and not engine.has_work
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == reference()


@pytest.mark.parametrize("blocks", [11, 13])
def test_who_was_held_back_in_a_step_that_raised_goes_on_with_its_own_token(blocks: int) -> None:
    wish, prompts = Sampling(temperature=0, max_tokens=30, ignore_eos=True), [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]]
    whole = [output.token_ids for output in make().generate(prompts, wish)]
    engine = make(blocks=blocks)
    # The first step in which the newer of the two finds no room; it drew in the step before, which is still in flight.
    alone = make(blocks=blocks)
    alone.generate(prompts, wish)
    failing = next(number for number, step in enumerate(alone.steps, 1) if len(step.decodes) == 1 and not step.chunks)
    fail_on(engine, lambda number: number == failing, ValueError("a bug"))
    older, newer = (engine.submit(prompt, wish)[0] for prompt in prompts)
    with pytest.raises(ValueError, match="a bug"):
        drain(engine)
    drain(engine)
    assert older.finish_reason == "error" and newer.output == whole[1]


@pytest.mark.parametrize("after", range(1, 8))
def test_abort_frees_blocks_at_once_and_harms_nobody(after: int) -> None:
    engine = make()
    sequences = [engine.submit(prompt, GREEDY)[0] for prompt in PROMPTS[:3]]
    for _ in range(after):
        engine.advance()
    held = len(sequences[1].blocks)
    before = engine.scheduler.pool.available
    assert engine.abort(sequences[1])
    assert engine.scheduler.pool.available == before + held
    assert not engine.abort(sequences[1])
    assert all(sequences[1] not in output.sequences + output.finished for output in drain(engine))
    assert [sequences[0].output, sequences[2].output] == [reference()[0], reference()[2]]
    assert sequences[1].finish_reason == "abort" and is_clean(engine)


def test_text_there_and_back(speaking: Engine) -> None:
    tokenizer = speaking.tokenizer
    assert tokenizer is not None
    text, ids = speaking.generate(["the quick brown", tokenizer.encode("the quick brown")], GREEDY)
    assert text.token_ids == ids.token_ids and text.text == ids.text != ""
    assert text.prompt_token_ids == tokenizer.encode("the quick brown")
    assert speaking.generate("the quick brown", GREEDY) == [text]


def test_stop_strings_end_an_answer_before_them(speaking: Engine) -> None:
    wish = Sampling(temperature=0, max_tokens=40, ignore_eos=True)
    (whole,) = speaking.generate(["how much"], wish)
    stop = whole.text[len(whole.text) // 2 :][:3]
    (output,) = speaking.generate(["how much"], Sampling(temperature=0, max_tokens=40, ignore_eos=True, stop=(stop,)))
    assert output.finish_reason == "stop" and output.text == whole.text[: whole.text.index(stop)]
    assert output.token_ids == whole.token_ids[: len(output.token_ids)] and len(output.token_ids) < 40
    assert is_clean(speaking)


def test_a_stop_string_in_the_last_token_is_the_reason(speaking: Engine) -> None:
    wish = Sampling(temperature=0, max_tokens=40, ignore_eos=True)
    (whole,) = speaking.generate(["how much"], wish)
    stop = replace(wish, stop=(whole.text[len(whole.text) // 2 :][:3],))
    (found,) = speaking.generate(["how much"], stop)
    (last,) = speaking.generate(["how much"], replace(stop, max_tokens=len(found.token_ids)))
    assert (last.text, last.finish_reason) == (found.text, "stop")


@pytest.mark.parametrize("stop", [(), ("never said",)])
def test_a_stop_token_is_not_part_of_the_text(speaking: Engine, stop: tuple[str, ...]) -> None:
    tokenizer, wish = speaking.tokenizer, Sampling(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
    assert tokenizer is not None
    (whole,) = speaking.generate(["how much"], wish)
    at, token = next(
        (at, token) for at, token in enumerate(whole.token_ids)
        if at and token not in whole.token_ids[:at] and "\ufffd" not in tokenizer.decode(whole.token_ids[at - 1 : at + 1])
    )  # fmt: skip
    (output,) = speaking.generate(["how much"], replace(wish, stop_token_ids=(token,)))
    assert output.token_ids == whole.token_ids[: at + 1] and output.finish_reason == "stop"
    assert output.text == tokenizer.decode(whole.token_ids[:at])


@pytest.mark.parametrize("failing", [1, 4])
def test_an_interrupted_pass_leaves_nothing_behind(failing: int) -> None:
    engine = make()
    fail_on(engine, lambda number: number == failing, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, GREEDY)
    drain(engine)
    assert is_clean(engine)
    assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == reference()


def test_an_interrupted_batch_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, advance = make(), Engine.advance

    def interrupted(self: Engine) -> object:
        if self.stats.steps == 3:
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(Engine, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    drain(engine)
    assert is_clean(engine)


def test_progress_is_shown_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    make().generate(PROMPTS, GREEDY, progress=True)
    assert "6/6" in capsys.readouterr().err
    make().generate(PROMPTS * 2, GREEDY)
    assert capsys.readouterr().err == ""


def test_stats_count() -> None:
    engine = make()
    outputs = engine.generate(PROMPTS, GREEDY)
    stats = engine.stats
    sampled = sum(len(output.token_ids) for output in outputs)
    assert stats.tokens == sampled and stats.steps == len(engine.steps)
    assert stats.computed_tokens >= sampled + sum(map(len, PROMPTS)) - len(PROMPTS)
    assert stats.host_s > 0 and stats.step_s > 0
    assert 0 <= stats.waste < 1


def test_an_fp8_cache_holds_more_and_says_nearly_the_same() -> None:
    plain, small = make(), make(kv="fp8")
    assert small.card.pool.block_bytes < plain.card.pool.block_bytes / 2
    same = [
        one.token_ids[0] == two.token_ids[0]
        for one, two in zip(plain.generate(PROMPTS, GREEDY), small.generate(PROMPTS, GREEDY), strict=True)
    ]
    assert sum(same) >= len(PROMPTS) - 1


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_weights_in_eight_bits(weights: str) -> None:
    small = make(weights=weights)
    assert small.card.weight_bytes < make().card.weight_bytes
    assert all(
        len(output.token_ids) == 8 for output in small.generate(PROMPTS, Sampling(max_tokens=8, ignore_eos=True))
    )


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(RequestError, match="128 positions"):
        make(context=129)


def test_no_room_is_an_error_with_numbers() -> None:
    with pytest.raises(CannotStart, match="of the CPU") as caught:
        Engine(saved("llama"), budget="1 MiB", device="cpu")
    assert "--" in caught.value.hint
