"""Limits that several gateways share: a bucket that is filled by leases.

The true bucket of a tenant is in a store (Redis, or the parent of `penstock serve --processes`). A gateway
spends from a lease of it, about a second's worth, and asks for more ahead of need. A request that the lease
does not cover asks for what it needs (`lacks`) and waits for the answer, within a deadline: so while the
store answers in time, all gateways together grant what the limit allows and no token more.

When the store is late, a gateway may spend **on credit** what it has not leased, up to one lease, as far as
the store's last word says that the bucket has it; the next question charges that to the bucket, into debt if
others were quicker. So all gateways together then overshoot a limit by at most one lease each, and what they
overshot is waited for. A request that is larger than a lease may be the one thing on credit: a lease is never
less than one request. Right after the store has said that the bucket is empty there is no credit.

A question carries a number, and asking it again gets the same answer: one that was carried out but never
answered is not granted twice. While the store is away, `on_store_down` says what to spend: nothing but what
was leased (closed), a share of the rate (local-share), or anything (open); what was spent so is charged when
the store is back.

Pure: the store, and the task that carries questions to it, are in gateway/shared/.
"""

from collections import deque
from collections.abc import Callable

from penstock.clock import NS_PER_S
from penstock.config.flow import SharedConfig
from penstock.policy.limits.bucket import UNIT, Line, ceil_div
from penstock.policy.limits.lease_table import Ask, LeaseAsk, Leased, LeaseGrant, LeaseReply
from penstock.policy.terms import ASKS_MAX, shared_terms
from penstock.types import TenantId

_IDLE_LEASES = 5
"""A lease that was not used for this many lease times goes back."""
_SWEEP_MAX = 256
"""Buckets that one call of `asks` looks at for idleness."""
_CREDIT_SHARE = 4
"""All gateways together have at most 1/4 of a full bucket on lease, unless a second's worth each is more."""


