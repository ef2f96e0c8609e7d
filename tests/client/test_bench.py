"""`corella bench serve` with the options of `vllm bench serve`."""

import json
import os
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
            *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99", "--disable-tqdm"),
            *("--save-result", "--result-filename", results),
        )
        done = bench(*typed)
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (4, 32, 20)
    assert "--random-output-len is --max-tokens" in done.stderr
    refused = bench("--dataset-name", "sharegpt", "--use-beam-search", "--random-output-len", 5)
    assert refused.returncode == 2
    assert [line.partition(":")[0] for line in refused.stderr.splitlines()] == ["error", "error"], refused.stderr
    assert "--prompts FILE" in refused.stderr and "there is no beam search" in refused.stderr


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
