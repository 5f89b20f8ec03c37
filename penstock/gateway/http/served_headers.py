"""Which model answered, and why, as the client is told: in headers, and once more in a stream's last usage
chunk.

x-penstock-model: small                     the model that answers; the body's `model` says the same
x-penstock-requested-model: large           what was asked for, if that is another one
x-penstock-downgrade: slo                   why: queue_depth, slo, budget, context, complexity, unavailable,
                                            failure, timeout, breaker, busy
x-penstock-route: complexity=0.31 (code .20, question .11)      how `model: "auto"` was decided
x-penstock-queue-ms: 12                     how long it waited here for a worker
"""

from dataclasses import dataclass
from urllib.parse import quote

import msgspec

from penstock.clock import NS_PER_MS
from penstock.policy.admit_facts import DowngradeReason

Headers = tuple[tuple[bytes, bytes], ...]
_SAFE = "/:@!$&'()*+,;=~"


class _Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the last usage chunk has under `penstock`."""

    model: str
    requested_model: str = ""
    downgrade: str = ""
    route: str = ""
    queue_ms: int | None = None


@dataclass(slots=True, kw_only=True)
class Served:
    """Who answers a request.

    Filled in as it becomes known; read when the response begins, and when a stream ends.
    """

    model: str
    requested: str
    downgrade: DowngradeReason | None = None
    """Why another model answers than was asked for; None if none does."""
    route: str = ""
    """How it was chosen, if it was: `Choice.explain()`."""
    queue_ns: int | None = None
    """From its arrival to its (last) start on a worker; None before."""

    def headers(self) -> Headers:
        """The response's headers, as far as the facts are known."""
        found = [(b"x-penstock-model", _value(self.model))]
        if self.requested != self.model:
            found.append((b"x-penstock-requested-model", _value(self.requested)))
        if self.downgrade is not None:
            found.append((b"x-penstock-downgrade", self.downgrade.encode()))
        if self.route:
            found.append((b"x-penstock-route", self.route.encode()))
        if self.queue_ns is not None:
            found.append((b"x-penstock-queue-ms", b"%d" % self._queue_ms()))
        return tuple(found)

    def facts(self) -> bytes:
        """The same as JSON, for clients that do not see headers."""
        return msgspec.json.encode(
            _Facts(
                model=self.model,
                requested_model=self.requested if self.requested != self.model else "",
                downgrade=self.downgrade or "",
                route=self.route,
                queue_ms=self._queue_ms() if self.queue_ns is not None else None,
            )
        )

    def _queue_ms(self) -> int:
        return round((self.queue_ns or 0) / NS_PER_MS)


def _value(name: str) -> bytes:
    """A model's name in a header: as it is if it is ASCII, else percent-encoded (RFC 3986)."""
    return (name if name.isascii() else quote(name, safe=_SAFE)).encode()
