"""A collector of traces in a process of its own: OTLP over HTTP in, one JSON line per span out.

Prints its port first. `POST /v1/traces` is answered with the status in the file that is its one argument.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


def value_of(value) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind)


class Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        status = int(Path(sys.argv[1]).read_text())
        if status == 200:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = {each.key: value_of(each.value) for each in resource.resource.attributes}
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    print(json.dumps(self.shown(span, service, body)), flush=True)
        self.send_response(status)
        self.end_headers()

    @staticmethod
    def shown(span, service: dict[str, object], body: bytes) -> dict[str, object]:
        return {
            "service": service["service.name"],
            "name": span.name,
            "trace": span.trace_id.hex(),
            "id": span.span_id.hex(),
            "parent": span.parent_span_id.hex(),
            "kind": span.kind,
            "start_ns": span.start_time_unix_nano,
            "end_ns": span.end_time_unix_nano,
            "error": span.status.message if span.status.code == 2 else "",
            "attributes": {each.key: value_of(each.value) for each in span.attributes},
            "raw": body.decode("latin-1"),
        }

    def log_message(self, *_: object) -> None:
        """Standard output is for spans."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    print(server.server_address[1], flush=True)
    server.serve_forever()
