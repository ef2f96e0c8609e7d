"""Greedy tokens over HTTP equal those of Hugging Face Transformers."""

import contextlib
import http.client
import json

import golden_model
import pytest
from patience import PATIENCE_S, held
from server_process import ServerProcess

# One model of each family whose layers differ from Llama's.
FAMILIES = sorted(path.parent.name for path in golden_model.GOLDEN.glob("*/golden.f32"))
PAGE_SIZE = 16
# The longest request fits, but not beside the others.
NUM_PAGES = 15
# If no layer sees the whole context, requests only have the pages of their windows.
NUM_PAGES_OF_WINDOWS = 8
WINDOWED = ("mistral", "mixtral", "phi3")


def kv_bytes(folder):
    """Returns the size of a token's K and V in f32."""
    config = json.loads((folder / "config.json").read_text())

    def size(*names):
        return next((config[name] for name in names if config.get(name)), None)

    num_heads = size("num_attention_heads", "n_head")
    head_dim = size("head_dim") or size("hidden_size", "n_embd") // num_heads
    num_kv_heads = size("num_key_value_heads") or num_heads
    # All layers have pages of one size, which is that of the widest layer.
    layers = [{}, *config.get("per_layer_config", {}).values()]
    widest = max(
        layer.get("num_key_value_heads", num_kv_heads) * layer.get("head_dim", head_dim) for layer in layers
    )
    return 2 * 4 * size("num_hidden_layers", "n_layer") * widest


def greedy_text(server, case):
    answer = server.client.completions.create(
        model=server.model(),
        prompt=case["prompt"],
        max_tokens=len(case["tokens"]),
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.prompt_tokens == len(case["prompt"])
    return answer.choices[0].text


def send_greedy(server, case):
    """Sends a request, and returns the connection on which the answer will come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    fields = {"prompt": case["prompt"], "max_tokens": len(case["tokens"]), "temperature": 0, "ignore_eos": True}
    body = json.dumps({"model": server.model(), **fields})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection


def text_of_answer(connection):
    with contextlib.closing(connection):
        answer = json.load(connection.getresponse())
    assert "choices" in answer, answer
    return answer["choices"][0]["text"]


@pytest.mark.parametrize(
    "name", ["llama-gqa-untied", "qwen3-gqa-tied", "qwen3-gqa-tied-sharded", "llama-gqa-tied-bf16"]
)
def test_greedy_tokens(name, tmp_path):
    folder = golden_model.make(name, tmp_path)
    # With this step size, longer prompts take several chunks.
    arguments = [folder, "--kv-cache-dtype", "f32", "--max-prefill-tokens", 48]
    if name.endswith("bf16"):
        # Matrix tiles would also round rows to bf16, which the goldens do not.
        arguments += ["--isa", "portable"]
    with ServerProcess(*arguments) as server:
        for case in golden_model.cases(name):
            assert greedy_text(server, case) == golden_model.text_of(case["tokens"])


# The other families run at night.
QUICK = ("gpt2", "mistral")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.night) for name in FAMILIES]
)
def test_greedy_tokens_through_preemption(name, tmp_path):
    folder = golden_model.make(name, tmp_path)
    # Each prompt occurs many times, so that more requests begin than the pool holds in the end.
    cases = 30 * golden_model.cases(name)
    longest = max(len(case["prompt"]) + len(case["tokens"]) for case in cases)
    num_pages = NUM_PAGES_OF_WINDOWS if name in WINDOWED else NUM_PAGES
    arguments = [folder, "--kv-cache-dtype", "f32", "--max-model-len", longest, "--max-prefill-tokens", 48]
    arguments += ["--head-room", 0, "--kv-cache-memory", num_pages * PAGE_SIZE * kv_bytes(folder)]
    with ServerProcess(*arguments) as server:
        server.model()
        # All requests are in the kernel's buffers before the server looks at the first of them.
        with held(server.process):
            connections = [send_greedy(server, case) for case in cases]
        texts = [text_of_answer(connection) for connection in connections]
        assert texts == [golden_model.text_of(case["tokens"]) for case in cases]
        print(f"{server.metric('corella_num_preemptions_total'):.0f} preemptions")
        assert server.metric("corella_num_preemptions_total") > 0
