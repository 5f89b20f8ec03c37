"""What the scheduler counts, for those who watch it."""

from dataclasses import dataclass

from penstock.kv.cache.host_tier import HostStatistics
from penstock.schedule.step_time import StepSums


@dataclass(slots=True)
class Counters:
    """Counted since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    yields: int = 0


@dataclass(slots=True, frozen=True)
class SchedulerStatistics:
    """Gauges, and counters since the start."""

    step: int
    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    prompt_tokens: int
    """Of requests that started."""
    cached_tokens: int
    """Of `prompt_tokens`, what the prefix cache had."""
    host_cached_tokens: int
    """Of `cached_tokens`, what came back from host memory."""
    generated_tokens: int
    preemptions: int
    yields: int
    """How often a request gave its row to another tenant's (`row_share.py`)."""
    rows_max: int
    """Requests that would run at once at most: fewer than the batch has rows where a target bounds them
    (`schedule/prefill_budget.py`)."""
    host: HostStatistics
    """The KV cache's host tier."""
    sums: StepSums
    """What all steps computed, and in which time; goes on counting."""
