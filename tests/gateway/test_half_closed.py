"""Clients that send nothing more and wait for their answer, and clients that have left: both begin with the
same packet.
"""

import socket

import pytest

CHAT = "/v1/chat/completions"


def shut(raw):
    raw.socket.shutdown(socket.SHUT_WR)


def last_response(answer: bytes) -> bytes:
    """Without interim responses."""
    while answer.startswith(b"HTTP/1.1 100 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    return answer


@pytest.fixture(scope="module")
def slow(kit):
    running = kit.RunningGateway(kit.make_config(), step_s=0.005)
    yield running
    running.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_shuts_its_side_gets_all_of_its_answer(slow, kit, stream, begun):
    raw = kit.Raw(slow)
    before = len(slow.requests)
    raw.send(kit.post(CHAT, kit.chat(stream=stream, max_tokens=40)))
    got = b""
    if begun and stream:
        got = raw.read_until(b'"content":" ')
    elif begun:
        slow.wait_until(lambda: len(slow.requests) > before)
    shut(raw)
    got += raw.read_all()
    raw.close()
    answer = last_response(got)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"connection: close" in answer or begun, "a stream's head may have gone before"
    if stream:
        assert answer.count(b'"delta":{"content":') == 40
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert b'"completion_tokens":40' in answer


def test_a_half_closed_client_of_http_1_0_gets_no_interim_response(slow, kit):
    raw = kit.Raw(slow)
    raw.send(kit.post(CHAT, kit.chat(max_tokens=10)).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    shut(raw)
    assert raw.read_all().startswith(b"HTTP/1.1 200 OK")
    raw.close()


def test_a_half_closed_client_still_gets_errors_and_small_answers(slow, kit):
    for data, status in ((kit.get("/health"), b"200"), (kit.post(CHAT, {"model": "no"}), b"400")):
        raw = kit.Raw(slow)
        raw.send(data)
        shut(raw)
        assert last_response(raw.read_all()).split()[1] == status
        raw.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_shuts_its_side_and_leaves_then_is_let_go(slow, kit, stream):
    """A reset is seen although nothing is read from the connection any more, and also while nothing is
    written to it.
    """
    raw = kit.Raw(slow)
    raw.send(kit.post(CHAT, kit.chat(stream=stream, max_tokens=30_000)))
    slow.wait_until(lambda: slow.backend.num_streams == 1)
    shut(raw)
    if stream:
        raw.read_until(b"200 OK")
        raw.read_until(b'"content":" ')
    else:
        raw.read_until(b"100 Continue")
    assert slow.call(lambda: slow.backend.num_streams) == 1
    raw.close()
    slow.wait_until(lambda: slow.backend.num_streams == 0)