class Leases:
    """All leases of one gateway: what to ask the store, and what its answers mean."""

    __slots__ = (
        "_in_flight",
        "_joined_ns",
        "_seq",
        "_sweep",
        "_wanting",
        "config",
        "down_ns",
        "is_counted",
        "is_late",
        "lease_ns",
        "num_failures",
        "num_gateways",
        "on_need",
        "on_recall",
        "on_want",
        "process",
    )

    def __init__(
        self, config: SharedConfig, on_want: Callable[[], None] | None = None, *, process: str = ""
    ) -> None:
        """`process` names this process, as the ids of its requests do."""
        self.process = process
        self.config = config = shared_terms(config)
        self.lease_ns = int(config.lease_s * NS_PER_S)
        self.on_want = on_want
        """Called when there is something to ask and there was nothing before."""
        self.on_need: Callable[[], None] | None = None
        """Called when a request waits for the next answer."""
        self.on_recall: Callable[[], None] | None = None
        """Called when the store may have lost its memory."""
        self.is_late = False
        """A request has waited for the store in vain: until it answers again, no other one waits."""
        self.num_gateways = config.gateways
        """As the store said last."""
        self._joined_ns: int | None = None
        """Since when the store answers without a break."""
        self.is_counted = False
        """Whether all gateways had the time to say that they are there: until then leases are a second's
        worth."""
        self.down_ns: int | None = None
        """Since when the store does not answer; None: it does, or was never asked."""
        self.num_failures = 0
        """Batches that the store did not answer."""
        self._wanting: dict[Leased, None] = {}
        self._in_flight: list[Leased] = []
        self._seq = 0
        self._sweep: deque[Leased] = deque()

    def make_bucket(self, now_ns: int, tenant: TenantId, unit: str, rate: int, burst: int) -> "LeasedBucket":
        """A `MakeBucket` for the `Limiter`."""
        return LeasedBucket(self, now_ns, f"{unit}:{tenant}", rate, burst)

    def asks(self, now_ns: int) -> list[Ask]:
        """The questions to ask now: at most `ASKS_MAX` questions. `granted` or `failed` comes before the next
        call.

        After a failure these are the same questions again: the store may have carried them out.
        """
        if not self._in_flight:
            for bucket in list(self._wanting):
                if len(self._in_flight) == ASKS_MAX:
                    break
                if bucket.not_before_ns > now_ns:
                    continue
                del self._wanting[bucket]
                if bucket.ask(now_ns) is not None:
                    self._in_flight.append(bucket)
        asks = [bucket.pending for bucket in self._in_flight if bucket.pending is not None]
        assert len(asks) == len(self._in_flight) <= ASKS_MAX, "a question of each bucket that asks"
        return asks

    def granted(self, now_ns: int, reply: LeaseReply) -> None:
        """The store answered the last `asks` (or an empty batch, which only says who is there)."""
        assert len(reply.grants) == len(self._in_flight), "a grant for each question"
        buckets, self._in_flight = self._in_flight, []
        was_down, self.down_ns, self.is_late = self.down_ns is not None, None, False
        if self._joined_ns is None or was_down:
            self._joined_ns = now_ns
        # Gateways that start together, or come back to a store that forgot them, are not all counted at once.
        counted = now_ns - self._joined_ns >= self.config.gateway_ttl_s * NS_PER_S / 3
        counted |= 1 < self.config.gateways <= reply.num_gateways  # All that there are to be.
        self.num_gateways = max(1, reply.num_gateways, 0 if counted else self.num_gateways)
        self.is_counted = counted
        for bucket, grant in zip(buckets, reply.grants, strict=True):
            bucket.granted(now_ns, grant)
        if was_down:  # It may have lost its memory: tell it what was known of every bucket that is not full.
            self.recall()

    def recall(self) -> None:
        """Tell the store all that it may have forgotten."""
        for bucket in list(self._sweep):
            bucket.recall = True
            self.want(bucket)
        if self.on_recall is not None:
            self.on_recall()

    def leave(self) -> None:
        """Hand back at the next question what does not come back as refill."""
        for bucket in list(self._sweep):
            bucket.leave()

    def failed(self, now_ns: int) -> None:
        """The store did not answer the last `asks` in time, or said something wrong."""
        self.num_failures += 1
        if self.down_ns is None:
            self.down_ns = now_ns

    def want(self, bucket: Leased) -> None:
        """Ask for this bucket soon."""
        if bucket in self._wanting:
            return
        if not bucket.listed:
            bucket.listed = True
            self._sweep.append(bucket)
        was_empty = not self._wanting
        self._wanting[bucket] = None
        if was_empty and self.on_want is not None:
            self.on_want()

    def need(self, bucket: Leased) -> None:
        """Ask for this bucket at once: a request waits for it."""
        self.want(bucket)
        if self.on_need is not None:
            self.on_need()

    def next_ns(self) -> int | None:
        """The earliest time at which `asks` has something to ask; None if nothing is wanted."""
        if self._in_flight:
            return 0
        return min((bucket.not_before_ns for bucket in self._wanting), default=None)

    def next_seq(self) -> int:
        """The number of the next question."""
        self._seq += 1
        return self._seq

    def lease_max(self, rate: int, burst: int) -> int:
        """The largest lease of one gateway, with its credit: a second's worth, or its part of a
        quarter of the bucket.
        """
        worth = rate * self.lease_ns // UNIT
        assert self.num_gateways > 0, "this gateway is one of them"
        part = burst // (_CREDIT_SHARE * self.num_gateways) if self.is_counted else 0
        return min(burst, max(1, worth, part))

    def look_for_idle(self, now_ns: int) -> None:
        """Want to give back what was not used for a while. Call once in a lease time or more often."""
        idle_ns = now_ns - _IDLE_LEASES * self.lease_ns
        for _ in range(min(_SWEEP_MAX, len(self._sweep))):
            bucket = self._sweep.popleft()
            if bucket.active_ns > idle_ns or bucket.pending is not None:
                self._sweep.append(bucket)
            elif bucket.is_unsaid:
                self._sweep.append(bucket)
                self._wanting[bucket] = None
            elif bucket.is_done(now_ns):
                bucket.listed = False  # Nothing to look after until it is used again.
            else:
                self._sweep.append(bucket)


