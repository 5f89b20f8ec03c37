"""Two tenants who ask at two gateway processes of one `penstock serve`, each of which they can tell apart."""

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any

from served import PATIENCE_S, Server

PROCESSES = 2
TENANTS = ("sk-one-tenant-0000000001", "sk-another-tenant-000002")
"""Their keys."""
IDLE_S = 30.0
"""A gateway closes a connection that is idle for longer than twice that."""


@dataclass(slots=True)
class Told:
    """What a client was told, and after how long."""

    status: int
    headers: dict[str, str]
    body: bytes
    took_s: float

    @property
    def model(self) -> str:
        return self.headers.get("x-penstock-model", "")

    @property
    def why(self) -> str:
        """Another model answered."""
        return self.headers.get("x-penstock-downgrade", "")


@dataclass(slots=True)
class Door:
    """A connection that stays in the gateway process that accepted it. The tenants ask there in turn."""

    port: int
    process: str = ""
    """How ids begin there; empty: whichever."""
    num_asked: int = 0
    _connection: http.client.HTTPConnection | None = None
    _used_s: float = 0.0

    def ask(self, model: str, *, headers: dict[str, str] | None = None, **options: Any) -> Told:
        """One chat."""
        body = {"model": model, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 8, **options}
        self.num_asked += 1
        headers = {"authorization": f"Bearer {TENANTS[self.num_asked % len(TENANTS)]}", **(headers or {})}
        return self._talk("POST", "/v1/chat/completions", json.dumps(body), headers)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Told:
        """Without a tenant's key."""
        return self._talk("GET", path, None, headers or {})

    def _talk(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> Told:
        if time.monotonic() - self._used_s > IDLE_S:
            self.close()
        connection, self._connection = self._connection or self._enter(), None
        began = time.monotonic()
        connection.request(method, path, body, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        reported = Told(
            response.status, {name.lower(): value for name, value in response.getheaders()}, response.read(),
            time.monotonic() - began,
        )  # fmt: skip
        self._connection, self._used_s = None if response.will_close else connection, time.monotonic()
        return reported

    def _enter(self) -> http.client.HTTPConnection:
        """The kernel chooses who accepts a connection, so until it is the wanted one."""
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
            connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {TENANTS[0]}"})
            response = connection.getresponse()
            response.read()
            found = (response.headers["x-request-id"] or "")[: len("req-") + 16]
            self.process = self.process or found
            if found == self.process and not response.will_close:
                return connection
            connection.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def doors_of(server: Server) -> list[Door]:
    """One into each process."""
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    found: dict[str, Door] = {}

    def have_all() -> bool:
        door = Door(port)
        door.get("/health")
        if found.setdefault(door.process, door) is not door:
            door.close()
        return len(found) == PROCESSES

    server.until(have_all, "one process accepts every connection")
    return [*found.values()]
