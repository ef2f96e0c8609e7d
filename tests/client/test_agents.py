"""Coding agents work against the binary: they read a file, edit it and answer, dictated by the mock.

`cargo xtask night clients` installs the agents pinned in `agents/package-lock.json` and `aider/requirements.lock`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import agent_model
import pytest
from patience import PATIENCE_S
from server_process import ROOT, ServerProcess

pytestmark = pytest.mark.night

PACKAGES = Path(os.environ.get("CORELLA_AGENTS", ROOT / "target/ci-agents")) / "node_modules"
# The interpreter of aider's environment.
AIDER = Path(os.environ.get("CORELLA_AIDER", ROOT / "target/ci-aider/bin/python"))
MODEL = "agent-model"
BEFORE, AFTER = "the lantern of {} is red\n", "the lantern of {} is blue\n"
QUESTION = "Please make the lantern of {} blue in notes.txt."
ANSWER = "The lantern of {} is blue now."


def edit(name, folder):
    """Returns the members of a call that replaces text of a file."""
    old, new = BEFORE.format(name).strip(), AFTER.format(name).strip()
    return {"file_path": str(folder / "notes.txt"), "old_string": old, "new_string": new}


def camel_case(name):
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


def patch(name):
    lines = ["apply_patch <<'EOF'", "*** Begin Patch", "*** Update File: notes.txt", "@@",
             f"-{BEFORE.format(name)}+{AFTER.format(name)}*** End Patch", "EOF"]
    return {"cmd": "\n".join(lines)}


class Agent:
    """How an agent is run, and the model's replies for the task."""

    def __init__(self, name, script, command, **environment):
        self.name = name
        # Returns cues and replies for a family and the agent's folder.
        self.script = script
        self.command = command
        self.environment = environment

    def run(self, base_url, home, folder):
        """Returns the agent's output. The agent has its own environment, without settings of the user who runs the
        test."""
        names = {"url": base_url, "home": home, "model": MODEL, "question": QUESTION.format(self.name)}
        command = [part.format(**names) for part in self.command]
        environment = {name: value.format(**names) for name, value in self.environment.items()}
        # Node comes with a package for Python.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        run = subprocess.run(
            command,
            env={"PATH": path, "HOME": str(home), **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout


def calls(name, read, write, done):
    """Returns the script of an agent that reads and writes by calls. `done` is the agent's message after the file is
    written, which appears nowhere before."""

    def script(family, folder):
        return [
            (QUESTION.format(name), agent_model.call(family, *read(folder))),
            (BEFORE.format(name).strip(), agent_model.call(family, *write(folder))),
            (done(folder), agent_model.answer(family, ANSWER.format(name))),
        ]

    return script


def edit_block(family, _):
    """Returns the script of aider, which reads the file before its request, and takes edits from the text of an
    answer."""
    old, new = BEFORE.format("aider"), AFTER.format("aider")
    block = f"notes.txt\n```\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```\n\n{ANSWER.format('aider')}"
    return [(QUESTION.format("aider"), agent_model.answer(family, block))]


CODEX_PROVIDER = '{{name = "Corella", base_url = "{url}/v1", wire_api = "responses"}}'
OPENCODE = {
    "provider": {
        "corella": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "unused"},
            "models": {MODEL: {"limit": {"context": 131072, "output": 4096}}},
        }
    },
    "autoupdate": False,
    "share": "disabled",
}

