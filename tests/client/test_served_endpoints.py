"""The table of other servers' endpoints (crates/corella/flags/endpoints.toml) matches the server."""

import tomllib
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S
from server_process import ROOT, ServerProcess

TABLE = tomllib.loads((ROOT / "crates/corella/flags/endpoints.toml").read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    with ServerProcess("--device", "mock", "--files-dir", folder) as server:
        yield server


def ask(server, endpoint):
    """Sends the shortest request, and returns the status and the text of the answer."""
    method, path = endpoint.split()
    for name in ("{model}", "{response_id}", "{digest}", "{encodedKey}", "{id_slot}"):
        path = path.replace(name, server.model() if name == "{model}" else "1")
    body = None if method in ("GET", "HEAD") else b"{}"
    request = urllib.request.Request(
        server.base_url + path, body, {"content-type": "application/json"}, method=method.replace("WEBSOCKET", "GET")
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return SimpleNamespace(status=response.status, text=response.read().decode())
    except urllib.error.HTTPError as error:
        return SimpleNamespace(status=error.code, text=error.read().decode())


def is_answered(answer):
    """An existing path may still not know a made-up name."""
    return answer.status != 405 and " here. " not in answer.text


@pytest.mark.parametrize("endpoint", TABLE["same"])
def test_an_endpoint_is_the_same(server, endpoint):
    answer = ask(server, endpoint)
    # Some endpoints do not wake a model that the one before has put to sleep.
    ask(server, "POST /wake_up")
    assert is_answered(answer) and answer.status not in (500, 501, 503), answer


@pytest.mark.parametrize("endpoint", sorted({entry["endpoint"] for entry in TABLE["other"].values()}))
def test_the_endpoint_that_is_named_instead_is_answered(server, endpoint):
    assert is_answered(ask(server, endpoint))


@pytest.mark.parametrize(
    "endpoint", [*TABLE["other"], *(endpoint for group in TABLE["refused"] for endpoint in group["endpoints"])]
)
def test_an_endpoint_is_not_there(server, endpoint):
    answer = ask(server, endpoint)
    assert answer.status == 404 or answer.status == 405, answer
