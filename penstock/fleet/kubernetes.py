"""The endpoints of a Kubernetes service as workers: list once, then watch, as the API's clients should.

    list ─> all slices, at a version ─> watch from there ──ended──> watch again from the last version heard of
      ^                                       └──410 Gone: that version is forgotten──┐
      └───────────────────────────────────────────────────────────────────────────────┘

While the API server cannot be reached the workers stay as they are. The token is read again for each
connection.

Which pods of a service take requests, from its EndpointSlices (Kubernetes, discovery.k8s.io/v1). Pure.

A service has any number of slices, and an endpoint may be in two of them for a moment. A pod of a service
with two address families is in slices of both. A watch tells of whole slices.

An HTTP answer that does not end: lines of JSON, each told as soon as it is whole.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from penstock.backends.http.client import HttpClient, HttpExchange
from penstock.backends.http.small_answer import ProbeFailed, fetch
from penstock.backends.http.terms import HttpAddress, HttpFailure, HttpLimits, NoConnection
from penstock.clock import Clock, sleep
from penstock.config.fleet import KubernetesConfig
from penstock.errors import ConfigError
from penstock.fleet.members import TIMEOUT_S, DiscoveredAddress, DiscoveredWorkers
from penstock.telemetry.log import Log


class Conditions(msgspec.Struct, frozen=True):
    """Conditions of an endpoint; null is unknown, which counts as ready."""

    ready: bool | None = None
    terminating: bool | None = None


class TargetRef(msgspec.Struct, frozen=True):
    """The pod."""

    uid: str = ""


class SliceEndpoint(msgspec.Struct, frozen=True):
    """One endpoint. Its addresses are the same pod's, and the first is as good as any."""

    addresses: list[str]
    conditions: Conditions = Conditions()
    target: TargetRef | None = msgspec.field(name="targetRef", default=None)


class SlicePort(msgspec.Struct, frozen=True):
    """One port of all endpoints of a slice; null is all ports."""

    name: str | None = None
    port: int | None = None


class Metadata(msgspec.Struct, frozen=True):
    """Which object, in which version."""

    name: str = ""
    resource_version: str = msgspec.field(name="resourceVersion", default="")


class Slice(msgspec.Struct, frozen=True):
    """One EndpointSlice. Of a bookmark only the version is there."""

    metadata: Metadata
    address_type: str = msgspec.field(name="addressType", default="IPv4")
    endpoints: list[SliceEndpoint] | None = None
    ports: list[SlicePort] | None = None


class ListMetadata(msgspec.Struct, frozen=True):
    """The version of a list, and the token of its next page."""

    resource_version: str = msgspec.field(name="resourceVersion", default="")
    next_token: str = msgspec.field(name="continue", default="")


class SliceList(msgspec.Struct, frozen=True):
    """One page of a list."""

    metadata: ListMetadata
    items: list[Slice] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch. Of an ERROR the object is a `ApiStatus`."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class ApiStatus(msgspec.Struct, frozen=True):
    """An error of the API server in place of an answer."""

    code: int = 0
    message: str = ""


class EndpointSlices:
    """The slices of one service, as far as they are known."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._slices: dict[str, Slice] = {}

    def replace(self, slices: list[Slice]) -> None:
        """These are all there are."""
        self._slices = {each.metadata.name: each for each in slices}

    def put(self, found: Slice) -> None:
        """A slice is new, or another one now."""
        self._slices[found.metadata.name] = found

    def drop(self, found: Slice) -> None:
        """A slice is there no more."""
        self._slices.pop(found.metadata.name, None)

    def endpoints(self) -> set[DiscoveredAddress]:
        """Where requests may go: ready, not about to end, once for each pod."""
        pods: dict[str, DiscoveredAddress] = {}
        # IPv6 first, so that of a pod with both the IPv4 address is left.
        for found in sorted(self._slices.values(), key=lambda each: each.address_type, reverse=True):
            port = self._port(found)
            for endpoint in found.endpoints or ():
                if port and endpoint.addresses and _takes_requests(endpoint.conditions):
                    address = endpoint.addresses[0]
                    uid = endpoint.target.uid if endpoint.target is not None else ""
                    pods[uid or address] = DiscoveredAddress(address, port)
        return set(pods.values())

    def _port(self, found: Slice) -> int:
        """The port of a slice's endpoints; 0 if it does not have the one that is wanted."""
        wanted = self._config.port
        if wanted and isinstance(wanted, int):
            return wanted
        named = [port.port for port in found.ports or () if port.port and (not wanted or port.name == wanted)]
        return named[0] if len(named) == 1 else 0


