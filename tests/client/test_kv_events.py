"""Tests KV events with ZeroMQ's own library as the peer: the events match the cache."""

import contextlib
import random
import signal
import socket
import struct

import golden_model
import pytest
import zmq
from fleet import THREADS, complete, complete_greedily
from kv_event_reader import (
    BLOCK_SIZE,
    DECODER,
    SMALL,
    AllBlocksCleared,
    Publisher,
    events_config,
    num_blocks,
    wait_same,
    wait_subscribed,
)
from patience import PATIENCE_S, wait_until
from server_process import ServerProcess, free_port

def random_prompts(num_prompts, seed, tokens=range(300, 900)):
    """Yields prompts of whole blocks, most of which share a beginning with others."""
    draw = random.Random(seed)
    stems = [draw.choices(tokens, k=6 * BLOCK_SIZE) for _ in range(4)]
    for _ in range(num_prompts):
        stem = draw.choice(stems)[: BLOCK_SIZE * draw.randrange(7)]
        yield stem + draw.choices(tokens, k=BLOCK_SIZE * draw.randrange(1, 6))


def run(server, prompts):
    """Sends requests whose rows fill whole blocks: the last token of an output has no rows."""
    for prompt in prompts:
        complete(server, prompt, max_tokens=BLOCK_SIZE + 1, temperature=0, extra_body={"ignore_eos": True})


def num_hits(server):
    return server.metric("corella_prefix_cache_hit_tokens_total", source="cached")


def num_batches(server):
    return server.metric("corella_kv_event_batches_total")


def test_a_reader_knows_at_each_request_what_the_cache_holds():
    with Publisher() as server, server.reader() as reader:
        for prompt in random_prompts(60, seed=1):
            wait_same(server, reader)
            expected, before = reader.num_cached(prompt), num_hits(server)
            run(server, [prompt])
            assert num_hits(server) - before == expected
        assert num_hits(server) > 0
        assert server.metric("corella_kv_pages_evicted_total") > 0
        assert server.metric("corella_kv_event_batches_missed_total") == 0


def test_readers_that_come_late_or_miss_batches_end_with_the_same_blocks():
    draw = random.Random(2)
    with Publisher() as server, server.reader() as whole:
        whole.wait_subscribed(server)
        run(server, random_prompts(20, seed=3))
        with server.reader(loses=lambda sequence: draw.random() < 0.3) as late:
            late.wait_subscribed(server, 2)
            run(server, random_prompts(20, seed=4))
            wait_same(server, whole, late)
            assert late.blocks == whole.blocks
            assert late.num_replays > 0
        assert server.metric("corella_kv_event_replays_total") > 0


# A model without windows and one with windows, whose requests fill more pages than the windows have.
@pytest.mark.parametrize(("model", "adapter"), [("llama-gqa-tied", "llama-all"), ("gemma3", "gemma3-all")])
def test_blocks_of_windows_and_of_adapters_are_known_at_each_request(model, adapter, tmp_path):
    folder = golden_model.make(model, tmp_path / "model")
    adapters = ("--lora-modules", f"other={golden_model.GOLDEN / 'adapters' / adapter}")
    limits = (folder, *THREADS, "--kv-cache-memory", "256K", "--max-num-seqs", 4, *adapters)
    draw, num_found = random.Random(12), {None: 0, "other": 0}
    with Publisher(limits=limits) as server, server.reader(loses=lambda _: draw.random() < 0.3) as reader:
        reader.wait_subscribed(server)
        for prompt in random_prompts(80, 13, tokens=range(3, 80)):
            name = draw.choice([None, "other"])
            expected, before = reader.num_cached(prompt, name), num_hits(server)
            options = {"model": name} if name else {}
            text = complete_greedily(server, prompt, BLOCK_SIZE + 1, **options)
            assert num_hits(server) - before == expected
            num_found[name] += expected
            # The event of a request's last block comes after those of all blocks that the request has displaced.
            tokens = prompt + [ord(letter) - golden_model.FIRST for letter in text[:BLOCK_SIZE]]
            reader.see(tokens, name)
            wait_until(lambda: reader.catch_up(server) or reader.has(tokens, name), "its last block is known")
        assert min(num_found.values()) > 0 and reader.num_replays > 0
        assert server.metric("corella_kv_pages_evicted_total") > 0


