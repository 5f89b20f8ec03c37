"""Queues, admission, limits' sharing and degradation: the sections `queue`, `admission`, `routing` and
`shared`.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.branch import Branch, Positive, Seconds


class BandConfig(Branch, frozen=True, kw_only=True):
    """One priority band. All its bounds are per model."""

    name: str
    """The name that a tier or a tenant gives as its `band`."""
    order: Annotated[int, Meta(ge=-1000, le=1000)]
    """Smaller goes first; also the priority that the engine is given. Running streams of bands below 0 are
    never stopped to make room in KV memory."""
    floor: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    """Streams that it may always run: under it, it goes before bands that are over theirs. Below 1 it is a
    share of the model's starts and of its slots. Lent while it has no work."""
    requests_max: Positive = 1024
    """Requests that wait; one more is refused as overloaded."""
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    """A request that waits longer is dropped, with a 503."""
    discipline: Literal["fifo", "deadline"] = "fifo"
    """Order among one tenant's requests: arrival, or the earliest deadline: when its first token is wanted,
    by its header x-penstock-max-wait-ms or the promise to its tier and band (`admission`), else the end of
    its wait."""


class QueueConfig(Branch, frozen=True, kw_only=True):
    """Where requests wait until a worker can start them: by model, band, tenant. docs/overload.md has the
    story.
    """

    bands: Annotated[tuple[BandConfig, ...], Meta(min_length=1, max_length=16)] = (
        BandConfig(name="system", order=-2, floor=2, requests_max=256, timeout_s=30),
        BandConfig(name="priority", order=-1, floor=0.25),
        BandConfig(name="default", order=0, floor=0.2, requests_max=2048),
        BandConfig(name="bulk", order=1, floor=0.05, requests_max=4096, timeout_s=300),
    )
    """Tenants of a band that is not here get the last band that has order 0 or less, else the first."""
    requests_max: Positive = 4096
    """Requests that wait for one model, all bands together."""
    headroom: Annotated[float, Meta(ge=0, le=0.5)] = 0.08
    """Share of a model's rows that a tenant leaves free for others who are active too, once it runs half as
    much again as its part: their next request need not wait for one of its streams to end. Of an external
    worker with `max_running` this share, at least one row, is always free for tenants that run nothing. 0
    lends every row."""
    no_worker_wait_s: Seconds = 30.0
    """How long requests wait while no worker of their model is ready, then 503. 0: not at all, unless they
    ran on a worker that is lost."""


class LimitsConfig(Branch, frozen=True, kw_only=True):
    """Bounds for all requests of this gateway.

    The limits of each tenant are in `tenants` and `tiers`; see docs/limits.md.
    """

    concurrent_max: Positive = 10_000
    """Streams generated at once by this gateway; one more is refused as overloaded."""
    n_max: Positive = 8
    """Choices of one request."""
    burst_s: Annotated[float, Meta(ge=1, le=86_400)] = 60.0
    """The use that a tenant that was idle may make at once, in seconds of its rate. 60: one minute's worth,
    as with OpenAI."""
    media_hosts: Annotated[tuple[str, ...], Meta(max_length=256)] = ()
    """Hosts from which workers may fetch images and videos that a message names by their URLs: "a.org",
    "*.a.org", or "*" for every public one. Data URLs need none."""


class SharedConfig(Branch, frozen=True, kw_only=True):
    """Rate limits, budgets and fair shares that several gateways share.

    A store that is late delays no request by more than 50 ms; see docs/limits.md and docs/ledger.md.
    """

    url: str = ""
    """Of the Redis through which all gateways with the same `url` and `prefix` count together, budgets too:
    "redis://host:6379/0", "rediss://user:password@host:6380/0", "unix:///run/redis.sock". Empty: each
    gateway counts for itself, and the processes of one `penstock serve --processes` count together."""
    prefix: Annotated[str, Meta(min_length=1, max_length=128)] = "penstock"
    """Begins the names of all keys in the store."""
    gateways: Positive = 1
    """How many gateways there are, until the store has said so: what a gateway that never reached it goes
    by."""
    on_store_down: Literal["local-share", "closed", "open"] = "local-share"
    """While the store does not answer. "local-share": this gateway's part of the rate, by the number of
    gateways that was known last. "closed": what it had leased, then nothing. "open": no limit; what was used
    is charged later."""


def shared_problems(shared: SharedConfig) -> Iterator[str]:
    """One line for each thing that is wrong."""
    scheme = shared.url.partition("://")[0]
    if shared.url and scheme not in ("redis", "rediss", "unix"):
        yield "shared.url: expected redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH"


def queue_problems(queue: QueueConfig) -> Iterator[str]:
    """One line for each thing that is wrong."""
    seen: dict[str, int] = {}
    for i, band in enumerate(queue.bands):
        if not band.name:
            yield f"queue.bands[{i}].name: empty"
        elif band.name in seen:
            yield (
                f"queue.bands[{i}].name: {band.name!r} is the name of queue.bands[{seen[band.name]}] already"
            )
        seen.setdefault(band.name, i)
    if sum(band.floor for band in queue.bands if band.floor < 1) > 1:
        yield "queue.bands: floors that are shares add up to more than 1, so not all could be honoured"


_QUEUE = "a constant of the queue now (penstock/policy/terms.py)"
_TOKENIZE = "a constant now (penstock/gateway/models/prepare.py)"
RETIRED: dict[str, str] = {
    "queue.bands[].starvation_s": "follows from `queue.bands[].order` now",
    "queue.bands[].protected": "follows from `queue.bands[].order` now",
    "queue.bands[].bytes_max": _QUEUE,
    "queue.bands[].share": "`queue.bands[].floor` below 1 is a share",
    "shared.store": "there is a store where there is a `shared.url`, and `penstock serve --processes` shares "
    "its limits by itself",
    "shared.socket": "`penstock serve --processes` finds its socket by itself",
    **{
        f"shared.{key}": "a constant now (penstock/policy/terms.py)"
        for key in ("lease_s", "timeout_s", "retry_s", "gateway_ttl_s", "asks_max")
    },
    "shared.gateways_max": "fixed at 1024",
    "shared.frame_bytes_max": "fixed at 1 MiB",
    **{
        f"queue.{key}": _QUEUE
        for key in (
            "bytes_max", "tenant_share", "when_full", "tenants_kept", "skips_max", "skip_s", "aside_max",
            "retries_max", "worker_credit", "shed_kv_above", "shed_kv_to", "shed_max",
        )
    },
    "queue.no_worker": "`queue.no_worker_wait_s` of 0 refuses at once",
    "queue.foreign_concurrency": "a constant now: 64; a worker has `models[].workers[].max_running`",
    **{
        f"limits.{key}": "a constant now (penstock/protocol/openai_validate.py)"
        for key in (
            "stop_max", "stop_chars_max", "stop_token_ids_max", "messages_max", "tools_max",
            "top_logprobs_max", "logit_bias_max", "json_values_max", "json_depth_max", "prompts_max",
        )
    },
    "limits.session_bytes_max": "a constant now: 256",
    "limits.tokenize_inline_bytes": _TOKENIZE,
    "limits.tokenize_waiting_max": _TOKENIZE,
    "rate_limits.burst_s": "now `limits.burst_s`",
    "rate_limits.*": "a constant now (penstock/policy/limits/rate_limit.py, "
    "penstock/policy/estimates.py)",
}  # fmt: skip
