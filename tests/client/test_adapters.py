"""LoRA adapters over HTTP: tokens of PEFT, several adapters at once, loaded and unloaded while requests run."""

import concurrent.futures
import contextlib
import json

import golden_model
import pytest
from openai import BadRequestError, ConflictError, InternalServerError, NotFoundError
from server_process import ServerProcess
from stalled_mount import stalled_mount

ADAPTERS = golden_model.GOLDEN / "adapters"
BASE = "llama-gqa-tied"


def golden(name):
    return json.loads((ADAPTERS / name / "golden.json").read_text())


def most_likely(logits):
    return max(range(len(logits)), key=logits.__getitem__)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = golden_model.make(BASE, tmp_path_factory.mktemp("model"))
    options = ["--dtype", "float32", "--kv-cache-dtype", "float32", "--lora-modules", f"all={ADAPTERS / 'llama-all'}"]
    with ServerProcess(folder, *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client


def next_token(client, model, prompt):
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=1, temperature=0)
    return ord(answer.choices[0].text) - golden_model.FIRST


def check(client, model, name):
    """Compares the most likely tokens with PEFT's, if they lead by far."""
    case = golden(name)
    num_compared = 0
    for behind, logits in enumerate(reversed(case["logits"])):
        best = most_likely(logits)
        others = [logit for token, logit in enumerate(logits) if token != best]
        if logits[best] - max(others) > 1e-3 * max(map(abs, logits)):
            prompt = case["prompt"][: len(case["prompt"]) - behind]
            assert next_token(client, model, prompt) == best
            num_compared += 1
    assert num_compared >= 2


def load(client, name, folder):
    return client.post("/load_lora_adapter", cast_to=object, body={"lora_name": name, "lora_path": str(folder)})


def test_an_adapter_from_the_start_draws_what_peft_draws(client):
    check(client, "all", "llama-all")


def test_adapters_are_loaded_and_unloaded_beside_running_requests(client):
    load(client, "some", ADAPTERS / "llama-some")
    assert {"all", "some"} <= {model.id for model in client.models.list()}
    names = {"all": "llama-all", "some": "llama-some"}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for check_done in [pool.submit(check, client, *pair) for pair in 4 * list(names.items())]:
            check_done.result()
    client.post("/unload_lora_adapter", cast_to=object, body={"lora_name": "some"})
    with pytest.raises(NotFoundError):
        next_token(client, "some", [1, 2, 3])
    check(client, "all", "llama-all")


def test_an_adapter_of_a_table_loads_its_model_and_leaves_with_it(tmp_path):
    folder = golden_model.make(BASE, tmp_path / "base")
    table = {"model": folder, "dtype": "float32", "kv-cache-dtype": "float32"}
    lines = [f"{key} = {json.dumps(str(value))}" for key, value in table.items()]
    file = tmp_path / "models.toml"
    modules = json.dumps([f"all={ADAPTERS / 'llama-all'}", f"gone={tmp_path}"])
    adapted = ["[models.base]", *lines, f"lora-modules = {modules[:modules.index(',')]}]"]
    file.write_text("\n".join([*adapted, "[models.broken]", *lines, f"lora-modules = [{modules.split(', ')[1]}"]))
    with ServerProcess("--models", file, "--device", "cpu") as server:
        listed = {model.id: model for model in server.client.models.list()}
        assert (listed["all"].parent, listed["all"].status["value"]) == ("base", "unloaded")
        check(server.client, "all", "llama-all")
        listed = {model.id: model for model in server.client.models.list()}
        assert listed["all"].root == str(ADAPTERS / "llama-all")
        unload = server.client.with_options(base_url=server.base_url)
        unload.post("/models/unload", cast_to=object, body={"model": "base"})
        status = lambda: server.client.models.retrieve("all").status["value"]
        server.wait_until(lambda: status() == "unloaded", "the model is unloaded")
        check(server.client, "all", "llama-all")
        with pytest.raises(ConflictError, match="those of its table"):
            load(server.client, "more", ADAPTERS / "llama-all")
        with pytest.raises(ConflictError, match="those of its table"):
            server.client.post("/unload_lora_adapter", cast_to=object, body={"lora_name": "all"})
        with pytest.raises(InternalServerError, match=f"its adapter gone in {tmp_path}"):
            next_token(server.client, "gone", [1])


def test_what_cannot_be_loaded_is_named(client):
    with pytest.raises(BadRequestError, match="no such file"):
        load(client, "none", ADAPTERS / "no-such-folder")
    with pytest.raises(BadRequestError, match="shape"):
        load(client, "other", ADAPTERS / "qwen3-all")
    with pytest.raises(BadRequestError, match="loaded already"):
        load(client, "all", ADAPTERS / "llama-all")


def num_reading(server):
    """Returns the number of threads of a server that read adapters."""
    return len(server.threads("corella-adapter"))


def test_a_stalled_mount_holds_up_nothing_but_its_own_loads(tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    options = ("--device", "mock", "--enable-lora")
    with stalled_mount(mount) as go_on, ServerProcess(*options) as server:
        with concurrent.futures.ThreadPoolExecutor() as pool, contextlib.ExitStack() as ends:
            # Loads end with the test in any case.
            ends.callback(go_on)
            loads = [pool.submit(load, server.client, name, mount / name) for name in ("one", "two")]
            server.wait_until(lambda: num_reading(server) == 2, "two threads read")
            answers = [pool.submit(ask, server, number) for number in range(32)]
            assert all(answer.result() == 4 for answer in answers)
            assert server.status_of("/ready") == 200
            assert [model.id for model in server.client.models.list()] == [server.model()]
            server.client.post("/unload_lora_adapter", cast_to=object, body={"lora_name": "one"})
            with pytest.raises(ConflictError, match="unloaded before it was read"):
                loads[0].result()
            assert num_reading(server) == 2
            go_on()
            with pytest.raises(BadRequestError, match="two"):
                loads[1].result()
            server.wait_until(lambda: num_reading(server) == 0, "both threads end")


def test_a_load_from_a_stalled_mount_has_a_deadline(tmp_path):
    options = ("--device", "mock", "--enable-lora", "--adapter-load-timeout", 1)
    with stalled_mount(tmp_path), ServerProcess(*options) as server:
        with pytest.raises(BadRequestError, match="was not read within 1 s, and is given up"):
            load(server.client, "one", tmp_path / "one")
        assert ask(server, 1) == 4
        assert num_reading(server) == 1
        # The thread that still waits does not delay the end.
        server.terminate()
        assert server.wait() == 0


def ask(server, seed):
    """Returns the number of tokens of an answer."""
    options = {"max_tokens": 4, "extra_body": {"ignore_eos": True}}
    answer = server.client.completions.create(model=server.model(), prompt=[40, 41, seed], **options)
    return answer.usage.completion_tokens
