"""Sends every endpoint requests that `/openapi.json` allows and ones that it rules out, by Schemathesis."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S
from server_process import ServerProcess

SECONDS = os.environ.get("CORELLA_FUZZ_SECONDS")
SEED = os.environ.get("CORELLA_FUZZ_SEED")
SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"
# Requests with valid fields may still be refused because of rules between fields.
LEFT_OUT = "positive_data_acceptance"


@pytest.mark.night
@pytest.mark.parametrize("num_examples", [20])
def test_no_request_breaks_the_server(num_examples, tmp_path):
    with ServerProcess("--files-dir", tmp_path / "files") as server:
        command = [SCHEMATHESIS, "run", f"{server.base_url}/openapi.json", "--no-color"]
        command += ["--max-time", SECONDS] if SECONDS else ["--max-examples", str(num_examples)]
        # A failure in CI must come from the change, and not from the day.
        command += ["--seed", SEED] if SEED else ["--seed", "1", "--generation-deterministic"]
        command += ["--exclude-checks", LEFT_OUT]
        # The stream has no end.
        command += ["--exclude-path", "/engine/events"]
        command += ["--request-timeout", str(PATIENCE_S), "--output-sanitize", "false"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=int(SECONDS or 0) + PATIENCE_S)
        assert run.returncode == 0, run.stdout[-20_000:]
        assert server.process.poll() is None, server.log()
        assert server.status_of("/health") == 200
