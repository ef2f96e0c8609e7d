"""`corella batch`: files of requests, answered without a server."""

import json
import signal
import subprocess

import golden_model
import pytest
from patience import PATIENCE_S, wait_until
from server_process import BINARY, ServerProcess

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request(custom_id, url=COMPLETIONS, **body):
    body = {"max_tokens": 6, "ignore_eos": True, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path, requests):
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def read(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines), "an answer is repeated"
    assert len({line["id"] for line in lines}) == len(lines)
    return by_id


def command(requests, output, *options):
    return [BINARY, "batch", requests, "-o", output, "--threads", "1", "--kv-cache-memory", "64M", *options]


def run(*arguments):
    result = subprocess.run(
        command(*arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S
    )
    return result.returncode, result.stderr


def test_answers_are_those_of_a_server(tmp_path, golden_folder):
    text = golden_model.text_of(range(40, 75))
    requests = [request(f"r{i}", prompt=text[i : 9 + i], temperature=0) for i in range(9)]
    messages = [{"role": "user", "content": text}]
    requests.append(request("chat", CHAT, messages=messages, temperature=0))
    file = write(tmp_path / "in.jsonl", requests)
    status, log = run(file, tmp_path / "out.jsonl", golden_folder)
    assert status == 0, log
    assert "10 answered in" in log and "60 output tokens" in log, log
    answers = read(tmp_path / "out.jsonl")
    with ServerProcess(golden_folder, "--threads", "1") as server:
        for line in requests:
            path = line["url"].removeprefix("/v1")
            expected = server.client.post(path, body=line["body"], cast_to=object)
            answer = answers[line["custom_id"]]
            assert answer["error"] is None
            assert answer["response"]["status_code"] == 200
            body = answer["response"]["body"]
            assert body["choices"] == expected["choices"]
            assert body["usage"]["total_tokens"] == expected["usage"]["total_tokens"]


def test_a_batch_without_an_answer_fails(tmp_path):
    requests = [request(f"r{number}", prompt="Once", model="other") for number in range(5)]
    status, log = run(write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl")
    assert status == 1 and "0 answered, 5 failed" in log
    assert log.count("`other` does not exist") == 3
    requests[1]["custom_id"] = 1
    status, log = run(write(tmp_path / "in.jsonl", requests), tmp_path / "other.jsonl")
    assert status != 0 and "`custom_id`: invalid type: integer `1`, expected a string" in log


def test_a_request_fails_alone(tmp_path):
    file = write(
        tmp_path / "in.jsonl",
        [
            request("good", prompt="Once"),
            request("hot", prompt="Once", temperature=-1),
            request("stream", prompt="Once", stream=True),
            request("long", prompt="Once", max_tokens=10**9),
        ],
    )
    status, log = run(file, tmp_path / "out.jsonl")
    assert status == 0, log
    assert "1 answered, 3 failed" in log
    assert "\nhot: temperature: " in log and "\nstream: " in log and "\nlong: This model's maximum context" in log
    answers = read(tmp_path / "out.jsonl")
    assert answers["good"]["response"]["body"]["usage"]["completion_tokens"] == 6
    hot = answers["hot"]["response"]
    assert hot["status_code"] == 400
    assert hot["body"]["error"]["param"] == "temperature"
    assert answers["stream"]["response"] is None
    assert "stream" in answers["stream"]["error"]["message"]
    assert answers["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_it_goes_on_where_it_was_interrupted(tmp_path):
    num_requests = 60
    file = write(
        tmp_path / "in.jsonl",
        [request(f"r{i}", prompt=f"Story {i}", max_tokens=400) for i in range(num_requests)],
    )
    output = tmp_path / "out.jsonl"
    for stop, status in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        arguments = command(file, output, "--max-concurrency", "3")
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        size = output.stat().st_size if output.exists() else 0
        wait_until(lambda: output.exists() and output.stat().st_size > size, "there is another answer")
        process.send_signal(stop)
        log = process.communicate(timeout=PATIENCE_S)[1]
        assert process.returncode == status, log
    assert "interrupted" not in log
    before = output.read_text()
    whole = [json.loads(line) for line in before.splitlines(keepends=True) if line.endswith("\n")]
    assert 2 <= len(whole) < num_requests
    with output.open("a") as torn:
        torn.write('{"id":"batch_req_')
    status, log = run(file, output)
    assert status == 0, log
    assert f"{len(whole)} of {num_requests} answers" in log
    assert f"{num_requests - len(whole)} answered in" in log
    assert output.read_text().startswith(before)
    answers = read(output)
    assert len(answers) == num_requests
    assert all(answer["response"]["status_code"] == 200 for answer in answers.values())
    status, log = run(file, output)
    assert status == 0 and f"all {num_requests} requests" in log
    assert read(output) == answers


def test_a_queue_that_is_full_delays_requests_and_fails_none(tmp_path):
    file = write(tmp_path / "in.jsonl", [request(f"r{i}", prompt=f"{i}") for i in range(30)])
    limits = ("--max-num-seqs", "2", "--max-queued-requests", "1", "--max-concurrency", "30")
    status, log = run(file, tmp_path / "out.jsonl", *limits)
    assert status == 0 and "30 answered in" in log, log


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "line 1: is not JSON"),
        (json.dumps(request("a")) + "\n\n" + json.dumps(request("a")), "line 3: an earlier line"),
        (json.dumps({**request("a"), "method": "GET"}), "line 1: `method` must be POST"),
        (json.dumps({**request("a"), "url": "/reset_prefix_cache"}), "line 1: `url` must be"),
        (
            json.dumps(request("a")) + "\n" + json.dumps(request("b", "/v1/chat/completion")),
            "line 2: `url` must be one of /v1/chat/completions, /v1/completions, ",
        ),
        (json.dumps({"custom_id": "a"}), "line 1: missing field"),
    ],
)
def test_a_file_with_a_mistake_is_refused_at_once(tmp_path, content, reason):
    file = tmp_path / "in.jsonl"
    file.write_text(content)
    status, log = run(file, tmp_path / "out.jsonl")
    assert status == 2
    assert log.startswith("error: ") and len(log.splitlines()) == 1
    assert f"in.jsonl, {reason}" in log
    assert not (tmp_path / "out.jsonl").exists()


def test_other_files_are_not_overwritten(tmp_path):
    file = write(tmp_path / "in.jsonl", [request("a", prompt="x")])
    before = file.read_text()
    status, log = run(file, file)
    assert status == 2 and "is the input file" in log
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\n")
    status, log = run(file, notes)
    assert status == 2 and "notes.txt, line 1: is no answer of a batch" in log
    assert (file.read_text(), notes.read_text()) == (before, "my notes\n")
