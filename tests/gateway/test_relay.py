"""Streams on the wire: golden bytes, clients that leave or read slowly, heartbeats, drain."""

import re
import socket
import struct

import pytest
from told_script import NEVER_S

from penstock.errors import EngineFault, StreamBroken

CHAT = "/v1/chat/completions"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nx-request-id: req-ID\r\n"
    b"cache-control: no-cache\r\nx-accel-buffering: no\r\nx-penstock-model: tiny\r\nx-penstock-queue-ms: "
    b"0\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
)


def dechunk(body):
    out = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        out, body = out + rest[:length], rest[length + 2 :]
    return out


def masked(data):
    """The bytes without what differs from run to run."""
    data = re.sub(rb"(req|chatcmpl|cmpl)-[0-9a-f]{24}", rb"\1-ID", data)
    data = re.sub(rb"queue-ms: \d+", b"queue-ms: 0", data)
    return re.sub(rb'"created":\d+', b'"created":0', data)


def chunk(delta, reason=b"null"):
    return (
        b'data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"tiny",'
        b'"system_fingerprint":"fp_67741e3006","choices":[{"index":0,"delta":%b,"logprobs":null,'
        b'"finish_reason":%b}]}\n\n' % (delta, reason)
    )


def test_golden_bytes_of_a_stream(start, kit):
    running = start(script=lambda request: iter(["Hi ", "水\n"]))
    raw = kit.Raw(running)
    answer = raw.send(kit.post(CHAT, kit.chat(stream=True), "Connection: close")).read_all()
    raw.close()
    head, end, body = answer.partition(b"\r\n\r\n")
    assert masked(head + end) == STREAM_HEAD
    assert masked(dechunk(body)) == (
        chunk(b'{"role":"assistant","content":"","refusal":null}')
        + chunk(b'{"content":"Hi "}')
        + chunk('{"content":"水\\n"}'.encode())
        + chunk(b"{}", b'"stop"')
        + b"data: [DONE]\n\n"
    )


def test_a_connection_carries_on_after_a_stream(raw, kit):
    raw.send(kit.post(CHAT, kit.chat(stream=True, seed=1, max_tokens=2)))
    assert raw.read_until(b"0\r\n\r\n").endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    raw.send(kit.get("/health"))
    assert b'"ok"' in raw.read_until(b'"ok"}')


def idle(running):
    dispatcher = running.gateway._dispatcher
    return running.backend.num_streams == 0 and dispatcher.num_streams == 0 and len(dispatcher) == 0


def leave_by_reset(raw):
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "leave",
    [lambda raw: raw.close(), leave_by_reset],
    ids=["close", "reset"],
)
def test_a_client_that_leaves_aborts_all_its_streams(start, kit, stream, leave):
    running = start(step_s=0.001)
    raw = kit.Raw(running)
    raw.send(kit.post(CHAT, kit.chat(stream=stream, n=3, max_tokens=30_000)))
    running.wait_until(lambda: running.backend.num_streams == 3)
    leave(raw)
    running.wait_until(lambda: idle(running))
    running.wait_until(lambda: running.gateway._server.num_connections == 0)
    raw.close()
    metrics = running.metrics.render()
    assert b"penstock_client_disconnects_total 1.0" in metrics
    assert b'outcome="abort"} 1.0' in metrics
    assert "outcome=abort" in running.log_text.getvalue()


def test_a_client_that_reads_too_slowly_is_cut_off(start, kit):
    running = start(buffer_bytes_max=100_000)
    raw = kit.Raw(running)
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.send(kit.post(CHAT, kit.chat(stream=True, n=8, max_tokens=32_000)))
    running.wait_until(lambda: running.requests and idle(running))
    raw.close()
    assert b"penstock_slow_client_aborts_total 1.0" in running.metrics.render()


def test_trouble_in_the_middle_is_a_last_event(start, kit):
    running = start(step_s=0.001)
    raw = kit.Raw(running)
    raw.send(kit.post(CHAT, kit.chat(stream=True, n=2, max_tokens=30_000)))
    got = raw.read_until(b'"content":" ')
    running.call(lambda: running.backend.fail(running.requests[-1].request_id, EngineFault("NaN logits")))
    got += raw.read_all()
    raw.close()
    assert got.endswith(b"\r\n0\r\n\r\n")
    assert b"[DONE]" not in got
    last = got.split(b"data: ")[-1]
    assert b'{"error":{"message":"NaN logits","type":"api_error","param":null,"code":null}}' in last
    running.wait_until(lambda: idle(running))


def test_the_client_library_raises_on_trouble_in_the_middle(start, kit):
    import openai

    running = start(step_s=0.001)
    running.backend.resumes = False
    with kit.openai_client(running) as client:
        stream = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        next(stream)
        running.call(
            lambda: running.backend.fail(running.requests[-1].request_id, StreamBroken("worker gone"))
        )
        with pytest.raises(openai.APIError, match="worker gone"):
            list(stream)


def test_a_silent_stream_shows_that_it_lives(start, kit):
    running = start(step_s=30, heartbeat_s=0.02)
    raw = kit.Raw(running)
    raw.send(kit.post(CHAT, kit.chat(stream=True)))
    got = raw.read_until(b": still here\n\n")
    assert got.startswith(b"HTTP/1.1 200")
    raw.read_until(b": still here\n\n")
    raw.close()
    running.wait_until(lambda: idle(running))


