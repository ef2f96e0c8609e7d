"""The two ways in which a test may wait or influence time: it waits for an event, or holds a process still.

No test sleeps or compares durations. Rules about time are asserted in virtual time
(`crates/corella-core/tests/suite/session`, `crates/corella-sim`); tests with real processes assert order and outcome.
"""

import asyncio
import contextlib
import signal
import threading
import time
from pathlib import Path

# The deadline of every wait. It only ends a test that would hang.
PATIENCE_S = 300.0
PAUSE_S = 0.01


def wait_until(condition, what):
    """Waits until a condition is true, and returns its value. `what` is a text, or makes one when it never happens."""
    looks = _looks(what)
    while not (value := condition()):
        time.sleep(next(looks))
    return value


async def wait_until_async(condition, what):
    """Like `wait_until`, while the event loop runs."""
    looks = _looks(what)
    while not (value := condition()):
        await asyncio.sleep(next(looks))
    return value


def _looks(what):
    """Yields the pauses between two checks, until patience is over."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        yield PAUSE_S
    raise AssertionError(f"never happened: {what() if callable(what) else what}")


@contextlib.contextmanager
def held(process):
    """Holds a process still. All its threads have stopped when the body begins."""
    process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: _is_still(process), "all threads of the process have stopped")
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def _is_still(process):
    assert process.poll() is None, f"the process has ended with {process.returncode}"
    states = []
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        # A thread that ends meanwhile is still, too.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The name before the state is in parentheses, and may have any characters.
            states.append((thread / "stat").read_text().rpartition(") ")[2][0])
    return set(states) <= {"T", "t", "Z", "X"}


@contextlib.contextmanager
def slowed(server):
    """Lets a server run for a tenth of the time, so that others see it work even on a fast machine.

    It is for events that cannot happen while the server is held still: an answer that grows, or a node that is asked
    for its load.
    """
    is_over = threading.Event()

    def hold():
        while not is_over.wait(PAUSE_S):
            server.process.send_signal(signal.SIGSTOP)
            is_over.wait(9 * PAUSE_S)
            server.process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
