"""What a server tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from qwen35_jax.inference.engine import Engine, EngineStatistics

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAUGES = {
    "slots": ("qwen35_slots", "Slots of the batch"),
    "occupied": ("qwen35_slots_occupied", "Slots with a request in them"),
    "queued": ("qwen35_queued_requests", "Requests that wait for a slot"),
    "compiled_programs": ("qwen35_compiled_programs", "Programs compiled; stays as it is after the start"),
}
_COUNTERS = {
    "prompt_tokens": ("qwen35_prompt_tokens", "Tokens of prompts that were consumed"),
    "cached_tokens": ("qwen35_cached_tokens", "Tokens of prompts that were remembered"),
    "generated_tokens": ("qwen35_generated_tokens", "Tokens drawn"),
}
_PREFIX_GAUGES = {
    "budget": ("qwen35_prefix_cache_budget_bytes", "What remembered prefixes may take"),
    "held": ("qwen35_prefix_cache_held_bytes", "What remembered prefixes take"),
    "snapshots": ("qwen35_prefix_cache_snapshots", "Prefixes that can be gone on from"),
}
_PREFIX_COUNTERS = {
    "hits": ("qwen35_prefix_cache_hits", "Prompts that went on from a remembered prefix"),
    "misses": ("qwen35_prefix_cache_misses", "Prompts that were consumed from their start"),
    "evicted": ("qwen35_prefix_cache_evicted", "Prefixes that had to make room"),
}
_OUTCOMES = ("finished", "cancelled", "failed")


class Metrics:
    """Counts requests, and shows them with where the engine stands.

    Args:
        engine: of the server.
    """

    def __init__(self, engine: Engine):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        ProcessCollector(registry=self._registry)
        labels = ["endpoint", "status"]
        self._requests = Counter("qwen35_http_requests", "Requests", labels, registry=self._registry)
        self._first_token = Histogram(
            "qwen35_time_to_first_token_seconds",
            "From a request to its first token",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._duration = Histogram(
            "qwen35_request_duration_seconds",
            "From a request to the end of its answer",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def record(self, endpoint: str, status: int, seconds: float, first_token_seconds: float | None) -> None:
        """Takes note of a request that has ended.

        Args:
            endpoint: its path, out of a small set.
            status: of the response; 499 where the client went away.
            seconds: that it took.
            first_token_seconds: until its first token, where there was one.
        """
        self._requests.labels(endpoint, str(status)).inc()
        self._duration.labels(endpoint).observe(seconds)
        if first_token_seconds is not None:
            self._first_token.labels(endpoint).observe(first_token_seconds)

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Asks the engine when it is asked itself."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        now: EngineStatistics = self._engine.statistics()
        for part, gauges, counters in (
            (now, _GAUGES, _COUNTERS),
            (now.prefix_cache, _PREFIX_GAUGES, _PREFIX_COUNTERS),
        ):
            for field, (name, what) in gauges.items():
                yield GaugeMetricFamily(name, what, value=getattr(part, field))
            for field, (name, what) in counters.items():
                yield CounterMetricFamily(name, what, value=getattr(part, field))
        yield CounterMetricFamily("qwen35_submitted_requests", "Requests taken on", value=now.submitted)
        ended = CounterMetricFamily("qwen35_ended_requests", "Requests that have ended", labels=["outcome"])
        for outcome in _OUTCOMES:
            ended.add_metric([outcome], getattr(now, outcome))
        yield ended