def test_a_reader_that_does_not_read_delays_no_other():
    with Publisher(hwm=5) as server, server.reader(RCVHWM=1, RCVBUF=1024) as stalled, server.reader() as quick:
        stalled.wait_subscribed(server, 2)
        run(server, random_prompts(30, seed=5))
        wait_same(server, quick, stalled)
        assert stalled.blocks == quick.blocks


def test_what_is_no_longer_kept_is_not_told_again():
    num_kept = 2
    with Publisher(buffer_steps=num_kept, hwm=1) as server:
        run(server, random_prompts(10, seed=6))
        server.wait_until(lambda: num_batches(server) > num_kept, "batches have been discarded")
        # Further batches of the same requests may follow, and discard more.
        first_kept = num_batches(server) - num_kept
        with zmq.Context() as context, context.socket(zmq.REQ) as asking:
            asking.linger = 0
            asking.connect(f"tcp://127.0.0.1:{server.replay_port}")
            asking.send((0).to_bytes(8, "big"))
            assert asking.poll(PATIENCE_S * 1000)
            sequence, payload = asking.recv_multipart()
            assert 0 < first_kept <= int.from_bytes(sequence, "big") < num_batches(server)
            DECODER.decode(payload)


def test_a_server_that_is_started_again_begins_anew():
    with Publisher("--no-log-requests") as server, server.reader() as reader:
        reader.wait_subscribed(server)
        run(server, random_prompts(5, seed=7))
        wait_same(server, reader)
        server.kill()
        with ServerProcess(*server.arguments) as again:
            # ZeroMQ reconnects by itself.
            reader.wait_subscribed(again)
            reader.begin_anew()
            run(again, random_prompts(5, seed=8))
            wait_same(again, reader)


def test_a_reset_takes_all_blocks_away():
    with Publisher() as server, server.reader() as reader:
        run(server, random_prompts(5, seed=9))
        wait_same(server, reader)
        assert reader.blocks
        server.client.with_options(max_retries=0)._client.post(server.base_url + "/reset_prefix_cache")
        wait_until(lambda: reader.catch_up(server) or not reader.blocks, "it has seen the reset")
        assert num_blocks(server) == 0


# So much memory that no block is evicted, and written to the disk for that.
ROOMY = (*THREADS, "--kv-cache-memory", "64M")


def store(server, prompt, **options):
    """Sends a prompt until it is on the disk."""
    num_stored = "corella_kv_disk_blocks_stored_total"
    before = server.metric(num_stored)
    server.wait_until(
        lambda: complete(server, prompt, max_tokens=1, **options) and server.metric(num_stored) > before,
        "it is stored",
    )


def wait_same_disk(server, reader, last):
    """Waits until a reader knows the blocks of the disk on which `last` was stored last.

    When it knows these blocks, it knows of all that were overwritten before.
    """
    beginning = None, tuple(last[: len(last) - BLOCK_SIZE])

    def is_same():
        reader.catch_up(server)
        num_blocks = server.metric("corella_kv_disk_blocks")
        return beginning in reader.disk_blocks.values() and len(reader.disk_blocks) == num_blocks

    wait_until(is_same, lambda: f"{len(reader.disk_blocks)} blocks\n{server.log()}")


def test_a_reader_knows_the_blocks_on_the_disk(tmp_path):
    disk = ("--kv-disk", f"{tmp_path / 'kv'},4M")
    draw = random.Random(14)
    prompts = [draw.choices(range(300, 900), k=6 * BLOCK_SIZE) for _ in range(24)]
    with Publisher(*disk, limits=ROOMY) as server, server.reader(loses=lambda _: draw.random() < 0.3) as reader:
        reader.wait_subscribed(server)
        server.wait_until(lambda: server.metric("corella_kv_disk_on") == 1, "the file is open")
        for prompt in prompts:
            store(server, prompt)
        wait_same_disk(server, reader, prompts[-1])
        num_stored = server.metric("corella_kv_disk_blocks_stored_total")
        assert num_stored > len(reader.disk_blocks), "blocks were overwritten"
        assert reader.disk_blocks.items() <= reader.blocks.items(), "memory has them, too, by the same names"
        known = reader.disk_blocks
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with Publisher(*disk, limits=ROOMY) as server, server.reader() as reader:
        reader.wait_subscribed(server)
        wait_until(lambda: reader.catch_up(server) or len(reader.disk_blocks) >= len(known), "the file is told")
        assert reader.disk_blocks == known
        assert not reader.blocks, "no prompt was computed"
        reset = server.base_url + "/reset_prefix_cache"
        assert server.client._client.post(reset, json={"tiers": True}).status_code == 200
        wait_until(lambda: reader.catch_up(server) or not reader.disk_blocks, "it has seen the reset")


