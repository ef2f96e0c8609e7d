"""Type checkers know the package, and its examples run."""

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from corella import LLM, SamplingParams
from patience import PATIENCE_S

HERE = Path(__file__).parent
PACKAGE = ROOT / "crates/corella-python"
MODULES = ["corella"] + [
    f"corella.{path.stem}" for path in (PACKAGE / "python/corella").glob("*.py") if not path.stem.startswith("__")
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def mypy(tmp_path, program):
    path = tmp_path / "program.py"
    path.write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", HERE.parents[1] / "target/mypy", path]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)


@pytest.mark.parametrize("name", ["typed_example.py", "typed_vllm.py"])
def test_a_typed_program_is_accepted(tmp_path, name):
    checked = mypy(tmp_path, (HERE / name).read_text())
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    "line, error",
    [
        ("LLM(max_num_seq=8)", "max_num_seq"),
        ("LLM(dtype='fp7')", "Literal"),
        ("LLM(max_num_seqs='8')", "max_num_seqs"),
        ("LLM(tensor_parallel_size='1')", "tensor_parallel_size"),
        ("LLM(quantization='fp8')", "Literal"),
        ("LLM(enforce_eager='yes')", "enforce_eager"),
        ("SamplingParams(temprature=1)", "temprature"),
        ("LLM().generate('x')[0].outputs[0].txt", "txt"),
        ("LLM().generate(3)", "arg-type"),
    ],
)
def test_mistakes_are_found_before_they_run(tmp_path, line, error):
    checked = mypy(tmp_path, f"from corella import LLM, SamplingParams\n{line}\n")
    assert checked.returncode == 1 and error in checked.stdout, checked.stdout


def test_notebooks_complete_the_names_of_arguments():
    fields = inspect.signature(SamplingParams).parameters
    assert list(fields) == list(SamplingParams.__dataclass_fields__)
    options = inspect.signature(LLM).parameters
    assert next(iter(options)) == "model" and {"max_num_seqs", "seed", "kv_cache_memory"} <= options.keys()


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("page", ["docs/src/python.md", "crates/corella-python/README.md"])
def test_examples_in_pages_run(page, tmp_path):
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert blocks
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-c", block], capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
