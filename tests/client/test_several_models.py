"""Tests servers with several models, which are loaded by requests."""

import json
import os
import shutil
import subprocess
import urllib.request

import openai
import pytest
from patience import PATIENCE_S
from server_process import BINARY, ROOT, ServerProcess

NANO = ROOT / "models/nano"
# Room for one of the small models, whose tokenizer and threads are planned with 32 MiB.
ROOM_FOR_ONE = ("--model-memory", "80M", "--threads", "1", "--device", "cpu")


@pytest.fixture
def models(tmp_path):
    folders = [tmp_path / name for name in ("fox", "owl", "hare")]
    for folder in folders:
        shutil.copytree(NANO, folder)
    return folders


def complete(server, model, **options):
    answer = server.client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=8, temperature=0, **options
    )
    return answer.model, answer.choices[0].text


def states(server):
    with urllib.request.urlopen(server.base_url + "/v1/models", timeout=PATIENCE_S) as response:
        return {model["id"]: model["status"]["value"] for model in json.load(response)["data"]}


def test_requests_load_their_models_which_take_turns(models):
    with ServerProcess("--threads", "1", NANO) as alone:
        _, expected = complete(alone, "nano")
    with ServerProcess(*models, *ROOM_FOR_ONE) as server:
        assert states(server) == {"fox": "unloaded", "owl": "unloaded", "hare": "unloaded"}
        for name in ("fox", "owl", "hare", "fox"):
            assert complete(server, name) == (name, expected)
            assert [model for model, state in states(server).items() if state == "loaded"] == [name]
        assert server.log().count(" loading fox: ") == 2
        assert "unloading fox: owl needs its room" in server.log()
        with pytest.raises(openai.NotFoundError, match="wolf"):
            complete(server, "wolf")
        server.terminate()
        assert server.wait() == 0


def test_a_model_that_is_gone_fails_its_own_requests(models):
    fox, owl, _ = models
    with ServerProcess(fox, owl, *ROOM_FOR_ONE) as server:
        shutil.rmtree(owl)
        with pytest.raises(openai.InternalServerError, match="owl"):
            complete(server, "owl")
        assert complete(server, "fox")[0] == "fox"
        # It is not tried again at once.
        shutil.copytree(NANO, owl)
        with pytest.raises(openai.InternalServerError, match="owl"):
            complete(server, "owl")
        assert server.log().count("owl cannot be loaded") == 1


def test_a_model_without_room_is_refused_with_the_figures(models):
    with ServerProcess(*models[:2], "--model-memory", "40M", "--threads", "1") as server:
        with pytest.raises(openai.InternalServerError, match=r"--model-memory"):
            complete(server, "fox")


def unload(server, model):
    body = json.dumps({"model": model, "keep_alive": 0}).encode()
    with urllib.request.urlopen(server.base_url + "/api/generate", body, timeout=PATIENCE_S) as response:
        assert json.load(response)["done_reason"] == "unload"
    server.wait_until(lambda: states(server)[model] == "unloaded", f"{model} is unloaded")


def test_prompts_on_a_disk_outlive_the_unloading_of_their_model(models, tmp_path):
    def ask(model):
        answer = server.client.completions.create(
            model=model, prompt="Once upon a time " * 20, max_tokens=8, temperature=0, logprobs=3
        )
        (choice,) = answer.choices
        return (choice.text, choice.logprobs), answer.usage.prompt_tokens_details.cached_tokens

    disk = ("--kv-disk", f"{tmp_path / 'kv'},64M")
    # An encoder keeps nothing on the disk.
    with ServerProcess(models[0], ROOT / "tests/encoder/bert-mean", *ROOM_FOR_ONE, *disk) as server:
        expected, num_cached = ask("fox")
        assert num_cached == 0
        unload(server, "fox")
        again, num_cached = ask("fox")
        assert again == expected
        assert num_cached > 64
        server.client.embeddings.create(model="bert-mean", input="a fox")
        assert "unloading fox: bert-mean needs its room; stores" in server.log()
        assert ask("fox") == (expected, num_cached)
        (file,) = (tmp_path / "kv").iterdir()
        assert file.stat().st_size <= 32 << 20


def test_models_of_one_content_do_not_share_a_file(models, tmp_path):
    disk = ("--kv-disk", tmp_path / "kv", "--threads", "1", "--device", "cpu", "--model-memory", "300M")
    with ServerProcess(*models[:2], *disk) as server:
        expected = complete(server, "fox")[1]
        assert complete(server, "owl")[1] == expected
        assert "are in use, by another process or a second time by this one" in server.log()
        assert set(states(server).values()) == {"loaded"}
    (tmp_path / "vixen").symlink_to(models[0])
    command = [BINARY, "serve", models[0], tmp_path / "vixen", *disk]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "under two names" in process.stderr


