"""Letting a backend's streams end."""

import asyncio
from collections.abc import Mapping

from penstock.backends.base import Generation
from penstock.types import RequestId


async def end_streams(
    streams: Mapping[RequestId, Generation], none_left: asyncio.Event, timeout_s: float
) -> None:
    """Wait until `streams` is empty, which `none_left` tells; after the timeout abort those that are still in it."""
    if not streams:
        return
    none_left.clear()
    try:
        async with asyncio.timeout(timeout_s):
            await none_left.wait()
    except TimeoutError:
        for stream in list(streams.values()):
            stream.abort()
