"""Tests `/v1/files` and `/v1/batches` with OpenAI's own Python client."""

import io
import itertools
import json
import resource
import shutil
import signal
import urllib.error
import urllib.request

import openai
import pytest
from patience import PATIENCE_S, wait_until
from server_process import ServerProcess

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}


def line(custom_id, url=COMPLETIONS, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"max_tokens": 6, **body}}


def upload(client, lines, **fields):
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch", **fields)


def create(client, lines, endpoint=COMPLETIONS, window="24h", **fields):
    file = upload(client, lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **fields)


def wait(client, batch, statuses=ENDED, is_enough=lambda batch: True):
    def batch_if_it_is_so():
        now = client.batches.retrieve(batch.id)
        return now if now.status in statuses and is_enough(now) else None

    return wait_until(batch_if_it_is_so, lambda: client.batches.retrieve(batch.id))


def read(client, file_id):
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines), "an answer is repeated"
    assert len({line["id"] for line in lines}) == len(lines)
    return by_id


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ServerProcess("--files-dir", tmp_path_factory.mktemp("files")) as server:
        yield server


# Answers take enough steps for a test to act meanwhile.
NUM_TOKENS = 100


def long_lines(num_lines):
    return [line(f"r{i}", prompt=f"{i}", max_tokens=NUM_TOKENS, ignore_eos=True) for i in range(num_lines)]


def slow_server(files, *options):
    return ServerProcess("--threads", 1, "--files-dir", files, *options)


MESSAGES = [{"role": "user", "content": "Tell me a story."}]
REQUESTS = {
    CHAT: [{"messages": MESSAGES, "temperature": 0}, {"messages": MESSAGES, "seed": 3}],
    COMPLETIONS: [{"prompt": "Once", "temperature": 0}, {"prompt": "Twice", "seed": 3}],
    "/v1/embeddings": [{"input": "a fox"}, {"input": ["a", "b"]}],
    "/v1/responses": [{"input": "Once", "temperature": 0}, {"input": "Twice", "seed": 3}],
}


