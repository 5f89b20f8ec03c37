"""One priority band of one model's queue: whose request is next, by what each tenant was served.

The virtual token counter of `schedule/fair_share.py`, which the engine's own queue uses too, with the same
key. The whole estimate is charged when a request is started, since it could not be taken back from a worker;
`charge` corrects it. While two tenants both wait, what they are charged differs over any window by at most
twice the largest single charge; corrections add at most what was misjudged of the work in flight.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush, heapreplace

import msgspec

from penstock.clock import NS_PER_S
from penstock.policy.terms import BandTerms
from penstock.schedule.fair_share import PROMPT_COST, UNIT, ServiceCounter, cost, share
from penstock.types import RequestId, TenantId, WorkerId

_PACE = 16
"""The mean time between two starts follows the last so many."""
_BATCH = 4
"""Starts that come together, as far as the time since the last one is concerned."""
RECENT_STARTS = 64
"""A band's part of the starts is its part of about the last so many of its queue."""
_OWED = 1 - 1e-9
"""A band that has exactly its part is owed nothing, however its sums were rounded."""
_PASSED_MAX = 8
"""Tenants that one look into the band passes over because their first request is too large."""


class Work(msgspec.Struct, eq=False, kw_only=True):
    """One request as the queue and the placement know it: a `Request`, or the booking of a hedge. The lower
    half is the queue's own.
    """

    id: RequestId
    band: str
    tenant: TenantId
    weight: float = 1.0
    arrived_ns: int
    """Of the request, not of this visit: who is tried again stands where it stood."""
    deadline_ns: int = 0
    max_wait_ns: int = 0
    """0 is the band's."""
    start_by_ns: int = 0
    """How long it may wait and still be answered as promised; 0: as long as the queue keeps it."""
    num_bytes: int = 0
    streams: int = 1
    blocks: int = 0
    """KV blocks that it needs to start."""
    prompt_tokens: int = 0
    """To compute."""
    cached_tokens: int = 0
    """Expected in a prefix cache."""
    output_tokens: int = 0
    """Expected."""
    context_tokens: int = 0
    """Of one choice: what its worker's context must hold; 0: not known."""
    keys: object | None = None
    """Its prompt's block keys (`kv.prompt_keys.PromptKeys`), for the placement; None: not known."""
    session: str = ""
    """The tenant whose earlier requests it may share KV with; empty: none."""
    adapter: str = ""
    needs: frozenset[str] = frozenset()
    """Capabilities that its worker must have (`types.Capability`)."""
    is_strict: bool = False
    """It is given to no worker that its breaker leaves alone: another model may answer it."""
    goes_on: bool = False
    """It was begun on a worker that is lost: only one that continues behind its last token can have it."""
    identity: str = ""
    """Of the worker that it was started on last: where it continues must be the same, or its tokens would be
    another model's; empty: a foreign engine's, which any worker of the model may continue."""

    takes_row: bool = False
    """Its tenant ran nothing else of the model when it was started: a worker may be given it beyond its
    slots, and our engine lets it have a row of another tenant."""

    number: int = 0
    """By order of the first push."""
    level: int = -1
    """Index of its band."""
    waiting: bool = False
    aside: bool = False
    skips: int = 0
    """Requests that were started while it waited aside."""
    aside_ns: int = 0
    queued_ns: int = 0
    expires_ns: int = 0
    priority: int = 0
    """The key that it is sorted by within its tenant: smaller goes earlier. Between tenants it counts for
    nothing."""
    order_ns: int = 0
    """The key that those of one priority are sorted by: arrival or deadline."""
    charged: int = 0
    """The amount that its tenant's counter holds for it."""
    owed: bool = False
    """It was started because its band was owed a start."""
    running: bool = False
    hold_ns: int = 0
    """Until when it waits for `hold_for` by the placement's choice, although others have room; 0: it was
    never held."""
    hold_for: WorkerId = WorkerId("")
    matched_tokens: int = 0
    """Of the prompt, what the placement expects in the cache of the worker that it chose."""


Place = tuple[int, int, int, Work]
"""Of a request in the line of its tenant: priority, arrival or deadline, number."""