AGENTS = {
    agent.name: agent
    for agent in [
        Agent(
            "claude",
            calls(
                "claude",
                lambda folder: ("Read", {"file_path": str(folder / "notes.txt")}),
                lambda folder: ("Edit", edit("claude", folder)),
                lambda folder: f"{folder}/notes.txt has been updated",
            ),
            [
                str(PACKAGES / "@anthropic-ai/claude-code-linux-x64/claude"),
                "--print", "{question}", "--allowedTools", "Read,Edit", "--output-format", "json",
            ],
            ANTHROPIC_BASE_URL="{url}",
            ANTHROPIC_API_KEY="unused",
            ANTHROPIC_MODEL="{model}",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        ),
        Agent(
            "codex",
            calls(
                "codex",
                lambda folder: ("exec_command", {"cmd": "cat notes.txt"}),
                lambda folder: ("exec_command", patch("codex")),
                lambda folder: "Updated the following files",
            ),
            [
                str(PACKAGES / "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"),
                "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access",
                "-c", "model={model}", "-c", "model_provider=corella",
                "-c", f"model_providers.corella={CODEX_PROVIDER}",
                "{question}",
            ],
        ),
        Agent(
            "opencode",
            calls(
                "opencode",
                lambda folder: ("read", {"filePath": str(folder / "notes.txt")}),
                lambda folder: ("edit", {camel_case(key): value for key, value in edit("opencode", folder).items()}),
                lambda folder: "Edit applied successfully",
            ),
            [str(PACKAGES / "opencode-linux-x64/bin/opencode"), "run", "--model", "corella/{model}", "{question}"],
            OPENCODE_CONFIG_CONTENT=json.dumps(OPENCODE).replace("{", "{{").replace("}", "}}").replace("{{url}}", "{url}"),
        ),
        Agent(
            "qwen-code",
            calls(
                "qwen-code",
                lambda folder: ("read_file", {"file_path": str(folder / "notes.txt")}),
                lambda folder: ("edit", edit("qwen-code", folder)),
                lambda folder: f"{folder}/notes.txt has been updated",
            ),
            [str(Path(sys.executable).parent / "node"), str(PACKAGES / "@qwen-code/qwen-code/cli.js"),
             "--approval-mode", "auto-edit", "--auth-type", "openai", "--prompt", "{question}"],
            OPENAI_BASE_URL="{url}/v1",
            OPENAI_API_KEY="unused",
            OPENAI_MODEL="{model}",
        ),
        Agent(
            "aider",
            edit_block,
            [str(AIDER.with_name("aider")), "--model", "openai/{model}", "--edit-format", "diff", "--no-git", "--yes-always",
             "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--message", "{question}", "notes.txt"],
            OPENAI_API_BASE="{url}/v1",
            OPENAI_API_KEY="unused",
        ),
    ]
}


@pytest.fixture(scope="module")
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each agent."""
    return {name: tmp_path_factory.mktemp(name) for name in AGENTS}


@pytest.fixture(scope="module")
def server(family, folders, tmp_path_factory):
    folder = agent_model.make(family, tmp_path_factory.mktemp(family))
    script = [rule for agent in AGENTS.values() for rule in agent.script(family, folders[agent.name])]
    path = folder / "script.json"
    path.write_text(json.dumps(script))
    arguments = ["--device", "mock", "--mock-script", path, "--served-model-name", MODEL]
    # The prompts have a token for each of their bytes.
    arguments += ["--max-num-batched-tokens", 8192, "--kv-cache-memory", "2G"]
    with ServerProcess(folder, *arguments) as server:
        yield server


def num_refused(server):
    name = "corella_http_requests_total"
    return server.metric(name) - server.metric(name, status="200")


# One family is enough for clients of /v1/chat/completions.
PAIRS = [(family, name) for family in agent_model.FAMILIES for name in ["claude", "codex"]]
PAIRS += [("qwen3", name) for name in AGENTS if name not in ["claude", "codex"]]


@pytest.mark.parametrize("family, name", PAIRS, indirect=["family"])
def test_an_agent_reads_a_file_edits_it_and_answers(server, folders, name, tmp_path):
    agent, folder, home = AGENTS[name], folders[name], tmp_path
    num_refused_before = num_refused(server)
    notes = folder / "notes.txt"
    notes.write_text(BEFORE.format(agent.name))
    printed = agent.run(server.base_url, home, folder)
    assert notes.read_text() == AFTER.format(agent.name), printed + server.log()
    assert ANSWER.format(agent.name) in printed
    assert num_refused(server) == num_refused_before, "every request was served"
