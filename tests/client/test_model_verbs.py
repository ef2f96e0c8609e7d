"""Models of a server are listed, shown, loaded and unloaded by the programs that people use for it."""

import datetime
import http.client
import json
import os
import shutil
import subprocess

import ollama
import pytest
from browser import PHONE, page_of, say, scrolls_sideways, show_engine, violations, wait, wait_answered
from patience import PATIENCE_S, wait_until
from server_process import BINARY, ROOT, ServerProcess, free_port

NAMES = ("fox", "owl")
ROOM_FOR_ONE = ("--model-memory", "80M", "--threads", "1", "--device", "cpu")
ROOM_FOR_ALL = ("--model-memory", "400M", "--threads", "1", "--device", "cpu")
GREEDY = {"temperature": 0, "num_predict": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = [tmp_path_factory.mktemp("models") / name for name in NAMES]
    for folder in folders:
        shutil.copytree(ROOT / "models/nano", folder)
    return folders


@pytest.fixture
def server(folders):
    with ServerProcess(*folders, *ROOM_FOR_ALL) as server:
        yield server


def call(server, method, path, body=None, content_type="application/json"):
    """Returns the status and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    payload = body if isinstance(body, (str, type(None))) else json.dumps(body)
    connection.request(method, path, payload, {"content-type": content_type})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def states(server):
    data = json.loads(call(server, "GET", "/models")[1])["data"]
    return {model["id"]: model["status"]["value"] for model in data}


def wait_state(server, name, state):
    wait_until(lambda: states(server)[name] == state, lambda: states(server))


def test_ollamas_client_lists_shows_runs_and_stops_models(server):
    client = ollama.Client(host=server.base_url)
    fox, owl = [model.model for model in client.list().models]
    assert (fox, owl) == ("fox:latest", "owl:latest")
    shown = client.show(owl)
    assert states(server) == {"fox": "unloaded", "owl": "unloaded"}, "nothing is loaded to be shown"
    assert "completion" in shown.capabilities and "messages" in shown.template
    assert shown.modelinfo["general.architecture"] == shown.details.family
    assert shown.details.parameter_size and shown.details.quantization_level
    answer = client.generate(owl, "Tell me a story.", options=GREEDY)
    assert answer.response
    (running,) = client.ps().models
    assert running.model == owl and running.size > 0
    assert shown.modelinfo[f"{shown.details.family}.context_length"] == running.context_length
    assert client.show(owl) == shown
    # `ollama stop` sends this.
    assert client.generate(owl, keep_alive=0).done_reason == "unload"
    wait_state(server, "owl", "unloaded")
    assert client.ps().models == []
    assert [part.done_reason for part in client.generate(owl, "A", options=GREEDY, stream=True)][-1] == "length"


@pytest.mark.parametrize("level", [1, 2])
def test_llama_swaps_helper_for_vllm_puts_a_server_to_sleep_and_wakes_it(folders, level):
    """The calls of its `cmd/vllm-wrapper`: the level in a body, and an empty body of JSON."""
    with ServerProcess(folders[0], "--keep-alive", "10m", "--threads", "1") as server:
        assert call(server, "GET", "/health")[0] == 200
        assert call(server, "POST", "/wake_up", "")[0] == 200
        assert call(server, "POST", "/sleep", {"level": level}) == (200, "")
        assert json.loads(call(server, "GET", "/is_sleeping")[1]) == {"is_sleeping": True}
        assert states(server) == {"fox": "unloaded"}
        # It looks at the health first, and wakes the server in any case.
        assert call(server, "GET", "/health")[0] == 200
        assert call(server, "POST", "/wake_up", "")[0] == 200
        assert states(server) == {"fox": "loaded"}
        assert "the page cache keeps files" not in server.log()


def test_metrics_come_back_with_their_model(folders):
    with ServerProcess(folders[0], "--keep-alive", "10m", "--threads", "1") as server:

        def families():
            _, text = call(server, "GET", "/metrics")
            return {line for line in text.splitlines() if line.startswith("# TYPE ")}

        before = families()
        assert call(server, "POST", "/sleep")[0] == 200
        assert call(server, "POST", "/wake_up")[0] == 200
        assert families() == before


def test_the_calls_of_open_webui(server):
    """Those of its `backend/open_webui/routers/ollama.py` and `openai.py`."""
    version = json.loads(call(server, "GET", "/api/version")[1])["version"]
    assert all(part.isdigit() for part in version.split("."))
    tags = json.loads(call(server, "GET", "/api/tags")[1])["models"]
    models = {model["model"] for model in tags}
    assert json.loads(call(server, "GET", "/api/ps")[1]) == {"models": []}
    # It adds the tag before it looks into the list.
    model = "fox:latest"
    assert model in models
    status, _ = call(server, "POST", "/api/show", {"model": model})
    assert status == 200 and states(server)["fox"] == "unloaded"
    chat = {"model": model, "messages": [{"role": "user", "content": "A"}], "options": GREEDY, "stream": True}
    status, lines = call(server, "POST", "/api/chat", chat)
    assert status == 200 and json.loads(lines.splitlines()[-1])["done"]
    (loaded,) = json.loads(call(server, "GET", "/api/ps")[1])["models"]
    assert loaded["name"] == model
    assert datetime.datetime.fromisoformat(loaded["expires_at"]).timestamp() > 0
    unload = {"model": model, "keep_alive": 0, "prompt": ""}
    status, answer = call(server, "POST", "/api/generate", unload)
    assert status == 200 and json.loads(answer)["done_reason"] == "unload"
    wait_state(server, "fox", "unloaded")
    pull = {"model": model, "insecure": True}
    status, lines = call(server, "POST", "/api/pull", pull)
    assert (status, json.loads(lines.splitlines()[-1])) == (200, {"status": "success"})
    # A connection by OpenAI's API.
    listed = json.loads(call(server, "GET", "/v1/models")[1])["data"]
    assert [model["id"] for model in listed] == list(NAMES)
    body = {"model": "owl", "messages": [{"role": "user", "content": "A"}], "stream": True, "max_tokens": 4}
    status, events = call(server, "POST", "/v1/chat/completions", body)
    assert status == 200 and events.endswith("data: [DONE]\n\n")


def test_the_calls_of_llama_cpps_router(server):
    load = {"model": "fox"}
    assert call(server, "POST", "/models/load", load) == (200, '{"success":true}')
    wait_state(server, "fox", "loaded")
    assert call(server, "POST", "/models/load", load)[0] == 400
    (model,) = [model for model in json.loads(call(server, "GET", "/models")[1])["data"] if model["id"] == "fox"]
    assert model["status"]["memory_bytes"] > 0
    assert call(server, "POST", "/models/unload", load) == (200, '{"success":true}')
    wait_state(server, "fox", "unloaded")
    assert call(server, "POST", "/models/unload", load)[0] == 400
    assert call(server, "POST", "/models/load", {"model": "wolf"})[0] == 404


def corella(*words, **variables):
    done = subprocess.run(
        [BINARY, *words], capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, **variables}
    )
    return done.returncode, done.stdout, done.stderr


def test_ps_and_stop_ask_a_running_server(folders, tmp_path):
    (tmp_path / "keys.toml").write_text('[[key]]\nname = "one"\nkey = "sk-one-3f1c9a7e5b2d4068"\n')
    key = {"CORELLA_API_KEY": "sk-one-3f1c9a7e5b2d4068"}
    with ServerProcess(*folders, *ROOM_FOR_ALL, "--api-keys", tmp_path / "keys.toml") as server:
        at = ("--url", server.base_url)
        assert corella("ps", *at, **key) == (0, "NAME  SIZE  STATE  UNTIL\n", "")
        client = ollama.Client(host=server.base_url, headers={"authorization": f"Bearer {key['CORELLA_API_KEY']}"})
        client.generate("fox", "A", options=GREEDY)
        client.generate("owl", "A", options=GREEDY, keep_alive=-1)
        status, table, _ = corella("ps", *at, **key)
        rows = [line.split() for line in table.splitlines()]
        assert (status, [row[0] for row in rows]) == (0, ["NAME", "fox", "owl"]), table
        assert [row[3] for row in rows[1:]] == ["loaded", "loaded"] and table.endswith("for ever\n"), table
        assert corella("stop", "owl", *at, **key) == (0, "", "owl: unloaded when its requests have ended\n")
        wait_until(lambda: "owl" not in corella("ps", *at, **key)[1], "owl is unloaded")
        status, _, log = corella("stop", "wolf", *at, **key)
        assert status == 2 and "wolf" in log and log.count("\n") == 1, log
        status, _, log = corella("ps", *at)
        assert status == 2 and "wants a key: give one with --api-key" in log, log
    with ServerProcess(folders[0], "--threads", "1") as server:
        status, _, log = corella("stop", "fox", "--url", server.base_url)
        assert status == 2 and "keeps fox loaded: start it with --keep-alive" in log, log
    status, _, log = corella("ps", "--url", f"http://127.0.0.1:{free_port()}")
    assert status == 2 and log.startswith("error: no server listens at http://127.0.0.1:"), log


@pytest.mark.parametrize("size", [PHONE, {"width": 1400, "height": 900}], ids=["phone", "desktop"])
def test_the_page_shows_the_models_and_chooses_one(browser, folders, size):
    with ServerProcess(*folders, *ROOM_FOR_ONE) as server, page_of(browser, server, size=size) as page:
        wait(page, "document.getElementById('model').selectedOptions[0].textContent === 'fox · not loaded'")
        page.select_option("#model", "owl")
        say(page, "Tell me a story.")
        wait_answered(page)
        wait(page, "document.getElementById('model').selectedOptions[0].textContent === 'owl · loaded'")
        show_engine(page)
        wait(page, "document.getElementById('server').textContent.includes('owl')")
        rows = "[...document.querySelectorAll('#model-rows tr')].map(({ children }) => children[1].textContent).join()"
        wait(page, f"{rows} === 'not loaded,loaded'")
        assert "MiB" in page.text_content("#model-rows tr:nth-child(2) td:nth-child(3)")
        assert violations(page) == []
        assert not scrolls_sideways(page)
        # Another model takes its room. Its engine's picture is over, and comes back with it.
        assert call(server, "POST", "/models/load", {"model": "fox"})[0] == 200
        wait(page, f"{rows} === 'loaded,not loaded'")
        page.wait_for_selector("#feed-state[data-state=asleep]")
        assert page.text_content("#feed-state") == "not loaded"
        assert call(server, "POST", "/models/load", {"model": "owl"})[0] == 200
        page.wait_for_selector("#feed-state[data-state=live]")
