"""Ctrl-C ends what the package waits for, and the process when nobody catches it."""

import signal
import subprocess
import sys
import time

import pytest
from conftest import TIMEOUT_S

CAUGHT = """
import time
from corella import LLM, SamplingParams
llm = LLM(kv_cache_memory="64M")
params = SamplingParams(max_tokens=1900, seed=1, ignore_eos=True)
def wait():
    {wait}
try:
    print("ready", flush=True)
    while True:
        wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
del wait
while llm.num_live_requests:
    time.sleep(0.001)
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
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert (output, process.returncode) == ("interrupted\n1\n", 0), errors


def test_an_interrupt_that_nobody_catches_ends_the_process():
    process = start(CAUGHT.format(wait='llm.generate(["Once"] * 300, params)').replace("KeyboardInterrupt", "OSError"))
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
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
        output, errors = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, output, errors) == (3, "", "")


def start(program):
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