def _takes_requests(conditions: Conditions) -> bool:
    return conditions.ready is not False and not conditions.terminating


LINE_BYTES_MAX = 8 * 1024 * 1024


class WatchBroken(Exception):
    """It ended before its time, or was no such answer."""


class SliceWatch:
    """Takes one such answer (an `HttpHandler`)."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        """An exception from `on_line` ends it."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it has ended: with what went wrong, if anything did."""
        self.status = 200
        self.body = b""
        """The bytes after the last whole line; all of it unless the status is 200."""
        self.num_lines = 0
        self.exchange: HttpExchange | None = None
        self._on_line = on_line

    def on_response(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See `HttpHandler`."""
        self.status = status

    def on_body(self, data: bytes) -> None:
        """See `HttpHandler`."""
        if self.over.done():
            return
        if self.exchange is not None:
            self.exchange.touch()
        self.body += data
        if self.status == 200:
            *lines, self.body = self.body.split(b"\n")
            try:
                for line in lines:
                    self._take(line)
            except Exception as error:  # noqa: BLE001 - the awaiting caller gets it.
                self._fail(error)
        if len(self.body) > LINE_BYTES_MAX:
            self._fail(WatchBroken(f"a line of more than {LINE_BYTES_MAX} bytes"))

    def on_end(self) -> None:
        """See `HttpHandler`."""
        if not self.over.done():
            self.over.set_result(None)

    def on_failure(self, failure: HttpFailure) -> None:
        """See `HttpHandler`."""
        self._fail(WatchBroken(failure.message))

    def _take(self, line: bytes) -> None:
        if line.strip():
            self._on_line(line)
            self.num_lines += 1

    def _fail(self, error: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(error)


PAGE = 500
PAGES_MAX = 100
WATCH_S = 240
"""The API server ends a watch after this long, and we begin another one."""
IDLE_S = 150.0
"""A watch that says nothing for so long is dead: bookmarks come about once a minute."""
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.5, 30.0
GONE = 410
T = TypeVar("T")

_lists = msgspec.json.Decoder(SliceList)
_events = msgspec.json.Decoder(WatchEvent)
_slices = msgspec.json.Decoder(Slice)
_statuses = msgspec.json.Decoder(ApiStatus)


class ApiError(Exception):
    """The API server did not answer as it should."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_gone(self) -> bool:
        """The version that we know is too old."""
        return self.status == GONE


class KubernetesSource:
    """Follows one service. `run` it until it is cancelled."""

    def __init__(
        self,
        found: DiscoveredWorkers,
        config: KubernetesConfig,
        clock: Clock,
        log: Log,
    ) -> None:
        """Nothing is sent yet.

        Raises:
            ConfigError: no API server is named, and this is not a pod.
        """
        self._found, self._config, self._clock, self._log = found, config, clock, log
        self._address = api_server(config, os.environ)
        self._slices = EndpointSlices(config)
        self._version = ""
        """Of the slices; empty until they were listed."""
        self._changed = asyncio.Event()
        self._trouble: str | None = None

    async def run(self) -> None:
        """List and watch, again and again."""
        telling = asyncio.create_task(self._tell(), name=f"tell {self._found.source}")
        try:
            delay_s = BACKOFF_MIN_S
            while True:
                delay_s = BACKOFF_MIN_S if await self.follow() else min(2 * delay_s, BACKOFF_MAX_S)
                await sleep(delay_s)
        finally:
            telling.cancel()

    async def follow(self) -> bool:
        """One connection's worth of it; whether there was any use in it."""
        try:
            client = self._client()
            try:
                if not self._version:
                    await self._list(client)
                self._say("")
                return await self._watch(client)
            finally:
                client.close()
        except (ApiError, WatchBroken, ConfigError, OSError) as error:
            if isinstance(error, ApiError) and error.is_gone:
                self._version = ""
                return True
            self._say(str(error))
            return False

    async def _tell(self) -> None:
        """Bring what has changed to the registry; what changes meanwhile goes together."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._found.take(self._slices.endpoints())

    async def _list(self, client: HttpClient) -> None:
        """All slices, page by page.

        Raises:
            ApiError: they cannot be had. Known endpoints stay.
        """
        slices: list[Slice] = []
        next_token, version = "", ""
        for _ in range(PAGES_MAX):
            query = {"limit": PAGE, **({"continue": next_token} if next_token else {})}
            page = _decoded(_lists, await self._get(client, self._path(query)))
            slices += page.items or []
            version, next_token = page.metadata.resource_version, page.metadata.next_token
            if not next_token:
                break
        self._slices.replace(slices)
        self._version = version
        self._changed.set()

    async def _get(self, client: HttpClient, path: str) -> bytes:
        try:
            status, body = await fetch(client, path, client.config.response_bytes_max)
        except ProbeFailed as error:
            raise ApiError(f"{self._address}: {error}") from error
        if status != 200:
            raise refusal(status, body)
        return body

    async def _watch(self, client: HttpClient) -> bool:
        """Follow changes until the connection ends in good order; whether anything was heard.

        Raises:
            ApiError, WatchBroken: it ended otherwise.
        """
        query = {
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_S,
        }
        watch = SliceWatch(self._on_line)
        try:
            watch.exchange = client.start("GET", self._path(query), watch)
        except NoConnection as error:
            raise ApiError(str(error)) from error
        try:
            await watch.over
        finally:
            watch.exchange.abort()
        if watch.status != 200:
            raise refusal(watch.status, watch.body)
        return watch.num_lines > 0

    def _on_line(self, line: bytes) -> None:
        """One event of the watch.

        Raises:
            ApiError: it says that something is wrong.
        """
        event = _decoded(_events, line)
        if event.type == "ERROR":
            raise refusal(0, bytes(event.object))
        found = _decoded(_slices, bytes(event.object))
        if event.type == "DELETED":
            self._slices.drop(found)
        elif event.type != "BOOKMARK":
            self._slices.put(found)
        self._version = found.metadata.resource_version
        self._changed.set()

    def _path(self, query: Mapping[str, object]) -> str:
        selector = {"labelSelector": f"kubernetes.io/service-name={self._config.service}"}
        namespace = quote(self._config.namespace, safe="")
        words = urlencode(selector | dict(query))
        return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?{words}"

    def _client(self) -> HttpClient:
        return api_client(self._config, self._address, self._clock)

    def _say(self, trouble: str) -> None:
        """In the log, when it has changed."""
        if trouble == self._trouble:
            return
        self._trouble = trouble
        service = f"{self._config.namespace}/{self._config.service}"
        if trouble:
            self._log.warning("the service's endpoints cannot be followed", service=service, why=trouble)
        else:
            self._log.info("the service's endpoints are followed", service=service)


def api_client(config: KubernetesConfig, address: HttpAddress, clock: Clock) -> HttpClient:
    """A client with the token as it is now.

    Raises:
        OSError: the token cannot be read.
    """
    account = config.account
    token = (Path(account) / "token").read_text().strip() if account else ""
    headers = {"accept": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}
    http = HttpLimits(
        connect_timeout_s=TIMEOUT_S,
        first_byte_timeout_s=TIMEOUT_S,
        idle_timeout_s=IDLE_S,
        request_timeout_s=WATCH_S + IDLE_S,
        ca_file=str(Path(account) / "ca.crt") if account and address.scheme == "https" else "",
    )
    return HttpClient(address, http, clock, headers=headers)


def api_server(config: KubernetesConfig, environ: Mapping[str, str]) -> HttpAddress:
    """Where the API server is.

    Raises:
        ConfigError: it is set nowhere.
    """
    if config.api_server:
        return HttpAddress.parse(config.api_server)
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "models[].discover.kubernetes.api_server: needed, since this is not a pod (no "
            "KUBERNETES_SERVICE_HOST)"
        )
    return HttpAddress.parse(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")


def _decoded(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ApiError(f"the API server's answer cannot be read: {error}") from error


def refusal(status: int, body: bytes) -> ApiError:
    """The error of an `ApiStatus` object; `status` is HTTP's, 0 where there was none."""
    try:
        said = _statuses.decode(body)
    except msgspec.DecodeError:
        said = ApiStatus()
    message = f"the API server refuses ({status or said.code}): {said.message[:200]}"
    return ApiError(message, status=GONE if said.code == GONE else status or said.code)
