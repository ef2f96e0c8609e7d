"""Tests prompts on a disk: they outlive a killed server, and no fault of the disk changes an answer."""

import json
import os
import random
import re
import signal
import stat
import subprocess

import golden_model
import pytest
from fleet import Fleet, node
from patience import PATIENCE_S
from server_process import BINARY, ServerProcess
from small_disk import fill, small_disk
from wander import site_of

STORY = "Once upon a time there was a fox who lived in a box by the sea, and every morning it went to the mill. " * 4
# The beginning of a file, before its pages
LABEL_BYTES = 4096
SMALL = ("--threads", 1, "--kv-cache-memory", "64M")
# The servers of each model that are killed while they store.
NUM_KILLS = int(os.environ.get("CORELLA_DISK_KILLS", 3))


def disk(folder, size="32M"):
    return ("--kv-disk", f"{folder},{size}")


def disks(*folders):
    return [word for folder in folders for word in disk(folder)]


def ask(server, prompt=STORY, **fields):
    """Returns an answer with the log-probabilities of its tokens, and the number of cached prompt tokens."""
    answer = server.client.completions.create(
        model=server.model(), prompt=prompt, max_tokens=12, temperature=0, logprobs=3, extra_body=fields
    )
    (choice,) = answer.choices
    return (choice.text, choice.logprobs.model_dump()), answer.usage.prompt_tokens_details.cached_tokens


def num_stored(server):
    return server.metric("corella_kv_disk_blocks_stored_total")


def num_read(server):
    return server.metric("corella_kv_disk_hits_total")


def wait_open(server):
    server.wait_until(lambda: server.metric("corella_kv_disk_on") == 1, "the file is open")


def wait_found(server, num_blocks):
    server.wait_until(lambda: server.metric("corella_kv_disk_blocks") == num_blocks, "the file is scanned")


def store(server, num_disks=1, **fields):
    """Stores the story, and returns its answer and the number of its blocks."""
    server.wait_until(lambda: server.metric("corella_kv_disk_on") == num_disks, "the files are open")
    expected, num_cached = ask(server, **fields)
    assert num_cached == 0
    assert num_stored(server) == 0, "it came once"
    again, num_cached = ask(server, **fields)
    assert again == expected
    num_blocks = num_cached // 16
    assert num_blocks > 4
    server.wait_until(lambda: num_stored(server) >= num_blocks, "its blocks are stored")
    return expected, num_blocks


@pytest.fixture(scope="module")
def expected():
    """The answer of a server without a disk."""
    with ServerProcess(*SMALL) as server:
        answer, num_cached = ask(server)
        assert num_cached == 0
        assert "corella_kv_disk" not in server.client._client.get(server.base_url + "/metrics").text
        return answer


def test_a_prompt_outlives_a_killed_server(tmp_path, expected):
    folder = tmp_path / "kv"
    with ServerProcess(*SMALL, *disk(folder)) as server:
        answer, num_blocks = store(server)
        assert answer == expected
        (file,) = folder.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        # The file grows by an eighth of its size.
        assert 0 < file.stat().st_size <= 8 << 20
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with ServerProcess(*SMALL, *disk(folder)) as server:
        wait_found(server, num_blocks)
        answer, num_cached = ask(server)
        assert answer == expected
        assert num_cached == num_blocks * 16
        assert num_read(server) == num_blocks
        assert server.metric("corella_kv_disk_read_bytes_total") > 0
        # What follows the story is computed.
        longer, num_cached = ask(server, STORY + "The end of it is this:")
        assert num_cached >= num_blocks * 16
    with ServerProcess(*SMALL) as server:
        assert ask(server, STORY + "The end of it is this:")[0] == longer


