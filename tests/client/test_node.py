"""Runs the tests of Node clients in the folder `node` against the built binary."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import agent_model
import pytest
from patience import PATIENCE_S
from server_process import ROOT, ServerProcess
from test_tools import dictating_server

TESTS = Path(__file__).parent / "node"
# `cargo xtask e2e` installs the packages of the lock file here.
PACKAGES = Path(os.environ.get("CORELLA_NODE_PACKAGES", ROOT / "target/ci-node"))
# Node itself comes with a package for Python.
NODE = Path(sys.executable).parent / "node"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    dictating = dictating_server("hermes", tmp_path_factory.mktemp("dictated"))
    with ServerProcess() as server, dictating as dictated:
        yield os.environ | {
            "CORELLA_URL": server.base_url,
            "CORELLA_MODEL": server.model(),
            "CORELLA_DICTATED_URL": dictated.base_url,
            "CORELLA_DICTATED_MODEL": dictated.model(),
        }


@pytest.mark.parametrize(
    "name", [pytest.param("ollama", marks=pytest.mark.night), "openai", pytest.param("vercel", marks=pytest.mark.night)]
)
def test_node(environment, name):
    run_node(name, environment)


@pytest.mark.night
def test_the_default_provider_of_vercels_sdk_names_items_of_earlier_answers(tmp_path):
    script = []
    for turn in range(5):
        script.append([f"Question {turn}.", agent_model.call("qwen3", "look", {"turn": turn})])
        script.append([f"Result {turn}.", agent_model.answer("qwen3", f"Answer {turn}.")])
    path = tmp_path / "script.json"
    path.write_text(json.dumps(script))
    folder = agent_model.make("qwen3", tmp_path / "model", max_len=16384)
    with ServerProcess(folder, "--device", "mock", "--mock-script", path) as server:
        names = {"CORELLA_SCRIPTED_URL": server.base_url, "CORELLA_SCRIPTED_MODEL": server.model()}
        run_node("vercel_openai", os.environ | names)


def run_node(name, environment):
    # Node looks for packages beside the file that imports them.
    script = shutil.copy(TESTS / f"{name}.test.js", PACKAGES)
    command = [NODE, "--test", "--test-reporter=spec", script]
    run = subprocess.run(command, env=environment, cwd=PACKAGES, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stdout + run.stderr
