"""A router's view of a server's prefix cache: KV events by ZMQ, with the classes that vLLM documents."""

import itertools
import json
from typing import Any

import msgspec
import zmq
from fleet import THREADS, complete
from patience import PATIENCE_S, wait_until
from server_process import ServerProcess, free_port

# Fewer pages than the requests of a random run fill, so that blocks are evicted.
SMALL = (*THREADS, "--kv-cache-memory", "4M", "--max-model-len", 512, "--max-num-seqs", 4)
BLOCK_SIZE = 16
END = b"\xff" * 8
# Blocks of tokens below 256, which random prompts do not have. Each is used once.
MARKERS = ([*tokens] * (BLOCK_SIZE // 2) for tokens in itertools.product(range(256), repeat=2))


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A map whose `type` is the name of its class."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    remaining_copy_counts: list[int] | None = None
    locality: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


DECODER = msgspec.msgpack.Decoder(type=KVEventBatch)


def events_config(**keys):
    """Returns the option that makes a server publish its events."""
    return ("--kv-events-config", json.dumps({"enable_kv_cache_events": True, **keys}))


class Publisher(ServerProcess):
    """A server with small or given limits that publishes its events."""

    def __init__(self, *arguments, limits=SMALL, **keys):
        self.event_port, self.replay_port = free_port(), free_port()
        endpoints = {"endpoint": f"tcp://*:{self.event_port}", "replay_endpoint": f"tcp://*:{self.replay_port}"}
        self.arguments = (*limits, *events_config(**endpoints, **keys), *arguments)
        super().__init__(*self.arguments)

    def reader(self, **options):
        return KvEventReader(self.event_port, self.replay_port, **options)


class KvEventReader:
    """Rebuilds the set of a server's blocks from its events.

    `loses(sequence)` says which batches the reader never receives, so that it must request them. A block is its
    adapter's name and all tokens up to its end.
    """

    def __init__(self, port, replay_port, topic="", loses=lambda sequence: False, **options):
        self.blocks = {}
        self.disk_blocks = {}
        # Behind a window, events may name a block whose parent can no longer be hit, or never could.
        self._told = {}
        self._seen = {}
        self.next = 0
        self.num_replays = 0
        self._loses = loses
        self._context = zmq.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        for name, value in options.items():
            self._subscriber.setsockopt(getattr(zmq, name), value)
        self._subscriber.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._subscriber.connect(f"tcp://127.0.0.1:{port}")
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(f"tcp://127.0.0.1:{replay_port}")
        self._topic = topic.encode()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(linger=0)

    def catch_up(self, server):
        """Reads until the reader has seen all batches published so far."""
        num_batches = server.metric("corella_kv_event_batches_total")
        while self.next < num_batches:
            # A batch may have been published before the subscription began.
            if self._subscriber.poll(50) == 0:
                self._ask()
                continue
            topic, sequence, payload = self._subscriber.recv_multipart()
            assert topic == self._topic
            sequence = int.from_bytes(sequence, "big")
            if self._loses(sequence) or sequence < self.next:
                continue
            if sequence > self.next:
                self._ask()
            self._take(sequence, payload)

    def begin_anew(self):
        """Drops unread batches of a server that has ended, which the reader may know from a replay.

        The next server counts from 0, so that an unread batch could pass for one of the next server's.
        """
        while self._subscriber.poll(0):
            self._subscriber.recv_multipart()
        self.next = 0

    def _ask(self):
        self.num_replays += 1
        self._replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(PATIENCE_S * 1000), "the replay has no end"
            delimiter, sequence, payload = self._replay.recv_multipart()
            assert delimiter == b""
            if sequence == END:
                assert payload == b""
                return
            self._take(int.from_bytes(sequence, "big"), payload)

    def _take(self, sequence, payload):
        if sequence < self.next:
            return
        assert sequence == self.next, "the replay leaves nothing out"
        self.next += 1
        batch = DECODER.decode(payload)
        assert batch.ts > 1.6e9 and batch.data_parallel_rank == 0
        for event in batch.events:
            self._apply(event)

    def _apply(self, event):
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            self.disk_blocks.clear()
            return
        assert (event.medium, event.locality) in [("GPU", None), ("STORAGE", "LOCAL")]
        blocks = self.blocks if event.medium == "GPU" else self.disk_blocks
        if isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                del blocks[name]
            return
        assert event.block_size == BLOCK_SIZE and len(event.token_ids) == BLOCK_SIZE * len(event.block_hashes)
        parent = event.parent_block_hash
        for at, name in enumerate(event.block_hashes):
            assert name not in blocks
            tokens = tuple(event.token_ids[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE])
            block = event.lora_name, self._path_before(event.lora_name, parent, tokens) + tokens
            assert self._told.setdefault(name, block) == block
            blocks[name] = block
            parent = name

    def _path_before(self, adapter, parent, tokens):
        if parent is None:
            return ()
        if parent not in self._told:
            return self._seen[adapter, tokens]
        owner, path = self._told[parent]
        assert owner == adapter, "an adapter's block follows none of another"
        return path

    def see(self, tokens, adapter=None):
        """Records the tokens of a request, as a router sees them. Fails if a block was seen after another path."""
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            block, path = tuple(tokens[start : start + BLOCK_SIZE]), tuple(tokens[:start])
            assert self._seen.setdefault((adapter, block), path) == path

    def wait_subscribed(self, server, num_subscribers=1):
        wait_subscribed(server, self._subscriber, num_subscribers)

    def paths(self):
        paths = set(self.blocks.values())
        assert len(paths) == len(self.blocks), "no two blocks have one path"
        return paths

    def has(self, tokens, adapter=None):
        return (adapter, tuple(tokens)) in self.blocks.values()

    def num_cached(self, prompt, adapter=None):
        """Returns how many of a prompt's tokens the server finds in whole blocks, except the last token's block."""
        paths = self.paths()
        ends = range(0, len(prompt), BLOCK_SIZE)
        return max(end for end in ends if end == 0 or (adapter, tuple(prompt[:end])) in paths)


def wait_subscribed(server, subscriber, num_subscribers=1):
    """Waits until the server knows this many subscribers. ZeroMQ sends a subscription only while its socket is used."""

    def is_so():
        subscriber.poll(0)
        return server.metric("corella_kv_event_subscribers") == num_subscribers

    server.wait_until(is_so, f"{num_subscribers} have subscribed")


def num_blocks(server):
    """Returns the number of blocks in an idle server's cache, from `/engine/events`."""
    with server.client.with_options(timeout=PATIENCE_S)._client.stream("GET", server.base_url + "/engine/events") as answer:
        for line in answer.iter_lines():
            fields = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if "kv" in fields:
                return fields["kv"]["cached"] + fields["kv"]["in_use"]


def wait_same(server, *readers):
    """Waits until readers know the same blocks as an idle server.

    A full cache has as many blocks before a request as behind it, so equal counts do not prove that a reader has seen
    the request's events. It has seen them when it knows the block of a later request.
    """
    marker = next(MARKERS)
    # One token needs no page behind the block, for which another block might still be evicted.
    complete(server, marker, max_tokens=1, temperature=0)
    for reader in readers:

        def same(reader=reader):
            reader.catch_up(server)
            return reader.has(marker) and len(reader.blocks) == num_blocks(server)

        wait_until(same, lambda reader=reader: f"{len(reader.blocks)} blocks of {num_blocks(server)}\n{server.log()}")
