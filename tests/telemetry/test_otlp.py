"""OTLP as it is written here, read with OpenTelemetry's own messages; and collectors that are not well."""

import http.server
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.errors import ConfigError
from penstock.telemetry.otlp import OtlpExporter
from penstock.telemetry.traces import EndedTrace, RequestTrace, TraceContext

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
values = text | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | st.booleans()
attributes = st.dictionaries(text, values | st.lists(text, max_size=3), max_size=8)


def ended(found: dict, *, error: str = "", parent: TraceContext | None = None) -> EndedTrace:
    trace = RequestTrace(parent, 7 << 64 | 9)
    trace.start_attempt(20, 1, "w-0", "first")
    trace.first_output(30, 1)
    trace.end_attempt(40, 1, "StreamBroken")
    trace.start_attempt(50, 2, "w-1", "migration")
    return EndedTrace(
        trace=trace, name="chat m", offset_ns=1000, started_ns=1005, accepted_ns=1010, ended_ns=1090,
        status=200, error=error, attributes=found,
    )  # fmt: skip


def value_of(value) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind)


def spans_of(body: bytes) -> list:
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (scope,) = resource.scope_spans
    return list(scope.spans)


@given(found=attributes, error=text)
def test_what_is_written_is_what_is_read(found: dict, error: str) -> None:
    exporter = OtlpExporter("http://127.0.0.1:1/v1/traces", version="1.2", instance="gw-1")
    spans = spans_of(exporter.encode([ended(found, error=error)] * 2))
    names = ["chat m", "admit", "queue", "attempt", "prefill", "decode", "migration", "prefill", "relay"]
    assert [span.name for span in spans] == 2 * names
    root, attempt, moved = spans[0], spans[3], spans[6]
    expected = found | ({"error.type": error} if error else {})
    read = [(each.key, value_of(each.value)) for each in root.attributes]
    assert read[: len(found)] == list(found.items())
    assert dict(read) == expected
    assert (root.status.code, root.status.message) == ((2, error) if error else (0, ""))
    assert {span.trace_id for span in spans} == {(7).to_bytes(16)}
    assert len({span.span_id for span in spans}) == len(names)
    assert not root.parent_span_id
    assert (attempt.parent_span_id, spans[5].parent_span_id) == (root.span_id, attempt.span_id)
    assert (attempt.start_time_unix_nano, attempt.end_time_unix_nano) == (1020, 1040)
    assert (moved.start_time_unix_nano, moved.end_time_unix_nano) == (1050, 1090)
    assert (attempt.status.message, moved.status.code) == ("StreamBroken", 0)
    assert [span.kind for span in (root, spans[1], attempt)] == [2, 1, 3]


def test_a_callers_span_is_the_parent_in_another_process(monkeypatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=a%20b,service.name=other")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "edge")
    exporter = OtlpExporter("http://127.0.0.1:1/v1/traces", version="1.2", instance="gw-1")
    parent = TraceContext(trace_id="4b" * 16, span_id="f0" * 8, is_sampled=True)
    body = exporter.encode([ended({}, parent=parent)])
    root, admit = spans_of(body)[:2]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (parent.trace_id, parent.span_id)
    assert (root.flags, admit.flags) == (0x301, 0x101)
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert {each.key: value_of(each.value) for each in resource.resource.attributes} == {
        "service.name": "edge",
        "service.version": "1.2",
        "service.instance.id": "gw-1",
        "deployment.environment": "a b",
    }


class Collector:
    """Answers with these statuses in turn, the last one for ever."""

    def __init__(self, statuses: list[int]) -> None:
        self.got = list[dict[str, str]]()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                outer.got.append(dict(self.headers))
                self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
                self.send_header("location", "/elsewhere")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def exporter(self) -> OtlpExporter:
        address = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        return OtlpExporter(address, version="1", instance="i", pauses_s=(0.0, 0.0))

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collectors() -> Iterator:
    made = list[Collector]()

    def make(*statuses: int) -> Collector:
        made.append(Collector([*statuses]))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_what_a_collector_cannot_take_now_is_sent_again(collectors, monkeypatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x,x-team=a")
    well = collectors(503, 429, 200)
    assert well.exporter().export([ended({})]) == ""
    assert len(well.got) == 3
    assert (well.got[0]["Authorization"], well.got[0]["X-Team"]) == ("Bearer x", "a")
    assert well.got[0]["Content-Type"] == "application/x-protobuf"
    never = collectors(503)
    assert never.exporter().export([ended({})]).startswith("status 503")
    assert len(never.got) == 3


def test_what_a_collector_refuses_is_not(collectors) -> None:
    for status in (400, 302):  # A redirected POST would become a GET.
        refusing = collectors(status)
        assert refusing.exporter().export([ended({})]).startswith(f"status {status}")
        assert len(refusing.got) == 1


def test_nobody_there_and_the_end() -> None:
    exporter = OtlpExporter("http://127.0.0.1:1/v1/traces", version="1", instance="i")
    exporter.close()  # It waits no more.
    assert "refused" in exporter.export([ended({})])


@pytest.mark.parametrize("address", ["ftp://x/v1/traces", "127.0.0.1:4318", "http://", "http://x:port/"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match=r"traces\.endpoint"):
        OtlpExporter(address, version="1", instance="i")


def test_a_file_of_authorities_that_is_not_there(monkeypatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem")
    with pytest.raises(ConfigError, match=r"OTLP_CERTIFICATE: /nowhere/ca\.pem"):
        OtlpExporter("https://collector/v1/traces", version="1", instance="i")
