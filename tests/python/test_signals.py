"""Ctrl-C ends what the package waits for, and the process when nobody catches it."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import CLIENT_TESTS
from patience import PATIENCE_S

CAUGHT = """
import threading
from corella import LLM, SamplingParams
from patience import wait_until
llm = LLM(kv_cache_memory="64M")
params = SamplingParams(max_tokens=1900, seed=1, ignore_eos=True)
def wait():
    {wait}
def tell():
    wait_until(lambda: llm.num_live_requests > 0, "requests run")
    print("busy", flush=True)
threading.Thread(target=tell, daemon=True).start()
try:
    while True:
        wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
del wait
wait_until(lambda: llm.num_live_requests == 0, "the requests end")
print(len(llm.generate("Once")), flush=True)
"""


@pytest.mark.parametrize(
    "wait",
    [
        'llm.generate(["Once"] * 300, params)',
        'list(llm.stream("Once", params))',
        'import asyncio; asyncio.run(llm.agenerate(["Once"] * 300, params))',
    ],
    ids=["generate", "stream", "agenerate"],
)
def test_an_interrupt_ends_a_call_and_its_requests(wait):
    process = start(CAUGHT.format(wait=wait))
    assert process.stdout.readline() == "busy\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (output, process.returncode) == ("interrupted\n1\n", 0), errors


def test_an_uncaught_interrupt_ends_the_process():
    process = start(CAUGHT.format(wait='llm.generate(["Once"] * 300, params)').replace("KeyboardInterrupt", "OSError"))
    assert process.stdout.readline() == "busy\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGINT and errors.rstrip().endswith("KeyboardInterrupt")


def test_a_program_may_end_while_answers_are_written():
    program = """
import asyncio, sys
from corella import LLM, SamplingParams
llm = LLM(kv_cache_memory="64M")
params = SamplingParams(max_tokens=1900, seed=1, ignore_eos=True)
streams = [llm.stream("Once", params) for _ in range(4)]
next(streams[0])
async def begin():
    stream = llm.astream("Once", params)
    await anext(stream)
    return stream
kept = asyncio.run(begin())
sys.exit(3)
"""
    for _ in range(3):
        process = start(program)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, output, errors) == (3, "", "")


def start(program):
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": CLIENT_TESTS},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
