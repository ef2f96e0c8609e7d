"""The commands of the book work as written.

Blocks of `sh` and `python` run in the repository's root, with `corella` on the PATH. A block that begins with `corella
serve` starts the server for the blocks after it. Blocks of `console` are examples for the reader's machine and do not
run, except refused commands.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from patience import PATIENCE_S
from server_process import BINARY, ROOT, ServerProcess

BOOK = ROOT / "docs/src"
PAGES = sorted(str(page.relative_to(BOOK)) for page in BOOK.rglob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVE = re.compile(r"(\w+=\S+ )?corella serve\b")
BOOK_ADDRESS = "127.0.0.1:8000"


@pytest.fixture
def root_copy(tmp_path, monkeypatch):
    """Makes a copy of the repository's root for readers, in which blocks may leave files."""
    for name in ["Cargo.toml", "bench", "models", "tests"]:
        (tmp_path / name).symlink_to(ROOT / name)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "corella").symlink_to(BINARY.resolve())
    (programs / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RUST_LOG", raising=False)
    monkeypatch.delenv("CORELLA_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.skipif(shutil.which("curl") is None, reason="the book's examples use curl")
# The page about benchmarks runs benchmarks, which take long.
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.night if page == "benchmarking.md" else ()) for page in PAGES]
)
def test_what_a_page_runs(page, root_copy, monkeypatch):
    reader = Reader(monkeypatch)
    try:
        for language, block in BLOCK.findall((BOOK / page).read_text()):
            reader.read(language, block)
    finally:
        reader.stop_server()


@pytest.mark.skipif(shutil.which("curl") is None, reason="the book's examples use curl")
def test_the_built_in_model_makes_the_calls_of_the_page():
    page = (BOOK / "tool-calling.md").read_text()
    blocks = [block for language, block in BLOCK.findall(page) if language == "sh"]
    with ServerProcess("--kv-cache-memory", "64M") as server:
        for block in blocks:
            done = run(["bash", "-euo", "pipefail", "-c", block.replace(BOOK_ADDRESS, f"127.0.0.1:{server.port}")])
            (call,) = json.loads(done.stdout)["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}, done.stdout
    assert len(blocks) == 2


class Reader:
    def __init__(self, monkeypatch):
        self.server = None
        self.monkeypatch = monkeypatch

    def read(self, language, block):
        if language == "console":
            for command, error in re.findall(r"^\$ (corella .*)\n(error: .*)$", block, re.MULTILINE):
                words = shlex.split(command)
                # If the book's port were in use, the server would refuse that instead.
                words += ["--port", "0"] if words[1] == "serve" else []
                refused = run(words)
                assert (refused.returncode, refused.stderr.strip()) == (2, error), command
        elif language == "sh" and SERVE.match(block):
            self.serve(block)
        elif language == "python" and "from corella import" in block:
            # The package's own tests run these blocks, with the wheel.
            pass
        elif language in ("sh", "python"):
            shell = ["bash", "-euo", "pipefail", "-c"] if language == "sh" else [sys.executable, "-c"]
            done = run([*shell, self.with_address(block)])
            assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
            assert '{"error":{"message"' not in done.stdout, f"{block}\n{done.stdout}"

    def serve(self, block):
        self.stop_server()
        words = shlex.split(block)
        while "=" in words[0]:
            self.monkeypatch.setenv(*words.pop(0).split("=", 1))
        options = shlex.join(words[2:]).replace("--port 8000", "")
        self.server = ServerProcess(*shlex.split(options))

    def with_address(self, block):
        if BOOK_ADDRESS not in block:
            return block
        if self.server is None:
            self.server = ServerProcess()
        return block.replace(BOOK_ADDRESS, f"127.0.0.1:{self.server.port}")

    def stop_server(self):
        if self.server is not None:
            self.server.kill()
            self.server.client.close()
        self.server = None


def run(command):
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S
    )


