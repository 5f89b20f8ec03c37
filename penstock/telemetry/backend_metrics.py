"""What is counted of workers that are not ours, by engine."""

from collections.abc import Mapping

from prometheus_client import Counter


class BackendMeters:
    """The counters of one engine.

    Label values come from closed sets: outcomes, anomalies, our tables of names.
    """

    def __init__(self, engine: str, counters: Mapping[str, Counter]) -> None:
        """`counters` by name, as the catalog has them."""
        self._engine = engine
        self._requests = counters["penstock_backend_requests_total"]
        self._odd = counters["penstock_backend_anomalies_total"]
        self._missing = counters["penstock_scrape_missing_total"]
        self._failures = counters["penstock_scrape_failures_total"].labels(engine)

    def ended(self, outcome: str) -> None:
        """A stream is over."""
        self._requests.labels(self._engine, outcome).inc()

    def odd(self, kind: str) -> None:
        """An answer was not as it should be (`backends.http.stream.Anomaly`)."""
        self._odd.labels(self._engine, kind).inc()

    def missing(self, metric: str) -> None:
        """A metric that was expected was not there."""
        self._missing.labels(self._engine, metric).inc()

    def scrape_failed(self) -> None:
        """A page of metrics could not be had or read."""
        self._failures.inc()
