"""A test collector of OTLP spans and metrics over HTTP and gRPC, with and without TLS. It stores the exports that it receives,
and can reject or delay them."""

import base64
import concurrent.futures
import gzip
import http.server
import json
import ssl
import threading
import time
from dataclasses import dataclass, field

import grpc
from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
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
    """The spans, metrics and requests that the collector received."""

    spans: list = field(default_factory=list)
    metrics: list = field(default_factory=list)
    """The messages with metrics."""
    attempts: list = field(default_factory=list)
    """The times of all received exports, refused ones included, by the clock `time.monotonic`."""
    requests: list = field(default_factory=list)
    """Path and headers of each export."""
    refuse: list = field(default_factory=list)
    """The statuses of the next answers; each replaces a success."""
    delay_s: float = 0
    """The delay of each answer."""
    reject: int = 0
    """The number of spans or data points that the next answer reports as rejected."""
    warning: str = ""
    """The message of answers that report nothing as rejected."""
    retry_after: str = ""
    """The header `Retry-After` of refusals over HTTP."""

    def add(self, message, path: str, headers: dict):
        """Stores one export."""
        self.requests.append((path, {key.lower(): value for key, value in headers.items()}))
        if isinstance(message, metrics_service_pb2.ExportMetricsServiceRequest):
            self.metrics.append(message)
            return
        for resource in message.resource_spans:
            own = values(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [span_of(span, own, scope.scope.name) for span in scope.spans]

    def answer(self, message):
        """Returns the answer to an accepted export."""
        rejected, self.reject = self.reject, 0
        if isinstance(message, metrics_service_pb2.ExportMetricsServiceRequest):
            answer = metrics_service_pb2.ExportMetricsServiceResponse()
            answer.partial_success.rejected_data_points = rejected
        else:
            answer = trace_service_pb2.ExportTraceServiceResponse()
            answer.partial_success.rejected_spans = rejected
        answer.partial_success.error_message = "too many" if rejected else self.warning
        if not answer.partial_success.error_message:
            answer.ClearField("partial_success")
        return answer

    def tree(self, trace: str) -> list:
        """Returns the spans of a trace: each as (names from the root down, names of its events in order)."""
        mine = [span for span in self.spans if span.trace == trace]
        by_id = {span.id: span for span in mine}

        def path(span):
            return [*(path(by_id[span.parent]) if span.parent in by_id else []), span.name]

        return sorted((path(span), list(span.events)) for span in mine)


def message_of(body: bytes, content_type: str, path: str):
    """Parses an export in one of OTLP's HTTP forms. JSON (as Triton sends it) has hexadecimal ids, unlike protobuf's JSON."""
    if path.endswith("/v1/metrics"):
        return metrics_service_pb2.ExportMetricsServiceRequest.FromString(body)
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
    """An HTTP collector that listens on `port` (0: any free port). With `files` (`harness.certificates.Files`) it uses TLS and
    requires a certificate of the client."""

    def __init__(self, port: int = 0, files=None):
        super().__init__()
        collected = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                collected.attempts.append(time.monotonic())
                answer_late(collected.delay_s)
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                message = message_of(body, self.headers["content-type"], self.path)
                status = collected.refuse.pop(0) if collected.refuse else 200
                if status == 200:
                    collected.add(message, self.path, dict(self.headers))
                answer = collected.answer(message).SerializeToString() if status == 200 else b"no"
                self.send_response(status)
                if status != 200 and collected.retry_after:
                    self.send_header("retry-after", collected.retry_after)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        if files:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.root)
            context.load_cert_chain(files.cert, files.key)
            context.verify_mode = ssl.CERT_REQUIRED
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


class GrpcCollector(Collected):
    """A gRPC collector. With `files` it uses TLS and requires a certificate of the client."""

    def __init__(self, files=None):
        super().__init__()
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(self, self.server)
        if files:
            pair = (files.key.read_bytes(), files.cert.read_bytes())
            tls = grpc.ssl_server_credentials([pair], files.root.read_bytes(), require_client_auth=True)
            self.port = self.server.add_secure_port("127.0.0.1:0", tls)
        else:
            self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def Export(self, request, context):
        """The method of both services."""
        self.attempts.append(time.monotonic())
        if self.refuse:
            context.abort(self.refuse.pop(0), "no")
        self.add(request, "Export", dict(context.invocation_metadata()))
        return self.answer(request)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop(None)
