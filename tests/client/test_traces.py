"""Traces and logs, in the form that other programs read."""

import base64
import http.server
import itertools
import json
import signal
import threading
import time

import pytest
from fleet import ROW_BYTES, THREADS, Fleet, num_remote_tokens
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from server_process import ServerProcess, free_port

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
# A span's times are read from two clocks, one after the other. If a thread loses its core in between, the span's times
# are too early by the time lost.
READING_NS = 1_000_000_000


class Collector:
    """Receives OTLP over HTTP, and refuses requests that violate the protocol."""

    def __init__(self):
        self.spans, self.resources, self.headers, self.mistakes = [], [], [], []
        self.service_of = {}
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                try:
                    assert self.path == "/v1/traces"
                    assert self.headers["content-type"] == "application/json"
                    collector._take(json.loads(body), self.headers)
                    status = 200
                except Exception as mistake:
                    collector.mistakes.append(repr(mistake))
                    status = 400
                self.send_response(status)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _take(self, request, headers):
        for of_resource in request["resourceSpans"]:
            for scope in of_resource["scopeSpans"]:
                for span in scope["spans"]:
                    for name in ("traceId", "spanId", "parentSpanId"):
                        if name in span:
                            # OTLP's JSON differs from Protocol Buffers' only here.
                            raw = bytes.fromhex(span[name])
                            span[name] = base64.b64encode(raw).decode()
        parsed = json_format.ParseDict(request, ExportTraceServiceRequest())
        for of_resource in parsed.resource_spans:
            resource = attributes(of_resource.resource)
            self.resources.append(resource)
            for scope in of_resource.scope_spans:
                self.service_of |= {span.span_id: resource["service.name"] for span in scope.spans}
                self.spans += scope.spans
        self.headers.append(dict(headers))

    def of_trace(self, trace_id):
        return [span for span in self.spans if span.trace_id.hex() == trace_id]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        assert not self.mistakes, self.mistakes


def attributes(holder):
    return {pair.key: pair.value.string_value or pair.value.int_value for pair in holder.attributes}


@pytest.fixture
def collector():
    with Collector() as collector:
        yield collector


def complete(server, headers=(), **more):
    return server.client.completions.create(
        model="corella-nano",
        prompt="Once upon",
        extra_headers=dict(headers),
        extra_body={"ignore_eos": True},
        **{"max_tokens": 5, **more},
    )


@pytest.mark.parametrize("stream", [False, True])
def test_where_the_time_of_a_request_went(collector, monkeypatch, stream):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=a%20b")
    with ServerProcess("--device", "mock", "--otlp-endpoint", collector.url) as server:
        begun_ns = time.time_ns()
        answer = complete(server, {"traceparent": PARENT, "x-request-id": "fox-7"}, stream=stream)
        chunks = list(answer) if stream else [answer]
        assert chunks
        server.wait_until(lambda: len(collector.of_trace(TRACE_ID)) == 5, "five spans")
        arrived_ns = time.time_ns()
        # The server counts the spans when the collector has answered.
        server.wait_until(lambda: server.metric("corella_spans_sent_total") >= 5, "the spans are counted")
        assert server.metric("corella_spans_dropped_total") == 0
    spans = {span.name: span for span in collector.of_trace(TRACE_ID)}
    assert spans.keys() == {"POST /v1/completions", "tokenize", "queue", "prefill", "decode"}
    whole = spans.pop("POST /v1/completions")
    assert whole.kind == Span.SPAN_KIND_SERVER
    assert whole.parent_span_id.hex() == PARENT_ID
    described = attributes(whole)
    assert described["http.route"] == "/v1/completions"
    assert described["http.request.method"] == "POST"
    assert described["http.response.status_code"] == 200
    assert described["corella.request_id"] == "fox-7"
    assert whole.status.code == Status.STATUS_CODE_UNSET
    assert begun_ns - READING_NS <= whole.start_time_unix_nano
    assert whole.end_time_unix_nano <= arrived_ns
    at_ns = whole.start_time_unix_nano
    for name in ("tokenize", "queue", "prefill", "decode"):
        part = spans[name]
        assert part.parent_span_id == whole.span_id and len(part.span_id) == 8
        assert at_ns - READING_NS <= part.start_time_unix_nano <= part.end_time_unix_nano + READING_NS
        at_ns = part.end_time_unix_nano
    assert at_ns <= whole.end_time_unix_nano + READING_NS
    assert attributes(spans["decode"])["gen_ai.usage.output_tokens"] == 5
    assert attributes(spans["prefill"])["gen_ai.usage.input_tokens"] > 0
    assert len({span.span_id for span in [whole, *spans.values()]}) == 5
    (resource, *_) = collector.resources
    assert resource["service.name"] == "corella"
    assert resource["deployment.environment.name"] == "test"
    assert collector.headers[0]["x-collector-key"] == "a b"


def test_a_request_without_a_trace_begins_one_and_an_unwanted_trace_is_not_sent(collector):
    with ServerProcess("--device", "mock", "--otlp-endpoint", collector.url) as server:
        complete(server, {"traceparent": PARENT[:-1] + "0"})
        complete(server)
        complete(server, {"traceparent": "00-garbage"})
        roots = lambda: [span for span in collector.spans if span.name == "POST /v1/completions"]
        server.wait_until(lambda: len(roots()) == 2, "two traces")
        server.terminate()
        assert server.wait() == 0
        first, second = roots()
        assert first.trace_id != second.trace_id and not first.parent_span_id
        assert not collector.of_trace(TRACE_ID)


