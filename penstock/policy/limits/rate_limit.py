"""The use that a tenant may make: requests per minute, tokens per minute, requests at once.

    reserve ──> Reservation ──renew──> ... ──renew──> settle      the request was accepted
       │              └──────────────────────────────> undo       refused elsewhere: as if it never was
       └──> Refusal (why, and when to come back)

A reservation takes the prompt's exact tokens and what the answer is expected to be
(policy/estimates.py). While the answer streams beyond that, every slice of 256 tokens is
charged as it begins, into debt if the bucket is empty: a running stream is never stopped by a rate limit, the
next request waits. Settling puts the difference to what was really used back, or charges it. So over any time
a tenant is admitted no more than its burst and its rate, and the debt is at most what its running answers
have been longer than expected.

Pure: gateway and simulator run this same object, each on its own clock. A gateway that shares limits with
others hands in buckets that are filled by leases (policy/limits/lease.py); nothing here knows the
difference.

`limit_headers` writes the `x-ratelimit-*` headers as OpenAI does. They stand on every response, so they take
few operations: a tenant's limits are formatted once, and the rest is integers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal
from zlib import crc32

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.branch import extended
from penstock.config.flow import LimitsConfig
from penstock.errors import ClientError, InvalidRequest, LimitReached
from penstock.policy.flow import SLICE_TOKENS
from penstock.policy.limits.bucket import Bucket, TokenSource, ceil_div
from penstock.policy.tenant import Tenant
from penstock.types import TenantId

Headers = tuple[tuple[bytes, bytes], ...]


def limit_headers(
    now_ns: int, tenant: Tenant, requests: TokenSource | None, tokens: TokenSource | None
) -> Headers:
    """The headers of both limits: the limit per minute, what is left, and when all of it is back."""
    made: Headers = ()
    if requests is not None:
        remaining, full_ns = requests.standing(now_ns)
        made = (
            (b"x-ratelimit-limit-requests", _number(tenant.requests_per_minute)),
            (b"x-ratelimit-remaining-requests", b"%d" % remaining),
            (b"x-ratelimit-reset-requests", duration(full_ns)),
        )
    if tokens is not None:
        remaining, full_ns = tokens.standing(now_ns)
        made += (
            (b"x-ratelimit-limit-tokens", _number(tenant.tokens_per_minute)),
            (b"x-ratelimit-remaining-tokens", b"%d" % remaining),
            (b"x-ratelimit-reset-tokens", duration(full_ns)),
        )
    return made


def duration(ns: int) -> bytes:
    """A time as Go and OpenAI write it, rounded up: `0s`, `120ms`, `1s`, `59s`, `6m0s`, `1h0m5s`."""
    ms = -(-ns // 1_000_000)
    if ms < 1000:
        return b"%dms" % ms if ms else b"0s"
    return _seconds(-(-ms // 1000))


@lru_cache(maxsize=4096)
def _seconds(seconds: int) -> bytes:
    if seconds < 60:
        return b"%ds" % seconds
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return b"%dm%ds" % (minutes, seconds)
    return b"%dh%dm%ds" % (*divmod(minutes, 60), seconds)


@lru_cache(maxsize=1024)
def _number(value: int) -> bytes:
    return b"%d" % value


Unit = Literal["requests", "tokens"]
MakeBucket = Callable[[int, TenantId, Unit, int, int], TokenSource]
"""(now_ns, tenant, unit, rate per minute, burst) -> a new bucket."""
_SPREAD = 8
"""A refused client is asked to stay away up to 1/8 longer than it must, by its request id."""
_FIRST_HOLD_NS = NS_PER_S
"""How long a request is taken to run while none of the tenant's has ended."""
_COLLECT_MIN = 256
"""Tenants below which no idle ones are looked for."""