def test_blocks_with_a_salt_on_the_disk_have_no_events(tmp_path):
    draw = random.Random(15)
    salted, plain = (draw.choices(range(300, 900), k=6 * BLOCK_SIZE) for _ in range(2))
    disk = ("--kv-disk", f"{tmp_path / 'kv'},32M", "--kv-disk-salted")
    with Publisher(*disk, limits=ROOMY) as server, server.reader() as reader:
        reader.wait_subscribed(server)
        server.wait_until(lambda: server.metric("corella_kv_disk_on") == 1, "the file is open")
        store(server, salted, extra_body={"cache_salt": "mine"})
        num_salted = server.metric("corella_kv_disk_blocks")
        store(server, plain)
        num_plain = server.metric("corella_kv_disk_blocks") - num_salted
        wait_until(lambda: reader.catch_up(server) or len(reader.disk_blocks) >= num_plain, "the others are told")
        assert len(reader.disk_blocks) == num_plain
        assert all(path == tuple(plain[: len(path)]) for _, path in reader.disk_blocks.values())


def test_a_topic_is_a_prefix_and_the_server_may_be_the_one_that_connects():
    port, topic = free_port(), "kv@127.0.0.1@nano"
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber, context.socket(zmq.SUB) as other:
        for sub, prefix in ((subscriber, "kv@"), (other, "other")):
            sub.linger = 0
            sub.setsockopt_string(zmq.SUBSCRIBE, prefix)
        subscriber.bind(f"tcp://127.0.0.1:{port}")
        config = events_config(endpoint=f"tcp://127.0.0.1:{port}", topic=topic)
        with ServerProcess(*SMALL, *config) as server:
            wait_subscribed(server, subscriber)
            run(server, random_prompts(1, seed=10))
            assert subscriber.poll(PATIENCE_S * 1000)
            name, sequence, payload = subscriber.recv_multipart()
            assert name == topic.encode()
            assert not any(isinstance(event, AllBlocksCleared) for event in DECODER.decode(payload).events)
            # The first batch, which clears the cache, precedes the connection.
            assert int.from_bytes(sequence, "big") > 0


def greeting(mechanism=b"NULL", version=3):
    return b"\xff" + bytes(8) + b"\x7f" + bytes([version, 0]) + mechanism.ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        greeting(mechanism=b"CURVE"),
        greeting(version=1),
        greeting() + b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH",
        greeting() + b"\x04\x05READY",
        greeting() + b"\x06" + struct.pack(">Q", 1 << 40),
        greeting() + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB" + b"\x00\x02\x01x" * 65,
    ],
)
def test_a_peer_that_speaks_otherwise_is_hung_up_on(sent):
    with Publisher() as server:
        with socket.create_connection(("127.0.0.1", server.event_port), timeout=PATIENCE_S) as peer:
            peer.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                while peer.recv(1024):
                    pass
        with server.reader() as reader:
            run(server, random_prompts(2, seed=11))
            wait_same(server, reader)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events: 1 is neither true nor false"),
        ('{"endpoints": ""}', "endpoints: no such key"),
        ('{"replay_endpoint": "udp://*:1"}', "replay_endpoint: udp://*:1 is no address that begins with tcp://"),
        ("yes", "it is no JSON"),
    ],
)
def test_a_wrong_configuration_is_told_by_its_key(config, said):
    with pytest.raises(AssertionError) as error:
        ServerProcess(*SMALL, "--kv-events-config", config)
    assert f"--kv-events-config: {said}" in str(error.value)


def test_a_port_in_use_is_told_by_its_key():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=rf"--kv-events-config: replay_endpoint: cannot listen on tcp://0.0.0.0:{port}"):
            ServerProcess(*SMALL, *events_config(endpoint="tcp://*:0", replay_endpoint=f"tcp://*:{port}"))


def test_without_a_prefix_cache_there_are_no_events():
    with pytest.raises(AssertionError, match="there are no events without prefix caching"):
        ServerProcess(*SMALL, *events_config(endpoint="tcp://*:0"), "--no-enable-prefix-caching")
    with ServerProcess(*SMALL, "--no-enable-prefix-caching", "--kv-events-config", '{"publisher": "null"}') as server:
        assert num_blocks(server) == 0
