"""The requests that wait for one model: bands, and in each the tenants by fair share (band.py).

Which band goes next, when a worker has room:

1. one that has waited its `starvation_s` since it last started something, most overdue first: one request;
2. one that is owed a start: its part of the last ones is below its floor, in their order;
3. one that runs fewer streams than its floor, in their order;
4. the rest in their order.

So a higher band goes before a lower one, but can neither take its floor nor keep it from moving. A start that
is owed has the engine priority of the highest band that has such a floor: else the engine's own queue would
put it behind all that those start later. Nothing is held free: room that no band under its floor wants goes
to the others. A request too large for the room that there is is passed over at most `skips_max` times or
`skip_s`; then `overdue` names it, and a worker should be kept free for it.

The queue knows no workers: `fits` says to `pop` which could start now.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.flow import BandConfig, QueueConfig
from penstock.policy.queueing.band import RECENT_STARTS, Band, Work
from penstock.policy.terms import BandTerms, band_terms, queue_terms
from penstock.types import TenantId


class Full(msgspec.Struct, frozen=True):
    """Why a request may not wait: the bound that it would break."""

    bound: str
    """"tenant", "band" or "queue"."""
    unit: str
    """"requests" or "bytes"."""
    limit: int


def ordered_bands(bands: Sequence[BandConfig]) -> list[BandTerms]:
    """First to last; equal orders as they are written."""
    return sorted(map(band_terms, bands), key=lambda band: band.order)


def default_level(bands: Sequence[BandConfig]) -> int:
    """Where requests of a band go that is not configured: the last that has order 0 or less, else the
    first.
    """
    return max((i for i, band in enumerate(bands) if band.order <= 0), default=0)


class FairQueue:
    """The bounded queue of one model. All times are handed in; the same calls give the same order."""

    __slots__ = (
        "_config", "_default", "_entered", "_expiries", "_levels", "_number", "_order_owed", "_pushes",
        "_shares", "_skip_ns", "_slots", "bands", "num_bytes", "num_waiting",
    )  # fmt: skip

    def __init__(self, config: QueueConfig) -> None:
        config = self._config = queue_terms(config)
        ordered = ordered_bands(config.bands)
        self.bands = [Band(band, level) for level, band in enumerate(ordered)]
        self._levels = {band.name: level for level, band in enumerate(ordered)}
        share = config.tenant_share
        self._shares = [
            (max(1, int(share * each.requests_max)), int(share * each.bytes_max)) for each in ordered
        ]
        """By band, the requests and bytes that one tenant may have waiting there."""
        self._default = default_level(ordered)
        orders = [band.order for band in ordered if 0 < band.floor < 1]
        self._order_owed = min(orders, default=ordered[-1].order)
        self._skip_ns = int(config.skip_s * NS_PER_S)
        self._slots = 0
        self._number = self._pushes = 0
        self._expiries: list[tuple[int, int, Work]] = []
        self._entered: list[Work] = []
        self.num_waiting = self.num_bytes = 0

    def band_of(self, work: Work) -> Band:
        """The band that a request waits or runs in."""
        return self.bands[work.level]

    def order_of(self, work: Work) -> int:
        """The order in the engine's own queue, of a request that was started."""
        order = self.bands[work.level].config.order
        return min(order, self._order_owed) if work.owed else order

    def level_of(self, name: str) -> int:
        """The index of a band; of the default one if there is none of that name."""
        return self._levels.get(name, self._default)

    def waits(self, work: Work) -> bool:
        """Whether it waits here; it may have left, and wait for another model."""
        return work.waiting and self.bands[work.level].waiting.get(work.number) is work

    def would_refuse(self, level: int, tenant: TenantId, num_bytes: int) -> bool:
        """Whether `push` would say no. Changes nothing."""
        own = self._own_bound(self.bands[level], tenant, num_bytes)
        return own is not None or isinstance(self._space(level, num_bytes), Full)

    def set_slots(self, slots: int) -> None:
        """How many streams the model's workers may be given in all: what floors that are shares are taken
        of.
        """
        if slots != self._slots:
            self._slots = slots
            for band in self.bands:
                band.floor = band.floor_of(slots)

    def push(self, now_ns: int, work: Work) -> Full | Sequence[Work]:
        """Let a request wait, or say which bound it would break; nothing changed then.

        Returns those that were dropped for it: none, or the newest ones of lower bands.
        """
        level = self.level_of(work.band)
        band = self.bands[level]
        if (full := self._own_bound(band, work.tenant, work.num_bytes)) is not None:
            return full
        space = self._space(level, work.num_bytes)
        if isinstance(space, Full):
            return space
        dropped = self._drop_newest(level, *space) if space is not None else ()
        self._number += 1
        work.number, work.level, work.queued_ns = self._number, level, now_ns
        work.expires_ns = self._until(work, now_ns)
        first_come = band.config.discipline == "fifo"
        work.order_ns = work.arrived_ns if first_come else work.deadline_ns or work.expires_ns
        self._enter(now_ns, work, lift=True)
        return dropped

    def requeue(self, now_ns: int, work: Work, *, has_begun: bool = False) -> None:
        """Put back what was started, where its arrival belongs. Never refused: it was accepted.

        An attempt without output is charged nothing, and its wait ends when it would have, but for its
        promise: that
        it was started once is no reason to refuse it for being late. A request that has begun to answer is
        charged for that at its end, and waits again.
        """
        band = self.bands[work.level]
        work.start_by_ns = 0
        if has_begun:
            work.queued_ns, work.expires_ns = now_ns, now_ns + band.timeout_ns
        else:
            work.expires_ns = self._until(work, work.queued_ns)
        band.end(work)
        band.charge(work, 0)
        self._enter(now_ns, work, lift=False)  # It did not idle.
        band.waiting.move_to_end(work.number, last=False)

    def pop(
        self,
        now_ns: int,
        fits: Callable[[Work], bool],
        *,
        above: int | None = None,
        share: float | None = None,
        sets_aside: bool = True,
    ) -> Work | None:
        """Start the next request that `fits` now, charged with its estimate; None if there is none.

        `above` looks only at bands before that level. With a `share`, tenants that run more streams than that
        (times their weight) are passed over, except in protected bands. With `sets_aside`, what does not fit
        counts as too large for the room there is.
        """
        waiting = [band for band in self.bands if band.waiting]
        for band in waiting if len(waiting) < 2 else self._in_turn(now_ns, waiting):
            if above is not None and band.level >= above:
                continue
            own_share = None if band.config.protected else share
            aside_max = self._config.aside_max if sets_aside else 0
            work = band.take(now_ns, fits, aside_max, own_share)
            if work is not None:
                self._started(now_ns, band, work)
                return work
        return None

    def start(self, now_ns: int, work: Work) -> None:
        """Start one that is `overdue`, out of turn: the worker that was kept free for it has room."""
        assert work.aside, f"{work.id} waits in its line"
        band = self.bands[work.level]
        band.leave(work)
        self._started(now_ns, band, work)

    def remove(self, work: Work) -> None:
        """Take out one that waits: its client left, or its time is over."""
        self.bands[work.level].leave(work)
        self.num_waiting -= 1
        self.num_bytes -= work.num_bytes
        assert self.num_waiting >= 0 <= self.num_bytes, "more left than came"

    def take_unreported(self) -> list[tuple[int, TenantId, int]]:
        """By band's level and tenant, what was charged since the last call; from the first call on."""
        found = [(band.level, *each) for band in self.bands for each in (band.unreported or {}).items()]
        for band in self.bands:
            band.unreported = {}
        return found

    def served_elsewhere(self, level: int, tenant: TenantId, units: int) -> None:
        """Count what another gateway process has charged a tenant of a band."""
        if 0 <= level < len(self.bands):
            self.bands[level].served_elsewhere(tenant, units)

    def charge(self, work: Work, tenths: int) -> None:
        """Correct what a started request counts for its tenant: `band.cost` of what is known by now."""
        self.bands[work.level].charge(work, tenths)

    def end(self, work: Work) -> None:
        """A started request runs no more."""
        self.bands[work.level].end(work)

    def expired(self, now_ns: int) -> Work | None:
        """One whose wait is over, still waiting; None if there is none."""
        while self._expiries and self._expiries[0][0] <= now_ns:
            work = self._expiries[0][2]
            if work.expires_ns <= now_ns and self.waits(work):
                return work
            heappop(self._expiries)
        return None

    def wait_on(self, work: Work, start_by_ns: int = 0) -> None:
        """Let one that is late wait for so long in all; 0: as long as the queue keeps it."""
        work.start_by_ns = start_by_ns
        work.expires_ns = self._until(work, work.queued_ns)
        self._pushes += 1
        heappush(self._expiries, (work.expires_ns, self._pushes, work))

    def keep(self, work: Work, until_ns: int) -> None:
        """Let one whose wait is over wait until then, whatever its band says."""
        work.expires_ns = until_ns
        self._pushes += 1
        heappush(self._expiries, (until_ns, self._pushes, work))

    def next_ns(self) -> int | None:
        """When the next wait is over."""
        while self._expiries and not self.waits(self._expiries[0][2]):
            heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def overdue(self, now_ns: int) -> Work | None:
        """A request that was passed over often or long enough: keep a worker free for it.

        Longest aside first.
        """
        found: Work | None = None
        for band in self.bands:
            for work in band.aside:
                if work.hold_ns > now_ns:
                    continue
                late = work.skips >= self._config.skips_max or now_ns - work.aside_ns >= self._skip_ns
                if late and (found is None or (work.aside_ns, work.number) < (found.aside_ns, found.number)):
                    found = work
        return found

    def next_overdue_ns(self) -> int | None:
        """When the next request that is aside has been so for too long."""
        times = [work.aside_ns for band in self.bands for work in band.aside]
        return min(times) + self._skip_ns if times else None

    def take_entered(self) -> Sequence[Work]:
        """Requests that have begun to wait, or wait again, since this was last asked; some may have left."""
        entered, self._entered = self._entered, []
        return entered

    def served(self, band: str, tenant: TenantId) -> float:
        """A tenant's counter, in computed prompt tokens."""
        return self.bands[self._levels[band]].served(tenant)

    def __len__(self) -> int:
        """How many wait."""
        return self.num_waiting

    def _until(self, work: Work, since_ns: int) -> int:
        """When the wait of a request that waits since then is over."""
        timeout_ns = self.bands[work.level].timeout_ns
        return since_ns + min(work.start_by_ns or timeout_ns, work.max_wait_ns or timeout_ns, timeout_ns)

    def _enter(self, now_ns: int, work: Work, *, lift: bool) -> None:
        band = self.bands[work.level]
        if not band.waiting:
            band.come_back(self._recent())
        band.push(now_ns, work, kept_max=self._config.tenants_kept, lift=lift)
        assert work.expires_ns >= work.queued_ns, f"{work.id} would wait for no time"
        self.num_waiting += 1
        self.num_bytes += work.num_bytes
        self._entered.append(work)
        if len(self._expiries) > 2 * self.num_waiting + 64:
            self._expiries = [entry for entry in self._expiries if self.waits(entry[2])]
            heapify(self._expiries)
        self._pushes += 1  # A request that is tried again may have two entries: they must differ.
        heappush(self._expiries, (work.expires_ns, self._pushes, work))

    def _started(self, now_ns: int, band: Band, work: Work) -> None:
        self.num_waiting -= 1
        self.num_bytes -= work.num_bytes
        assert self.num_waiting >= 0 <= self.num_bytes, "more started than came"
        work.owed = band.is_owed(self._recent())
        band.start(now_ns, work)
        for each in self.bands:
            each.recent += (each is band) - each.recent / RECENT_STARTS  # Older starts count less.
            if each.aside and each.level <= band.level:
                # A request that lets a higher band start first is not passed over for its size.
                for aside in each.aside:
                    aside.skips += aside.hold_ns <= now_ns  # One that is held waits by choice.

    def _in_turn(self, now_ns: int, waiting: Sequence[Band]) -> Sequence[Band]:
        """Bands with work, by who goes next."""
        starved: list[tuple[int, int, Band]] = []
        owed: list[Band] = []
        under: list[Band] = []
        rest: list[Band] = []
        recent = self._recent()
        for band in waiting:
            late_ns = now_ns - band.served_ns - band.starvation_ns
            if late_ns >= 0:
                starved.append((-late_ns, band.level, band))
            elif band.is_owed(recent):
                owed.append(band)
            elif band.num_running < band.floor:
                under.append(band)
            else:
                rest.append(band)
        starved.sort()
        turn = [*(entry[2] for entry in starved), *owed, *under, *rest]
        assert len(turn) == len(waiting), "every band with work has its turn"
        return turn

    def _recent(self) -> float:
        return sum([band.recent for band in self.bands])

    def _own_bound(self, band: Band, tenant: TenantId, num_bytes: int) -> Full | None:
        """The bound of the band or of the tenant's share of it that one more, of so many bytes, would
        break.
        """
        config, line = band.config, band.line(tenant)
        if len(band.waiting) >= config.requests_max:
            return Full("band", "requests", config.requests_max)
        if band.num_bytes + num_bytes > config.bytes_max:
            return Full("band", "bytes", config.bytes_max)
        if line is None or not line.num_waiting:
            return None  # A tenant may always have one request there.
        requests_max, bytes_max = self._shares[band.level]
        if line.num_waiting >= requests_max:
            return Full("tenant", "requests", requests_max)
        if line.num_bytes and line.num_bytes + num_bytes > bytes_max:
            return Full("tenant", "bytes", max(num_bytes, bytes_max))
        return None

    def _space(self, level: int, num_bytes: int) -> Full | tuple[int, int] | None:
        """Keep the bound of all bands together: None if there is room, else the requests and bytes to drop,
        if that may be.
        """
        config = self._config
        requests = self.num_waiting + 1 - config.requests_max
        num_bytes = self.num_bytes + num_bytes - config.bytes_max
        if requests <= 0 and num_bytes <= 0:
            return None
        lower = self.bands[level + 1 :] if config.when_full == "evict" else []
        enough = sum(len(band.waiting) for band in lower) >= requests
        if enough and sum(band.num_bytes for band in lower) >= num_bytes:
            return requests, num_bytes
        if requests > 0:
            return Full("queue", "requests", config.requests_max)
        return Full("queue", "bytes", config.bytes_max)

    def _drop_newest(self, level: int, requests: int, num_bytes: int) -> Sequence[Work]:
        """The newest of the lowest band, until so much is free."""
        assert requests > 0 or num_bytes > 0, "nothing is dropped while there is room"
        dropped: list[Work] = []
        while requests > 0 or num_bytes > 0:
            victim = next(band for band in reversed(self.bands[level + 1 :]) if band.waiting).newest()
            self.remove(victim)
            dropped.append(victim)
            requests, num_bytes = requests - 1, num_bytes - victim.num_bytes
        return dropped

    def check_invariants(self) -> None:
        """Assert that all counts agree and all bounds hold. O(n): for tests."""
        for band in self.bands:
            band.check_invariants()
        assert self.num_waiting == sum(len(band.waiting) for band in self.bands)
        assert self.num_bytes == sum(band.num_bytes for band in self.bands)
        known = {id(entry[2]) for entry in self._expiries}
        for band in self.bands:
            assert all(id(work) in known for work in band.waiting.values()), "its wait would never end"
