"""What a replay shows on /metrics while it runs, as an engine shows its own."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvops.inference.channel import Done
from kvops.metrics import HttpServer, serve_http

TTFT_BUCKETS_S: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 60.0)
"""Seconds: from one decode step to what nobody waits for; around an SLO of a few seconds every step counts."""


class ReplayMetrics:
    """Counts answers of one replay, on a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ttft = Histogram(
            "kvops_inference_ttft_seconds",
            "Time to first token of replayed requests: look-up and read as measured, queue and GPU as modelled.",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._read = Histogram(
            "kvops_inference_read_seconds",
            "Time of a request's reads from the pool.",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._tokens = Counter(
            "kvops_inference_hit_tokens", "Prompt tokens served, by tier.", ["tier"], registry=self.registry
        )
        self._wrong = Counter("kvops_inference_wrong_bytes", "Bytes that were wrong.", registry=self.registry)

    def answered(self, done: Done) -> None:
        """Count one request's answer."""
        self._ttft.observe(done.ttft_ms / 1000)
        self._read.observe(done.read_ms / 1000)
        self._tokens.labels("l2").inc(done.l2_tokens)
        self._tokens.labels("l3").inc(done.l3_tokens)
        self._wrong.inc(done.wrong_bytes)

    def serve(self, address: str) -> HttpServer:
        """Serve it; close what is returned. Raises ConfigError if the address cannot be listened on."""
        return serve_http(address, ready=lambda: (True, ""), registry=self.registry)
