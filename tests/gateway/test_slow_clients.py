"""Back-pressure: text held back for slow clients and for its own kind, on the wire and as a property."""

import re
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.base import Delta, Finish
from penstock.errors import EngineFault
from penstock.gateway.http.exchange import Ending, Exchange, RequestHead
from penstock.gateway.http.terms import RelayTerms
from penstock.gateway.relay.relay import StreamReply, TextSink
from penstock.gateway.relay.reply import Context
from penstock.protocol.stream import ChatChunks, StreamHead
from penstock.rng import IdSource
from penstock.types import FinishReason, Usage

CHAT = "/v1/chat/completions"
NUM_TOKENS = 24_000  # Six megabytes of events: more than a loopback socket's buffer.


def events_of(answer):
    return [msgspec.json.decode(line) for line in re.findall(rb"data: (\{.*\})\n", answer)]


def contents(answer, index=0):
    choices = [choice for event in events_of(answer) for choice in event.get("choices", ())]
    return [c["delta"]["content"] for c in choices if c["index"] == index and "content" in c["delta"]]


def whole_texts(running, kit, **fields):
    raw = kit.Raw(running)
    answer = raw.send(kit.post(CHAT, kit.chat(seed=1, **fields), "Connection: close")).read_all()
    raw.close()
    choices = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["choices"]
    return [choice["message"]["content"] for choice in choices]


def deaf(running, kit):
    """A client that asks for a long stream and does not read."""
    raw = kit.Raw(running)
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.send(kit.post(CHAT, kit.chat(stream=True, seed=1, max_tokens=NUM_TOKENS), "Connection: close"))
    running.wait_until(lambda: running.requests)  # It may be over before anybody looks.
    return raw


def test_a_slow_client_gets_all_of_its_text_in_fewer_events(start, kit):
    running = start(kit.make_config(), buffer_bytes_max=200_000)
    raw = deaf(running, kit)
    running.wait_until(lambda: running.backend.num_streams == 0)  # The engine was not held up.
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    got = contents(raw.read_all())
    raw.close()
    assert ["".join(got)] == whole_texts(running, kit, max_tokens=NUM_TOKENS)
    assert len(got) < NUM_TOKENS
    assert b"penstock_slow_client_aborts_total 0.0" in running.metrics.render()


def test_it_is_cut_off_where_nothing_is_held_back(start, kit):
    """`server.slow_client: abort`."""
    running = start(kit.make_config(slow_client="abort"), buffer_bytes_max=200_000)
    raw = deaf(running, kit)
    running.wait_until(lambda: b"penstock_slow_client_aborts_total 1.0" in running.metrics.render())
    assert running.backend.num_streams == 0
    raw.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_takes_nothing_is_cut_off_in_time(start, kit, stream):
    running = start(
        script=lambda request: iter(["x" * 4000] * 3000), buffer_bytes_max=10**9, write_timeout_s=0.2
    )
    raw = kit.Raw(running)
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.send(kit.post(CHAT, kit.chat(stream=stream, max_tokens=3000)))
    running.wait_until(lambda: running.requests)
    running.wait_until(lambda: running.gateway._server.num_connections == 0)
    assert running.backend.num_streams == 0
    raw.close()


def test_text_of_one_moment_is_one_event_after_the_first(start, kit):
    running = start(kit.make_config(flush_ms=1000), step_s=0.001)
    raw = kit.Raw(running)
    raw.send(kit.post(CHAT, kit.chat(stream=True, seed=1, max_tokens=50, n=2), "Connection: close"))
    answer = raw.read_all()
    raw.close()
    for index, text in enumerate(whole_texts(running, kit, max_tokens=50, n=2)):
        opening, first, *rest = contents(answer, index)
        assert opening == ""
        assert text.startswith(first)
        assert len(first) < len(text)
        assert first + "".join(rest) == text
        assert len(rest) < 25
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_what_was_held_back_goes_out_before_an_error(start, kit):
    running = start(kit.make_config(flush_ms=60_000), step_s=30)
    raw = kit.Raw(running)
    raw.send(kit.post(CHAT, kit.chat(stream=True)))
    running.wait_until(lambda: running.requests)
    request_id = running.requests[-1].request_id
    for _ in range(3):
        running.call(lambda: running.backend._streams[request_id].step())
    running.call(lambda: running.backend.fail(request_id, EngineFault("NaN logits")))
    answer = raw.read_all()
    raw.close()
    assert len(contents(answer)) == 3  # The role, the first word, and two words in one event.
    assert "error" in events_of(answer)[-1]


