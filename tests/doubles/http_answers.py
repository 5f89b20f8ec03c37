"""One request to a server on a connection of its own, and what its client saw: of a stream every token, and
the last event.
"""

import http.client
import json
import threading
from dataclasses import dataclass, field
from typing import Any

from served import PATIENCE_S


@dataclass(slots=True)
class Answer:
    """What a client saw of one request."""

    asked: dict[str, str] = field(default_factory=dict)
    """More headers of the request."""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    tokens: int = 0
    """Of a stream, by its log-probabilities: each token has one."""
    text: str = ""
    """Of a streamed chat."""
    usage: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """`penstock` of its last usage chunk."""
    last: str = ""
    """The last event of a stream."""
    begun: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


def talk(
    port: int, path: str, body: dict | None = None, key: str = "", answer: Answer | None = None
) -> Answer:
    """One request on a connection of its own."""
    answer = answer or Answer()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json", **answer.asked}
    try:
        connection.request(
            "GET" if body is None else "POST", path, json.dumps(body) if body else None, headers
        )
        response = connection.getresponse()
        answer.status, answer.headers = response.status, {k.lower(): v for k, v in response.getheaders()}
        if body is None or not body.get("stream"):
            answer.body = response.read()
        else:
            read_events(response, answer)
    finally:
        connection.close()
        answer.ended.set()
    return answer


def read_events(response: http.client.HTTPResponse, answer: Answer) -> None:
    for line in response:
        if not line.startswith(b"data: "):
            continue
        answer.last = line.removeprefix(b"data: ").decode().strip()
        if answer.last != "[DONE]":
            event = json.loads(answer.last)
            answer.usage = event.get("usage") or answer.usage
            answer.facts |= event.get("penstock", {})
            for choice in event.get("choices", ()):
                answer.tokens += len((choice.get("logprobs") or {}).get("content") or ())
                answer.text += choice.get("delta", {}).get("content") or ""
        answer.begun.set()


def begin(port: int, path: str, body: dict, key: str, answer: Answer | None = None) -> Answer:
    """A stream that is read by a thread; returns when it has begun."""
    answer = answer or Answer()
    threading.Thread(target=talk, args=(port, path, body, key, answer), daemon=True).start()
    assert answer.begun.wait(PATIENCE_S)
    return answer