COMMANDS = ["serve", "generate", "chat", "run", "batch", "completions", "man", "inspect", "quantize", "pull", "list", "rm", "ps", "stop"] + [
    f"bench {name}" for name in ["serve", "offline", "scheduler", "kernels", "perplexity", "cache", "admission", "transfer"]
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_in_the_reference(command):
    page = (BOOK / "reference/command-line.md").read_text()
    (section,) = re.findall(rf"^## corella {command}$(.*?)(?:^## |\Z)", page, re.MULTILINE | re.DOTALL)
    help_text = run([BINARY, *command.split(), "--help"]).stdout
    # A flag is indented by two or six spaces; deeper text is a description, wrapped at the terminal's width.
    flags = re.findall(r"^ {2,6}(?:-\w, )?(--[\w-]+)", help_text, re.MULTILINE)
    flags += re.findall(r"\[alias(?:es)?: (--[\w-]+)", help_text)
    assert "--help" in flags
    missing = [flag for flag in flags if flag not in ("--help", "--version") and flag not in section]
    # An alias appears only where its option is described.
    missing = [flag for flag in missing if f"`{flag}`" not in page]
    assert not missing


def test_every_metric_is_in_the_book():
    page = (BOOK / "metrics.md").read_text()
    with ServerProcess("--device", "mock") as server:
        # The page has the names of OpenMetrics, without the suffixes of counters.
        headers = {"accept": "application/openmetrics-text"}
        request = urllib.request.Request(server.base_url + "/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            printed = re.findall(r"^# TYPE (\S+) (\w+)$", response.read().decode(), re.MULTILINE)
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `corella_")}
    ours = {name: kind for name, kind in printed if name.startswith("corella_")}
    assert rows.keys() == ours.keys()
    for name, kind in ours.items():
        assert ("vllm:" + name.removeprefix("corella_") in dict(printed)) == ("✓" in rows[name]), name
        assert kind == "histogram" or f"| {kind} |" in rows[name], name
    others = [name for name, _ in printed if "corella_" + name.removeprefix("vllm:") not in ours]
    assert [name for name in others if name not in ours and f"`{name}`" not in page] == []


def test_every_field_in_the_reference_is_read():
    with ServerProcess("--device", "mock") as server:
        for path in ("/v1/chat/completions", "/v1/completions"):
            read = fields(path, "")
            assert "temperature" in read
            for name in read:
                # A text is wrong for a field that takes an object, and an object is wrong for the other fields.
                is_object = name in ("logit_bias", "stream_options", "chat_template_kwargs", "guided_json")
                error = refusal(server, path, {name: "text" if is_object else {"no": "value"}})
                assert re.split(r"[.\[]", error["param"])[0] == name, error
            refused = fields(path, "Refused:") + fields("Every endpoint", "Refused:")
            assert "functions" in refused
            for name in set(refused) - set(read):
                error = refusal(server, path, {name: {"some": "value"}})
                assert (error["param"], error["code"]) == (name, "unsupported_parameter"), error


def fields(heading, part):
    """Returns the names in a part of a section: the rows of its table, or the lines of one of its lists."""
    page = (BOOK / "reference/fields.md").read_text()
    (section,) = re.findall(rf"^## `?{heading}`?$(.*?)(?:^## |\Z)", page, re.MULTILINE | re.DOTALL)
    if part:
        lines = [line.partition(": ")[0] for line in section.partition(part)[2].splitlines() if line.startswith("* ")]
    else:
        lines = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for line in lines for name in re.findall(r"`(\w+)`", line)]


def test_messages_in_troubleshooting_are_in_the_code():
    sources = (path.read_text() for path in ROOT.glob("crates/*/src/**/*.rs"))
    # Join strings that continue in the next line, as compilers do.
    code = re.sub(r"\\\n\s*", "", "\n".join(sources)).replace('\\"', '"')
    page = (BOOK / "troubleshooting.md").read_text()
    headings = " ".join(re.findall(r"^### (.*)$", page, re.MULTILINE))
    parts = [part.strip() for span in re.findall(r"`([^`]+)`", headings) for part in span.split("…")]
    assert len(parts) > 50
    assert [part for part in parts if part not in code] == []


def refusal(server, path, fields):
    is_chat = path.startswith("/v1/chat/")
    prompt = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    body = {**prompt, "max_tokens": 1, **fields}
    request = urllib.request.Request(server.base_url + path, json.dumps(body).encode())
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=PATIENCE_S)
    assert refused.value.code == 400, fields
    return json.load(refused.value)["error"]