# --- as a property ---------------------------------------------------------------------------------


class Pipe:
    """A wire whose client reads when told to."""

    def __init__(self):
        self.paused, self.sent, self.is_cut, self.unread = False, b"", False, 0

    def write(self, data):
        self.sent += data
        if self.paused:
            self.unread += len(data)

    def buffered_bytes(self):
        return self.unread

    def response_done(self, *, keep_alive):
        pass

    def cut(self):
        self.is_cut = True


class Timer:
    """A flusher that fires when told to."""

    def __init__(self):
        self.waiting = []

    def soon(self, holder):
        self.waiting.append(holder)

    def fire(self):
        waiting, self.waiting = self.waiting, []
        for holder in waiting:
            holder.release()


class Listener:
    def on_first_output(self, reply):
        pass

    def on_tokens(self, reply):
        pass

    def on_attempt_failed(self, reply, error):
        return False

    def on_client_left(self, reply):
        pass

    def on_ended(self, reply):
        return False


class Engine:
    def generate(self, request, sink):
        return self

    def abort(self):
        pass

    def pause_reading(self):
        return False


class Clock:
    def now_ns(self):
        return 0


def make_stream(*, pauses, flushes, num_choices, bound):
    pipe, timer = Pipe(), Timer()
    terms = RelayTerms(
        buffer_bytes_max=bound, pauses=pauses, flusher=timer if flushes else None, write_timeout_s=0
    )
    exchange = Exchange(
        RequestHead(method="POST", path="/", headers={}, version="1.0"),
        pipe,
        client="",
        terms=terms,
        on_finished=lambda exchange: None,
    )
    head = StreamHead(id="a", created=0, model="m", fingerprint="f", include_usage=False)
    context = Context(exchange=exchange, clock=Clock(), listener=Listener(), head=head, ids=IdSource(seed=1))
    reply = StreamReply(context, ChatChunks.KIND)
    sinks = [TextSink(reply, ChatChunks(head, i), i, b"") for i in range(num_choices)]
    reply.start(Engine(), [(None, sink) for sink in sinks])
    return pipe, timer, exchange, sinks


TEXT = st.text(max_size=4) | st.sampled_from(['"', "\\", "\n", "水", "😀"])
STEPS = st.lists(
    st.tuples(st.integers(0, 2), TEXT) | st.sampled_from(["pause", "resume", "fire"]), max_size=40
)


@given(STEPS, st.booleans(), st.booleans())
def test_no_text_is_lost_moved_or_sent_while_its_client_must_be_waited_for(steps, pauses, flushes):
    pipe, timer, exchange, sinks = make_stream(pauses=pauses, flushes=flushes, num_choices=3, bound=10**6)
    said = ["", "", ""]
    for step in steps:
        before, waits = len(pipe.sent), exchange.waits and exchange.streaming
        if step == "pause":
            pipe.paused = True
            exchange.fell_behind()
        elif step == "resume":
            pipe.paused, pipe.unread = False, 0
            exchange.caught_up()
        elif step == "fire":
            timer.fire()
        else:
            index, text = step
            fresh = sinks[index]._began
            sinks[index].on_delta(Delta(text, (1,)))
            said[index] += text
            waits = waits and fresh  # A choice's first text leaves at once.
        if waits and step != "resume":
            assert len(pipe.sent) == before
    for sink in sinks:
        sink.on_finish(Finish(reason=FinishReason.STOP, usage=Usage(prompt_tokens=1)))
    assert ["".join(contents(pipe.sent, i)) for i in range(3)] == said
    assert pipe.sent.endswith(b"data: [DONE]\n\n")
    assert exchange.ending is Ending.ANSWERED


@given(st.booleans(), st.integers(1, 50))
def test_what_is_held_back_and_what_is_buffered_have_one_bound(pauses, size):
    pipe, _, exchange, (sink,) = make_stream(pauses=pauses, flushes=False, num_choices=1, bound=5000)
    sink.on_delta(Delta("a", (1,)))
    pipe.paused = True
    exchange.fell_behind()
    for _ in range(6000):
        if not exchange.is_open:
            break
        sink.on_delta(Delta("x" * size, (1,)))
        assert len(sink._held) + pipe.unread <= 5000 + 400
    assert exchange.ending is Ending.OVERRUN
    assert pipe.is_cut
