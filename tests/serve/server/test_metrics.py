import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.server.fake_engine import FakeEngine
from serve.server.live import MODEL, Live, serving, until

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True}
NAMES = """
    vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc
    vllm:prompt_tokens_total vllm:generation_tokens_total vllm:num_preemptions_total
    vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total vllm:request_success_total
    vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_count
    vllm:time_per_output_token_seconds_sum vllm:e2e_request_latency_seconds_bucket
    vllm:request_queue_time_seconds_count tonnage_kv_bytes
""".split()


def scraped(live: Live) -> dict[tuple[str, str], float]:
    answer = live.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            found[sample.name, sample.labels.get("finished_reason") or sample.labels.get("state", "")] = sample.value
    return found


def test_the_names_are_those_that_dashboards_know() -> None:
    with serving(FakeEngine()) as live:
        live.complete()
        assert set(NAMES) <= {name for name, _ in scraped(live)}


def test_tokens_and_answers_are_counted() -> None:
    with serving(FakeEngine()) as live:
        live.complete(prompt=[5] * 9, max_tokens=7, n=2)
        live.complete(prompt=[5] * 9, stop="fox", max_tokens=90)
        found = scraped(live)
        assert found["vllm:prompt_tokens_total", ""] == 18
        assert found["vllm:request_success_total", "length"] == 2
        assert found["vllm:request_success_total", "stop"] == 1
        assert found["vllm:time_to_first_token_seconds_count", ""] == 3
        assert found["vllm:e2e_request_latency_seconds_count", ""] == 3
        assert found["vllm:request_queue_time_seconds_count", ""] == 3
        # The engine may draw more before it hears of a stop string.
        assert found["vllm:generation_tokens_total", ""] >= found["vllm:inter_token_latency_seconds_count", ""] + 3
        for part in ("count", "sum"):
            old, new = f"vllm:time_per_output_token_seconds_{part}", f"vllm:inter_token_latency_seconds_{part}"
            assert found[old, ""] == found[new, ""]
        assert found["vllm:prefix_cache_hits_total", ""] > 0


def test_the_states_of_the_pool_sum_to_it() -> None:
    with serving(FakeEngine(blocks=33, size=4)) as live:
        live.complete(prompt=[5] * 9)
        states = {state: value for (name, state), value in scraped(live).items() if name == "tonnage_kv_bytes"}
        assert set(states) == set("used slack cached shared reserved free".split())
        assert sum(states.values()) == 33 * 4096 and states["cached"] > 0


def test_failures_and_clients_that_leave_are_counted_as_such() -> None:
    engine = FakeEngine(pace_s=0.005)
    with serving(engine) as live:
        engine.runner.faults += [None] * 3 + [RuntimeError("a kernel went wrong")]
        assert live.complete(max_tokens=50, ignore_eos=True).status_code == 503
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}/v1/completions", json=BODY, timeout=0.1)
        until(lambda: not live.worker.open)
        until(lambda: scraped(live)["vllm:request_success_total", "abort"] == 1)
        assert scraped(live)["vllm:request_success_total", "error"] == 1
