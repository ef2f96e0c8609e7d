"""Starts nodes that serve together and their etcd, and inspects what they hold."""

import contextlib
import json
import random
import shutil
import socket
import subprocess
import tempfile
import urllib.request

from patience import PATIENCE_S, wait_until
from server_process import BINARY, ServerProcess, free_port
from tcp_proxy import TcpProxy

# Portable kernels take seconds for a long request, so that it still runs when the test looks.
SLOW = ("--isa", "portable", "--threads", 1)
THREADS = ("--threads", 1)

# K and V of one token in the built-in model.
ROW_BYTES = 3072

# Every eighth token ends a request with these stop tokens.
STOP_TOKENS = list(range(300, 2000, 8))

# The built-in model's end tokens and marks of messages, which have no text: a model that draws them after prompts of
# random tokens would send no chunks.
NO_MARKS = {str(token): -100 for token in range(3)}

# A decode node's connections for the KV rows of one prefill node.
KV_CONNECTIONS = 2

# Where `cargo xtask set-up` installs NIXL.
NIXL_LIBRARY = BINARY.parents[1] / "nixl/.nixl_cu12.mesonpy.libs/libnixl_capi.so"

# The nodes' holdings for requests, which must all be 0 without any request.
HOLDINGS = (
    "corella_sessions",
    "corella_kv_pages_in_use",
    "corella_kv_pages_held",
    "corella_kv_spilled_pages",
    "corella_num_requests_receiving",
    "corella_num_requests_running",
    "corella_num_requests_waiting",
)
# By default a decode node has 100 ms to take a request, and a second to get its rows, which may be too short for nodes
# that share their cores with other tests.
SEARCH_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = PATIENCE_S


class Etcd:
    """An etcd of this test, which can be killed and started again at the same address."""

    def __init__(self):
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self.address = client.removeprefix("http://")
        self._urls = ["--listen-client-urls", client, "--advertise-client-urls", client]
        self._urls += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        self._urls += ["--initial-cluster", f"default={peer}"]
        self.start()

    def start(self):
        """Starts etcd without any data."""
        assert shutil.which("etcd"), "etcd is missing: cargo xtask set-up installs it"
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            ["etcd", "--data-dir", self._folder.name, *self._urls],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        host, port = self.address.split(":")

        def answers():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
                return True

        wait_until(answers, "etcd answers")

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def node(role, registry, *arguments, search_timeout=SEARCH_TIMEOUT_S, load_timeout=LOAD_TIMEOUT_S, **options):
    times = ("--decode-search-timeout", round(search_timeout * 1000), "--kv-load-timeout", round(load_timeout * 1000))
    return ServerProcess("--role", role, "--registry", registry, *times, *arguments, **options)


class Fleet(contextlib.ExitStack):
    """Nodes that find each other in a folder, or in a given registry."""

    def __init__(self, registry=None):
        super().__init__()
        self.registry = registry or f"file:{self.enter_context(tempfile.TemporaryDirectory())}"

    def node(self, role, *arguments, **options):
        return self.enter_context(node(role, self.registry, *arguments, **options))

    def decode(self, *arguments, **options):
        return self.node("decode", *arguments, **options)

    def prefill(self, *arguments, num_decode_nodes=1, **options):
        """Starts a prefill node, and waits until it has found its decode nodes."""
        node = self.node("prefill", *arguments, **options)
        wait_for_decode_nodes(node, num_decode_nodes)
        return node

    def prefill_behind_proxy(self, *arguments, num_decode_nodes=1):
        """Starts a prefill node whose KV rows go through a proxy, which is returned beside it.

        Returns when the decode nodes have connected for KV rows.
        """
        proxy, behind_proxy = self._proxy()
        arguments = (*behind_proxy, "--transport", "tcp", *arguments)
        prefill = self.prefill(*arguments, num_decode_nodes=num_decode_nodes)
        num_connections = KV_CONNECTIONS * num_decode_nodes
        prefill.wait_until(
            lambda: proxy.num_connections >= num_connections, "decode nodes have connected for KV rows"
        )
        return prefill, proxy

    def decode_behind_proxy(self, *arguments):
        """Starts a decode node whose sessions go through a proxy, which is returned beside it."""
        proxy, behind_proxy = self._proxy()
        return self.decode(*behind_proxy, *arguments), proxy

    def _proxy(self):
        # Nodes get the proxy's address with another host name and the same port, so the proxy has another address of
        # the loopback interface.
        port = free_port()
        proxy = self.enter_context(TcpProxy(("127.0.0.2", port), ("127.0.0.1", port)))
        listen = ("--cluster-listen", f"127.0.0.1:{port}", "--cluster-advertise", "127.0.0.2")
        return proxy, listen


def num_steps(server):
    return server.metric("corella_steps_total")


def num_remote_tokens(prefill):
    return prefill.metric("corella_remote_tokens_total")