def test_probes_and_scrapes_are_no_spans(collector):
    with ServerProcess("--device", "mock", "--otlp-endpoint", collector.url) as server:
        for path in ("/health", "/ready", "/metrics"):
            assert server.status_of(path) == 200
        assert server.status_of("/v1/models") == 200
        server.terminate()
        assert server.wait() == 0
    assert [span.name for span in collector.spans] == ["GET /v1/models"]


def test_what_waits_is_sent_when_the_server_ends(collector):
    with ServerProcess("--device", "mock", "--otlp-endpoint", collector.url) as server:
        complete(server, {"traceparent": PARENT})
        server.terminate()
        assert server.wait() == 0
        assert len(collector.of_trace(TRACE_ID)) == 5


def test_one_trace_runs_through_both_nodes_of_a_pair(collector, monkeypatch):
    otlp = ("--otlp-endpoint", collector.url)
    with Fleet() as fleet:
        monkeypatch.setenv("OTEL_SERVICE_NAME", "decode-node")
        fleet.decode(*THREADS, *otlp)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "prefill-node")
        prefill = fleet.prefill(*THREADS, *otlp)
        numbers = itertools.count(1)

        def trace_of_both_nodes():
            trace_id = f"{next(numbers):032x}"
            before = num_remote_tokens(prefill)
            complete(prefill, {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}, max_tokens=20)
            return num_remote_tokens(prefill) > before and trace_id

        # Rows may be too late on a busy machine.
        trace_id = prefill.wait_until(trace_of_both_nodes, "a request is served by both nodes")
        prefill.wait_until(lambda: len(collector.of_trace(trace_id)) == 8, "eight spans")
        complete(prefill, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}, max_tokens=20)
    spans = {(collector.service_of[span.span_id], span.name): span for span in collector.of_trace(trace_id)}
    of_prefill = ("POST /v1/completions", "tokenize", "queue", "prefill", "decode", "session", "transfer")
    assert spans.keys() == {*(("prefill-node", name) for name in of_prefill), ("decode-node", "decode")}
    whole = spans["prefill-node", "POST /v1/completions"]
    session = spans["prefill-node", "session"]
    remote = spans["decode-node", "decode"]
    assert session.kind == Span.SPAN_KIND_CLIENT and session.parent_span_id == whole.span_id
    assert remote.kind == Span.SPAN_KIND_SERVER and remote.parent_span_id == session.span_id
    transfer = spans["prefill-node", "transfer"]
    assert transfer.parent_span_id == session.span_id
    # K and V of each prompt token in the built-in model, and the rest of the prompt's pages.
    num_prompt_tokens = attributes(spans["prefill-node", "prefill"])["gen_ai.usage.input_tokens"]
    num_bytes = attributes(transfer)["corella.kv_bytes"]
    assert num_prompt_tokens * ROW_BYTES <= num_bytes and num_bytes % ROW_BYTES == 0
    for inner, outer in ((transfer, session), (remote, session)):
        assert outer.start_time_unix_nano - READING_NS <= inner.start_time_unix_nano
        assert inner.start_time_unix_nano <= outer.end_time_unix_nano + READING_NS
    # A trace that the caller does not record is recorded nowhere.
    assert not collector.of_trace(TRACE_ID)


def test_a_failed_and_an_abandoned_request_are_spans_too(collector):
    with ServerProcess("--device", "mock", "--otlp-endpoint", collector.url) as server:
        with pytest.raises(Exception, match="400"):
            complete(server, {"traceparent": PARENT}, max_tokens=-1)
        server.wait_until(lambda: collector.of_trace(TRACE_ID), "a span")
        (span,) = collector.of_trace(TRACE_ID)
        assert attributes(span)["http.response.status_code"] == 400
        # A client's faulty request is no failure of the server.
        assert span.status.code == Status.STATUS_CODE_UNSET


def test_a_collector_that_is_away_holds_up_no_request():
    gone = f"http://127.0.0.1:{free_port()}"
    with ServerProcess("--device", "mock", "--otlp-endpoint", gone) as server:
        for _ in range(20):
            assert complete(server).usage.completion_tokens == 5
        server.wait_until(lambda: server.metric("corella_spans_dropped_total") >= 100, "spans are lost")
        server.terminate()
        assert server.wait() == 0
        # The line appears once, not for each batch.
        assert server.log().count("spans are lost") == 1


def log_lines(server):
    return [json.loads(line) for line in server.log().splitlines() if line]


def test_a_log_of_json_objects(monkeypatch):
    monkeypatch.setenv("RUST_LOG", "debug")
    with ServerProcess("--device", "mock", "--log-format", "json") as server:
        complete(server, {"x-request-id": "fox-8"})
        server.client.completions.create(
            model="corella-nano", prompt="a", max_tokens=1, extra_body={"user": "x"}, extra_headers={"x-request-id": "fox-9"}
        )
        answered = lambda: [line for line in log_lines(server) if line.get("message") == "answered"]
        server.wait_until(lambda: len({line["id"] for line in answered()} & {"fox-8", "fox-9"}) == 2, "lines")
        (line,) = [line for line in answered() if line["id"] == "fox-8"]
        assert line["level"] == "INFO" and line["target"].startswith("corella_server")
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
        assert any("ready: page http://" in line["message"] for line in log_lines(server))
        # Every line logged while a request is prepared names it.
        said = [line for line in log_lines(server) if "field accepted" in line.get("message", "")]
        assert said
        for line in said:
            assert [span["id"] for span in line["spans"] if span["name"] == "request"] == ["fox-9"]
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert all({"timestamp", "level", "target", "message"} <= line.keys() for line in log_lines(server))
