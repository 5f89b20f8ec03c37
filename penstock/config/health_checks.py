"""What is wrong with the settings of `health` beside each other."""

from collections.abc import Iterator

from penstock.config.health import HealthConfig


def health_problems(health: HealthConfig) -> Iterator[str]:
    """One line for each thing that is wrong."""
    beats = health.heartbeat
    if beats.lost_after <= beats.suspect_after:
        yield "health.heartbeat.lost_after: not above health.heartbeat.suspect_after, so nobody would be suspected"
    if health.breaker.open_max_s < health.breaker.open_s:
        yield "health.breaker.open_max_s: below health.breaker.open_s"
