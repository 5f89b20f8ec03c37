"""The public keys of an OpenID Connect provider (RFC 7517), fetched in the background and kept while it is
down.

    run() ──every refresh_s──> fetch ─> parse ─> keys
      ^                                   └─ failed: the last keys stay, up to stale_s_max
      └── wait_for(): a token names an unknown key; fetch sooner, at most once per refresh_s_min

Fetching is a few kilobytes every few minutes, so the standard library does it, in a thread, and not the HTTP
client of the workers: the provider is often outside the network and then reached through the proxy that the
environment names, which `urllib` follows.
"""

import asyncio
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jwt
import msgspec

from penstock.clock import NS_PER_S, Clock, sleep
from penstock.config.branch import extended
from penstock.config.tenancy import JwtConfig, url_problem
from penstock.errors import IdentityUnavailable
from penstock.gateway.identity.jwt_terms import JwtTerms
from penstock.telemetry.log import Log

WELL_KNOWN = "/.well-known/openid-configuration"
RSA_BITS_MIN = 2048
_KINDS = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
_CURVES = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}

Fetch = Callable[[str], bytes]
"""Gets a URL's body. Blocks; runs in a thread. Raises OSError or ValueError."""


@dataclass(slots=True, frozen=True, kw_only=True)
class SigningKey:
    """One public key, and what it may be used for."""

    kid: str
    key: Any
    kind: str
    """JWK's `kty`."""
    curve: str
    algorithm: str
    """The only one, if the provider says one."""

    def verifies(self, algorithm: str) -> bool:
        """Whether signatures of this kind can be this key's: an RSA key never checks an HMAC."""
        if self.algorithm and self.algorithm != algorithm:
            return False
        return _KINDS.get(algorithm[:2]) == self.kind and _CURVES.get(algorithm, self.curve) == self.curve


def parse_jwks(data: bytes, *, keys_max: int) -> dict[str, SigningKey]:
    """The usable signing keys of a JWK set, by id.

    What cannot be used (encryption, symmetric, too short) is left out.

    Raises:
        ValueError: it is no JWK set, or has no usable key.
    """
    found: dict[str, SigningKey] = {}
    for jwk in msgspec.json.decode(data, type=dict[str, Any]).get("keys", ()):
        if len(found) < keys_max and isinstance(jwk, dict) and (key := _key_of(cast(dict[str, Any], jwk))):
            found[key.kid] = key
    if not found:
        raise ValueError("no key in it can check signatures")
    return found


def _key_of(jwk: dict[str, Any]) -> SigningKey | None:
    kind = jwk.get("kty")
    if kind not in _KINDS.values() or jwk.get("use", "sig") != "sig":
        return None
    try:
        made: Any = jwt.PyJWK(jwk).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    if hasattr(made, "private_numbers") or hasattr(made, "private_bytes"):
        return None  # A provider that publishes its private key has other troubles; we do not trust it.
    if kind == "RSA" and made.key_size < RSA_BITS_MIN:
        return None
    fields = {name: str(jwk.get(name) or "") for name in ("kid", "crv", "alg")}
    return SigningKey(
        kid=fields["kid"], key=made, kind=str(kind), curve=fields["crv"], algorithm=fields["alg"]
    )


