import asyncio
from collections.abc import Awaitable, Callable

import pytest
from scripted_endpoint import Script, StandIn

from penstock.bench.client import ApiAddress, CannotConnect, Client, ClientLimits, EndpointError
from penstock.errors import ConfigError


class Collect:
    def __init__(self) -> None:
        self.data = b""

    def on_bytes(self, data: bytes) -> None:
        self.data += data


async def with_raw(
    answer: bytes | None, use: Callable[[Client], Awaitable[None]], *, hang: bool = False
) -> None:
    """A server that sends `answer` to whatever comes and closes (or hangs)."""

    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer or b"")
        if hang:
            await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = Client(
        ApiAddress("http", "127.0.0.1", port, "/v1"),
        limits=ClientLimits(request_timeout_s=0.2 if hang else 5),
    )
    async with server:
        await use(client)
        await client.close()
        await ended.wait()


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1"),
        ("http://host", "http://host/v1"),
        ("https://host/api", "https://host/api"),
        ("http://[::1]:9", "http://[::1]:9/v1"),
    ],
)
def test_urls(url: str, canonical: str) -> None:
    assert ApiAddress.parse(url).url == canonical


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://host", "http://", "http://h:99999", "http://h/a b", "http://h/ä"]
)
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        ApiAddress.parse(url)


def test_a_key_that_breaks_headers_is_refused() -> None:
    with pytest.raises(ConfigError, match="key"):
        Client(ApiAddress("http", "h", 1, ""), key="a\r\nx: y")


def test_connections_are_reused() -> None:
    async def main() -> None:
        stand_in = StandIn()
        async with stand_in.listening() as url:
            client = Client(ApiAddress.parse(url))
            for _ in range(3):
                assert (await client.get("/models")).status == 200
            assert stand_in.connections == 1
            await client.close()

    asyncio.run(main())


def test_a_stale_connection_is_replaced() -> None:
    async def main() -> None:
        served: list[int] = []
        ended = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            served.append(1)
            await reader.read(1)  # The first connection takes a second request and closes without an answer.
            writer.close()
            if len(served) == 2:
                ended.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            client = Client(ApiAddress("http", "127.0.0.1", server.sockets[0].getsockname()[1], "/v1"))
            assert (await client.get("/a")).body == b"ok"
            assert (await client.get("/b")).body == b"ok"
            await client.close()
            await ended.wait()
            assert len(served) == 2

    asyncio.run(main())


def test_a_200_goes_to_the_sink_and_errors_do_not() -> None:
    async def main() -> None:
        stand_in = StandIn(Script(refuse_status=429))
        async with stand_in.listening() as url:
            client, sink = Client(ApiAddress.parse(url)), Collect()
            response = await client.post("/chat/completions", b'{"messages": []}', sink)
            assert (response.status, sink.data) == (429, b"")
            assert b"refused" in response.body
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"", "closed the connection"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "not HTTP"),
    ],
)
def test_broken_answers(answer: bytes, complaint: str) -> None:
    async def use(client: Client) -> None:
        with pytest.raises(EndpointError, match=complaint):
            await client.get("/x")

    asyncio.run(with_raw(answer, use))


def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    async def use(client: Client) -> None:
        response = await client.get("/x")
        assert (response.status, response.body) == (200, b"all of it")

    asyncio.run(with_raw(b"HTTP/1.0 200 OK\r\n\r\nall of it", use))


def test_a_1xx_answer_is_not_the_answer() -> None:
    async def use(client: Client) -> None:
        assert (await client.get("/x")).body == b"ok"

    early = b"HTTP/1.1 103 Early Hints\r\n\r\n"
    asyncio.run(with_raw(early + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", use))


def test_silence_times_out() -> None:
    async def use(client: Client) -> None:
        with pytest.raises(EndpointError, match=r"within 0\.2 s"):
            await client.get("/x")

    asyncio.run(with_raw(None, use, hang=True))


def test_nobody_there() -> None:
    async def main() -> None:
        async with StandIn().listening() as url:
            pass
        with pytest.raises(CannotConnect, match="connection refused"):
            await Client(ApiAddress.parse(url)).get("/models")

    asyncio.run(main())


def test_cancelling_hangs_up() -> None:
    async def main() -> None:
        stand_in = StandIn(Script(gap_s=0.01))
        async with stand_in.listening() as url:
            client, seen = Client(ApiAddress.parse(url)), asyncio.Event()

            class Sink:
                def on_bytes(self, data: bytes) -> None:
                    seen.set()

            body = b'{"messages": [], "stream": true, "ignore_eos": true, "max_tokens": 100000}'
            task = asyncio.create_task(client.post("/chat/completions", body, Sink()))
            await seen.wait()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            async with asyncio.timeout(5):
                while not stand_in.hung_up:
                    await asyncio.sleep(0)

    asyncio.run(main())
