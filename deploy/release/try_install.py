"""Installs each file of a release in a system of Debian's packages alone, uses Corella there, and removes it.

    sudo python3 -B deploy/release/try_install.py target/dist [NAME...]

prints the seconds from the file to the first token of an answer. It needs mmdebstrap and rpm from Debian, and for the
source package a Rust toolchain, which is lent to the system. Systems have no outside network.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path

import debian_root
from debian_package import debian_package
from debian_root import HOME, Root
from make_release import commit_time
from payload import CONFIGURATION, USER, Payload
from rpm_package import rpm_package

PYTHON = ["python3", "python3-venv"]
SYSTEMS = {"plain": ["passwd"], "python": PYTHON, "compiler": [*PYTHON, "gcc", "libc6-dev"]}
PORT = 8000
READY = re.compile(r"ready: page http://[\d.:]+/")
QUESTION = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "max_tokens": 24}
USER_ID = 1000
PROMPT = "Hello!\n"
NEWER = "9.9.9"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("release", type=Path, help="folder of `cargo xtask dist`")
    parser.add_argument("names", nargs="*", choices=[[], *TRIES], help="only these")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("start this as root: it makes systems with users of their own")
    release = arguments.release.resolve()
    scratch = release.parent / "try-install"
    scratch.mkdir(exist_ok=True)
    names = arguments.names or list(TRIES)
    if "CORELLA_OWN_NETWORK" not in os.environ:
        for system, packages in SYSTEMS.items():
            debian_root.fetch(scratch / f"{system}.tar", packages)
        if "source" in names:
            fetch_maturin(scratch / "wheels")
    debian_root.enter_namespaces()
    for name in names:
        system, attempt = TRIES[name]
        with Root(scratch / "root", system and scratch / f"{system}.tar") as root:
            seconds = attempt(root, release, scratch)
        print(f"{name:<8} {seconds:6.1f} s from the file to the first token, and removed again", flush=True)


def only(folder, pattern):
    (path,) = folder.glob(pattern)
    return path


class Use:
    """How a system starts Corella: the words before its arguments, a user and variables."""

    def __init__(self, root, *words, user=0, environment=None):
        self.root, self.words = root, words
        self.how = {"user": user, "environment": environment}

    def serve(self, start, *arguments):
        """Serves, asks for a chat completion, and returns the seconds from the start to its first token."""
        command, variables = self.root.command([*self.words, *(arguments or ["serve"])], **self.how)
        server = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            log = []
            for line in server.stderr:
                log.append(line)
                if READY.match(line):
                    break
            else:
                raise SystemExit(f"the server ended:\n{''.join(log)}")
            seconds = first_token(start)
            addresses = listening()
        finally:
            server.terminate()
            server.communicate(timeout=60)
        assert server.returncode == 0, server.returncode
        return seconds, addresses

    def check(self):
        """Asks the command for its version, and talks in the terminal."""
        version = self.root.run(*self.words, "--version", **self.how)
        assert re.fullmatch(r"corella \d+\.\d+\.\d+\n", version), version
        answer = self.root.run(*self.words, "chat", "--max-tokens", "20", text=PROMPT, **self.how)
        assert len(answer.split()) > 2, answer


def first_token(start):
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/chat/completions",
        json.dumps(QUESTION).encode(),
        {"content-type": "application/json"},
    )
    seconds, text = None, ""
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: {"):
                choices = json.loads(line.removeprefix(b"data: "))["choices"]
                piece = choices[0]["delta"].get("content") if choices else None
                if piece and seconds is None:
                    seconds = time.monotonic() - start
                text += piece or ""
    assert len(text.split()) > 5, text
    return seconds


def listening():
    """Returns the addresses at which this network's programs listen, as /proc writes them."""
    lines = "".join(Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")).splitlines()
    return {words[1] for words in map(str.split, lines) if words[3] == "0A"}


def try_archive(root, release, _):
    home = root / HOME
    home.mkdir(parents=True)
    os.chown(home, USER_ID, USER_ID)
    root.lend(release, "release")
    start = time.monotonic()
    root.run("sh", "/release/install.sh", user=USER_ID)
    corella = Use(root, f"/{HOME}/.local/bin/corella", user=USER_ID)
    seconds, _ = corella.serve(start)
    corella.check()
    # A second installation is an upgrade.
    root.run("sh", "/release/install.sh", user=USER_ID)
    refuse_changed(root, release)
    root.run("sh", "/release/install.sh", "--remove", user=USER_ID)
    check_left(root, {f"{HOME}/.local"})
    return seconds


def refuse_changed(root, release):
    """Tries an archive with one changed byte."""
    changed = root / "srv/changed"
    changed.mkdir()
    archive = only(release, "corella-*-gnu.tar.gz")
    shutil.copy(release / "SHA256SUMS", changed)
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    (changed / archive.name).write_bytes(data)
    command, variables = root.command(["sh", "/release/install.sh", "--from", "/srv/changed"], USER_ID)
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 1 and "checksum" in done.stderr, done
    shutil.rmtree(changed)


def try_debian(root, release, _):
    package = only(release, "*.deb")
    shutil.copy(package, root / "tmp/corella.deb")
    start = time.monotonic()
    root.run("dpkg", "--install", "/tmp/corella.deb")
    seconds = use_service(root, start)
    changed = change_configuration(root)
    files = payload(release).system()
    (root / "tmp/newer.deb").write_bytes(debian_package(files, NEWER, commit_time())[1])
    root.run("dpkg", "--install", "/tmp/newer.deb")
    assert (root / CONFIGURATION).read_text() == changed
    root.run("dpkg", "--remove", "corella")
    check_left(root, {"etc/corella", CONFIGURATION, "var/cache/corella"})
    root.run("dpkg", "--purge", "corella")
    check_left(root, set())
    assert USER not in (root / "etc/passwd").read_text()
    return seconds


def try_rpm(root, release, scratch):
    # The packages on which it depends belong to another system.
    rpm = ["rpm", "--root", root.folder, "--dbpath", "/var/lib/rpm", "--nodeps"]

    def change(*words):
        # Debian's rpm warns against its use, so standard error is only shown after a failure.
        done = subprocess.run([*rpm, *words], capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"rpm {words[0]} failed: {done.stderr}")

    (root / "var/lib/rpm").mkdir(parents=True)
    start = time.monotonic()
    change("--install", only(release, "*.rpm"))
    seconds = use_service(root, start)
    changed = change_configuration(root)
    newer = scratch / "newer.rpm"
    newer.write_bytes(rpm_package(payload(release).system(), NEWER, commit_time())[1])
    change("--upgrade", newer)
    assert (root / CONFIGURATION).read_text() == changed
    change("--erase", "corella")
    saved = f"{CONFIGURATION}.rpmsave"
    assert (root / saved).read_text() == changed
    check_left(root, {"etc/corella", saved})
    assert USER not in (root / "etc/passwd").read_text()
    return seconds


def use_service(root, start):
    """Starts the program of the unit, as the unit's user."""
    unit = (root / "usr/lib/systemd/system/corella.service").read_text()
    said = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    (user,) = [line for line in (root / "etc/passwd").read_text().splitlines() if line.startswith(f"{said['User']}:")]
    user_id = int(user.split(":")[2])
    assert user_id != 0
    cache = root / "var/cache" / said["CacheDirectory"]
    cache.mkdir()
    os.chown(cache, user_id, user_id)
    environment = dict(variable.split("=", 1) for variable in said["Environment"].split())
    words = said["ExecStart"].split()
    corella = Use(root, words[0], user=user_id, environment=environment)
    seconds, addresses = corella.serve(start, *words[1:])
    assert addresses == {f"0100007F:{PORT:04X}"}, addresses
    corella.check()
    return seconds


def change_configuration(root):
    file = root / CONFIGURATION
    file.write_text(file.read_text() + "# mine\n")
    return file.read_text()


def payload(release):
    """Returns the files of a release's packages."""
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(only(release, "corella-*-gnu.tar.gz")) as archive:
        archive.extractall(scratch)
        return Payload(only(Path(scratch), "*/corella"), b"", b"")


def try_wheel(root, release, _):
    return try_python(root, only(release, "*.whl"), {})


def try_source(root, release, scratch):
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], check=True, capture_output=True, text=True).stdout.strip()
    home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    root.lend(sysroot, "rust")
    root.lend(home / "registry", "cargo/registry")
    root.lend(scratch / "wheels", "wheels")
    environment = {"CARGO_HOME": "/cargo", "CARGO_NET_OFFLINE": "true", "PIP_FIND_LINKS": "/wheels"}
    environment["PATH"] = "/rust/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    # The source must be complete. Less optimised code is enough to test that.
    environment["MATURIN_PEP517_ARGS"] = "--profile dev"
    return try_python(root, only(release, "corella_llm-*.tar.gz"), environment)