class LeasedBucket:
    """One limit of one tenant, as one gateway has it. Spends like a `Bucket`; see `Tokens`."""

    __slots__ = (
        "_epoch",
        "_known_level",
        "_known_us",
        "_leases",
        "_lent_ns",
        "_lent_units",
        "_line",
        "_promised",
        "_seen_ns",
        "_taken",
        "_window_ns",
        "active_ns",
        "balance",
        "burst",
        "key",
        "listed",
        "needed",
        "not_before_ns",
        "offline",
        "pending",
        "rate",
        "recall",
        "size",
    )

    def __init__(self, leases: Leases, now_ns: int, key: str, rate: int, burst: int) -> None:
        assert rate > 0, rate
        assert burst > 0, burst
        self._leases, self.key, self.rate, self.burst = leases, key, rate, burst
        self.balance = 0
        """Leased and not spent; negative is on credit."""
        self.offline = 0
        """Spent, or kept for spending, while the store was away; not told it yet."""
        self.pending: LeaseAsk | None = None
        """A question that was asked and not answered."""
        self.size = max(1, leases.lease_max(rate, burst) >> 3)
        """The amount that it keeps on lease: twice what it spent in the last lease time."""
        self.needed = 0
        """The need of the requests that wait for the next answer."""
        self.recall = False
        """Whether to ask even if nothing is wanted, so that the store learns what it may have forgotten."""
        self.active_ns = self.not_before_ns = now_ns
        self.listed = False
        # The store's last answer; before it said anything, that the bucket is full.
        self._epoch, self._known_level, self._known_us, self._seen_ns = 0, burst, 0, now_ns
        self._taken = 0
        self._window_ns = self._lent_ns = now_ns
        self._lent_units = 0
        self._line = Line()
        self._promised = 0
        """The need of refused requests that will come back, since the store's last answer."""

    # --- spending -----------------------------------------------------------------------------

    def has(self, now_ns: int, amount: int) -> bool:
        """See `TokenSource.has`."""
        self.active_ns = now_ns
        if amount <= self.balance:
            return True
        if self._leases.down_ns is not None:
            self._lend(now_ns)
            return amount <= self.balance or self._leases.config.on_store_down == "open"
        self._leases.want(self)
        if now_ns < self.not_before_ns:
            return False  # The store has just said that it is empty.
        short = amount - self.balance
        on_credit = short + self._owed_pending()
        if on_credit > self._known(now_ns):
            return False
        return on_credit <= self._leases.lease_max(self.rate, self.burst) or on_credit <= amount

    def lacks(self, now_ns: int, amount: int) -> bool:
        """See `TokenSource.lacks`: what is not on lease, while the store answers and did not just say that it
        is empty.
        """
        self.active_ns, leases = now_ns, self._leases
        if amount <= self.balance or leases.down_ns is not None or leases.is_late:
            return False
        if now_ns < self.not_before_ns:
            return False
        self.needed = min(self.burst, self.needed + amount)
        leases.need(self)
        return True

    def take(self, now_ns: int, amount: int) -> None:
        """See `TokenSource.take`."""
        assert amount >= 0, amount
        self.balance -= amount
        self._taken += amount
        leases = self._leases
        if self.balance < 0 and leases.down_ns is not None and leases.config.on_store_down == "open":
            self.offline -= self.balance
            self.balance = 0
        if self.balance < self.size >> 1:
            leases.want(self)

    def give(self, now_ns: int, amount: int) -> None:
        """See `TokenSource.give`."""
        assert amount >= 0, amount
        self.balance += amount
        if self.balance > self.size << 1:
            self._leases.want(self)

    def wait_ns(self, now_ns: int, amount: int) -> int:
        """See `TokenSource.wait_ns`.

        As far as this gateway can know: what others take meanwhile it learns later.
        """
        if self.has(now_ns, amount):
            return 0
        if self._leases.down_ns is not None:
            if self._leases.config.on_store_down == "closed":
                return max(1, int(self._leases.config.retry_s * NS_PER_S))
            units = (amount - self.balance) * UNIT * self._leases.num_gateways - self._lent_units
            return max(1, ceil_div(units, self.rate))
        short = amount - self.balance + self._owed_pending()
        units = short * UNIT - self._known_units(now_ns)
        # Everything is there, only more than a lease of it is on credit: the store's answer is due.
        return max(self._leases.lease_ns // 8, ceil_div(units, self.rate))

    def place_ns(self, now_ns: int, amount: int, ahead_max_ns: int) -> int:
        """See `TokenSource.place_ns`.

        The other gateways hand out places in the same refill: this one has its share of it.

        The tokens that the bucket already has, as far as is known, come at the pace of leases, not of refill.
        """
        leases, wait_ns = self._leases, self.wait_ns(now_ns, amount)
        length_ns = ceil_div(amount * UNIT, self.rate) * leases.num_gateways
        if wait_ns and leases.down_ns is None:
            self._promised += amount
            if self._promised - self.balance + self._owed_pending() <= self._known(now_ns):
                lease = leases.lease_max(self.rate, self.burst)
                length_ns = min(length_ns, ceil_div(amount * leases.lease_ns, 8 * lease))
        return self._line.place_ns(now_ns, wait_ns, length_ns, ahead_max_ns)

    def standing(self, now_ns: int) -> tuple[int, int]:
        """See `TokenSource.standing`: the whole bucket's, as far as this gateway knows."""
        there = self.balance - self._owed_pending()
        units = there * UNIT + self._known_units(now_ns)
        left = there if self._leases.down_ns is not None else units // UNIT
        return min(self.burst, max(0, left)), max(0, ceil_div(self.burst * UNIT - units, self.rate))

    def change(self, now_ns: int, rate: int, burst: int) -> None:
        """See `TokenSource.change`. The store learns it from the next question."""
        self._known_level = max(self._known_level + burst - self.burst, min(self._known_level, 0))
        self.rate, self.burst = rate, burst
        self._leases.want(self)

    # --- leasing ------------------------------------------------------------------------------

    @property
    def is_unsaid(self) -> bool:
        """See `Leased.is_unsaid`."""
        return bool(self.balance or self.offline)

    def is_done(self, now_ns: int) -> bool:
        """See `Leased.is_done`: full, as a new one is."""
        return not self.standing(now_ns)[1]

    def leave(self) -> None:
        """See `Leased.leave`: a bucket refills."""

    def ask(self, now_ns: int) -> LeaseAsk | None:
        """The next question, which stays the question until it is answered; None if there is nothing to
        ask.
        """
        assert self.pending is None, "one question at a time"
        self._measure(now_ns)
        # The bucket refilled while the store was away, up to full: this gateway's part of that is charged for
        # what it spent meanwhile. More never came into the bucket, so more would be charged twice.
        offline = min(self.offline, self.burst // self._leases.num_gateways)
        self.balance -= max(
            0, min(self.balance, self.offline - offline)
        )  # An amount that is not charged is not given back.
        self.offline = 0
        owed, returned, want = max(0, -self.balance), 0, 0
        needed, self.needed = self.needed, 0
        if now_ns - self.active_ns >= _IDLE_LEASES * self._leases.lease_ns:
            returned = max(0, self.balance)
        elif self.balance > 2 * self.size and not needed:
            returned = self.balance - self.size
        else:
            want = max(0, max(self.size, needed) - max(0, self.balance))
        if not (owed or returned or want or offline or self.recall):
            return None
        self.recall = False
        assert not (owed and returned), "what is owed is not there to give back"
        self.balance += owed - returned
        assert self.balance >= 0, "the amount on credit is reported to the store"
        self.pending = LeaseAsk(
            key=self.key,
            rate=self.rate,
            burst=self.burst,
            seq=self._leases.next_seq(),
            owed=owed + offline,
            returned=returned,
            want=want,
            epoch=self._epoch,
            known_level=self._known_level,
            known_us=self._known_us,
        )
        return self.pending

    def granted(self, now_ns: int, grant: LeaseGrant) -> None:
        """The store's answer to the pending question."""
        assert self.pending is not None, "an answer without a question"
        want, self.pending, self._promised = self.pending.want, None, 0
        self.needed = 0  # A request that still waits for more asks again.
        self.balance += grant.granted
        self._epoch, self._known_level, self._known_us = grant.epoch, grant.level, grant.at_us
        self._seen_ns = now_ns
        if grant.granted < want:  # Empty: others may ask too before we ask again.
            self.not_before_ns = now_ns + self._leases.lease_ns // 8
        if self.balance < self.size >> 1 and now_ns - self.active_ns < self._leases.lease_ns:
            self._leases.want(self)

    def _measure(self, now_ns: int) -> None:
        """Busy gateways lease more: twice what was spent in the last lease time, within bounds."""
        lease_ns = self._leases.lease_ns
        size_max = self._leases.lease_max(self.rate, self.burst)
        elapsed_ns = now_ns - self._window_ns
        if elapsed_ns >= lease_ns:
            spent = self._taken * lease_ns // elapsed_ns
            self._taken, self._window_ns = 0, now_ns
        else:
            spent = max(self._taken, self.size >> 1)
        self.size = min(size_max, max(1, size_max >> 3, 2 * spent))
        assert 0 < self.size <= self.burst, self.size

    def _owed_pending(self) -> int:
        return 0 if self.pending is None else self.pending.owed

    def _known_units(self, now_ns: int) -> int:
        refilled = self._known_level * UNIT + (now_ns - self._seen_ns) * self.rate
        return min(self.burst * UNIT, refilled)

    def _known(self, now_ns: int) -> int:
        """The content of the store's bucket by now if no other gateway took any."""
        return self._known_units(now_ns) // UNIT

    def _lend(self, now_ns: int) -> None:
        """The store is away: with `local-share`, this gateway's part of the refill since it went."""
        leases = self._leases
        assert leases.down_ns is not None
        if leases.config.on_store_down != "local-share":
            return
        since_ns = max(self._lent_ns, leases.down_ns)
        self._lent_ns = max(now_ns, since_ns)
        share = UNIT * leases.num_gateways
        cap = max(1, self.burst // leases.num_gateways)
        self._lent_units += self.rate * (self._lent_ns - since_ns)
        gained, self._lent_units = divmod(self._lent_units, share)
        gained = min(gained, max(0, cap - self.balance))
        assert gained >= 0, "time gives"
        self.balance += gained
        self.offline += gained
        if gained:
            leases.want(self)
