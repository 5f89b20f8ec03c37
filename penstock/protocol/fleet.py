"""The content of `GET /admin/workers`: the fleet as one gateway process sees it. `penstock top` reads it
back.
"""

from typing import Annotated

import msgspec
from msgspec import Meta


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. Counters grow from the worker's start on; null means that it was never reported."""

    id: str
    model: str
    """The name that clients use."""
    engine: str
    """The engine there: "penstock", "vllm", "openai"..., or "cell": it is a peer cell."""
    state: str
    """See policy/resilience/worker_state.py."""
    stage: str = ""
    """In words: what it is doing, or why it takes no requests."""
    left_alone: str = ""
    """In words: why this gateway process gives it nothing, or little, although it is ready; empty: it
    does."""
    standing: str = ""
    """This gateway process's judgement of its answers, and of its speed: well, doubted, ejected, returning
    (policy/resilience/anomalies.py)."""
    slowness: float | None = None
    """How many times as long as its peers' its steps take."""
    probe: str = ""
    """The verdict on its last probe: right, wrong, undecided, or why there is none; empty before the
    first."""
    epoch: int = 0
    """Grows whenever it is a new process."""
    address: str = ""
    identity: str = ""
    """Of what it computes: equal for workers that can continue each other's streams. Empty: it does not
    tell."""
    running: int | None = None
    waiting: int | None = None
    kv_blocks_used: int | None = None
    kv_blocks_total: int | None = None
    generated_tokens: int | None = None
    age_s: float | None = None
    """Since its last report."""
    cell: str = ""
    """The peer cell that it is; empty: it is a worker of this one."""
    rtt_ms: float | None = None
    """To a peer cell and back."""
    wait_ms: float | None = None
    """The wait of a request in a peer cell, as that says."""
    adapters: list[str] = []
    """It takes requests for them."""
    adapters_loaded: list[str] = []
    """Of those, the ones that it used last, as many as it keeps in memory."""
    device: str = ""
    """The device that it computes on; empty: it does not tell."""
    mbu: float | None = None
    """Memory bandwidth utilisation of its last steps, a share."""
    restarts: int = 0
    notes: list[str] = []
    """Its events, newest last."""


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One model."""

    name: str
    waiting: int
    """Requests in this gateway's queue."""
    ready: int
    """Workers that take requests."""
    workers: int
    ttft_sum_s: float = 0.0
    """Over all answers so far; with `ttft_count` at two times it gives the mean in between."""
    ttft_count: int = 0


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    version: str
    workers: list[WorkerReport]
    models: list[ModelReport]


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /admin/workers/{id}/drain`; it may be left out."""

    timeout_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    """How long its streams have; null: `fleet.drain_timeout_s`."""


class SleepOrderBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /admin/sleep` and `/admin/wake_up`; it may be left out where there is one model."""

    model: Annotated[str, Meta(max_length=256)] | None = None


class SleepState(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/admin/sleep`, `/admin/wake_up` and `/admin/is_sleeping`."""

    model: str
    is_sleeping: bool
    """None of its workers takes requests, and one is asleep or wakes."""
    state: str
    """In words."""


AdapterName = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\s\x00-\x1f\x7f]+$")]


class LoadAdapterOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/load_lora_adapter`, as vLLM has it."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """A directory where workers run, `http(s)://` or `s3://`; with `#digest=HEX` it must have that one."""
    base_model_name: Annotated[str, Meta(max_length=256)] | None = None
    """Ours: whose it is; needed where there are several models."""
    load_inplace: bool = False
    """vLLM's: replace the one of this name. Refused."""


class UnloadAdapterOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/unload_lora_adapter`, as vLLM has it."""

    lora_name: AdapterName
