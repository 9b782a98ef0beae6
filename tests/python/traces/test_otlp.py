"""Spans for OpenTelemetry collectors: their content (compared with a real Triton's), the propagation of callers' traces, and the
effects of a collector that is absent, slow or rejects spans."""

import http.client
import json
import socket
import time

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from harness.certificates import Files
from harness.connections import connect, post
from harness.inference import one, simple
from harness.otlp_collector import GrpcCollector, HttpCollector
from harness.peers import missing
from harness.ports import free_ports
from harness.processes import held, memory
from harness.server import ROOT, Server, kill_all, total
from harness.statistics import until_dispatched
from harness.waiting import DEADLINE_S, eventually
from harness.wire import grpc_infer, grpc_tensor
from traces.trace_requests import ask_all, build, inputs, run_triton

WHY_NOT = missing("triton", "triton")
HTTP = ["HTTP_RECV_START", "HTTP_RECV_END", "INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END"]
GRPC = ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "INFER_RESPONSE_COMPLETE", "GRPC_SEND_START", "GRPC_SEND_END"]
MODEL = ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
TRITON = {
    "one": [(["InferRequest"], HTTP), (["InferRequest", "plain"], MODEL), (["InferRequest", "plain", "compute"], COMPUTE)],
    "two": [(["InferRequest"], GRPC), (["InferRequest", "plain"], MODEL), (["InferRequest", "plain", "compute"], COMPUTE)],
    "three": [
        (["InferRequest"], HTTP),
        (["InferRequest", "pipe"], MODEL),
        *[(["InferRequest", "pipe", "plain"], MODEL)] * 2,
        *[(["InferRequest", "pipe", "plain", "compute"], COMPUTE)] * 2,
    ],
    "four": [(["InferRequest"], HTTP), (["InferRequest", "cached"], MODEL), (["InferRequest", "cached", "compute"], COMPUTE)],
    None: [(["InferRequest"], HTTP), (["InferRequest", "cached"], MODEL)],
}
"""The spans and events of the requests of `trace_requests.ask_all`, by request id, as a Triton 2.51 has sent them."""

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def exporting(tmp_path):
    """Starts a server that sends spans: `exporting(collector, "rate=1", ...)` takes values of `--trace-config`."""
    started = []

    def begin(collector, *configs, environment=None, url="", ready=True):
        url = url or f"http://127.0.0.1:{collector.port}/v1/traces"
        chosen = ["mode=opentelemetry", "level=TIMESTAMPS", "opentelemetry,bsp_schedule_delay=100", *configs]
        if environment is None:
            chosen.append(f"opentelemetry,url={url}")
        options = [f"--trace-config={config}" for config in chosen]
        folder = tmp_path / str(len(started))
        server = Server(tmp_path, [build(folder / "models")], [*options, "--cache-config=local,size=1048576"])
        server.environment = environment or {}
        started.append(server)
        server.launch()
        server.wait_until_ready()
        return server

    yield begin
    kill_all(started)


def ask(server, count=1):
    """Sends `count` requests, one after the other."""
    with tritonclient.http.InferenceServerClient(server.http) as client:
        for _ in range(count):
            client.infer("plain", inputs(tritonclient.http))


def roots(collector) -> list:
    """Returns the root spans of requests."""
    return [span for span in collector.spans if span.name == "InferRequest"]


def spans(server, result: str) -> float:
    """Returns the server's count of spans with this result."""
    return total(server.scrape(), "pharos_trace_spans_total", result=result)


def named(collector) -> dict:
    """Returns the spans and events of each request by its id."""
    found = {}
    for root in roots(collector):
        mine = [span for span in collector.spans if span.trace == root.trace]
        model = next(span for span in mine if span.parent == root.id)
        found[model.attributes.get("triton.request_id")] = collector.tree(root.trace)
    return found


@pytest.mark.peers
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_the_live_tritons_spans_are_as_recorded(tmp_path):
    """A real Triton sends the recorded spans."""
    with HttpCollector() as collector:
        url = f"opentelemetry,url=http://127.0.0.1:{collector.port}/v1/traces"
        run_triton(tmp_path, "mode=opentelemetry", "level=TIMESTAMPS", "rate=1", url)
        assert named(collector) == {name: sorted(tree) for name, tree in TRITON.items()}


