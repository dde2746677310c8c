"""What a plan says of loading, of samples of many lengths, of images and of frozen parts."""

from dataclasses import replace

import pytest

from tonnage.budget.demands import shortages
from tonnage.budget.loading import training_loading
from tonnage.budget.training.configuration import Configuration
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.models.freezing import freeze
from tonnage.models.pictures import with_pictures
from tonnage.planner.training.lengths import Batching, parse_lengths
from tonnage.planner.training.request import NO_OFFLOAD, TrainingRequest
from tonnage.planner.training.search import PlanSearch, batching_choices, search
from tonnage.report.plans.notes import (
    length_figures,
    length_lines,
    length_words,
    loading_figures,
    loading_words,
    part_words,
    shortage_figures,
    shortage_words,
)


def found(text: str = "mean 600 max 4096", batching: Batching = "pad", card: str = "h100") -> PlanSearch:
    lengths = replace(parse_lengths(text), batching=batching).limited(4096)
    request = TrainingRequest(seq=4096, lengths=lengths, cp=1, lora_rank=16, offload=NO_OFFLOAD)
    return search(find_model("llama-3.1-8b"), find_cluster(card), request)


def test_the_section_fits_on_a_page_and_says_what_to_do() -> None:
    findings = found()
    lines = [line for line, _ in length_lines(findings, batching_choices(findings))]
    assert all(len(line) <= 80 for line in lines)
    assert "--batching pack would train" in lines[-1]
    assert sum(line.split()[0] in ("pad", "bucket", "padding-free", "pack") for line in lines) == 4


def test_where_the_best_way_is_taken_no_other_is_advised() -> None:
    findings = found(batching="pack")
    *_, (last, _) = length_lines(findings, batching_choices(findings))
    assert "no other way" in last


def test_where_nothing_fits_there_is_no_advice() -> None:
    findings = found(card="rtx-3060")
    lines = [line for line, _ in length_lines(findings, batching_choices(findings))]
    assert not findings.fits and "does not fit" in lines[-1]


def test_what_is_cut_is_said() -> None:
    assert "0.1 % are longer and cut" in next(length_words(found("999x600,32k")))


def test_samples_of_one_length_say_nothing() -> None:
    plain = search(find_model("llama-3.2-1b"), find_cluster("h100"), TrainingRequest(seq=1024, lora_rank=8))
    assert not list(length_words(plain)) and not list(length_lines(plain, [])) and length_figures(plain, []) == {}


def test_figures_are_those_of_the_plan() -> None:
    findings = found()
    figures = length_figures(findings, batching_choices(findings))["lengths"]
    best = findings.best
    assert best is not None
    padded = next(row for row in figures["batchings"] if row["batching"] == "pad")
    assert padded["samples_per_s"] == pytest.approx(best.sequences_per_s)
    assert figures["worst_tokens"] == best.configuration.micro_batch * 4096


def test_a_host_that_is_too_small_is_told_with_what_to_do() -> None:
    cluster = find_cluster("8xh100").with_host(memory_bytes=128 * 2**30)
    loading = training_loading(find_model("llama-3.1-8b"), Configuration(data=8), cluster)
    assert loading_words(loading, cluster).startswith("loading: 239.3 GiB of a host's 128, ")
    lacking = shortages(loading.demands(cluster))
    (reason,) = shortage_words(lacking, loading)
    assert reason.startswith("loading needs 239.3 GiB of a host's memory, which has 128.0 GiB: load onto the card")
    figures = loading_figures(loading, cluster, lacking)
    assert not figures["fits"] and sum(figures["host_bytes_by_rank"]) == figures["host_bytes"]
    (short,) = shortage_figures(lacking)
    assert short["part"] == "loading on the host" and short["needed_bytes"] == figures["host_bytes"]


def test_pages_of_files_are_not_the_host_s_own() -> None:
    cluster = find_cluster("h100")
    loading = training_loading(find_model("llama-3.1-8b"), Configuration(lora_rank=16), cluster)
    assert "file cache for 15.0 GiB" in loading_words(loading, cluster)


def test_images_and_frozen_parts_are_said() -> None:
    shape, _ = with_pictures(find_model("llava-1.5-7b"), 2, "")
    images, frozen = part_words(freeze(shape, "vision"), Configuration(seq=2048))
    assert images == "images of a sample: 2 × 577 tokens in their tower, 1,152 of the 2,048 of a sequence"
    assert frozen.startswith("6.76 B parameters are trained; 303.5 M parameters are frozen, in 16 bits")


def test_adapters_leave_frozen_parts_out() -> None:
    shape = freeze(find_model("llava-1.5-7b"), "vision")
    assert list(part_words(shape, Configuration(lora_rank=16))) == [
        "303.5 M parameters are frozen with no adapters beside them"
    ]


def test_a_model_of_text_alone_says_nothing() -> None:
    assert not list(part_words(find_model("llama-3.1-8b"), Configuration()))
