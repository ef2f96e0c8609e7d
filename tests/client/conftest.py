"""Fixtures of servers that tests share."""

import signal
from types import SimpleNamespace

import golden_model
import pytest
from server_process import ServerProcess

# A shell starts background commands with SIGINT ignored, and programs started by tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "night: slow by nature, or with a client of another project; a quicker test covers the same rule. "
        "`cargo xtask ci` leaves it to `cargo xtask night`.",
    )


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory):
    return golden_model.make("qwen3-gqa-tied", tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="session", params=["built-in", "golden"])
def served(request, golden_folder):
    """Yields a running server, the name of its model, and a text that its tokenizer knows."""
    if request.param == "built-in":
        arguments, text = (), "Tell me a story about a fox and a lantern."
    else:
        arguments = (golden_folder,)
        text = golden_model.text_of(range(40, 75))
    with ServerProcess(*arguments) as server:
        yield SimpleNamespace(
            server=server,
            client=server.client,
            model=server.model(),
            text=text,
            messages=[{"role": "user", "content": text}],
        )


@pytest.fixture(scope="module")
def browser():
    # The environments of some tests lack Playwright.
    from browser import chromium

    with chromium() as browser:
        yield browser
