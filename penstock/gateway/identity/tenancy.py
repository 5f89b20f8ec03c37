"""The callers, as they change while the server runs: the table in force, tokens' keys, and reloading.

    SIGHUP ─> reload(config) ──┐
    keys file changed ─────────┴─> a new TenantTable, made aside ─> in force at once ─> on_reload(config)
                                     └─ wrong: one line in the log, and the old one stays

Requests that run keep the tenant that they came with, so nothing is dropped.

Access to routes: the caller behind a request, by the route's access, its key and where it comes from.

    OPEN    everybody
    KEY     a tenant's key or token
    LOOK    the key of an admin or a scraper; of a tenant, which sees its own numbers; without a key a local
            caller, if `server.trust_local` says so
    ADMIN   an admin's key

Where authentication is off, everything is open to callers on this machine. A browser is on this machine too,
and opens pages of strangers: so wherever no key proves that a request is wanted, its Host must be a name of
this server (or a stranger's name that was pointed here, "DNS rebinding", would pass), and a page of another
origin is refused (Fetch standard: `Origin`, `Sec-Fetch-Site`). A request that shows a key needs no such
check: no browser adds keys by itself.
"""

import asyncio
import enum
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.clock import Clock, sleep
from penstock.config.checkpoints import with_members
from penstock.config.checks import check
from penstock.config.machine import is_loopback
from penstock.config.tenancy import names_callers
from penstock.config.tree import Config, ServerConfig
from penstock.errors import ConfigError, Forbidden, Unauthenticated
from penstock.gateway.http.exchange import RequestHead
from penstock.gateway.identity.api_keys import Stamp, stamp
from penstock.gateway.identity.tenants import (
    ANONYMOUS_CALLER,
    OPERATOR,
    SCRAPER,
    Caller,
    TenantTable,
    credential,
    read_tenants,
)
from penstock.rng import fresh_key
from penstock.telemetry.audit import Notes, keep_nothing
from penstock.telemetry.log import Log

if TYPE_CHECKING:
    from penstock.gateway.identity.tokens import ProviderKeys, TokenVerifier

RELOADABLE = ("tenants", "tiers", "auth", "prices", "budgets")
"""Sections that a reload takes, and of `models` who their workers are. Changes of others are named in the
log, and wait for a restart."""

Subscriber = Callable[[Config], None]
"""Told of a new configuration that is in force: it has been checked, so this may not fail."""

KEYS_FILE_CHECK_S = 2.0
"""How often the keys file is looked at."""