class TenantQueue(ServiceCounter):
    """One tenant's requests in the band, and its counter."""

    __slots__ = (
        "_waiting",
        "entry",
        "heap",
        "num_bytes",
        "num_running",
        "num_waiting",
        "number",
        "received",
        "tenant",
    )

    def __init__(self, tenant: TenantId, number: int, waiting: Mapping[int, Work]) -> None:
        """`waiting` is what waits in the band, by number and by reference."""
        super().__init__()
        self.tenant, self._waiting = tenant, waiting
        self.number = number
        """Breaks ties between equal counters: who was seen first."""
        self.heap: list[Place] = []
        """By order; entries of requests that left stay until they surface or are too many."""
        self.num_waiting = self.num_bytes = 0
        self.num_running = 0
        """Streams."""
        self.received = 0
        """The charges of other gateway processes, counted here since it was last idle."""
        self.entry = 0
        """Version of its entry in the band's heap; others are stale."""

    def head(self) -> Work | None:
        """The first that waits in line, not counting those that are set aside."""
        heap = self.heap
        while heap:
            _, _, number, work = heap[0]
            if self._waiting.get(number) is work and not work.aside:  # `is_in_line`, without a call.
                return work
            heappop(heap)
        return None

    def is_in_line(self, entry: Place) -> bool:
        """Whether an entry of the heap still counts: its request may have left, and wait elsewhere by now."""
        _, _, number, work = entry
        return self._waiting.get(number) is work and not work.aside

    def add(self, work: Work) -> None:
        """Put in order."""
        heappush(self.heap, (work.priority, work.order_ns, work.number, work))

    def compact(self) -> None:
        """Drop what left, when it is most of the heap: cancels cannot grow it."""
        self.heap = [entry for entry in self.heap if self.is_in_line(entry)]
        heapify(self.heap)