@dataclass(slots=True, frozen=True, kw_only=True)
class LimitRefusal:
    """Why a request may not start, and when it may."""

    kind: Literal["requests", "tokens", "concurrent", "too_large"]
    """The limit that it ran into. "too_large": more tokens than the limit ever lets through at once."""
    limit: int
    """Requests or tokens per minute, or requests at once; for "too_large" the tokens that pass at once."""
    used: int
    """The part of it that is used now."""
    requested: int
    retry_after_ns: int
    """Stay away this long. 0 for "too_large": waiting is of no use."""
    level: str = ""
    """The level of the limit: "key" or "user"; empty: the tenant's."""

    @property
    def message(self) -> str:
        """The message for the person who must act on it."""
        if self.kind == "too_large":
            return (
                f"This request needs {self.requested} tokens at once, but your limit lets through "
                f"{self.limit} at "
                "most: it can never pass. Shorten the prompt or ask for a higher limit."
            )
        unit = {
            "requests": "requests per minute",
            "tokens": "tokens per minute",
            "concurrent": "requests at once",
        }
        whose = f"of this {self.level} " if self.level else ""
        return (
            f"Rate limit {whose}reached: limit {self.limit} {unit[self.kind]}, used {self.used}, requested "
            f"{self.requested}. Please try again in {self.retry_after_ns / NS_PER_S:.3f}s."
        )

    def error(self) -> ClientError | LimitReached:
        """The refusal as an error: `InvalidRequest` if it can never pass, else `LimitReached` with its
        time.
        """
        if self.kind == "too_large":
            return InvalidRequest(self.message, code="request_too_large_for_limit")
        return LimitReached(self.message, retry_after_s=self.retry_after_ns / NS_PER_S)


class _Use:
    """The use of one tenant. A bucket is None while its limit is 0."""

    __slots__ = ("hold_ns", "line_ns", "live", "requests", "seen_ns", "tenant", "tokens")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.requests: TokenSource | None = None
        self.tokens: TokenSource | None = None
        self.live = 0
        self.hold_ns = 0
        self.line_ns = 0
        self.seen_ns = 0


class LimitReservation(msgspec.Struct, eq=False):
    """One accepted request's share of its tenant's limits. Ends by `settle` or by `undo`, exactly once."""

    _limiter: "Limiter"
    _use: _Use
    _started_ns: int
    _num_requests: int
    _tokens: TokenSource | None
    """The bucket that tokens go back to, even if a reload has put another limit there since; so do requests.
    """
    _requests: TokenSource | None
    covered: int
    """Output tokens that are paid for: `renew` has nothing to do up to here."""
    reserved: int
    """Tokens taken from the limit for this request, until it ends."""
    ended: bool = False

    def renew(self, now_ns: int, num_output_tokens: int) -> None:
        """The answer has `num_output_tokens` tokens by now: charge slices until they are covered.

        Cheap while they are.
        """
        if num_output_tokens <= self.covered:
            return
        assert not self.ended, "renewed after its end"
        slice_tokens = self._limiter.config.slice_tokens
        extra = ceil_div(num_output_tokens - self.covered, slice_tokens) * slice_tokens
        self.covered += extra
        assert self.covered >= num_output_tokens, "the answer is paid for"
        self.reserved += extra
        self._limiter.outstanding += extra
        if self._tokens is not None:
            self._tokens.take(now_ns, extra)

    def settle(self, now_ns: int, actual_tokens: int) -> None:
        """The request ended, however it did, and used `actual_tokens` of prompt and answer: put back or
        charge the rest.
        """
        assert actual_tokens >= 0, actual_tokens
        use = self._end()
        hold_ns = max(0, now_ns - self._started_ns)
        use.hold_ns = hold_ns if use.hold_ns == 0 else use.hold_ns + (hold_ns - use.hold_ns) // 8
        self._limiter.settled += actual_tokens
        if self._tokens is None:
            return
        unused = self.reserved - actual_tokens
        if unused > 0:
            self._tokens.give(now_ns, unused)
        elif unused < 0:
            self._tokens.take(now_ns, -unused)

    def undo(self, now_ns: int) -> None:
        """Something else refused the request before it was accepted: give everything back, the request itself
        too.
        """
        self._end()
        if self._tokens is not None:
            self._tokens.give(now_ns, self.reserved)
        if self._requests is not None:
            self._requests.give(now_ns, self._num_requests)

    def _end(self) -> _Use:
        assert not self.ended, "a reservation ends once"
        self.ended = True
        self._use.live -= 1
        self._limiter.outstanding -= self.reserved
        assert self._use.live >= 0 <= self._limiter.outstanding, "more ended than was reserved"
        return self._use


class RateTerms(LimitsConfig, frozen=True, kw_only=True):
    """How the limits per tenant are counted."""

    slice_tokens: int = SLICE_TOKENS
    """An answer longer than what was reserved for it is charged in slices of this many tokens while it
    streams."""
    retry_after_max_s: float = 600.0
    """The line of refused requests with a time to come back is at most this long."""
    tenants_max: int = 65_536
    """Tenants whose use is remembered; over it those that have nothing running and were seen longest ago are
    forgotten."""