def test_a_prompt_of_a_model_with_windows_outlives_a_killed_server(tmp_path):
    model = golden_model.make("gemma3", tmp_path / "windowed")
    prompt = [3 + 7 * at % 50 for at in range(90)]
    with ServerProcess(model, *SMALL) as server:
        expected = ask(server, prompt)[0]
    with ServerProcess(model, *SMALL, *disk(tmp_path / "kv")) as server:
        wait_open(server)
        assert ask(server, prompt) == (expected, 0)
        _, num_cached = ask(server, prompt)
        # The pages of the windows are stored last.
        server.wait_until(lambda: num_stored(server) > num_cached // 16, "its blocks are stored")
        server.wait_until(lambda: num_stored(server) == server.metric("corella_kv_disk_blocks"), "all are counted")
        num_pages = num_stored(server)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with ServerProcess(model, *SMALL, *disk(tmp_path / "kv")) as server:
        wait_found(server, num_pages)
        assert ask(server, prompt) == (expected, num_cached // 16 * 16)
        assert num_read(server) == num_pages


@pytest.mark.parametrize("name", ["qwen3-next", "lfm2"])
def test_a_conversation_with_a_recurrent_model_outlives_a_killed_server(tmp_path, name):
    model = golden_model.make(name, tmp_path / "recurrent")
    prompt = [3 + 7 * at % 50 for at in range(90)]
    turn = prompt + [3 + 11 * at % 50 for at in range(60)]
    with ServerProcess(model, *SMALL) as server:
        expected = [ask(server, tokens)[0] for tokens in (prompt, turn)]
    with ServerProcess(model, *SMALL, *disk(tmp_path / "kv")) as server:
        wait_open(server)
        assert ask(server, prompt) == (expected[0], 0)
        assert ask(server, prompt) == (expected[0], 80)
        # The state comes last, in one or more pages.
        server.wait_until(lambda: num_stored(server) > 80 // 16, "the state is stored")
        num_pages = server.metric("corella_kv_disk_blocks")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with ServerProcess(model, *SMALL, *disk(tmp_path / "kv")) as server:
        wait_found(server, num_pages)
        assert ask(server, turn) == (expected[1], 80)
        assert num_read(server) == num_pages
        assert ask(server, turn) == (expected[1], 144)
        server.wait_until(lambda: num_stored(server) > (144 - 80) // 16, "the state of the next turn is stored")
        num_pages = server.metric("corella_kv_disk_blocks")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with ServerProcess(model, *SMALL, *disk(tmp_path / "kv")) as server:
        wait_found(server, num_pages)
        # Only the first request waits for a slow disk.
        assert ask(server, turn) == (expected[1], 144)
        assert server.metric("corella_kv_disk_damaged_blocks_total") == 0
    with ServerProcess(model, *SMALL, *disk(tmp_path / "kv")) as server:
        wait_found(server, num_pages)
        assert ask(server, prompt) == (expected[0], 80)
        assert server.metric("corella_kv_disk_damaged_blocks_total") == 0


@pytest.mark.parametrize("name", ["qwen3-next", "lfm2"])
def test_another_question_about_a_document_outlives_a_killed_server(tmp_path, name):
    model = golden_model.make(name, tmp_path / "recurrent")
    document = [3 + 7 * at % 50 for at in range(70)]
    prompts = [document + [first + at for at in range(20)] for first in (3, 4, 5)]
    with ServerProcess(model, *SMALL) as server:
        expected = [ask(server, tokens)[0] for tokens in prompts]
    with ServerProcess(model, *SMALL, *disk(tmp_path / "kv")) as server:
        wait_open(server)
        assert ask(server, prompts[0]) == (expected[0], 0)
        # The second question shows where questions begin, and the state after the last whole page of the document is
        # stored.
        assert ask(server, prompts[1]) == (expected[1], 0)
        server.wait_until(lambda: num_stored(server) > 64 // 16, "the state is stored")
        num_pages = server.metric("corella_kv_disk_blocks")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with ServerProcess(model, *SMALL, *disk(tmp_path / "kv")) as server:
        wait_found(server, num_pages)
        assert ask(server, prompts[2]) == (expected[2], 64)
        assert num_read(server) == num_pages
        assert server.metric("corella_kv_disk_damaged_blocks_total") == 0


def test_a_document_that_came_with_one_question_is_found_with_another(tmp_path):
    model = golden_model.make("lfm2", tmp_path / "recurrent")
    document = [3 + 7 * at % 50 for at in range(400)]
    prompts = [document + [first + at for at in range(40)] for first in (3, 4, 5)]
    with ServerProcess(model, *SMALL, "--no-enable-prefix-caching") as server:
        expected = [ask(server, tokens)[0] for tokens in prompts]
    with ServerProcess(model, *SMALL, *disk(tmp_path / "kv")) as server:
        wait_open(server)
        assert ask(server, prompts[0]) == (expected[0], 0)
        assert ask(server, prompts[0]) == (expected[0], 432)
        # There are states after 256 tokens and at the end of the prompt.
        server.wait_until(lambda: num_stored(server) == 432 // 16 + 2, "the prompt is stored")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with ServerProcess(model, *SMALL, *disk(tmp_path / "kv")) as server:
        wait_found(server, 432 // 16 + 2)
        assert ask(server, prompts[1]) == (expected[1], 256)
        assert num_read(server) == 256 // 16 + 1
        assert ask(server, prompts[2]) == (expected[2], 256)


@pytest.mark.parametrize("name", [None, "gemma3", "lfm2"])
def test_a_server_killed_while_it_stores_gives_the_same_answers(tmp_path, name):
    """A model of each kind: with plain attention, with windows, and with recurrent layers."""
    draw = random.Random(5)
    model = (golden_model.make(name, tmp_path / "model"),) if name else ()

    def new_prompt():
        if name is None:
            return " ".join(draw.choices(STORY.split(), k=150))
        return [draw.randrange(3, 53) for _ in range(draw.randrange(60, 150))]

    def answer(server, prompt):
        return ask(server, prompt, ignore_eos=True)

    kept, num_found = None, 0
    with ServerProcess(*model, *SMALL) as lone:
        for _ in range(NUM_KILLS):
            with ServerProcess(*model, *SMALL, *disk(tmp_path / "kv", "4M")) as server:
                wait_open(server)
                if kept is not None:
                    assert answer(server, kept)[0] == answer(lone, kept)[0]
                    num_found += num_read(server)
                kept = new_prompt()
                expected, _ = answer(lone, kept)
                assert answer(server, kept)[0] == expected
                again, num_cached = answer(server, kept)
                assert again == expected
                # Windows and states are stored after the other pages.
                num_least = num_cached // 16 + (name is not None)
                server.wait_until(lambda: num_stored(server) >= num_least, "the prompt is stored")
                for _ in range(draw.randrange(1, 4)):
                    prompt = new_prompt()
                    expected, _ = answer(lone, prompt)
                    assert [answer(server, prompt)[0] for _ in range(2)] == [expected] * 2
                # The last prompt is being stored. The server is killed at some time during this.
                for _ in range(draw.randrange(4)):
                    assert server.metric("corella_kv_disk_errors_total") == 0
                server.process.send_signal(signal.SIGKILL)
                server.process.wait()
    assert num_found > 0


def test_a_salted_prompt_is_not_on_the_disk(tmp_path):
    with ServerProcess(*SMALL, *disk(tmp_path)) as server:
        wait_open(server)
        for _ in range(2):
            ask(server, cache_salt="mine")
        _, num_blocks = store_other(server)
        # Paths are stored in order, so that the salted prompt's blocks would be on the disk by now.
        assert num_stored(server) == num_blocks


def test_a_salted_prompt_is_kept_on_demand(tmp_path):
    salt = "a salt of a caller"
    options = (*SMALL, *disk(tmp_path), "--kv-disk-salted")
    with ServerProcess(*options) as server:
        expected, num_blocks = store(server, cache_salt=salt)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert any(content)
    assert salt.encode() not in content
    with ServerProcess(*options) as server:
        wait_found(server, num_blocks)
        # Only the first request waits for a slow disk.
        assert ask(server, cache_salt=salt) == (expected, num_blocks * 16)
        assert num_read(server) == num_blocks
        assert ask(server) == (expected, 0)
        assert ask(server, cache_salt="another") == (expected, 0)
        assert num_read(server) == num_blocks
    assert "--kv-disk" in refusal("--kv-disk-salted")


def test_blocks_of_an_adapter_are_kept_until_it_is_unloaded(tmp_path):
    model = golden_model.make("llama-gqa-tied", tmp_path / "model")
    adapters = golden_model.GOLDEN / "adapters"
    prompt = [3 + 7 * at % 50 for at in range(90)]

    def serve(adapter):
        return ServerProcess(model, *SMALL, *disk(tmp_path / "kv"), "--lora-modules", f"mine={adapters / adapter}")

    def ask_adapter(server):
        answer = server.client.completions.create(
            model="mine", prompt=prompt, max_tokens=12, temperature=0, logprobs=3
        )
        (choice,) = answer.choices
        return (choice.text, choice.logprobs.model_dump()), answer.usage.prompt_tokens_details.cached_tokens

    with serve("llama-all") as server:
        wait_open(server)
        expected, _ = ask_adapter(server)
        num_blocks = ask_adapter(server)[1] // 16
        server.wait_until(lambda: num_stored(server) >= num_blocks, "its blocks are stored")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with serve("llama-some") as server:
        wait_found(server, num_blocks)
        other, num_cached = ask_adapter(server)
        assert other != expected
        assert num_cached == 0
        assert num_read(server) == 0
    with serve("llama-all") as server:
        wait_found(server, num_blocks)
        assert ask_adapter(server) == (expected, num_blocks * 16)
        server.client.post("/unload_lora_adapter", cast_to=object, body={"lora_name": "mine"})
        assert server.metric("corella_kv_disk_blocks") == 0
    (file,) = (tmp_path / "kv").iterdir()
    assert not any(file.read_bytes()[LABEL_BYTES:])


def store_other(server):
    prompt = "Another story of a lantern and a river, which was told in the village. " * 4
    answer, _ = ask(server, prompt)
    again, num_cached = ask(server, prompt)
    assert again == answer
    server.wait_until(lambda: num_stored(server) >= num_cached // 16, "its blocks are stored")
    return answer, num_cached // 16


def test_damage_and_another_process_cost_only_time(tmp_path, expected):
    with ServerProcess(*SMALL, *disk(tmp_path)) as server:
        _, num_blocks = store(server)
        with ServerProcess(*SMALL, *disk(tmp_path)) as other:
            other.wait_until(lambda: other.metric("corella_kv_disk_errors_total") == 1, "it has no file")
            assert ask(other) == (expected, 0)
            assert ask(other)[0] == expected
            assert num_stored(other) == 0
            (line,) = re.findall(".*--kv-disk is off.*", other.log())
            assert "another process" in line
    (file,) = tmp_path.iterdir()
    with file.open("r+b") as content:
        content.seek(LABEL_BYTES)
        first_slot = content.read(1 << 16)
        slot_bytes = first_slot.index(first_slot[:24], 512)
        content.seek(LABEL_BYTES + 2 * slot_bytes + 1000)
        content.write(b"\xff\x00\xff\x00")
    with ServerProcess(*SMALL, *disk(tmp_path)) as server:
        wait_found(server, num_blocks)
        assert ask(server) == (expected, 32)
        assert server.metric("corella_kv_disk_damaged_blocks_total") == 1
        # The damaged block is stored again.
        server.wait_until(lambda: ask(server)[0] == expected and num_stored(server) > 0, "it is stored again")


def test_a_disk_that_fills_up_while_it_is_used_costs_only_time(tmp_path, expected):
    with small_disk(tmp_path / "disk", 4 << 20) as folder, ServerProcess(*SMALL, *disk(folder / "kv", "16M")) as server:
        wait_open(server)
        fill(folder / "filler")
        assert ask(server) == (expected, 0)
        assert ask(server)[0] == expected
        server.wait_until(lambda: server.metric("corella_kv_disk_on") == 0, "the disk is full")
        server.wait_until(lambda: server.metric("corella_kv_disk_copies_dropped_total") > 0, "the copy is given up")
        line, *_ = re.findall(".*--kv-disk is off.*", server.log())
        assert "No space left" in line
        assert ask(server)[0] == expected
        (folder / "filler").unlink()
        server.wait_until(lambda: server.metric("corella_kv_disk_on") == 1, "the disk has room again")
        server.wait_until(lambda: ask(server)[0] == expected and num_stored(server) > 0, "it is stored")


def test_of_two_disks_each_comes_and_goes_alone(tmp_path, expected):
    folders = [tmp_path / "a", tmp_path / "b"]

    def wait_on(server, num_on):
        server.wait_until(lambda: server.metric("corella_kv_disk_on") == num_on, f"{num_on} disks are in use")

    with ServerProcess(*SMALL, *disks(*folders)) as server:
        wait_on(server, 2)
        assert server.metric("corella_kv_disk_off") == 0
        answer, num_blocks = store(server, num_disks=2)
        assert answer == expected
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    # The blocks lie on both disks in turn.
    listed = json.loads(inspect("--json", *(f"--kv-disk={folder}" for folder in folders)).stdout)["files"]
    assert [file["path"].startswith(f"{folder}/") for file, folder in zip(listed, folders, strict=True)] == [True, True]
    assert [file["pages"]["whole"] for file in listed] == [(num_blocks + 1) // 2, num_blocks // 2]
    with ServerProcess(*SMALL, *disk(folders[1])) as other:
        wait_open(other)
        with ServerProcess(*SMALL, *disks(*folders)) as server:
            wait_on(server, 1)
            server.wait_until(lambda: server.metric("corella_kv_disk_off") == 1, "the other one is off")
            (line,) = re.findall(".*--kv-disk is off.*", server.log())
            assert str(folders[1]) in line
            assert ask(server) == (expected, 16)
    with ServerProcess(*SMALL, *disks(*folders)) as server:
        wait_on(server, 2)
        wait_found(server, num_blocks)
        assert ask(server) == (expected, 16 * num_blocks)
        assert num_read(server) == num_blocks
    assert f"the folder {folders[0]} twice" in refusal(*disks(*folders, folders[0]))


NODE = (*SMALL, "--cluster-listen", "127.0.0.1:0", "--block-fetch", "always")


def test_a_node_reads_its_own_disk_before_it_asks_another(tmp_path, expected):
    with ServerProcess(*NODE) as other:
        assert ask(other)[0] == expected
        longer = STORY + "And then the fox moved to a lantern by the river, in which it lived with a cub for years. "
        answer_to_longer, _ = ask(other, longer)
        with ServerProcess(*NODE, *disk(tmp_path)) as server:
            _, num_blocks = store(server)
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
        with ServerProcess(*NODE, *disk(tmp_path)) as server:
            wait_found(server, num_blocks)
            hint = {"kv_transfer_params": {"cached_blocks": site_of(other)}}
            assert ask(server, **hint) == (expected, num_blocks * 16)
            assert num_read(server) == num_blocks
            assert server.metric("corella_fetched_blocks_total") == 0
            assert server.metric("corella_block_loads_total", outcome="loaded") == 0
            # The rest comes from the other node, unless a busy machine answers too late.
            assert ask(server, longer, **hint)[0] == answer_to_longer


def test_a_node_lends_blocks_from_its_disk(tmp_path):
    prompts = [f"Story {number}: {STORY}" for number in range(4)]
    with ServerProcess(*NODE, *disk(tmp_path)) as server:
        wait_open(server)
        expected = [ask(server, prompt)[0] for prompt in prompts]
        for prompt in prompts:
            before = num_stored(server)
            server.wait_until(lambda prompt=prompt: ask(server, prompt) and num_stored(server) > before, "it is stored")
        num_blocks = server.metric("corella_kv_disk_blocks")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with ServerProcess(*NODE, *disk(tmp_path)) as server, ServerProcess(*NODE) as other:
        server.wait_until(lambda: server.metric("corella_kv_disk_blocks") >= num_blocks, "the file is scanned")
        # A node lends blocks once it has computed a step.
        ask(server, "A")
        hint = {"kv_transfer_params": {"cached_blocks": site_of(server)}}
        answers = [ask(other, prompt, **hint) for prompt in prompts]
        assert [answer for answer, _ in answers] == expected
        assert num_read(server) > 0
        # On a busy machine, some blocks come too late.
        assert other.metric("corella_fetched_blocks_total") > 0
        assert max(num_cached for _, num_cached in answers) > 0


def test_a_prefill_node_reads_the_prompt_of_a_session_from_its_disk(tmp_path, expected):
    with Fleet() as fleet:
        with node("prefill", fleet.registry, *SMALL, *disk(tmp_path)) as first:
            _, num_blocks = store(first)
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
        decode = fleet.decode(*SMALL)
        prefill = fleet.prefill(*SMALL, *disk(tmp_path))
        wait_found(prefill, num_blocks)
        assert ask(prefill) == (expected, num_blocks * 16)
        assert num_read(prefill) == num_blocks
        assert prefill.metric("corella_kv_sent_bytes_total") > 0
        assert decode.metric("corella_generation_tokens_total") > 0


def test_a_batch_reads_what_a_server_has_stored(tmp_path, expected):
    with ServerProcess(*SMALL, *disk(tmp_path / "kv")) as server:
        _, num_blocks = store(server)
    body = {"prompt": STORY, "max_tokens": 12, "temperature": 0, "logprobs": 3}
    request = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(request) + "\n")
    files = (tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    command = [BINARY, "batch", *files, *map(str, (*SMALL, *disk(tmp_path / "kv")))]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=PATIENCE_S)
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    answer = json.loads(line)["response"]["body"]
    assert answer["choices"][0]["text"] == expected[0]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_blocks * 16


@pytest.mark.parametrize("is_file", [True, False])
def test_without_a_usable_file_requests_are_served(tmp_path, expected, is_file):
    folder = tmp_path / "kv"
    if is_file:
        folder.write_text("")
    with ServerProcess(*SMALL, *disk(folder, "32M" if is_file else "1K")) as server:
        server.wait_until(lambda: server.metric("corella_kv_disk_errors_total") == 1, "it is off")
        assert ask(server) == (expected, 0)
        assert ask(server)[0] == expected
        assert server.metric("corella_kv_disk_on") == 0
        assert len(re.findall("--kv-disk is off", server.log())) == 1


def test_a_reset_of_the_tiers_erases_the_file(tmp_path, expected):
    with ServerProcess(*SMALL, *disk(tmp_path)) as server:
        _, num_blocks = store(server)

        def reset(**fields):
            answer = server.client._client.post(server.base_url + "/reset_prefix_cache", json=fields)
            return answer.status_code

        assert reset(tiers="all") == 400
        assert reset(other=True) == 400
        server.wait_until(lambda: reset() == 200, "no page is in use")
        assert ask(server)[0] == expected
        server.wait_until(lambda: num_read(server) == num_blocks, "the blocks are read again")
        server.wait_until(lambda: reset(tiers=True) == 200, "no page is in use")
        (file,) = tmp_path.iterdir()
        assert not any(file.read_bytes()[LABEL_BYTES:])
        assert ask(server) == (expected, 0)


def refusal(*arguments):
    with pytest.raises(AssertionError, match="exited with 2") as refused, ServerProcess(*arguments):
        pass
    return str(refused.value)


def test_a_cache_that_it_is_not_for_is_refused(tmp_path):
    disk_folder = tmp_path / "kv"
    assert "--no-enable-prefix-caching" in refusal("--no-enable-prefix-caching", *disk(disk_folder))
    assert "the size" in refusal("--kv-disk", f"{disk_folder},x")
    assert not disk_folder.exists()


def test_all_files_of_a_folder_share_its_size(tmp_path):
    folder = tmp_path / "kv"
    model = golden_model.make("llama-gqa-tied", tmp_path / "model")
    with ServerProcess(*SMALL, *disk(folder)) as server:
        wait_open(server)
    (first,) = folder.iterdir()
    with ServerProcess(model, *SMALL, *disk(folder)) as server:
        wait_open(server)
    assert len(list(folder.iterdir())) == 2
    size = first.stat().st_size
    with ServerProcess(model, *SMALL, *disk(folder, size)) as server:
        wait_open(server)
        (line,) = re.findall(".*another model made room.*", server.log())
        assert first.name in line
    (second,) = folder.iterdir()
    assert second != first
    assert 0 < second.stat().st_size <= size


def inspect(*arguments):
    return subprocess.run([BINARY, "inspect", *arguments], capture_output=True, text=True)


def inspected(folder):
    return json.loads(inspect("--json", "--kv-disk", folder).stdout)["files"]


def test_inspect_lists_the_files_of_a_running_server(tmp_path):
    folder = tmp_path / "kv"
    with ServerProcess(*SMALL, *disk(folder), "--kv-disk-salted") as server:
        _, num_blocks = store(server)
        for _ in range(2):
            ask(server, cache_salt="mine")
        server.wait_until(lambda: num_stored(server) == 2 * num_blocks, "both prompts are stored")
        (path,) = folder.iterdir()
        content = path.read_bytes()
        (file,) = inspected(folder)
        assert path.read_bytes() == content
        assert file["in_use"]
        assert file["model"] == server.model()
        assert file["pages"]["salted"] == num_blocks
        assert (file["pages"]["whole"], file["pages"]["damaged"]) == (2 * num_blocks, 0)
    with path.open("r+b") as content:
        content.seek(LABEL_BYTES + 1000)
        content.write(b"\xff\x00\xff\x00")
    (folder / "older.corella-kv").write_bytes(b"CORKV" * 1000)
    older, file = sorted(inspected(folder), key=lambda file: file["path"] == str(path))
    assert (older["problem"], older["pages"]) == ("unknown", None)
    assert not file["in_use"]
    assert (file["pages"]["whole"], file["pages"]["damaged"]) == (2 * num_blocks - 1, 1)
    listed = inspect("--kv-disk", folder)
    assert "1 damaged" in listed.stdout
    assert "of another version" in listed.stdout
    for arguments, reason in [((tmp_path / "missing",), "cannot read the folder"), ((folder, "a/model"), "[MODEL]")]:
        refused = inspect("--kv-disk", *arguments)
        assert refused.returncode == 2
        assert reason in refused.stderr
