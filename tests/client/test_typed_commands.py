"""Commands in the habits of other programs: `ollama run`, pipes, and variables of other servers."""

import hashlib
import json
import os
import re
import subprocess

import pytest
from patience import PATIENCE_S, wait_until
from server_process import BINARY, ROOT, ServerProcess, free_port

SMALL = ("--threads", "1", "--kv-cache-memory", "64M")
GREEDY = ("--temperature", "0", "--max-tokens", "12")


def corella(*words, text=None, **variables):
    given = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    result = subprocess.run(
        [BINARY, *words], capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, **variables}, **given
    )
    return result.returncode, result.stdout, result.stderr


def generated(*words, text=None):
    status, answer, log = corella(*words, *SMALL, *GREEDY, text=text)
    assert status == 0 and answer.strip(), log
    return answer


def test_the_built_in_model_is_run_by_its_name():
    prompt = "Tell me a story about a fox."
    typed = generated("run", "corella-nano", prompt)
    assert typed == generated("generate", "--no-limits", "-p", prompt)
    # Words need no quotes, and nothing is measured or remarked.
    assert typed == generated("run", "corella-nano", *prompt.split())
    status, _, log = corella("run", "corella-nano", prompt, *SMALL, *GREEDY)
    assert status == 0 and log == ""
    # As with Ollama, input without a prompt is the prompt.
    assert typed == generated("run", "corella-nano", text=prompt + "\n")
    assert typed == generated("run", "corella-nano:latest", prompt)
    status, shown, log = corella("inspect", "corella-nano")
    assert (status, log) == (0, "") and "corella-nano" in shown


def test_a_prompt_is_piped_in():
    article = "A fox found a lantern in the snow.\n"
    whole = article + "\nWhat did the fox find?"
    expected = generated("generate", "--no-limits", "-p", whole)
    assert generated("run", "corella-nano", "What did the fox find?", text=article) == expected
    assert generated("generate", "--no-limits", text=whole + "\n") == expected
    assert generated("generate", "--no-limits", "-p", "-", text=whole) == expected
    # An explicit prompt excludes piped input.
    alone = generated("generate", "--no-limits", "-p", "What did the fox find?")
    assert generated("generate", "--no-limits", "-p", "What did the fox find?", text=article) == alone


def test_input_without_a_prompt_is_refused():
    for words in (["run", "corella-nano"], ["generate", "--no-limits", "-p", "-"]):
        for text in (None, "", "\n"):
            status, answer, log = corella(*words, text=text)
            assert (status, answer, log) == (2, "", "error: there is no prompt: standard input is empty\n")


def add_to_ollama(folder, name, layers):
    """Adds a model to a folder of Ollama, by the kinds and contents of its layers."""
    manifest = {"layers": []}
    for kind, content in layers.items():
        digest = hashlib.sha256(content).hexdigest()
        blob = folder / f"blobs/sha256-{digest}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        media_type = f"application/vnd.ollama.image.{kind}"
        manifest["layers"].append({"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)})
    path = folder / "manifests/registry.ollama.ai" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest))


def test_a_model_of_ollama_has_its_own_system_message(tmp_path):
    gguf = ROOT / "tests/gguf/qwen3-f16.gguf"
    weights, system = gguf.read_bytes(), "You are a fox. "

    def num_prompt_tokens(model, *words):
        status, _, log = corella("run", model, "Hi", *words, "--verbose", *SMALL, *GREEDY, OLLAMA_MODELS=str(tmp_path))
        assert status == 0, log
        return int(re.search(r"prefill +(\d+) tokens", log)[1])

    add_to_ollama(tmp_path, "me/fox/latest", {"model": weights, "system": system.encode()})
    add_to_ollama(tmp_path, "library/tuned/latest", {"model": weights, "adapter": b"rows"})
    store = {"OLLAMA_MODELS": str(tmp_path)}
    expected = num_prompt_tokens(gguf, "--system", system)
    assert num_prompt_tokens("me/fox") == expected > num_prompt_tokens(gguf)
    shorter = num_prompt_tokens(gguf, "--system", "A")
    assert num_prompt_tokens("me/fox", "--system", "A") == shorter < expected
    with ServerProcess("me/fox", *SMALL, env={**os.environ, **store}) as server:
        assert "the SYSTEM of me/fox's Modelfile is left out" in server.log()
    status, _, log = corella("run", "tuned", "Who are you?", **store)
    assert status == 2 and "tuned:latest, a model of Ollama, cannot be used: its Modelfile has an ADAPTER" in log


def test_a_key_of_another_server_leaves_no_server_open():
    port = str(free_port())
    options = ("serve", "--device", "mock", "--port", port)
    for key in ("VLLM_API_KEY", "LLAMA_API_KEY"):
        status, _, log = corella(*options, "--host", "0.0.0.0", **{key: "sesame"})
        assert status == 2 and "set CORELLA_API_KEY" in log and "sesame" not in log
    variables = {"VLLM_API_KEY": "sesame", "OLLAMA_HOST": "0.0.0.0:11434"}
    with ServerProcess("--device", "mock", env={**os.environ, **variables}) as server:
        wait_until(lambda: "ready" in server.log(), server.log)
        assert "VLLM_API_KEY is not read" in server.log() and "OLLAMA_HOST is not read: --host" in server.log()
        assert "sesame" not in server.log()


@pytest.mark.parametrize(
    "words, advice",
    [
        (["run-batch", "-i", "in", "-o", "out"], "`corella batch IN.jsonl MODEL -o OUT.jsonl`"),
        (["-m", "x.gguf", "-p", "hi"], "`corella generate` first"),
        (["version"], "`corella --version`"),
        (["batch", "-i", "in", "-o", "out"], "`corella batch IN.jsonl MODEL -o OUT.jsonl`"),
        (["serve", "model", "--api-key", "one", "two"], "--api-keys FILE"),
        (["generate", "-p", "hi", "--temperature", "-1"], "--temperature must be"),
    ],
)
def test_advice(words, advice):
    status, _, log = corella(*words)
    assert status == 2 and advice in log and log.count("error: ") == 1