class Band:
    """The tenants of one band, smallest counter first. Every operation is O(log n), amortised."""

    __slots__ = (
        "_gap_ns", "_heap", "_last", "_lines", "_next_line", "aside", "config", "floor", "level", "line",
        "num_active", "num_bytes", "num_running", "num_tenants", "recent", "served_ns", "starvation_ns",
        "timeout_ns", "unreported", "waiting",
    )  # fmt: skip

    def __init__(self, config: BandTerms, level: int) -> None:
        self.config, self.level = config, level
        self.timeout_ns = int(config.timeout_s * NS_PER_S)
        self.starvation_ns = int(config.starvation_s * NS_PER_S)
        self.floor = self.floor_of(0)
        """In streams; follows the model's slots if it is a share."""
        self.waiting: OrderedDict[int, Work] = OrderedDict()
        """By number, oldest visit first."""
        self.aside: list[Work] = []
        """Too large for the room there was; tried first."""
        self.num_bytes = self.num_running = 0
        self.recent = 0.0
        """Of the last starts of the queue, those of this band; older ones count less."""
        self._gap_ns = 0
        self.num_active = 0
        """Tenants with work that waits or runs."""
        self.num_tenants = 0
        """Those with something waiting."""
        self.served_ns = 0
        """When it last started something, or began to wait."""
        self.unreported: dict[TenantId, int] | None = None
        """The charges of each tenant since other gateway processes were informed; None: there are none."""
        self._lines: dict[TenantId, TenantQueue] = {}
        self.line = self._lines.get
        """A tenant's line, if it is known."""
        self._heap: list[tuple[int, int, int, int, TenantQueue]] = []
        self._last = 0
        """Counter of the tenant that left the band last, for those that come when none waits."""
        self._next_line = 0

    def floor_of(self, slots: int) -> int:
        """Streams that it may always run where the model's workers may be given so many."""
        floor = self.config.floor
        return int(floor) if floor >= 1 else int(floor * slots)

    def is_owed(self, recent: float) -> bool:
        """Whether it has had less than its guaranteed part of the `recent` starts of all bands.

        Its part of the slots alone would guarantee nothing where workers have rows enough, but no time for
        prompts.
        """
        assert recent >= self.recent, "its own starts are of all bands' starts"
        return self.config.floor < 1 and self.recent < self.config.floor * recent * _OWED

    def come_back(self, recent: float) -> None:
        """It begins to wait: for what started while it did not it is owed nothing."""
        if self.config.floor < 1:
            others = recent - self.recent
            assert others >= 0, "its own starts are of all bands' starts"
            self.recent = max(self.recent, others * self.config.floor / (1 - self.config.floor))

    def push(self, now_ns: int, work: Work, *, kept_max: int, lift: bool) -> None:
        """Let a request wait, at the place that its arrival or deadline gives it; `lift` a tenant that comes
        back.
        """
        line = self._lines.get(work.tenant)
        if line is None:
            self._forget_idle(kept_max)
            line = self._lines[work.tenant] = TenantQueue(work.tenant, self._next_line, self.waiting)
            self._next_line += 1
        if not self.waiting:
            self.served_ns = now_ns
        if lift and not line.num_waiting:
            first = self._first()
            line.lift(self._last if first is None else first[0].served)
        if not (line.num_waiting or line.num_running):
            line.received = 0
        before = line.head()
        line.add(work)
        self.num_active += not (line.num_waiting or line.num_running)
        self.num_tenants += not line.num_waiting
        line.num_waiting += 1
        line.num_bytes += work.num_bytes
        self.num_bytes += work.num_bytes
        self.waiting[work.number] = work
        work.waiting = True
        if before is not line.head():
            self._enter(line)

    def take(
        self, now_ns: int, fits: Callable[[Work], bool], aside_max: int, share: float | None = None
    ) -> Work | None:
        """The next request that fits, no longer waiting but not yet charged; None if none of those looked at
        fits.

        One that does not fit is set aside, and the next one is tried: up to `aside_max`, then its tenant is
        passed over. With a `share` also tenants are that run already and would run more streams than that,
        times their weight.
        """
        for work in self.aside:
            if fits(work):
                self.leave(work)
                return work
        passed: list[TenantQueue] = []
        found: Work | None = None
        while len(passed) < _PASSED_MAX and (first := self._first()) is not None:
            line, work = first
            if (
                share is not None
                and line.num_running
                and line.num_running + work.streams > share * work.weight
            ):
                heappop(self._heap)
                passed.append(line)
            elif fits(work):
                heappop(line.heap)
                self.leave(work)
                found = work
                break
            elif len(self.aside) < aside_max:
                heappop(line.heap)
                work.aside, work.aside_ns = True, now_ns
                self.aside.append(work)
            else:
                heappop(self._heap)
                passed.append(line)
        for line in passed:
            self._enter(line)
        return found

    def leave(self, work: Work) -> None:
        """Take a waiting request out."""
        assert work.waiting, f"{work.id} does not wait"
        line = self._lines[work.tenant]
        line.num_waiting -= 1
        self.num_active -= not (line.num_waiting or line.num_running)
        line.num_bytes -= work.num_bytes
        self.num_bytes -= work.num_bytes
        del self.waiting[work.number]
        work.waiting = False
        if work.aside:
            work.aside = False
            self.aside.remove(work)
        if len(line.heap) > 2 * line.num_waiting + 16:
            line.compact()
        if not line.num_waiting:
            self.num_tenants -= 1
            self._last = line.served

    def ahead_of(self, tenant: TenantId, weight: float) -> int:
        """Requests that are served before one that this tenant adds to its end. O(1).

        Under fair sharing: the tenant's own, and while those are served as many of each other tenant's as its
        weight leaves them (theirs are taken for 1, and all requests for equal). A tenant that floods the
        queue is mostly ahead of itself.
        """
        if not self.waiting:
            return 0
        line = self._lines.get(tenant)
        own = line.num_waiting if line is not None else 0
        others = min(len(self.waiting) - own, round((own + 1) * (self.num_tenants - (own > 0)) / weight))
        return own + others

    def gap_ns(self, now_ns: int) -> int:
        """The mean time between two starts while something waits, as it would be if one started now.

        The time since the last start counts as one gap of several: workers start requests in batches, a
        step's worth at once.
        """
        more_ns = now_ns - self.served_ns - self._gap_ns if self.waiting else 0
        return self._gap_ns + more_ns // _BATCH if more_ns > 0 else self._gap_ns

    def newest(self) -> Work:
        """The last of those that wait; there must be one."""
        return self.waiting[next(reversed(self.waiting))]

    def start(self, now_ns: int, work: Work) -> None:
        """Charge the estimate of a request that was taken, and count it as running."""
        line = self._lines[work.tenant]
        self.num_active += not (line.num_waiting or line.num_running)
        line.num_running += work.streams
        self.num_running += work.streams
        # It waited since `served_ns` at the earliest: it was taken from the queue just now.
        self._gap_ns += (now_ns - self.served_ns - self._gap_ns) // (_PACE if self._gap_ns else 1)
        self.served_ns = now_ns
        work.running = True
        self.charge(work, cost(work.prompt_tokens, work.cached_tokens, work.output_tokens))
        if not line.num_waiting:
            self._last = line.served

    def end(self, work: Work) -> None:
        """It runs no more."""
        assert work.running, f"{work.id} does not run"
        work.running = False
        line = self._lines[work.tenant]
        line.num_running -= work.streams
        self.num_running -= work.streams
        self.num_active -= not (line.num_waiting or line.num_running)

    def charge(self, work: Work, tenths: int) -> None:
        """Let the tenant's counter hold `tenths` for this request, in place of what it held."""
        charge = share(tenths, work.weight)
        if charge == work.charged:
            return
        line = self._lines[work.tenant]
        line.served += charge - work.charged
        if self.unreported is not None:
            self.unreported[work.tenant] = self.unreported.get(work.tenant, 0) + charge - work.charged
        if charge < work.charged and line.num_waiting and line.head() is not None:
            self._enter(line)  # Only what grows may be found late.
        work.charged = charge

    def served_elsewhere(self, tenant: TenantId, units: int) -> None:
        """Another gateway process has charged the tenant so much. One that is idle here begins level with
        those that wait, whatever it had elsewhere; so a charge that was not counted is not corrected either.
        """
        line = self._lines.get(tenant)
        if line is None or not (line.num_waiting or line.num_running):
            return
        units = max(units, -line.received)
        line.received += units
        line.served += units
        assert line.received >= 0, "no more is taken back than was counted"
        if units < 0 and line.num_waiting and line.head() is not None:
            self._enter(line)

    def served(self, tenant: TenantId) -> float:
        """The tenant's counter, in computed prompt tokens."""
        line = self._lines.get(tenant)
        return 0.0 if line is None else line.served / (PROMPT_COST * UNIT)

    def _enter(self, line: TenantQueue) -> None:
        """Put the line where it belongs now; its other entry, if it has one, is stale from here."""
        head = line.head()
        assert head is not None, "only lines with a head are in the heap"
        line.entry += 1
        if len(self._heap) > 2 * len(self._lines) + 16:
            self._heap = [entry for entry in self._heap if entry[3] == entry[4].entry]
            heapify(self._heap)
        heappush(self._heap, (line.served, head.order_ns, line.number, line.entry, line))

    def _first(self) -> tuple[TenantQueue, Work] | None:
        """The line with the smallest counter, and its head; ties go to the earlier head."""
        heap = self._heap
        while heap:
            served, order_ns, number, version, line = heap[0]
            head = line.head() if version == line.entry else None
            if head is None:
                heappop(heap)
            elif served == line.served and order_ns == head.order_ns:
                return line, head
            else:
                heapreplace(heap, (line.served, head.order_ns, number, version, line))
        return None

    def _forget_idle(self, kept_max: int) -> None:
        """Bound the counters. The least served go: coming back would lift them anyway."""
        if len(self._lines) < kept_max:
            return
        idle = [line for line in self._lines.values() if not line.num_waiting and not line.num_running]
        idle.sort(key=lambda line: (line.served, line.number))
        for line in idle[: len(idle) // 2 + 1]:
            del self._lines[line.tenant]

    def check_invariants(self) -> None:
        """Assert that all counts agree with what waits. O(n): for tests."""
        waiting = list(self.waiting.values())
        assert all(work.waiting and work.level == self.level for work in waiting)
        assert self.num_bytes == sum(work.num_bytes for work in waiting)
        assert self.num_tenants == len({work.tenant for work in waiting})
        assert {id(work) for work in self.aside} == {id(work) for work in waiting if work.aside}
        active = sum(1 for line in self._lines.values() if line.num_waiting or line.num_running)
        assert self.num_active == active
        entries = {id(entry[4]) for entry in self._heap if entry[3] == entry[4].entry}
        for line in self._lines.values():
            own = [work for work in waiting if work.tenant == line.tenant]
            assert line.num_waiting == len(own), line.tenant
            assert line.num_bytes == sum(work.num_bytes for work in own)
            in_line = {id(work) for work in own if not work.aside}
            assert in_line == {id(entry[3]) for entry in line.heap if line.is_in_line(entry)}
            assert not in_line or id(line) in entries, f"{line.tenant} waits and would not be found"