def test_heartbeats_can_be_off(start, kit):
    running = start(heartbeat_s=0)
    raw = kit.Raw(running)
    raw.send(kit.post(CHAT, kit.chat(stream=True, max_tokens=1)))
    assert b"still here" not in raw.read_until(b"[DONE]")
    raw.close()


# --- drain ----------------------------------------------------------------------------------------


def test_streams_finish_during_a_drain(start, kit):
    config = kit.make_config(drain_timeout_s=20)
    running = start(config, step_s=NEVER_S)
    raw, idler = kit.Raw(running), kit.Raw(running)
    idler.send(kit.get("/ready"))
    idler.read_until(b"}]}")
    raw.send(kit.post(CHAT, kit.chat(stream=True, seed=1, max_tokens=2)))
    running.wait_until(lambda: running.backend.num_streams == 1)
    running.call(running.backend._step)
    raw.read_until(b'"content":" ')
    running.begin_stop()
    running.wait_until(lambda: running.gateway._services.draining)
    refused = idler.send(kit.post(CHAT, kit.chat())).read_all()  # A connection that waited for nothing.
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"connection: close" in refused
    late = kit.Raw(running)  # And a new one.
    assert b'"code":"draining"' in late.send(kit.post(CHAT, kit.chat())).read_all()
    late.close()
    running.call(running.backend._step)
    answer = raw.read_all()
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    running.stop()
    with pytest.raises(ConnectionRefusedError):
        kit.Raw(running)
    raw.close()
    idler.close()


def test_a_lame_duck_is_not_ready_and_serves(start, kit):
    running = start(kit.make_config(drain_timeout_s=20), step_s=0.001)
    idler = kit.Raw(running)
    idler.send(kit.get("/ready"))
    idler.read_until(b"}]}")
    running.begin_stop(lameduck_s=60)
    running.wait_until(lambda: running.gateway._services.leaving)
    prober = kit.Raw(running)
    ready = prober.send(kit.get("/ready")).read_all()
    prober.close()
    assert ready.startswith(b"HTTP/1.1 503 ")
    assert b'"status":"draining"' in ready
    for raw in (idler, kit.Raw(running)):
        answer = raw.send(kit.post(CHAT, kit.chat(max_tokens=1))).read_all()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer
        raw.close()
    holder = kit.Raw(running)
    holder.send(kit.post(CHAT, kit.chat(stream=True, max_tokens=30_000)))
    holder.read_until(b'"content":" ')
    running.call(running.gateway.hurry)
    answer = holder.read_all()
    assert b'"code":"draining"' in answer
    assert answer.endswith(b"\r\n0\r\n\r\n")
    holder.close()
    running.stop()


@pytest.mark.parametrize("listens", [True, False])
def test_a_connection_is_not_closed_behind_a_stream_whose_head_did_not_say_so(start, kit, listens):
    running = start(kit.make_config(drain_timeout_s=20), step_s=NEVER_S)
    raw, holder = kit.Raw(running), kit.Raw(running)
    for each in (raw, holder):
        each.send(kit.post(CHAT, kit.chat(stream=True, seed=1, max_tokens=2)))
    running.wait_until(lambda: running.backend.num_streams == 2)
    running.call(running.backend._step)
    raw.read_until(b'"content":" ')
    running.begin_stop(lameduck_s=60, listens=listens)
    running.wait_until(lambda: running.gateway._services.leaving)
    running.call(running.backend._step)
    raw.read_until(b"\r\n0\r\n\r\n")
    raw.send(kit.post(CHAT, kit.chat(seed=1, max_tokens=1)))
    running.wait_until(lambda: running.backend.num_streams == 1)
    running.call(running.backend._step)
    answer = raw.read_all()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answer
    raw.close()
    holder.close()
    running.call(running.gateway.hurry)
    running.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_ends_in_time_with_a_last_event(start, kit, stream):
    running = start(kit.make_config(drain_timeout_s=0.05), step_s=0.001)
    raw = kit.Raw(running)
    raw.send(kit.post(CHAT, kit.chat(stream=stream, max_tokens=30_000)))
    running.wait_until(lambda: running.backend.num_streams == 1)
    if stream:
        raw.read_until(b'"content":" ')
    running.begin_stop()
    answer = raw.read_all()
    raw.close()
    running.stop()
    assert b'"code":"draining"' in answer
    assert b"[DONE]" not in answer
    if stream:
        assert answer.endswith(b"\r\n0\r\n\r\n")
    else:
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close" in answer
        assert b"retry-after: 1" in answer
    assert running.backend.num_streams == 0


def test_requests_on_open_connections_are_refused_while_draining(start, kit):
    running = start(kit.make_config(drain_timeout_s=20), step_s=NEVER_S)
    raw = kit.Raw(running)
    whole = kit.post(CHAT, kit.chat())
    raw.send(whole[:-5])  # In flight when the drain begins.
    holder = kit.Raw(running)
    holder.send(kit.post(CHAT, kit.chat(stream=True, seed=1, max_tokens=2)))
    running.wait_until(lambda: running.backend.num_streams == 1)
    running.call(running.backend._step)
    holder.read_until(b'"content":" ')
    running.begin_stop()
    running.wait_until(lambda: running.gateway._services.draining)
    answer = raw.send(whole[-5:]).read_all()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"draining"' in answer
    running.call(running.backend._step)
    assert holder.read_all().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    raw.close()
    holder.close()