class ProviderKeys:
    """The provider's keys as they are known now. `run` must run for them to be."""

    def __init__(self, config: JwtConfig, *, clock: Clock, log: Log, fetch: Fetch | None = None) -> None:
        self._config = extended(config, JwtTerms)
        self._clock, self._log = clock, log
        self._fetch: Fetch = fetch or self._get
        self._keys: Mapping[str, SigningKey] = {}
        self._began_ns: int | None = None
        self._fresh_ns: int | None = None
        self._failures = 0
        self._wanted = asyncio.Event()
        self._in_flight: list[asyncio.Future[None]] | None = None
        """Who waits for the fetch that is under way; None while there is none."""
        self._next: list[asyncio.Future[None]] = []
        """Who waits for the next one."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a key that was there is there no more, or is another one."""

    @property
    def keys(self) -> Mapping[str, SigningKey]:
        """By id. Empty before the first fetch, and after the provider was away for too long."""
        return self._keys

    async def run(self) -> None:
        """Keep the keys fresh, for ever."""
        while True:
            await self._pause()
            self._wanted.clear()
            self._began_ns = self._clock.now_ns()
            self._in_flight, self._next = self._next, []
            await self._refresh()
            waiting, self._in_flight = self._in_flight, None
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def wait_for(self) -> bool:
        """Return after a fetch: one that is under way (False), else one that begins now or later (True).

        Only after the second kind a key that is still not there is nobody's.

        Raises:
            IdentityUnavailable: that would take too long, too many wait already, or there are still no keys.
        """
        joins = self._in_flight is not None
        wait_s = 0.0 if joins else self._allowed_in_s()
        waiting = self._next if self._in_flight is None else self._in_flight
        if wait_s > self._config.timeout_s or len(waiting) >= self._config.waiting_max:
            raise _unavailable(wait_s)
        future = asyncio.get_running_loop().create_future()
        waiting.append(future)
        if not joins:
            self._wanted.set()
        try:
            async with asyncio.timeout(wait_s + self._config.timeout_s):
                await future
        except TimeoutError:
            raise _unavailable(self._config.refresh_s_min) from None
        if not self._keys:
            raise _unavailable(self._config.refresh_s_min)
        return not joins

    async def _pause(self) -> None:
        """Until the next fetch is due, or is wanted and allowed."""
        if self._began_ns is None:
            return
        config = self._config
        # A provider that is down is asked more often than one that answers, but less and less.
        period_s = config.refresh_s
        if self._failures:
            period_s = min(period_s, config.refresh_s_min * 2 ** min(self._failures - 1, 20))
        try:
            async with asyncio.timeout(period_s):
                await self._wanted.wait()
        except TimeoutError:
            return
        await sleep(self._allowed_in_s())

    def _allowed_in_s(self) -> float:
        if self._began_ns is None:
            return 0.0
        since_s = (self._clock.now_ns() - self._began_ns) / NS_PER_S
        return max(0.0, self._config.refresh_s_min - since_s)

    async def _refresh(self) -> None:
        try:
            keys = await asyncio.to_thread(self._fetch_keys)
        except Exception as error:  # noqa: BLE001 - a broken provider may answer anything; we ask again later.
            self._failed(error)
            return
        if self._failures or self._fresh_ns is None:
            self._log.info(
                "the identity provider's keys are here", count=len(keys), issuer=self._config.issuer
            )
        self._failures, self._fresh_ns = 0, self._clock.now_ns()
        self._take(keys)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._log.warning(
            "the identity provider's keys cannot be fetched", error=error, failures=self._failures
        )
        if self._fresh_ns is None:
            return
        if self._keys and self._clock.now_ns() - self._fresh_ns > self._config.stale_s_max * NS_PER_S:
            self._log.error("the identity provider was away for too long; its keys are dropped")
            self._take({})

    def _take(self, keys: Mapping[str, SigningKey]) -> None:
        before, self._keys = self._keys, keys
        if any(kid not in keys or keys[kid].key != key.key for kid, key in before.items()):
            self.on_change()

    def _get(self, url: str) -> bytes:
        return fetch_url(url, self._config.timeout_s, self._config.response_bytes_max, self._clock)

    def _fetch_keys(self) -> dict[str, SigningKey]:
        """In a thread: find out where the keys are, if that is not configured, and get them."""
        config = self._config
        url = config.jwks_url
        if not url:
            about = msgspec.json.decode(
                self._fetch(config.issuer.rstrip("/") + WELL_KNOWN), type=dict[str, Any]
            )
            if about.get("issuer") != config.issuer:
                raise ValueError(f"the provider calls itself {str(about.get('issuer'))[:200]!r}")
            url = str(about.get("jwks_uri") or "")
            if problem := url_problem(url):
                raise ValueError(f"jwks_uri: {problem}")
        return parse_jwks(self._fetch(url), keys_max=config.keys_max)


def _unavailable(wait_s: float) -> IdentityUnavailable:
    return IdentityUnavailable(
        "The identity provider's keys are not available right now, so your token cannot be checked.",
        retry_after_s=wait_s,
    )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could lead to plain HTTP or into a network that only we can reach."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """Refuse."""
        return


def fetch_url(url: str, timeout_s: float, bytes_max: int, clock: Clock) -> bytes:
    """Get a URL's body, within a time and a size.

    Raises:
        OSError: no answer, or not a 200.
        ValueError: the body is too large or too slow.
    """
    deadline_ns = clock.now_ns() + int(timeout_s * NS_PER_S)
    request = urllib.request.Request(url, headers={"Accept": "application/json", "User-Agent": "penstock"})
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s) as response:
        if response.status != 200:
            raise ValueError(f"it answered with status {response.status}")
        body = b""
        while piece := response.read1(65_536):
            body += piece
            if len(body) > bytes_max:
                raise ValueError(f"the answer is over the bound of {bytes_max} bytes")
            if clock.now_ns() > deadline_ns:
                raise ValueError(f"the answer took more than {timeout_s:g} s")
    return body