def try_python(root, package, environment):
    shutil.copy(package, root / "tmp")
    root.run("python3", "-m", "venv", "/opt/corella")
    root.before = root.files()
    pip = ["/opt/corella/bin/pip", "--disable-pip-version-check", "--no-cache-dir"]
    start = time.monotonic()
    root.run(*pip, "install", "--no-index", "--quiet", f"/tmp/{package.name}", environment=environment)
    corella = Use(root, "/opt/corella/bin/corella")
    seconds, _ = corella.serve(start)
    corella.check()
    root.run(*pip, "uninstall", "--yes", "corella-llm")
    left = {path for path in root.left_over() if "/__pycache__" not in f"/{path}"}
    assert not left, sorted(left)
    return seconds


def fetch_maturin(folder):
    """Fetches the packages with which pip builds the source package."""
    versions = (Path(__file__).parent / "requirements.lock").read_text()
    (maturin,) = re.findall(r"^maturin==.*$", versions, re.MULTILINE)
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, maturin]
    subprocess.run([*fetch, "--only-binary=:all:"], check=True)


def try_image(root, release, _):
    start = time.monotonic()
    with tarfile.open(only(release, "*-image.tar")) as image:

        def read(digest):
            return image.extractfile(f"blobs/sha256/{digest.removeprefix('sha256:')}")

        (described,) = json.load(image.extractfile("index.json"))["manifests"]
        manifest = json.load(read(described["digest"]))
        config = json.load(read(manifest["config"]["digest"]))["config"]
        for layer in manifest["layers"]:
            unpack = ["tar", "--extract", "--gzip", "--keep-directory-symlink", "--directory", root.folder]
            subprocess.run(unpack, input=read(layer["digest"]).read(), check=True)
    (user,) = set(config["User"].split(":"))
    environment = {**dict(variable.split("=", 1) for variable in config["Env"]), "HOME": "/"}
    corella = Use(root, *config["Entrypoint"], user=int(user), environment=environment)
    seconds, _ = corella.serve(start, *config["Cmd"])
    corella.check()
    return seconds


def check_left(root, promised):
    left = root.left_over()
    assert left == promised, f"left over: {sorted(left)}, promised: {sorted(promised)}"


TRIES = {
    "archive": ("plain", try_archive),
    "deb": ("plain", try_debian),
    "rpm": ("plain", try_rpm),
    "wheel": ("python", try_wheel),
    "image": (None, try_image),
    "source": ("compiler", try_source),
}

if __name__ == "__main__":
    main()
