"""Tests servers with several models, which are loaded by requests."""

import json
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


def test_two_models_of_one_name_are_refused(models, tmp_path):
    other = shutil.copytree(NANO, tmp_path / "other/fox")
    command = [BINARY, "serve", models[0], other, "--port", "0"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "two models are named `fox`" in process.stderr
