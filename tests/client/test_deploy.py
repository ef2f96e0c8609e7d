"""The files of deploy/ for Prometheus, Grafana and systemd fit the binary and the programs that read them.

Tests of missing programs (promtool, systemd-analyze) are skipped.
"""

import importlib.util
import json
import re
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml
from fleet import THREADS, Fleet, complete
from manifest import DEPLOY, check, program
from patience import PATIENCE_S
from server_process import BINARY, ROOT, ServerProcess

PROMPT = list(range(400, 440))
ALERTS = DEPLOY / "prometheus/alerts.yml"
DASHBOARD = DEPLOY / "grafana/corella.json"
# The labels that Prometheus adds to each sample, and its own metrics.
ADDED_LABELS = {"instance", "job"}
ADDED_METRICS = {"up"}
VARIABLES = {
    "$__rate_interval": "5m",
    '"$instance"': '".*"',
    '"$model_name"': '".*"',
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Returns the labels of each metric that some kind of node exports, with the values seen."""
    samples = {}
    disk = ("--kv-disk", f"{tmp_path_factory.mktemp('kv')},1M")
    with Fleet() as fleet, ServerProcess("--speculate", "ngram", *disk, *THREADS) as alone:
        decode = fleet.decode(*THREADS)
        prefill = fleet.prefill(*THREADS)
        for server in (prefill, alone):
            complete(server, PROMPT, max_tokens=8)
        for server in (prefill, decode, alone):
            with urllib.request.urlopen(server.base_url + "/metrics", timeout=PATIENCE_S) as response:
                text = response.read().decode()
            for name, labels in re.findall(r"^([\w:]+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
                of_metric = samples.setdefault(name, {})
                for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
                    of_metric.setdefault(label, set()).add(value)
    return samples


def alert_queries():
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def dashboard_queries():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    assert len(queries) > 30
    return queries


@pytest.mark.parametrize("queries", [alert_queries(), dashboard_queries()], ids=["alerts", "dashboard"])
def test_every_name_in_a_query_is_exported(queries, exported):
    for query in queries:
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        found = re.findall(r"\b(corella_\w+|up)\b(?:\{([^}]*)\})?", query)
        assert found, query
        labels_of_all = set()
        for name, selector in found:
            if name in ADDED_METRICS:
                continue
            assert name in exported, f"no node exports {name}: {query}"
            labels_of_all |= exported[name].keys()
            for label, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', selector):
                if label in ADDED_LABELS:
                    continue
                assert label in exported[name], f"{name} has no label {label}: {query}"
                # These labels have all their values from the start.
                if operator == "=" and label in ("standing", "finished_reason", "source"):
                    assert value in exported[name][label], f"{name} has no {label} {value}"
        for grouping in re.findall(r"\bby \(([^)]*)\)", query):
            used = {label.strip() for label in grouping.split(",")}
            assert used <= labels_of_all | ADDED_LABELS, query


def test_the_dashboard_is_what_its_script_writes():
    spec = importlib.util.spec_from_file_location("make_dashboard", DEPLOY / "grafana/make_dashboard.py")
    make_dashboard = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_dashboard)
    assert make_dashboard.dashboard() == json.loads(DASHBOARD.read_text())


def test_no_panel_covers_another():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in cells, panel["title"]
                cells.add((x, y))
    assert len({panel["id"] for panel in panels}) == len(panels)


@program("promtool")
def test_prometheus_reads_the_alerts_and_the_queries_of_the_dashboard(tmp_path):
    check("promtool", "check", "rules", ALERTS)
    check("promtool", "test", "rules", ALERTS.with_name("alerts_test.yml"))
    rules = []
    for index, query in enumerate(dashboard_queries()):
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        rules.append({"record": f"dashboard:query{index}", "expr": query})
    path = tmp_path / "dashboard.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    check("promtool", "check", "rules", path)


def complaints(unit, *arguments):
    done = subprocess.run(["systemd-analyze", "verify", *arguments, unit], capture_output=True, text=True)
    return [line for line in done.stderr.splitlines() if "corella" in line]


@program("systemd-analyze")
def test_systemd_takes_the_books_unit_of_a_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    book = (ROOT / "docs/src/deployment.md").read_text()
    blocks = re.findall(r"```ini\n(.*?)```", book, re.DOTALL)
    (text,) = [block for block in blocks if "default.target" in block]
    unit = tmp_path / "corella.service"
    unit.write_text(text.replace("%h/.local/bin/corella", str(BINARY.resolve())))
    assert complaints(unit, "--user") == []
    unit.write_text(text.replace("RestartSec", "RestartSecs"))
    assert complaints(unit, "--user") != []


@program("systemd-analyze")
@pytest.mark.parametrize("packed, path", [(False, "/usr/local/bin/corella"), (True, "/usr/bin/corella")])
def test_systemd_takes_the_unit(packed, path, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DEPLOY / "release")
    from payload import package_unit

    unit = tmp_path / "corella.service"
    text = package_unit() if packed else (DEPLOY / "systemd/corella.service").read_text()
    assert f"ExecStart={path} " in text
    unit.write_text(text.replace(path, str(BINARY.resolve())))
    assert complaints(unit) == []
    # systemd rates a service with all permissions 100, and calls a service below 20 OK.
    check("systemd-analyze", "security", "--offline=true", "--threshold=20", unit)


@program("systemd-analyze")
def test_systemd_takes_the_socket(tmp_path):
    service, unit = tmp_path / "corella.service", tmp_path / "corella.socket"
    text = (DEPLOY / "systemd/corella.service").read_text()
    service.write_text(text.replace("/usr/local/bin/corella", str(BINARY.resolve())))
    text = (DEPLOY / "systemd/corella.socket").read_text()
    unit.write_text(text)
    assert complaints(unit, str(service)) == []
    unit.write_text(text.replace("ListenStream", "ListenStreams"))
    assert complaints(unit, str(service)) != []


def is_pending(server, signal_number):
    """Returns whether a signal was sent to a process and has not been delivered to any thread."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    pending = int(re.search(r"^ShdPnd:\s*(\w+)$", status, re.MULTILINE)[1], 16)
    return pending >> (signal_number - 1) & 1


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_systemd_is_told_when_the_server_is_ready_and_when_it_drains(kind, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        name = str(tmp_path / "notify") if kind == "path" else f"corella-test-{tmp_path.name}"
        supervisor.bind(name if kind == "path" else f"\0{name}")
        supervisor.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", name if kind == "path" else f"@{name}")
        with ServerProcess("--device", "mock") as server:
            assert supervisor.recv(100) == b"READY=1"
            # `systemctl reload` must not end a server without files to reload.
            server.process.send_signal(signal.SIGHUP)
            server.wait_until(lambda: not is_pending(server, signal.SIGHUP), "the signal is taken")
            assert server.status_of("/ready") == 200
            server.terminate()
            assert supervisor.recv(100) == b"STOPPING=1"
            assert server.wait() == 0


def docker_pattern(line):
    """Returns a pattern of .gitignore in .dockerignore's form: from the root unless it begins with `**/`."""
    keeps = "!" if line.startswith("!") else ""
    path = line.removeprefix("!").rstrip("/")
    return keeps + (path.lstrip("/") if "/" in path else f"**/{path}")


def test_docker_is_not_sent_what_git_ignores():
    listed = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    ignored = [docker_pattern(line) for line in (ROOT / ".gitignore").read_text().splitlines()]
    assert "**/target" in ignored
    assert listed == [".git", *ignored], "the order counts: a later line takes back an earlier one"