@pytest.mark.parametrize("endpoint", REQUESTS)
def test_answers_are_those_of_direct_requests(server, endpoint):
    client = server.client
    limit = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", "/v1/responses": "max_output_tokens"}.get(endpoint)
    bodies = [body | ({limit: 6} if limit else {}) for body in REQUESTS[endpoint]]
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": endpoint, "body": body} for i, body in enumerate(bodies)
    ]
    batch = create(client, lines, endpoint, metadata={"a": "b"})
    assert batch.status == "validating" and batch.metadata == {"a": "b"}
    batch = wait(client, batch)
    assert batch.status == "completed" and batch.error_file_id is None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (2, 2, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers = read(client, batch.output_file_id)
    for i, body in enumerate(bodies):
        answer = answers[f"r{i}"]
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
        expected = client.post(endpoint.removeprefix("/v1"), body=body, cast_to=object)
        body = answer["response"]["body"]
        for name in ["choices", "data"]:
            assert body.get(name) == expected.get(name)
        texts = [
            [item["content"][0]["text"] for item in answer.get("output", [])] for answer in [body, expected]
        ]
        assert texts[0] == texts[1]
    file = client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file.bytes == len(client.files.content(file.id).content)
    assert batch.id in [listed.id for listed in client.batches.list(limit=3)]


def test_a_request_fails_alone(server):
    lines = [
        line("good", prompt="Once"),
        line("hot", prompt="Once", temperature=-1),
        line("stream", prompt="Once", stream=True),
        line("long", prompt="Once", max_tokens=10**9),
        line("other", prompt="Once", model="other"),
    ]
    batch = wait(server.client, create(server.client, lines))
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 4)
    assert set(read(server.client, batch.output_file_id)) == {"good"}
    errors = read(server.client, batch.error_file_id)
    statuses = {id: error["response"] and error["response"]["status_code"] for id, error in errors.items()}
    assert statuses == {"hot": 400, "stream": None, "long": 400, "other": 404}
    assert errors["hot"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["stream"]["error"]["code"] == "invalid_request"


GOOD = line("a", prompt="Once")
MISTAKES = [
    ([GOOD, "{", "[]"], ["invalid_line", "invalid_line"], [2, 3]),
    ([GOOD, "", GOOD], ["duplicate_custom_id"], [3]),
    ([GOOD, line("b", CHAT, messages=MESSAGES)], ["mismatched_endpoint"], [2]),
    ([GOOD | {"method": "GET"}], ["invalid_line"], [1]),
    ([GOOD, line("b", prompt="x" * (8 << 20)), "["], ["invalid_line", "invalid_line"], [2, 3]),
    ([], ["empty_file"], [None]),
]


@pytest.mark.parametrize("lines,codes,numbers", MISTAKES)
def test_a_file_with_a_mistake_is_refused_as_a_whole(server, lines, codes, numbers):
    batch = wait(server.client, create(server.client, lines))
    assert batch.status == "failed" and batch.output_file_id is None
    assert [error.code for error in batch.errors.data] == codes
    assert [error.line for error in batch.errors.data] == numbers


def test_what_cannot_be_a_batch_is_refused_by_its_field(server):
    client = server.client
    file = upload(client, [GOOD]).id
    fields = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
    for wrong, param, kind in [
        ({"input_file_id": "file-1"}, "input_file_id", openai.NotFoundError),
        ({"endpoint": "/v1/messages"}, "endpoint", openai.BadRequestError),
        ({"completion_window": "soon"}, "completion_window", openai.BadRequestError),
        ({"metadata": {"a": 1}}, "metadata", openai.BadRequestError),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds", openai.BadRequestError),
        ({"extra_body": {"priority": 1}}, "priority", openai.BadRequestError),
    ]:
        with pytest.raises(kind) as error:
            client.batches.create(**fields | wrong)
        assert error.value.param == param
    for act in [client.batches.retrieve, client.batches.cancel]:
        with pytest.raises(openai.NotFoundError):
            act("batch_1")


def test_files_are_kept_listed_read_and_deleted(server):
    client = server.client
    content = bytes(range(256)) * 999 + b"\r\n--x\r\n"
    file = client.files.create(
        file=('ä "b".jsonl', io.BytesIO(content)),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert (file.bytes, file.filename, file.expires_at) == (len(content), 'ä "b".jsonl', file.created_at + 7200)
    assert client.files.content(file.id).content == content
    others = [upload(client, [GOOD]).id for _ in range(3)]
    listed = [listed.id for listed in client.files.list(purpose="batch", order="asc", limit=2)]
    assert {file.id, *others} <= set(listed), "the client asks for all pages"
    assert client.files.delete(file.id).deleted
    for act in [client.files.retrieve, client.files.content, client.files.delete]:
        with pytest.raises(openai.NotFoundError) as error:
            act(file.id)
        assert error.value.code == "file_not_found"
    for wrong, param in [({"purpose": "assistants"}, "purpose"), ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds")]:
        with pytest.raises(openai.BadRequestError) as error:
            client.files.create(**{"file": ("a", b"x"), "purpose": "batch"} | wrong)
        assert error.value.param == param


def test_the_disk_that_files_take_is_bounded(tmp_path):
    options = ["--files-dir", tmp_path / "files", "--max-file-bytes", "4K", "--max-files-bytes", "10K"]
    with ServerProcess(*options) as server:
        client = server.client

        def put(num_bytes):
            return client.files.create(file=("a", b"x" * num_bytes), purpose="batch")

        with pytest.raises(openai.APIStatusError) as error:
            put(4097)
        assert error.value.status_code == 413 and "--max-file-bytes" in error.value.message
        # A client that is still sending also receives the error.
        with pytest.raises(openai.APIStatusError) as error:
            put(64 << 20)
        assert error.value.status_code == 413
        files = [put(4096).id for _ in range(2)]
        with pytest.raises(openai.APIStatusError) as error:
            put(4096)
        assert error.value.code == "storage_full" and "--max-files-bytes" in error.value.message
        client.files.delete(files[0])
        put(4096)
        kept = sum(path.stat().st_size for path in (tmp_path / "files/files").iterdir() if not path.suffix)
        assert kept == 8192
        # The answers of a batch count, too.
        client.files.delete(files[1])
        batch = wait(client, create(client, [line(f"r{i}", prompt="Once") for i in range(30)]))
        assert batch.status == "failed" and batch.errors.data[0].code == "storage_full"
        assert 0 < len(read(client, batch.output_file_id)) < 30


def test_without_a_folder_the_answer_names_the_option(tmp_path):
    with ServerProcess() as server:
        client = server.client
        for ask in [
            client.files.list,
            client.batches.list,
            lambda: client.files.retrieve("file-1"),
            lambda: upload(client, [GOOD]),
            lambda: client.batches.create(input_file_id="a", endpoint=CHAT, completion_window="24h"),
        ]:
            with pytest.raises(openai.NotFoundError) as error:
                ask()
            assert error.value.code == "no_files" and "--files-dir DIR" in error.value.message


def test_one_folder_serves_one_server(tmp_path):
    with ServerProcess("--files-dir", tmp_path):
        with pytest.raises(AssertionError, match="another server"):
            ServerProcess("--files-dir", tmp_path)


def output_of(files, batch):
    return files / "batches" / f"{batch.id}.output.jsonl"


def test_a_batch_goes_on_after_a_kill(tmp_path):
    lines = long_lines(200)
    with slow_server(tmp_path, "--batch-concurrency", 4) as server:
        batch = create(server.client, lines)
        wait(server.client, batch, {"in_progress"}, lambda batch: batch.request_counts.completed >= 20)
        server.process.kill()
        server.process.wait()
    before = output_of(tmp_path, batch).read_bytes()
    whole = before[: before.rindex(b"\n") + 1]
    # A kill may also come in the middle of a line.
    output_of(tmp_path, batch).write_bytes(whole + whole[:50])
    with slow_server(tmp_path, "--batch-concurrency", 50) as server:
        batch = wait(server.client, batch)
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (200, 0)
        content = server.client.files.content(batch.output_file_id).content
        assert content.startswith(whole)
        assert set(read(server.client, batch.output_file_id)) == {line["custom_id"] for line in lines}
        num_before = whole.count(b"\n")
        assert server.metric("corella_generation_tokens_total") == NUM_TOKENS * (200 - num_before)
        assert not output_of(tmp_path, batch).exists()
    # An ended batch stays, and is not run again.
    with slow_server(tmp_path) as server:
        again = server.client.batches.retrieve(batch.id)
        assert again.to_dict() == batch.to_dict()
        assert server.client.files.content(batch.output_file_id).content == content
        assert server.metric("corella_generation_tokens_total") == 0


def test_a_drain_waits_for_what_is_being_answered_and_no_more(tmp_path):
    lines = long_lines(500)
    with slow_server(tmp_path, "--batch-concurrency", 4) as server:
        batch = create(server.client, lines)
        wait(server.client, batch, {"in_progress"}, lambda batch: batch.request_counts.completed >= 8)
        server.terminate()
        assert server.wait() == 0
        assert "cut off" not in server.log()
    content = output_of(tmp_path, batch).read_bytes()
    num_answered = content.count(b"\n")
    assert content.endswith(b"\n") and 8 <= num_answered < len(lines)
    with slow_server(tmp_path) as server:
        batch = wait(server.client, batch)
        assert batch.request_counts.completed == 500
        assert server.metric("corella_generation_tokens_total") == NUM_TOKENS * (500 - num_answered)


def test_a_cancelled_batch_keeps_what_was_answered(tmp_path):
    lines = long_lines(500)
    with slow_server(tmp_path, "--batch-concurrency", 4) as server:
        client = server.client
        batch = create(client, lines)
        wait(client, batch, {"in_progress"}, lambda batch: batch.request_counts.completed >= 8)
        with pytest.raises(openai.ConflictError) as error:
            client.files.delete(batch.input_file_id)
        assert batch.id in error.value.message
        assert client.batches.cancel(batch.id).status in ["cancelling", "cancelled"]
        batch = wait(client, batch)
        assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
        num_answered = batch.request_counts.completed
        assert 8 <= num_answered < len(lines)
        assert len(read(client, batch.output_file_id)) == num_answered
        server.wait_until(lambda: server.metric("corella_num_requests_running") == 0, "it rests")
        assert client.batches.retrieve(batch.id).request_counts.completed == num_answered
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
        assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_whose_time_is_over_says_so_in_each_line(tmp_path):
    lines = long_lines(300)
    with slow_server(tmp_path, "--batch-concurrency", 2) as server:
        for window_s in (2**exponent for exponent in itertools.count(1)):
            batch = wait(server.client, create(server.client, lines, window=f"{window_s}s"))
            assert batch.status == "expired" and batch.expired_at >= batch.created_at + window_s
            answers, errors = (read(server.client, id) for id in [batch.output_file_id, batch.error_file_id])
            # A busy machine may be too late for the first line.
            if answers:
                break
        assert errors and not set(answers) & set(errors)
        assert set(answers) | set(errors) == {line["custom_id"] for line in lines}
        assert {error["error"]["code"] for error in errors.values()} == {"batch_expired"}


def test_requests_of_clients_go_first(tmp_path):
    """One slot serves all, so a client waits for at most two lines before it."""
    lines = long_lines(300)
    with slow_server(tmp_path, "--max-num-seqs", 1, "--batch-concurrency", 2) as server:
        client = server.client
        batch = create(client, lines)
        wait(client, batch, {"in_progress"}, lambda batch: batch.request_counts.completed >= 1)

        def num_answered():
            return client.batches.retrieve(batch.id).request_counts.completed

        def is_answered_soon():
            before = num_answered()
            client.completions.create(model=server.model(), prompt="a", max_tokens=6)
            return num_answered() - before <= 4

        # On a busy machine, more lines may be answered before the client's request, and before lines are counted again.
        for _ in range(3):
            server.wait_until(is_answered_soon, "a client waits for a few lines only")
        assert num_answered() < len(lines)
        client.batches.cancel(batch.id)


KEYS = {name: f"sk-{name}-3f1c9a7e5b2d4068" for name in ["one", "two", "slow"]}


def test_each_key_has_files_and_batches_of_its_own_and_pays_for_them(tmp_path):
    toml = "".join(f'[[key]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items())
    (tmp_path / "keys.toml").write_text(toml + "tokens-per-minute = 60\n")
    options = ["--api-keys", tmp_path / "keys.toml", "--files-dir", tmp_path / "files"]
    with ServerProcess(*options) as server:
        one, two, slow = (server.client.with_options(api_key=key) for key in KEYS.values())
        batch = wait(one, create(one, [GOOD]))
        assert batch.status == "completed"
        for act in [
            lambda: two.files.retrieve(batch.input_file_id),
            lambda: two.files.content(batch.output_file_id),
            lambda: two.files.delete(batch.output_file_id),
            lambda: two.batches.retrieve(batch.id),
            lambda: two.batches.cancel(batch.id),
            lambda: two.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"),
        ]:
            with pytest.raises(openai.NotFoundError):
                act()
        assert not list(two.files.list()) and not list(two.batches.list())
        with pytest.raises(openai.AuthenticationError):
            server.client.with_options(api_key="wrong").files.list()
        # 60 tokens are enough for at most 5 of these; the others wait for more, without delaying other keys.
        waiting = create(slow, [line(f"r{i}", prompt="a b c d e f", ignore_eos=True) for i in range(20)])
        wait(slow, waiting, {"in_progress"}, lambda batch: batch.request_counts.completed >= 1)
        assert wait(one, create(one, [GOOD] + [line(f"r{i}", prompt="Once") for i in range(20)])).status == "completed"
        counts = slow.batches.retrieve(waiting.id).request_counts
        assert 1 <= counts.completed < 20 and counts.failed == 0
        slow.batches.cancel(waiting.id)
        assert wait(slow, waiting).status == "cancelled"


def test_a_key_that_is_taken_away_ends_its_batches(tmp_path):
    keys = tmp_path / "keys.toml"

    def write(*names):
        keys.write_text("".join(f'[[key]]\nname = "{name}"\nkey = "{KEYS[name]}"\n' for name in names))

    write("one", "two")
    with slow_server(tmp_path / "files", "--batch-concurrency", 2, "--api-keys", keys) as server:
        client = server.client.with_options(api_key=KEYS["one"])
        batch = create(client, long_lines(500))
        wait(client, batch, {"in_progress"}, lambda batch: batch.request_counts.completed >= 2)
        write("two")
        server.process.send_signal(signal.SIGHUP)
        server.wait_until(lambda: "read the API keys again" in server.log(), "the keys are read")
        server.wait_until(lambda: "a batch has failed" in server.log(), "the batch ends")
        write("one", "two")
        server.process.send_signal(signal.SIGHUP)
        server.wait_until(lambda: server.log().count("read the API keys again") == 2, "the keys are read")
        batch = wait(client, batch)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "invalid_api_key")
        assert 2 <= len(read(client, batch.output_file_id)) < 500


def test_a_key_that_waits_for_its_limit_does_not_keep_others_waiting(tmp_path):
    keys = tmp_path / "keys.toml"
    toml = "".join(f'[[key]]\nname = "{name}"\nkey = "{KEYS[name]}"\n' for name in ["one", "slow"])
    keys.write_text(toml + "tokens-per-minute = 60\n")
    with ServerProcess("--api-keys", keys, "--files-dir", tmp_path / "files") as server:
        one, slow = (server.client.with_options(api_key=KEYS[name]) for name in ["one", "slow"])
        lines = [line(f"r{i}", prompt="a b c d e f", max_tokens=40, ignore_eos=True) for i in range(4)]
        waiting = [create(slow, lines) for _ in range(20)]
        assert wait(one, create(one, [GOOD])).status == "completed"
        # The lines of the waiting batches wait for minutes, but their files may still be read.
        server.wait_until(
            lambda: any(slow.batches.retrieve(batch.id).status == "in_progress" for batch in waiting), "some go on"
        )


def test_a_batch_whose_folder_is_gone_fails(tmp_path):
    with slow_server(tmp_path, "--batch-concurrency", 4) as server:
        batch = create(server.client, long_lines(200))
        wait(server.client, batch, {"in_progress"}, lambda batch: batch.request_counts.completed >= 1)
        shutil.rmtree(tmp_path / "batches")
        batch = wait(server.client, batch)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "disk_error")
        assert (batch.output_file_id, batch.error_file_id) == (None, None)
        assert server.log().count("a batch's end cannot be written") == 1
        assert server.client.completions.create(model=server.model(), prompt="a", max_tokens=2)


def let_files_grow(server, num_bytes):
    """Limits each file that the server writes, like a full disk."""
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("is_quite_full", [False, True])
def test_a_batch_on_a_full_disk_fails_and_delivers_what_was_answered(tmp_path, is_quite_full):
    """On a completely full disk, neither the end of a batch nor a log line can be written."""
    num_lines = 60
    # The batch's reserve for its end fits, but not all of the answers, which are long because of their logprobs.
    num_bytes = 80_000
    lines = [line(f"r{i}", prompt=f"{i}", temperature=0, max_tokens=30, logprobs=5) for i in range(num_lines)]
    # Python ignores the signal about a file that cannot grow, and its children inherit that.
    with ServerProcess("--files-dir", tmp_path, restore_signals=False) as server:
        client = server.client
        expected = read(client, wait(client, create(client, lines)).output_file_id)
        assert len(expected) == num_lines and len(json.dumps(expected)) > 2 * num_bytes
        file = upload(client, lines)
        let_files_grow(server, num_bytes)
        batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        if is_quite_full:
            wait(client, batch, ENDED | {"in_progress"}, lambda batch: batch.request_counts.completed >= 1)
            let_files_grow(server, 0)
        batch = wait(client, batch)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "disk_error")
        answers = read(client, batch.output_file_id)
        assert 0 < len(answers) == batch.request_counts.completed < num_lines
    with ServerProcess("--files-dir", tmp_path) as server:
        client = server.client
        batch = wait(client, batch)
        answers = read(client, batch.output_file_id)
        # The next server does not know the unwritten end, and continues the batch where it was.
        assert batch.status == ("completed" if is_quite_full else "failed")
        assert len(answers) == (num_lines if is_quite_full else batch.request_counts.completed)
        texts = {id: answer["response"]["body"]["choices"] for id, answer in answers.items()}
        assert texts == {id: expected[id]["response"]["body"]["choices"] for id in answers}


def test_a_slow_or_broken_upload_leaves_nothing(tmp_path):
    with ServerProcess("--files-dir", tmp_path) as server:
        url = f"{server.base_url}/v1/files"
        head = {"content-type": "multipart/form-data; boundary=x"}
        part = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"y" * 70_000
        for body, headers in [(part, head), (b"", head), (part + b"\r\n--x--", {"content-type": "text/plain"})]:
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=PATIENCE_S)
            assert error.value.code == 400
        # The form has everything but the purpose.
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(urllib.request.Request(url, part + b"\r\n--x--\r\n", head), timeout=PATIENCE_S)
        assert json.load(error.value)["error"]["param"] == "purpose"
        server.wait_until(lambda: not list((tmp_path / "files").iterdir()), "nothing stays")
        assert not list(server.client.files.list())


def test_many_batches_at_once_all_end(server):
    batches = [create(server.client, [line(f"r{i}", prompt="Once") for i in range(5)]) for _ in range(40)]
    assert all(wait(server.client, batch).request_counts.completed == 5 for batch in batches)
