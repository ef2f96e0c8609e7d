"""Configuration files and files of requests, changed at random: mistakes are reported, and nothing breaks."""

import json
import random
import subprocess

from patience import PATIENCE_S
from server_process import BINARY

CONFIG = """max-model-len = 256
kv-cache-memory = "16M"
threads = 1
[generate]
temperature = 0.5
seed = 7
top-k = 3
[serve]
port = 8000
served-model-name = ["nano", "gpt-4o"]
"""
ODD = ["\0", "[", "]]", '"', "'''", "=", "\n", "\\u", "é", "😀", "-1", "1e999", "99999999999999999999", "{a = 1}", "[serve.x]",
       "config = 'corella.toml'\n", "prompt = 'x'\n", "help = true\n", "# ", "true", "nan", "2026-01-01"]  # fmt: skip


def changed(rng, text):
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(text))
        end = min(len(text), at + rng.choice([0, 0, 1, 3, 20]))
        text = text[:at] + rng.choice([*ODD, "", text[at:end] * 3]) + text[end:]
    return text


def test_configuration_files(tmp_path):
    rng = random.Random(1)
    file = tmp_path / "corella.toml"
    for text in [CONFIG, *(changed(rng, CONFIG) for _ in range(60))]:
        file.write_bytes(text.encode())
        command = [BINARY, "generate", "--config", file, "--prompt", "A fox", "--max-tokens", "1"]
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S)
        log = run.stderr.decode()
        if run.returncode != 0:
            assert run.returncode == 2 and text != CONFIG, (text, log)
            assert log.startswith("error: ") and "panicked" not in log, (text, log)


def test_files_of_requests(tmp_path):
    rng = random.Random(1)
    file = tmp_path / "in.jsonl"
    body = {"prompt": "A fox", "max_tokens": 1, "temperature": 0}
    lines = [json.dumps({"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": body}) for at in range(3)]
    whole = lines[1]
    for at, line in enumerate([whole, *(changed(rng, whole).replace("\n", " ") for _ in range(30))]):
        lines[1] = line
        file.write_text("".join(line + "\n" for line in lines))
        output = tmp_path / f"out-{at}.jsonl"
        command = [BINARY, "batch", file, "-o", output, "--threads", "1", "--kv-cache-memory", "16M"]
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S)
        assert "panicked" not in run.stderr, (line, run.stderr)
        if run.returncode == 2:
            assert line != whole and "in.jsonl, line 2" in run.stderr, (line, run.stderr)
        else:
            answers = [json.loads(answer) for answer in output.read_text().splitlines()]
            failed = [answer for answer in answers if answer["error"] or answer["response"]["status_code"] != 200]
            assert len(answers) == 3 and len(failed) <= 1, (line, run.stderr)
            assert run.returncode == 0, (line, run.stderr)


def test_files_without_an_end():
    options = {"--config": "/dev/zero", "--api-keys": "/dev/zero", "--pin-prefix": "@/dev/zero",
               "--chat-template": "/dev/zero", "--tls-key": "/dev/zero"}  # fmt: skip
    for option, value in options.items():
        command = [BINARY, "serve", "--port", "0", option, value]
        if option == "--tls-key":
            command += ["--tls-cert", "/dev/zero"]
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S)
        assert run.returncode != 0 and option.strip("-").split("-")[0] in run.stderr, (option, run.stderr)
        assert "64 MiB" in run.stderr or "PEM" in run.stderr, (option, run.stderr)