@pytest.mark.parametrize(
    "words, told",
    [
        (("--served-model-name", "x"), "--served-model-name is for a server with one model so far"),
        (("--role", "decode"), "--role is for a server whose model stays loaded so far"),
        (("--enable-lora",), "--enable-lora is for a server whose model stays loaded so far"),
    ],
)
def test_options_of_one_model_are_refused(models, words, told):
    process = subprocess.run([BINARY, "serve", *models, *words], capture_output=True, text=True, timeout=PATIENCE_S)
    assert process.returncode == 2
    assert told in process.stderr


def test_a_file_names_models_with_options_of_their_own(models, tmp_path):
    fox, owl, _ = models
    file = tmp_path / "models.toml"
    file.write_text(f"""
        [models.reader]
        model = "{fox}"
        max-model-len = 64
        [models.writer]
        model = "{owl}"
        served-model-name = ["author"]
        pinned = true
        keep-alive = "0"
    """)
    with ServerProcess("--models", file, "--model-memory", "160M", "--threads", "1", "--device", "cpu") as server:
        server.wait_until(lambda: states(server)["writer"] == "loaded", "the pinned model is loaded")
        assert complete(server, "author")[0] == "author"
        assert states(server) == {"reader": "unloaded", "writer": "loaded", "author": "loaded"}
        with pytest.raises(openai.BadRequestError, match="64"):
            complete(server, "reader", extra_body={"max_tokens": 100})
        assert states(server)["writer"] == "loaded"


@pytest.mark.parametrize(
    "text, told",
    [
        ("port = 80", "models.toml, line 4: `port` is an option of the server"),
        ("dtyp = 'int8'", "models.toml, line 4: a model has no option `dtyp`; did you mean `dtype`?"),
        ("[models.owl]\nmodel = './missing'", "models.toml, line 5: ./missing: no such folder or file"),
        ("[models.fox]", "models.toml, line 4: duplicate key"),
        ("[models.owl]\nmodel = 'FOX'\nserved-model-name = 'fox'", "models.toml, line 4: two models are named `fox`"),
        ("pinned = true\n[models.owl]\nmodel = 'FOX'\npinned = true", "the pinned models need"),
    ],
)
def test_mistakes_in_a_file_of_models(models, tmp_path, text, told):
    file = tmp_path / "models.toml"
    file.write_text(f"\n[models.fox]\nmodel = '{models[0]}'\n" + text.replace("FOX", str(models[0])))
    command = [BINARY, "serve", "--models", file, "--port", "0", *ROOM_FOR_ONE]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert process.returncode == 2
    assert told in process.stderr


def test_a_folder_of_models_is_served_and_what_cannot_be_read_is_skipped(models, tmp_path):
    fox, owl, hare = models
    shutil.copy(ROOT / "tests/gguf/qwen3-f16.gguf", tmp_path / "wolf.gguf")
    (owl / "config.json").write_text("{")
    (hare / "config.json").unlink()
    with ServerProcess("--models-dir", tmp_path, *ROOM_FOR_ONE) as server:
        assert states(server) == {"fox": "unloaded", "wolf": "unloaded"}
        for name in ("wolf", "fox"):
            assert complete(server, name)[0] == name
        assert f"skips {hare}: it has no config.json" in server.log()
        assert f"skips {owl}: " in server.log()
        # A truncated model fails alone. A model that is loaded needs the names of its files no longer.
        os.truncate(tmp_path / "wolf.gguf", 4096)
        shutil.rmtree(fox)
        with pytest.raises(openai.InternalServerError, match="wolf"):
            complete(server, "wolf")
        assert complete(server, "fox")[0] == "fox"
        assert server.status_of("/health") == 200


def test_models_of_the_hubs_cache_may_be_named(models, tmp_path):
    cache = tmp_path / "hub"
    snapshot = cache / "models--acme--nano/snapshots" / ("a" * 40)
    env = os.environ | {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": "http://127.0.0.1:9"}
    with ServerProcess(models[0], "--allow-hub-models", *ROOM_FOR_ONE, env=env) as server:
        assert states(server) == {"fox": "unloaded"}
        with pytest.raises(openai.NotFoundError):
            complete(server, "acme/nano")
        # As `corella pull` puts it there.
        shutil.copytree(NANO, snapshot)
        (cache / "models--acme--nano/refs").mkdir()
        (cache / "models--acme--nano/refs/main").write_text("a" * 40)
        assert states(server) == {"fox": "unloaded", "acme/nano": "unloaded"}
        for name in ("acme/../acme/nano", str(snapshot), f"../{cache.name}", "acme/nan"):
            with pytest.raises(openai.NotFoundError, match="`acme/nano`"):
                complete(server, name)
        assert complete(server, "acme/nano")[0] == "acme/nano"
        assert states(server) == {"fox": "unloaded", "acme/nano": "loaded"}
        assert complete(server, "fox")[0] == "fox"
        shutil.rmtree(cache)
        with pytest.raises(openai.InternalServerError, match="no longer in the hub's cache"):
            complete(server, "acme/nano")


def test_two_models_of_one_name_are_refused(models, tmp_path):
    other = shutil.copytree(NANO, tmp_path / "other/fox")
    command = [BINARY, "serve", models[0], other, "--port", "0"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "two models are named `fox`" in process.stderr
