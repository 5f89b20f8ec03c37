"""How a worker and a gateway show each other that they have the same key, without sending it.

    worker                                gateway
      |  Challenge(nonce) -->                |   first word on every connection of a worker that has a key
      |       <-- Proof(nonce, mac)          |   HMAC-SHA256 over both nonces and the side's name (RFC 2104)
      |  Welcome(mac) -->                    |   then the worker's state, as always

Nonces are fresh on both sides, so nothing that was overheard is of use again. What follows is neither
encrypted nor signed: the port belongs on a private network or into a tunnel. The key keeps out whoever can
reach the port and should not.
"""

import hashlib
import hmac

NONCE_BYTES = 32
KEY_BYTES_MIN = 16
_GATEWAY, _WORKER, _HASHES, _LINK = b"penstock gateway", b"penstock worker", b"penstock kv", b"penstock link"


def gateway_mac(key: bytes, worker_nonce: bytes, gateway_nonce: bytes) -> bytes:
    """What proves a gateway."""
    return _mac(key, _GATEWAY, worker_nonce, gateway_nonce)


def worker_mac(key: bytes, worker_nonce: bytes, gateway_nonce: bytes) -> bytes:
    """What proves a worker."""
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
