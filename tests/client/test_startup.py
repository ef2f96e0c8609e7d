"""Tests the program's start, and its messages when it cannot start."""

import json
import shutil
import subprocess
import urllib.request

import golden_model
import openai
import pytest
from patience import PATIENCE_S, wait_until
from server_process import BINARY, ServerProcess, free_port
from stalled_mount import stalled_mount


def test_the_start_line_says_what_runs(golden_folder):
    with ServerProcess(golden_folder, "--threads", 1) as server:
        line = next(line for line in server.log().splitlines() if "pages" in line)
        for word in ("thread", "context"):
            assert word in line, line


def refusal(*arguments):
    """Runs a start that must fail, and returns the one line that it prints."""
    result = subprocess.run(
        [BINARY, "serve", "--port", "0", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.fixture
def folder(tmp_path):
    return golden_model.make("qwen3-gqa-tied", tmp_path)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_folder(tmp_path):
    assert "no-such-model" in refusal(tmp_path / "no-such-model")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file(folder, file):
    (folder / file).unlink()
    assert file.split(".")[-1] in refusal(folder)


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "model.safetensors" in refusal(folder)


def test_malformed_config(folder):
    (folder / "config.json").write_text("{")
    assert "config.json" in refusal(folder)


def test_unknown_architecture(folder):
    change_config(folder, architectures=["MambaForCausalLM"], model_type="mamba")
    assert "mamba" in refusal(folder).lower()


def test_wrong_shape(folder):
    change_config(folder, intermediate_size=97)
    line = refusal(folder)
    assert "97" in line
    assert "mlp" in line


def test_missing_tensor(folder):
    change_config(folder, num_hidden_layers=3)
    assert "model.layers.2." in refusal(folder)


def test_port_in_use(golden_folder):
    with ServerProcess(golden_folder) as server:
        result = subprocess.run(
            [BINARY, "serve", golden_folder, "--port", str(server.port)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert result.returncode != 0
        assert str(server.port) in result.stderr
        assert "panicked" not in result.stderr


def cached_tokens(server, prompt):
    answer = server.client.completions.create(
        model=server.model(), prompt=prompt, max_tokens=1, temperature=0
    )
    return answer.usage.prompt_tokens_details.cached_tokens


def test_a_pinned_prefix_is_there_from_the_first_request(tmp_path):
    prefix = "You are a patient librarian who answers in one sentence. " * 8
    file = tmp_path / "prefix.txt"
    file.write_text(prefix)
    with ServerProcess("--pin-prefix", f"@{file}", "--block-size", 16) as server:
        num_pinned = server.metric("corella_kv_pages_pinned")
        assert num_pinned >= 2
        for _ in range(2):
            cached = cached_tokens(server, prefix + "Who are you?")
            assert cached >= 16 * num_pinned
            reset = urllib.request.Request(server.base_url + "/reset_prefix_cache", method="POST")
            assert urllib.request.urlopen(reset, timeout=PATIENCE_S).status == 200


def test_a_prefix_that_cannot_be_pinned(tmp_path):
    assert "no-such-file" in refusal("--pin-prefix", f"@{tmp_path}/no-such-file")
    line = refusal("--pin-prefix", "many words " * 60, "--max-pinned-share", "0.0001")
    assert "--max-pinned-share" in line


def test_while_the_model_is_loaded_clients_are_told_so(golden_folder, tmp_path):
    port, folder, mount = free_port(), tmp_path / "model", tmp_path / "mount"
    mount.mkdir()
    shutil.copytree(golden_folder, folder)
    weights = folder / "model.safetensors"
    weights.unlink()
    weights.symlink_to(mount / "model.safetensors")
    with stalled_mount(mount), openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", max_retries=0
    ) as client:
        command = [BINARY, "serve", folder, "--port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:

            def refusal():
                """Returns the server's error. Before the port is open, there is no connection, and the result is
                false."""
                with pytest.raises(openai.APIError) as error:
                    client.models.list()
                return isinstance(error.value, openai.InternalServerError) and error.value

            error = wait_until(refusal, "the port is open")
            assert (error.status_code, error.code) == (503, "loading")
            assert process.poll() is None
        finally:
            process.kill()
            process.wait()
