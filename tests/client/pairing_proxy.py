"""A proxy that pairs two servers by `kv_transfer_params`, like llm-d's sidecar with its connector nixlv2.

Its port for `p2p_port` is the sidecar's `--p2p-connector-port`: with `--enable-p2p-pull`, the sidecar names the node of
the header `x-kv-cache-source-host-port`, by that port, to the node that computes the prompt.
"""

import contextlib
import copy
import http.client
import http.server
import json
import threading
import uuid

from patience import PATIENCE_S

ASK_FOR_TRANSFER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

KV_SOURCE = "x-kv-cache-source-host-port"


class PairingProxy:
    """Has `prefill` compute prompts and `decode` answer. Both are servers with a `port`."""

    def __init__(self, prefill, decode):
        self.prefill = prefill
        self.decode = decode
        self.p2p_port = 7777
        self.between = lambda: None
        self.transfer_params = []
        self.request_ids = []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                name = self.headers.get("x-request-id") or str(uuid.uuid4())
                proxy.serve(self, body, name, self.headers.get(KV_SOURCE))

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def serve(self, handler, body, name, kv_source=None):
        first = copy.deepcopy(body)
        first["stream"] = False
        first.pop("stream_options", None)
        first["max_tokens"] = 1
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        first["kv_transfer_params"] = dict(ASK_FOR_TRANSFER)
        if kv_source:
            host, _, _ = kv_source.rpartition(":")
            source = {"kv_request_id": name, "remote_host": host, "remote_port": self.p2p_port}
            first["kv_transfer_params"]["remote_kv_source"] = source
        status, answer = 0, None
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, headers, answer = post(self.prefill.port, handler.path, first, name)
            self.request_ids.append((name, headers["x-request-id"]))
        if 400 <= status <= 451:
            return reply(handler, status, answer)
        second, cached_tokens = body, None
        if status == 200:
            answer = json.loads(answer)
            # A sidecar warns when the field is missing, and sends the rest.
            params = answer.get("kv_transfer_params")
            self.transfer_params.append(params)
            second = {**body, "kv_transfer_params": params}
            cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.between()
        if body.get("stream"):
            return self.stream(handler, second, name)
        status, headers, answer = post(self.decode.port, handler.path, second, name)
        self.request_ids.append((name, headers["x-request-id"]))
        if status == 200 and cached_tokens is not None:
            answer = json.loads(answer)
            answer["usage"]["prompt_tokens_details"]["cached_tokens"] = cached_tokens
            answer = json.dumps(answer).encode()
        reply(handler, status, answer)

    def stream(self, handler, body, name):
        connection = http.client.HTTPConnection("127.0.0.1", self.decode.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("POST", handler.path, json.dumps(body), headers(name))
            response = connection.getresponse()
            self.request_ids.append((name, response.headers["x-request-id"]))
            handler.send_response(response.status)
            handler.send_header("content-type", response.headers["content-type"])
            handler.send_header("connection", "close")
            handler.end_headers()
            while chunk := response.read1(65536):
                handler.wfile.write(chunk)
        handler.close_connection = True


def headers(name):
    return {"content-type": "application/json", "x-request-id": name}


def post(port, path, body, name="a-test", more_headers=()):
    """Returns status, headers and body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {**headers(name), **dict(more_headers)})
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def reply(handler, status, body):
    handler.send_response(status)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