@pytest.mark.parametrize("make", [HttpCollector, GrpcCollector])
def test_spans_are_tritons(exporting, make):
    """The nesting, events and attributes of spans are those of Triton, over both protocols of the collector."""
    with make() as collector:
        url = {} if make is HttpCollector else {"url": f"http://127.0.0.1:{collector.port}"}
        protocol = [] if make is HttpCollector else ["opentelemetry,protocol=grpc"]
        begun = time.time_ns()
        server = exporting(collector, "rate=1", "opentelemetry,resource=a.b=c", *protocol, **url)
        ask_all(server.http, server.grpc)
        eventually("all spans are received", lambda: len(collector.spans) == 3 + 3 + 6 + 3 + 2)
        eventually("the collector's answer is counted", lambda: spans(server, "exported") == 17)
        assert spans(server, "dropped") == 0
        assert named(collector) == {name: sorted(tree) for name, tree in TRITON.items()}
        for span in collector.spans:
            assert span.scope == "triton-server" and span.kind == 2 and span.error == "" and len(span.id) == 16
            assert span.resource["service.name"] == "triton-inference-server" and span.resource["a.b"] == "c"
            assert {"telemetry.sdk.name", "telemetry.sdk.language", "telemetry.sdk.version"} <= set(span.resource)
            assert begun < span.start <= span.end < time.time_ns()
            assert all(span.start <= at <= span.end for at in span.events.values()), span
        models = {span.attributes["triton.trace_id"]: span for span in collector.spans if span.attributes}
        assert sorted(models) == [1, 2, 3, 4, 5, 6, 7]
        for number, span in models.items():
            parent = 3 if number in (4, 5) else 0
            own = {"triton.model_name": span.name, "triton.model_version": 1, "triton.trace_id": number}
            request = {"triton.request_id": span.attributes["triton.request_id"]} if number != 7 else {}
            assert span.attributes == own | {"triton.trace_parent_id": parent} | request
        settings = json.loads(server.get("/v2/trace/setting")[1])
        assert settings["trace_mode"] == "opentelemetry" and settings["bsp_schedule_delay"] == "100"
        assert settings["resource"] == "a.b=c" and "trace_file" not in settings and "log_frequency" not in settings
        server.stop()


def test_a_callers_trace_is_continued(exporting):
    """`traceparent` is the parent and is followed at any rate; `tracestate` is passed on; the answer has the span of the request.
    With rate 0 no other request is traced."""
    with HttpCollector() as collector:
        server = exporting(collector, "rate=0")
        ask(server, count=3)
        headers = {"traceparent": CALLER, "tracestate": "vendor=x"}
        connection = server.ask("POST", "/v2/models/plain/infer", json.dumps(simple()), headers=headers)
        assert connection[0] == 200
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            client.infer("pipe", inputs(tritonclient.grpc, ("A", "B")), headers=headers)
        eventually("nine spans are received", lambda: len(collector.spans) == 9)
        assert {(root.trace, root.parent, root.state) for root in roots(collector)} == {(TRACE, PARENT, "vendor=x")}
        assert {span.trace for span in collector.spans} == {TRACE}
        answered = []
        for path, body in [("infer", simple()), ("generate", {"INPUT0": list(range(16)), "INPUT1": list(range(16))})]:
            client = http.client.HTTPConnection(server.http, timeout=DEADLINE_S)
            client.request("POST", f"/v2/models/plain/{path}", json.dumps(body), {"traceparent": CALLER})
            response = client.getresponse()
            assert response.status == 200, response.read()
            answered.append(response.headers["traceparent"])
            client.close()
        channel = grpc.insecure_channel(server.grpc)
        tensors = [grpc_tensor(name, "INT32", [1, 16], int_contents=range(16)) for name in ("INPUT0", "INPUT1")]
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.with_call
        _, call = call(grpc_infer("", "plain", tensors).message, metadata=[("traceparent", CALLER)])
        answered.append(dict(call.initial_metadata())["traceparent"])
        channel.close()
        eventually("all spans are received", lambda: len(collector.spans) == 9 + 9)
        own = {f"00-{TRACE}-{root.id}-01" for root in roots(collector)}
        assert set(answered) <= own and len(set(answered)) == 3
        # An invalid `traceparent` is ignored.
        for wrong in ["", "00-0", CALLER.replace("0e", "0E"), CALLER.replace(TRACE, "0" * 32)]:
            server.ask("POST", "/v2/models/plain/infer", json.dumps(simple()), headers={"traceparent": wrong})
        server.stop()
        assert len(roots(collector)) == 5


