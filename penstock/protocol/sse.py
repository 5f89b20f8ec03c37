"""Server-sent events as bytes (WHATWG HTML, section 9.2), the little of them that OpenAI streams use."""

import msgspec

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that went well."""
HEARTBEAT = b": still here\n\n"
"""A comment: clients skip it, proxies see that the connection lives."""

_encoder = msgspec.json.Encoder()


def event(data: bytes) -> bytes:
    r"""One event. `data` must hold no newline; JSON as msgspec writes it never does."""
    return b"data: %b\n\n" % data


def json_event(value: object) -> bytes:
    """One event that carries `value` as JSON."""
    return event(_encoder.encode(value))