class Tenancy:
    """Answers who is calling. `start` it for tokens and for the keys file to be followed."""

    def __init__(self, config: Config, *, clock: Clock, log: Log, notes: Notes | None = None) -> None:
        """Read the keys file. Without `notes` another process notes what changes.

        Raises:
            ConfigError: it cannot be read, does not go with the tiers, or tokens are asked for and PyJWT is
                missing.
        """
        self._clock, self._log = clock, log
        self._notes = notes or Notes(clock, keep_nothing)
        self._config = config
        self._stamp = self._stamp_of(config)
        self._secret = fresh_key()  # Of this process, where the configuration has none.
        self._table = self._read(config)
        self._keys: ProviderKeys | None = None
        self._tokens: TokenVerifier | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._follows_provider = False
        self.on_reload: list[Subscriber] = []
        self._take_tokens(config)

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self._config

    @property
    def table(self) -> TenantTable:
        """The table in force."""
        return self._table

    def start(self, *, follows_provider: bool = True) -> None:
        """Begin to follow the keys file, and the identity provider if tokens are to be read here."""
        self._follows_provider = follows_provider
        self._following = _task(self._follow(), "follow the keys file")
        if self._keys is not None and follows_provider:
            self._fetching = _task(self._keys.run(), "follow the identity provider")

    def stop(self) -> None:
        """Follow them no more."""
        for task in (self._following, self._fetching):
            if task is not None:
                task.cancel()

    @property
    def is_open(self) -> bool:
        """Authentication is off: there are no keys to ask for."""
        return self._table.open

    def identify(self, head: RequestHead) -> Caller | None:
        """The caller of a request, or None if only `identify_later` can say.

        Raises:
            Unauthenticated: no accepted key or token.
            Forbidden: a known caller, who may not use this server.
        """
        if self._table.open:
            return ANONYMOUS_CALLER
        found = credential(head)
        if self._tokens is not None and looks_like_token(found):
            return self._tokens.find(found)
        return self._table.tenant_of_key(found)

    def identify_viewer(self, head: RequestHead) -> Caller | None:
        """The caller of a request that reads numbers: an admin, a scraper, or a tenant, which sees its own.

        Raises:
            Unauthenticated, Forbidden: as `identify`.
        """
        found = credential(head)
        if self._tokens is not None and looks_like_token(found):
            return self._tokens.find(found)
        return self._table.viewer_of_key(found)

    def identify_admin(self, head: RequestHead) -> Caller:
        """The caller of a request that looks at the fleet or changes it.

        Tokens of tenants' people are not taken.

        Raises:
            Unauthenticated: no accepted key or token.
            Forbidden: a known caller, who may not do that.
        """
        return self._table.admin_of_key(credential(head))

    async def identify_later(self, head: RequestHead) -> Caller:
        """The same, after the identity provider was asked for the key that a token names.

        Raises:
            Unauthenticated, Forbidden: as above.
            IdentityUnavailable: the provider cannot be asked now.
        """
        for _ in range(2):
            is_newest = self._keys is None or await self._keys.wait_for()
            caller = self.identify(head)
            if caller is not None:
                return caller
            if is_newest:
                break
        raise Unauthenticated(
            "This token is not accepted: its key is not one of the issuer's.", code="invalid_token"
        )

    async def reload(self, config: Config) -> bool:
        """Put a new configuration in force, as far as that can be done while running; False if it was
        refused.

        `config` has been checked as at start. Files are read in a thread: streams continue meanwhile.
        """
        async with self._one_at_a_time:
            merged = self._mergeable(config)
            mark = self._stamp_of(merged)
            try:
                check(merged)  # Again: what runs may go with the old settings and not with the new ones.
                if not names_callers(merged.auth):
                    raise ConfigError("auth: it names no caller, so none could call any more")
                table = await asyncio.to_thread(self._read, merged)
                self._check_shrinking(merged, table)
                await asyncio.to_thread(_check_token_library, merged)
            except ConfigError as error:
                self._log.error("the new configuration was not taken; the old one stays", error=error)
                self._notes.note("config", "refused", "configuration", why=str(error))
                return False
            self._stamp = mark
            self._put_in_force(merged, table)
            self._log.info(
                "the new configuration is in force", tenants=len(merged.tenants), num_accepted=table.num_keys
            )
            self._notes.note("config", "in force", "configuration")
            return True

    def _mergeable(self, config: Config) -> Config:
        """The running configuration with what may be changed taken from `config`; says what waits for a
        restart.
        """
        models = with_members(self._config.models, config.models)
        kept = msgspec.structs.replace(self._config, models=models)
        changed = [
            name
            for name in Config.__struct_fields__
            if name not in RELOADABLE and getattr(config, name) != getattr(kept, name)
        ]
        if changed:
            self._log.warning("these changes need a restart", sections=", ".join(changed))
        taken: dict[str, Any] = {name: getattr(config, name) for name in RELOADABLE}
        return msgspec.structs.replace(kept, **taken)

    def _put_in_force(self, config: Config, table: TenantTable) -> None:
        same_provider = config.auth.jwt == self._config.auth.jwt
        self._config, self._table = config, table
        self._take_tokens(config, same_provider=same_provider)
        for subscriber in self.on_reload:
            try:
                subscriber(config)
            except Exception as error:  # noqa: BLE001
                # One part's bug must not keep the others from hearing of it.
                self._log.bug("a part did not take the new configuration", error)

    def _take_tokens(self, config: Config, *, same_provider: bool = False) -> None:
        jwt = config.auth.jwt
        if not jwt.issuer or config.auth.disabled:
            self._end_fetching()
            self._keys = self._tokens = None
            return
        _check_token_library(config)
        from penstock.gateway.identity.tokens import (
            ProviderKeys,  # PyJWT is an extra.
            TokenVerifier,
        )

        if self._keys is None or not same_provider:
            self._end_fetching()
            self._keys = ProviderKeys(jwt, clock=self._clock, log=self._log)
            if self._follows_provider:
                self._fetching = _task(self._keys.run(), "follow the identity provider")
        self._tokens = TokenVerifier(jwt, self._keys, self._table.tenants, clock=self._clock)
        self._keys.on_change = self._tokens.forget

    def _end_fetching(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    async def _follow(self) -> None:
        """Look at the keys file now and then, and take what is new in it."""
        while True:
            await sleep(KEYS_FILE_CHECK_S)
            async with self._one_at_a_time:
                await self._take_changed_keys()

    async def _take_changed_keys(self) -> None:
        config = self._config
        mark = self._stamp_of(config)
        if mark == self._stamp:
            return
        self._stamp = mark
        try:
            table = await asyncio.to_thread(self._read, config)
            self._check_shrinking(config, table)
        except ConfigError as error:
            self._log.error("the changed keys file was not taken; the old keys stay", error=error)
            self._notes.note("config", "refused", "keys file", why=str(error))
        except Exception as error:  # noqa: BLE001 - the next change of the file must still be seen.
            self._log.bug("the changed keys file could not be read", error)
        else:
            self._put_in_force(config, table)
            self._log.info("the changed keys file is in force", count=table.num_keys)
            self._notes.note("config", "in force", "keys file", why=f"{table.num_keys} keys")

    def _check_shrinking(self, config: Config, table: TenantTable) -> None:
        """Raises ConfigError: most keys are gone from the same file."""
        if config.auth.keys_file == self._config.auth.keys_file:
            table.check_shrinking(self._table)

    def _read(self, config: Config) -> TenantTable:
        return read_tenants(config, clock=self._clock, secret=self._secret)

    def _stamp_of(self, config: Config) -> Stamp | None:
        """Taken before the file is read, so that a change in between is seen as one."""
        return stamp(Path(config.auth.keys_file)) if config.auth.keys_file else None


def looks_like_token(found: bytes) -> bool:
    """Whether this is a JWT by its shape: a JSON object in base64url, and two dots."""
    return found.startswith(b"eyJ") and found.count(b".") == 2


def _check_token_library(config: Config) -> None:
    if not config.auth.jwt.issuer:
        return
    try:
        import cryptography  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import jwt  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise ConfigError("auth.jwt: needs PyJWT; install penstock[jwt]") from None


def _task(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work, name=name)


WILDCARDS = ("0.0.0.0", "::", "")
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")
"""The headers by which a proxy names itself. One that says nothing cannot be told from a caller on this
machine."""


class Access(enum.Enum):
    """The callers of a route."""

    OPEN = enum.auto()
    KEY = enum.auto()
    LOOK = enum.auto()
    ADMIN = enum.auto()


class Entrance:
    """The checks before a handler."""

    def __init__(self, tenancy: Tenancy, config: ServerConfig) -> None:
        self._tenancy, self._trusts_local = tenancy, config.trust_local
        listening = () if config.host in WILDCARDS else (config.host,)
        self._names = frozenset(name.lower().strip("[]") for name in (*listening, *config.hosts))
        self._origins = frozenset(name.lower() for name in config.hosts)
        self._cors_origins = frozenset(config.cors_origins)

    def caller(self, access: Access, head: RequestHead, client: str) -> Caller | None:
        """The caller of a request, or None if only `Tenancy.identify_later` can say; `client` is the socket's
        other end.

        Raises:
            Unauthenticated: no key, or not one that is accepted.
            Forbidden: this caller may not go there.
        """
        if access is Access.OPEN:
            return ANONYMOUS_CALLER
        if self._tenancy.is_open:
            self._check_same_origin(head, self._cors_origins if access is Access.KEY else frozenset())
            if access is Access.KEY:
                return ANONYMOUS_CALLER
            _check_local(head, client)
            return OPERATOR if access is Access.ADMIN else SCRAPER
        if access is Access.KEY:
            return self._tenancy.identify(head)
        if access is Access.ADMIN:
            return self._tenancy.identify_admin(head)
        if self._trusts_local and b"authorization" not in head.headers and is_local(client, head.headers):
            self._check_same_origin(head, frozenset())
            return SCRAPER
        return self._tenancy.identify_viewer(head)

    def _check_same_origin(self, head: RequestHead, invited: frozenset[str]) -> None:
        """No key shows that the sender means it, so nothing in the request may say that another site does.

        `invited`: origins that may all the same (`server.cors_origins`, for the API).

        Raises:
            Forbidden: the request is for another host, or from a page of another origin.
        """
        headers = head.headers
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host and not self._is_ours(host):  # Only HTTP/1.0 may leave it out, which no browser speaks.
            raise Forbidden(
                f"This server is not called {host[:128]!r}: without a key it answers to loopback names, its "
                f"own address "
                "and the names of server.hosts.",
                code="foreign_host",
            )
        origin = headers.get(b"origin")
        if invited and origin is not None and ("*" in invited or origin.decode("latin-1") in invited):
            return
        is_foreign = headers.get(b"sec-fetch-site", b"").lower() == b"cross-site"
        if origin is not None:
            authority = origin.decode("latin-1").lower().partition("://")[2]
            ours = authority == host or _name_of(authority) in self._origins
            is_foreign = not authority or not ours
        if is_foreign:
            raise Forbidden(
                "This request comes from a page of another site. Without a key only this server's own pages "
                "may send requests; server.hosts adds names.",
                code="foreign_origin",
            )

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        return name in self._names or is_loopback(name)


def is_local(client: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the socket's other end is on this machine, and does not say that it speaks for another."""
    if any(name in headers for name in _FORWARDED):
        return False
    return client == "local" or is_loopback(client)  # "local": a Unix socket.


def _check_local(head: RequestHead, client: str) -> None:
    if not is_local(client, head.headers):
        raise Forbidden(
            "Without authentication this is for callers on this machine; a request that a proxy passes on is "
            "none. Set auth.keys or auth.keys_file, and auth.admin_keys.",
            code="not_local",
        )


def _name_of(authority: str) -> str:
    """The host of `host[:port]`, without the brackets of an IPv6 address."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]
