"""Counters of one engine, as Prometheus text: vLLM's names where the meaning is vLLM's; ours start with
`weightline:`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from weightline.generate.requests import Chunk, Sink

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    60.0,
)
_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Observations by upper bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and observations up to it."""
        bounds = [*map(str, self.bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


class _Once(Collector):
    """Metrics as they are now, for one rendering."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class Metrics:
    """What happened in one engine since its start. Safe from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.ended: Counter[str] = Counter(dict.fromkeys(_REASONS, 0))
        self.first_token = Histogram(_SECONDS)
        self.latency = Histogram(_SECONDS)
        self.labels_without_weights = 0
        """Labels set though no weights had changed."""
        self.weights_without_label = 0
        """Attempts to go on with new weights under the old label."""
        self.refused_labels = 0
        """Labels that our own control route refused, because no verified weights stood behind them."""

    def watch(self, prompt_tokens: int) -> Sink:
        """Counts the chunks of one request that arrives now."""
        arrived = self._clock()
        waiting: set[int] = set()

        def counted(chunk: Chunk) -> None:
            now = self._clock()
            with self._lock:
                self.generation_tokens += len(chunk.token_ids)
                if chunk.token_ids and chunk.index not in waiting:
                    waiting.add(chunk.index)
                    self.first_token.observe(now - arrived)
                    if len(waiting) == 1:
                        self.prompt_tokens += prompt_tokens
                if chunk.final is not None:
                    self.ended[chunk.final.finish_reason] += 1
                    self.latency.observe(now - arrived)

        return counted

    def text(
        self, model: str, gauges: Mapping[str, tuple[str, float]], counters: Mapping[str, tuple[str, int]]
    ) -> str:
        """The exposition format, version 0.0.4: these numbers, and `gauges` and `counters` of others, as name
        -> (what it is, value).
        """
        with self._lock:
            own = {
                "vllm:prompt_tokens": ("Prompt tokens of requests that sampled a token.", self.prompt_tokens),
                "vllm:generation_tokens": ("Sampled tokens.", self.generation_tokens),
                "weightline:labels_without_weights": (
                    "Labels set though no weights had changed.",
                    self.labels_without_weights,
                ),
                "weightline:weights_without_label": (
                    "Attempts to sample with new weights under the old label.",
                    self.weights_without_label,
                ),
                "weightline:refused_labels": (
                    "Labels that the control route refused: no verified weights behind them.",
                    self.refused_labels,
                ),
            }
            names, values = ("engine", "model_name"), ("0", model)
            found: list[Metric] = []
            for name, (what, number) in gauges.items():
                gauge = GaugeMetricFamily(name, what, labels=names)
                gauge.add_metric(values, number)
                found.append(gauge)
            for name, (what, count) in {**counters, **own}.items():
                counter = CounterMetricFamily(name, what, labels=names)
                counter.add_metric(values, count)
                found.append(counter)
            ended = CounterMetricFamily(
                "vllm:request_success", "Ended sequences by reason.", labels=(*names, "finished_reason")
            )
            for reason, count in self.ended.items():
                ended.add_metric((*values, reason), count)
            found.append(ended)
            for name, what, seen in (
                ("vllm:time_to_first_token_seconds", "From arrival to the first token.", self.first_token),
                ("vllm:e2e_request_latency_seconds", "From arrival to the end.", self.latency),
            ):
                histogram = HistogramMetricFamily(name, what, labels=names)
                histogram.add_metric(values, buckets=seen.buckets(), sum_value=seen.total)
                found.append(histogram)
        registry = CollectorRegistry()
        registry.register(_Once(found))
        return generate_latest(registry).decode()
