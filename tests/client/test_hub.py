"""Models by name: `corella pull`, `list` and `rm`, and names where a command takes a model.

The hub is `hub_server.py`. `huggingface_hub`, which downloads from it, shows that it answers like the hub, and each of
the two programs finds the other's files in the cache.
"""

import hashlib
import json
import os
import pty
import re
import ssl
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
from certificate import Authority
from hub_server import HubServer, Repository
from patience import PATIENCE_S, wait_until
from server_process import BINARY, ROOT, free_port

NEEDED = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
NANO = {name: (ROOT / "models/nano" / name).read_bytes() for name in NEEDED}
UNNEEDED = {"README.md": b"Read me.\n", "pytorch_model.bin": b"x" * 300_000, "original/params.json": b"{}"}
GGUF = (ROOT / "tests/gguf/qwen3-f16.gguf").read_bytes()
TOKEN = "hf_secret"


def shards(files, num_shards):
    """The same model with its tensors in several files."""
    weights = files["model.safetensors"]
    length = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + length])
    header.pop("__metadata__", None)
    names, data = sorted(header), weights[8 + length :]
    sharded, weight_map = {}, {}
    for number in range(num_shards):
        name = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        own, body = {}, b""
        for tensor in names[number::num_shards]:
            start, end = header[tensor]["data_offsets"]
            own[tensor] = header[tensor] | {"data_offsets": [len(body), len(body) + end - start]}
            body += data[start:end]
            weight_map[tensor] = name
        text = json.dumps(own).encode()
        text += b" " * (-len(text) % 8)
        sharded[name] = len(text).to_bytes(8, "little") + text + body
    rest = {name: content for name, content in files.items() if name != "model.safetensors"}
    return rest | sharded | {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}


@pytest.fixture
def hub():
    repositories = {
        "acme/nano": Repository(NANO | UNNEEDED, revisions=("main", "v1", "refs/pr/1")),
        "acme/sharded": Repository(shards(NANO, 3)),
        "acme/gguf": Repository(
            {
                "nano-Q4_0.gguf": GGUF[:-1] + b"x",
                "nano-F16.gguf": GGUF,
                "mmproj-F16.gguf": b"GGUF",
                "config.json": b"{}",
            }
        ),
        "acme/gated": Repository(NANO, needs_token=TOKEN, is_gated=True),
        "acme/private": Repository(NANO, needs_token=TOKEN),
        "acme/empty": Repository({"README.md": b""}),
    }
    with HubServer(repositories) as server:
        yield server


