"""A test collector of OTLP spans over HTTP and gRPC. It stores the exports that it receives, and can reject or delay them."""

import base64
import concurrent.futures
import http.server
import json
import threading
from dataclasses import dataclass, field

import grpc
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from harness.waiting import answer_late


@dataclass
class Span:
    """One received span."""

    name: str
    trace: str
    id: str
    parent: str
    state: str
    kind: int
    start: int
    end: int
    attributes: dict
    events: dict
    error: str
    resource: dict
    scope: str


@dataclass
class Collected:
    """The spans and requests that the collector received."""

    spans: list = field(default_factory=list)
    requests: list = field(default_factory=list)
    """Path and headers of each export."""
    refuse: list = field(default_factory=list)
    """The statuses of the next answers; each replaces a success."""
    delay_s: float = 0
    """The delay of each answer."""
    reject: int = 0
    """The number of spans that the next answer reports as rejected."""

    def add(self, message, path: str, headers: dict):
        """Stores one export."""
        self.requests.append((path, {key.lower(): value for key, value in headers.items()}))
        for resource in message.resource_spans:
            own = values(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [span_of(span, own, scope.scope.name) for span in scope.spans]

    def answer(self):
        """Returns the answer to an accepted export."""
        rejected, self.reject = self.reject, 0
        answer = trace_service_pb2.ExportTraceServiceResponse()
        if rejected:
            answer.partial_success.rejected_spans = rejected
            answer.partial_success.error_message = "too many"
        return answer

    def tree(self, trace: str) -> list:
        """Returns the spans of a trace: each as (names from the root down, names of its events in order)."""
        mine = [span for span in self.spans if span.trace == trace]
        by_id = {span.id: span for span in mine}

        def path(span):
            return [*(path(by_id[span.parent]) if span.parent in by_id else []), span.name]

        return sorted((path(span), list(span.events)) for span in mine)


def message_of(body: bytes, content_type: str):
    """Parses an export in one of OTLP's HTTP forms. JSON (as Triton sends it) has hexadecimal ids, unlike protobuf's JSON."""
    if "json" not in content_type:
        return trace_service_pb2.ExportTraceServiceRequest.FromString(body)

    def ids(found: dict) -> dict:
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in found:
                found[name] = base64.b64encode(bytes.fromhex(found[name])).decode()
        return found

    message = json.loads(body, object_hook=ids)
    return json_format.ParseDict(message, trace_service_pb2.ExportTraceServiceRequest())


def values(attributes) -> dict:
    """Returns attributes as a dictionary."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


def span_of(span, resource: dict, scope: str) -> Span:
    """Converts a protobuf span to a `Span`."""
    return Span(
        span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.trace_state, span.kind,
        span.start_time_unix_nano, span.end_time_unix_nano, values(span.attributes),
        {event.name: event.time_unix_nano for event in span.events}, span.status.message, resource, scope,
    )  # fmt: skip


class HttpCollector(Collected):
    """An HTTP collector that listens on `port` (0: any free port)."""

    def __init__(self, port: int = 0):
        super().__init__()
        collected = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                answer_late(collected.delay_s)
                status = collected.refuse.pop(0) if collected.refuse else 200
                if status == 200:
                    collected.add(message_of(body, self.headers["content-type"]), self.path, dict(self.headers))
                answer = collected.answer().SerializeToString() if status == 200 else b"no"
                self.send_response(status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


class GrpcCollector(Collected, trace_service_pb2_grpc.TraceServiceServicer):
    """A gRPC collector."""

    def __init__(self):
        super().__init__()
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def Export(self, request, context):
        if self.refuse:
            context.abort(self.refuse.pop(0), "no")
        self.add(request, "Export", dict(context.invocation_metadata()))
        return self.answer()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop(None)