def test_a_cancelled_and_a_failed_request(exporting):
    """A cancelled request has only the events of receiving; a failure is the status of the span."""
    with HttpCollector() as collector:
        server = exporting(collector, "rate=1")
        assert server.infer("fail", one("FP32", [1], [1]))[0] == 500
        body = post("/v2/models/slow/infer", json.dumps(one("FP32", [1, 1], [1])).encode())
        with held(server, "slow"), connect(server.http_port) as gone:
            gone.sendall(body)
            until_dispatched(server, "slow", 1)
        eventually("both root spans are received", lambda: len(roots(collector)) == 2)
        failed, cancelled = (next(s for s in collector.spans if s.name == name) for name in ("fail", "slow"))
        assert failed.error and list(failed.events) == MODEL
        root = next(root for root in roots(collector) if root.trace == cancelled.trace)
        assert list(root.events) == ["HTTP_RECV_START", "HTTP_RECV_END"]
        assert root.end >= cancelled.end > cancelled.start
        server.stop()


def test_a_refused_request_has_a_span(exporting):
    """A refused request has one span with the reason. The answer names this span, so a caller's trace is complete."""
    with HttpCollector() as collector:
        server = exporting(collector, "rate=0")
        requests = [
            ("plain", "infer", "{"), ("plain", "infer", '{"inputs": []}'), ("missing", "infer", json.dumps(simple())),
            ("plain", "generate", "{}"), ("plain", "generate_stream", "{"),
        ]  # fmt: skip
        named, statuses = set(), []
        for model, path, body in requests:
            client = http.client.HTTPConnection(server.http, timeout=DEADLINE_S)
            client.request("POST", f"/v2/models/{model}/{path}", body, {"traceparent": CALLER})
            response = client.getresponse()
            assert response.read()
            statuses.append(response.status)
            # Other answers return the caller's.
            named |= {response.headers["traceparent"]} - {CALLER}
            client.close()
        assert statuses == [500, 400, 400, 400, 500]
        tensor = inputs(tritonclient.grpc)[0]
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            with pytest.raises(InferenceServerException, match="expected 2 inputs"):
                client.infer("plain", [tensor], headers={"traceparent": CALLER})
            answers = []
            client.start_stream(lambda result, error: answers.append(error), headers={"traceparent": CALLER})
            client.async_stream_infer("plain", [tensor])
            eventually("the stream is answered", lambda: answers)
        eventually("all spans are received", lambda: len(collector.spans) == 7)
        assert {span.name for span in collector.spans} == {"InferRequest"}
        assert all(span.error and span.parent == PARENT and span.end >= span.start for span in collector.spans)
        starts = sorted(list(span.events)[0] for span in collector.spans)
        assert starts == ["GRPC_WAITREAD_START"] * 2 + ["HTTP_RECV_START"] * 5
        assert len(named) == 3 and named <= {f"00-{TRACE}-{span.id}-01" for span in collector.spans}
        server.stop()


def test_variables_of_opentelemetry(exporting):
    """Without options, OpenTelemetry's environment variables set the endpoint and protocol; options override them."""
    with HttpCollector() as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://localhost:{collector.port}/base",
            "OTEL_EXPORTER_OTLP_HEADERS": "x-team=blue%20green,authorization=Bearer%20t",
            "OTEL_RESOURCE_ATTRIBUTES": "zone=z,service.name=no",
            "OTEL_SERVICE_NAME": "mine",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "6",
            "OTEL_METRICS_EXPORTER": "none",
        }
        server = exporting(collector, "rate=1", "opentelemetry,resource=zone=y", environment=environment)
        ask(server, count=4)
        eventually("twelve spans are received", lambda: len(collector.spans) == 12)
        assert all(path == "/base/v1/traces" for path, _ in collector.requests) and len(collector.requests) >= 2
        headers = collector.requests[0][1]
        assert (headers["x-team"], headers["authorization"]) == ("blue green", "Bearer t")
        assert headers["content-type"] == "application/x-protobuf"
        resource = collector.spans[0].resource
        assert (resource["service.name"], resource["zone"]) == ("mine", "y")
        server.stop()