class Limiter:
    """The limits of all tenants. State exists only for those that used something lately."""

    __slots__ = ("_collect_at", "_make_bucket", "_tenants", "config", "outstanding", "settled")

    def __init__(self, config: LimitsConfig, make_bucket: MakeBucket | None = None) -> None:
        self.config = extended(config, RateTerms)
        self._make_bucket = make_bucket or _own_bucket
        self._tenants: dict[TenantId, _Use] = {}
        self._collect_at = _COLLECT_MIN
        self.outstanding = 0
        """Tokens reserved by requests that have not ended."""
        self.settled = 0
        """Tokens that ended requests really used."""

    def sibling(self) -> "Limiter":
        """Another one with the same settings and the same kind of buckets."""
        return Limiter(self.config, self._make_bucket)

    def reserve(
        self,
        now_ns: int,
        tenant: Tenant,
        prompt_tokens: int,
        output_tokens: int,
        *,
        num_requests: int = 1,
        request_id: str = "",
    ) -> LimitReservation | LimitRefusal:
        """Take what a request needs from all limits of its tenant, or nothing.

        Args:
            now_ns: monotonic time.
            tenant: whose limits; a changed tenant counts from this call on, and what was used stays used.
            prompt_tokens: of all prompts, exact.
            output_tokens: expected of all choices together; cut where the burst would not let it through.
            num_requests: what it counts as.
            request_id: spreads the times of refused clients.
        """
        assert prompt_tokens >= 0 <= output_tokens, (prompt_tokens, output_tokens)
        use = self._of(now_ns, tenant)
        tokens, requests = use.tokens, use.requests
        if tokens is not None:
            burst = tokens.burst
            needed = prompt_tokens + min(output_tokens, 1)
            if needed > burst:
                return LimitRefusal(kind="too_large", limit=burst, used=0, requested=needed, retry_after_ns=0)
            output_tokens = min(output_tokens, burst - prompt_tokens)
        if requests is not None:
            num_requests = min(num_requests, requests.burst)
        needed = prompt_tokens + output_tokens
        if not _has(now_ns, use, needed, num_requests):
            return self._refuse(now_ns, use, needed, num_requests, request_id)
        if requests is not None:
            requests.take(now_ns, num_requests)
        if tokens is not None:
            tokens.take(now_ns, needed)
        use.live += 1
        self.outstanding += needed
        assert tokens is None or needed <= tokens.burst, "what never fits is refused as too large"
        return LimitReservation(self, use, now_ns, num_requests, tokens, requests, output_tokens, needed)

    def lacks(self, now_ns: int, tenant: Tenant, needed: int) -> bool:
        """Whether the store is asked for what one request of `needed` tokens is not covered by here."""
        use, lacks = self._of(now_ns, tenant), False
        if use.tokens is not None:
            lacks = use.tokens.lacks(now_ns, min(needed, use.tokens.burst))
        if use.requests is not None:
            lacks |= use.requests.lacks(now_ns, 1)
        return lacks

    def has(self, now_ns: int, tenant: Tenant, needed: int) -> bool:
        """Whether one request of `needed` tokens would be let in."""
        use = self._of(now_ns, tenant)
        return _has(now_ns, use, min(needed, use.tokens.burst) if use.tokens is not None else 0, 1)

    def headers(self, now_ns: int, tenant: Tenant) -> Headers:
        """The `x-ratelimit-*` headers of the limits that the tenant has, as they stand now; empty if it has
        none.
        """
        if not (tenant.requests_per_minute or tenant.tokens_per_minute):
            return ()
        # A stream that began before a reload must not bring the old limits back: only `reserve` changes them.
        use = self._tenants.get(tenant.id) or self._of(now_ns, tenant)
        return limit_headers(now_ns, use.tenant, use.requests, use.tokens)

    def num_live(self, tenant: TenantId) -> int:
        """Requests of the tenant that were accepted and have not ended."""
        use = self._tenants.get(tenant)
        return 0 if use is None else use.live

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._tenants)

    def _of(self, now_ns: int, tenant: Tenant) -> _Use:
        use = self._tenants.get(tenant.id)
        if use is None:
            if len(self._tenants) >= self._collect_at:
                self._collect(now_ns)
            use = self._tenants[tenant.id] = _Use(NO_LIMITS)
        if use.tenant is not tenant:
            self._adapt(now_ns, use, tenant)
        use.seen_ns = now_ns
        return use

    def _adapt(self, now_ns: int, use: _Use, tenant: Tenant) -> None:
        """Take new limits. A limit that was none before begins full: earlier use was not counted."""
        use.requests = self._changed(now_ns, tenant.id, use.requests, "requests", tenant.requests_per_minute)
        use.tokens = self._changed(now_ns, tenant.id, use.tokens, "tokens", tenant.tokens_per_minute)
        use.tenant = tenant

    def _changed(
        self, now_ns: int, tenant: TenantId, bucket: TokenSource | None, unit: Unit, rate: int
    ) -> TokenSource | None:
        if not rate:
            return None
        burst = max(1, int(rate * self.config.burst_s) // 60)
        if bucket is None:
            return self._make_bucket(now_ns, tenant, unit, rate, burst)
        bucket.change(now_ns, rate, burst)
        return bucket

    def _refuse(
        self, now_ns: int, use: _Use, needed: int, num_requests: int, request_id: str
    ) -> LimitRefusal:
        """Name the limit that holds longest; only that one's line grows."""
        tenant, ahead_max_ns = use.tenant, int(self.config.retry_after_max_s * NS_PER_S)
        waits: list[tuple[int, Literal["requests", "tokens"], TokenSource, int]] = []
        if use.tokens is not None:
            waits.append((use.tokens.wait_ns(now_ns, needed), "tokens", use.tokens, needed))
        if use.requests is not None:
            waits.append((use.requests.wait_ns(now_ns, num_requests), "requests", use.requests, num_requests))
        longest_ns, unit, bucket, amount = max(
            waits, key=lambda wait: wait[0], default=(0, "requests", None, 0)
        )
        if bucket is None or longest_ns == 0:
            wait_ns = _spread(self._concurrent_ns(now_ns, use, ahead_max_ns), request_id)
            limit = tenant.concurrent_max
            return LimitRefusal(
                kind="concurrent", limit=limit, used=use.live, requested=1, retry_after_ns=wait_ns
            )
        wait_ns = _spread(bucket.place_ns(now_ns, amount, ahead_max_ns), request_id)
        limit = tenant.tokens_per_minute if unit == "tokens" else tenant.requests_per_minute
        used = bucket.burst - bucket.standing(now_ns)[0]
        return LimitRefusal(kind=unit, limit=limit, used=used, requested=amount, retry_after_ns=wait_ns)

    def _concurrent_ns(self, now_ns: int, use: _Use, ahead_max_ns: int) -> int:
        """A guess, since the ends of answers are unknown: one place per ending, at the pace of the last
        ones.
        """
        gap_ns = max(1, (use.hold_ns or _FIRST_HOLD_NS) // max(1, use.tenant.concurrent_max))
        use.line_ns = min(max(use.line_ns, now_ns) + gap_ns, now_ns + ahead_max_ns)
        assert use.line_ns >= now_ns, "no client is asked to have come before"
        return use.line_ns - now_ns

    def _collect(self, now_ns: int) -> None:
        """Forget tenants that a new state would not differ from; if that is not enough, those seen longest
        ago.

        Called when the number has doubled since the last time, so that it costs O(1) per request.
        """
        idle = [key for key, use in self._tenants.items() if use.live == 0 and _is_full(now_ns, use)]
        for key in idle:
            del self._tenants[key]
        excess = len(self._tenants) - self.config.tenants_max * 7 // 8
        if excess > 0:
            unused = [key for key, use in self._tenants.items() if use.live == 0]
            unused.sort(key=lambda key: self._tenants[key].seen_ns)
            for key in unused[:excess]:
                del self._tenants[key]
        bound = max(self.config.tenants_max, len(self._tenants) + 1)
        self._collect_at = min(bound, max(_COLLECT_MIN, 2 * len(self._tenants)))


def _has(now_ns: int, use: _Use, needed: int, num_requests: int) -> bool:
    return not (
        (0 < use.tenant.concurrent_max <= use.live)
        or (use.requests is not None and not use.requests.has(now_ns, num_requests))
        or (use.tokens is not None and not use.tokens.has(now_ns, needed))
    )


NO_LIMITS = Tenant(id=TenantId("\0none"))
"""The tenant that a new state is compared with, so that making and changing it are one path."""


def _own_bucket(now_ns: int, tenant: TenantId, unit: Unit, rate: int, burst: int) -> TokenSource:
    """The bucket of a gateway that shares no limits."""
    del tenant, unit
    return Bucket(now_ns, rate, burst)


def _is_full(now_ns: int, use: _Use) -> bool:
    buckets = (use.requests, use.tokens)
    return all(bucket is None or bucket.standing(now_ns)[1] == 0 for bucket in buckets)


def _spread(wait_ns: int, request_id: str) -> int:
    """Up to 1/8 longer, by the request's id: places that are guesses, or other gateways', do not fall on one
    instant.
    """
    return wait_ns + wait_ns * (crc32(request_id.encode()) % 1024) // (1024 * _SPREAD)
