"""When refused clients are to come back."""


class RetryAfterSchedule:
    """The times for refused clients to come back: one after the other, not all at once.

    By tenant, because one that hammers must not send all others away for a minute: what others have booked
    delays a tenant's next promise to twice its own wait at most.
    """

    __slots__ = ("_kept", "_until", "_wait_ns_max")

    def __init__(self, *, wait_ns_max: int, kept: int) -> None:
        """`kept`: pairs of model and tenant that are remembered; over it the oldest is forgotten."""
        self._wait_ns_max, self._kept = wait_ns_max, kept
        self._until: dict[tuple[str, str], int] = {}

    def book(self, now_ns: int, who: tuple[str, str], wait_ns: int, each_ns: int) -> int:
        """When to come back, at least `wait_ns` from now; the next one comes `each_ns` later."""
        everybody = (who[0], "\0")
        others_ns = min(self._until.get(everybody, 0), now_ns + 2 * wait_ns)
        at_ns = max(now_ns + wait_ns, self._until.get(who, 0), others_ns)
        at_ns = min(at_ns, now_ns + self._wait_ns_max)
        assert now_ns <= at_ns, "no client is asked to have come before"
        for key in (who, everybody):
            self._until.pop(key, None)  # To the end: the oldest is dropped first.
            self._until[key] = at_ns + each_ns
        while len(self._until) > self._kept:
            del self._until[next(iter(self._until))]
        return at_ns
