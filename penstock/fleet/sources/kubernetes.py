"""The endpoints of a Kubernetes service as workers: list once, then watch, as the API's clients should.

    list ─> all slices, at a version ─> watch from there ──ended──> watch again from the last version heard of
      ^                                       └──410 Gone: that version is forgotten──┐
      └───────────────────────────────────────────────────────────────────────────────┘

While the API server cannot be reached the workers stay as they are. The token is read again for each
connection.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec

from penstock.backends.http.address import HttpAddress
from penstock.backends.http.client import HttpClient, NoConnection
from penstock.backends.http.fetch import ProbeFailed, fetch
from penstock.backends.http.limits import HttpLimits
from penstock.clock import Clock, sleep
from penstock.config.fleet import KubernetesConfig
from penstock.errors import ConfigError
from penstock.fleet.sources.endpoint_slices import ApiStatus, EndpointSlices, Slice, SliceList, WatchEvent
from penstock.fleet.sources.found import TIMEOUT_S, DiscoveredWorkers
from penstock.fleet.sources.watch import Watch, WatchBroken
from penstock.telemetry.log import Log

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
    """The API server did not answer as it should. `is_gone`: the version that we know is too old."""

    def __init__(self, message: str, *, is_gone: bool = False) -> None:
        super().__init__(message)
        self.is_gone = is_gone


class KubernetesSource:
    """Follows one service. `run` it until it is cancelled."""

    def __init__(
        self,
        found: DiscoveredWorkers,
        config: KubernetesConfig,
        clock: Clock,
        log: Log,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Nothing is sent yet.

        Raises:
            ConfigError: no API server is named, and this is not a pod.
        """
        self._found, self._config, self._clock, self._log = found, config, clock, log
        self._address = api_server(config, environ)
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
            ApiError: they cannot be had. What was known stays.
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
            raise _refusal(status, body)
        return body

    async def _watch(self, client: HttpClient) -> bool:
        """Follow changes until the connection ends in good order; whether anything was heard.

        Raises:
            ApiError, WatchBroken: it ended otherwise.
        """
        query = {
            "watch": 1,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_S,
        }
        watch = Watch(self._on_line)
        try:
            watch.exchange = client.start("GET", self._path(query), watch)
        except NoConnection as error:
            raise ApiError(str(error)) from error
        try:
            await watch.over
        finally:
            watch.exchange.abort()
        if watch.status != 200:
            raise _refusal(watch.status, watch.body)
        return watch.num_lines > 0

    def _on_line(self, line: bytes) -> None:
        """One event of the watch.

        Raises:
            ApiError: it says that something is wrong.
        """
        event = _decoded(_events, line)
        if event.type == "ERROR":
            raise _refusal(0, bytes(event.object))
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
        """A client with the token as it is now.

        Raises:
            OSError: the token cannot be read.
        """
        account = self._config.account
        token = (Path(account) / "token").read_text().strip() if account else ""
        headers = {"accept": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}
        http = HttpLimits(
            connect_timeout_s=TIMEOUT_S,
            first_byte_timeout_s=TIMEOUT_S,
            idle_timeout_s=IDLE_S,
            request_timeout_s=WATCH_S + IDLE_S,
            ca_file=str(Path(account) / "ca.crt") if account and self._address.scheme == "https" else "",
        )
        return HttpClient(self._address, http, self._clock, headers=headers)

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


def api_server(config: KubernetesConfig, environ: Mapping[str, str]) -> HttpAddress:
    """Where the API server is.

    Raises:
        ConfigError: nobody says it.
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


def _refusal(status: int, body: bytes) -> ApiError:
    """What a `ApiStatus` object says; `status` is HTTP's, 0 where there was none."""
    try:
        said = _statuses.decode(body)
    except msgspec.DecodeError:
        said = ApiStatus()
    message = f"the API server refuses ({status or said.code}): {said.message[:200]}"
    return ApiError(message, is_gone=GONE in (status, said.code))
