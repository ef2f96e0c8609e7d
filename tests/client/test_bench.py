"""`corella bench serve` with the options of `vllm bench serve`."""

import json
import os
import re
import subprocess

import certificate
from patience import PATIENCE_S
from server_process import BINARY, ServerProcess

FEW = ("--num-prompts", "4", "--num-warmups", "0")


def bench(*options, **variables):
    words = [BINARY, "bench", "serve", *FEW, *map(str, options)]
    environment = {**os.environ, **variables}
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)


def test_vllms_flags_load_a_server(tmp_path):
    results = tmp_path / "results.json"
    with ServerProcess("--device", "mock") as server:
        port = server.base_url.rpartition(":")[2]
        typed = (
            *("--backend", "vllm", "--host", "127.0.0.1", "--port", port, "--endpoint", "/v1/completions"),
            *("--dataset-name", "random", "--random-input-len", 8, "--random-output-len", 5, "--ignore-eos"),
            *("--request-rate", "inf", "--max-concurrency", 2, "--seed", 1, "--goodput", "ttft:60000", "tpot:60000"),
            *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "90,99", "--disable-tqdm"),
            *("--save-result", "--result-filename", results),
        )
        done = bench(*typed)
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (4, 32, 20)
    assert "--random-output-len is --max-tokens" in done.stderr
    assert found["median_ttft_ms"] <= found["p90_ttft_ms"] <= found["p99_ttft_ms"]
    assert re.fullmatch(r"\d{8}-\d{6}", found["date"]) and found["command"].startswith("corella bench serve --num-prompts 4")
    assert (found["ended_early"], found["ignore_eos"], found["max_tokens"]) == (None, True, 5)
    refused = bench("--dataset-name", "sharegpt", "--use-beam-search", "--random-output-len", 5)
    assert refused.returncode == 2
    assert [line.partition(":")[0] for line in refused.stderr.splitlines()] == ["error", "error"], refused.stderr
    assert "--prompts FILE" in refused.stderr and "there is no beam search" in refused.stderr


def test_two_runs_are_compared_in_a_table_and_a_page(tmp_path):
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    with ServerProcess("--threads", 1) as server:
        for file, most in zip(files, (1, 2)):
            done = bench(
                *("--base-url", server.base_url, "--max-tokens", 64, "--max-concurrency", most, "--api-key", "secret"),
                *("--output-json", file, "--save-detailed", "--report", tmp_path / f"{most}.html"),
            )
            assert done.returncode == 0, done.stderr
            assert "secret" not in file.read_text() + (tmp_path / f"{most}.html").read_text()
            # The built-in model ends its stories when they are over.
            found = json.loads(file.read_text())
            ended_early = sum(length < 64 for length in found["output_lens"])
            assert found["ended_early"] == ended_early
            assert ("ended before max tokens" in done.stdout) == (ended_early > 2)
    page = tmp_path / "both.html"
    words = [BINARY, "bench", "compare", *files, "--report", page]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "they differ in requests at a time: 1 and 2" in done.stdout
    assert re.search(r"^Output tokens/s +[\d.,]+ +[\d.,]+ +\d+\.\d\d$", done.stdout, re.MULTILINE), done.stdout
    assert "<h2>Throughput</h2>" in page.read_text()
    refused = subprocess.run([BINARY, "bench", "compare", page, page], capture_output=True, text=True, timeout=PATIENCE_S)
    assert refused.returncode != 0 and "both.html: this is no JSON" in refused.stderr, refused.stderr


def test_a_failed_run_leaves_earlier_results(tmp_path):
    earlier, new = tmp_path / "earlier.json", tmp_path / "new.html"
    earlier.write_text("{}")
    files = ("--output-json", earlier, "--report", new)
    with ServerProcess("--device", "mock", "--api-key", "sesame") as server:
        refused = bench("--base-url", server.base_url, "--num-warmups", 1, *files, "--model", "x", OPENAI_API_KEY="salt")
        assert refused.returncode == 2 and "OPENAI_API_KEY" in refused.stderr and server.base_url in refused.stderr
        assert earlier.read_text() == "{}" and not new.exists()
        done = bench("--base-url", server.base_url, *files, OPENAI_API_KEY="sesame")
    assert done.returncode == 0, done.stderr
    assert json.loads(earlier.read_text())["completed"] == 4 and new.exists()


def test_https(tmp_path):
    authority = certificate.Authority(tmp_path)
    cert, key = authority.issue("server")
    options = ("--device", "mock", "--tls-cert", cert, "--tls-key", key)
    with ServerProcess(*options, authority=authority.certificate) as server:
        url = ("--base-url", server.base_url, "--max-tokens", "3")
        refused = bench(*url)
        assert refused.returncode == 2 and "SSL_CERT_FILE" in refused.stderr, refused.stderr
        done = bench(*url, SSL_CERT_FILE=str(authority.certificate))
        assert done.returncode == 0, done.stderr
        assert "Completed requests                     4" in done.stdout, done.stdout
