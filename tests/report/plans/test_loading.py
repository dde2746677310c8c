"""Loading in words and figures."""

from tonnage.budget.loading import training_loading
from tonnage.budget.training.configuration import Configuration
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.report.plans.loading import loading_figures, loading_words


def test_a_host_that_is_too_small_is_told_with_what_to_do() -> None:
    cluster = find_cluster("8xh100").with_host(memory_bytes=128 * 2**30)
    loading = training_loading(find_model("llama-3.1-8b"), Configuration(data=8), cluster)
    line, warning = loading_words(loading, cluster)
    assert line.startswith("loading: 239.3 GiB of a host's 128, ")
    assert warning.startswith("loading does not fit the host: ")
    figures = loading_figures(loading, cluster)
    assert not figures["fits"] and sum(figures["host_bytes_by_rank"]) == figures["host_bytes"]


def test_pages_of_files_are_not_the_host_s_own() -> None:
    cluster = find_cluster("h100")
    words = list(
        loading_words(training_loading(find_model("llama-3.1-8b"), Configuration(lora_rank=16), cluster), cluster)
    )
    assert len(words) == 1 and "file cache for 15.0 GiB" in words[0]