def num_decode_nodes(prefill, standing):
    return prefill.metric("corella_decode_nodes", standing=standing)


def num_asked(decode):
    """Returns the number of requests that the decode node was asked to take."""
    return decode.metric("corella_pd_reserve_seconds_count")


def num_receiving(decode):
    return decode.metric("corella_num_requests_receiving")


def wait_for_decode_nodes(prefill, num_nodes):
    """Waits until the prefill node has found this many healthy decode nodes."""
    prefill.wait_until(
        lambda: num_decode_nodes(prefill, "healthy") == num_nodes,
        f"{num_nodes} decode nodes are healthy",
    )


def wait_at_rest(*nodes, holdings=HOLDINGS):
    """Waits until nodes hold nothing for requests."""
    for node in nodes:

        def held():
            return {name: num for name in holdings if (num := node.metric(name)) != 0}

        wait_until(lambda: not held(), lambda: f"it lets go of {held()}\n{node.log()}")


def reported_free_pages(prefill):
    """Returns the free pages that each decode node has reported to a prefill node; -1 before the first report."""
    with urllib.request.urlopen(prefill.base_url + "/engine/events", timeout=PATIENCE_S) as events:
        for line in events:
            if line.startswith(b'data: {"number"'):
                nodes = json.loads(line.removeprefix(b"data: "))["cluster"]["nodes"]
                return [-1 if node["free_pages"] is None else node["free_pages"] for node in nodes]


def complete(server, prompt, **options):
    """Returns everything that a client receives of each choice."""
    options = {"model": server.model()} | options
    answer = server.client.completions.create(prompt=prompt, **options)
    return [
        (
            choice.text,
            choice.finish_reason,
            choice.model_extra.get("stop_reason"),
            choice.logprobs and choice.logprobs.model_dump(),
            answer.usage.completion_tokens,
        )
        for choice in answer.choices
    ]


def complete_remotely(prefill, prompt, **options):
    """Like `complete`, for an answer of which decode nodes have drawn all tokens but the first of each choice.

    On a busy machine rows may be too late for a request, whose rest the prefill node then decodes itself. The request
    is then repeated.
    """

    def choices_of_decode_nodes():
        before = num_remote_tokens(prefill)
        choices = complete(prefill, prompt, **options)
        *_, num_tokens = choices[0]
        return choices if num_remote_tokens(prefill) - before == num_tokens - len(choices) else None

    return prefill.wait_until(choices_of_decode_nodes, f"decode nodes draw {prompt}, {options}")


def complete_greedily(server, prompt, num_tokens, complete=complete, **options):
    """Returns a greedy answer of this many tokens as text."""
    options = {"temperature": 0, "logit_bias": NO_MARKS, "extra_body": {"ignore_eos": True}} | options
    ((text, reason, *_),) = complete(server, prompt, max_tokens=num_tokens, **options)
    assert reason == "length"
    return text


def ask(server, prompt, num_tokens):
    """Sends a request and reads no answer. The client leaves when the returned socket is closed."""
    fields = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps({"model": server.model(), "temperature": 0, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + body)
    return connection


def stream(server, prompt, num_tokens, **options):
    options = {"model": server.model()} | options
    return server.client.completions.create(
        prompt=prompt,
        max_tokens=num_tokens,
        temperature=0,
        stream=True,
        logit_bias=NO_MARKS,
        extra_body={"ignore_eos": True},
        **options,
    )


def text_of(chunks):
    """Returns the text of a whole stream or of its rest, which must end by its limit of tokens."""
    text, reason = "", None
    for chunk in chunks:
        assert reason is None
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason
    assert reason == "length"
    return text


def prompt_of(num_tokens, seed=1, tokens=range(300, 2000)):
    numbers = random.Random(seed)
    return [numbers.choice(tokens) for _ in range(num_tokens)]


def random_requests(num_requests, seed=1):
    """Yields prompts, some with a common beginning, with many ways to draw tokens."""
    numbers = random.Random(seed)
    beginning = [numbers.randrange(300, 2000) for _ in range(200)]
    for _ in range(num_requests):
        own = [numbers.randrange(300, 2000) for _ in range(numbers.randrange(1, 60))]
        prompt = beginning[: numbers.choice([0, 16, 64, 200])] + own
        options = numbers.choice(
            [
                {"temperature": 0},
                {"temperature": 0, "logprobs": 3},
                {"temperature": 1, "seed": numbers.randrange(1000), "logprobs": 1},
                {"temperature": 1, "seed": numbers.randrange(1000), "n": 2},
                {"temperature": 0.8, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
                {"temperature": 0, "extra_body": {"repetition_penalty": 1.2}},
                {"temperature": 0, "stop": [" the", "."]},
                {"temperature": 1, "seed": 5, "extra_body": {"stop_token_ids": STOP_TOKENS}},
            ]
        )
        yield prompt, {"max_tokens": numbers.randrange(1, 30), **options}
