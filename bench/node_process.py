"""A node of the built binary, and its answers."""

import http.client
import json
import re
import socket
import subprocess
import time
from pathlib import Path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class NodeProcess:
    def __init__(self, binary, options, log):
        """Starts a server, whose standard error goes to the file `log`."""
        self.port = free_port()
        self._log = Path(log)
        command = [str(option) for option in (binary, "serve", *options, "--port", self.port)]
        with open(self._log, "wb") as file:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    @property
    def pid(self):
        return self._process.pid

    def wait_ready(self):
        while True:
            assert self._process.poll() is None, f"a server has ended:\n{self._log.read_text()}"
            try:
                if self._get("/ready").status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)

    def wait_for_decode_nodes(self, number):
        while self.metric("corella_decode_nodes", standing="healthy") < number:
            time.sleep(0.05)

    def stop(self):
        self._process.terminate()
        self._process.wait()

    def _get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", path)
        return connection.getresponse()

    def cached_blocks(self):
        """Returns the fields by which a request to another node fetches blocks from this one."""
        site = json.load(self._get("/role"))["cached_blocks"]
        return {"cached_blocks": site}

    def num_pages(self):
        sample = re.search(rb'cache_config_info\{.*num_gpu_blocks="(\d+)"', self._get("/metrics").read())
        return int(sample[1])

    def metric(self, name, **labels):
        """Returns the sum of a metric's samples with these labels."""
        total = 0.0
        for line in self._get("/metrics").read().decode().splitlines():
            sample = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
            if sample and sample[1] == name:
                found = dict(re.findall(r'(\w+)="([^"]*)"', sample[2] or ""))
                total += float(sample[3]) if labels.items() <= found.items() else 0.0
        return total

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port)


def complete(connection, prompt, max_tokens, **fields):
    """Returns the answer's tokens."""
    body = _body(prompt, max_tokens, **fields)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    assert response.status == 200, text
    return json.loads(text)["choices"][0]["token_ids"]


def time_first_token(connection, prompt, max_tokens, **fields):
    """Streams an answer. Returns the seconds to its first token, that token, and the number of cached prompt tokens."""
    body = _body(prompt, max_tokens, stream=True, stream_options={"include_usage": True}, **fields)
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    seconds = first = usage = None
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        usage = event.get("usage") or usage
        tokens = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
        if tokens and first is None:
            seconds, first = time.perf_counter() - begun, tokens[0]
    return seconds, first, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _body(prompt, max_tokens, **fields):
    return json.dumps({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True, **fields})
