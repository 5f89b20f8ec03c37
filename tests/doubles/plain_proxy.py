"""A reverse proxy in a process of its own that adds no header, as nginx with `proxy_pass` and nothing else.

python plain_proxy.py HOST PORT      says the port that it listens on, on loopback, and ends with its standard
                                     input
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.close()


async def _main(host: str, port: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, port)
        await asyncio.gather(_pump(reader, back), _pump(there, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


@contextlib.contextmanager
def plain_proxy(host: str, port: int) -> Iterator[int]:
    """One in front of a server; the port to ask."""
    command = [sys.executable, __file__, host, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.kill()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2])))
