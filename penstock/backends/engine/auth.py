"""The gateway's side of the handshake with a worker that has a key (see protocol/worker_auth.py)."""

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.protocol.worker import Challenge, FromWorker, Proof, Welcome
from penstock.protocol.worker_auth import gateway_mac, is_same, worker_mac


@dataclass(slots=True, frozen=True)
class WorkerKey:
    """The key that a gateway shares with a worker, and where it takes nonces from."""

    key: bytes = field(repr=False)
    nonce: Callable[[], bytes] = field(repr=False, compare=False)


class LinkRefused(Exception):
    """The peer is not to be trusted, or does not trust us; in words for the operator."""


class Handshake:
    """One connection's. Without a key anybody who asks for none is trusted."""

    __slots__ = ("_expected", "_key", "is_over")

    def __init__(self, key: WorkerKey | None) -> None:
        self._key = key
        self._expected: bytes | None = None
        self.is_over = key is None
        """The worker may speak."""

    @property
    def is_unanswered(self) -> bool:
        """We have shown our key, and heard nothing since."""
        return self._expected is not None and not self.is_over

    def take(self, message: FromWorker) -> Proof | None:
        """One message before (or instead of) the worker's state; what to answer.

        Raises:
            Refused: one of the two has no key, or not the same.
        """
        if isinstance(message, Challenge):
            if self._key is None:
                raise LinkRefused("it wants a key: set api_key_env of the worker")
            nonce = self._key.nonce()
            self._expected = worker_mac(self._key.key, message.nonce, nonce)
            return Proof(nonce, gateway_mac(self._key.key, message.nonce, nonce))
        if not isinstance(message, Welcome) or self._expected is None:
            raise LinkRefused("it has no key, and this gateway has one for it: was it started with one?")
        if not is_same(message.mac, self._expected):
            raise LinkRefused("its key is not the one that api_key_env names")
        self.is_over = True
        return None