@pytest.fixture
def user(hub, tmp_path):
    """Runs programs with a cache of their own."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING", "SSL_CERT", "REQUESTS_CA"))
    }
    environment |= {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "*",
    }

    def run(*command, **variables):
        return subprocess.run(
            [str(word) for word in command],
            env=environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def corella(*arguments, **variables):
        done = run(BINARY, *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def refusal(*arguments, **variables):
        done = run(BINARY, *arguments, **variables)
        assert done.returncode == 2, (done.stdout, done.stderr)
        assert TOKEN not in done.stderr and "Signature" not in done.stderr
        line = done.stderr.strip().splitlines()[-1]
        assert line.startswith("error: ")
        return line

    def python(code, **variables):
        done = run(sys.executable, "-c", code, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    cache = tmp_path / "home/hub"
    return SimpleNamespace(
        corella=corella, refusal=refusal, python=python, run=run, cache=cache, environment=environment
    )


def files_of(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def storage_requests(hub):
    return [headers for origin, _, _, headers in hub.requests if origin == "storage"]


def test_the_server_answers_as_the_hub_does(hub, user, tmp_path):
    path = user.python("import huggingface_hub as h; print(h.snapshot_download('acme/nano'))")
    assert files_of(Path(path)) == NANO | UNNEEDED
    path = user.python(
        "import huggingface_hub as h; print(h.hf_hub_download('acme/nano', 'model.safetensors', revision='refs/pr/1'))"
    )
    assert Path(path).read_bytes() == NANO["model.safetensors"]
    for name, revision, token, kind in [
        ("acme/none", "main", TOKEN, "RepositoryNotFoundError"),
        ("acme/gated", "main", "", "GatedRepoError"),
        ("acme/gated", "main", "hf_other", "GatedRepoError"),
        ("acme/nano", "v9", "", "RevisionNotFoundError"),
    ]:
        fetch = f"h.hf_hub_download('{name}', 'config.json', revision='{revision}')"
        code = f"import huggingface_hub as h\ntry: {fetch}\nexcept Exception as e: print(type(e).__name__)"
        assert user.python(code, HF_TOKEN=token) == kind


def test_corella_finds_what_others_fetched(hub, user):
    user.python("import huggingface_hub as h; h.snapshot_download('acme/nano'); h.snapshot_download('acme/gguf')")
    hub.requests.clear()
    arguments = ["-p", "fox", "--max-tokens", "3", "--temperature", "0", "--no-limits"]
    assert user.corella("generate", "acme/nano", *arguments) == user.corella("generate", *arguments)
    listed = user.corella("list")
    assert [line.split()[0] for line in listed.splitlines()[2:]] == ["acme/gguf:F16", "acme/gguf:Q4_0", "acme/nano"]
    assert hub.requests == []


def test_others_find_what_corella_fetched(hub, user, tmp_path):
    path = user.corella("pull", "acme/nano")
    user.corella("pull", "acme/nano@v1", "acme/nano@refs/pr/1", "acme/sharded", "acme/gguf:F16")
    hub.requests.clear()
    code = "import huggingface_hub as h; print(h.snapshot_download('acme/nano', local_files_only=True))"
    assert user.python(code, HF_HUB_OFFLINE="1") == path
    for revision in ["main", "v1", "refs/pr/1"]:
        code = (
            f"import huggingface_hub as h; print(h.hf_hub_download('acme/nano', 'config.json', revision='{revision}'))"
        )
        assert user.python(code, HF_HUB_OFFLINE="1") == f"{path}/config.json"
    assert hub.requests == []
    # The package's own inspection of the cache expects these links, sizes and revisions.
    code = (
        "import huggingface_hub as h; c = h.scan_cache_dir(); print(len(c.warnings)); "
        "[print(r.repo_id, r.size_on_disk, sorted(r.refs)) for r in sorted(c.repos, key=lambda r: r.repo_id)]"
    )
    needed = sum(map(len, NANO.values()))
    sharded = sum(map(len, shards(NANO, 3).values()))
    assert user.python(code).splitlines() == [
        "0",
        f"acme/gguf {len(GGUF)} ['main']",
        f"acme/nano {needed} ['main', 'refs/pr/1', 'v1']",
        f"acme/sharded {sharded} ['main']",
    ]
    # The package's next download accepts Corella's files, and only fetches those that Corella does not need.
    user.python("import huggingface_hub as h; h.snapshot_download('acme/nano')")
    assert len(storage_requests(hub)) == 1
    assert files_of(Path(path)) == NANO | UNNEEDED


def test_only_what_is_needed_is_fetched(hub, user, tmp_path):
    path = user.corella("pull", "acme/nano")
    assert files_of(Path(path)) == NANO
    path = Path(user.corella("pull", "acme/gguf:f16"))
    assert path.name == "nano-F16.gguf" and path.read_bytes() == GGUF
    assert [file.name for file in path.parent.iterdir()] == ["nano-F16.gguf"]


@pytest.mark.parametrize("command", ["generate", "inspect", "quantize", "perplexity", "draft"])
def test_a_name_stands_where_a_model_does(command, hub, user, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the fox and the lantern")
    arguments = {
        "generate": ["generate", "acme/sharded", "-p", "fox", "--max-tokens", "2", "--no-limits"],
        "inspect": ["inspect", "acme/sharded"],
        "quantize": ["quantize", "acme/sharded", tmp_path / "out", "--format", "int8"],
        "perplexity": ["bench", "perplexity", "acme/sharded", "--text", text],
        "draft": [
            "generate",
            "--speculate",
            "draft",
            "--draft-model",
            "acme/sharded",
            "-p",
            "fox",
            "--max-tokens",
            "2",
            "--no-limits",
        ],
    }[command]
    first = user.run(BINARY, *arguments)
    assert first.returncode == 0, first.stderr
    assert "fetching acme/sharded: " in first.stderr and " files, " in first.stderr
    num_requests = len(hub.requests)
    if command == "quantize":
        arguments[2] = tmp_path / "again"
    assert user.run(BINARY, *arguments).returncode == 0
    assert len(hub.requests) == num_requests


LLAMA = "bartowski/Llama-3.2-1B-Instruct-GGUF"


def test_ollamas_name_fetches_a_quantised_file_and_says_which(hub, user):
    files = {f"Llama-3.2-1B-Instruct-{name}.gguf": GGUF for name in ("Q4_K_M", "Q8_0")}
    hub.repositories[LLAMA] = Repository(files, facts={"tags": ["gguf", "license:llama3.2"]})
    words = ["--raw", "-p", "abc", "--max-tokens", "2", "--no-limits"]
    first = user.run(BINARY, "generate", "llama3.2:1b", *words)
    assert first.returncode == 0, first.stderr
    size = f"{len(GGUF) / 1e3:.1f} kB"
    assert f"fetching {LLAMA}: Llama-3.2-1B-Instruct-Q4_K_M.gguf, {size}; licence llama3.2" in first.stderr
    assert f"conditions are at {hub.endpoint}/{LLAMA}" in first.stderr
    assert first.stdout == user.run(BINARY, "generate", f"{LLAMA}:Q4_K_M", *words, "--offline").stdout
    user.corella("pull", "llama3.2:1b-instruct-q8_0")
    listed = [line.split() for line in user.corella("list").splitlines()[1:]]
    assert listed[0][0] == "corella-nano"
    shown = [(line[0], line[-1]) for line in listed[1:]]
    assert shown == [(f"{LLAMA}:Q4_K_M", "llama3.2:1b"), (f"{LLAMA}:Q8_0", "llama3.2:1b-q8_0")]
    # A name deletes the file beside which it is shown.
    user.corella("rm", "llama3.2:1b")
    [_, _, rest] = user.corella("list").splitlines()
    assert rest.split()[0] == f"{LLAMA}:Q8_0"
    assert "not in" in user.refusal("rm", "tiny")
    assert "llama3.2 has the tags 3b, 1b" in user.run(BINARY, "pull", "llama3.2:9b").stderr


def test_a_script_finds_names_that_lead_nowhere(hub, user):
    def check():
        done = user.run(sys.executable, ROOT / "tests/names/check_names.py", "llama3.2:1b", "mxbai-embed-large")
        return done.returncode, done.stdout.splitlines()

    gguf = {"gguf": {"architecture": "llama"}}
    weights = {"config.json": b'{"architectures": ["BertModel"]}', "model.safetensors": b"x" * 2_000_000}
    hub.repositories[LLAMA] = Repository({"a-Q4_K_M.gguf": b"x" * 1_500_000}, facts=gguf)
    hub.repositories["mixedbread-ai/mxbai-embed-large-v1"] = Repository(weights)
    assert check()[0] == 0
    for llama, reason in [
        (None, "401"),
        (Repository({"a-Q4_K_M.gguf": b"x"}, facts=gguf, is_gated=True), "asks for permission"),
        (Repository({"a-Q8_0.gguf": b"x", "b.gguf": b"x"}, facts=gguf), "has no q4_k_m"),
        (Repository({"a-Q4_K_M.gguf": b"x"}, facts={"gguf": {"architecture": "rwkv"}}), "does not list"),
    ]:
        hub.repositories[LLAMA] = llama
        status, lines = check()
        assert status == 1 and reason in lines[0] and "GB" in lines[1], lines


def test_a_server_is_named_as_its_model_is(hub, user):
    port = free_port()
    server = subprocess.Popen(
        [BINARY, "serve", "acme/nano@v1", "--port", str(port)], env=user.environment, stderr=subprocess.DEVNULL
    )
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", max_retries=20)
    try:
        assert [model.id for model in client.models.list()] == ["acme/nano"]
    finally:
        server.kill()
        server.wait()
        client.close()


def test_a_revision_may_be_an_option(hub, user):
    inspect = ("generate", "acme/nano", "-p", "fox", "--max-tokens", "1", "--no-limits")
    assert user.run(BINARY, *inspect, "--revision", "v1").returncode == 0
    user.corella("inspect", "acme/nano@v1", "--offline")
    assert "no revision `v9`" in user.refusal(*inspect, "--revision", "v9")
    assert "second revision" in user.refusal("generate", "acme/nano@v1", "-p", "x", "--revision", "v1")


def test_a_path_that_exists_is_that_path(hub, user, tmp_path, monkeypatch):
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme/nano").symlink_to(ROOT / "models/nano")
    monkeypatch.chdir(tmp_path)
    assert "corella" not in user.corella("inspect", "acme/nano").splitlines()[0]
    assert hub.requests == []


def test_a_model_changes_only_when_it_is_pulled(hub, user):
    first = user.corella("pull", "acme/nano")
    hub.repositories["acme/nano"] = Repository(NANO | {"generation_config.json": b"{}"})
    assert user.run(BINARY, "inspect", "acme/nano").returncode == 0
    second = user.corella("pull", "acme/nano")
    assert first != second
    names = [line.split()[0] for line in user.corella("list").splitlines()[2:]]
    assert names == ["acme/nano", f"acme/nano@{first.rpartition('/')[2][:12]}"]
    # The old commit is still found by its whole hash, or by the beginning of the hash.
    hub.requests.clear()
    user.corella("inspect", f"acme/nano@{first.rpartition('/')[2][:8]}")
    assert hub.requests == []


def test_offline_asks_no_hub(hub, user):
    for variables, flags in [({}, ["--offline"]), ({"HF_HUB_OFFLINE": "1"}, [])]:
        line = user.refusal("inspect", "acme/nano", *flags, **variables)
        assert "not in the cache" in line and "--offline" in line
    assert hub.requests == []
    user.corella("pull", "acme/nano")
    hub.requests.clear()
    user.corella("inspect", "acme/nano", "--offline")
    assert hub.requests == []


def test_the_cache_is_where_the_variables_say(hub, user, tmp_path):
    for variables, folder in [
        ({"HF_HUB_CACHE": str(tmp_path / "a")}, tmp_path / "a"),
        ({"HF_HOME": str(tmp_path / "b")}, tmp_path / "b/hub"),
        ({"HF_HOME": ""}, tmp_path / "xdg/huggingface/hub"),
    ]:
        assert user.corella("pull", "acme/gguf:F16", **variables).startswith(f"{folder}/models--acme--gguf/")


def test_a_cut_connection_is_continued(hub, user):
    # The connection is cut more often than attempts may fail, but each attempt brings some bytes.
    hub.faults.cut_after, hub.faults.num_cuts = 1_000_000, 7
    done = user.run(BINARY, "pull", "acme/nano")
    assert done.returncode == 0, done.stderr
    starts = [headers.get("range") for headers in storage_requests(hub)]
    assert starts.count(None) == 2, starts  # The tokenizer and the weights, once each.
    assert [f"bytes={n}000000-" for n in range(1, 8)] == [start for start in starts if start]
    assert "trying again in 0.5 s" in done.stderr
    assert user.python("import huggingface_hub as h; print(h.scan_cache_dir().warnings)") == "[]"


def test_a_connection_on_which_nothing_arrives_is_given_up(hub, user):
    hub.faults.stalls = 2
    user.corella("pull", "acme/nano", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert f"bytes={64 << 10}-" in [headers.get("range") for headers in storage_requests(hub)]


def test_a_server_without_ranges_starts_again(hub, user):
    hub.faults.cut_after, hub.faults.num_cuts, hub.faults.ignores_ranges = 5_000_000, 2, True
    user.corella("pull", "acme/nano")


def test_a_killed_fetch_is_continued(hub, user):
    # The rest would take many seconds.
    hub.faults.slow_s = 0.2
    process = subprocess.Popen([BINARY, "pull", "acme/nano"], env=user.environment, stderr=subprocess.DEVNULL)
    digest = hashlib.sha256(NANO["model.safetensors"]).hexdigest()
    part = user.cache / f"models--acme--nano/blobs/{digest}.incomplete"
    wait_until(lambda: part.exists() and part.stat().st_size > 0, "a part has arrived")
    assert process.poll() is None
    process.kill()
    process.wait()
    hub.faults.slow_s = 0.0
    arrived = part.stat().st_size
    assert "incomplete" in user.corella("list")
    hub.requests.clear()
    user.corella("pull", "acme/nano")
    assert [headers.get("range") for headers in storage_requests(hub)] == [f"bytes={arrived}-"]
    assert not part.exists()


def test_what_is_not_the_beginning_of_the_file_is_not_continued(hub, user):
    blobs = user.cache / "models--acme--nano/blobs"
    blobs.mkdir(parents=True)
    digest = hashlib.sha256(NANO["model.safetensors"]).hexdigest()
    for begun in [
        b"not the beginning",
        b"x" * len(NANO["model.safetensors"]),
        b"x" * (len(NANO["model.safetensors"]) + 1),
    ]:
        (blobs / f"{digest}.incomplete").write_bytes(begun)
        (blobs / digest).unlink(missing_ok=True)
        user.corella("pull", "acme/nano")
        assert (blobs / digest).read_bytes() == NANO["model.safetensors"]


@pytest.mark.parametrize("size_off", [-10, 10])
def test_a_wrong_size_is_refused(size_off, hub, user):
    hub.faults.size_off = size_off
    line = user.refusal("pull", "acme/nano")
    assert re.search(r"the hub listed \d+ bytes and sends \d+", line), line
    assert not [path for path in (user.cache / "models--acme--nano/blobs").iterdir() if len(path.name) == 64]


def test_a_wrong_checksum_is_refused(hub, user):
    hub.faults.changed_bytes = 2
    line = user.refusal("pull", "acme/nano")
    assert "the checksum of what arrived is" in line
    assert not [path for path in (user.cache / "models--acme--nano/blobs").iterdir() if len(path.name) >= 64]
    hub.faults.changed_bytes = 0
    user.corella("pull", "acme/nano")


def test_the_token_goes_to_the_hub_only(hub, user, tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text(f"{TOKEN}\n")
    for variable, value in [("HF_TOKEN", TOKEN), ("HF_TOKEN_PATH", str(token_file))]:
        hub.requests.clear()
        user.corella("pull", "acme/gated", **{variable: value, "HF_HUB_CACHE": str(tmp_path / variable)})
        sent = {(origin, headers.get("authorization")) for origin, _, _, headers in hub.requests}
        assert sent == {("hub", f"Bearer {TOKEN}"), ("storage", None)}


@pytest.mark.parametrize(
    "name, token, words",
    [
        ("acme/none", None, ["has no model acme/none", "hf auth login"]),
        ("acme/none", TOKEN, ["has no model acme/none", "this token may not read it"]),
        ("acme/private", None, ["has no model acme/private, or it is private", "HF_TOKEN"]),
        ("acme/gated", None, ["acme/gated is gated", "ask for access at", "HF_TOKEN"]),
        ("acme/gated", "hf_other", ["acme/gated is gated", "account that HF_TOKEN belongs to"]),
        ("acme/nano", "hf_wrong", ["does not accept the token", "/settings/tokens"]),
        ("acme/nano", "hf_ü", ["the token in HF_TOKEN"]),
        ("acme/nano@v9", None, ["acme/nano has no revision `v9`"]),
        ("acme/gguf:Q5_K_M", None, ["no GGUF file for `Q5_K_M`", "F16, Q4_0"]),
        ("acme/gguf", None, ["several GGUF files", "acme/gguf:F16"]),
        ("acme/empty", None, ["neither config.json with safetensors nor GGUF files"]),
    ],
)
def test_a_refusal_says_what_to_do(name, token, words, hub, user):
    line = user.refusal("pull", name, **({"HF_TOKEN": token} if token else {}))
    assert all(word in line for word in words), line
    line = user.refusal("inspect", name, **({"HF_TOKEN": token} if token else {}))
    assert f"{name} is not a local file or folder" in line and words[0] in line


def test_a_busy_hub_is_asked_again(hub, user):
    hub.faults.statuses, hub.faults.retry_after = [429, 503, 500], "1"
    done = user.run(BINARY, "pull", "acme/gguf:F16")
    assert done.returncode == 0, done.stderr
    # The hub asks for pauses of one second. The third pause is two seconds in any case.
    assert re.findall(r"trying again in ([\d.]+) s", done.stderr) == ["1", "1", "2"], done.stderr


def test_a_hub_that_stays_busy_is_given_up(hub, user):
    hub.faults.statuses = [503] * 100
    line = user.refusal("pull", "acme/nano")
    assert "answered 503 Service Unavailable (5 attempts)" in line
    assert len(hub.requests) == 5
    hub.faults.statuses, hub.faults.retry_after = [429], "3600"
    assert "asks to wait 3600 s" in user.refusal("pull", "acme/nano")


def test_a_hub_that_is_not_there(hub, user):
    done = user.run(BINARY, "pull", "acme/nano", HF_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    # If nothing answers, there is only one more attempt.
    repeated, line = done.stderr.strip().splitlines()
    assert "trying again" in repeated and "refused" in line and "(2 attempts)" in line
    assert "must be an address" in user.refusal("pull", "acme/nano", HF_ENDPOINT="huggingface.co")


def test_a_model_that_does_not_fit_is_not_begun(hub, user):
    hub.faults.listed_bytes = 10**18
    line = user.refusal("pull", "acme/nano")
    assert "the disk is full" in line and "corella rm" in line and "000000000.0 GB more" in line
    assert storage_requests(hub) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no disk that is always full")
def test_a_disk_that_becomes_full(hub, user):
    blobs = user.cache / "models--acme--nano/blobs"
    blobs.mkdir(parents=True)
    digest = hashlib.sha256(NANO["model.safetensors"]).hexdigest()
    (blobs / f"{digest}.incomplete").symlink_to("/dev/full")
    line = user.refusal("pull", "acme/nano")
    assert f"cannot write {blobs / digest}.incomplete: the disk is full" in line


def test_two_that_fetch_one_model_fetch_it_once(hub, user):
    hub.faults.slow_s = 0.01
    command = [BINARY, "pull", "acme/nano"]
    both = [subprocess.Popen(command, env=user.environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [process.communicate(timeout=PATIENCE_S)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    large = [name for name in NEEDED if len(NANO[name]) >= 100_000]
    assert len(storage_requests(hub)) == len(large)


def test_rm_deletes_what_is_named_and_nothing_else(hub, user):
    user.corella("pull", "acme/nano", "acme/gguf:F16", "acme/gguf:Q4_0", "acme/sharded")
    first = hub.repositories["acme/nano"].commit
    hub.repositories["acme/nano"] = Repository(NANO | {"generation_config.json": b"{}"})
    second = user.corella("pull", "acme/nano")

    def listed():
        return [line.split()[0] for line in user.corella("list").splitlines()[2:]]

    user.corella("rm", "acme/gguf:Q4_0")
    assert listed() == ["acme/gguf:F16", "acme/nano", f"acme/nano@{first[:12]}", "acme/sharded"]
    user.corella("inspect", "acme/gguf:F16", "--offline")
    # Files shared by two revisions stay.
    user.corella("rm", f"acme/nano@{first[:12]}")
    assert listed() == ["acme/gguf:F16", "acme/nano", "acme/sharded"]
    assert user.python("import huggingface_hub as h; print(h.scan_cache_dir().warnings)") == "[]"
    assert user.corella("inspect", "acme/nano", "--offline") and os.path.exists(second)
    user.corella("rm", "acme/nano", "acme/gguf")
    assert sorted(path.name for path in user.cache.iterdir()) == [".locks", "models--acme--sharded"]
    assert "is not in" in user.refusal("rm", "acme/nano")
    assert "is not in" in user.refusal("rm", "acme/sharded:Q4_0")
    assert listed() == ["acme/sharded"]


def test_a_terminal_shows_a_line(hub, user):
    hub.faults.slow_s = 0.02
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [BINARY, "pull", "acme/nano"], env=user.environment, stdout=subprocess.DEVNULL, stderr=child
    )
    os.close(child)
    shown = b""
    try:
        while chunk := os.read(parent, 4096):
            shown += chunk
    except OSError:
        pass  # The program has closed the terminal.
    os.close(parent)
    assert process.wait() == 0
    lines = shown.decode().split("\r\x1b[K")
    shares = [
        int(match[1])
        for line in lines
        if (match := re.search(r"(\d+) %, [\d.]+ [kM]?B of [\d.]+ MB, [\d.]+ [kM]B/s, \d+ s left$", line))
    ]
    assert len(shares) > 5 and shares == sorted(shares), lines
    # The line is gone at the end.
    assert lines[-1] == "acme/nano: 8.0 MB\r\n"


@pytest.fixture
def tls_hub(tmp_path):
    authority = Authority(tmp_path)
    options = dict(zip(*[iter(authority.options("hub", "IP:127.0.0.1,DNS:localhost"))] * 2))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options["--cluster-tls-cert"], options["--cluster-tls-key"])
    with HubServer({"acme/nano": Repository(NANO)}, tls=context) as server:
        yield SimpleNamespace(server=server, authority=str(authority.certificate))


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_a_network_with_an_authority_of_its_own(variable, tls_hub, user):
    line = user.refusal("pull", "acme/nano", HF_ENDPOINT=tls_hub.server.endpoint)
    assert "certificate" in line and "SSL_CERT_FILE" in line
    user.corella("pull", "acme/nano", HF_ENDPOINT=tls_hub.server.endpoint, **{variable: tls_hub.authority})
    line = user.refusal("pull", "acme/nano", HF_ENDPOINT=tls_hub.server.endpoint, **{variable: str(ROOT / "README.md")})
    assert "has no certificates in PEM format" in line
