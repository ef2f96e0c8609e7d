"""Tests the explanation of what the prefix cache had of a prompt, and from which medium the cached rows came."""

import json

from fleet import THREADS
from pairing_proxy import post
from server_process import ServerProcess
from wander import site_of

SMALL = ("--threads", 1, "--kv-cache-memory", "64M")
NODE = ("--cluster-listen", "127.0.0.1:0", "--block-fetch", "always", *THREADS)
SYSTEM = "You are a helpful assistant who knows the days of the week. Today is {}. " + "Be brief and kind. " * 10
PROMPT = [300 + at * 37 % 1500 for at in range(161)]


def chat(server, day, **options):
    return server.client.chat.completions.create(
        model=server.model(),
        messages=[{"role": "system", "content": SYSTEM.format(day)}, {"role": "user", "content": "Hi"}],
        max_tokens=4,
        temperature=0,
        **options,
    )


def complete(server, **options):
    """Returns the usage of an answer to the prompt of 161 tokens, and its explanation."""
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, **options}
    status, _, text = post(server.port, "/v1/completions", body)
    assert status == 200, text
    answer = json.loads(text)
    return answer["usage"]["prompt_tokens_details"], answer["prefix_cache"]


def test_the_client_is_shown_where_its_prompts_differ():
    with ServerProcess(*SMALL) as server:
        explain = {"extra_headers": {"x-corella-explain": "cache"}}
        assert chat(server, "Monday", **explain).model_extra["prefix_cache"]["cause"] == "restart"
        plain = chat(server, "Tuesday")
        assert "prefix_cache" not in plain.model_extra
        explained = chat(server, "Wednesday", **explain).model_extra["prefix_cache"]
        assert explained["cause"] == "client"
        place = explained["computed_from"]
        assert place["position"] == explained["cached_tokens"] > 0
        assert place["before"].endswith("Today is "), place
        assert place["after"].startswith("Wednesday. Be brief"), place
        (*_, last) = chat(server, "Wednesday", stream=True, **explain)
        assert last.choices[0].finish_reason == "length"
        assert last.model_extra["prefix_cache"]["cause"] == "partial_page"
        assert last.usage is None, "the stream has no chunk that was not asked for"
        assert server.metric("corella_prefix_cache_misses_total", cause="client") > 0


def test_rows_of_a_disk_are_counted_apart_when_they_are_read(tmp_path):
    arguments = (*SMALL, "--kv-disk", f"{tmp_path / 'kv'},32M", "--explain-cache")
    with ServerProcess(*arguments) as server:
        server.wait_until(lambda: server.metric("corella_kv_disk_on") == 1, "the file is open")
        assert complete(server)[1]["cause"] == "restart"
        assert complete(server)[0] == {"cached_tokens": 160}
        server.wait_until(lambda: server.metric("corella_kv_disk_blocks_stored_total") == 10, "it is stored")
    with ServerProcess(*arguments) as server:
        server.wait_until(lambda: server.metric("corella_kv_disk_blocks") == 10, "the file is scanned")
        by_medium = {"memory": 0, "host": 0, "disk": 160, "peer": 0, "store": 0}
        usage, explained = complete(server)
        assert usage == {"cached_tokens": 160, "cached_tokens_by_medium": by_medium}
        assert explained["cached_tokens_by_medium"] == by_medium
        assert explained["cause"] == "partial_page"
        assert complete(server)[0] == {"cached_tokens": 160}, "now they are in memory"


def test_rows_of_another_node_are_counted_apart_when_they_are_fetched():
    with ServerProcess(*NODE) as source, ServerProcess(*NODE, "--explain-cache") as node:
        status, _, text = post(source.port, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
        assert status == 200, text
        usage, explained = complete(node, kv_transfer_params={"cached_blocks": site_of(source)})
        assert usage["cached_tokens_by_medium"] == {"memory": 0, "host": 0, "disk": 0, "peer": 160, "store": 0}
        assert explained["cause"] == "partial_page"
        assert complete(node)[0] == {"cached_tokens": 160}
