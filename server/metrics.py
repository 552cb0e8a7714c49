"""Prometheus metrics. Nothing of a text, no name that a client chose, no address is a label."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Summary,
    generate_latest,
)

from mirrorsd.graphs.manifest import AcceptedLength
from mirrorsd.runtime import GenerationResult

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


class Metrics:
    """The metrics of one server; a registry of their own, so that several may live in a process.

    Speculation's have the names that llama.cpp and vLLM use, with this project's prefix.
    """

    def __init__(self, num_running: Callable[[], float], num_waiting: Callable[[], float]) -> None:
        self._registry = registry = CollectorRegistry()
        model = ("model",)
        self._requests = Counter(
            "mirrorsd:requests", "Requests answered, by path and status.", ("path", "status"), registry=registry
        )
        self._prompt = Counter("mirrorsd:prompt_tokens", "Tokens of prompts.", model, registry=registry)
        self._cached = Counter("mirrorsd:cached_tokens", "Of these, found in a cache.", model, registry=registry)
        self._new = Counter("mirrorsd:generation_tokens", "Tokens generated.", model, registry=registry)
        drafts = "mirrorsd:spec_decode_num_"
        self._drafts = Counter(f"{drafts}drafts", "Windows verified.", model, registry=registry)
        self._drafted = Counter(f"{drafts}draft_tokens", "Tokens of windows.", model, registry=registry)
        self._accepted = Counter(f"{drafts}accepted_tokens", "Of these, accepted.", model, registry=registry)
        self._length = Summary(
            "mirrorsd:spec_decode_accepted_length", "Accepted tokens of a window.", model, registry=registry
        )
        self._expected = Gauge(
            "mirrorsd:spec_decode_accepted_length_at_export",
            "Mean of it over all places of the texts of the export.",
            model,
            registry=registry,
        )
        self._at_place = Counter(
            f"{drafts}accepted_tokens_per_pos",
            "Accepted tokens by their place in the window.",
            ("model", "position"),
            registry=registry,
        )
        self._first = Histogram(
            "mirrorsd:time_to_first_token_seconds", "From seat to first token.", buckets=_SECONDS, registry=registry
        )
        self._gap = Histogram("mirrorsd:chunk_gap_seconds", "Between two chunks.", buckets=_GAPS, registry=registry)
        self._whole = Histogram("mirrorsd:answer_seconds", "Of whole answers.", buckets=_SECONDS, registry=registry)
        running = Gauge("mirrorsd:requests_running", "Requests being answered.", registry=registry)
        running.set_function(num_running)
        waiting = Gauge(
            "mirrorsd:requests_waiting",
            "Requests in the queue, or waiting for a bundle to be loaded.",
            registry=registry,
        )
        waiting.set_function(num_waiting)

    def observe_request(self, path: str, status: int) -> None:
        """Count an answered request; `path` is a route's, never the client's own."""
        self._requests.labels(path, str(status)).inc()

    def observe_gap(self, seconds: float) -> None:
        """Note the time between two chunks of a text."""
        self._gap.observe(seconds)

    def observe_results(
        self, model: str, results: Sequence[GenerationResult], expected: AcceptedLength | None = None
    ) -> None:
        """Note what answers took; `expected` is what the draft guessed when the bundle was exported."""
        if expected is not None:
            self._expected.labels(model).set(expected.accepted)
        for result in results:
            stats = result.stats
            self._prompt.labels(model).inc(stats.num_prompt_tokens)
            self._cached.labels(model).inc(stats.num_reused_tokens)
            num_replayed = sum(1 + step.num_accepted for step in result.steps if step.is_replay)  # another server's
            self._new.labels(model).inc(result.num_tokens - num_replayed)
            self._first.observe(stats.time_to_first_token_ms / 1e3)
            self._whole.observe(stats.seconds)
            windows = [step for step in result.steps if step.num_window and not step.is_replay]
            self._drafts.labels(model).inc(len(windows))
            self._drafted.labels(model).inc(sum(step.num_window + step.num_siblings for step in windows))
            self._accepted.labels(model).inc(sum(step.num_accepted for step in windows))
            for step in windows:
                self._length.labels(model).observe(step.num_accepted)
            for place in range(max((step.num_accepted for step in windows), default=0)):
                count = sum(step.num_accepted > place for step in windows)
                self._at_place.labels(model, str(place)).inc(count)

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Name, labels and value of everything that is counted, for other systems of metrics."""
        for family in self._registry.collect():
            for sample in family.samples:
                yield sample.name.replace(":", "_"), dict(sample.labels), sample.value

    def text(self) -> bytes:
        """In Prometheus' own format."""
        return generate_latest(self._registry)
