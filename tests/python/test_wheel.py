"""The wheel works in an environment that has nothing else, and brings its command along."""

import os
import signal
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, Served
from patience import PATIENCE_S

FIVE_LINES = """
from corella import LLM, SamplingParams
llm = LLM()
outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=24, seed=1))
for output in outputs:
    print(output.outputs[0].text)
"""


@pytest.fixture(scope="module")
def wheel():
    return Path(os.environ["CORELLA_WHEEL"])


@pytest.fixture(scope="module")
def fresh(wheel, tmp_path_factory):
    """The folder of programs of a new environment with the wheel in it, which was made without a network."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--quiet", wheel]
    subprocess.run(install, check=True, timeout=PATIENCE_S)
    return folder / "bin"


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, **options)


def test_five_lines_answer(fresh):
    done = run(fresh / "python", "-c", FIVE_LINES)
    assert done.returncode == 0 and len(done.stdout.split()) > 5 and not done.stderr, done


def test_the_wheel_serves_every_python(wheel):
    assert "-cp310-abi3-" in wheel.name and "linux" in wheel.name
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    for name in ("corella/py.typed", "corella/_corella.pyi", "corella/_corella.abi3.so", "corella/llm.py"):
        assert name in names
    (licence,) = [name for name in names if name.endswith("/licenses/LICENSE")]
    assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    assert "\nName: corella-llm\n" in archive.read(metadata).decode(), "PyPI's `corella` is another package"
    # The wheel does not contain the path of the folder in which it was built.
    for name in names:
        assert name.endswith(".so") or str(ROOT).encode() not in archive.read(name), name


def test_the_command_is_the_binary(fresh):
    binary = os.environ["CORELLA_BIN"]
    for words in (["--version"], ["--help"], ["serve", "--help"], ["serve", "--prot", "1"], ["inspect", "--json"]):
        own, other = run(fresh / "corella", *words), run(binary, *words)
        assert (own.returncode, own.stdout, own.stderr) == (other.returncode, other.stdout, other.stderr), words
    assert run(fresh / "python", "-m", "corella", "--version").stdout == run(binary, "--version").stdout


def test_the_command_generates_and_pipes(fresh):
    words = ["generate", "-p", "Hello!", "--max-tokens", "8", "--temperature", "0", "--no-limits"]
    own, other = run(fresh / "corella", *words), run(os.environ["CORELLA_BIN"], *words)
    assert own.returncode == 0 and own.stdout == other.stdout
    # A reader that leaves early is no error.
    pipe = f"{fresh}/corella generate -p x --max-tokens 500 --no-limits | head -c 1"
    piped = run("bash", "-o", "pipefail", "-c", pipe)
    assert "Traceback" not in piped.stderr and "panicked" not in piped.stderr


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_it_is_told_to_stop(fresh, stop):
    with Served([fresh / "corella", "serve", "--port", "0"]) as served:
        assert b"corella-nano" in served.get("/v1/models")
        served.process.send_signal(stop)
        assert served.process.wait(PATIENCE_S) == 0, "".join(served.lines)


def test_the_command_can_be_interrupted(fresh):
    # The command has no handler of its own, so the signal ends it.
    words = ["generate", "-p", "Once", "--max-tokens", "2000", "--ignore-eos", "--no-limits"]
    process = subprocess.Popen([fresh / "corella", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGINT
