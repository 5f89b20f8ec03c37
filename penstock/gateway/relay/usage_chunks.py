"""vLLM's `stream_options.continuous_usage_stats`: every chunk of a stream has the usage until there.

The chunks of the other sinks are written as they are; only their last field is put in. Rare, so it may cost
more.
"""

from typing import cast

import msgspec

from penstock.backends.base import Delta, Finish, Sink
from penstock.gateway.http.exchange import Exchange

_END = b'"usage":null}\n\n'
_encode = msgspec.json.Encoder().encode


class _Usage(msgspec.Struct, frozen=True, kw_only=True):
    """As vLLM writes it: the details come with the last chunk of all."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class UsageWriter:
    """Stands before an exchange, for the sinks of one reply.

    Holds nothing back, for what is held has no usage of its own.
    """

    holds = False

    def __init__(self, exchange: Exchange, num_prompt: int) -> None:
        self._exchange, self._num_prompt = exchange, num_prompt
        self.num_generated = 0
        """Of all choices."""

    def as_exchange(self) -> Exchange:
        """For a sink, which uses nothing else of one."""
        return cast(Exchange, self)

    def write(self, data: bytes) -> None:
        """Write one chunk."""
        if data.endswith(_END):
            usage = _Usage(
                prompt_tokens=self._num_prompt,
                completion_tokens=self.num_generated,
                total_tokens=self._num_prompt + self.num_generated,
            )
            data = b'%b"usage":%b}\n\n' % (data[: -len(_END)], _encode(usage))
        self._exchange.write(data)


class CountingSink:
    """Counts a choice's tokens before its chunk is written."""

    __slots__ = ("_sink", "_writer")

    def __init__(self, sink: Sink, writer: UsageWriter) -> None:
        self._sink, self._writer = sink, writer

    def on_delta(self, delta: Delta) -> None:
        """More output."""
        self._writer.num_generated += len(delta.token_ids)
        self._sink.on_delta(delta)

    def on_finish(self, finish: Finish) -> None:
        """The end."""
        self._sink.on_finish(finish)
