"""Prometheus metrics under vLLM's names, and the KV ledger; engine figures are those at the time of the scrape."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tonnage.report.serve import kv_rows
from tonnage.serve.stats import EngineState

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from tonnage.serve.sampling import AnswerDelta
    from tonnage.serve.server.worker import EngineRequest

_LABELS = ("model_name",)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKEN_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """Counters and histograms of one server, and a collector of the engine's figures."""

    def __init__(self, model: str) -> None:
        self._model, self._state = model, None  # type: str, EngineState | None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        first_token = self._histogram("time_to_first_token", "From arrival to the first token.", _FIRST_TOKEN_S)
        token = self._histogram("inter_token_latency", "From one token to the next.", _TOKEN_S)
        self._registry.register(_Renamed(token, "inter_token_latency", "time_per_output_token"))
        queue = self._histogram("request_queue_time", "From arrival to the first step.", _REQUEST_S)
        whole = self._histogram("e2e_request_latency", "From arrival to the last token.", _REQUEST_S)
        prompt_tokens = Counter("vllm:prompt_tokens", "Tokens of prompts.", _LABELS, registry=self._registry)
        finished = Counter("vllm:request_success", "Answers.", (*_LABELS, "finished_reason"), registry=self._registry)
        # Resolve labels once: a lookup at every use costs time.
        self._first_token, self._token = first_token.labels(model), token.labels(model)
        self._queue, self._whole = queue.labels(model), whole.labels(model)
        self._prompt_tokens = prompt_tokens.labels(model)
        self._finished = {reason: finished.labels(model, reason) for reason in REASONS}

    def _histogram(self, name: str, words: str, buckets_s: Sequence[float]) -> Histogram:
        return Histogram(f"vllm:{name}_seconds", words, _LABELS, buckets=buckets_s, registry=self._registry)

    def delivered(self, ticket: "EngineRequest", delta: "AnswerDelta") -> None:
        """Record the tokens of one step for one answer."""
        count, last_s = len(delta.token_ids), ticket.last_s.get(delta.index)
        if not count:
            return
        ticket.last_s[delta.index] = delta.time_s
        if last_s is None:
            self._first_token.observe(delta.time_s - ticket.arrival_s)
            sequence = ticket.sequences[delta.index]
            self._queue.observe(max(0.0, sequence.admitted_s - sequence.arrival_s))
            if sequence.sample_index == 0:
                self._prompt_tokens.inc(sequence.prompt_length)
        else:
            self._token.observe((delta.time_s - last_s) / count)

    def finished(self, reason: str, latency_s: float | None) -> None:
        """Record that an answer is complete or aborted."""
        self._finished[reason].inc()
        if latency_s is not None:
            self._whole.observe(latency_s)

    def text(self, state: EngineState) -> bytes:
        """Return all metrics, with the engine's current figures."""
        self._state = state
        return generate_latest(self._registry)

    def describe(self) -> list["Metric"]:
        """Return nothing, since there is no state before the first scrape."""
        return []

    def collect(self) -> Iterator["Metric"]:
        """Yield gauges and totals of the engine."""
        state = self._state
        if state is None:
            return
        gauges = {
            "num_requests_running": ("Sequences that hold blocks.", state.running),
            "num_requests_waiting": ("Sequences that wait.", state.waiting),
            "kv_cache_usage_perc": ("Share of the KV blocks that sequences hold; 1 is all.", state.kv_usage),
            "gpu_cache_usage_perc": ("The same under its old name.", state.kv_usage),
        }
        totals = {
            "generation_tokens": ("Tokens generated.", state.generated),
            "num_preemptions": ("Sequences that made room for older ones.", state.preemptions),
            "prefix_cache_queries": ("Tokens of prompts that were looked up.", state.prefix_queries),
            "prefix_cache_hits": ("Tokens of prompts that were found.", state.prefix_hits),
        }
        kinds: Any = ((GaugeMetricFamily, gauges), (CounterMetricFamily, totals))
        for kind, name, (words, value) in ((kind, *row) for kind, rows in kinds for row in rows.items()):
            family = kind(f"vllm:{name}", words, labels=_LABELS)
            family.add_metric([self._model], value)
            yield family
        parts = GaugeMetricFamily("tonnage_kv_bytes", "The KV pool; the states sum to it.", labels=(*_LABELS, "state"))
        for part, size_bytes in kv_rows(state.ledger):
            parts.add_metric([self._model, part], size_bytes)
        yield parts


class _Renamed:
    """A metric repeated under its former name."""

    def __init__(self, metric: Histogram, name: str, old_name: str) -> None:
        self._metric, self._name, self._old_name = metric, name, old_name

    def collect(self) -> Iterator["Metric"]:
        """Yield the metric's samples, renamed."""
        for family in self._metric.collect():
            family.name, *names = (
                name.replace(self._name, self._old_name)
                for name in (family.name, *(sample.name for sample in family.samples))
            )
            family.samples = [sample._replace(name=name) for sample, name in zip(family.samples, names, strict=True)]
            yield family
