"""Prometheus metrics of the router, and of the workers as their stats tell.

Every request ends in exactly one outcome, so `requests_received_total` is the sum of `requests_total` over outcomes
plus what runs. Labels are few and bounded: no request ids, no names that clients choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.protocol import ErrorCode, WorkerStats
from router.registry import Registry

Outcome = Literal["stop", "length", "aborted", "error", "rejected"]

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_REFUSALS = (400, 404, 408, 413, 415, 429, 499, 501, 502, 503, 504)
_WORKER_STATES = (
    "unreachable", "starting", "loading", "planning", "capturing", "linking", "warming", "ready", "draining",
    "stopped", "failed",
)  # fmt: skip


class Metrics:
    """All metrics of one router, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.received = Counter("isthmus_requests_received", "Requests on the generation routes.", registry=r)
        self.requests = Counter("isthmus_requests", "Finished requests by outcome.", ["outcome"], registry=r)
        self.rejections = Counter("isthmus_rejections", "Refused requests by HTTP status.", ["status"], registry=r)
        self.disconnects = Counter("isthmus_client_disconnects", "Clients that left early.", registry=r)
        self.retries = Counter("isthmus_retries", "Requests tried again, by failure.", ["code"], registry=r)
        self.worker_failures = Counter("isthmus_worker_failures", "Failed tries at workers.", ["code"], registry=r)
        self.aborts_lost = Counter("isthmus_aborts_lost", "Aborts that no worker ever confirmed.", registry=r)
        self.prompt_tokens = Counter("isthmus_prompt_tokens", "Prompt tokens of accepted requests.", registry=r)
        self.generation_tokens = Counter("isthmus_generation_tokens", "Tokens sent to clients.", registry=r)
        self.ttft = Histogram(
            "isthmus_time_to_first_token_seconds", "Arrival to first token.", buckets=_LATENCY_BUCKETS, registry=r
        )
        self.itl = Histogram(
            "isthmus_inter_token_latency_seconds", "Time between tokens.", buckets=_ITL_BUCKETS, registry=r
        )
        self.e2e = Histogram(
            "isthmus_e2e_request_latency_seconds", "Arrival to last token.", buckets=_LATENCY_BUCKETS, registry=r
        )
        self.queue_time = Histogram(
            "isthmus_request_queue_time_seconds", "Time waiting in the router.", buckets=_LATENCY_BUCKETS, registry=r
        )
        self.prefill_queue = Histogram(
            "isthmus_prefill_queue_time_seconds", "Time waiting at prefill.", buckets=_LATENCY_BUCKETS, registry=r
        )
        self.prefill_compute = Histogram(
            "isthmus_prefill_compute_time_seconds",
            "First chunk to first token at prefill.",
            buckets=_LATENCY_BUCKETS,
            registry=r,
        )
        # Every series is there from the start: a first failure is an increase, not a new series.
        for outcome in get_args(Outcome):
            self.requests.labels(outcome)
        for code in get_args(ErrorCode):
            self.retries.labels(code)
            self.worker_failures.labels(code)
        for status in _REFUSALS:
            self.rejections.labels(str(status))

    def finish(self, outcome: Outcome) -> None:
        """Count one request's end."""
        self.requests.labels(outcome).inc()

    def watch(self, workers: Registry, *, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Add the gauges, which are read at the moment of each scrape and so can't go stale."""
        self.registry.register(_Gauges(workers, running, waiting))

    def render(self) -> bytes:
        """Return the text of /metrics."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, workers: Registry, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        self._workers = workers
        self._running = running
        self._waiting = waiting

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("isthmus_num_requests_running", "Requests at workers.", value=self._running())
        yield GaugeMetricFamily("isthmus_num_requests_waiting", "Requests in the queue.", value=self._waiting())
        yield GaugeMetricFamily("isthmus_ready", "Whether a pair is ready.", value=float(self._workers.is_ready))
        state = GaugeMetricFamily(
            "isthmus_worker_state", "1 for the current state.", labels=["worker", "role", "state"]
        )
        for worker in self._workers.workers:
            for name in _WORKER_STATES:
                state.add_metric([worker.url, worker.role, name], float(worker.shown_state == name))
        yield state
        for field in WorkerStats.__struct_fields__:
            gauge = GaugeMetricFamily(
                f"isthmus_worker_{field}", f"{field} as the worker tells.", labels=["worker", "role"]
            )
            for worker in self._workers.workers:
                gauge.add_metric([worker.url, worker.role], getattr(worker.stats, field))
            yield gauge
