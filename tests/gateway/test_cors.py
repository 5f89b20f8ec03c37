"""CORS where all origins are listed, and where none is.

With a list, on a whole server: tests/cli/test_operator.py.
"""


def reported(kit, running, request: bytes) -> dict[str, str]:
    """The headers about origins of the answer to one raw request."""
    raw = kit.Raw(running)
    raw.send(request)
    head = raw.read_all().partition(b"\r\n\r\n")[0].decode().lower()
    raw.close()
    fields = [line.partition(": ") for line in head.split("\r\n")[1:]]
    return {name: value for name, _, value in fields if name.startswith("access-control-") or name == "vary"}


def get(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", "Connection: close", *lines, "", ""]).encode()


def test_by_default_nothing_is_said(gateway, kit) -> None:
    assert reported(kit, gateway, get("/v1/models", "Origin: https://a.example")) == {}
    preflight = get("/v1/models", "Origin: https://a.example", "Access-Control-Request-Method: GET")
    assert reported(kit, gateway, preflight.replace(b"GET /", b"OPTIONS /", 1)) == {}


def test_all_origins_are_let_in_without_credentials(start, kit) -> None:
    running = start(kit.make_config(cors_origins=("*",)))
    for path, key in (("/v1/models", kit.KEY), ("/v1/models", "wrong"), ("/v1/nothing-here", kit.KEY)):
        found = reported(kit, running, get(path, "Origin: https://a.example", f"Authorization: Bearer {key}"))
        assert found.pop("access-control-expose-headers").startswith("retry-after, x-request-id")
        assert found == {"access-control-allow-origin": "*"}
    assert reported(kit, running, get("/v1/models")) == {}  # No browser asks.


def test_a_preflight_repeats_only_what_headers_may_hold(start, kit) -> None:
    running = start(kit.make_config(cors_origins=("*",)))
    lines = (
        "Origin: null",
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: x-a, <script>",
    )
    found = reported(kit, running, get("/v1/chat/completions", *lines).replace(b"GET /", b"OPTIONS /", 1))
    assert found == {
        "access-control-allow-origin": "*",
        "access-control-allow-methods": "post",
        "access-control-max-age": "600",
    }


def test_what_the_connection_refuses_by_itself_can_be_read_too(start, kit) -> None:
    running = start(kit.make_config(cors_origins=("https://a.example",), body_bytes_max=64))
    body = b"x" * 65
    request = kit.post("/v1/chat/completions", body, "Origin: https://a.example", "Connection: close")
    found = reported(kit, running, request)
    assert found["access-control-allow-origin"] == "https://a.example"
