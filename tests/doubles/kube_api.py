"""An API server that knows EndpointSlices: lists in pages, watches from a version on, 410 for versions it has
forgotten.

Speaks the protocol and nothing else; it keeps one namespace's slices of one service.
"""

import asyncio
import contextlib
import json
from urllib.parse import parse_qs, urlsplit

SERVICE = "vllm"


def make_slice(name, *pods, family="IPv4", port=8000, port_name="http"):
    """A slice; a pod is (uid, address, conditions)."""
    return {
        "metadata": {"name": name, "namespace": "default"},
        "addressType": family,
        "endpoints": [
            {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "uid": uid}}
            for uid, address, conditions in pods
        ]
        or None,
        "ports": [{"name": port_name, "port": port, "protocol": "TCP"}],
    }


class KubeApi:
    """Serves on a free port of this machine."""

    def __init__(self, token: str = "", page: int = 500) -> None:
        self.token, self.page = token, page
        self.version = 100
        self.slices: dict[str, dict] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        """Path and query of each."""
        self.refuse_status = 0
        self._events: list[tuple[int, dict]] = []
        self._oldest = 0
        self._changed = asyncio.Condition()
        self._watches: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        await self.cut()

    async def put(self, found: dict) -> None:
        kind = "MODIFIED" if found["metadata"]["name"] in self.slices else "ADDED"
        self.slices[found["metadata"]["name"]] = found
        await self._tell(kind, found)

    async def delete(self, name: str) -> None:
        await self._tell("DELETED", self.slices.pop(name))

    async def bookmark(self) -> None:
        await self._tell("BOOKMARK", {"metadata": {}})

    async def cut(self) -> None:
        """Break every watch off."""
        for writer in list(self._watches):
            writer.close()

    def forget(self) -> None:
        """Versions before now are too old to watch from."""
        self._oldest = self.version

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    async def _tell(self, kind: str, found: dict) -> None:
        self.version += 1
        found = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self.version)}}
        async with self._changed:
            self._events.append((self.version, {"type": kind, "object": found}))
            self._changed.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                parts = urlsplit(head.split(" ", 2)[1])
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                self.requests.append((parts.path, query))
                assert query["labelSelector"] == f"kubernetes.io/service-name={SERVICE}"
                if self.refuse_status or (self.token and f"Bearer {self.token}" not in head):
                    status = self.refuse_status or 401
                    await self._answer(writer, status, {"kind": "Status", "code": status, "message": "no"})
                elif "watch" not in query:
                    await self._answer(writer, 200, self._list(query))
                else:
                    await self._watch(writer, int(query["resourceVersion"]))
                    return
        writer.close()

    def _list(self, query: dict[str, str]) -> dict:
        start = int(query.get("continue", 0))
        items = list(self.slices.values())[start : start + self.page]
        end = start + len(items)
        more = str(end) if end < len(self.slices) else ""
        return {"metadata": {"resourceVersion": str(self.version), "continue": more}, "items": items}

    async def _answer(self, writer: asyncio.StreamWriter, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)
        await writer.drain()

    async def _watch(self, writer: asyncio.StreamWriter, version: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        if version < self._oldest:
            status = {"kind": "Status", "code": 410, "message": "too old resource version"}
            self._chunk(writer, {"type": "ERROR", "object": status})
            writer.write(b"0\r\n\r\n")
            writer.close()
            return
        self._watches.add(writer)
        try:
            while not writer.is_closing():
                for number, event in [each for each in self._events if each[0] > version]:
                    self._chunk(writer, event)
                    version = number
                async with self._changed:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), 0.05)
        finally:
            self._watches.discard(writer)

    def _chunk(self, writer: asyncio.StreamWriter, event: dict) -> None:
        line = json.dumps(event).encode() + b"\n"
        for piece in (line[:7], line[7:]):  # Cut where no line ends.
            writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
