"""`--config FILE`, completions and manual pages, with the built program."""

import shutil
import subprocess

import pytest
from patience import PATIENCE_S
from server_process import BINARY, ServerProcess


def run(*arguments):
    result = subprocess.run(
        [BINARY, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S
    )
    return result.returncode, result.stdout, result.stderr


def test_a_server_reads_its_file_and_what_is_typed_wins(tmp_path):
    file = tmp_path / "corella.toml"
    file.write_text(
        'port = 1\nthreads = 1\nkv-cache-memory = "64M"\n'
        '[serve]\nserved-model-name = ["from-file", "alias"]\nallow-unknown-fields = true\n'
        "[generate]\nthreads = 2\n"
    )
    with ServerProcess("--config", file) as server:
        assert "1 thread)" in server.log() and "(64.0 MiB" in server.log()
        assert [model.id for model in server.client.models.list()] == ["from-file", "alias"]
        server.client.completions.create(
            model="alias", prompt="Once", max_tokens=1, extra_body={"unknown": 1}
        )
    with ServerProcess("--config", file, "--served-model-name", "typed") as server:
        assert [model.id for model in server.client.models.list()] == ["typed"]


def test_flags_of_other_servers_may_be_in_a_file(tmp_path):
    file = tmp_path / "corella.toml"
    file.write_text(
        'device = "mock"\nctx-size = 512\ntrust-remote-code = true\nallowed-origins = ["https://chat.example.org"]\n'
        'speculative-config = { method = "ngram", num_speculative_tokens = 3 }\n'
    )
    with ServerProcess("--config", file) as server:
        assert server.client.models.list().data[0].max_model_len == 512
        for told in ("line 2: --ctx-size is --max-model-len", "line 3: --trust-remote-code has no effect"):
            assert f"corella.toml, {told}" in server.log()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("port = 1\nmiddleware = \"x\"\n", "line 2: there is no option --middleware: code of others"),
        ("threads = 1\nprot = 1\n", "line 2: `corella serve` has no option `prot`; did you mean `port`?"),
        ("\nport = 70000\n", "line 2: invalid value '70000' for '--port <PORT>'"),
        ('host = "no such host"\n', "line 1: --host no such host is neither"),
        ("port = \n", "line 1: "),
    ],
)
def test_mistakes_have_a_line(tmp_path, text, reason):
    file = tmp_path / "corella.toml"
    file.write_text(text)
    status, out, log = run("serve", "--config", file)
    assert (status, out) == (2, "")
    assert log.startswith("error: ") and len(log.splitlines()) == 1, log
    assert f"corella.toml, {reason}" in log


def test_a_file_that_is_not_there():
    status, _, log = run("serve", "--config", "/no/such.toml")
    assert status == 2 and "/no/such.toml" in log


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path):
    status, script, _ = run("completions", "bash")
    assert status == 0
    file = tmp_path / "corella.bash"
    file.write_text(script)
    completes = f"""
        source {file}
        COMP_WORDS=(corella serve --max-num-b) COMP_CWORD=2
        _corella corella --max-num-b serve
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", completes], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == "--max-num-batched-tokens", done.stderr


def test_manual_pages(tmp_path):
    status, _, log = run("man", "--output", tmp_path)
    assert status == 0, log
    pages = {page.name: page.read_text() for page in tmp_path.iterdir()}
    assert {"corella.1", "corella-serve.1", "corella-batch.1", "corella-bench-serve.1"} <= set(pages)
    assert r"\-\-max\-num\-seqs" in pages["corella-serve.1"]
    assert "number of cores that this process may use" in pages["corella-serve.1"].replace("\n", " ")
    assert run("man", "bench", "serve")[1] == pages["corella-bench-serve.1"]
    status, _, log = run("man", "bench", "sreve")
    assert status == 2 and "bench has no command sreve; there are" in log.replace("corella-", "")