@pytest.mark.parametrize("make", [HttpCollector, GrpcCollector])
def test_spans_are_sent_over_tls(exporting, tmp_path, make):
    """With a client certificate and compression. A collector with an unknown authority receives nothing."""
    files = Files(tmp_path / "files")
    with make(files=files) as collector:
        protocol = ["opentelemetry,protocol=grpc"] if make is GrpcCollector else []
        path = "/v1/traces" if make is HttpCollector else ""
        environment = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"https://localhost:{collector.port}{path}",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        }
        certificates = {
            "OTEL_EXPORTER_OTLP_CERTIFICATE": str(files.root),
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(files.client_cert),
            "OTEL_EXPORTER_OTLP_CLIENT_KEY": str(files.client_key),
        }
        stranger = exporting(collector, "rate=1", *protocol, environment=environment)
        ask(stranger)
        eventually("an export fails", lambda: "does not accept spans" in stranger.log_tail())
        assert collector.spans == []
        stranger.stop()
        server = exporting(collector, "rate=1", *protocol, environment=environment | certificates)
        ask(server)
        eventually("the spans are received", lambda: len(collector.spans) == 3)
        if make is HttpCollector:
            assert collector.requests[0][1]["content-encoding"] == "gzip"
        accepted = {"signal": "traces", "result": "accepted"}
        eventually("it is counted", lambda: total(server.scrape(), "pharos_otlp_exports_total", **accepted) >= 1)
        server.stop()


def test_queued_spans_are_sent_at_exit(exporting):
    """At any export interval."""
    with HttpCollector() as collector:
        server = exporting(collector, "rate=1", "opentelemetry,bsp_schedule_delay=60000")
        ask(server, count=10)
        assert collector.spans == []
        server.stop()
        assert len(collector.spans) == 30


def test_a_queue_that_is_smaller_than_a_batch_is_sent_when_it_is_full(exporting):
    """Its spans do not wait for the export interval, during which all further ones would be dropped."""
    with HttpCollector() as collector:
        sizes = ["opentelemetry,bsp_max_queue_size=3", "opentelemetry,bsp_schedule_delay=4000000000"]
        server = exporting(collector, "rate=1", *sizes)
        ask(server)
        eventually("the spans are received", lambda: len(collector.spans) == 3)
        server.stop()


def test_queued_spans_reach_a_collector_that_starts_late(exporting):
    """Spans that fit into the queue are sent later; others are dropped and counted. The log has one line when the collector is
    lost and one when it is reachable again."""
    (port,) = free_ports(1)
    server = exporting(None, "rate=1", "opentelemetry,bsp_max_queue_size=30", url=f"http://127.0.0.1:{port}/v1/traces")
    # One request, so that the export that fails contains all that was recorded before.
    ask(server)
    eventually("the first export fails", lambda: "does not accept spans" in server.log_tail())
    ask(server, count=60)
    # Ten traces of three spans fit into the queue, besides that of the current export.
    eventually("the other spans are dropped", lambda: spans(server, "dropped") == 3 * 50)
    with HttpCollector(port) as collector:
        eventually("the queued spans are received", lambda: len(collector.spans) == 33)
        eventually("the exported spans are counted", lambda: spans(server, "exported") == 33)
        ask(server)
        eventually("the next spans are received", lambda: len(collector.spans) == 36)
    log = server.log_tail()
    assert (log.count("does not accept spans"), log.count("answers again; 150 spans were lost")) == (1, 1)
    assert total(server.scrape(), "pharos_traces_total", result="dropped") == 50
    server.stop()


@pytest.mark.parametrize("level", ["TIMESTAMPS", "TENSORS"])
def test_a_collector_that_is_slow(exporting, level):
    """Spans are dropped, counted and logged; memory does not grow, because contents of tensors are not copied."""
    with HttpCollector() as collector:
        collector.delay_s = 1
        server = exporting(collector, "rate=1", f"level={level}", "opentelemetry,bsp_max_queue_size=60")
        ask(server, count=2)
        before = memory(server)
        large = tritonclient.http.InferInput("INPUT0", [1 << 20], "FP32")
        large.set_data_from_numpy(np.ones(1 << 20, np.float32))
        with tritonclient.http.InferenceServerClient(server.http) as client:
            for _ in range(20):
                client.infer("large", [large])
        # Inputs and outputs of all requests would be 160 MiB.
        assert memory(server) - before < 80 << 20
        ask(server, count=60)
        eventually("all spans are counted", lambda: spans(server, "dropped") + spans(server, "exported") == 82 * 3)
        assert spans(server, "dropped") > 0 and len(collector.spans) == spans(server, "exported")
        eventually("the dropped spans are logged", lambda: "spans were dropped: the trace collector" in server.log_tail())
        server.stop()


