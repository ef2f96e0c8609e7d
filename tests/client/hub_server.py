"""A local server that answers clients that download models as the Hugging Face hub does, and fails on demand.

`test_hub.py` has `huggingface_hub` itself download from it, which shows that this server answers like the hub. Small
files have git's checksum and are served directly; large ones have SHA-256 and are served by another origin, to which
the hub redirects with a signature."""

import gzip
import hashlib
import json
import re
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LARGE_BYTES = 100_000
ENTRIES_PER_PAGE = 5
SIGNATURE = "Signature=not-to-be-shown"


@dataclass
class Faults:
    """The faults, each with the number of times that it still happens."""

    cut_after: int = 0  # Bytes of a large file after which the connection is closed.
    num_cuts: int = 0
    statuses: list = field(default_factory=list)  # Answers to the next requests, before anything else.
    retry_after: str | None = None
    size_off: int = 0  # Added to the size of files, in what is sent.
    ignores_ranges: bool = False
    changed_bytes: int = 0  # How many times a large file is sent with a byte changed.
    listed_bytes: int | None = None  # The size of large files in the listing.
    slow_s: float = 0.0  # A pause between parts of a large file.
    stalls: int = 0  # How many times nothing comes after the first part.


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Killed clients leave connections behind; that is part of the tests."""


class Repository:
    def __init__(self, files, revisions=("main",), needs_token=None, is_gated=False, facts=None):
        self.files = files
        self.facts = facts or {}  # Further fields of the hub's answers, such as tags.
        self.needs_token = needs_token
        self.is_gated = is_gated
        self.commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.revisions = {revision: self.commit for revision in revisions} | {self.commit: self.commit}

    def entry(self, path):
        content = self.files[path]
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry = {"type": "file", "oid": git, "size": len(content), "path": path}
        if len(content) >= LARGE_BYTES:
            sha256 = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
        return entry

    def entries(self):
        folders = {path.rpartition("/")[0] for path in self.files} - {""}
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": folder} for folder in sorted(folders)]
        return entries + [self.entry(path) for path in sorted(self.files)]


class HubServer:
    """Serves `repositories`, by name, on two ports: the hub's, and its storage's."""

    def __init__(self, repositories=None, tls=None):
        self.repositories = repositories or {}
        self.faults = Faults()
        self.requests = []  # (origin, method, path, headers by names in lower case)
        self._lock = threading.Lock()
        self._servers = [self._serve("hub", tls), self._serve("storage", tls)]
        scheme = "https" if tls else "http"
        # The storage has another name, so that clients see another host.
        self.endpoint = f"{scheme}://127.0.0.1:{self._servers[0].server_port}"
        self.storage = f"{scheme}://localhost:{self._servers[1].server_port}"

    def _serve(self, origin, tls):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self, origin)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        server = QuietServer(("127.0.0.1", 0), Handler)
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def paths(self, origin=None):
        return [path for where, _, path, _ in self.requests if origin in (None, where)]

    def take(self, name):
        """Returns whether a counted fault happens now."""
        with self._lock:
            left = getattr(self.faults, name)
            setattr(self.faults, name, max(left - 1, 0))
            return left > 0

    def answer(self, request, origin):
        path, _, query = request.path.partition("?")
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((origin, request.command, request.path, headers))
        with self._lock:
            status = self.faults.statuses.pop(0) if self.faults.statuses else None
        if status is not None:
            headers = {"Retry-After": self.faults.retry_after} if self.faults.retry_after else {}
            return send(request, status, b"", headers)
        path = urllib.parse.unquote(path)
        if origin == "storage":
            return self._answer_storage(request, path, query)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^?]+)", path):
            name, what, revision = match.groups()
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            name, what, revision = match[1], "revision", "main"
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40}|refs/pr/\d+|[^/]+)/(.+)", path):
            name, revision, what = match[1], match[2], "file"
        else:
            return refuse(request, 404, "", "Sorry, we can't find the page you are looking for.")
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        repository = self.repositories.get(name)
        if token == "hf_wrong":
            return refuse(request, 401, "", "Invalid credentials in Authorization header")
        if repository is None or (repository.needs_token and not token and not repository.is_gated):
            # Without a token, the hub does not distinguish missing repositories from private ones.
            status = 404 if token else 401
            return refuse(request, status, "RepoNotFound" if token else "", "Repository not found")
        commit = repository.revisions.get(revision)
        if commit is None:
            return refuse(request, 404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if what == "revision":
            siblings = [{"rfilename": path} for path in sorted(repository.files)]
            facts = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []}
            facts |= {"gated": "auto" if repository.is_gated else False, "private": False}
            return send_json(request, facts | repository.facts)
        if what == "tree":
            return self._answer_tree(request, repository, query)
        if repository.needs_token and token != repository.needs_token:
            return refuse(request, 401 if not token else 403, "GatedRepo", "Access to this model is restricted.")
        self._answer_file(request, repository, match[3], commit)

    def _answer_tree(self, request, repository, query):
        start = int(urllib.parse.parse_qs(query).get("cursor", ["0"])[0])
        entries = repository.entries()
        page = entries[start : start + ENTRIES_PER_PAGE]
        for entry in page:
            if "lfs" in entry and self.faults.listed_bytes is not None:
                entry["lfs"]["size"] = entry["size"] = self.faults.listed_bytes
        headers = {}
        if start + ENTRIES_PER_PAGE < len(entries):
            path = request.path.partition("?")[0]
            headers["Link"] = (
                f'<{self.endpoint}{path}?recursive=true&expand=false&cursor={start + ENTRIES_PER_PAGE}>; rel="next"'
            )
        send_json(request, page, headers)

    def _answer_file(self, request, repository, path, commit):
        if path not in repository.files:
            return refuse(request, 404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        entry, content = repository.entry(path), repository.files[path]
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if "lfs" in entry:
            headers |= {
                "Location": f"{self.storage}/{entry['lfs']['oid']}?{SIGNATURE}",
                "X-Linked-Size": str(len(content)),
                "X-Linked-ETag": f'"{entry["lfs"]["oid"]}"',
            }
            return send(request, 302, b"", headers)
        if request.path.startswith("/") and not request.path.startswith("/api/resolve-cache"):
            # The hub answers small files by a redirect within itself.
            if path.endswith(".json") and "cached" not in request.path:
                headers["ETag"] = f'"{entry["oid"]}"'
                headers["Location"] = request.path.partition("?")[0] + "?cached"
                return send(request, 307, b"", headers)
        headers["ETag"] = f'"{entry["oid"]}"'
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
            content = gzip.compress(content)
        send(request, 200, content, headers)

    def _answer_storage(self, request, path, query):
        files = [content for repository in self.repositories.values() for content in repository.files.values()]
        wanted = [content for content in files if hashlib.sha256(content).hexdigest() == path[1:]]
        if not wanted or query != SIGNATURE:
            return send(request, 403, b"")
        if "Authorization" in request.headers:
            # S3 refuses two ways of authorising at once.
            return send(request, 400, b"Only one auth mechanism allowed")
        content = wanted[0]
        if self.take("changed_bytes"):
            content = content[:1000] + bytes([content[1000] ^ 1]) + content[1001:]
        content += b"x" * max(self.faults.size_off, 0)
        content = content[: len(content) + min(self.faults.size_off, 0)]
        start, status, headers = 0, 200, {"ETag": '"storage"'}
        ranges = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        end = len(content)
        if ranges and not self.faults.ignores_ranges:
            start, status = int(ranges[1]), 206
            end = min(end, int(ranges[2]) + 1) if ranges[2] else end
            if start >= len(content):
                return send(request, 416, b"", {"Content-Range": f"bytes */{len(content)}"})
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        body = content[start:end]
        if 0 < self.faults.cut_after < len(body) and self.take("num_cuts"):
            return send(request, status, body, headers, cut_after=self.faults.cut_after)
        pause_s = 3600.0 if self.take("stalls") else self.faults.slow_s
        send(request, status, body, headers, pause_s=pause_s)


def send(request, status, body, headers=None, cut_after=None, pause_s=0.0):
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command == "HEAD":
        return
    if cut_after is not None:
        body = body[:cut_after]
        request.close_connection = True
    try:
        for start in range(0, len(body), 64 << 10):
            request.wfile.write(body[start : start + (64 << 10)])
            if pause_s:
                request.wfile.flush()
                time.sleep(pause_s)
    except OSError:
        request.close_connection = True


def send_json(request, value, headers=None):
    send(request, 200, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))


def refuse(request, status, code, message, headers=None):
    headers = dict(headers or {})
    if code:
        headers["X-Error-Code"] = code
    headers["X-Error-Message"] = message
    send(request, status, json.dumps({"error": message}).encode(), headers)
