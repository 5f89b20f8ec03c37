"""Where a worker listens: `unix:/path/to.sock` on this machine, `tcp:host:port` across machines.

Only the notation lives here; `engine/serve_socket.py` listens and `backends/engine/backend.py` connects.
Traffic over TCP is neither encrypted nor signed, so the port belongs on a private network; who may connect is
a matter of a key (below).

A launcher's message to a new engine worker: one line of JSON on the worker's standard input.

Standard input, because it holds a secret: arguments and environments can be read by other processes.
The worker keeps reading afterwards; the end of the pipe means that its parent is gone.

How a worker and a gateway show each other that they have the same key, without sending it.

    worker                                gateway
      |  Challenge(nonce) -->                |   first word on every connection of a worker that has a key
      |       <-- Proof(nonce, mac)          |   HMAC-SHA256 over both nonces and the side's name (RFC 2104)
      |  Welcome(mac) -->                    |   then the worker's state, as always

Nonces are fresh on both sides, so nothing that was overheard is of use again. The rest is neither encrypted
nor signed: the port belongs on a private network or into a tunnel. The key keeps out programs that can reach
the port and should not. `Doorkeeper` is the side that accepts a connection, without its socket.
"""

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from penstock.config.engine_settings import EngineSettings
from penstock.protocol.worker import (
    Challenge,
    FrameDecoder,
    Proof,
    ProtocolError,
    ToWorker,
    Welcome,
    decode_to_worker,
    encode,
)

UNIX_PATH_BYTES_MAX = 107
"""The longest path that fits a Linux `sockaddr_un` with its final zero."""


@dataclass(slots=True, frozen=True)
class UnixAddress:
    """A socket in the file system; the directory's permissions say who may connect."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(slots=True, frozen=True)
class TcpAddress:
    """A port on a host (name or address; IPv6 in brackets)."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Read the notation that `str(address)` writes.

    Raises:
        ValueError: it is neither form, or a Unix path is too long for the kernel.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        if len(rest.encode()) > UNIX_PATH_BYTES_MAX:
            raise ValueError(f"the socket path {rest!r} is longer than {UNIX_PATH_BYTES_MAX} bytes")
        return UnixAddress(rest)
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdecimal() and int(port) <= 65_535:
        return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))
    raise ValueError(f"{text!r} is not a worker address: unix:/path or tcp:host:port")


REAL_RUNNER = "penstock.engine.pooling.load:build_any_runner"


class WorkerLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that one worker process needs to start."""

    model_path: str
    """A model directory on this machine; names and hub ids are resolved before."""
    model_name: str
    """The name that clients use; told back in `ModelInfo.model`."""
    address: str
    """Where to listen (see protocol/address.py)."""
    shares_port: bool = False
    """The launcher keeps the port of a TCP address (fleet/launchers/process.py), so it is bound with
    SO_REUSEPORT."""
    hash_key: bytes
    """Key of the block-hash chain: a guess at a tenant's prompt cannot be tested without it."""
    key: bytes = b""
    """The secret that gateways must prove to have (protocol/address.py); empty: any program that can connect
    is one."""
    engine: EngineSettings = EngineSettings()
    runner: str = REAL_RUNNER
    """`module:factory` of what computes. Tests name their own, so that a process starts at once."""
    asleep: bool = False
    """Look at the model only, and load it when it is woken."""


NONCE_BYTES = 32
KEY_BYTES_MIN = 16
PROOF_BYTES_MAX = 1024
"""A connection that has sent so much without a proof is closed."""
_GATEWAY, _WORKER, _HASHES, _LINK = b"penstock gateway", b"penstock worker", b"penstock kv", b"penstock link"


def gateway_mac(key: bytes, worker_nonce: bytes, gateway_nonce: bytes) -> bytes:
    """The proof of a gateway."""
    return _mac(key, _GATEWAY, worker_nonce, gateway_nonce)


def worker_mac(key: bytes, worker_nonce: bytes, gateway_nonce: bytes) -> bytes:
    """The proof of a worker."""
    return _mac(key, _WORKER, worker_nonce, gateway_nonce)


def is_same(mac: bytes, expected: bytes) -> bool:
    """Compared in a time that tells nothing."""
    return hmac.compare_digest(mac, expected)


def hash_key_of(key: bytes) -> bytes:
    """The key of the block-hash chain for workers that share `key`: they name equal blocks alike."""
    return hmac.digest(key, _HASHES, hashlib.sha256)


def link_key_of(hash_key: bytes) -> bytes:
    """The key of workers that are launched on TCP ports: who launched them and its gateway processes know
    `hash_key`. In letters, so that it fits an environment variable.
    """
    return hmac.new(hash_key, _LINK, hashlib.sha256).hexdigest().encode()


def _mac(key: bytes, side: bytes, worker_nonce: bytes, gateway_nonce: bytes) -> bytes:
    return hmac.digest(key, side + worker_nonce + gateway_nonce, hashlib.sha256)


class Doorkeeper:
    """One connection of a worker, or of a cell, as it accepts it: bytes in, messages of who has the key out.

    Without a key everybody is let in.
    """

    __slots__ = ("_decoder", "_key", "_nonce", "_num_bytes", "is_proven")

    def __init__(self, key: bytes, nonce: bytes) -> None:
        """`nonce`: fresh, of `NONCE_BYTES`."""
        assert len(nonce) == NONCE_BYTES, "a nonce of any other length is none of ours"
        self._key, self._nonce = key, nonce
        self._decoder, self._num_bytes = FrameDecoder(), 0
        self.is_proven = not key
        """Whether the other side has shown that it has the key, if there is one."""

    def challenge(self) -> bytes:
        """The first frame, where there is a key."""
        assert self._key, "nobody has to prove anything"
        return encode(Challenge(self._nonce))

    def messages(self, data: bytes) -> Iterator[ToWorker | Welcome]:
        """The messages that are complete with `data`. A `Welcome` stands for the other side's proof, and is
        to be sent: from then on it is let in.

        Raises:
            ProtocolError: it breaks the protocol, or its key is another one.
        """
        if not self.is_proven:
            self._num_bytes += len(data)
            if self._num_bytes > PROOF_BYTES_MAX:
                raise ProtocolError("much was said before it was shown who says it")
        for body in self._decoder.feed(data):
            message = decode_to_worker(body)
            if isinstance(message, Proof):
                yield self._welcome(message)
            elif not self.is_proven:
                raise ProtocolError("it did not prove that it has the key")
            else:
                yield message

    def _welcome(self, proof: Proof) -> Welcome:
        if self.is_proven:
            raise ProtocolError("an unsolicited proof")
        if not is_same(proof.mac, gateway_mac(self._key, self._nonce, proof.nonce)):
            raise ProtocolError("its key is another one")
        self.is_proven = True
        return Welcome(worker_mac(self._key, self._nonce, proof.nonce))
