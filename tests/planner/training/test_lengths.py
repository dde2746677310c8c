"""Samples of many lengths: padding and worst micro-batches by hand, by brute force, and on the virtual GPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tonnage.budget.time.step import step_time
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.memory import training_budget
from tonnage.errors import BadLayout
from tonnage.hardware import find_cluster, find_gpu
from tonnage.models import find_model
from tonnage.models.config import from_config
from tonnage.planner.training.lengths import BATCHINGS, Batching, LengthClock, Lengths, parse_lengths
from tonnage.planner.training.remedies import remedies
from tonnage.planner.training.request import NO_OFFLOAD, TrainingRequest
from tonnage.planner.training.search import batching_choices, search

MEASURED = json.loads((Path(__file__).parents[3] / "benchmarks/results/lengths.json").read_text())


def lengths(text: str, batching: Batching = "pad", seq: int = 0) -> Lengths:
    found = parse_lengths(text)
    return replace(found, batching=batching).limited(seq or found.longest)


def test_a_pair_is_padded_to_its_longer() -> None:
    # Of two samples, each of 100 or 300 tokens, three pairs in four have a long one.
    pair = lengths("100,300")
    assert pair.work(2).tokens == pytest.approx(2 * (0.25 * 100 + 0.75 * 300))
    assert pair.padding(2) == pytest.approx(1 - 200 / 250)
    assert pair.padding(1) == 0
    assert pair.at_worst(2) == pytest.approx(0.75)


def test_attention_sees_the_length_of_the_sample_that_a_token_is_in() -> None:
    # Three tokens in four are in the long sample.
    assert lengths("100,300").attended == pytest.approx(0.25 * 100 + 0.75 * 300)


@pytest.mark.parametrize("batching", ["pad", "bucket"])
def test_padding_by_brute_force(batching: Batching) -> None:
    chosen = lengths("mean 600 max 4096", batching)
    samples = np.random.default_rng(3).permutation(chosen.spread(80_000))
    if batching == "bucket":
        samples = np.sort(samples.reshape(-1, 50 * 8), axis=1)
    batches = samples.reshape(-1, 8)
    padded = 8 * batches.max(axis=1).sum()
    assert chosen.padding(8) == pytest.approx(1 - samples.sum() / padded, abs=0.01)


def test_the_largest_micro_batch_of_an_epoch_by_brute_force() -> None:
    chosen = replace(lengths("mean 600 max 4096", "padding-free"), samples=8000)
    drawn = [np.random.default_rng(seed).choice(chosen.spread(4000), (1000, 8)).sum(axis=1).max() for seed in range(40)]
    assert 8 * chosen.worst(8) == pytest.approx(np.mean(drawn), rel=0.05)
    assert chosen.worst(8) < chosen.longest


def test_ranks_wait_for_the_one_with_most() -> None:
    # Of two ranks with 100 or 300 tokens each, three pairs in four wait for a long one: 250 in the mean, over 200.
    shape, configuration = find_model("llama-3.2-1b"), Configuration(seq=300, micro_batch=1, data=2)
    pair = LengthClock(shape, find_cluster("2xh100"), lengths("100,300")).step(configuration)
    passes = sum(float(pair.parts[name]) for name in ("forward", "backward", "recompute"))
    assert float(pair.parts["uneven ranks"]) == pytest.approx(0.25 * passes, rel=0.1)
    packed = LengthClock(shape, find_cluster("2xh100"), lengths("100,300", "pack")).step(configuration)
    assert packed.parts["uneven ranks"] == 0


def test_packs_hold_what_fits() -> None:
    # A sample of 600 and one of 400 fill a sequence; of 600 alone each leaves 400 free.
    assert lengths("600,400", "pack", 1000).padding(1) == pytest.approx(0, abs=1e-3)
    assert lengths("600", "pack", 1000).padding(1) == pytest.approx(0.4)


def test_what_is_longer_is_cut() -> None:
    cut = lengths("100,5000", seq=1000)
    assert (cut.longest, cut.mean, cut.cut) == (1000, 550, 0.5)


def test_words_mean_what_they_say() -> None:
    for words in ("mean 600 max 4096", "mean 600 max 100k", "median 400 max 8k"):
        found = parse_lengths(words)
        assert found.longest == {"4096": 4096, "100k": 102_400, "8k": 8192}[words.split()[-1]]
    for words in ("mean 600 max 4096", "mean 600 max 32k", "mean 2000 max 2048"):
        assert parse_lengths(words).mean == pytest.approx(int(words.split()[1]), rel=0.01)
    assert np.median(parse_lengths("median 400 max 8k").spread(4001)) == pytest.approx(400, rel=0.01)


def test_lists_and_files(tmp_path: Path) -> None:
    listed = parse_lengths("999x600,32k")
    assert (listed.samples, listed.longest, listed.mean) == (1000, 32768, pytest.approx(632.168))
    for name, text in (("lines.txt", "100\n300\n"), ("list.json", "[100, 300]")):
        (tmp_path / name).write_text(text)
        assert parse_lengths(str(tmp_path / name)).values.tolist() == [100, 300]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0x5",
        "-3",
        "nowhere.txt",
        "mean 600",
        "mean 5000 max 600",
        "mean 0 max 5",
        "1,99999999999",
        "mean max 5 6",
        "1,,2",
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(Exception, match=r"--lengths|not a number") as problem:
        parse_lengths(text)
    assert problem.type.__module__ == "tonnage.errors"


@pytest.mark.parametrize("content", ["", "one\n", "[1, 2.5]", "[true]", "{}", "[[", "\xff\xfe"])
def test_files_of_other_things_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(BadLayout):
        parse_lengths(str(path))


def test_samples_of_one_length_take_what_they_took() -> None:
    shape, cluster = find_model("llama-3.2-1b"), find_cluster("h100")
    configuration = Configuration(seq=2048, micro_batch=4, accumulate=2)
    plain = step_time(shape, configuration, cluster)
    for batching in BATCHINGS:
        time = LengthClock(shape, cluster, lengths("2048", batching)).step(configuration)
        assert time.total_s == pytest.approx(plain.total_s)
        assert time.tokens == plain.tokens


def request(batching: Batching) -> TrainingRequest:
    chosen = lengths("mean 600 max 4096", batching)
    return TrainingRequest(seq=chosen.seq, lengths=chosen, cp=1, lora_rank=16)


def test_every_way_is_compared() -> None:
    findings = search(find_model("llama-3.2-1b"), find_cluster("h100"), request("pad"))
    speeds = {choice.batching: choice.plan.sequences_per_s for choice in batching_choices(findings) if choice.plan}
    assert set(speeds) == set(BATCHINGS)
    assert speeds["pack"] > speeds["pad"] and speeds["padding-free"] > speeds["pad"]
    best = findings.best
    assert best is not None and best.sample_tokens == pytest.approx(600, rel=0.01)
    # The sequence that counts for memory is the longest.
    assert best.configuration.seq == 4096


def test_what_does_not_fit_may_fit_cut() -> None:
    chosen = lengths("999x600,128k")
    asked = TrainingRequest(seq=chosen.seq, lengths=chosen, cp=1, lora_rank=16, offload=NO_OFFLOAD)
    findings = search(find_model("llama-3.2-1b"), find_cluster("rtx-4070"), asked)
    assert not findings.fits
    assert any(remedy.flag.startswith("--seq ") for remedy in remedies(findings))


@pytest.mark.parametrize("case", MEASURED["cases"], ids=lambda case: f"{case['batching']}, {case['checkpoint']}")
def test_the_worst_micro_batch_on_the_virtual_gpu(case: dict[str, Any]) -> None:
    batching, size = case["batching"], MEASURED["micro_batch"] if case["batching"] != "pack" else 2
    chosen = lengths(",".join(map(str, case["lengths"])), batching, 4096)
    # Which samples meet where none is padded is chance: this is the epoch that was run.
    seq = -(-case["largest"] // size) if batching == "padding-free" else int(chosen.worst(size))
    configuration = Configuration(
        precision="bf16", optimizer_kernel="fused", checkpoint=case["checkpoint"], seq=seq, micro_batch=size
    )
    budget = training_budget(from_config(MEASURED["config"]), configuration, find_gpu("h200"))
    assert float(budget.peak_allocated_bytes) == pytest.approx(case["varying"]["peak_allocated_bytes"], rel=0.03)
