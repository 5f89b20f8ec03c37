"""The items of a response, without a gateway: what they hold, and that a stream is freed with its request."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any, cast

from penstock.gateway.relay.responses import ResponseStream
from penstock.text.reasoning import AnswerParser


def test_a_stream_is_freed_without_the_collector() -> None:
    class Stream(ResponseStream):
        __slots__ = ("__weakref__",)

    exchange = SimpleNamespace(on_disconnect=None, on_caught_up=None, on_full=None, terms=None)
    context = SimpleNamespace(
        exchange=exchange, tally=None, clock=None, listener=None, head=SimpleNamespace(id="resp_1"), ids=None
    )
    gc.disable()
    try:
        stream = Stream(cast(Any, context), cast(Any, None), AnswerParser(), lambda: 0, shows_logprobs=False)
        found = weakref.ref(stream)
        exchange.on_disconnect = exchange.on_caught_up = exchange.on_full = None  # As when it is over.
        del stream
        assert found() is None
    finally:
        gc.enable()