@pytest.mark.parametrize("make, busy, never", [(HttpCollector, 503, 400), (GrpcCollector, 14, 3)])
def test_refusals(exporting, make, busy, never):
    """A `busy` status: spans are sent again. A `never` status: dropped and counted, as are spans that the collector rejects."""
    codes = {14: grpc.StatusCode.UNAVAILABLE, 3: grpc.StatusCode.INVALID_ARGUMENT}
    with make() as collector:
        protocol = ["opentelemetry,protocol=grpc"] if make is GrpcCollector else []
        server = exporting(collector, "rate=1", *protocol)
        collector.refuse = [codes.get(busy, busy)]
        ask(server)
        eventually("the spans are sent again", lambda: len(collector.spans) == 3 and spans(server, "exported") == 3)
        collector.refuse = [codes.get(never, never)]
        ask(server)
        eventually("dropped", lambda: spans(server, "dropped") == 3)
        collector.reject = 2
        ask(server)
        eventually("the spans are counted", lambda: (spans(server, "exported"), spans(server, "dropped")) == (4, 5))
        assert "refused 2 of 3 spans: too many" in server.log_tail()
        collector.warning = "old schema"
        for exported in (7, 10):
            ask(server)
            eventually("the spans are accepted with a warning", lambda: spans(server, "exported") == exported)
        server.stop()
        assert server.log_tail().count("accepted an export with a warning: old schema") == 1, server.log_tail()


def test_exit_does_not_wait_for_a_collector_that_hangs(exporting):
    """The server ends within seconds, and logs that spans were lost."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1/traces"
        server = exporting(None, "rate=1", url=url)
        ask(server, count=2)
        begun = time.monotonic()
        server.stop()
        assert time.monotonic() - begun < 12
        assert "could not be sent" in server.log_tail()


def test_language_models_have_the_attributes_of_generative_models(tmp_path):
    """Chats, streams and several prompts: the parameters, the tokens, the reasons of the end, and events for the first token and the end."""
    with HttpCollector() as collector:
        url = f"http://127.0.0.1:{collector.port}/v1/traces"
        chosen = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=1", "opentelemetry,bsp_schedule_delay=100", f"opentelemetry,url={url}"]
        options = [f"--trace-config={config}" for config in chosen]
        with Server(tmp_path, [ROOT / "examples/language_model/models"], options) as server:
            ask = lambda path, body: server.ask("POST", path, json.dumps({"model": "words", **body}))  # noqa: E731
            chat = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 2, "temperature": 0.5}
            assert ask("/v1/chat/completions", chat)[0] == 200
            assert ask("/v1/chat/completions", chat | {"stream": True, "n": 2, "vllm_xargs": {"delay_ms": 20}})[0] == 200
            assert ask("/v1/completions", {"prompt": ["one two", "three"]})[0] == 200
            assert ask("/v2/models/words/generate", {"text_input": "one"})[0] == 200
            found = lambda: [span for span in collector.spans if span.name == "words"]  # noqa: E731
            eventually("all spans are received", lambda: len(found()) == 4)
    whole, stream, prompts, generated = sorted(found(), key=lambda span: span.start)

    def of(span) -> dict:
        attributes = {key.removeprefix("gen_ai."): value for key, value in span.attributes.items() if key.startswith("gen_ai.")}
        reasons = attributes.pop("response.finish_reasons")
        assert attributes.pop("request.model") == "words"
        return attributes | {"reasons": [value.string_value for value in reasons.values]}

    asked = {"operation.name": "chat", "request.max_tokens": 2, "request.temperature": 0.5, "usage.input_tokens": 3}
    assert of(whole) == asked | {"usage.output_tokens": 2, "reasons": ["length"]}
    assert of(stream) == asked | {"usage.output_tokens": 4, "reasons": ["length"] * 2}
    completed = {"operation.name": "text_completion", "request.max_tokens": 16, "usage.input_tokens": 3, "usage.output_tokens": 3}
    assert of(prompts) == completed | {"reasons": ["stop"] * 2}
    assert of(generated) == {"operation.name": "text_completion", "usage.input_tokens": 1, "usage.output_tokens": 1, "reasons": ["stop"]}
    for span in (whole, stream, prompts, generated):
        assert span.start <= span.events["gen_ai.first_token"] <= span.events["gen_ai.generation_end"] <= span.end
    assert stream.events["gen_ai.generation_end"] - stream.events["gen_ai.first_token"] >= 15_000_000
    assert "three" not in str(collector.spans), "texts of clients are not part of a trace"
